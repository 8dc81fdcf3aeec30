# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The routes of the proxy, from the plans of all hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible.vars.hostvars import HostVars
from ansible_collections.onprem.vllm.plugins.filter.plan import read_pieces
from ansible_collections.onprem.vllm.plugins.filter.plans import plans
from ansible_collections.onprem.vllm.plugins.plugin_utils.proxy_keys import team_problems
from ansible_collections.onprem.vllm.plugins.plugin_utils.role_variables import Problem, not_computed
from ansible_collections.onprem.vllm.plugins.plugin_utils.routes import compose_routes


def routes(
    hostvars: HostVars, hosts: Iterable[str], proxies: Iterable[str], with_secrets: bool = False
) -> dict[str, Any]:
    """Compose the routes; ``hosts`` are those of group vllm, all of them whatever the run is limited to."""
    found = plans(hostvars, hosts, with_secrets)
    proxies = [str(proxy) for proxy in proxies]
    composed = compose_routes(
        found,
        {host: address(hostvars, host) for host in found},
        {host: secrets(hostvars, host) for host in found},
        {proxy: address(hostvars, proxy) for proxy in proxies},
    )
    for host in dict.fromkeys([*found, *proxies]):
        composed["problems"] += unreadable_address(hostvars, host)
    models = [model["name"] for model in composed["models"]]
    for proxy in proxies:
        if "litellm_proxy_keys" in variables_of(hostvars, proxy):
            wrong = team_problems(value(hostvars, proxy, "litellm_proxy_keys"), models)
            composed["problems"] += [one for one in wrong if one not in composed["problems"]]
    return composed


def address(hostvars: HostVars, host: str) -> str:
    """Where the proxy, or a host's firewall, meets a host."""
    return str(value(hostvars, host, "vllm_address") or value(hostvars, host, "ansible_host") or host)


def unreadable_address(hostvars: HostVars, host: str) -> list[Problem]:
    """Why Ansible's own address of a host cannot be computed; of the collection's variables its plan says that."""
    unreadable: dict[str, str] = {}
    value(hostvars, host, "ansible_host", unreadable)
    return [not_computed(f"{host}: {name}", reason) for name, reason in unreadable.items()]


def secrets(hostvars: HostVars, host: str) -> dict[str, dict[str, str]]:
    """A host's ``vllm_secrets``."""
    found: dict[str, dict[str, str]] = value(hostvars, host, "vllm_secrets") or {}
    return found


def value(hostvars: HostVars, host: str, name: str, unreadable: dict[str, str] | None = None) -> Any:
    """A variable of a host as plain data; see the filter plans for why not hostvars[host].

    None where it is not set, and without what cannot be computed, which is added to ``unreadable``.
    """
    variables = {**variables_of(hostvars, host), "hostvars": hostvars}
    if name not in variables:
        return None
    loader: DataLoader | None = getattr(hostvars, "_loader", None)
    template = Templar(loader=loader, variables=variables).template
    return read_pieces(name, variables, template, {} if unreadable is None else unreadable)


def variables_of(hostvars: HostVars, host: str) -> Mapping[str, Any]:
    """A host's variables as they are written; none where they cannot be read, which is a problem of its plan."""
    try:
        return hostvars.raw_get(host)
    except AnsibleError:
        return {}


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"routes": routes}
