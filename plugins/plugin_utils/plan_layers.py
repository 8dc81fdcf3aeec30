# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Layers of settings laid over each other: maps merge deeply, everything else replaces, None removes.

Each layer is a function from what lies below to what results, kept as a tree; merging composes such functions, so
it is associative: a group's layers may be merged before or after the host's. A plain deep merge is not: of
``{a: {x: 1}}``, ``{a: null}``, ``{a: {y: 2}}`` it keeps x or loses it, depending on where one starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """A value that replaces whatever lies below; ``None`` removes it."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Branch:
    """A map whose children are laid over the map below; where ``fresh``, over nothing."""

    children: Mapping[str, Leaf | Branch] = field(default_factory=dict)
    origin: str = ""
    fresh: bool = False


Layer = Leaf | Branch


def layer(settings: Any, origin: str) -> Layer:
    """Settings as one layer; ``origin`` names it in messages (``profile tiny-cpu``)."""
    if isinstance(settings, Mapping):
        return Branch({str(key): layer(value, origin) for key, value in settings.items()}, origin)
    return Leaf(settings, origin)


def merge(lower: Layer, upper: Layer) -> Layer:
    """``upper`` laid over ``lower``."""
    if isinstance(upper, Leaf) or upper.fresh:
        return upper
    if isinstance(lower, Leaf):
        return Branch(upper.children, upper.origin, fresh=True)
    children = dict(lower.children)
    for key, value in upper.children.items():
        children[key] = merge(children[key], value) if key in children else value
    return Branch(children, lower.origin or upper.origin, lower.fresh)


def merge_all(*layers: Layer) -> Layer:
    """All layers, lowest first."""
    result: Layer = Branch()
    for upper in layers:
        result = merge(result, upper)
    return result


def resolve(merged: Layer) -> tuple[Any, dict[tuple[str, ...], str]]:
    """What a merged layer makes of nothing.

    Returns:
        The plain value, and for each leaf (an empty map is one) its path to the origin that set it.
    """
    origins: dict[tuple[str, ...], str] = {}
    return _resolve(merged, (), origins), origins


def _resolve(merged: Layer, path: tuple[str, ...], origins: dict[tuple[str, ...], str]) -> Any:
    if isinstance(merged, Leaf):
        origins[path] = merged.origin
        return merged.value
    value = {}
    for key, child in merged.children.items():
        if not (isinstance(child, Leaf) and child.value is None):
            value[key] = _resolve(child, (*path, key), origins)
    if not value and path:
        origins[path] = merged.origin
    return value


def removals(merged: Layer, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """The path of each key that a layer removes, with the origin of its null."""
    if isinstance(merged, Leaf):
        return {path: merged.origin} if merged.value is None else {}
    return {at: by for key, child in merged.children.items() for at, by in removals(child, (*path, key)).items()}


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each leaf of a plain value with its path; an empty map is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, str(key)))
    else:
        yield path, value
