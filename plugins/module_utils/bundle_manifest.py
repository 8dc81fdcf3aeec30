# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a bundle consists of: ``manifest.json`` at its top, written last by the builder, obeyed by the mirror."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_manifest import is_safe_path, walk_files

FORMAT = 1
MANIFEST = "manifest.json"
WORK = ".work"  # what the builder keeps beside the bundle's files: state, unfinished files; never carried or served
PARTS = ("wheels", "simple", "releases", "python", "models")

_SHA256 = re.compile(r"[0-9a-f]{64}")


class BundleManifestError(ValueError):
    """A manifest that is none, or names a path outside the bundle; the message says where and what to do."""


@dataclass(frozen=True)
class BundleFile:
    """Hex sha256 and size in bytes of one file; of a wheel also the bytes that it takes unpacked."""

    sha256: str
    size: int
    unpacked: int | None = None


@dataclass(frozen=True)
class BundleManifest:
    """Every file of a bundle but the manifest itself, by its path."""

    files: Mapping[str, BundleFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """The manifest as it lies on disk: equal bundles have equal manifests, and its sha256 names the bundle."""
        files: dict[str, dict[str, Any]] = {}
        for path, entry in self.files.items():
            files[path] = {"sha256": entry.sha256, "size": entry.size}
            if entry.unpacked is not None:
                files[path]["unpacked"] = entry.unpacked
        return (json.dumps({"format": FORMAT, "files": files}, indent=0, sort_keys=True) + "\n").encode()


def manifest_id(raw: bytes) -> str:
    """The name of a published bundle: the first 12 hex digits of its manifest's sha256."""
    return hashlib.sha256(raw).hexdigest()[:12]


def parse_bundle_manifest(raw: bytes, where: str) -> BundleManifest:
    """Read a manifest.

    Raises:
        BundleManifestError: not JSON, another format, or an entry that is no safe path with sha256 and size.
    """
    remedy = "Build the bundle anew with playbooks/bundle.yml."
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise BundleManifestError(f"{where} is no JSON ({error}). {remedy}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise BundleManifestError(f"{where} has format {found!r}, this collection reads format {FORMAT}. {remedy}")
    given = document.get("files")
    if not isinstance(given, dict) or not given:
        raise BundleManifestError(f"{where} lists no files. {remedy}")
    files = {}
    for path, entry in given.items():
        sha256 = entry.get("sha256") if isinstance(entry, dict) else None
        size = entry.get("size") if isinstance(entry, dict) else None
        right = isinstance(sha256, str) and _SHA256.fullmatch(sha256) and isinstance(size, int) and size >= 0
        if not right or not is_safe_path(path) or path.split("/", 1)[0] not in PARTS:
            raise BundleManifestError(f"{where}: {path!r} is no path of a bundle with sha256 and size. {remedy}")
        files[path] = BundleFile(str(sha256), int(str(size)), entry.get("unpacked"))
    return BundleManifest(files)


def bundle_files(directory: Path) -> Iterator[tuple[str, int, int]]:
    """Path, size and mtime_ns of every file of a bundle but its manifest; a link or device has size -1."""
    for top in sorted(directory.iterdir()) if directory.is_dir() else []:
        if top.name in {WORK, MANIFEST}:
            continue
        if top.is_dir() and not top.is_symlink():
            for path, status in walk_files(top):
                regular = (status.st_mode & 0o170000) == 0o100000
                yield f"{top.name}/{path}", status.st_size if regular else -1, status.st_mtime_ns
        else:
            yield top.name, -1, 0
