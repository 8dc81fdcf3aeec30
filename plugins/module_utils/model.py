# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Bring model directories of one host to what their manifests say, from the mirror or a mounted share.

A model is assembled in `.incoming-<name>` beside its place (what is there already by hard links) and exchanged whole,
so that a process that serves it keeps a complete model at every moment, and a killed run leaves nothing half.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from .atomic import CHUNK_BYTES, sha256_bytes, sha256_file, sync_directory, write_file
from .download import DownloadError, download
from .model_manifest import (
    FORMAT,
    MANIFEST,
    FileEntry,
    Manifest,
    ModelError,
    check_name,
    parse_manifest,
    readable_size,
    walk_files,
)

RECORD = ".manifest.json"
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
# Kept free after a fetch: a file system at 100 % takes the rest of the host with it.
SPARE_BYTES = 256 << 20


class Unreachable(ModelError):
    """The source does not answer or does not have the model."""


class Source(Protocol):
    """Where models come from."""

    def manifest(self, name: str) -> bytes:
        """The bytes of the model's manifest. Raises Unreachable."""

    def fetch(self, name: str, path: str, entry: FileEntry, destination: Path) -> None:
        """Put one file, verified, at ``destination``; go on where an earlier try stopped. Raises ModelError."""


@dataclass(frozen=True)
class Mirror:
    """Models below `<url>/models/`."""

    url: str

    def _at(self, name: str, path: str) -> str:
        return f"{self.url.rstrip('/')}/models/{name}/{quote(path)}"

    def manifest(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="onprem-vllm-") as scratch:
            place = Path(scratch, MANIFEST)
            try:
                download(self._at(name, MANIFEST), place, None, attempts=3, timeout_s=20)
            except DownloadError as error:
                raise Unreachable(
                    f"Model {name}: the mirror has no manifest of it ({error}). "
                    "Is it in the bundle, and is the bundle published?"
                ) from None
            return place.read_bytes()

    def fetch(self, name: str, path: str, entry: FileEntry, destination: Path) -> None:
        try:
            download(self._at(name, path), destination, entry.sha256, entry.size, mode=FILE_MODE)
        except DownloadError as error:
            raise ModelError(
                f"{error}. What has arrived is kept, and the next run goes on from there. {error.mirror_remedy}"
            ) from None


@dataclass(frozen=True)
class Share:
    """Models below a mounted directory laid out like a bundle's `models/`."""

    directory: Path

    def manifest(self, name: str) -> bytes:
        place = self.directory / name / MANIFEST
        try:
            return place.read_bytes()
        except OSError as error:
            raise Unreachable(
                f"Model {name}: {place} cannot be read ({error.strerror}). Is the share mounted and the model on it?"
            ) from None

    def fetch(self, name: str, path: str, entry: FileEntry, destination: Path) -> None:
        origin = self.directory / name / path
        try:
            copy_verified(origin, destination, entry)
        except OSError as error:
            raise ModelError(f"copying {origin} failed: {error.strerror}.") from None


def copy_verified(origin: Path, destination: Path, entry: FileEntry) -> None:
    """Copy a file, a part from an earlier try first continued, and name it only when its sha256 is right.

    Raises:
        ModelError: the origin is not the file that the manifest promises.
        OSError: unreadable origin or full disk; the part stays.
    """
    part = destination.with_name(f"{destination.name}.part")
    for offset in (min(part.stat().st_size, entry.size) if part.exists() else 0, 0):
        with origin.open("rb") as source, part.open("r+b" if offset else "wb") as target:
            source.seek(offset)
            target.seek(offset)
            target.truncate()
            while piece := source.read(CHUNK_BYTES):
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        if part.stat().st_size == entry.size and sha256_file(part) == entry.sha256:
            os.chmod(part, FILE_MODE)
            os.replace(part, destination)
            return
        if not offset:
            break
    part.unlink()
    raise ModelError(f"{origin} is not the file its manifest promises (sha256 {entry.sha256}). Stage the model again.")


@dataclass(frozen=True)
class Wanted:
    """One entry of `plan.models`."""

    name: str
    path: Path
    manifest_sha256: str | None = None
    present: bool = True

    @classmethod
    def from_plan(cls, name: str, path: str | None, root: str, manifest_sha256: str | None, state: str) -> Wanted:
        """Check an entry. Raises ModelError."""
        check_name(name)
        place = Path(path or f"{root.rstrip('/')}/{name}")
        if not place.is_absolute() or place.name != name or ".." in place.parts or len(place.parts) < 3:
            raise ModelError(f"Model {name}: its path must be <directory>/{name}, absolute; it is {place}.")
        return cls(name, place, manifest_sha256 or None, state == "present")

    @property
    def incoming(self) -> Path:
        return self.path.with_name(f".incoming-{self.name}")

    @property
    def outgoing(self) -> Path:
        return self.path.with_name(f".outgoing-{self.name}")


