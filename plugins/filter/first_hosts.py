# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The first host of each model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.onprem.vllm.plugins.plugin_utils.canaries import first_hosts as first
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain


def first_hosts(plans: Mapping[str, Mapping[str, Any]], hosts: Iterable[str]) -> list[str]:
    """Names of hosts."""
    served = {plain(host): {"instances": plain(plan["instances"])} for host, plan in plans.items()}
    return first(served, plain(list(hosts)))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"first_hosts": first_hosts}
