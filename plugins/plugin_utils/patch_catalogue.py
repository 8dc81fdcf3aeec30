# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Patches: read from catalogue/patches and the inventory, checked whole, chosen for the versions of a release."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version
except ImportError as error:  # part of every ansible-core's requirements
    PACKAGING_MISSING: ImportError | None = error
else:
    PACKAGING_MISSING = None

from ..module_utils.source_patch import PatchError, check_diff, check_path
from .catalogue import COLLECTION, CatalogueError, read_yaml
from .plain import plain
from .role_variables import Problem, nearest, sentence
from .role_variables import problem as _problem

SHIPPED = COLLECTION / "catalogue" / "patches"
INVENTORY_VARIABLE = "vllm_patches"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = {
    "package": "the distribution that brings the file, such as vllm",
    "file": "its path in site-packages, such as vllm/config.py",
    "why": "what goes wrong without the patch",
    "upstream": "addresses of the upstream issue and pull request, as a list",
    "entries": "a list of versions, before, after",
}
_OPTIONAL = ("needless", "edit", "diff")


def _need_packaging() -> None:
    if PACKAGING_MISSING is not None:
        raise ImportError(
            f"{PACKAGING_MISSING}. onprem.vllm needs the Python package packaging, which ansible-core brings: install "
            "ansible-core anew in the environment that runs Ansible"
        ) from PACKAGING_MISSING


def problem(where: str, what: str, remedy: str) -> Problem:
    """A problem whose remedy is a sentence."""
    return _problem(where, what, remedy if remedy.endswith((".", "?")) else f"{remedy}.")


class PatchCatalogueError(ValueError):
    """Patches that are wrong in themselves, unknown, or not for these versions.

    Attributes:
        problems: every one, as ``where``, ``what``, ``remedy``; the message lists them all.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{one['where']}: {one['what']}. {one['remedy']}" for one in problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class Entry:
    """The file as some versions of the package have it: its sha256 before and after the patch, and how it gets there.

    Attributes:
        edit: steps of exact text (``find``, ``replace``, ``times``); None where there is a ``diff``.
        diff: a unified diff; None where there is an ``edit``.
    """

    versions: SpecifierSet
    before: str
    after: str
    edit: tuple[Mapping[str, Any], ...] | None
    diff: str | None


@dataclass(frozen=True)
class Patch:
    """One fault of one file, and its cure for each version that has it.

    Attributes:
        needless: versions that do not have the fault, with the reason.
    """

    name: str
    package: str
    file: str
    why: str
    upstream: tuple[str, ...]
    needless: tuple[tuple[SpecifierSet, str], ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class ChosenPatch:
    """A patch for one version of its package."""

    patch: Patch
    version: str
    entry: Entry

    def as_plan(self) -> dict[str, Any]:
        """What a host's release module needs of it, as plain data; also what makes the release another one.

        The reasons stay here: another wording is not another release.
        """
        plan: dict[str, Any] = {
            "name": self.patch.name,
            "package": self.patch.package,
            "file": self.patch.file,
            "before": self.entry.before,
            "after": self.entry.after,
        }
        if self.entry.diff is not None:
            return {**plan, "diff": self.entry.diff}
        return {**plan, "edit": [dict(step) for step in self.entry.edit or ()]}


@dataclass(frozen=True)
class Needless:
    """A wanted patch that this version of its package does not need, left out by itself."""

    name: str
    reason: str


@dataclass(frozen=True)
class PatchChoice:
    """What is applied to a release, in order, and what was left out."""

    apply: tuple[ChosenPatch, ...]
    needless: tuple[Needless, ...]

    def as_plan(self) -> list[dict[str, Any]]:
        """The patches to apply, as they stand in a plan's release."""
        return [chosen.as_plan() for chosen in self.apply]


def load_patches(extra: Mapping[str, Any] | None = None, shipped: Path = SHIPPED) -> dict[str, Patch]:
    """All patches by name: the shipped ones, and the inventory's in front of them.

    Args:
        extra: ``vllm_patches``, in the form of ``catalogue/patches/*.yml``.

    Raises:
        PatchCatalogueError: some are wrong; every problem is listed.
    """
    _need_packaging()
    problems: list[Problem] = []
    found: dict[str, Patch] = {}
    sources: list[tuple[str, str, Any]] = []
    for path in sorted(shipped.glob("*.yml")):
        try:
            sources.append((path.stem, f"catalogue/patches/{path.name}", read_yaml(path)))
        except CatalogueError as error:
            problems.append(problem(f"catalogue/patches/{path.name}", f"not YAML: {error}", "Correct the file."))
    for name, definition in (extra or {}).items():
        sources.append((plain(name), f"{INVENTORY_VARIABLE}.{name}", plain(definition)))
    for name, where, definition in sources:
        count = len(problems)
        patch = _Definition(name, where, definition, problems).patch()
        if patch is not None and len(problems) == count:
            found[name] = patch
    if problems:
        raise PatchCatalogueError(problems)
    return found


