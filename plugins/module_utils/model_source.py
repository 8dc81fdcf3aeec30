# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Stage a model into a bundle, on the connected side: real files, a manifest of hashes, complete for offline use.

From the Hub, huggingface_hub says what there is and where (revisions, tree, signed addresses, tokens); the bytes
come through `download`, since the client (2.4) throws an unfinished file away and a shard has gigabytes.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .atomic import CHUNK_BYTES, sha256_bytes, sha256_file, write_file
from .model_check import completeness_problems, ends_in_zeros
from .model_hub import Hub
from .model_manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    ModelError,
    Origin,
    check_name,
    git_oid,
    is_safe_path,
    parse_manifest,
    readable_size,
    walk_files,
)

Progress = Callable[[str], None]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NEVER_STAGED = (".git*", "*/.git*", ".cache/*", "*.part", ".DS_Store", "*/.DS_Store", "*~")
_KEYS = {
    "directory": {"directory", "allow_patterns", "ignore_patterns", "draft"},
    "repository": {"repository", "revision", "allow_patterns", "ignore_patterns", "draft"},
}


@dataclass(frozen=True)
class Staged:
    """What staging did.

    Attributes:
        manifest_sha256: of `models/<name>/manifest.json`; the plan may pin it.
        commit: commit of the Hub's repository; empty for a directory.
        fetched: files that were new or had changed.
        removed: files of an earlier staging that no longer belong to the model.
        notes: what a person should know (a branch that moved, a suspicious file).
    """

    name: str
    manifest_sha256: str
    size: int
    commit: str
    fetched: list[str]
    removed: list[str]
    changed: bool
    notes: list[str]


class Source(Protocol):
    """A place that models come from."""

    def listing(self) -> dict[str, Origin]:
        """Every file by its path. Raises ModelError."""

    def fetch(self, path: str, origin: Origin, destination: Path, arrived: Callable[[int], None]) -> None:
        """Put a file at ``destination``, continuing an earlier part. Raises ModelError, OSError."""


def stage(
    name: str,
    source: Mapping[str, Any],
    bundle: str | os.PathLike[str],
    progress: Progress = lambda _unused: None,
    *,
    work: str | os.PathLike[str] | None = None,
    parallel: int = 4,
    update: bool = False,
) -> Staged:
    """Bring `<bundle>/models/<name>/` to what ``source`` has; a second call looks at size and time stamp only.

    Args:
        source: `{directory: …}` or `{repository: org/name, revision: …}`, both with `allow_patterns`,
            `ignore_patterns` (as in huggingface_hub) and `draft` (a speculative draft model needs no tokenizer).
            A revision that can move (a branch) is resolved once and stays pinned to that commit.
        progress: told what is done, a line at a time.
        work: unfinished files and records; `<bundle>/.work` unless given. Not part of the bundle.
        update: let a pinned branch move to the commit it has now.

    Raises:
        ModelError: every problem found; the staged model is as it was before then.
    """
    check_source(name, source)
    place = Path(bundle, "models", name)
    scratch = Path(work or Path(bundle, ".work"), "models", name)
    scratch.mkdir(parents=True, exist_ok=True)
    record = _Record(scratch.with_name(f"{name}.json"))
    before = _manifest_of(place)
    notes: list[str] = []
    origins: Source
    if "repository" in source:
        origins = hub = Hub(name, source, before.source if before else {}, notes, update=update)
        commit = hub.commit
        described: dict[str, Any] = {**source, "revision": source.get("revision") or "main", "commit": commit}
    else:
        origins = LocalDirectory(name, Path(source["directory"]))
        commit = ""
        # The last part only: the same model staged from two places is the same bundle.
        described = {**source, "directory": Path(source["directory"]).resolve().name}
    described = {key: value for key, value in described.items() if value not in (None, [], False)}
    if commit and before and before.source == described and record.holds(place, before):
        return Staged(name, sha256_bytes(before.to_bytes()), before.size, commit, [], [], changed=False, notes=notes)

    wanted = _filtered(origins.listing(), source)
    _check_paths(name, wanted)
    missing = [path for path, origin in wanted.items() if not record.is_current(place / path, path, origin)]
    waiting = [path for path in missing if not record.is_current(scratch / path, path, origin=wanted[path])]
    _check_space(name, scratch, {path: wanted[path] for path in waiting})
    meter = _Meter(name, sum(wanted[path].size for path in waiting), progress)
    _fetch_all(name, origins, wanted, waiting, scratch, meter, parallel)

    places = {path: (scratch if path in set(missing) else place) / path for path in wanted}
    wrong = _hash_all(record, wanted, places, parallel)
    problems = [f"{path} {what}" for path, what in wrong.items()]
    problems += completeness_problems(places, draft=bool(source.get("draft")))
    for path in wrong:
        (scratch / path).unlink(missing_ok=True)
    record.save()
    if problems:
        raise ModelError(
            f"Model {name} is not staged: {'; '.join(problems)}. "
            "Check the source, and allow_patterns and ignore_patterns if they are set."
        )
    notes += [
        f"Model {name}: {path} ends in a MiB of zeros. Compare it with its origin: an interrupted copy looks like this."
        for path in missing
        if path.endswith((".safetensors", ".bin", ".gguf")) and ends_in_zeros(places[path])
    ]
    manifest = Manifest({path: record.entry(path) for path in sorted(wanted)}, described)
    removed = _publish(place, scratch, missing, manifest, changed=before != manifest)
    record.move(place, wanted)
    record.save()
    return Staged(
        name,
        sha256_bytes(manifest.to_bytes()),
        manifest.size,
        commit,
        sorted(missing),
        removed,
        changed=bool(missing or removed) or before != manifest,
        notes=notes,
    )


