# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Release definitions: read from catalogue/releases or an inventory, checked whole, identified by their content."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

from .catalogue import CatalogueError, read_yaml
from .flashinfer_set import Declaration, FlashInferError, known_pins, members_of, parse_declaration, set_problems
from .lock import LockError, parse_lock
from .patch_catalogue import Patch, PatchCatalogueError, PatchChoice, load_patches, patches_for
from .refused_versions import refusals
from .role_variables import Problem, nearest

CATALOGUE = Path(__file__).resolve().parents[2] / "catalogue"
DEFAULT_SOURCE = "default"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VARIANT = re.compile(r"cpu|cu\d{3}")
_PYTHON = re.compile(r"3\.\d{1,2}")
_PLATFORM = re.compile(r"(x86_64|aarch64)-manylinux_2_(\d{2})")
_VERSION = re.compile(r"\S.{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ARCHITECTURE = re.compile(r"cpu|sm\d{2,3}")
# Say what for and from where, not what: no part of the id. Of `patches` and `flashinfer` counts what they come to.
_APART = ("description", "for", "indexes", "sources", "lock", "patches", "flashinfer")
# What a release is made for: its main package, whose version it names under that key.
PACKAGES = ("vllm", "litellm")
_KEYS = (
    *("description", *PACKAGES, "variant", "python", "platform", "requirements", "overrides", "metadata_wheels"),
    *("indexes", "sources", "overlaps", "interpreter", "lock", "patches", "flashinfer", "for"),
)
_UNKNOWN = "there is no such key"
# What decides a lock: a release that takes another's has the same of each.
_LOCKED = (*PACKAGES, "variant", "python", "platform", "requirements", "overrides", "metadata_wheels")


class ReleaseError(ValueError):
    """A release that is unknown, or a definition that cannot be right; the message lists every problem.

    Attributes:
        problems: of a definition, each with the key that it is about (``patches``, ``for.profiles``; empty where it is
            about the whole) and what is wrong there.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = [_keyed(text) for text in problems]


def _keyed(text: str) -> tuple[str, str]:
    """A problem's text, which begins with the key where it is about one, in two parts."""
    key, mark, what = text.partition(": ")
    if mark and what.startswith(_UNKNOWN):
        return key, what
    match = re.fullmatch(r"(?s)(([a-z_]+)(?:\.[^\s:]+)?):? (.*)", text)
    return (match[1], match[3]) if match is not None and match[2] in _KEYS else ("", text)


@dataclass(frozen=True)
class MetadataWheel:
    """A wheel without files that this collection builds: it lets a distribution be found under another name."""

    name: str
    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overlap:
    """Two distributions that claim the same paths; the winner's files must lie there, every time."""

    winner: str
    loser: str


@dataclass(frozen=True)
class Release:
    """One locked software set.

    Attributes:
        package: its main package, one of PACKAGES.
        version: of that package.
        variant: the accelerator, ``none`` where its package uses none.
        python: version the closure is locked for, such as ``3.12``.
        platform: ``<machine>-manylinux_2_<minor>``, the oldest C library a host may have.
        sources: normalised package name to the only sources it may come from, first match wins.
        patches: those that are applied to its files, and those that its versions do not need.
        flashinfer: what it decides about FlashInfer on its own account.
        architectures: the GPU architectures it is made for, such as ``sm120``; ``cpu`` without a GPU.
        profiles: the profiles it is made for.
        lock_path: where the lock lies or would lie.
        lock_of: the release whose lock this is; the release's own name where it has one itself.
        lock_sha256: None while there is no lock; such a release cannot be bundled or installed.
    """

    name: str
    package: str
    version: str
    variant: str
    python: str
    platform: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...]
    metadata_wheels: tuple[MetadataWheel, ...]
    indexes: Mapping[str, str]
    sources: Mapping[str, tuple[str, ...]]
    overlaps: tuple[Overlap, ...]
    interpreter: Mapping[str, str] | None
    description: str
    patches: PatchChoice
    flashinfer: Declaration
    architectures: tuple[str, ...]
    profiles: tuple[str, ...]
    lock_path: Path
    lock_of: str
    lock_sha256: str | None
    id: str = field(default="")

    @property
    def vllm(self) -> str:
        """vLLM's version, empty where it is no release of vLLM."""
        return self.version if self.package == "vllm" else ""

    @property
    def accelerator(self) -> str:
        """``cpu``, ``cuda`` or ``none``."""
        return "cuda" if self.variant.startswith("cu") else self.variant

    @property
    def machine(self) -> str:
        """``x86_64`` or ``aarch64``."""
        return self.platform.split("-", 1)[0]

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest C library a host may have, as (major, minor)."""
        return 2, int(self.platform.rsplit("_", 1)[1])

    def sources_of(self, package: str) -> tuple[str, ...]:
        """The only sources ``package`` (any spelling) may come from, first match wins."""
        return self.sources.get(canonicalize_name(package), (DEFAULT_SOURCE,))

    def lock_text(self) -> str:
        """The lock.

        Raises:
            ReleaseError: there is none.
        """
        if self.lock_sha256 is None:
            raise ReleaseError(
                f"Release {self.name} has no lock ({self.lock_path} does not exist). "
                f"Make it where its indexes can be reached: make lock RELEASE={self.lock_of}"
            )
        return self.lock_path.read_text(encoding="utf-8")

    def locked(self) -> Mapping[str, str]:
        """Every package of the lock with its version; none where there is no lock.

        Raises:
            ReleaseError: the lock cannot be trusted.
        """
        return {} if self.lock_sha256 is None else _locked(self.lock_path, self.lock_sha256)

    def set_problems(self) -> list[Problem]:
        """Whether the FlashInfer packages of its lock are one set, as far as the catalogue knows vLLM's own pins.

        Raises:
            ReleaseError: the lock cannot be trusted.
        """
        if self.lock_sha256 is None or not self.vllm:
            return []
        where = f"release {self.name}"
        return set_problems(self.locked(), self.vllm, known_pins(self.vllm), self.flashinfer, self.variant, where)

    def carries(self, patch: str) -> bool:
        """Whether a patch is applied to it."""
        return any(chosen.patch.name == patch for chosen in self.patches.apply)

    def as_plan(self) -> dict[str, Any]:
        """The release as it stands in a plan (docs/design.md, ``releases``)."""
        return {
            "name": self.name,
            "id": self.id,
            self.package: self.version,
            "variant": self.variant,
            "python": self.python,
            "lock_sha256": self.lock_sha256,
            "interpreter": dict(self.interpreter) if self.interpreter else None,
            "overlaps": [{"winner": o.winner, "loser": o.loser} for o in self.overlaps],
            "patches": self.patches.as_plan(),
            "flashinfer": _declared(self.flashinfer),
            "flashinfer_set": members_of(self.locked()),
            "environment": self.flashinfer.environment(),
        }


@lru_cache(maxsize=64)
def _locked(path: Path, sha256: str) -> Mapping[str, str]:
    """Read once for all hosts."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ReleaseError(f"{path} was changed while it was read; run again")
    try:
        return {pin.name: pin.version for pin in parse_lock(content.decode(), str(path))}
    except (LockError, UnicodeDecodeError) as error:
        raise ReleaseError(str(error)) from error


