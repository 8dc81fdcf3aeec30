# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plans as text for a person: the problems of all hosts, each once, and a plan's values with their origins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .memory_estimate import settings_of
from .plan_facts import what_is_decided
from .plan_layers import leaves


class QueryError(ValueError):
    """A question that is no JMESPath; the message says where."""


def plan_query(plans: list[dict[str, Any]], query: str) -> Any:
    """What a JMESPath expression finds in the list of plans.

    Raises:
        QueryError: the expression is wrong, or jmespath is not installed.
    """
    try:
        import jmespath  # noqa: PLC0415 - only this one question needs it
    except ImportError as error:
        raise QueryError("the Python package jmespath is missing on the control node; install it") from error
    try:
        return jmespath.search(query, plans)
    except jmespath.exceptions.JMESPathError as error:
        raise QueryError(f"{query!r} is no JMESPath expression: {error}") from error


def problem_report(plans: Iterable[Mapping[str, Any]], part: str = "problems") -> str:
    """All problems of all hosts, one paragraph each; one that several hosts share stands once, with their names.

    Args:
        part: ``problems`` or ``warnings``.

    Returns:
        The report, empty where no plan has any.
    """
    hosts: dict[tuple[str, str, str, str], list[str]] = {}
    for plan in plans:
        for found in plan.get(part) or []:
            key = (found["where"], found["what"], found["remedy"], found.get("source", ""))
            hosts.setdefault(key, []).append(plan["host"])
    if not hosts:
        return ""
    several = "s" * (len(hosts) > 1)
    lines = [f"{len(hosts)} {part[:-1]}{several} in the inventory{'; no host was touched' * (part == 'problems')}."]
    for (where, what, remedy, source), names in hosts.items():
        lines += ["", f"{where}  [{_few(names)}]", f"    {what}", f"    -> {remedy}"]
        lines += [f"    ({source})"] * bool(source)
    return "\n".join(lines)


def plan_table(plan: Mapping[str, Any]) -> str:
    """The values of a plan, one a line: path, where the value comes from, value."""
    rows = plan_rows(plan)
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        [plan["host"], *(f"  {path:<{first}}  {origin:<{second}}  {value}" for path, origin, value in rows)]
    )


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Path, origin and value of everything in a plan; what is said about it, last, has no origin."""
    origins = plan["origins"]
    rows: list[tuple[str, str, str]] = []
    for part in ("roles", "mirror", "service", "unit", "proxy", "paths", "uv", "releases", "models", "waived"):
        shown: Any = plan.get(part) or {}
        if part == "releases":
            shown = [_by_names(release) for release in shown]
        elif part == "proxy":
            shown = {key: _named(value) for key, value in shown.items()}
        for path, value in leaves(_named(shown), (part,)):
            if path not in (("unit",), ("proxy",)):  # a host without instances, or that is none, has none
                rows.append((".".join(path), _origin(origins, path), _short(value)))
    for package in plan["packages"]:
        named = f"packages.{package['name']}"
        rows.append((named, origins.get(named, ""), package["for"]))
    for port in plan["firewall"]["ports"]:
        networks = ", ".join(port["networks"]) or "nobody"
        named = f"firewall.{port['protocol']}.{port['port']}"
        rows.append((named, origins.get(named, ""), f"{port['for']}, from {networks}"))
    if ssh := plan["firewall"].get("ssh"):
        shown = {"port": ssh["port"] or "that of the connection", "networks": ", ".join(ssh["networks"]) or "nobody"}
        rows.extend((f"firewall.ssh.{key}", origins[f"firewall.ssh.{key}"], str(value)) for key, value in shown.items())
    for instance in plan["instances"]:
        prefix = ("instances", instance["name"])
        for path, value in leaves({key: value for key, value in instance.items() if key != "name"}, prefix):
            rows.append((".".join(path), _origin(origins, path), _short(value)))
    rows.extend(
        (f"{entry['for'].replace(' ', 's.', 1)}.{what_is_decided(entry)}", "facts", "left to the host's facts")
        for entry in plan["needs"].get("decide", ())
        if not plan.get("resolved")
    )
    rows.extend((f"estimates.{found['for']}", "docs/memory.md", _estimate(found)) for found in plan["estimates"])
    rows.extend(
        (f"warnings.{found['where']}", "", f"{found['what']} -> {found['remedy']}") for found in plan["warnings"]
    )
    rows.extend((f"notes.{note['where']}", "", note["what"]) for note in plan.get("notes", []))
    return rows


def _origin(origins: Mapping[str, str], path: tuple[str, ...]) -> str:
    """The origin of a value, or of the list that it stands in."""
    found = (origins.get(".".join(path[:length])) for length in range(len(path), 0, -1))
    return next(filter(None, found), "")


def _estimate(found: Mapping[str, Any]) -> str:
    """One line of what a GPU must hold, and whether it can."""
    if "weights_gib" not in found:
        return f"{found['verdict']}: {found['source']}"
    weights = found["weights_gib"] + found["draft_gib"]
    text = (
        f"{found['verdict']}: weights {weights:.1f} GiB{' per GPU' if 'gpus' in found else ''}, KV cache "
        f"{found['full_context_gib']:.2f} GiB per sequence of full context"
    )
    if (least := found.get("least_gpu_memory_gib")) is not None:
        text += f", at least {least:.0f} GiB"
    if "kv_cache_gib" in found:
        of = f"of {found['gpu_memory_gib']:g} GiB, " if "gpus" in found else ""
        text += (
            f"; {of}{found['kv_cache_gib']:.1f} GiB are left for the KV cache: "
            f"{found['full_context_sequences']:.1f} such sequences"
        )
    if remedy := found.get("remedy"):
        text += f"; {remedy['what']} would help ({settings_of(remedy)})"
    return text


def _by_names(release: Mapping[str, Any]) -> dict[str, Any]:
    """A release with the names of its patches; what they change stands in the catalogue."""
    return {**release, "patches": [patch["name"] for patch in release["patches"]]}


def _named(part: Any) -> Any:
    """Lists of named things as maps, so that a path says which one."""
    if isinstance(part, list) and part and all(isinstance(item, dict) and "name" in item for item in part):
        return {item["name"]: {key: value for key, value in item.items() if key != "name"} for item in part}
    return part


def _short(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, (str, int)) for item in value):
        return ", ".join(str(item) for item in value) or "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
