# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The keys with which the proxy asks the instances."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ansible.vars.hostvars import HostVars
from ansible_collections.onprem.vllm.plugins.filter.plans import plans
from ansible_collections.onprem.vllm.plugins.filter.routes import secrets
from ansible_collections.onprem.vllm.plugins.plugin_utils.routes import route_keys as keys_of


def route_keys(hostvars: HostVars, hosts: Iterable[str]) -> dict[str, str]:
    """The keys by variable; ``hosts`` are those of group vllm, all of them whatever the run is limited to."""
    found = plans(hostvars, hosts)
    return keys_of(found, {host: secrets(hostvars, host) for host in found})


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"route_keys": route_keys}
