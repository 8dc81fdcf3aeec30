# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plans with what their hosts' facts decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_facts import resolve


def resolved(plans: Mapping[str, Mapping[str, Any]], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """Each plan by what was found on its own host; one whose host was not looked at stays as it is."""
    if not isinstance(plans, Mapping):
        raise AnsibleFilterError("onprem.vllm.resolved takes plans by host (filter onprem.vllm.plans)")
    found = {}
    for host, plan in plans.items():
        facts = (hostvars[host].get("preflight_probe") or {}).get("host")
        left = facts is not None and plan["needs"].get("decide")
        found[str(host)] = resolve(plain(plan), plain(facts)) if left else plan
    return found


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"resolved": resolved}
