# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The plan of a host from its variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from ansible.errors import AnsibleError, AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.role_variables import known_variables
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


def read_and_compose(variables: Mapping[str, Any], evaluate: Callable[[str], Any]) -> dict[str, Any]:
    """The plan of the host that has ``variables``.

    Args:
        variables: by name; only the names are read.
        evaluate: the value of a variable, by name.
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
                unreadable[name] = str(error)
    return compose_plan(
        _plain(evaluate("inventory_hostname")),
        _plain(evaluate("group_names")) if "group_names" in variables else [],
        values,
        unreadable,
        names,
    )


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
