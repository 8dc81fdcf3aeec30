# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The builder of releases: a list of steps beside the final place, then one rename."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .download import DownloadError, download
from .record import (
    Overlap,
    RecordError,
    Settled,
    WheelRecord,
    check_overlaps,
    hash_files,
    normalise,
    read_records,
    reinstall_order,
    settle,
)
from .release_bytecode import BytecodeError, bytecode_path, compile_bytecode
from .release_manifest import Entry, Manifest, ManifestError, read_manifest, take_manifest, walk
from .source_patch import PatchError, apply_patch, check_path, expected_hashes
from .venv import (
    Uv,
    find_python,
    for_machine,
    install_interpreter,
    install_uv,
    put_in_place,
    remove_tree,
    tree_problems,
    writable_by_others,
)
from .venv_process import DiskFull, VenvError

PACKAGES = ("vllm", "litellm")  # what a release is made for
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
SHA256 = re.compile(r"[0-9a-f]{64}")
ORIGINALS = "originals"  # in a patched release: the files as their wheels brought them

# Bytes of a release per byte of its wheels, measured: 0.28.0 for CPU, 879 MB of wheels, 3.0 GB installed, with
# 0.5 GB of bytecode. A wheel whose unpacked size the mirror's manifest names is not estimated.
UNPACKED_PER_WHEEL_BYTE = 3.6
SPARE_BYTES = 64 << 20


class ReleaseError(RuntimeError):
    """A release could not be made; what was there before is untouched. The message says what, where, what to do."""


@dataclass(frozen=True)
class Release:
    """One entry of the plan's releases."""

    name: str
    id: str
    package: str  # one of PACKAGES
    version: str
    variant: str
    python: str
    lock_sha256: str
    interpreter: Mapping[str, Any] | None = None
    overlaps: tuple[Overlap, ...] = ()
    patches: tuple[Mapping[str, Any], ...] = ()
    flashinfer: Mapping[str, Any] | None = None  # what the release decides about FlashInfer, kept for people
    environment: Mapping[str, str] = field(default_factory=dict)  # what every instance of it needs

    @classmethod
    def from_plan(cls, entry: Mapping[str, Any]) -> Release:
        """The release that an entry of the plan describes.

        Raises:
            ReleaseError: the entry is no release.
        """
        package = next((key for key in PACKAGES if entry.get(key)), PACKAGES[0])
        try:
            release = cls(
                name=str(entry["name"]),
                id=str(entry["id"]),
                package=package,
                version=str(entry[package]),
                variant=str(entry["variant"]),
                python=str(entry["python"]),
                lock_sha256=str(entry["lock_sha256"]),
                interpreter=entry.get("interpreter") or None,
                overlaps=tuple(
                    Overlap(normalise(pair["winner"]), normalise(pair["loser"])) for pair in entry.get("overlaps") or ()
                ),
                patches=tuple(_given(patch) for patch in entry.get("patches") or ()),
                flashinfer=entry.get("flashinfer") or None,
                environment=dict(entry.get("environment") or {}),
            )
        except (KeyError, TypeError) as error:
            raise ReleaseError(f"release {entry.get('name', entry)}: {error} is missing") from error
        problems = check_overlaps(release.overlaps)
        if not ID.fullmatch(release.id):
            problems.append(f"id {release.id!r} cannot be a directory's name")
        if not re.fullmatch(r"3\.\d+", release.python):
            problems.append(f"python {release.python!r} is not of the form 3.12")
        if not re.fullmatch(r"[0-9a-f]{64}", release.lock_sha256):
            problems.append("lock_sha256 is not a sha256")
        problems += _patch_problems(release.patches)
        if problems:
            raise ReleaseError("\n".join(f"release {release.name}: {problem}" for problem in problems))
        return release

    def describe(self) -> dict[str, Any]:
        """As it stands in the manifest; what is not there is left out, so that manifests of older runs stay true."""
        more: dict[str, Any] = {}
        if self.patches:
            keys = ("name", "package", "file", "before", "after")
            more["patches"] = [{key: patch.get(key) for key in keys} for patch in self.patches]
        if self.environment:
            more["environment"] = dict(self.environment)
        return {
            "name": self.name,
            "id": self.id,
            self.package: self.version,
            "variant": self.variant,
            "python": self.python,
            "lock_sha256": self.lock_sha256,
            "interpreter": dict(self.interpreter) if self.interpreter else None,
            "overlaps": [{"winner": pair.winner, "loser": pair.loser} for pair in self.overlaps],
            **more,
        }


