# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One run at a time changes a host. The kernel drops the lock with its holder, so a dead run holds nothing."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_PATH = Path("/run/lock/onprem-vllm.lock")


class HostLocked(RuntimeError):
    """Another run holds this host; the message says which and since when."""


@contextmanager
def host_lock(purpose: str, wait_s: float = 30.0, path: Path = LOCK_PATH) -> Iterator[None]:
    """Hold the host's lock while the block runs.

    Args:
        purpose: what the holder does, told to whoever has to wait ("release 0.28.0-cpu").
        wait_s: seconds to wait for another holder.

    Raises:
        HostLocked: another process still holds it after ``wait_s``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise HostLocked(_held_by(path)) from None
                time.sleep(0.2)
        note = {
            "pid": os.getpid(),
            "purpose": purpose,
            "from": _started_from() or "this host",
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _started_from() -> str:
    """The address of the SSH client that this process comes from, empty where there is none.

    sudo takes the variable away; a process above it has it still.
    """
    process = os.getpid()
    while process > 1:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            status = Path(f"/proc/{process}/stat").read_bytes()
        except OSError:
            break
        for variable in variables:
            if variable.startswith(b"SSH_CONNECTION="):
                return variable.partition(b"=")[2].split(b" ")[0].decode()
        process = int(status.rpartition(b")")[2].split()[1])
    return ""


def _held_by(path: Path) -> str:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        holder = f"{note['purpose']} (process {note['pid']}, started from {note['from']} at {note['since']})"
    except (OSError, ValueError, KeyError):
        holder = "another run"
    return f"This host is being changed by {holder}. Wait for it to end and run again."
