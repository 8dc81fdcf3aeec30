# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which variables exist, what type they have, and which name a misspelt one was meant to be.

Ansible's own argument specs check a role's variables when the role starts, on a host that an earlier role has
changed already, and let a misspelt name pass. So names and types are checked here, from the inventory alone.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from .catalogue import inventory_spec, role_names, role_spec
from .plan_ranges import with_ranges
from .sealed import LOCKED

Problem = dict[str, str]

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
# Names of one's own such as `site_vllm_mirror_url` stay below this likeness; `vlm_instances` lies above.
_MISSPELT = 0.93


def problem(where: str, what: str, remedy: str) -> Problem:
    """A thing that is wrong, where it stands, and what to do."""
    return {"where": where, "what": what, "remedy": remedy}


def not_computed(where: str, reason: str) -> Problem:
    """A variable, or an entry of one, whose template or vault cannot be read."""
    remedy = "Define what it refers to, or write the value itself."
    if reason == LOCKED:
        remedy = "Give the vault's password to ansible-playbook, such as with --ask-vault-pass."
    return problem(where, f"cannot be computed: {reason}", remedy)


@cache
def known_variables() -> dict[str, dict[str, Any]]:
    """Every public variable of the collection with its specification and, where it has one, its range."""
    return with_ranges({**role_spec(), **inventory_spec()})


def default_of(name: str) -> Any:
    """The default of a variable.

    Raises:
        KeyError: there is no such variable.
    """
    return known_variables()[name].get("default")


def nearest(name: str, known: Collection[str], count: int = 3, beginning: str = "") -> str:
    """The known names that ``name`` was probably meant to be, or all of them where none is near.

    Args:
        beginning: what all of them begin with, so that it makes none of them near.
    """
    rest = [one.removeprefix(beginning) for one in known if one.startswith(beginning)]
    close = difflib.get_close_matches(name.removeprefix(beginning), rest, count, 0.6)
    if close:
        return "did you mean " + " or ".join(beginning + one for one in close) + "?"
    return f"known are {', '.join(sorted(known))}." if known else "none is known."


def sentence(words: str) -> str:
    """Words with their first letter upper; the others stay, a name among them may have any."""
    return words[:1].upper() + words[1:]


@cache
def _misspelt(name: str) -> Problem | None:
    known = known_variables()
    if name in known or name.startswith("__"):
        return None
    prefixes = ("vllm_", *(f"{role}_" for role in role_names()))
    if name.startswith(prefixes):
        close = difflib.get_close_matches(name, list(known), 3, 0.6)
        remedy = f"Write {' or '.join(close)}" if close else "Remove it"
        return problem(name, "there is no such variable", f"{remedy}; names that begin so belong to the collection.")
    if close := difflib.get_close_matches(name, list(known), 1, _MISSPELT):
        return problem(name, f"looks like {close[0]} misspelt", f"Write {close[0]}, or give it a name of its own.")
    return None


def misspelt(names: Iterable[str]) -> Iterator[Problem]:
    """One problem for each variable name that is the collection's by its form and unknown to it."""
    for name in names:
        if (found := _misspelt(name)) is not None:
            yield found


def checked(value: Any, spec: Mapping[str, Any], where: str, problems: list[Problem]) -> Any:
    """The value in the type its specification names; what does not fit is added to ``problems``.

    Text that can mean only one thing is converted (INI inventories and ``-e`` give text for every number and
    boolean): "8000" is the int, "yes" the bool. A number where text is wanted is refused: an unquoted 0.30 has
    lost its zero already.

    Returns:
        The converted value, or None where it does not fit. Of a list the items that are right.
    """
    kind = spec.get("type", "str")
    secret = bool(spec.get("no_log"))
    if value is None:
        return None
    if kind == "dict":
        return _checked_dict(value, spec, where, problems)
    if kind == "list":
        return _checked_list(value, spec, where, problems)
    result = value if kind == "raw" else _scalar(value, kind)
    shown = "a secret" if secret else repr(value)
    if result is None:
        quote = " Put it in quotes." if kind in ("str", "path") and not isinstance(value, (dict, list)) else ""
        problems.append(problem(where, f"is {shown} ({_named(value)}), expected {kind}", f"Give it as {kind}.{quote}"))
        return None
    choices = spec.get("choices")
    if choices and result not in choices:
        problems.append(problem(where, f"is {shown}", nearest(str(result), [str(choice) for choice in choices])))
        return None
    allowed = spec.get("range")
    if allowed is not None and (wrong := allowed.wrong(result)) is not None:
        problems.append(problem(where, f"is {shown}: {wrong}", f"Give {allowed.allowed}."))
        return None
    return result


def _scalar(value: Any, kind: str) -> Any:
    if kind in ("str", "path"):
        return value if isinstance(value, str) else None
    if kind == "bool":
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if kind == "int":
        if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
            return int(value)
        return value if isinstance(value, int) else None
    if kind == "float":
        try:
            number = float(value) if isinstance(value, (int, float, str)) and "_" not in str(value) else math.nan
        except (ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None
    raise ValueError(f"a specification names the type {kind!r}, which this check does not know")


def _named(value: Any) -> str:
    return {dict: "a map", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}.get(
        type(value), type(value).__name__
    )


def _checked_dict(value: Any, spec: Mapping[str, Any], where: str, problems: list[Problem]) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        problems.append(problem(where, f"is {_named(value)}, expected a map", "Write `key: value` pairs below it."))
        return None
    result: dict[str, Any] = {}
    options = spec.get("options")
    each = spec.get("each")
    for key, item in value.items():
        if not isinstance(key, str):
            problems.append(problem(f"{where}.{key}", f"is a name that YAML reads as {_named(key)}", "Quote the name."))
            continue
        path = f"{where}.{key}"
        if options is not None:
            if key not in options:
                problems.append(problem(path, "there is no such key", sentence(nearest(key, options))))
                continue
            item_spec: Mapping[str, Any] | None = options[key]
        else:
            item_spec = each
        if item_spec is None or item is None:
            result[key] = item
        elif (fitting := checked(item, item_spec, path, problems)) is not None:
            result[key] = fitting
    for key, option in (options or {}).items():
        if option.get("required") and value.get(key) is None:
            problems.append(problem(f"{where}.{key}", "is missing", f"Set it: {option['description']}"))
    return result


def _checked_list(value: Any, spec: Mapping[str, Any], where: str, problems: list[Problem]) -> list[Any] | None:
    if not isinstance(value, list):
        problems.append(problem(where, f"is {_named(value)}, expected a list", "Write it as [a, b]."))
        return None
    element = {**spec, "type": spec.get("elements", "raw")}
    result = []
    for index, item in enumerate(value):
        place, count = f"{where}[{index}]", len(problems)
        if item is None:
            problems.append(problem(place, "is null", "Write a value, or take the entry out."))
            continue
        fitting = checked(item, element, place, problems)
        if len(problems) == count:
            result.append(fitting)
    return result