def _declared(declaration: Declaration) -> dict[str, Any] | None:
    """The declaration as plain data, None where it says nothing."""
    if declaration == Declaration():
        return None
    return {
        "overrides": dict(declaration.overrides),
        "reason": declaration.reason,
        "disable_version_check": declaration.disable_version_check,
    }


def shipped_releases(catalogue: Path = CATALOGUE) -> list[str]:
    """Names of the releases in the catalogue, sorted."""
    return sorted(path.stem for path in (catalogue / "releases").glob("*.yml"))


def load_release(
    name: str,
    extra: Mapping[str, Any] | None = None,
    catalogue: Path = CATALOGUE,
    patches: Mapping[str, Patch] | None = None,
) -> Release:
    """Read, check and identify one release.

    Args:
        extra: definitions from an inventory by name, looked up before the catalogue. Such a definition names its
            lock's absolute path in ``lock``, or a release whose lock is its own, too.
        patches: all patches by name; the shipped ones where None.

    Raises:
        ReleaseError: unknown name or wrong definition; every problem is listed.
    """
    definition, where, lock_path = _find(name, extra or {}, catalogue)
    problems: list[str] = []
    unlike: list[str] = []
    lock_of = name
    if _shares_lock(definition):
        lock_of = definition["lock"]
        lock_path = _other_lock(definition, lock_of, extra or {}, catalogue, problems, unlike) or lock_path
    release = _parse(name, definition, lock_path, lock_of, patches, problems)
    if not problems:  # what is wrong in itself is not like any other's
        problems = unlike
    if problems:
        raise ReleaseError(f"{where}: " + "; ".join(problems), problems)
    return release


