# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""Programs that a build runs: with nothing of the host's environment, and never longer than the build itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


class VenvError(RuntimeError):
    """uv, the interpreter or the environment could not be made; the message says what, where and what to do."""


class DiskFull(VenvError):
    """The file system has no room left."""


def die_with_parent() -> None:
    """Runs in a child before exec: the kernel kills it with its parent.

    A module that is killed releases the host's lock at once; a uv left behind would go on writing into the directory
    that the next run clears.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def clean_environment(**more: str) -> dict[str, str]:
    """An environment with nothing of the host's: no UV_*, PIP_*, PYTHON* or proxy reaches uv or Python."""
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **more}


def run(command: Sequence[str | os.PathLike[str]], environment: Mapping[str, str], cwd: Path | None = None) -> str:
    """Run a program that dies with this process; its standard output.

    Raises:
        VenvError: it failed; the message is what it said on standard error.
    """
    try:
        done = subprocess.run(
            [os.fspath(word) for word in command],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise VenvError(f"{command[0]} cannot be run: {error.strerror}") from error
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        raise VenvError(said or f"{command[0]} ended with status {done.returncode}")
    return done.stdout.decode(errors="replace")


def flush_behind(directory: Path) -> None:
    """Let the kernel write the file system of ``directory`` out, without waiting for it.

    A release is gigabytes; until they are on the disk a power cut can take parts of it, which the comparison with the
    manifest finds. Waiting would double the time of an install.
    """
    null = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (0, 1, 2)]
    with contextlib.suppress(OSError):  # no sync program: the kernel writes it out within half a minute
        os.posix_spawnp("sync", ["sync", "--file-system", os.fspath(directory)], clean_environment(), file_actions=null)