def _given(patch: Mapping[str, Any]) -> dict[str, Any]:
    """A patch with all it needs, and without the keys that an argument specification adds empty.

    Raises:
        KeyError: something is missing.
    """
    needed = {key: str(patch[key]) for key in ("name", "file", "before", "after")}
    return {key: value for key, value in patch.items() if value is not None} | needed


def _patch_problems(patches: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    files: dict[str, str] = {}
    for patch in patches:
        name, file = patch["name"], patch["file"]
        if wrong := check_path(file):
            problems.append(f"patch {name}: {wrong}")
        problems += [
            f"patch {name}: {key} is not a sha256" for key in ("before", "after") if not SHA256.fullmatch(patch[key])
        ]
        if ("edit" in patch) == ("diff" in patch):
            problems.append(f"patch {name} must have either edit or diff")
        if (other := files.setdefault(file, name)) != name:
            problems.append(f"patches {other} and {name} both change {file}")
    return problems


@dataclass(frozen=True)
class Site:
    """Where releases lie on this host, and what they come from."""

    root: Path
    mirror_url: str
    uv: Mapping[str, Any]
    verify: Literal["stat", "full"] = "stat"
    proxy: str | None = None

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def cache(self) -> Path:
        return self.root / "uv-cache"

    @property
    def uv_directory(self) -> Path:
        return self.root / "uv" / str(self.uv["version"])

    def path(self, release_id: str) -> Path:
        """The directory of a release."""
        return self.releases / release_id

    def interpreter_directory(self, release: Release) -> Path | None:
        """Where the release's own interpreter lies; None where the host's is used."""
        if release.interpreter is None:
            return None
        pinned = for_machine(release.interpreter)
        return self.root / "python" / f"{release.python}-{pinned.sha256[:8]}"


@dataclass
class Outcome:
    """What happened, or in check mode would happen, to one release."""

    id: str
    path: str
    state: Literal["present", "installed", "rebuilt", "absent", "removed"]
    reasons: list[str] = field(default_factory=list)  # why it was rebuilt
    packages: dict[str, str] | None = None  # None where check mode cannot know them yet
    seconds: dict[str, float] = field(default_factory=dict)
    size: int = 0  # bytes
    notes: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        return self.state in {"installed", "rebuilt", "removed"}


def inspect(site: Site, release: Release) -> Outcome:
    """How the host stands with one release: read only, needs neither mirror nor lock."""
    path = site.path(release.id)
    outcome = Outcome(release.id, os.fspath(path), "installed")
    if not path.is_dir():
        return outcome
    problems = tree_problems(path, full=site.verify == "full")
    if not problems:
        manifest = read_manifest(path)
        if manifest.about.get("release") != release.describe():
            problems = ["its manifest describes another release"]
        elif not os.access(path / "bin" / "python", os.X_OK):
            problems = [f"its interpreter {os.path.realpath(path / 'bin' / 'python')} is gone"]
        else:
            outcome.state = "present"
            outcome.packages = manifest.about["packages"]
            outcome.size = manifest.about["bytes"]
            return outcome
    outcome.state = "rebuilt"
    outcome.reasons = problems
    return outcome


def refuse_in_use(outcome: Outcome, remedy: str) -> None:
    """A release that a process runs from is not replaced or removed under it.

    Raises:
        ReleaseError: one does; the message names processes and files.
    """
    users = processes_using(Path(outcome.path))
    if users:
        why = f" differs from its manifest ({_few(outcome.reasons)}) and" if outcome.reasons else ""
        raise ReleaseError(f"Release {outcome.id}{why} is in use by {', '.join(users[:4])}. {remedy}")


def processes_using(directory: Path) -> list[str]:
    """The processes that run from a release: by their files in memory, working directory or arguments."""
    needle = os.fsencode(directory) + b"/"
    users = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            arguments = (process / "cmdline").read_bytes()
            if (
                any(word.startswith(needle) for word in arguments.split(b"\0"))
                or needle in (process / "maps").read_bytes()
            ):
                name = (process / "comm").read_text(errors="replace").strip()
                users.append(f"{name} (process {process.name})")
        except OSError:
            continue  # it ended, or is a kernel thread
    return users


def read_lock(site: Site, release: Release, attempts: int = 4) -> bytes:
    """The lock of a release, from the mirror, checked.

    Raises:
        ReleaseError: it cannot be had, or is another one.
    """
    url = f"{site.mirror_url}/releases/{release.id}/requirements.txt"
    with tempfile.TemporaryDirectory(prefix="onprem-vllm-") as beside:
        target = Path(beside, "requirements.txt")
        try:
            download(url, target, release.lock_sha256, attempts=attempts, timeout_s=20)
        except DownloadError as error:
            raise ReleaseError(
                f"The lock of release {release.name} cannot be had from the mirror: {error}. {error.mirror_remedy}"
            ) from error
        return target.read_bytes()


def locked_packages(lock: bytes) -> dict[str, str]:
    """Package -> version of every requirement in a lock.

    >>> locked_packages(b"Torch==2.13.0+cpu \\\\\\n    --hash=sha256:00\\n")
    {'torch': '2.13.0+cpu'}
    """
    found = (REQUIREMENT.match(line) for line in lock.decode("utf-8", "replace").splitlines())
    return {normalise(match[1]): match[2] for match in found if match}


@dataclass
class Build:
    """One build: what the steps hand on to each other."""

    site: Site
    release: Release
    lock: bytes
    outcome: Outcome
    python: Path
    directory: Path  # beside the final place
    siblings: list[tuple[Path, Manifest]]
    uv: Uv
    from_venv: set[str] = field(default_factory=set)
    records: list[WheelRecord] = field(default_factory=list)
    settled: Settled | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    uncompiled: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)

    @property
    def requirements(self) -> Path:
        return self.directory / "requirements.txt"

    @property
    def site_packages(self) -> Path:
        return self.directory / "lib" / f"python{self.release.python}" / "site-packages"

    @property
    def tag(self) -> str:
        """What Python names its bytecode by."""
        return f"cpython-{self.release.python.replace('.', '')}"

    @property
    def expected(self) -> Settled:
        if self.settled is None:
            raise ReleaseError("the overlaps were not settled before this step")
        return self.settled

    def read_records(self) -> None:
        """Read what the wheels claim, and decide who wins."""
        self.records = read_records(self.directory, self.site_packages)
        self.settled = settle(self.records, self.release.overlaps)


