# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What modules instance_info and drain found on many hosts, as a table for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = ("host", "instance", "gen", "release", "vLLM", "since", "state", "ready", "restarts")


def status_table(hosts: Mapping[str, Mapping[str, Any] | None]) -> str:
    """One line for each instance, and below it what is to be known about it; one for each that a proxy leaves out.

    Args:
        hosts: what instance_info returned, and drain where the host is a proxy, by host; nothing where it did not
            answer. With ``waived`` of its plan, that is told below the host's last instance.
    """
    rows: list[tuple[str, ...]] = [HEAD]
    notes: dict[int, list[str]] = {}
    for host, found in hosts.items():
        if found and "away" in found:
            rows.extend(_away(host, found))
            if "instances" not in found:
                continue
        waived = _waived((found or {}).get("waived") or {})
        if not found or "instances" not in found:
            rows.append((host, "-", "-", "-", "-", "-", "no answer", "NO", "-"))
            said = str((found or {}).get("msg") or "")
            notes[len(rows)] = [*said.splitlines()[:3], *waived]
            continue
        if not found["instances"]:
            rows.append((host, "-", "-", "-", "-", "-", "no instance", "-", "-"))
        for instance in found["instances"]:
            rows.append(_row(host, instance))
            notes[len(rows)] = _notes(instance)
        notes[len(rows)] = [*notes.get(len(rows), ()), *waived]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = []
    for number, row in enumerate(rows, start=1):
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        lines.extend(f"    {note}" for note in notes.get(number, ()))
    return "\n".join(lines)


def _away(host: str, found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What a proxy sends no requests, or one line that there is no such instance."""
    unused = ("-",) * 4
    if not found["away"]:
        return [(host, "-", *unused, "no HAProxy" if found.get("msg") else "all up", "-", "-")]
    return [(host, one["name"], *unused, f"{one['status']} in routes", "NO", "-") for one in found["away"]]


def _waived(waived: Mapping[str, Any]) -> list[str]:
    named = [f"{name} ({role}_waived)" for role, names in waived.items() for name in names]
    return [f"waived: {', '.join(named)}"] if named else []


def _row(host: str, instance: Mapping[str, Any]) -> tuple[str, ...]:
    release = instance["release"] or {}
    return (
        host,
        instance["name"],
        str(instance["generation"] or "-"),
        str(release.get("id") or "-"),
        str(release.get("vllm") or "-"),
        str(instance["since"] or "-"),
        instance["state"],
        "yes" if instance["ready"] else "NO",
        str(instance["restarts"]),
    )


def _notes(instance: Mapping[str, Any]) -> list[str]:
    release = instance["release"] or {}
    found = [f"drift: {line}" for line in instance["drift"]]
    if release.get("patches"):
        found.append(f"patches: {', '.join(release['patches'])}")
    if release.get("version_check_disabled"):
        packages = ", ".join(f"{name} {version}" for name, version in release["flashinfer"].items())
        why = (release.get("flashinfer_decision") or {}).get("reason") or "no reason is recorded"
        found.append(f"FlashInfer's version check is off ({packages or 'no FlashInfer package'}): {why}")
    if instance["logs"]:
        found.append(f"failed: {', '.join(instance['logs'])}")
    if instance["rollback"] is not None and instance["rollback"] != instance["generation"]:
        found.append(f"a rollback goes to generation {instance['rollback']}")
    return found
