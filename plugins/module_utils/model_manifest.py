# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a staged model consists of: `models/<name>/manifest.json`, written when staging, obeyed on hosts."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .atomic import CHUNK_BYTES

FORMAT = 1
MANIFEST = "manifest.json"

# One path component that no shell, URL or systemd path reads as anything else.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelError(RuntimeError):
    """Something about a model is wrong; the message says what, where and what to do."""


@dataclass(frozen=True)
class FileEntry:
    """Hex sha256 and size in bytes of one file."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Files of one model by their path below the model's directory, and where they came from."""

    files: dict[str, FileEntry]
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """The manifest as it lies on disk: the same content is the same bytes, so its sha256 names the model."""
        files = {path: {"sha256": entry.sha256, "size": entry.size} for path, entry in self.files.items()}
        document = {"format": FORMAT, "files": files, "source": self.source}
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class Origin:
    """One file where it comes from.

    Attributes:
        size: bytes.
        version: changes with the content; equal versions need no second look.
        sha256, git_oid: what the content must hash to, where the origin says so.
    """

    size: int
    version: str
    sha256: str | None = None
    git_oid: str | None = None


def check_name(name: str) -> str:
    """Return ``name`` if it can be a directory's name below /models and in a URL.

    Raises:
        ModelError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ModelError(
            f"Model name {name!r}: use letters, digits, '.', '_' and '-', beginning with a letter or digit "
            "(it becomes a directory below /models and part of a URL)."
        )
    return name


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Read a manifest and refuse one that could write outside the model's directory.

    Raises:
        ModelError: not JSON, another format, or an entry that is no safe relative path, sha256 and size.
    """
    remedy = "Stage the model again and publish the bundle anew."
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{where} is no JSON ({error}). {remedy}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise ModelError(f"{where} has format {found!r}; this collection reads format {FORMAT}. {remedy}")
    given = document.get("files")
    if not isinstance(given, dict) or not given:
        raise ModelError(f"{where} lists no files. {remedy}")
    files: dict[str, FileEntry] = {}
    for path, entry in given.items():
        sha256 = entry.get("sha256") if isinstance(entry, dict) else None
        size = entry.get("size") if isinstance(entry, dict) else None
        known = isinstance(sha256, str) and _SHA256.fullmatch(sha256) and isinstance(size, int) and size >= 0
        if not known or not is_safe_path(path):
            raise ModelError(f"{where}: the entry {path!r} is no relative path with sha256 and size. {remedy}")
        files[path] = FileEntry(str(sha256), int(str(size)))
    source = document.get("source")
    return Manifest(files, source if isinstance(source, dict) else {})


def is_safe_path(path: str) -> bool:
    """True for a plain relative path: no '..', no empty part, no control character, not the manifest itself."""
    parts = path.split("/")
    return (
        all(part not in ("", ".", "..") for part in parts)
        and path not in (MANIFEST, f".{MANIFEST}")
        and "\\" not in path
        and path.isprintable()
        and len(path.encode()) < 1024
    )


def walk_files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every entry below ``directory`` that is no directory, with its relative path and its own stat (links as such)."""
    pending = [(directory, "")]
    while pending:
        place, prefix = pending.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), f"{path}/"))
                else:
                    yield path, entry.stat(follow_symlinks=False)


def git_oid(path: Path) -> str:
    """What git calls this content: the Hub gives no other hash for files outside LFS."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def readable_size(size: float) -> str:
    """Bytes for a person: 512 B, 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