def check_source(name: str, source: Mapping[str, Any]) -> None:
    """What is wrong with a source can be seen before anything is fetched.

    Raises:
        ModelError: the name or the source is none, or its directory is not there.
    """
    check_name(name)
    kinds = [kind for kind in _KEYS if source.get(kind)]
    if len(kinds) != 1:
        raise ModelError(f"Model {name}: its source is either `directory` or `repository`; given: {', '.join(source)}.")
    if unknown := sorted(set(source) - _KEYS[kinds[0]]):
        known = ", ".join(sorted(_KEYS[kinds[0]]))
        raise ModelError(f"Model {name}: its source has unknown keys {', '.join(unknown)}; known are {known}.")
    if "repository" in kinds and not _REPOSITORY.fullmatch(str(source["repository"])):
        raise ModelError(f"Model {name}: the repository is {source['repository']!r}, it must be organisation/name.")
    if "directory" in kinds:
        LocalDirectory(name, Path(source["directory"])).listing()


def _filtered(listing: dict[str, Origin], source: Mapping[str, Any]) -> dict[str, Origin]:
    """The files that the patterns let through, by huggingface_hub's rules (fnmatch; 'folder/' means all of it)."""

    def patterns(key: str) -> list[str]:
        given = source.get(key) or []
        return [
            f"{pattern}*" if pattern.endswith("/") else pattern
            for pattern in ([given] if isinstance(given, str) else given)
        ]

    allow, ignore = patterns("allow_patterns"), [*patterns("ignore_patterns"), *_NEVER_STAGED]

    def fits(path: str, any_of: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in any_of)

    return {
        path: origin for path, origin in listing.items() if (not allow or fits(path, allow)) and not fits(path, ignore)
    }


def _check_paths(name: str, wanted: Iterable[str]) -> None:
    if unsafe := [path for path in wanted if not is_safe_path(path)]:
        raise ModelError(
            f"Model {name}: {', '.join(map(repr, unsafe))} cannot be staged: the bundle needs {MANIFEST} for itself, "
            "and other paths must be plain. Add it to ignore_patterns if the model does not need it."
        )


def _check_space(name: str, scratch: Path, waiting: Mapping[str, Origin]) -> None:
    arrived = 0
    for path, origin in waiting.items():
        with suppress(OSError):
            arrived += min((scratch / f"{path}.part").stat().st_size, origin.size)
    needed = sum(origin.size for origin in waiting.values()) - arrived
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise ModelError(
            f"Model {name}: {readable_size(needed)} are to be fetched, {scratch} has {readable_size(free)} free. "
            f"Free {readable_size(needed - free)} or let the bundle's directory be on a larger file system."
        )


