# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which instances of a host are the first of their model to change, and so are tried on a share of the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def canaries(interrupted: Mapping[str, Sequence[str]], plans: Mapping[str, Mapping[str, Any]], host: str) -> list[str]:
    """Names of the instances.

    Args:
        interrupted: what is restarted, by host in the order of the hosts; instances as the routes call them,
            ``<host>-<instance>``.
        plans: the plans of those hosts.
    """
    tried: set[str] = set()
    for name, servers in interrupted.items():
        changing = {
            instance["name"]: str(instance["served_model_name"])
            for instance in plans[name]["instances"]
            if f"{name}-{instance['name']}" in servers
        }
        if name == host:
            return [instance for instance, model in changing.items() if model not in tried]
        tried.update(changing.values())
    return []
