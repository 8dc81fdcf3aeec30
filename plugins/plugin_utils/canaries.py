# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What of each model changes first: its host goes before others, its instance is tried on a share of the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def first_hosts(plans: Mapping[str, Mapping[str, Any]], hosts: Iterable[str]) -> list[str]:
    """The hosts that are the first to serve one of their models, in the order of ``hosts``."""
    seen: set[str] = set()
    found = []
    for host in hosts:
        models = {str(instance["served_model_name"]) for instance in plans[host]["instances"]}
        if models - seen:
            found.append(host)
        seen |= models
    return found
