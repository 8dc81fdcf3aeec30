# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The plans of several hosts in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ansible.errors import AnsibleError, AnsibleFilterError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible.vars.hostvars import HostVars
from ansible_collections.onprem.vllm.plugins.filter.plan import read_and_compose, read_pieces
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_conflicts import (
    kept_from_mirror,
    names_of_several_models,
    one_file_of_several_cas,
    one_machine_twice,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_groups import unreadable
from jinja2 import TemplateError


def plans(hostvars: HostVars, hosts: Iterable[str], with_secrets: bool = False) -> dict[str, dict[str, Any]]:
    """Compose the plan of each host; ``with_secrets`` where the values of secrets are needed later.

    One process for all of them: a task that plans each host for itself reads the catalogue and imports its code once
    per host, which for 64 hosts took 24 s of processor time, and this 0.3.
    """
    if not isinstance(hostvars, HostVars):
        raise AnsibleFilterError(f"onprem.vllm.plans takes hostvars, not {type(hostvars).__name__}")
    # The loader of the run, for lookups of files in the operator's variables; there is no public way to it.
    loader = getattr(hostvars, "_loader", None)
    names = ("".join(list(host)) for host in hosts)
    found = {name: _plan_of(hostvars, name, loader, with_secrets) for name in names}
    ways = {name: _way(hostvars, name, loader) for name in found}
    for name, wrong in (*one_machine_twice(ways), *one_file_of_several_cas(found)):
        found[name]["problems"].append(wrong)
    addresses = {name: way[0] for name, way in ways.items()}
    for name, doubtful in (*kept_from_mirror(found, addresses), *names_of_several_models(found)):
        found[name]["warnings"].append(doubtful)
    return found


def _plan_of(hostvars: HostVars, host: str, loader: DataLoader | None, with_secrets: bool) -> dict[str, Any]:
    # hostvars[host] would evaluate without `hostvars`, so that a template over another host's address fails in it or
    # silently takes its default().
    try:
        variables = {**hostvars.raw_get(host), "hostvars": hostvars}
    except AnsibleError as error:  # a file of its variables is no YAML, or has a date that no calendar has
        inventory = getattr(hostvars, "_inventory", None)
        wrong = unreadable(host, str(error), getattr(inventory, "_sources", None) or ())
        return {**compose_plan(host, [], {}), "problems": [wrong]}
    templar = Templar(loader=loader, variables=variables)
    return read_and_compose(
        variables,
        lambda name: templar.template(variables[name]),
        lambda name, unreadable: read_pieces(name, variables, templar.template, unreadable, with_secrets),
    )


def _way(hostvars: HostVars, host: str, loader: DataLoader | None) -> tuple[str, ...]:
    """How a host is reached: its address, and what else decides which machine answers there."""
    try:
        variables = {**hostvars.raw_get(host), "hostvars": hostvars}
        templar = Templar(loader=loader, variables=variables)
        values = [str(templar.template(variables[name])) if name in variables else "" for name in _WAY]
    except (AnsibleError, TemplateError):  # Ansible says so when it connects
        return (host,)
    return (values[0] or host, *values[1:])


_WAY = ("ansible_host", "ansible_port", "ansible_connection", "ansible_ssh_common_args", "ansible_ssh_extra_args")


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plans": plans}
