# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Build a bundle: what the locks pin, from the sources the releases name, verified, with an index and a manifest."""

from __future__ import annotations

import email.parser
import email.policy
import json
import os
import shutil
import threading
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..module_utils.atomic import CHUNK_BYTES, sha256_bytes, sha256_file, write_file
from ..module_utils.bundle_manifest import (
    MANIFEST,
    WORK,
    BundleFile,
    BundleManifest,
    bundle_files,
    manifest_id,
)
from ..module_utils.download import DownloadError, download
from ..module_utils.model_manifest import ModelError, check_name, parse_manifest, readable_size
from ..module_utils.model_source import check_source, stage
from .lock import LockError, parse_lock
from .package_sources import Answer, IndexFile, PackageSources, PipConfiguration, SourceError, pip_configuration
from .release_definition import DEFAULT_SOURCE, Release, ReleaseError
from .simple_index import IndexedWheel, render_index
from .wheels import WheelError, build_metadata_wheel, read_metadata, split_wheel_name, target_tags, wheel_rank

Progress = Callable[[str], None]

_REPORT_EVERY_S = 3.0
_SPARE_BYTES = 64 << 20


class BundleError(RuntimeError):
    """The bundle cannot be completed; the message lists every problem. What has arrived is kept for the next run."""


@dataclass(frozen=True)
class Problem:
    """One file that cannot be had."""

    what: str
    remedy: str
    package: str = ""
    source: str = ""


@dataclass(frozen=True)
class Want:
    """One wheel that the bundle needs: a pin of a release, or uv by its file name."""

    name: str
    version: str
    hashes: frozenset[str]
    release: Release | None
    filename: str | None = None

    def rank(self, filename: str) -> int | None:
        """How well a file fits the release's Python and platform; None where it does not."""
        if self.release is None:
            return 0 if filename == self.filename else None
        return wheel_rank(filename, target_tags(self.release.python, self.release.machine, self.release.glibc))

    @property
    def owner(self) -> str:
        """Whose it is, for messages."""
        return f"release {self.release.name}" if self.release else "uv"

    @property
    def relock(self) -> str:
        """How the person gets another pin."""
        return f"make lock RELEASE={self.release.name}" if self.release else "catalogue/uv.yml holds version and hash"


@dataclass(frozen=True)
class Fetch:
    """A wheel to be fetched for a want."""

    want: Want
    file: IndexFile
    sources: PackageSources


@dataclass
class BundleRequest:
    """What a bundle shall hold.

    Attributes:
        uv: ``{"file": …, "sha256": …, "version": …}`` for each machine type that hosts have.
        interpreters: ``{"path": …, "sha256": …}`` of archives on this machine.
        models: ``{"name": …, "source": {…}}``, see ``model_source.stage``; a source may pin ``manifest_sha256``. One
            that names neither directory nor repository is not staged: its hosts have it on a share.
        allow_yanked: ``name==version`` that may be used though its index has withdrawn it.
        full: hash everything instead of believing size and time stamp.
    """

    path: Path
    releases: Sequence[Release]
    uv: Sequence[Mapping[str, str]] = ()
    interpreters: Sequence[Mapping[str, str]] = ()
    models: Sequence[Mapping[str, Any]] = ()
    allow_yanked: frozenset[str] = frozenset()
    jobs: int = 8
    full: bool = False
    update_models: bool = False


@dataclass
class BundleResult:
    """What was done, or would be: files by path, and bytes that came over the network or from directories."""

    changed: bool = False
    fetched: list[str] = field(default_factory=list)
    fetched_bytes: int = 0
    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    manifest_sha256: str | None = None
    bundle_id: str | None = None
    size: int = 0
    notes: list[str] = field(default_factory=list)


