# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What numbers, sizes, texts, paths and accounts of the inventory may be: catalogue/ranges.yml, laid over the types.

A type alone lets ``-1`` be a timeout and ``/`` the directory that teardown empties.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from posixpath import normpath
from typing import Any

from .catalogue import COLLECTION, read_yaml

NUMERIC = ("int", "float")
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<suffix>[KMGTPE]?)")
_SHARE = re.compile(r"(?P<share>\d+(?:\.\d+)?)%")
# What stands unquoted in units, in tmpfiles.d, in PATH and in nginx's configuration, and means itself there.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+@=-]+")
_NO_PATH = "no absolute path of plain characters, which units, tmpfiles.d and PATH take as they are"
_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,30}")


class Range:
    """One rule: what is wrong with a value, and what is right."""

    def __init__(self, allowed: str, wrong: Callable[[Any], str | None]) -> None:
        self.allowed = allowed
        self.wrong = wrong


def ranges() -> dict[str, Any]:
    """The file catalogue/ranges.yml."""
    return read_yaml(COLLECTION / "catalogue" / "ranges.yml")


def with_ranges(variables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Specifications with ``range`` added to all that catalogue/ranges.yml names, at any depth."""
    rules = _rules()
    return {name: _with_ranges(name, option, rules) for name, option in variables.items()}


def _with_ranges(path: str, option: Mapping[str, Any], rules: Mapping[str, Range]) -> dict[str, Any]:
    found = dict(option)
    # A list's own rule is that of its items.
    items = option.get("type") == "list"
    if (rule := rules.get(f"{path}.*" if items else path)) is not None:
        found["range"] = _set(rule) if option.get("default") else rule
    below = f"{path}.*" if items else path
    if option.get("options"):
        found["options"] = {
            key: _with_ranges(f"{below}.{key}", inner, rules) for key, inner in option["options"].items()
        }
    if option.get("each"):
        found["each"] = _with_ranges(f"{below}.*", option["each"], rules)
    return found


def _rules() -> dict[str, Range]:
    spec = ranges()
    return {
        **{name: number_range(**limits) for name, limits in spec["numbers"].items()},
        **{name: _size_range(**limits) for name, limits in spec["sizes"].items()},
        **{name: _text_range(**rule) for name, rule in spec["texts"].items()},
        **{name: _path_range(rule, spec["system"]) for name, rule in spec["paths"].items()},
        **{name: _account_range(spec["system_accounts"]) for name in spec["accounts"]},
    }


def _set(rule: Range) -> Range:
    """The rule of a variable that has a default: empty text is not its absence."""
    return Range(rule.allowed, lambda value: "empty" if value == "" else rule.wrong(value))


def number_range(
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
) -> Range:
    """Numbers from ``least`` to ``most``, both allowed, or strictly between ``above`` and ``below``."""

    def wrong(value: Any) -> str | None:
        # Written so that nan, which compares with nothing, is wrong.
        fits = (
            (isinstance(value, int) or math.isfinite(value))
            and (least is None or value >= least)
            and (most is None or value <= most)
            and (above is None or value > above)
            and (below is None or value < below)
        )
        return None if fits else f"out of range ({allowed})"

    low = f"from {_number(least)}" if least is not None else f"above {_number(above)}" if above is not None else ""
    high = f"to {_number(most)}" if most is not None else f"below {_number(below)}" if below is not None else ""
    if above is not None and most is not None:
        high = f"and up {high}"
    elif low and below is not None:
        high = f"and {high}"
    allowed = " ".join(part for part in (low, high, unit) if part)
    return Range(f"a {'number' if allowed else 'finite number'} {allowed}".strip(), wrong)


def _number(value: float | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def size_bytes(text: str) -> float | None:
    """Bytes of a size as systemd reads it (systemd.resource-control(5)), None where it is none."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    return float(match["number"]) * float(1024 ** " KMGTPE".index(match["suffix"] or " "))


def _size_range(least: str) -> Range:
    floor = size_bytes(least) or 0

    def wrong(value: str) -> str | None:
        if value == "infinity":
            return None
        if match := _SHARE.fullmatch(value):
            return None if 0 < float(match["share"]) <= 100 else "no share of the host's memory"
        found = size_bytes(value)
        if found is None:
            return "no size that systemd reads"
        return None if found >= floor else f"too small for what it limits ({allowed})"

    allowed = f"{least} or more, 1% to 100%, or infinity"
    return Range(allowed, wrong)


def _text_range(form: str, like: str) -> Range:
    whole = re.compile(form)
    return Range(f"text such as {like}", lambda value: None if whole.fullmatch(value) else "not of that form")


def _path_range(rule: Mapping[str, Any], system: Mapping[str, list[str]]) -> Range:
    here, file = rule.get("here", False), rule.get("file", False)
    parents = rule.get("parent", [])
    guarded = bool(rule.get("own") or "parent" in rule)

    def wrong(value: str) -> str | None:
        if value == "":
            return None  # not set, where the default says that it may be
        if not value.isprintable():
            return "no path: it holds control characters"
        if here:
            if value[0] == "~":
                return "a path that begins with ~, which only a shell replaces"
            if file and value.endswith("/"):
                return "a directory, where a file is meant"
            taken = guarded and _normal(value) in {*system["alone"], *system["within"]}
            return "a directory of the system's own" if taken else None
        if value[0] != "/" or not _PLAIN_PATH.fullmatch(value) or ".." in value.split("/"):
            return _NO_PATH
        return _wrong_on_host(_normal(value))

    def _wrong_on_host(path: str) -> str | None:
        if path in parents:
            return None
        sites = path not in system["except"] and _within(path, system["except"])
        if path in system["alone"] or (_within(path, system["within"]) and not sites):
            return "a directory of the system's own, and teardown removes what it finds there"
        if not rule.get("hidden") and _within(path, system["hidden"]):
            return "hidden from services (ProtectHome)"
        return None

    kind = "a file" if file else "a directory"
    kind += " on this machine" if here else " by its absolute path, of letters, digits and ._+@=-"
    return Range(kind + (", the collection's alone" if guarded else ""), wrong)


def _normal(path: str) -> str:
    """A path in its one form; POSIX lets two slashes in front mean something else, Linux does not."""
    return normpath(path[:1] + path.lstrip("/"))


def _within(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _account_range(system: list[str]) -> Range:
    def wrong(value: str) -> str | None:
        if not _ACCOUNT.fullmatch(value):
            return "no name of a system user"
        if value in system or value.startswith("systemd-"):
            return "an account of the system's own, and teardown removes it"
        return None

    return Range("a name of its own, of lower-case letters, digits, - and _, at most 31", wrong)
