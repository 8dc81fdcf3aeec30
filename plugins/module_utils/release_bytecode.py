# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""Bytecode of a release, compiled once by its own interpreter on all cores.

The ``.pyc`` files are of the kind that is never compared with its source (PEP 552, unchecked hash): a release is not
edited, its bytecode is the same on every host, and it stays valid when a file's time changes (a restored backup, a
wheel that was unpacked again). The path inside is relative, so that it does not name the directory of the build;
Python puts the real one in when it imports.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .venv_process import clean_environment, die_with_parent

# Runs in the release's interpreter (-I: nothing of the host's environment; -S: no site-packages, no .pth file).
# gc is switched off: compiling only builds trees, and the collector walked them for a fifth of the time.
_WORKER = r"""
import gc, os, py_compile, sys
gc.disable()
os.chdir(sys.argv[1])
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
done = 0
for path in sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\0"):
    if not path:
        continue
    try:
        py_compile.compile(path, dfile=path, doraise=True, invalidation_mode=mode)
    except (py_compile.PyCompileError, SyntaxError, ValueError, RecursionError, UnicodeError) as error:
        # Wheels carry templates and sources of another Python; importing them would fail as well.
        sys.stdout.buffer.write(path.encode("utf-8", "surrogateescape") + b"\0")
    done += 1
    if done % 500 == 0:
        gc.collect()
"""


class BytecodeError(RuntimeError):
    """The compiling process failed; the message holds what it said."""


def compile_bytecode(
    python: Path, site_packages: Path, sources: Sequence[str], workers: int | None = None
) -> list[str]:
    """Compile each source beside itself; returns the paths that are no Python of this version.

    Args:
        sources: paths relative to ``site_packages``.
        workers: processes, default one per core.

    Raises:
        BytecodeError: a process failed (a full disk, most likely).
    """
    if not sources:
        return []
    count = min(workers or os.cpu_count() or 1, len(sources))
    # Equal shares by size: the time goes with the length of the text.
    by_size = sorted(sources, key=lambda path: (site_packages / path).stat().st_size, reverse=True)
    shares: list[list[str]] = [[] for _unused in range(count)]
    loads = [0] * count
    for path in by_size:
        least = loads.index(min(loads))
        shares[least].append(path)
        loads[least] += (site_packages / path).stat().st_size + 2000
    running = [
        subprocess.Popen(
            [os.fspath(python), "-I", "-S", "-c", _WORKER, os.fspath(site_packages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            preexec_fn=die_with_parent,  # noqa: PLW1509 - forked while no thread runs, calls prctl alone
        )
        for _unused in shares
    ]
    failed: list[str] = []
    try:
        for process, share in zip(running, shares, strict=True):
            if process.stdin is None:  # for the type checker: it is a pipe
                continue
            process.stdin.write("\0".join(share).encode("utf-8", "surrogateescape"))
            process.stdin.close()
            process.stdin = None
        for process in running:
            out, err = process.communicate()
            if process.returncode != 0:
                said = err.decode(errors="replace").strip().splitlines()
                raise BytecodeError(said[-1] if said else f"ended with status {process.returncode}")
            failed.extend(path for path in out.decode("utf-8", "surrogateescape").split("\0") if path)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return sorted(failed)


def bytecode_path(source: str, tag: str) -> str:
    """Where the bytecode of a source lies.

    >>> bytecode_path("vllm/config.py", "cpython-311")
    'vllm/__pycache__/config.cpython-311.pyc'
    """
    folder, _unused, name = source.rpartition("/")
    return f"{folder}{'/' if folder else ''}__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