class _Shelf:
    """What lies in the bundle already, hashed once: a file with recorded size and time stamp is not read again."""

    def __init__(self, root: Path, full: bool, jobs: int) -> None:
        self.root = root
        self._path = root / WORK / "state.json"
        self._mutex = threading.Lock()
        self._saved = time.monotonic()
        try:
            recorded = json.loads(self._path.read_bytes())["files"]
        except (OSError, ValueError, KeyError):
            recorded = {}
        self.files: dict[str, dict[str, Any]] = {}
        unknown: list[str] = []
        for path, size, mtime_ns in bundle_files(root):
            if not path.startswith(("wheels/", "python/")):
                continue
            known = recorded.get(path)
            if not full and known and (known["size"], known["mtime_ns"]) == (size, mtime_ns):
                self.files[path] = known
            elif size >= 0:
                unknown.append(path)
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            for path, entry in zip(unknown, pool.map(self._look, unknown), strict=True):
                self.files[path] = entry
        self.dirty = bool(unknown) or set(recorded) != set(self.files)

    def _look(self, path: str) -> dict[str, Any]:
        place = self.root / path
        status = place.stat()
        entry: dict[str, Any] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_file(place)}
        if path.endswith(".whl"):
            try:
                metadata = read_metadata(str(place))
                with zipfile.ZipFile(place) as wheel:
                    entry["unpacked"] = sum(member.file_size for member in wheel.infolist())
            except WheelError:
                return entry  # its hash is in no lock then, and it goes
            entry["metadata_sha256"] = sha256_bytes(metadata)
            headers = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(metadata, headersonly=True)
            entry["requires_python"] = headers.get("Requires-Python")
        return entry

    def note(self, path: str) -> None:
        """Take a new file in; from any thread."""
        entry = self._look(path)
        with self._mutex:
            self.files[path] = entry
            self.dirty = True
            if time.monotonic() - self._saved > 2:
                self.save()

    def drop(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)
        self.files.pop(path, None)
        self.dirty = True

    def save(self) -> None:
        if self.dirty:
            document = {"format": 1, "files": self.files}
            write_file(self._path, json.dumps(document, sort_keys=True).encode())
            self.dirty = False
        self._saved = time.monotonic()


def build_bundle(
    request: BundleRequest,
    progress: Progress = lambda _unused: None,
    *,
    check: bool = False,
    pip: PipConfiguration | None = None,
) -> BundleResult:
    """Bring a directory to what is asked for; a second call fetches nothing and changes nothing.

    Args:
        check: say what would be done and write nothing.
        pip: what the source ``default`` is; pip on this machine is asked where None and something must be fetched.

    Raises:
        BundleError: with every problem. What verified is kept, and the manifest is not written.
    """
    root = request.path
    result = BundleResult()
    wants, problems = _wants(request)
    problems += _check_models(request.models)
    if problems:
        raise BundleError(report(problems))
    if not check:
        (root / WORK / "fetch").mkdir(parents=True, exist_ok=True)
        (root / "wheels").mkdir(exist_ok=True)
    shelf = _Shelf(root, request.full, request.jobs)
    built = _built_wheels(request.releases)
    kept, missing = _compare(wants, shelf)
    fetches, problems = _locate(missing, pip, request) if missing else ([], [])
    archives, archive_problems = _archives(request, shelf)
    problems += archive_problems
    if problems:
        raise BundleError(report(problems))
    result.fetched = sorted(f"wheels/{fetch.file.filename}" for fetch in fetches)
    result.fetched_bytes = sum(fetch.file.size or 0 for fetch in fetches)
    if check:
        return _predict(request, result, kept, built, archives, shelf)
    _fetch_all(request, fetches, shelf, progress)
    for filename, content in built.items():
        if shelf.files.get(f"wheels/{filename}", {}).get("sha256") != sha256_bytes(content):
            write_file(root / "wheels" / filename, content)
            shelf.note(f"wheels/{filename}")
            result.written.append(f"wheels/{filename}")
    result.written += _copy_archives(root, archives, shelf)
    _stage_models(request, result, progress)
    wheels = {*kept, *(fetch.file.filename for fetch in fetches), *built}
    _finish(request, result, shelf, wheels)
    return result


