# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plans as a table for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_proxy import with_routes
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_report import plan_table as table


def plan_table(plans: Iterable[Mapping[str, Any]], routes: Mapping[str, Any] | None = None) -> str:
    """Each value of each plan on a line of its own, with its origin; ``routes`` are the proxy's."""
    if isinstance(plans, (str, Mapping)):
        raise AnsibleFilterError("onprem.vllm.plan_table takes a list of plans")
    return "\n\n".join(table(plan) for plan in with_routes(plans, routes))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan_table": plan_table}
