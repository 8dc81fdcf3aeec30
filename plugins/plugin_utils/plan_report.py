# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plans as text for a person: the problems of all hosts, each once, and a plan's values with their origins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .plan_layers import leaves


def problem_report(plans: Iterable[Mapping[str, Any]]) -> str:
    """All problems of all hosts, one paragraph each; one that several hosts share stands once, with their names.

    Returns:
        The report, empty where no plan has a problem.
    """
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for plan in plans:
        for found in plan["problems"]:
            hosts.setdefault((found["where"], found["what"], found["remedy"]), []).append(plan["host"])
    if not hosts:
        return ""
    lines = [f"{len(hosts)} problem{'s' * (len(hosts) > 1)} in the inventory; no host was touched."]
    for (where, what, remedy), names in hosts.items():
        lines += ["", f"{where}  [{_few(names)}]", f"    {what}", f"    -> {remedy}"]
    return "\n".join(lines)


def plan_table(plan: Mapping[str, Any]) -> str:
    """The values of a plan, one a line: path, value, where it comes from."""
    origins = plan["origins"]
    rows: list[tuple[str, str, str]] = []
    for part in ("roles", "mirror", "uv", "releases", "models", "packages", "firewall"):
        rows.extend((".".join(path), _short(value), "") for path, value in leaves(_named(plan[part]), (part,)))
    for instance in plan["instances"]:
        prefix = ("instances", instance["name"])
        for path, value in leaves({key: value for key, value in instance.items() if key != "name"}, prefix):
            dotted = ".".join(path)
            rows.append((dotted, _short(value), origins.get(dotted, "")))
    first = max((len(row[0]) for row in rows), default=0)
    second = min(max((len(row[1]) for row in rows), default=0), 60)
    return "\n".join(
        [plan["host"], *(f"  {path:<{first}}  {value:<{second}}  {origin}".rstrip() for path, value, origin in rows)]
    )


def _named(part: Any) -> Any:
    """Lists of named things as maps, so that a path says which one."""
    if isinstance(part, list) and part and all(isinstance(item, dict) and "name" in item for item in part):
        return {item["name"]: {key: value for key, value in item.items() if key != "name"} for item in part}
    return part


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