def make_venv(build: Build) -> None:
    """An empty environment beside the final place."""
    build.uv.make_venv(build.directory, build.python, f"{build.release.package} {build.release.name}")
    build.requirements.write_bytes(build.lock)
    build.from_venv = {path for _unused, path, entry in walk(build.directory) if entry is not None}


def install(build: Build) -> None:
    """Every wheel of the lock, from the mirror or the cache, and nothing else."""
    build.uv.install(build.directory, build.requirements)
    build.unmet = build.uv.unmet(build.directory)
    build.read_records()
    locked = locked_packages(build.lock)
    installed = {record.name: record.version for record in build.records}
    if missing := [f"{name} {version}" for name, version in locked.items() if installed.get(name) != version]:
        raise ReleaseError(
            f"uv left {_few(missing)} of the lock out: its markers do not fit Python {build.release.python} on "
            f"{os.uname().machine}. Lock the release for this platform."
        )


def settle_overlaps(build: Build) -> None:
    """Where wheels claim one path with different content, the winner's stands: uv leaves whichever came last."""
    contested = list(build.expected.contested)
    wrong = [
        path for path in contested if not (build.directory / path).is_file() or _wrong_content(build, path) is not None
    ]
    for name in reinstall_order(wrong, build.expected, build.release.overlaps):
        build.uv.unpack_again(build.directory, build.requirements, [name])


def check_against_record(build: Build) -> None:
    """Every file is what its wheel's RECORD says; a damaged cache is given one chance to be fetched anew."""
    damaged = _differences(build)
    if damaged:
        packages = sorted(damaged)
        build.uv.forget(packages)
        for path in build.hashes.keys() - build.expected.expected.keys() - build.from_venv:
            (build.directory / path).unlink()  # comes back where the wheel itself has it
        build.uv.unpack_again(build.directory, build.requirements, packages)
        build.read_records()
        settle_overlaps(build)
        still = _differences(build)
        # What a wheel brings without listing it is part of the locked wheel once it came fresh from the mirror.
        wrong = {name: [line for line in lines if not line.endswith(UNLISTED)] for name, lines in still.items()}
        if lines := [f"{name}: {line}" for name, found in sorted(wrong.items()) for line in found]:
            raise ReleaseError(
                "Files differ from their wheel's RECORD, or from what a release may have, even when fetched anew: "
                f"{_few(lines)}. "
                "The wheel itself is faulty: lock another version of it."
            )
        lines = [line for found in damaged.values() for line in found]
        build.outcome.notes.append(
            f"uv's cache held changed files of {', '.join(packages)} ({_few(lines)}); they were fetched anew. "
            "Somebody edited an installed file: releases that share it are named by their own check."
        )


