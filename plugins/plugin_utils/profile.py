# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Profiles: read from the catalogue or an inventory, laid over the ones they extend, compared with a vLLM version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .catalogue import inventory_spec, shipped_profiles
from .plan_layers import Branch, Layer, layer, merge, resolve
from .role_variables import Problem, checked, nearest, problem

try:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

# What a profile says about itself; the rest are settings, the lowest layer of an instance.
_ABOUT = ("description", "extends", "accelerator", "hardware", "vllm", "packages")


@dataclass(frozen=True)
class Profile:
    """What a model needs on a kind of hardware.

    Attributes:
        about: accelerator, hardware, vllm, packages of the profile, resolved.
        settings: its layer of an instance's settings; origins name the profile each value was written in.
    """

    name: str
    about: Mapping[str, Any]
    settings: Layer

    def refusals(self, vllm: str) -> list[str]:
        """Why this profile does not work with a vLLM version; empty where it does."""
        versions = self.about.get("vllm") or {}
        if versions.get("versions") and Version(vllm) not in SpecifierSet(versions["versions"], prereleases=True):
            return [f"it is for vLLM {versions['versions']}"]
        return [
            f"vLLM {refused['versions']}: {refused['because']}"
            for refused in versions.get("refused") or []
            if Version(vllm) in SpecifierSet(refused["versions"], prereleases=True)
        ]


def load_profiles(site: Mapping[str, Any], problems: list[Problem]) -> dict[str, Profile | None]:
    """All profiles by name: the shipped ones, the site's in front of them; None for one that is wrong in itself.

    Args:
        site: ``vllm_profiles``, types already checked.
    """
    sources = {**{name: (f"profile {name}", content) for name, content in shipped_profiles().items()}}
    sources.update({name: (f"vllm_profiles.{name}", content or {}) for name, content in site.items()})
    return {name: _load(name, sources, problems if name in site else []) for name in sources}


def _load(name: str, sources: Mapping[str, tuple[str, Any]], problems: list[Problem]) -> Profile | None:
    merged: Layer = Branch()
    chain: list[str] = []
    base: str | None = name
    while base is not None:
        chain.append(base)
        origin, content = sources[base]
        merged = merge(layer({key: value for key, value in content.items() if key != "extends"}, origin), merged)
        base = content.get("extends")
        if base is not None and (base not in sources or base in chain):
            place = f"{sources[name][0]}.extends"
            if any(found["where"] in {f"{sources[link][0]}.extends" for link in chain} for found in problems):
                return None  # another profile of the same chain has said it
            what = f"extends {base}, " + ("which extends it" if base in chain else "which is no profile")
            remedy = "Break the circle." if base in chain else nearest(base, sources).capitalize()
            problems.append(problem(place, what, remedy))
            return None
    if not isinstance(merged, Branch):
        return None
    about, _origins = resolve(Branch({key: value for key, value in merged.children.items() if key in _ABOUT}))
    settings = Branch({key: value for key, value in merged.children.items() if key not in _ABOUT})
    versions = about.get("vllm") or {}
    wrong = False
    for text in (versions.get("versions"), *(refused.get("versions") for refused in versions.get("refused") or [])):
        try:
            SpecifierSet(text or "")
        except InvalidSpecifier:
            wrong = True
            problems.append(
                problem(f"{sources[name][0]}.vllm", f"{text!r} is no version range", 'Write it like ">=0.28.0,<0.34".')
            )
    return None if wrong else Profile(name, about, settings)


def checked_shipped_profiles() -> list[Problem]:
    """What is wrong in the shipped profiles themselves; a test keeps this empty."""
    problems: list[Problem] = []
    spec = inventory_spec()["vllm_profiles"]["each"]
    for name, content in shipped_profiles().items():
        checked(content, spec, f"profile {name}", problems)
    load_profiles(shipped_profiles(), problems)
    return problems
