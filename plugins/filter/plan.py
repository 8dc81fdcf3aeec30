# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The plan of a host from its variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from ansible.errors import AnsibleError, AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.role_variables import known_variables
from ansible_collections.onprem.vllm.plugins.plugin_utils.sealed import LOCKED, Sealed, is_secret
from jinja2 import pass_context
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context


@pass_context
def plan(context: Context, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Compose the plan of the host whose ``hostvars`` are given; only the collection's variables are evaluated.

    ``hostvars[host]`` evaluates a variable without ``hostvars``, so ``http://{{ hostvars[groups['mirror'][0]]... }}``
    fails in it, or silently takes its ``default()``. The values of the host at work come from the context instead.
    """
    if not isinstance(variables, Mapping):
        raise AnsibleFilterError(
            f"onprem.vllm.plan takes the variables of a host, hostvars[<host>], not {type(variables).__name__}"
        )
    own = context.resolve_or_missing("inventory_hostname") == variables["inventory_hostname"]
    return read_and_compose(variables, context.resolve_or_missing if own else variables.__getitem__)


def read_and_compose(
    variables: Mapping[str, Any],
    evaluate: Callable[[str], Any],
    pieces: Callable[[str, dict[str, str]], Any] | None = None,
) -> dict[str, Any]:
    """The plan of the host that has ``variables``.

    Args:
        variables: by name; only the names are read.
        evaluate: the value of a variable, by name.
        pieces: likewise for one that cannot be evaluated as a whole; what cannot be in it is added to its map.
    """
    known = known_variables()
    names = [_plain(name) for name in variables]
    values: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for name in names:
        if name in known and not known[name].get("computed"):
            try:
                values[name] = _plain(evaluate(name))
            except (AnsibleError, TemplateError) as error:
                if pieces is None:
                    unreadable[name] = str(error)
                else:
                    values[name] = pieces(name, unreadable)
    return compose_plan(
        _plain(evaluate("inventory_hostname")),
        _plain(evaluate("group_names")) if "group_names" in variables else [],
        values,
        unreadable,
        names,
    )


_REFERENCE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")


def read_pieces(
    name: str,
    variables: Mapping[str, Any],
    template: Callable[[Any], Any],
    unreadable: dict[str, str],
    with_secrets: bool = False,
) -> Any:
    """A variable entry by entry, so that one that cannot be computed takes no other with it.

    Args:
        variables: those of the host as they are written.
        template: evaluates one of them, or a part of it.
        unreadable: gets the place of each entry that cannot be computed, with the reason; the entry is left out.
        with_secrets: whether a secret in a vault that cannot be opened is such an entry; it stands as Sealed.
    """

    def read(raw: Any, path: tuple[Any, ...], followed: frozenset[str]) -> Any:
        try:
            return _plain(template(raw))
        except (AnsibleError, TemplateError) as error:
            if isinstance(raw, Mapping):
                found = {_plain(key): read(inner, (*path, _plain(key)), followed) for key, inner in raw.items()}
                return {key: inner for key, inner in found.items() if inner is not _MISSING}
            if isinstance(raw, list):
                items = [read(inner, (*path, index), followed) for index, inner in enumerate(raw)]
                return [inner for inner in items if inner is not _MISSING]
            other = _REFERENCE.fullmatch(raw.strip()) if isinstance(raw, str) else None
            if other is not None and other[1] in variables and other[1] not in followed:
                return read(variables[other[1]], path, followed | {other[1]})
            locked = _is_locked(error)
            if not is_secret(path) or with_secrets or not locked:
                unreadable[_dotted(path)] = LOCKED if locked else str(error)
            return Sealed("") if is_secret(path) else _MISSING

    found = read(variables[name], (name,), frozenset())
    return None if found is _MISSING else found


_MISSING = object()


def _dotted(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]


def _is_locked(error: BaseException | None) -> bool:
    """Whether it comes from a vault that cannot be opened; ansible-core wraps that error in others."""
    while error is not None:
        if "Vault" in type(error).__name__:
            return True
        error = error.__cause__
    return False


def _plain(value: Any) -> Any:
    """Plain Python data: what ansible-core 2.19 and later hand over is lazy and tagged, and evaluated as it is read."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(value[key]) for key in value}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return "".join(list(value))
    for number in (int, float):
        if isinstance(value, number):
            return number(value)
    return value.isoformat() if isinstance(value, date) else value


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan": plan}