UNLISTED = "in no wheel's RECORD"


def _differences(build: Build) -> dict[str, list[str]]:
    """Package -> what is wrong with its files. Fills ``build.hashes``: the one pass over the bytes."""
    expected = build.expected.expected
    present = {path for _unused, path, entry in walk(build.directory) if entry is not None and not entry.is_symlink()}
    trusted = _verified_elsewhere(build, present)
    other = {
        path: claim.algorithm
        for path, (_unused, claim) in expected.items()
        if claim is not None and claim.algorithm != "sha256"
    }
    found = {path: {"sha256": digest} for path, digest in trusted.items() if path not in other}
    found.update(hash_files(build.directory, sorted(present - found.keys()), other))
    build.hashes = {path: digests["sha256"] for path, digests in found.items()}
    wrong: dict[str, list[str]] = {}
    for path, (record, claim) in expected.items():
        if claim is None:
            continue
        if path not in found:
            wrong.setdefault(record.name, []).append(f"{path} is missing")
        elif found[path][claim.algorithm] != claim.digest:
            wrong.setdefault(record.name, []).append(
                f"{path} has {claim.algorithm} {found[path][claim.algorithm]}, RECORD says {claim.digest}"
            )
    info = os.stat(build.directory)
    owner = (info.st_uid, info.st_gid)
    for path in present & expected.keys():
        # Mode and owner belong to the inode, which the cache shares with every release.
        file = os.lstat(build.directory / path)
        if file.st_mode & 0o022 or (file.st_uid, file.st_gid) != owner:
            wrong.setdefault(expected[path][0].name, []).append(
                f"{path} has mode {file.st_mode & 0o7777:04o} and owner {file.st_uid}:{file.st_gid}"
            )
    # Whose a file is that no RECORD lists, nobody says: every package with files in its folder, or the nearest above.
    folders: dict[str, set[str]] = {}
    for path, (record, _unused) in expected.items():
        folders.setdefault(os.path.dirname(path), set()).add(record.name)
    for path in present - expected.keys() - build.from_venv:
        folder = os.path.dirname(path)
        while folder and folder not in folders:
            folder = os.path.dirname(folder)
        for name in folders.get(folder, ()):
            wrong.setdefault(name, []).append(f"{path} is {UNLISTED}")
    return wrong


def _verified_elsewhere(build: Build, present: set[str]) -> dict[str, str]:
    """Hashes of files that are hard links to those of a whole release, unchanged since that one was checked.

    The same trust that an unchanged run gives by stat; with ``verify: full`` nothing is taken on trust.
    """
    if build.site.verify == "full":
        return {}
    known: dict[str, str] = {}
    for root, manifest in build.siblings:
        for path, entry in manifest.entries():
            if path in present and path not in known and _is_same_file(build.directory / path, root / path, entry):
                known[path] = entry.sha256
    return known


def _is_same_file(one: Path, other: Path, entry: Entry) -> bool:
    try:
        here, there = os.lstat(one), os.lstat(other)
    except OSError:
        return False
    return (
        here.st_ino == there.st_ino
        and here.st_dev == there.st_dev
        and (here.st_size, here.st_mtime_ns) == (entry.size, entry.mtime_ns)
    )


def _wrong_content(build: Build, path: str) -> str | None:
    """The hash a file has where it is not the one it must have."""
    claim = build.expected.expected[path][1]
    if claim is None:
        return None
    ((_unused, found),) = hash_files(build.directory, [path], {path: claim.algorithm})
    return None if found[claim.algorithm] == claim.digest else found[claim.algorithm]


