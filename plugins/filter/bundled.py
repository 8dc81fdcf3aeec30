# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the bundle that a mirror publishes has what the hosts of the plans need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_bundle import PARTS, bundle_problems


def bundled(plans: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A mirror's host with its problems, in a plan's form."""
    if not isinstance(plans, Mapping):
        raise AnsibleFilterError(f"onprem.vllm.bundled takes plans by host, not {type(plans).__name__}")
    return bundle_problems({plain(host): plain({part: plan[part] for part in PARTS}) for host, plan in plans.items()})


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"bundled": bundled}