def load_uv(catalogue: Path = CATALOGUE) -> dict[str, Any]:
    """The uv that hosts get: ``{"version": …, "wheels": {machine: {"file": …, "sha256": …}}}``."""
    return read_yaml(catalogue / "uv.yml")


def _find(name: str, extra: Mapping[str, Any], catalogue: Path) -> tuple[dict[str, Any], str, Path]:
    if not _NAME.fullmatch(name):
        raise ReleaseError(
            f"{name!r} is no release name: small letters, digits, dots, hyphens and underscores, at most 64"
        )
    path = catalogue / "releases" / f"{name}.yml"
    if name in extra:
        definition = json.loads(json.dumps(extra[name]))  # plain types, whatever the inventory's parser tagged
        lock = definition.get("lock") if isinstance(definition, dict) else None
        own = Path(lock) if isinstance(lock, str) and lock else path.with_suffix(".txt")
        return definition, f"release {name} (inventory)", own
    if not path.is_file():
        known = ", ".join(sorted({*shipped_releases(catalogue), *map(str, extra)}))
        raise ReleaseError(f"There is no release {name!r}. Known are: {known}")
    try:
        definition = read_yaml(path)
    except CatalogueError as error:
        raise ReleaseError(f"{path}: not YAML: {error}") from None
    return definition, str(path), path.with_suffix(".txt")


def _shares_lock(definition: Any) -> bool:
    """Whether it names another release in ``lock``, and not a file."""
    lock = definition.get("lock") if isinstance(definition, dict) else None
    return isinstance(lock, str) and "/" not in lock


def _other_lock(
    definition: Mapping[str, Any],
    other: str,
    extra: Mapping[str, Any],
    catalogue: Path,
    problems: list[str],
    others: list[str],
) -> Path | None:
    """The lock of another release, which must be locked for the very same: ``others`` gets what is not."""
    try:
        theirs, _where, path = _find(other, extra, catalogue)
    except ReleaseError as error:
        problems.append(f"lock: {error}")
        return None
    if not isinstance(theirs, dict):
        problems.append(f"lock: the definition of release {other} is no mapping")
    elif _shares_lock(theirs):
        problems.append(f"lock: release {other} has none of its own: name {theirs['lock']}, whose lock it takes")
    else:
        if unlike := [key for key in _LOCKED if (definition.get(key) or []) != (theirs.get(key) or [])]:
            others.append(
                f"lock: release {other} is locked for other {', '.join(unlike)}: make them equal, or make a lock of "
                "its own"
            )
        return path
    return None