def patches_for(
    vllm_version: str,
    wanted: Iterable[str],
    patches: Mapping[str, Patch],
    pins: Mapping[str, str] | None = None,
    where: str = "patches",
) -> PatchChoice:
    """Choose what a release gets of the patches that it and the profiles want.

    Args:
        vllm_version: the release's vLLM.
        wanted: names, in the order of application; one that is named twice counts once.
        pins: versions of the other packages by name, from the lock: needed where a patch is for one of them.
        where: the setting that names them, for messages.

    Raises:
        PatchCatalogueError: a name is unknown, a patch is for none of these versions, or two change one file.
    """
    _need_packaging()
    problems: list[Problem] = []
    apply: list[ChosenPatch] = []
    needless: list[Needless] = []
    versions: dict[str, str] = {canonicalize_name(name): version for name, version in (pins or {}).items()}
    versions["vllm"] = vllm_version
    for name in dict.fromkeys(wanted):
        patch = patches.get(name)
        if patch is None:
            problems.append(problem(where, f"there is no patch {name!r}", sentence(nearest(str(name), patches))))
            continue
        version = versions.get(patch.package)
        if version is None:
            problems.append(
                problem(
                    where,
                    f"patch {name} is for {patch.package}, which the release does not lock",
                    "Take the patch out, or make the release's lock first",
                )
            )
            continue
        outcome = _choose(patch, version, where)
        if isinstance(outcome, ChosenPatch):
            apply.append(outcome)
        elif isinstance(outcome, Needless):
            needless.append(outcome)
        else:
            problems.append(outcome)
    by_file: dict[str, str] = {}
    for chosen in apply:
        other = by_file.setdefault(chosen.patch.file, chosen.patch.name)
        if other != chosen.patch.name:
            problems.append(
                problem(
                    where,
                    f"patches {other} and {chosen.patch.name} both change {chosen.patch.file} as the wheel brings it",
                    f"Write one patch that does both and put it into {INVENTORY_VARIABLE}",
                )
            )
    if problems:
        raise PatchCatalogueError(problems)
    return PatchChoice(tuple(apply), tuple(needless))


def _choose(patch: Patch, version: str, where: str) -> ChosenPatch | Needless | Problem:
    this = f"{patch.package} {version}"
    try:
        parsed = Version(version)
    except InvalidVersion:
        return problem(where, f"{version!r} is no version of {patch.package}", "Correct the release")
    entries = [entry for entry in patch.entries if entry.versions.contains(parsed, prereleases=True)]
    reasons = [reason for versions, reason in patch.needless if versions.contains(parsed, prereleases=True)]
    if len(entries) + len(reasons) > 1:
        return problem(
            where,
            f"patch {patch.name} says more than one thing about {this}: its entries and needless ranges overlap",
            "Make the ranges of the patch disjoint",
        )
    if entries:
        return ChosenPatch(patch, version, entries[0])
    if reasons:
        return Needless(patch.name, f"{this} does not need it: {reasons[0]}")
    known = ", ".join(str(entry.versions) for entry in patch.entries)
    past = "".join(f"; not needed for {versions}" for versions, reason in patch.needless)
    return problem(
        where,
        f"patch {patch.name} does not know {this} (made for {known}{past})",
        f"See whether that version has the fault ({patch.upstream[0]}); then add an entry with the hashes of its file, "
        f"or a needless range, under the same name in {INVENTORY_VARIABLE}",
    )


