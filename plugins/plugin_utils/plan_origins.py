# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where the values of a plan come from that are no setting of an instance: variables, groups and the catalogue."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

# Paths of the plan with the variable that each is, and with the one that it follows from.
VARIABLES = {
    "mirror.url": "vllm_mirror_url",
    "paths.share": "hf_cache_share",
    "mirror.bundle": "wheel_mirror_bundle",
    "service.user": "vllm_service_user",
    "service.group": "vllm_service_group",
}
FOLLOWING = {"paths.releases": "uv_venv_root", "paths.models": "hf_cache_root", "paths.caches": "cache_dirs_root"}
# Ports of the firewall that are no instance's, with the variable that says who may reach them.
PORTS = {"mirror": "vllm_mirror_networks", "proxy": "vllm_client_networks"}


def host_origins(
    plan: Mapping[str, Any], given: Mapping[str, Any], groups: Iterable[str], known: Mapping[str, str]
) -> dict[str, str]:
    """The origin of each such value by its path; one of a list or map holds for all in it.

    Args:
        given: the variables that the inventory sets.
        groups: the host's.
        known: origins of the instances' settings.
    """
    found = {path: _said(name, given) for path, name in VARIABLES.items()}
    found |= {path: following(name, given) for path, name in FOLLOWING.items()}
    found["roles"] = f"groups {', '.join(sorted(groups))}"
    found["uv"] = "catalogue/uv.yml"
    found["releases"] = found["models"] = _said("vllm_instances", given)  # none where there is no instance
    for release in plan["releases"]:
        site = release["name"] in (given.get("vllm_releases") or {})
        found[f"releases.{release['name']}"] = ("vllm_releases." if site else "release ") + release["name"]
    for model in plan["models"]:
        found[f"models.{model['name']}"] = f"vllm_models.{model['name']}"
        found[f"models.{model['name']}.path"] = following("hf_cache_root", given)
    for package in plan["packages"]:
        found[f"packages.{package['name']}"] = package["for"].split(";")[0].split(":")[0]
    for port in plan["firewall"]["ports"]:
        _kind, _mark, name = port["for"].partition(" ")
        origin = known.get(f"instances.{name}.networks") or _said(PORTS.get(port["for"], ""), given)
        found[f"firewall.{port['protocol']}.{port['port']}"] = origin
    if plan["proxy"]:
        found["proxy.address"] = "vllm_address, else ansible_host"
        found["proxy.routes"] = "the plans of all hosts"
    return found


def following(name: str, given: Collection[str]) -> str:
    """The origin of what follows from a variable."""
    return f"from {name}" if name in given else f"from {name} (default)"


def _said(name: str, given: Collection[str]) -> str:
    return name if name in given else "default"