def _parse(
    name: str,
    definition: Any,
    lock_path: Path,
    lock_of: str,
    patches: Mapping[str, Patch] | None,
    problems: list[str],
) -> Release:
    if not isinstance(definition, dict):
        raise ReleaseError(f"release {name}: a definition is a mapping, found {type(definition).__name__}")
    problems.extend(f"{key}: {_UNKNOWN}; {nearest(str(key), _KEYS)}" for key in definition if key not in _KEYS)

    def text(key: str, pattern: re.Pattern[str] | None, form: str) -> str:
        value = definition.get(key)
        if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
            problems.append(f"{key} is {value!r}, expected {form}")
            return ""
        return value

    named = [key for key in PACKAGES if key in definition]
    if len(named) > 1:
        problems.append(f"names {' and '.join(named)}: a release is made for one of them")
    package = named[0] if named else PACKAGES[0]
    version = text(package, _VERSION, 'a version in quotes, such as "0.28.0"')
    if version:
        try:
            Version(version)
        except InvalidVersion:
            problems.append(f"{package} is {version!r}, which is no version")
        problems.extend(refusals({package: version}))
    variant = "none"
    if package == "vllm":
        variant = text("variant", _VARIANT, "cpu or a CUDA variant such as cu130")
    elif unfit := sorted({"variant", "patches", "flashinfer"} & set(definition)):
        problems.extend(f"{key}: only a release of vLLM has that" for key in unfit)
    python = text("python", _PYTHON, 'a Python version in quotes, such as "3.12"')
    platform = text("platform", _PLATFORM, "<x86_64 or aarch64>-manylinux_2_<minor>, such as x86_64-manylinux_2_36")
    requirements = _requirements(definition, "requirements", problems)
    if not definition.get("requirements"):
        problems.append(f"requirements is empty: at least {package} itself must stand there, with its version")
    overrides = _requirements(definition, "overrides", problems)
    wheels = tuple(
        MetadataWheel(
            str(entry["name"]), str(entry["version"]), _requirements(entry, "requires", problems, "metadata_wheels.")
        )
        for entry in _entries(definition, "metadata_wheels", {"name", "version"}, {"requires"}, problems)
    )
    overlaps = tuple(
        Overlap(canonicalize_name(str(entry["winner"])), canonicalize_name(str(entry["loser"])))
        for entry in _entries(definition, "overlaps", {"winner", "loser"}, set(), problems)
    )
    problems.extend(f"overlaps: {o.winner} with itself" for o in overlaps if o.winner == o.loser)
    indexes, sources = _sources(definition, problems)
    interpreter = definition.get("interpreter")
    if interpreter is not None and not (
        isinstance(interpreter, dict)
        and set(interpreter) == {"file", "sha256"}
        and "/" not in str(interpreter["file"])
        and _SHA256.fullmatch(str(interpreter["sha256"]))
    ):
        problems.append("interpreter must have exactly file (a name without a path) and sha256 (64 hex digits)")
    lock_sha256 = hashlib.sha256(lock_path.read_bytes()).hexdigest() if lock_path.is_file() else None
    if lock_sha256 is not None:
        with suppress(ReleaseError):  # said where the lock is used: a definition can be read without it
            problems.extend(f"lock {lock_path.name}: {found}" for found in refusals(_locked(lock_path, lock_sha256)))
    if not isinstance(definition.get("lock", ""), str):
        problems.append(f"lock is {definition['lock']!r}, expected a path, or the name of a release")
    elif "lock" in definition and lock_of == name:
        if not lock_path.is_absolute():
            problems.append(
                f"lock is {str(lock_path)!r}, expected an absolute path, such as {{{{ inventory_dir }}}}/x.txt"
            )
        if lock_sha256 is None:
            problems.append(f"lock {lock_path} does not exist")
    declaration = Declaration()
    try:
        declaration = parse_declaration(definition.get("flashinfer"), f"release {name}")
    except FlashInferError as error:
        problems.extend(_told(one, f"release {name}.") for one in error.problems)
    architectures, profiles = _made_for(definition, problems)
    chosen = PatchChoice((), ())
    if definition.get("patches") and version and not problems:
        chosen = _patches(definition["patches"], version, lock_path, lock_sha256, patches, problems)
    identity = {key: value for key, value in definition.items() if key not in _APART}
    # Left out where there is none, so that a release without patches keeps the id it had before there were any.
    if chosen.apply:
        identity["patches"] = chosen.as_plan()
    if declaration != Declaration():
        # Not the reason: another wording is not another release.
        identity["flashinfer"] = [dict(declaration.overrides), declaration.disable_version_check]
    canonical = json.dumps([identity, lock_sha256], sort_keys=True, separators=(",", ":"))
    return Release(
        name=name,
        package=package,
        version=version,
        variant=variant,
        python=python,
        platform=platform,
        requirements=requirements,
        overrides=overrides,
        metadata_wheels=wheels,
        indexes=indexes,
        sources=sources,
        overlaps=overlaps,
        interpreter=interpreter,
        description=str(definition.get("description", "")),
        patches=chosen,
        flashinfer=declaration,
        architectures=architectures,
        profiles=profiles,
        lock_path=lock_path,
        lock_of=lock_of,
        lock_sha256=lock_sha256,
        id=f"{name}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}",
    )