def apply_patches(build: Build) -> None:
    """The release's patches, on files that are what their wheels' RECORD says; the originals are kept beside."""
    prefix = build.site_packages.relative_to(build.directory).as_posix()
    originals = build.directory / ORIGINALS
    for patch in build.release.patches:
        apply_patch(build.site_packages, patch, originals)
        if (originals / patch["file"]).is_file():
            build.hashes[f"{ORIGINALS}/{patch['file']}"] = patch["before"]
        # Bytecode that the wheel brought went with the source: the next step makes it from the patched one.
        compiled = bytecode_path(f"{prefix}/{patch['file']}", build.tag)
        if not (build.directory / compiled).exists():
            build.hashes.pop(compiled, None)
    build.hashes.update({f"{prefix}/{path}": after for path, after in expected_hashes(build.release.patches).items()})


def add_bytecode(build: Build) -> None:
    """Bytecode beside every source: linked from a release that has the same source, else compiled."""
    prefix = f"lib/python{build.release.python}/site-packages/"
    sources = [path for path in build.hashes if path.startswith(prefix) and path.endswith(".py")]
    left = []
    made = set()
    for path in sources:
        compiled = bytecode_path(path, build.tag)
        if compiled in build.hashes:
            continue  # the wheel brings it
        digest = _linked_bytecode(build, path, compiled)
        if digest is None:
            left.append(path.removeprefix(prefix))
        else:
            build.hashes[compiled] = digest
    build.uncompiled = compile_bytecode(build.directory / "bin" / "python", build.site_packages, left)
    made = {bytecode_path(prefix + path, build.tag) for path in set(left) - set(build.uncompiled)}
    build.hashes.update((path, digests["sha256"]) for path, digests in hash_files(build.directory, sorted(made)))


def _linked_bytecode(build: Build, source: str, compiled: str) -> str | None:
    for root, manifest in build.siblings:
        theirs, entry = manifest.entry(source), manifest.entry(compiled)
        if theirs is None or entry is None or theirs.sha256 != build.hashes[source]:
            continue
        found = os.lstat(root / compiled)
        whole = (found.st_size, found.st_mtime_ns, found.st_mode & 0o7777) == entry[:3]
        if whole and (found.st_uid, found.st_gid) == manifest.owner:
            target = build.directory / compiled
            target.parent.mkdir(exist_ok=True)
            os.link(root / compiled, target)
            return entry.sha256
    return None


def seal(build: Build) -> None:
    """The manifest, written last: from here on the directory is whole."""
    if open_to_others := writable_by_others(build.directory):
        raise ReleaseError(f"Files that others may write: {_few(open_to_others)}. No release may have any.")
    packages = {record.name: record.version for record in build.records}
    about = {
        "release": build.release.describe(),
        "flashinfer": dict(build.release.flashinfer) if build.release.flashinfer else None,
        "uv": str(build.site.uv["version"]),
        "interpreter": os.fspath(build.python),
        "packages": packages,
        "unmet": build.unmet,
        "uncompiled": build.uncompiled,
        "bytes": 0,
    }
    manifest = take_manifest(build.directory, build.hashes, about)
    about["bytes"] = manifest.size
    manifest.write(build.directory)
    build.outcome.packages = packages
    build.outcome.size = manifest.size


def move_into_place(build: Build) -> None:
    """One rename; a damaged release that had the name is exchanged with it and then removed."""
    put_in_place(build.directory, build.site.path(build.release.id))


STEPS: list[tuple[str, Callable[[Build], None]]] = [
    ("venv", make_venv),
    ("install", install),
    ("overlaps", settle_overlaps),
    ("record", check_against_record),
    ("patches", apply_patches),
    ("bytecode", add_bytecode),
    ("manifest", seal),
    ("place", move_into_place),
]


