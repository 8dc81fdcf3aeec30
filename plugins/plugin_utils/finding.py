# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One finding: what was found on a host, what is needed, and the remedy; its kinds stand in the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .catalogue import COLLECTION, read_yaml

Finding = dict[str, str]
Plan = Mapping[str, Any]
Facts = Mapping[str, Any]

GIB = 1 << 30
MIB = 1 << 20
ERROR, WARNING, WAIVED = "error", "warning", "waived"
SEVERITIES = (ERROR, WARNING, WAIVED)
# The units of instances.
OUR_UNIT = re.compile(r"vllm-[\w-]+\.service")


def known_findings() -> Mapping[str, Mapping[str, str]]:
    """Every finding by its identifier, with severity, meaning and remedy."""
    return read_yaml(COLLECTION / "catalogue" / "findings.yml")


def known_causes() -> list[dict[str, Any]]:
    """What failed starts are known by: id, pattern, what, remedy, and where that is known from."""
    return read_yaml(COLLECTION / "catalogue" / "causes.yml")


def new_finding(identifier: str, found: str, needed: str, remedy: str) -> Finding:
    """A finding of a kind that catalogue/findings.yml knows, with its severity there."""
    severity = known_findings()[identifier]["severity"]
    return {"id": identifier, "severity": severity, "found": found, "needed": needed, "remedy": remedy}


def gpu_instances(plan: Plan) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each instance that runs on GPUs, with what it needs of them."""
    by_name = {f"instance {instance['name']}": instance for instance in plan.get("instances", ())}
    for wanted in plan["needs"]["gpus"]:
        if wanted["for"] in by_name:
            yield by_name[wanted["for"]], wanted


def by_name(devices: Sequence[Mapping[str, Any]]) -> dict[int | str, Mapping[str, Any]]:
    """GPUs by what an instance may call them: index, UUID, or the UUID of a MIG device, which has memory of its own."""
    found: dict[int | str, Mapping[str, Any]] = {}
    for device in devices:
        found[device["uuid"]] = found[device["index"]] = device
        for part in device.get("mig_devices") or ():
            found[part["uuid"]] = {**device, **part, "mig": False, "processes": []}
    return found


def used_devices(instance: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The GPUs of a host that an instance uses, in the order in which it sees them: those it names, or all."""
    known = by_name(devices)
    named = instance.get("gpus") or []
    return [known[name] for name in named if name in known] if named else list(devices)