def _patches(
    wanted: Any,
    vllm: str,
    lock_path: Path,
    lock_sha256: str | None,
    patches: Mapping[str, Patch] | None,
    problems: list[str],
) -> PatchChoice:
    """The patches that the release names, for the versions that it locks."""
    if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
        problems.append(f"patches is {wanted!r}, expected a list of names")
        return PatchChoice((), ())
    try:
        known = load_patches() if patches is None else patches
        locked = _locked(lock_path, lock_sha256) if lock_sha256 is not None else {}
        return patches_for(vllm, wanted, known, locked)
    except PatchCatalogueError as error:
        problems.extend(map(_told, error.problems))
    except ReleaseError as error:
        problems.append(f"lock: {error}")
    return PatchChoice((), ())


def _told(found: Problem, of: str = "") -> str:
    return f"{found['where'].removeprefix(of)}: {found['what']}. {found['remedy']}"


def _made_for(definition: Mapping[str, Any], problems: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    value = definition.get("for", {})
    if not isinstance(value, dict) or not set(value) <= {"architectures", "profiles"}:
        problems.append(f"for is {value!r}, expected architectures and profiles, a list each")
        return (), ()
    lists = []
    for key, pattern, form in (
        ("architectures", _ARCHITECTURE, "such as sm120, or cpu"),
        ("profiles", None, "names of profiles"),
    ):
        found = value.get(key, [])
        if not isinstance(found, list) or not all(
            isinstance(one, str) and (pattern is None or pattern.fullmatch(one)) for one in found
        ):
            problems.append(f"for.{key} is {found!r}, expected a list, {form}")
            found = []
        lists.append(tuple(found))
    return lists[0], lists[1]


def _requirements(definition: Mapping[str, Any], key: str, problems: list[str], prefix: str = "") -> tuple[str, ...]:
    value = definition.get(key, [])
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        problems.append(f"{prefix}{key} must be a list of requirement lines")
        return ()
    for line in value:
        try:
            if Requirement(line).url:
                problems.append(f"{prefix}{key}: {line!r} names an address; say in sources where a package comes from")
        except InvalidRequirement as error:
            problems.append(f"{prefix}{key}: {line!r} is no requirement: {str(error).splitlines()[0]}")
    return tuple(value)


def _entries(
    definition: Mapping[str, Any], key: str, needed: set[str], optional: set[str], problems: list[str]
) -> Iterable[dict[str, Any]]:
    value = definition.get(key, [])
    if not isinstance(value, list):
        problems.append(f"{key} must be a list")
        return
    for entry in value:
        if isinstance(entry, dict) and needed <= set(entry) <= needed | optional:
            yield entry
        else:
            allowed = f" (and may have {', '.join(sorted(optional))})" if optional else ""
            problems.append(f"{key}: {entry!r} must have {', '.join(sorted(needed))}{allowed} and nothing else")


def _sources(definition: Mapping[str, Any], problems: list[str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    indexes: dict[str, str] = {}
    wrong = False
    declared = definition.get("indexes", {})
    if not isinstance(declared, dict):
        problems.append("indexes must map a name to an address")
        declared = {}
        wrong = True
    named = {DEFAULT_SOURCE, *map(str, declared)}
    for index, url in declared.items():
        if index == DEFAULT_SOURCE:
            problems.append(f"indexes: {DEFAULT_SOURCE} is the index as pip is configured and cannot be named anew")
        elif not isinstance(url, str) or not re.match(r"(https?|file)://|/", url):
            problems.append(f"indexes.{index} is {url!r}, expected http(s)://, file:// or a directory's absolute path")
        else:
            indexes[index] = url.rstrip("/")
    sources: dict[str, tuple[str, ...]] = {}
    declared = definition.get("sources", {})
    if not isinstance(declared, dict):
        problems.append("sources must map a package to a list of sources")
        declared = {}
    for package, names in declared.items():
        if not isinstance(names, list) or not names:
            problems.append(f"sources.{package} must be a list with at least one source")
            continue
        missing = [name for name in names if name not in named]
        if not wrong:
            problems.extend(f"sources.{package}: there is no index {name!r} in indexes" for name in missing)
        sources[canonicalize_name(str(package))] = tuple(map(str, names))
    return indexes, sources