def build_release(site: Site, release: Release, outcome: Outcome, lock: bytes) -> None:
    """Make one release whole, or leave the host as it was. Fills ``outcome``.

    Raises:
        ReleaseError: it could not be made.
    """
    with _timed(outcome, "uv"):
        ensure_uv(site)
    with _timed(outcome, "interpreter"):
        python = ensure_interpreter(site, release)
    site.cache.mkdir(parents=True, exist_ok=True)
    site.cache.chmod(0o700)  # uv's lock files in it are 0666
    build = Build(
        site=site,
        release=release,
        lock=lock,
        outcome=outcome,
        python=python,
        directory=site.releases / f".building-{release.id}",
        siblings=list(whole_siblings(site, release)),
        uv=Uv(site.uv_directory / "uv", site.mirror_url, site.cache, site.proxy),
    )
    try:
        for name, step in STEPS:
            with _timed(outcome, name):
                step(build)
    except (VenvError, RecordError, PatchError, BytecodeError, ManifestError, OSError) as error:
        full = (
            isinstance(error, DiskFull)
            or (isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT})
            or "No space left" in str(error)
        )
        shutil.rmtree(build.directory, ignore_errors=True)
        if full:
            freed = _forget_unshared(build)
            raise ReleaseError(
                f"The disk under {site.root} ran full while release {release.name} was installed; the partial build "
                f"{'and what it had put into the cache were' if freed else 'was'} removed. "
                "Free some space, or give releases a larger file system, and run again."
            ) from error
        raise ReleaseError(f"Release {release.name}: {error}") from error
    except BaseException:
        shutil.rmtree(build.directory, ignore_errors=True)
        raise


def _forget_unshared(build: Build) -> bool:
    """After a full disk: drop from the cache what no whole release shares, since it would keep the disk full."""
    shared = {pair for _unused, manifest in build.siblings for pair in manifest.about["packages"].items()}
    ours = locked_packages(build.lock)
    try:
        build.uv.forget([name for name, version in ours.items() if (name, version) not in shared])
        build.uv.prune()
    except VenvError:
        return False
    clear_leftovers(build.site)  # what uv was unpacking when the room ended
    return True


def whole_siblings(site: Site, release: Release) -> Iterator[tuple[Path, Manifest]]:
    """The other releases of the same Python on this host, newest first; their files are shared by hard links."""
    if not site.releases.is_dir():
        return
    folders = [
        entry for entry in site.releases.iterdir() if not entry.name.startswith(".") and entry.name != release.id
    ]
    for folder in sorted(folders, key=lambda entry: entry.stat().st_mtime, reverse=True):
        try:
            manifest = read_manifest(folder)
            if manifest.about["release"]["python"] == release.python:
                yield folder, manifest
        except (ManifestError, KeyError):
            continue  # damaged or half removed: not a source


def ensure_uv(site: Site) -> bool:
    """uv of the wanted version, whole; True when it had to be fetched.

    Raises:
        ReleaseError: it cannot be had.
    """
    if not tree_problems(site.uv_directory, full=site.verify == "full"):
        return False
    try:
        site.uv_directory.parent.mkdir(parents=True, exist_ok=True)
        install_uv(site.mirror_url, str(site.uv["version"]), for_machine(site.uv), site.uv_directory)
    except (VenvError, OSError) as error:
        raise ReleaseError(f"uv {site.uv['version']}: {error}") from error
    return True


def ensure_interpreter(site: Site, release: Release) -> Path:
    """The Python that the release runs on: the host's, or the one of its archive.

    Raises:
        ReleaseError: there is none.
    """
    try:
        directory = site.interpreter_directory(release)
        if directory is None or release.interpreter is None:
            return find_python(release.python)
        if tree_problems(directory, full=site.verify == "full"):
            directory.parent.mkdir(parents=True, exist_ok=True)
            install_interpreter(site.mirror_url, release.python, for_machine(release.interpreter), directory)
    except (VenvError, BytecodeError, OSError) as error:
        raise ReleaseError(f"Release {release.name}: {error}") from error
    return directory / "bin" / f"python{release.python}"


def space_problem(site: Site, locks: Mapping[str, bytes]) -> str | None:
    """Whether the wheels that this host lacks fit, unpacked, on its disk; None also where the mirror has no manifest.

    Args:
        locks: of the releases to be built, by name.
    """
    with tempfile.TemporaryDirectory(prefix="onprem-vllm-") as beside:
        target = Path(beside, "manifest.json")
        try:
            download(f"{site.mirror_url}/manifest.json", target, None, attempts=1, timeout_s=20)
            files = json.loads(target.read_bytes())["files"]
        except (DownloadError, ValueError, KeyError, TypeError):
            return None
    have: set[tuple[str, str]] = set()
    if site.releases.is_dir():
        for folder in site.releases.iterdir():
            try:
                have.update(read_manifest(folder).about["packages"].items())
            except (ManifestError, KeyError):
                continue
    by_hash = {entry["sha256"]: entry for path, entry in files.items() if path.endswith(".whl")}
    need = 0.0
    for lock in locks.values():
        for name, version, hashes in _lock_entries(lock):
            if (name, version) in have:
                continue
            have.add((name, version))
            for digest in hashes & by_hash.keys():
                entry = by_hash[digest]
                need += entry.get("unpacked") or entry["size"] * UNPACKED_PER_WHEEL_BYTE
    if not need:
        return None
    place = site.root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= need + SPARE_BYTES:
        return None
    return (
        f"{site.root} has {_gib(free)} free, and {', '.join(sorted(locks))} needs about {_gib(need + SPARE_BYTES)}. "
        "Free some space, or give releases a larger file system."
    )


