# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Files that are whole or absent: written beside their place, flushed, then renamed into it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

CHUNK_BYTES = 1 << 20


def sha256_bytes(content: bytes) -> str:
    """The hex sha256 of ``content``."""
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The hex sha256 of a file, read in pieces of 1 MiB.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Flush a directory, so that a rename in it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(
    path: str | os.PathLike[str], content: bytes, mode: int = 0o644, owner: tuple[int, int] | None = None
) -> None:
    """Put ``content`` at ``path`` by a rename; a reader sees the old file or the new one, never a part.

    Args:
        mode: permission bits, set before the file gets its name (a secret is never readable in between).
        owner: numeric user and group, unchanged where None.

    Raises:
        OSError: the directory is missing or full; the old file is untouched then.
    """
    target = Path(path)
    descriptor, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            if owner is not None:
                os.fchown(stream.fileno(), *owner)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def replace_link(link: str | os.PathLike[str], destination: str) -> None:
    """Make ``link`` a symbolic link to ``destination`` by one rename, whatever it pointed to before.

    Raises:
        OSError: the directory is missing, full or ``link`` is a directory.
    """
    place = Path(link)
    beside = place.parent / f".{place.name}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(destination)
    os.replace(beside, place)
    sync_directory(place.parent)