def _fetch_all(
    name: str,
    source: Source,
    wanted: Mapping[str, Origin],
    waiting: list[str],
    scratch: Path,
    meter: _Meter,
    parallel: int,
) -> None:
    for path, _unused in list(walk_files(scratch)):
        if path.removesuffix(".part") not in wanted:
            (scratch / path).unlink()
    for path in waiting:
        (scratch / path).unlink(missing_ok=True)
        (scratch / path).parent.mkdir(parents=True, exist_ok=True)

    def fetch(path: str) -> str | None:
        try:
            source.fetch(path, wanted[path], scratch / path, meter.add)
        except (ModelError, OSError) as error:
            return f"{path}: {error}"
        return None

    order = sorted(waiting, key=lambda path: -wanted[path].size)
    with ThreadPoolExecutor(max(1, parallel)) as pool:
        failures = [failure for failure in pool.map(fetch, order) if failure]
    meter.end()
    if failures:
        raise ModelError(
            f"Model {name} is not staged: {'; '.join(failures)}. What has arrived is kept; run again to go on."
        )


def _hash_all(
    record: _Record, wanted: Mapping[str, Origin], places: Mapping[str, Path], parallel: int
) -> dict[str, str]:
    """Hash what the record does not know; path -> what is wrong, where a file is not what its origin says."""
    with ThreadPoolExecutor(max(1, parallel)) as pool:
        digests = dict(zip(wanted, pool.map(lambda path: record.digest(places[path], path), wanted), strict=True))
    wrong = {}
    for path, origin in wanted.items():
        if origin.sha256 in (None, digests[path]):
            record.note(places[path], path, origin, digests[path])
        else:
            wrong[path] = (
                f"has sha256 {digests[path]}, the Hub's file has {origin.sha256}: it was copied incompletely "
                "or changed (fetch it again)"
            )
    return wrong


def _publish(place: Path, scratch: Path, missing: list[str], manifest: Manifest, *, changed: bool) -> list[str]:
    """Move the new files in and the manifest last; without a manifest a model counts as not staged."""
    place.mkdir(parents=True, exist_ok=True)
    extras = sorted(path for path, _unused in walk_files(place) if path not in manifest.files and path != MANIFEST)
    if missing or extras or changed:
        (place / MANIFEST).unlink(missing_ok=True)
    for path in missing:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        os.chmod(scratch / path, 0o644)
        os.replace(scratch / path, place / path)
    for path in extras:
        (place / path).unlink()
    if not (place / MANIFEST).exists():
        write_file(place / MANIFEST, manifest.to_bytes())
    shutil.rmtree(scratch, ignore_errors=True)
    return extras


def _manifest_of(place: Path) -> Manifest | None:
    try:
        return parse_manifest((place / MANIFEST).read_bytes(), str(place / MANIFEST))
    except (OSError, ModelError):
        return None