def _lock_entries(lock: bytes) -> Iterator[tuple[str, str, set[str]]]:
    name, version, hashes = "", "", set[str]()
    for line in lock.decode("utf-8", "replace").splitlines():
        if match := REQUIREMENT.match(line):
            if name:
                yield name, version, hashes
            name, version, hashes = normalise(match[1]), match[2], set()
        hashes.update(HASH.findall(line))
    if name:
        yield name, version, hashes


def clear_leftovers(site: Site) -> None:
    """Remove what killed runs left: half built or half removed trees, and uv's temporary files.

    Only under the host's lock: nobody else builds then, and a killed build's uv died with it.
    """
    for folder in (site.releases, site.root / "python", site.root / "uv"):
        if folder.is_dir():
            for entry in folder.iterdir():
                if entry.name.startswith((".building-", ".removing-")):
                    shutil.rmtree(entry, ignore_errors=True)
    for entry in site.cache.glob(".tmp*"):
        shutil.rmtree(entry, ignore_errors=True)
    for entry in site.cache.glob("*/.tmp*"):
        shutil.rmtree(entry, ignore_errors=True)


@dataclass
class Report:
    """What a run did, or in check mode would do."""

    outcomes: list[Outcome]
    tools: list[str] = field(default_factory=list)  # uv and interpreters that were, or would be, installed

    @property
    def changed(self) -> bool:
        return bool(self.tools) or any(outcome.changed for outcome in self.outcomes)


def preview(site: Site, releases: Sequence[Release]) -> Report:
    """What ``apply`` would do. Reads the host, and the locks where the mirror stands already; writes nothing."""
    report = Report([inspect(site, release) for release in releases], _tools_missing(site, releases))
    for release, outcome in zip(releases, report.outcomes, strict=True):
        if outcome.changed:
            try:
                outcome.packages = locked_packages(read_lock(site, release, attempts=1))
            except ReleaseError:
                # On a virgin site the same run sets up the mirror first.
                outcome.notes.append(
                    "The mirror does not serve this release's lock yet, so its packages are not listed."
                )
    return report


def apply(site: Site, releases: Sequence[Release], *, rebuild_in_use: bool = False) -> Report:
    """Make every release whole; call it under the host's lock.

    Everything that can be known before is looked at first (locks, interpreters, space, processes), for all releases,
    so that none is built when another one cannot be.

    Args:
        rebuild_in_use: exchange a damaged release also under the processes that run from it.

    Raises:
        ReleaseError: a release could not be made; those that were whole stay so.
    """
    os.umask(0o022)
    clear_leftovers(site)
    report = Report([inspect(site, release) for release in releases], _tools_missing(site, releases))
    due = [pair for pair in zip(releases, report.outcomes, strict=True) if pair[1].changed]
    problems: list[str] = []
    locks: dict[str, bytes] = {}
    for release, outcome in due:
        try:
            if outcome.state == "rebuilt" and not rebuild_in_use:
                refuse_in_use(
                    outcome,
                    "Stop its instances and run again, or set uv_venv_rebuild: true to build it anew and exchange it "
                    "under them (they keep the files that they have loaded until they restart).",
                )
            if release.interpreter is None:
                find_python(release.python)
            locks[release.name] = read_lock(site, release)
        except (ReleaseError, VenvError) as error:
            problems.append(str(error))
    if not problems and locks and (problem := space_problem(site, locks)):
        problems.append(problem)
    if problems:
        raise ReleaseError("\n".join(problems))
    if releases:
        site.releases.mkdir(parents=True, exist_ok=True)
        ensure_uv(site)
    for release in releases:
        if release.interpreter:
            ensure_interpreter(site, release)
    for release, outcome in due:
        build_release(site, release, outcome, locks[release.name])
    return report


