# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which ports a firewall opens while instances change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_former_ports(
    planned: Sequence[Mapping[str, Any]], instances: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The plan's ports, and those where instances of the host listen still: what fails goes back to these.

    Args:
        planned: ``firewall.ports`` of the plan.
        instances: those of the host, with ``name`` and ``port``, as module instance_info returns them. A former port is
            open to whom the plan opens that instance's port, or the first one's where it is about to be removed.
    """
    networks = {entry["for"]: entry["networks"] for entry in planned if entry["for"].startswith("instance ")}
    opened = {entry["port"] for entry in planned}
    former = []
    for one in sorted(instances, key=lambda one: str(one["name"])):
        whose = f"instance {one['name']}"
        if networks and one.get("port") and one["port"] not in opened:
            reached_from = networks.get(whose) or next(iter(networks.values()))
            former.append({"port": one["port"], "protocol": "tcp", "networks": reached_from, "for": whose})
    return [*map(dict, planned), *former]
