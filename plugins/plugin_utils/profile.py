# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Profiles: read from the catalogue or an inventory, laid over the ones they extend, compared with a vLLM version."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from .catalogue import inventory_spec, shipped_profiles
from .plan_layers import Branch, Layer, layer, merge, resolve
from .role_variables import Problem, checked, nearest, problem, sentence

try:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.utils import canonicalize_name
    from packaging.version import Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

# What a profile says about itself; the rest are settings, the lowest layer of an instance.
_ABOUT = (
    *("description", "extends", "accelerator", "hardware", "vllm", "patches", "packages", "family", "probes"),
    "numbers",
)


@dataclass(frozen=True)
class Refusal:
    """Why a profile does not work with a release, and the patch that would change that, if one does."""

    reason: str
    patch: str | None = None


@dataclass(frozen=True)
class Profile:
    """What a model needs on a kind of hardware.

    Attributes:
        about: accelerator, hardware, vllm, patches, packages, family, probes of the profile, resolved.
        settings: its layer of an instance's settings; origins name the profile each value was written in.
        chain: its name and those of the profiles that it extends.
    """

    name: str
    about: Mapping[str, Any]
    settings: Layer
    chain: tuple[str, ...] = ()

    @property
    def patches(self) -> tuple[str, ...]:
        """The patches that it needs where vLLM's version has the fault."""
        return tuple(self.about.get("patches") or ())

    @cached_property
    def designed(self) -> dict[str, Any]:
        """The settings of an instance that adds nothing. Shared: do not change it."""
        return resolve(self.settings)[0]

    @property
    def family(self) -> tuple[str, ...]:
        """The families of the model that need settings of their own."""
        return tuple(self.about.get("family") or ())

    def refusals(
        self, vllm: str, patches: Collection[str] = (), locked: Mapping[str, str] | None = None
    ) -> list[Refusal]:
        """Why this profile does not work with a release; empty where it does.

        Args:
            patches: the names of those that the release carries: a range whose ``patch`` is among them is open.
            locked: the versions of its packages: a range whose ``unless`` they fulfil is open.
        """
        versions = self.about.get("vllm") or {}
        if versions.get("versions") and not _within(vllm, versions["versions"]):
            return [Refusal(f"it is for vLLM {versions['versions']}")]
        return [
            Refusal(f"vLLM {refused['versions']}: {refused['because']}", refused.get("patch"))
            for refused in versions.get("refused") or []
            if _within(vllm, refused["versions"])
            and refused.get("patch") not in patches
            and not _fulfilled(refused.get("unless") or {}, locked or {})
        ]


def reaches(versions: SpecifierSet, profile: Profile) -> bool:
    """Whether a range has a version that the profile works with, whatever the patches."""
    ranges = profile.about.get("vllm") or {}
    texts = [ranges.get("versions") or "", *(one["versions"] for one in ranges.get("refused") or [])]
    # What several ranges have in common begins with nothing, at one of their ends, or right after it.
    ends = {
        end.version.removesuffix(".*")
        for text in (*texts, str(versions))
        for end in SpecifierSet(text)
        if end.operator != "==="  # text, that need be no version
    }
    tried = {"0", *ends, *(f"{Version(end).base_version}.0.0.0.1" for end in ends)}
    return any(versions.contains(one, prereleases=True) and not profile.refusals(one) for one in tried)


def _within(version: str, versions: str) -> bool:
    return Version(version) in SpecifierSet(versions, prereleases=True)


def _fulfilled(unless: Mapping[str, str], locked: Mapping[str, str]) -> bool:
    found = {canonicalize_name(name): versions for name, versions in unless.items()}
    return bool(found) and all(name in locked and _within(locked[name], versions) for name, versions in found.items())


def load_profiles(site: Mapping[str, Any], problems: list[Problem]) -> dict[str, Profile | None]:
    """All profiles by name: the shipped ones, the site's in front of them; None for one that is wrong in itself.

    Args:
        site: ``vllm_profiles``, types already checked.
    """
    sources = _shipped_sources() | {name: (f"vllm_profiles.{name}", content or {}) for name, content in site.items()}
    shipped = _shipped()
    # One below which nothing is the site's is the same on every host.
    return {
        name: shipped[name]
        if name in shipped and not {*_chain(name)} & site.keys()
        else _load(name, sources, problems if name in site else [])
        for name in sources
    }


def _shipped_sources() -> dict[str, tuple[str, Any]]:
    return {name: (f"profile {name}", content) for name, content in shipped_profiles().items()}


@cache
def _shipped() -> dict[str, Profile | None]:
    sources = _shipped_sources()
    return {name: _load(name, sources, []) for name in sources}


def _chain(name: str) -> tuple[str, ...]:
    """A shipped profile and those that it extends."""
    found = _shipped()[name]
    return found.chain if found is not None else (name,)


def _load(name: str, sources: Mapping[str, tuple[str, Any]], problems: list[Problem]) -> Profile | None:
    merged: Layer = Branch()
    chain: list[str] = []
    base: str | None = name
    while base is not None:
        chain.append(base)
        origin, content = sources[base]
        if any(found["where"] == f"{origin}.extends" for found in problems):
            return None  # what it extends could not be read, or is no profile
        merged = merge(layer({key: value for key, value in content.items() if key != "extends"}, origin), merged)
        base = content.get("extends")
        if base is not None and (base not in sources or base in chain):
            if any(found["where"] == f"vllm_profiles.{base}" for found in problems):
                return None  # it is one, and could not be read
            place = f"{sources[name][0]}.extends"
            what = f"extends {base}, " + ("which extends it" if base in chain else "which is no profile")
            remedy = "Break the circle." if base in chain else sentence(nearest(base, sources))
            problems.append(problem(place, what, remedy))
            return None
    if not isinstance(merged, Branch):
        return None
    about, origins = resolve(Branch({key: value for key, value in merged.children.items() if key in _ABOUT}))
    settings = Branch({key: value for key, value in merged.children.items() if key not in _ABOUT})
    versions = about.get("vllm") or {}
    wrong = False
    ranges = [("versions", versions.get("versions") or "")]
    for refused in versions.get("refused") or []:
        ranges += [("refused", text) for text in (refused["versions"], *(refused.get("unless") or {}).values())]
    for key, text in ranges:
        if not _is_range(text):
            wrong = True
            place = f"{origins['vllm', key]}.vllm"
            found = problem(place, f"{text!r} is no version range", 'Write it like ">=0.28.0,<0.34".')
            if found not in problems:  # one that is extended has said it
                problems.append(found)
    return None if wrong else Profile(name, about, settings, tuple(chain))


def _is_range(text: Any) -> bool:
    try:
        return isinstance(text, str) and SpecifierSet(text) is not None
    except InvalidSpecifier:
        return False


def checked_shipped_profiles() -> list[Problem]:
    """What is wrong in the shipped profiles themselves; a test keeps this empty."""
    problems: list[Problem] = []
    spec = inventory_spec()["vllm_profiles"]["each"]
    for name, content in shipped_profiles().items():
        checked(content, spec, f"profile {name}", problems)
    load_profiles(shipped_profiles(), problems)
    return problems