def _tools_missing(site: Site, releases: Sequence[Release]) -> list[str]:
    full = site.verify == "full"
    missing = []
    if releases and tree_problems(site.uv_directory, full=full):
        missing.append(f"uv {site.uv['version']}")
    for release in releases:
        directory = site.interpreter_directory(release)
        if directory is not None and tree_problems(directory, full=full):
            missing.append(f"Python {release.python} ({directory.name})")
    return sorted(set(missing))


def remove(site: Site, releases: Sequence[Release], *, check: bool) -> Report:
    """Remove releases; the cache keeps their wheels.

    Raises:
        ReleaseError: a process runs from one of them; none is removed then.
    """
    report = Report([])
    for release in releases:
        path = site.path(release.id)
        outcome = Outcome(release.id, os.fspath(path), "removed" if path.is_dir() else "absent")
        if outcome.changed:
            refuse_in_use(outcome, "Stop its instances first.")
        report.outcomes.append(outcome)
    if not check:
        clear_leftovers(site)
        for outcome in report.outcomes:
            if outcome.changed:
                remove_tree(Path(outcome.path))
    return report


def referenced_releases(configuration: Path = Path("/etc/vllm")) -> set[str]:
    """Ids of the releases that a generation of an instance on this host links to: what it runs, or may go back to."""
    links = configuration.glob("*/generations/*/release")
    return {os.path.basename(os.readlink(link)) for link in links if link.is_symlink()}


def prune(site: Site, wanted: Sequence[str], referenced: Collection[str], keep: int, *, check: bool) -> Report:
    """Remove the oldest releases until ``keep`` are left; those that something needs stay, and count.

    Args:
        wanted: ids that the plan names.
        referenced: ids that generations of instances link to, see referenced_releases().
    """
    report = Report([])
    folders = [entry for entry in site.releases.iterdir() if ID.fullmatch(entry.name)] if site.releases.is_dir() else []
    needed = [folder for folder in folders if folder.name in {*wanted, *referenced} or processes_using(folder)]
    idle = sorted(set(folders) - set(needed), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in idle[max(0, keep - len(needed)) :]:
        report.outcomes.append(Outcome(folder.name, os.fspath(folder), "removed"))
    if check or not report.outcomes:
        return report
    before = _installed_packages(folders)
    for outcome in report.outcomes:
        remove_tree(Path(outcome.path))
    # The cache holds hard links to the same files: without this no space is freed.
    left = _installed_packages(folder for folder in folders if folder.is_dir())
    uv = Uv(site.uv_directory / "uv", site.mirror_url, site.cache, site.proxy)
    if uv.program.is_file() and site.cache.is_dir():
        try:
            uv.forget(sorted({name for name, _unused in before - left}))
        except VenvError as error:
            report.outcomes[0].notes.append(f"uv's cache still holds its files: {error}")
    return report


def _installed_packages(folders: Iterable[Path]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for folder in folders:
        with suppress(ManifestError, KeyError):
            found.update(read_manifest(folder).about["packages"].items())
    return found


def remove_everything(site: Site, *, check: bool) -> Report:
    """Remove all that this module put under the root; other things there stay.

    Args:
        check: tell what would go; whoever takes a host back has stopped by then what runs now.

    Raises:
        ReleaseError: a process runs from a release; nothing is removed then.
    """
    report = Report([])
    if site.releases.is_dir():
        for folder in sorted(site.releases.iterdir()):
            outcome = Outcome(folder.name, os.fspath(folder), "removed")
            if not check:
                refuse_in_use(outcome, "Stop its instances first.")
            if not folder.name.startswith("."):
                report.outcomes.append(outcome)
    for name in ("releases", "python", "uv", "uv-cache"):
        folder = site.root / name
        if folder.is_dir():
            report.tools.append(os.fspath(folder))
            if not check:
                remove_tree(folder)
    if not check:
        # Something of others may lie in it.
        with suppress(OSError):
            site.root.rmdir()
    return report


@contextmanager
def _timed(outcome: Outcome, step: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        outcome.seconds[step] = round(time.monotonic() - began, 3)


def _few(lines: Sequence[str], count: int = 3) -> str:
    more = f" and {len(lines) - count} more" if len(lines) > count else ""
    return "; ".join(lines[:count]) + more


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