class _Definition:
    """One definition on its way to a patch; what is wrong is added to ``problems``."""

    def __init__(self, name: Any, where: str, content: Any, problems: list[Problem]) -> None:
        self.name, self.where, self.content, self.problems = name, where, content, problems

    def _wrong(self, key: str, what: str, remedy: str) -> None:
        self.problems.append(problem(f"{self.where}.{key}" if key else self.where, what, remedy))

    def patch(self) -> Patch | None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            self._wrong(
                "", "is no name of a patch", "Use small letters, digits, dots, hyphens, underscores, at most 64"
            )
        if not isinstance(self.content, dict):
            self._wrong("", f"is {type(self.content).__name__}", f"Write a mapping with {', '.join(_KEYS)} and an edit")
            return None
        self._unknown("", self.content, (*_KEYS, *_OPTIONAL))
        package, file, why = (self._text(key) for key in ("package", "file", "why"))
        if file and (wrong := check_path(file)) is not None:
            self._wrong("file", wrong, "Write the path as the wheel's RECORD has it")
        return Patch(
            name=self.name,
            package=canonicalize_name(package),
            file=file,
            why=why,
            upstream=self._upstream(),
            needless=self._needless(),
            entries=self._entries(),
        )

    def _unknown(self, key: str, content: Mapping[Any, Any], known: Sequence[str]) -> None:
        for found in content:
            if found not in known:
                self._wrong(f"{key}.{found}".lstrip("."), "there is no such key", sentence(nearest(str(found), known)))

    def _text(self, key: str) -> str:
        value = self.content.get(key)
        if isinstance(value, str) and value.strip():
            return value
        self._wrong(key, "is missing" if value is None else f"is {value!r}, which is no text", f"Write {_KEYS[key]}")
        return ""

    def _upstream(self) -> tuple[str, ...]:
        value = self.content.get("upstream")
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
            self._wrong("upstream", f"is {value!r}", f"Write {_KEYS['upstream']}; a site's own ticket will do")
            return ()
        return tuple(listed)

    def _versions(self, key: str, value: Any) -> SpecifierSet:
        try:
            # An empty range is every version: a patch for all that is to come is no guarded patch.
            if not isinstance(value, str) or not value.strip():
                raise InvalidSpecifier(repr(value))
            return SpecifierSet(value)
        except InvalidSpecifier:
            self._wrong(key, f"{value!r} is no range of versions", 'Write it in quotes, like ">=0.26.0,<=0.28.0"')
            return SpecifierSet("!=0")

    def _mappings(self, key: str, value: Any, form: str) -> list[tuple[str, dict[str, Any]]]:
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            self._wrong(key, "is missing" if value is None else "is no list of mappings", f"Write {form}")
            return []
        return [(f"{key}[{number}]", one) for number, one in enumerate(value)]

    def _needless(self) -> tuple[tuple[SpecifierSet, str], ...]:
        value = self.content.get("needless")
        if value is None:
            return ()
        ranges = []
        for key, one in self._mappings("needless", value, "a list of versions, because"):
            self._unknown(key, one, ("versions", "because"))
            if not isinstance(one.get("because"), str):
                self._wrong(f"{key}.because", "is missing", "Write why these versions do not need the patch")
            ranges.append((self._versions(f"{key}.versions", one.get("versions")), str(one.get("because"))))
        return tuple(ranges)

    def _entries(self) -> tuple[Entry, ...]:
        common = self._change("", self.content)
        entries = []
        for key, one in self._mappings("entries", self.content.get("entries"), _KEYS["entries"]):
            self._unknown(key, one, ("versions", "before", "after", "edit", "diff"))
            edit, diff = self._change(key, one) or common or (None, None)
            if edit is None and diff is None:
                self._wrong(key, "has neither edit nor diff", "Write one of them, here or for all entries of the patch")
            before, after = (self._sha256(f"{key}.{which}", one.get(which)) for which in ("before", "after"))
            if before and before == after:
                self._wrong(f"{key}.after", "is the hash before the patch", "Write the sha256 of the patched file")
            entries.append(Entry(self._versions(f"{key}.versions", one.get("versions")), before, after, edit, diff))
        return tuple(entries)

    def _sha256(self, key: str, value: Any) -> str:
        if isinstance(value, str) and _SHA256.fullmatch(value):
            return value
        what = "is missing: a patch without it would be applied to whatever lies there"
        if value is not None:
            what = f"is {value!r}, no sha256 of 64 small hex digits in quotes"
        self._wrong(key, what, "Write what sha256sum says of the file " + key.rpartition(".")[2] + " the patch")
        return ""

    def _change(
        self, prefix: str, content: Mapping[str, Any]
    ) -> tuple[tuple[Mapping[str, Any], ...] | None, str | None] | None:
        """Edit or diff; None where there is neither, a pair of None where what stands there is wrong."""
        edit, diff = content.get("edit"), content.get("diff")
        key = f"{prefix}.".lstrip(".")
        if edit is None and diff is None:
            return None
        if edit is not None and diff is not None:
            self._wrong(f"{key}diff", "stands beside an edit", "Keep one of the two")
        if diff is not None:
            try:
                check_diff(diff if isinstance(diff, str) else "")
            except PatchError as error:
                self._wrong(
                    f"{key}diff", str(error).rstrip("."), "Write what `diff -u before after` prints, as a block (|)"
                )
            return None, diff
        steps = []
        for step_key, step in self._mappings(f"{key}edit", edit, "a list of find, replace, times"):
            self._unknown(step_key, step, ("find", "replace", "times"))
            times = step.get("times", 1)
            find, replace = step.get("find"), step.get("replace")
            if not isinstance(find, str) or not find:
                self._wrong(
                    f"{step_key}.find", f"is {find!r}", "Write the exact text, as a block (|) with its indentation"
                )
            if not isinstance(replace, str):
                self._wrong(
                    f"{step_key}.replace", f"is {replace!r}", 'Write the text that takes its place, "" for none'
                )
            elif find == replace:
                self._wrong(f"{step_key}.replace", "is the text that is looked for", "Write what takes its place")
            if not isinstance(times, int) or isinstance(times, bool) or times < 1:
                self._wrong(f"{step_key}.times", f"is {times!r}", "Write how often the text occurs, 1 or more")
            steps.append({"find": find, "replace": replace, "times": times})
        return tuple(steps), None
