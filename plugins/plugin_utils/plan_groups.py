# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is wrong with an inventory before any variable is looked at: its groups, and files that nobody can read.

A play on a group that does not exist is skipped, and the run ends well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .catalogue import COLLECTION, read_yaml
from .role_variables import Problem, problem

# Of a name without its plural: `vlm` and `prox` lie above this likeness to a known one, `proxmox` and `proxysql` below.
# One with another first letter, such as `haproxy`, is a word of its own.
_LIKE = 0.8
_PLURAL = re.compile("(?:(ie)|e?)s$")
_ANSIBLE_S = frozenset({"all", "ungrouped"})


def known_groups() -> tuple[str, ...]:
    """The groups for which the collection does something."""
    roles = read_yaml(COLLECTION / "catalogue" / "inventory.yml")["roles"]
    return tuple(dict.fromkeys(group for entry in roles for group in entry["groups"]))


def grouped(groups: Mapping[str, Sequence[str]], *, needed: bool = True) -> dict[str, Any]:
    """Problems and warnings of an inventory's groups, in a plan's form.

    Args:
        groups: ``groups`` of Ansible, names of hosts by group, ``all`` among them.
        needed: whether there is nothing to do where no host is in a known group; else that is a warning, too.
    """
    known = known_groups()
    reached = {host for group in known for host in groups.get(group, ())}
    left = [host for host in groups.get("all", ()) if host not in reached and host != "localhost"]
    problems = list(_misspelt(groups, known))
    warnings: list[Problem] = []
    names = ", ".join([*known[:-1], f"or {known[-1]}"])
    if needed and left and not reached and not problems:
        what = f"has {len(left)} hosts, and none of them is in group {names}: nothing would be done"
        problems.append(
            problem("the inventory", what, "Put the hosts, or their groups as children, into these groups.")
        )
    elif left and not problems:
        what = f"{', '.join(left[:4])}{' and others' * (len(left) > 4)}: in no group {names}, so nothing is done there"
        remedy = "Put them, or their groups as children, into one, if that is not meant."
        warnings.append({**problem("the inventory", what, remedy), "source": "catalogue/inventory.yml, roles"})
    return {"host": "the inventory", "problems": problems, "warnings": warnings}


def _misspelt(groups: Mapping[str, Sequence[str]], known: Sequence[str]) -> Iterator[Problem]:
    """Groups with hosts that look like a known one which has none."""
    for name, hosts in groups.items():
        if (
            name in known
            or name in _ANSIBLE_S
            or not hosts
            or {*hosts} & {h for one in known for h in groups.get(one, ())}
        ):
            continue
        single = _PLURAL.sub(lambda found: "y" if found[1] else "", name.lower())
        free = [one for one in known if not groups.get(one) and one[0] == single[:1]]
        near = difflib.get_close_matches(single, free, 1, _LIKE)
        if near:
            what = f"looks like {near[0]} misspelt, a group that has no host"
            yield problem(f"group {name}", what, f"Name it {near[0]}, or make it a child of {near[0]}.")


def inventory_files(sources: Iterable[str]) -> Iterator[Path]:
    """The YAML files of inventories and of the variables beside them."""
    for source in (Path(one) for one in sources):
        base = source if source.is_dir() else source.parent
        yield from [source] if source.is_file() else sorted(base.glob("*.y*ml"))
        for folder in ("group_vars", "host_vars"):
            yield from sorted(path for path in (base / folder).rglob("*") if path.is_file())


def impossible_dates(files: Iterable[Path]) -> list[str]:
    """Unquoted dates that no calendar has, with file and line: YAML makes a date of them, and fails without a place."""
    found = []
    for path in files:
        try:
            root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # no YAML, such as a vault: whoever reads it says so
        for node in _scalars(root, set()):
            if node.tag == "tag:yaml.org,2002:timestamp":
                try:
                    yaml.SafeLoader("").construct_yaml_timestamp(node)
                except ValueError:
                    found.append(f"{path}, line {node.start_mark.line + 1}: {node.value}")
    return found


def _scalars(node: yaml.Node | None, seen: set[int]) -> Iterator[yaml.ScalarNode]:
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _scalars(child, seen)
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for child in pair:
                yield from _scalars(child, seen)


def unreadable(host: str, reason: str, sources: Iterable[str]) -> Problem:
    """The problem of a host whose variables Ansible cannot read."""
    dates = impossible_dates(inventory_files(sources))
    if dates:
        what = f"cannot be read: {reason}. No calendar has {'; '.join(dates)}"
        return problem(
            f"variables of {host}", what, "Correct the date; in quotes it is text, and judged by what reads it."
        )
    return problem(
        f"variables of {host}", f"cannot be read: {reason}", "Correct the file; ansible-inventory --list shows it."
    )