@dataclass
class Assessment:
    """What a host has of a model, and what is to be done."""

    wanted: Wanted
    manifest: Manifest | None = None  # None: nothing known yet (check mode before the mirror stands), or not wanted
    manifest_sha256: str = ""
    existed: bool = False
    good: dict[str, int] = field(default_factory=dict)  # path -> mtime_ns
    faults: dict[str, str] = field(default_factory=dict)  # path -> what is wrong; to be fetched
    extras: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)  # wrong owner or mode
    leftovers: list[Path] = field(default_factory=list)
    record_is_right: bool = False
    updated: bool = False
    note: str = ""

    @property
    def changed(self) -> bool:
        if not self.wanted.present:
            return self.existed or bool(self.leftovers)
        if self.manifest is None:
            return not self.existed
        return bool(self.faults or self.extras or self.loose or self.leftovers) or not self.record_is_right

    @property
    def action(self) -> str:
        """One word for the report."""
        if not self.changed:
            return "unchanged"
        if not self.wanted.present:
            return "removed"
        if not self.existed:
            return "staged"
        if self.updated:
            return "updated"
        return "repaired" if self.faults or self.extras or self.loose else "recorded"

    @property
    def fetch_bytes(self) -> int:
        return sum(self.manifest.files[path].size for path in self.faults) if self.manifest else 0


@dataclass(frozen=True)
class _Record:
    manifest: Manifest
    manifest_sha256: str
    mtimes: dict[str, int]


def _read_record(directory: Path) -> _Record | None:
    try:
        raw = (directory / RECORD).read_bytes()
        manifest = parse_manifest(raw, str(directory / RECORD))
        document = json.loads(raw)
        mtimes = {path: int(entry["mtime_ns"]) for path, entry in document["files"].items()}
        return _Record(manifest, str(document["manifest_sha256"]), mtimes)
    except (OSError, ModelError, KeyError, TypeError, ValueError):
        return None  # missing or damaged: the files are hashed instead


def _record_bytes(manifest: Manifest, manifest_sha256: str, mtimes: dict[str, int]) -> bytes:
    files = {
        path: {"sha256": entry.sha256, "size": entry.size, "mtime_ns": mtimes[path]}
        for path, entry in manifest.files.items()
    }
    document = {"format": FORMAT, "manifest_sha256": manifest_sha256, "source": manifest.source, "files": files}
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def assess(
    wanted: Wanted,
    source: Source | None,
    *,
    full: bool = False,
    owner: tuple[int, int] = (0, 0),
    predict: bool = False,
    workers: int = 4,
) -> Assessment:
    """Compare a model's directory with its manifest; nothing is changed.

    Args:
        full: hash every file; otherwise size and time stamp decide, and only what differs is hashed.
        owner: numeric user and group that everything must belong to.
        predict: an unreachable source is no error (check mode, where the mirror may not exist yet).

    Raises:
        ModelError: no manifest can be had, or it is not the one that the plan names.
    """
    place = wanted.path
    found = Assessment(wanted, existed=place.is_dir() and not place.is_symlink())
    found.leftovers = [left for left in (wanted.incoming, wanted.outgoing) if left.is_dir()]
    if (place.exists() or place.is_symlink()) and not found.existed:
        raise ModelError(f"Model {wanted.name}: {place} is in the way (no directory of its own). Move it away.")
    if not wanted.present:
        return found
    record = _read_record(place) if found.existed else None
    _choose_manifest(found, record, source, predict=predict)
    if found.manifest is None:
        return found
    found.updated = record is not None and record.manifest_sha256 != found.manifest_sha256
    present = dict(walk_files(place)) if found.existed else {}
    unsure: list[str] = []
    for path, entry in found.manifest.files.items():
        status = present.get(path)
        if status is None:
            found.faults[path] = "is missing"
        elif not stat.S_ISREG(status.st_mode):
            found.faults[path] = "is no regular file"
        elif status.st_size != entry.size:
            was = record.manifest.files.get(path) if record else None
            cut = was == entry and status.st_size < entry.size
            found.faults[path] = f"{'is truncated: ' if cut else ''}has {status.st_size} bytes instead of {entry.size}"
        else:
            known = record is not None and record.manifest.files.get(path) == entry
            if full or not known or record is None or record.mtimes[path] != status.st_mtime_ns:
                unsure.append(path)
            else:
                found.good[path] = status.st_mtime_ns
    with ThreadPoolExecutor(workers) as pool:
        digests = pool.map(lambda path: sha256_file(place / path), unsure)
        for path, digest in zip(unsure, digests, strict=True):
            if digest == found.manifest.files[path].sha256:
                found.good[path] = present[path].st_mtime_ns
            else:
                found.faults[path] = "differs from the manifest (sha256)"
    found.extras = sorted(set(present) - set(found.manifest.files) - {RECORD})
    found.loose = _loose(place, [*found.good, *([RECORD] if RECORD in present else [])], present, owner)
    if record is not None and not found.faults:
        found.record_is_right = record == _Record(found.manifest, found.manifest_sha256, found.good)
    if found.manifest is not None and found.faults:
        found.leftovers = [left for left in found.leftovers if left != wanted.incoming]  # it is where this run goes on
    return found


