# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The mirror's side of publishing: what is missing, taking it in, verifying every file, one rename.

``<root>/bundles/<id>/`` published bundles · ``<root>/current`` link to the one that is served ·
``<root>/incoming/<id>/`` a bundle on its way in · ``<root>/records/<id>.json`` size and time stamp of each file of a
published bundle, from which an unchanged one is recognised without reading it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .atomic import CHUNK_BYTES, replace_link, sha256_bytes, sha256_file, write_file
from .bundle_manifest import MANIFEST, BundleManifest, bundle_files, manifest_id, parse_bundle_manifest
from .model_manifest import readable_size

SPARE_BYTES = 256 << 20
_HASHING_THREADS = 4
_READABLE = stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH


class PublishError(RuntimeError):
    """Nothing was published, and what is served stays; the message says what is wrong and what to do."""


@dataclass
class Standing:
    """How a mirror stands to one bundle.

    Attributes:
        published: it is served and every file is as it was when it was verified.
        damaged: files of the served bundle that are not (any more) what its manifest says.
    """

    published: bool = False
    damaged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Missing:
    """One file that must be carried; ``have`` bytes of it arrived in an earlier run."""

    path: str
    size: int
    sha256: str
    have: int


@dataclass(frozen=True)
class Segment:
    """A part of a file within a carried piece."""

    path: str
    offset: int
    length: int