class _Record:
    """Which file had which content when it was last hashed: path -> size, mtime_ns, sha256, origin's version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError):
            self._known = dict(json.loads(path.read_bytes()))

    def _matches(self, place: Path, path: str) -> bool:
        known = self._known.get(path)
        try:
            status = place.lstat()
        except OSError:
            return False
        return (
            known is not None
            and stat.S_ISREG(status.st_mode)
            and (known.get("size"), known.get("mtime_ns")) == (status.st_size, status.st_mtime_ns)
        )

    def is_current(self, place: Path, path: str, origin: Origin) -> bool:
        """True if the file at ``place`` is what the origin has; hashed where the record does not know it."""
        if self._matches(place, path) and self._known[path].get("version") == origin.version:
            return True
        try:
            status = place.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or status.st_size != origin.size:
            return False
        if origin.git_oid is not None:
            right = git_oid(place) == origin.git_oid
        else:
            right = origin.sha256 is not None and self.digest(place, path) == origin.sha256
        if right:
            self.note(place, path, origin, self.digest(place, path))
        return right

    def holds(self, place: Path, manifest: Manifest) -> bool:
        """True if every file of the manifest is as recorded and no other is there."""
        return all(
            self._matches(place / path, path) and self.entry(path) == entry for path, entry in manifest.files.items()
        ) and {path for path, _unused in walk_files(place)} == {*manifest.files, MANIFEST}

    def digest(self, place: Path, path: str) -> str:
        return str(self._known[path]["sha256"]) if self._matches(place, path) else sha256_file(place)

    def note(self, place: Path, path: str, origin: Origin, sha256: str) -> None:
        status = place.stat()
        self._known[path] = {
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "sha256": sha256,
            "version": origin.version,
        }

    def entry(self, path: str) -> FileEntry:
        known = self._known[path]
        return FileEntry(str(known["sha256"]), int(known["size"]))

    def move(self, place: Path, wanted: Iterable[str]) -> None:
        """Keep only what was published (a rename changes neither size nor time stamp)."""
        self._known = {path: self._known[path] for path in wanted if self._matches(place / path, path)}

    def save(self) -> None:
        write_file(self._path, json.dumps(self._known, indent=1, sort_keys=True).encode())


class _Meter:
    """A line of progress at most every five seconds, from several threads."""

    def __init__(self, name: str, total: int, progress: Progress) -> None:
        self._name, self._total, self._progress = name, total, progress
        self._lock = threading.Lock()
        self._arrived, self._began = 0, time.monotonic()
        self._told = self._began
        if total:
            progress(f"model {name}: fetching {readable_size(total)}")

    def add(self, count: int) -> None:
        with self._lock:
            self._arrived += count
            now = time.monotonic()
            if now - self._told < 5:
                return
            self._told = now
            rate = readable_size(self._arrived / (now - self._began))
            self._progress(
                f"model {self._name}: {readable_size(self._arrived)} of {readable_size(self._total)}, {rate}/s"
            )

    def end(self) -> None:
        if self._arrived:
            seconds = time.monotonic() - self._began
            self._progress(f"model {self._name}: {readable_size(self._arrived)} in {seconds:.0f} s")


@dataclass
class LocalDirectory:
    """A model that lies on this machine already; links are followed, so that a Hub cache becomes real files."""

    name: str
    directory: Path

    def listing(self) -> dict[str, Origin]:
        if not self.directory.is_dir():
            raise ModelError(
                f"Model {self.name}: {self.directory} is no directory here. Correct vllm_models, or put it there."
            )
        found: dict[str, Origin] = {}
        broken = []
        for folder, _unused, files in os.walk(self.directory, followlinks=True):
            for file in files:
                path = Path(folder, file)
                relative = path.relative_to(self.directory).as_posix()
                try:
                    status = path.stat()
                except OSError:
                    broken.append(relative)
                    continue
                if not stat.S_ISREG(status.st_mode):
                    broken.append(relative)
                    continue
                version = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
                found[relative] = Origin(status.st_size, version, self._promised(relative, path))
        if broken:
            raise ModelError(
                f"Model {self.name}: {', '.join(sorted(broken))} in {self.directory} lead nowhere: the copy of a cache "
                "without its blobs? Copy it with links followed, or stage from the repository."
            )
        return found

    def _promised(self, relative: str, path: Path) -> str | None:
        """The Hub's sha256 where its client left it: a cache's blob is named so, a local directory has metadata."""
        blob = path.resolve()
        if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
            return blob.name
        metadata = self.directory / ".cache" / "huggingface" / "download" / f"{relative}.metadata"
        with suppress(OSError, IndexError, UnicodeDecodeError):
            etag = metadata.read_text(encoding="utf-8").split("\n")[1].strip()
            if _SHA256.fullmatch(etag):
                return etag
        return None

    def fetch(self, path: str, origin: Origin, destination: Path, arrived: Callable[[int], None]) -> None:
        part = destination.with_name(f"{destination.name}.part")
        with (self.directory / path).open("rb") as source, part.open("wb") as target:
            while piece := source.read(CHUNK_BYTES):
                target.write(piece)
                arrived(len(piece))
            target.flush()
            os.fsync(target.fileno())
        if part.stat().st_size != origin.size:
            raise ModelError("it changed while it was copied")
        os.replace(part, destination)