def _choose_manifest(found: Assessment, record: _Record | None, source: Source | None, *, predict: bool) -> None:
    """The manifest that counts: the plan's, which needs no source once it is here, else the source's."""
    wanted = found.wanted
    if record and wanted.manifest_sha256 == record.manifest_sha256:
        found.manifest, found.manifest_sha256 = record.manifest, record.manifest_sha256
        return
    try:
        if source is None:
            raise Unreachable(f"Model {wanted.name}: neither a mirror's URL nor a share is set to take it from.")
        raw = source.manifest(wanted.name)
    except Unreachable as error:
        if wanted.manifest_sha256 is None and record:
            # What serves is more than a mirror that is down: it stays, and the report says what could not be seen.
            found.manifest, found.manifest_sha256 = record.manifest, record.manifest_sha256
            found.note = f"{error} The model is kept as it is."
            return
        if predict:
            found.note = str(error)
            return
        raise
    digest = sha256_bytes(raw)
    if wanted.manifest_sha256 not in (None, digest):
        raise ModelError(
            f"Model {wanted.name}: the source has manifest {digest}, the plan wants {wanted.manifest_sha256}. "
            "Publish the bundle that the plan was made for, or change the plan."
        )
    found.manifest, found.manifest_sha256 = parse_manifest(raw, f"{MANIFEST} of model {wanted.name}"), digest


def _loose(place: Path, paths: Iterable[str], present: dict[str, os.stat_result], owner: tuple[int, int]) -> list[str]:
    """Entries that the service could write to, or that it cannot read."""

    def wrong(status: os.stat_result, mode: int) -> bool:
        return stat.S_IMODE(status.st_mode) != mode or (status.st_uid, status.st_gid) != owner

    paths = list(paths)
    loose = [path for path in paths if wrong(present[path], FILE_MODE)]
    folders = {"."} | {parent for path in paths for parent in map(str, Path(path).parents)}
    loose += [folder for folder in folders if place.is_dir() and wrong((place / folder).stat(), DIRECTORY_MODE)]
    return sorted(loose)


def check_space(assessments: Sequence[Assessment]) -> None:
    """Refuse before anything is fetched if a file system cannot take all that is to come.

    Raises:
        ModelError: what is needed, what is there, and where; every file system that is too small.
    """
    needs: dict[int, tuple[Path, int, list[str]]] = {}
    for found in assessments:
        if not found.faults or found.manifest is None:
            continue
        place = found.wanted.path.parent
        while not place.exists():
            place = place.parent
        arrived = sum(_arrived(found.wanted.incoming / path, found.manifest.files[path].size) for path in found.faults)
        where, bytes_needed, names = needs.get(place.stat().st_dev, (place, 0, []))
        needs[place.stat().st_dev] = (where, bytes_needed + found.fetch_bytes - arrived, [*names, found.wanted.name])
    complaints = []
    for place, needed, names in needs.values():
        usage = os.statvfs(place)
        free = usage.f_bavail * usage.f_frsize
        if needed + SPARE_BYTES > free:
            complaints.append(
                f"Not enough space on {place} for {', '.join(names)}: {readable_size(needed)} are needed and "
                f"{readable_size(SPARE_BYTES)} stay free, {readable_size(free)} are there. "
                f"Free {readable_size(needed + SPARE_BYTES - free)} or put the models elsewhere (hf_cache_root)."
            )
    if complaints:
        raise ModelError(" ".join(complaints))


def _arrived(path: Path, size: int) -> int:
    for candidate in (path, path.with_name(f"{path.name}.part")):
        with suppress(OSError):
            return min(candidate.stat().st_size, size)
    return 0