class Mirror:
    """The directory that is served, and what is beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.current = root / "current"

    def standing(self, digest: str, *, full: bool = False) -> Standing:
        """Whether the bundle with this manifest is what is served; reads nothing but stats unless ``full``."""
        name = digest[:12]
        if self.served() != name:
            return Standing()
        place = self.bundle(name)
        try:
            raw = (place / MANIFEST).read_bytes()
        except OSError:
            return Standing(damaged=[MANIFEST])
        if sha256_bytes(raw) != digest:
            return Standing(damaged=[MANIFEST])
        manifest = parse_bundle_manifest(raw, str(place / MANIFEST))
        record = self._record(name)
        damaged = []
        seen = set()
        for path, size, mtime_ns in bundle_files(place):
            seen.add(path)
            if path not in manifest.files or record.get(path) != [size, mtime_ns]:
                damaged.append(path)
        damaged += [path for path in manifest.files if path not in seen]
        if full:
            suspect = set(damaged)
            damaged += wrong_files(place, manifest, [path for path in manifest.files if path not in suspect])
        return Standing(published=not damaged, damaged=sorted(damaged))

    def served(self) -> str | None:
        """Name of the bundle that is served."""
        with suppress(OSError):
            return Path(os.readlink(self.current)).name
        return None

    def bundle(self, name: str) -> Path:
        return self.root / "bundles" / name

    def incoming(self, name: str) -> Path:
        return self.root / "incoming" / name

    def missing(self, manifest: BundleManifest, name: str, damaged: Sequence[str] = ()) -> list[Missing]:
        """What must be carried, with what other bundles of this mirror hold taken into account; changes nothing."""
        found = self._by_hash(damaged)
        result = []
        for path, entry in sorted(manifest.files.items()):
            have = _size(self.incoming(name) / path)
            if have == entry.size and have is not None:
                continue
            if (entry.sha256, entry.size) in found:
                continue
            # A file that is too long is no part of this one.
            result.append(Missing(path, entry.size, entry.sha256, have if have and have < entry.size else 0))
        return result

    def begin(self, raw: bytes, damaged: Sequence[str] = ()) -> list[Missing]:
        """Make ready for a bundle: link what is here already, forget other unfinished ones, and say what is missing.

        Raises:
            PublishError: the disk has no room for what is missing.
        """
        manifest = parse_bundle_manifest(raw, "the bundle's manifest")
        name = manifest_id(raw)
        missing = self.missing(manifest, name, damaged)
        self.check_space(missing)
        place = self.incoming(name)
        place.mkdir(parents=True, exist_ok=True, mode=0o755)
        for other in place.parent.iterdir():
            if other != place:
                remove_tree(other)
        found = self._by_hash(damaged)
        carried = {entry.path for entry in missing}
        for path, entry in manifest.files.items():
            target = place / path
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            if path in carried:
                if (_size(target) or 0) >= entry.size:
                    target.unlink(missing_ok=True)
            elif _size(target) != entry.size:
                target.unlink(missing_ok=True)
                os.link(found[entry.sha256, entry.size], target)
        write_file(place / MANIFEST, raw)
        return missing

    def check_space(self, missing: Sequence[Missing]) -> None:
        """Whether what is missing fits.

        Raises:
            PublishError: it does not.
        """
        place = self.root
        while not place.exists():
            place = place.parent
        needed = sum(entry.size - entry.have for entry in missing)
        free = shutil.disk_usage(place).free
        if needed and needed + SPARE_BYTES > free:
            raise PublishError(
                f"{readable_size(needed)} of the bundle are not on the mirror yet, and {place} has "
                f"{readable_size(free)} free, of which {readable_size(SPARE_BYTES)} must stay. "
                f"Free {readable_size(needed + SPARE_BYTES - free)} there, lower wheel_mirror_keep, "
                "or set wheel_mirror_root to a larger file system."
            )

    def absorb(self, name: str, piece: Path, segments: Sequence[Segment]) -> None:
        """Write a carried piece into the files that it holds parts of, then remove it.

        Raises:
            PublishError: the piece does not continue what has arrived; nothing is lost, run again.
        """
        place = self.incoming(name)
        descriptor = os.open(piece, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as source:
            if os.fstat(descriptor).st_size != sum(segment.length for segment in segments):
                raise PublishError(f"{piece} arrived incomplete. Run again; what has arrived is kept.")
            for segment in segments:
                target = place / segment.path
                have = _size(target) or 0
                if have < segment.offset:
                    raise PublishError(
                        f"{segment.path} has {have} bytes on the mirror where {segment.offset} were expected: "
                        "another run publishes too? Run again; what has arrived is kept."
                    )
                with target.open("r+b" if target.exists() else "xb") as sink:
                    sink.seek(segment.offset)
                    sink.truncate()
                    left = segment.length
                    while left > 0:
                        part = source.read(min(left, CHUNK_BYTES))
                        sink.write(part)
                        left -= len(part)
        piece.unlink()

    def finish(self, name: str, keep: int) -> list[str]:
        """Verify every file, publish by one rename of the link, and remove bundles beyond the newest ``keep``.

        Returns:
            Names of the bundles that were removed.

        Raises:
            PublishError: a file is wrong, missing or unexpected. It is named and, where wrong, removed, so that the
                next run carries it again; nothing is published.
        """
        place = self.incoming(name)
        raw = (place / MANIFEST).read_bytes()
        manifest = parse_bundle_manifest(raw, str(place / MANIFEST))
        if manifest_id(raw) != name:
            raise PublishError(f"{place / MANIFEST} is another bundle's manifest. Run again.")
        present = {path: size for path, size, _unused in bundle_files(place)}
        missing = sorted(set(manifest.files) - set(present))
        unexpected = sorted(set(present) - set(manifest.files))
        wrong = wrong_files(place, manifest, [path for path in manifest.files if path in present])
        if missing or unexpected or wrong:
            for path in wrong:
                self._forget(place / path)
            for path in unexpected:
                (place / path).unlink()
            parts = [
                f"{path} is {what}"
                for paths, what in ((wrong, "wrong"), (missing, "missing"), (unexpected, "unexpected"))
                for path in paths
            ]
            raise PublishError(f"Nothing is published: {'; '.join(parts)}. Run again to carry these files anew.")
        record: dict[str, list[int]] = {}
        for path in manifest.files:
            target = place / path
            os.chmod(target, 0o644)
            with target.open("rb") as stream:
                os.fsync(stream.fileno())
            status = target.stat()
            record[path] = [status.st_size, status.st_mtime_ns]
        for folder in (self.root, *(Path(found) for found, _unused, _unused in os.walk(place))):
            os.chmod(folder, _READABLE)  # whatever the umask of this run: the web server must be able to read
        (self.root / "records").mkdir(exist_ok=True)
        write_file(self.root / "records" / f"{name}.json", json.dumps(record, sort_keys=True).encode())
        published = self.bundle(name)
        published.parent.mkdir(exist_ok=True)
        os.chmod(published.parent, _READABLE)
        if published.exists():
            # Damaged, or the same bundle from an earlier time: aside first, so that the link never leads to half a one.
            aside = published.with_name(f".{name}.old")
            remove_tree(aside)
            os.replace(published, aside)
            os.replace(place, published)
            remove_tree(aside)
        else:
            os.replace(place, published)
        replace_link(self.current, f"bundles/{name}")
        return self.prune(keep)

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest ``keep`` bundles; the one that is served stays whatever its age."""
        served = self.served()
        bundles = []
        for path in (self.root / "bundles").iterdir():
            if path.name.startswith("."):
                remove_tree(path)  # what a run left that was killed while it exchanged a bundle
            else:
                bundles.append(path)
        bundles.sort(key=lambda path: (path.name == served, path.stat().st_mtime_ns), reverse=True)
        removed = []
        for place in bundles[max(keep, 1) :]:
            remove_tree(place)
            (self.root / "records" / f"{place.name}.json").unlink(missing_ok=True)
            removed.append(place.name)
        return removed

    def remove(self) -> bool:
        """Take everything back: link, bundles, records and what is under way. Returns whether there was anything."""
        names = ("current", "bundles", "incoming", "records")
        there = [self.root / name for name in names if os.path.lexists(self.root / name)]
        for place in there:
            if place.is_symlink() or not place.is_dir():
                place.unlink()
            else:
                remove_tree(place)
        with suppress(OSError):
            self.root.rmdir()
        return bool(there)

    def _record(self, name: str) -> dict[str, list[int]]:
        with suppress(OSError, ValueError):
            return dict(json.loads((self.root / "records" / f"{name}.json").read_bytes()))
        return {}

    def _by_hash(self, damaged: Sequence[str] = ()) -> dict[tuple[str, int], Path]:
        """Files of published bundles whose stat is still the recorded one, by hash and size."""
        found: dict[tuple[str, int], Path] = {}
        served = self.served()
        bundles = self.root / "bundles"
        # By inode, since the same damaged file may be linked into an older bundle under another record.
        wrong = {_inode(self.bundle(served) / path) for path in damaged} if served else set()
        for place in sorted(bundles.iterdir()) if bundles.is_dir() else []:
            record = self._record(place.name)
            try:
                manifest = parse_bundle_manifest((place / MANIFEST).read_bytes(), str(place))
            except (OSError, ValueError):
                continue
            for path, entry in manifest.files.items():
                with suppress(OSError):
                    status = (place / path).lstat()
                    known = record.get(path) == [status.st_size, status.st_mtime_ns]
                    if stat.S_ISREG(status.st_mode) and known and status.st_ino not in wrong:
                        found[entry.sha256, entry.size] = place / path
        return found

    def _forget(self, wrong: Path) -> None:
        """Remove a wrong file, and its twins in older bundles from their records: they must not be linked again."""
        inode = wrong.stat().st_ino
        wrong.unlink()
        records = self.root / "records"
        for path in records.glob("*.json") if records.is_dir() else []:
            record = self._record(path.stem)
            twins = [name for name in record if _inode(self.bundle(path.stem) / name) == inode]
            if twins:
                write_file(
                    path, json.dumps({k: v for k, v in record.items() if k not in twins}, sort_keys=True).encode()
                )