def _wants(request: BundleRequest) -> tuple[list[Want], list[Problem]]:
    """Every wheel of every lock, and uv's; metadata-only wheels are built here and not wanted from anywhere."""
    wants: list[Want] = []
    problems: list[Problem] = []
    for release in request.releases:
        own = {split[0] for name in _built_wheels([release]) if (split := split_wheel_name(name))}
        built_hashes = {sha256_bytes(content) for content in _built_wheels([release]).values()}
        try:
            pins = parse_lock(release.lock_text(), str(release.lock_path))
        except (ReleaseError, LockError) as error:
            problems.append(Problem(str(error), ""))
            continue
        environment = {
            "python_version": release.python,
            "python_full_version": f"{release.python}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "platform_machine": release.machine,
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        for pin in pins:
            if pin.marker is not None and not pin.marker.evaluate(environment):
                continue
            if pin.name not in own:
                wants.append(Want(pin.name, pin.version, pin.hashes, release))
            elif not pin.hashes & built_hashes:
                problems.append(
                    Problem(
                        f"release {release.name}: the wheel {pin.name}=={pin.version} is built here and has another "
                        "hash than the lock",
                        f"Make the lock anew: make lock RELEASE={release.name}",
                    )
                )
    wants += [
        Want("uv", str(wheel["version"]), frozenset({str(wheel["sha256"])}), None, str(wheel["file"]))
        for wheel in request.uv
    ]
    return wants, problems


def _built_wheels(releases: Iterable[Release]) -> dict[str, bytes]:
    return dict(
        build_metadata_wheel(wheel.name, wheel.version, wheel.requires)
        for release in releases
        for wheel in release.metadata_wheels
    )


def _compare(wants: Sequence[Want], shelf: _Shelf) -> tuple[set[str], list[Want]]:
    """File names of the wheels that are there, and what is missing."""
    by_hash: dict[str, list[str]] = {}
    for path, entry in shelf.files.items():
        if path.endswith(".whl"):
            by_hash.setdefault(entry["sha256"], []).append(path.removeprefix("wheels/"))
    kept: set[str] = set()
    missing: list[Want] = []
    for want in wants:
        fitting = [
            (rank, name)
            for digest in want.hashes
            for name in by_hash.get(digest, [])
            if (rank := want.rank(name)) is not None
        ]
        if fitting:
            kept.add(min(fitting)[1])
        else:
            missing.append(want)
    return kept, missing


def _locate(
    missing: Sequence[Want], pip: PipConfiguration | None, request: BundleRequest
) -> tuple[list[Fetch], list[Problem]]:
    """Ask each release's sources where the missing wheels lie."""
    try:
        default = pip or pip_configuration()
    except SourceError as error:
        return [], [Problem(str(error), "")]
    sources = {release.name: PackageSources.of(release, default) for release in request.releases}
    uv = PackageSources({}, {}, default)

    def ask(want: Want) -> Fetch | Problem:
        asked = sources[want.release.name] if want.release else uv
        return _choose(want, asked.ask(want.name, want.version), asked, request.allow_yanked)

    with ThreadPoolExecutor(max(1, request.jobs)) as pool:
        answers = list(pool.map(ask, missing))
    problems = [answer for answer in answers if isinstance(answer, Problem)]
    fetches: dict[str, Fetch] = {}
    for answer in answers:
        if isinstance(answer, Problem):
            continue
        other = fetches.setdefault(answer.file.filename, answer)
        if other.file.sha256 != answer.file.sha256:
            problems.append(
                Problem(
                    f"{answer.file.filename} is another file for {answer.want.owner} than for {other.want.owner}",
                    "Lock both from the same source, or give each release its own bundle.",
                )
            )
    return list(fetches.values()), problems


def _choose(want: Want, answer: Answer, sources: PackageSources, allow_yanked: frozenset[str]) -> Fetch | Problem:
    """The file with a hash of the lock that fits the target best, or why there is none."""
    package = f"{want.name}=={want.version}"
    asked = ", ".join(sources.allowed(want.name))
    relock = want.relock
    # Where a source gives no hashes, any file of the version may be the locked one: its own hash decides after it came.
    matching = [file for file in answer.files if file.sha256 is None or file.sha256 in want.hashes]
    fitting = [(rank, n, file) for n, file in enumerate(matching) if (rank := want.rank(file.filename)) is not None]
    if fitting:
        best = min(fitting)[2]
        if best.yanked is not None and package not in allow_yanked:
            return Problem(
                f"is withdrawn from its index (yanked{': ' + best.yanked if best.yanked else ''})",
                f"Lock a release without it ({relock}), or allow it by wheel_mirror_allow_yanked: [{package}].",
                package,
                best.source,
            )
        return Fetch(want, best, sources)
    if matching:
        target = f"CPython {want.release.python} on {want.release.platform}" if want.release else want.filename
        return Problem(
            f"has locked files, but none for {target}: {', '.join(file.filename for file in matching)}",
            f"Lock it for its target: {relock}",
            package,
            asked,
        )
    if answer.files:
        return Problem(
            "is offered with other hashes than the lock's: "
            + ", ".join(f"{file.filename} sha256 {file.sha256}" for file in answer.files[:3]),
            "The file was exchanged, or the lock belongs to another source. Find out which before you lock anew.",
            package,
            asked,
        )
    if answer.failures:
        return Problem(
            "; ".join(answer.failures),
            f"Let this machine reach one of the sources {asked}, or name another in the release's sources.",
            package,
            asked,
        )
    return Problem(
        "is not there in this version",
        "It was removed, or lies elsewhere: name its source in the release's definition (sources), or lock anew "
        f"({relock}).",
        package,
        asked,
    )


def _archives(request: BundleRequest, shelf: _Shelf) -> tuple[list[tuple[Path, str]], list[Problem]]:
    """Interpreter archives to be copied, with their hashes; and what is wrong with the others."""
    copies: list[tuple[Path, str]] = []
    problems: list[Problem] = []
    given: dict[str, str] = {}
    for entry in request.interpreters:
        source, sha256 = Path(str(entry["path"])), str(entry["sha256"])
        given[source.name] = sha256
        if shelf.files.get(f"python/{source.name}", {}).get("sha256") == sha256:
            continue
        remedy = "Fetch it anew, or correct wheel_mirror_interpreters."
        if not source.is_file():
            problems.append(Problem(f"interpreter archive {source} does not exist", remedy))
        elif (actual := sha256_file(source)) != sha256:
            problems.append(Problem(f"interpreter archive {source} has sha256 {actual}, expected {sha256}", remedy))
        else:
            copies.append((source, sha256))
    for release in request.releases:
        archive = release.interpreter
        if archive and given.get(archive["file"]) != archive["sha256"]:
            problems.append(
                Problem(
                    f"release {release.name} needs the interpreter archive {archive['file']} "
                    f"with sha256 {archive['sha256']}",
                    "Name its path and this hash in wheel_mirror_interpreters.",
                )
            )
    return copies, problems


def _predict(
    request: BundleRequest,
    result: BundleResult,
    kept: set[str],
    built: Mapping[str, bytes],
    archives: Sequence[tuple[Path, str]],
    shelf: _Shelf,
) -> BundleResult:
    root = request.path
    result.written += [
        f"wheels/{name}"
        for name, content in built.items()
        if shelf.files.get(f"wheels/{name}", {}).get("sha256") != sha256_bytes(content)
    ]
    result.written += [f"python/{source.name}" for source, _unused in archives]
    for model in _staged(request):
        if not (root / "models" / model["name"] / "manifest.json").exists():
            result.written.append(f"models/{model['name']}/")
        else:
            result.notes.append(f"model {model['name']} is staged; whether its source moved on is seen when it runs")
    present = set(shelf.files)
    wanted = {f"wheels/{name}" for name in {*kept, *built, *(p.removeprefix("wheels/") for p in result.fetched)}}
    wanted |= {f"{path}.metadata" for path in wanted} | {
        f"python/{Path(str(e['path'])).name}" for e in request.interpreters
    }
    result.removed = sorted(present - wanted)
    result.written += [path for path, content in _texts(request).items() if _read(root / path) != content]
    if not (root / MANIFEST).exists():
        result.written.append(MANIFEST)
    result.changed = bool(result.fetched or result.written or result.removed)
    return result


def _fetch_all(request: BundleRequest, fetches: Sequence[Fetch], shelf: _Shelf, progress: Progress) -> None:
    scratch = request.path / WORK / "fetch"
    names = {fetch.file.filename for fetch in fetches}
    for left in scratch.iterdir():
        if left.name.removesuffix(".part") not in names:
            left.unlink()
    if not fetches:
        shelf.save()
        return
    total = sum(fetch.file.size or 0 for fetch in fetches)
    arrived = sum(path.stat().st_size for path in scratch.iterdir())
    free = shutil.disk_usage(scratch).free
    if total - arrived + _SPARE_BYTES > free:
        raise BundleError(
            f"{readable_size(total - arrived)} are to be fetched, {request.path} has {readable_size(free)} free. "
            "Free some space, or set wheel_mirror_bundle to a directory on a larger file system."
        )
    meter = _Meter(len(fetches), total, arrived, progress)
    problems: list[Problem] = []

    def fetch_one(fetch: Fetch) -> None:
        try:
            _fetch(fetch, scratch, meter)
            os.replace(scratch / fetch.file.filename, request.path / "wheels" / fetch.file.filename)
            shelf.note(f"wheels/{fetch.file.filename}")
        except (DownloadError, OSError) as error:
            package = f"{fetch.want.name}=={fetch.want.version}"
            remedy = "Run again to go on where this stopped; if it stays, look at the source."
            problems.append(Problem(f"{fetch.file.filename}: {error}", remedy, package, fetch.file.source))
        finally:
            meter.file_done()

    # The largest first: the last to end decides how long the whole takes.
    order = sorted(fetches, key=lambda fetch: -(fetch.file.size or 0))
    with meter.reporting(), ThreadPoolExecutor(max(1, request.jobs)) as pool:
        list(pool.map(fetch_one, order))
    shelf.save()
    if problems:
        raise BundleError(report(problems))


def _fetch(fetch: Fetch, scratch: Path, meter: _Meter) -> None:
    file = fetch.file
    target = scratch / file.filename
    if file.url.startswith("file://"):
        source = Path(urllib.request.url2pathname(urllib.parse.urlsplit(file.url).path))
        part = target.with_name(f"{target.name}.part")
        with source.open("rb") as reader, part.open("wb") as writer:
            while piece := reader.read(CHUNK_BYTES):
                writer.write(piece)
                meter.add(len(piece))
            os.fsync(writer.fileno())
        os.replace(part, target)
    else:
        download(
            file.url,
            target,
            file.sha256,
            file.size,
            headers=fetch.sources.authorization(file.url),
            opener=fetch.sources.pool,
            progress=meter.add,
        )
        if file.sha256 is not None:
            return
    if (actual := sha256_file(target)) not in fetch.want.hashes:
        target.unlink()
        raise DownloadError(f"{file.url}: sha256 is {actual}, the lock has {', '.join(sorted(fetch.want.hashes))}")


class _Meter:
    """Lines of progress every few seconds, whatever the threads do meanwhile."""

    def __init__(self, files: int, total: int, arrived: int, progress: Progress) -> None:
        self._files, self._total, self._progress = files, total, progress
        self._done, self._bytes, self._began_at = 0, arrived, arrived
        self._mutex = threading.Lock()
        self._over = threading.Event()

    def add(self, count: int) -> None:
        with self._mutex:
            self._bytes += count

    def file_done(self) -> None:
        with self._mutex:
            self._done += 1

    def reporting(self) -> _Reporting:
        return _Reporting(self)

    def line(self, seconds: float) -> str:
        rate = (self._bytes - self._began_at) / max(seconds, 0.001)
        left = max(self._total - self._bytes, 0) / rate if rate else 0
        size = f"{readable_size(self._bytes)} of {readable_size(self._total)}"
        rest = f", about {left:.0f} s left" if left >= 1 else ""
        return f"wheels: {self._done} of {self._files} files, {size}, {readable_size(rate)}/s{rest}"

    def report_until_over(self) -> None:
        began = time.monotonic()
        while not self._over.wait(_REPORT_EVERY_S):
            self._progress(self.line(time.monotonic() - began))
        self._progress(self.line(time.monotonic() - began))

    def end(self) -> None:
        self._over.set()


class _Reporting:
    def __init__(self, meter: _Meter) -> None:
        self._meter = meter
        self._thread = threading.Thread(target=meter.report_until_over, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_unused: object) -> None:
        self._meter.end()
        self._thread.join()


def _copy_archives(root: Path, archives: Sequence[tuple[Path, str]], shelf: _Shelf) -> list[str]:
    written = []
    for source, sha256 in archives:
        (root / "python").mkdir(exist_ok=True)
        beside = root / WORK / "fetch" / source.name
        shutil.copyfile(source, beside)
        if sha256_file(beside) != sha256:
            beside.unlink()
            raise BundleError(f"{source} changed while it was copied. Run again when nothing writes to it.")
        os.replace(beside, root / "python" / source.name)
        shelf.note(f"python/{source.name}")
        written.append(f"python/{source.name}")
    return written


def _check_models(models: Sequence[Mapping[str, Any]]) -> list[Problem]:
    problems = []
    seen: set[str] = set()
    for model in models:
        name = str(model.get("name", ""))
        source = model.get("source")
        try:
            if isinstance(source, Mapping) and (source.get("directory") or source.get("repository")):
                check_source(name, _told(source))
            else:
                check_name(name)
        except ModelError as error:
            problems.append(Problem(str(error), ""))
        if name in seen:
            problems.append(Problem(f"model {name} is listed twice", "Keep one of the entries."))
        if not isinstance(source, Mapping):
            problems.append(
                Problem(f"model {name} has no source", "Give it a directory, or a repository and its revision.")
            )
        seen.add(name)
    return problems


def _told(source: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's entry says of where it comes from."""
    return {key: value for key, value in source.items() if value is not None and key != "manifest_sha256"}


def _staged(request: BundleRequest) -> list[Mapping[str, Any]]:
    return [m for m in request.models if m["source"].get("directory") or m["source"].get("repository")]


def _stage_models(request: BundleRequest, result: BundleResult, progress: Progress) -> None:
    """Stage each model; one that is no longer asked for is set aside, since fetching it again may take hours."""
    root = request.path
    aside = root / WORK / "unused-models"
    wanted = {str(model["name"]) for model in _staged(request)}
    if (root / "models").is_dir():
        for place in sorted((root / "models").iterdir()):
            if place.name not in wanted:
                aside.mkdir(exist_ok=True)
                shutil.rmtree(aside / place.name, ignore_errors=True)
                os.replace(place, aside / place.name)
                result.removed.append(f"models/{place.name}/")
                result.notes.append(f"model {place.name} is no longer asked for; it was set aside in {aside}")
    problems = []
    for model in _staged(request):
        name = str(model["name"])
        source, pinned = _told(model["source"]), model["source"].get("manifest_sha256")
        if (aside / name).is_dir() and not (root / "models" / name).exists():
            (root / "models").mkdir(exist_ok=True)
            os.replace(aside / name, root / "models" / name)
        try:
            staged = stage(name, source, root, progress, parallel=4, update=request.update_models)
        except (ModelError, OSError) as error:
            problems.append(Problem(str(error), ""))
            continue
        if pinned not in (None, staged.manifest_sha256):
            problems.append(
                Problem(
                    f"model {name}: its manifest has sha256 {staged.manifest_sha256}, vllm_models pins {pinned}",
                    "Its source has other files than the pinned ones: look which, then correct the source or the pin.",
                )
            )
        result.notes += staged.notes
        result.fetched += [f"models/{name}/{path}" for path in staged.fetched]
        result.removed += [f"models/{name}/{path}" for path in staged.removed]
    if problems:
        raise BundleError(report(problems))


def _finish(request: BundleRequest, result: BundleResult, shelf: _Shelf, wheels: set[str]) -> None:
    """Metadata, index, locks and, last, the manifest: without it, or with another, nothing is published."""
    root = request.path
    wanted = {f"wheels/{name}" for name in wheels}
    indexed = []
    if broken := [path for path in sorted(wanted) if "metadata_sha256" not in shelf.files[path]]:
        raise BundleError(
            f"{', '.join(broken)}: the locked file, but no wheel that can be installed (no zip, or without METADATA). "
            "Lock another version."
        )
    for path in sorted(wanted):
        entry = shelf.files[path]
        side = f"{path}.metadata"
        if shelf.files.get(side, {}).get("sha256") != entry["metadata_sha256"]:
            write_file(root / side, read_metadata(str(root / path)))
            shelf.note(side)
            result.written.append(side)
        indexed.append(
            IndexedWheel(
                path.removeprefix("wheels/"),
                entry["sha256"],
                entry["size"],
                entry["metadata_sha256"],
                entry["requires_python"],
            )
        )
    wanted |= {f"{path}.metadata" for path in wanted}
    wanted |= {f"python/{Path(str(entry['path'])).name}" for entry in request.interpreters}
    texts = {**render_index(indexed), **_texts(request)}
    manifest = {
        path: BundleFile(entry["sha256"], entry["size"], entry.get("unpacked"))
        for path, entry in shelf.files.items()
        if path in wanted
    }
    for path, content in texts.items():
        manifest[path] = BundleFile(sha256_bytes(content), len(content))
    for model in _staged(request):
        place = root / "models" / str(model["name"])
        raw = (place / "manifest.json").read_bytes()
        manifest[f"models/{place.name}/manifest.json"] = BundleFile(sha256_bytes(raw), len(raw))
        for path, file in parse_manifest(raw, str(place / "manifest.json")).files.items():
            manifest[f"models/{place.name}/{path}"] = BundleFile(file.sha256, file.size)
    raw = BundleManifest(manifest).to_bytes()
    if _read(root / MANIFEST) != raw:
        # From here to its end the directory is no bundle: an interrupted run must not look like a whole one.
        (root / MANIFEST).unlink(missing_ok=True)
    for path, content in texts.items():
        if _read(root / path) != content:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            write_file(root / path, content)
            result.written.append(path)
    for path, _unused, _unused in list(bundle_files(root)):
        if path not in manifest:
            shelf.drop(path)
            result.removed.append(path)
    _remove_empty(root)
    shelf.save()
    if _read(root / MANIFEST) != raw:
        write_file(root / MANIFEST, raw)
        result.written.append(MANIFEST)
    result.manifest_sha256, result.bundle_id = sha256_bytes(raw), manifest_id(raw)
    result.size = sum(file.size for file in manifest.values())
    result.changed = bool(result.fetched or result.written or result.removed)


def _texts(request: BundleRequest) -> dict[str, bytes]:
    return {f"releases/{release.id}/requirements.txt": release.lock_text().encode() for release in request.releases}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _remove_empty(root: Path) -> None:
    for folder, _unused, _unused in os.walk(root, topdown=False):
        place = Path(folder)
        if place != root and WORK not in place.relative_to(root).parts and not any(place.iterdir()):
            place.rmdir()


def report(problems: Sequence[Problem]) -> str:
    """All problems for a person, packages with the same one on one line."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems:
        groups.setdefault((problem.source, problem.what, problem.remedy), []).append(problem.package)
    lines = []
    for (source, what, remedy), packages in groups.items():
        names = [name for name in packages if name]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        place = f" (source {source})" if source and source != DEFAULT_SOURCE else ""
        subject = f"{shown}{place}: " if shown else ""
        lines.append(f"{subject}{what}. {remedy}" if remedy else f"{subject}{what}")
    return "\n".join(lines)