def apply(found: Assessment, source: Source | None, *, owner: tuple[int, int] = (0, 0), workers: int = 4) -> None:
    """Do what the assessment found. Raises ModelError; what served before serves on then."""
    wanted = found.wanted
    if not wanted.present:
        _remove(wanted)
        return
    if found.manifest is None or not found.changed:
        return
    wanted.path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    _recover(wanted)
    if found.faults:
        _assemble(found, source, owner, workers)
        return
    for path in found.extras:
        (wanted.path / path).unlink(missing_ok=True)
    _own(wanted.path, found.manifest, owner)
    write_file(wanted.path / RECORD, _record_bytes(found.manifest, found.manifest_sha256, found.good), FILE_MODE, owner)
    for leftover in (wanted.incoming, wanted.outgoing):
        shutil.rmtree(leftover, ignore_errors=True)


def _recover(wanted: Wanted) -> None:
    """Take up where a run was killed between the two renames, or before it removed the old directory."""
    if wanted.outgoing.is_dir():
        if wanted.path.is_dir():
            shutil.rmtree(wanted.outgoing)
        else:
            wanted.outgoing.rename(wanted.path)


def _remove(wanted: Wanted) -> None:
    shutil.rmtree(wanted.outgoing, ignore_errors=True)
    if wanted.path.is_dir():
        wanted.path.rename(wanted.outgoing)  # at once no model, rather than for minutes half of one
        sync_directory(wanted.path.parent)
        shutil.rmtree(wanted.outgoing)
    shutil.rmtree(wanted.incoming, ignore_errors=True)


def _assemble(found: Assessment, source: Source | None, owner: tuple[int, int], workers: int) -> None:
    wanted, manifest = found.wanted, found.manifest
    if manifest is None or source is None:
        raise ModelError(f"Model {wanted.name}: neither a mirror's URL nor a share is set to take it from.")
    incoming = wanted.incoming
    incoming.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    parts = {f"{path}.part" for path in found.faults}
    for path, _unused in list(walk_files(incoming)):
        if path not in found.faults and path not in parts:
            (incoming / path).unlink()
    wanted_folders = _folders(incoming, manifest.files)
    for place, _folders_in, _files_in in os.walk(incoming, topdown=False):
        if Path(place) not in wanted_folders:
            Path(place).rmdir()
    for folder in sorted(wanted_folders):
        folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    for path in found.good:
        os.link(wanted.path / path, incoming / path)

    def fetch(path: str) -> str | None:
        destination, entry = incoming / path, manifest.files[path]
        try:
            if destination.is_file() and not destination.is_symlink():
                if destination.stat().st_size == entry.size and sha256_file(destination) == entry.sha256:
                    return None  # from a run that was killed
                destination.unlink()
            source.fetch(wanted.name, path, entry, destination)
        except (ModelError, OSError) as error:
            return f"Model {wanted.name}: {path} {found.faults[path]}, and cannot be had: {error}"
        return None

    # Largest first: otherwise the last big shard is fetched alone at the end.
    order = sorted(found.faults, key=lambda path: -manifest.files[path].size)
    with ThreadPoolExecutor(workers) as pool:
        failures = [failure for failure in pool.map(fetch, order) if failure]
    if failures:
        raise ModelError(" ".join(failures))
    mtimes = {path: (incoming / path).stat().st_mtime_ns for path in manifest.files}
    write_file(incoming / RECORD, _record_bytes(manifest, found.manifest_sha256, mtimes), FILE_MODE, owner)
    _own(incoming, manifest, owner)
    _exchange(wanted)


def _folders(directory: Path, paths: Iterable[str]) -> set[Path]:
    """``directory`` and every folder below it that holds one of ``paths``."""
    return {directory} | {directory / parent for path in paths for parent in Path(path).parents}


def _own(directory: Path, manifest: Manifest, owner: tuple[int, int]) -> None:
    for folder in _folders(directory, manifest.files):
        os.chown(folder, *owner)
        os.chmod(folder, DIRECTORY_MODE)
    for path in manifest.files:
        os.chown(directory / path, *owner)
        os.chmod(directory / path, FILE_MODE)


def _exchange(wanted: Wanted) -> None:
    """Put the assembled directory in the model's place; at no moment is there none (where the file system can)."""
    for folder in _folders(wanted.incoming, (path for path, _unused in walk_files(wanted.incoming))):
        sync_directory(folder)
    if wanted.path.is_dir() and not exchange(wanted.incoming, wanted.path):
        wanted.path.rename(wanted.outgoing)
    if wanted.path.is_dir():
        wanted.incoming.rename(wanted.outgoing)
    else:
        wanted.incoming.rename(wanted.path)
    sync_directory(wanted.path.parent)
    shutil.rmtree(wanted.outgoing, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (renameat2, RENAME_EXCHANGE); False where kernel or file system cannot.

    Raises:
        OSError: refused for another reason.
    """
    at_cwd, rename_exchange = -100, 2
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