def wrong_files(place: Path, manifest: BundleManifest, paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` below ``place`` that are no regular file with the manifest's size and sha256; all are read."""

    def is_wrong(path: str) -> bool:
        try:
            status = (place / path).lstat()
            return (
                not stat.S_ISREG(status.st_mode)
                or status.st_size != manifest.files[path].size
                or sha256_file(place / path) != manifest.files[path].sha256
            )
        except OSError:
            return True

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return sorted(path for path, wrong in zip(paths, pool.map(is_wrong, paths), strict=True) if wrong)


def remove_tree(place: Path) -> None:
    """Remove a directory or file, if it is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _size(path: Path) -> int | None:
    with suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _inode(path: Path) -> int | None:
    with suppress(OSError):
        return path.lstat().st_ino
    return None


def cut(missing: Sequence[Missing], piece_bytes: int) -> list[list[Segment]]:
    """How the missing bytes are carried: pieces of at most ``piece_bytes``, each of one or more parts of files."""
    pieces: list[list[Segment]] = []
    current: list[Segment] = []
    room = piece_bytes
    for entry in missing:
        offset = entry.have
        while True:
            length = min(entry.size - offset, room)
            current.append(Segment(entry.path, offset, length))
            offset += length
            room -= length
            if room == 0:
                pieces.append(current)
                current, room = [], piece_bytes
            if offset >= entry.size:
                break
    if current:
        pieces.append(current)
    return pieces


def as_missing(entries: Sequence[Mapping[str, Any]]) -> list[Missing]:
    """What a mirror answered, as values."""
    return [Missing(str(e["path"]), int(e["size"]), str(e["sha256"]), int(e["have"])) for e in entries]
