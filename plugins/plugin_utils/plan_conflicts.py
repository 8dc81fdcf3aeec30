# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What two parts of one host may not both have: a port, a directory, an account. And where two hosts contradict.

Each part is right in itself; together the second fails to start, or a teardown of one takes the other's away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from posixpath import normpath
from typing import Any

from .catalogue import COLLECTION, read_yaml
from .role_variables import Problem, problem

Value = Callable[[str], Any]
SSH_PORT = 22
EVERYWHERE, LOOPBACK = "0.0.0.0", "127.0.0.1"  # noqa: S104 - compared with, not bound to
HAPROXY = "onprem-vllm-haproxy.service"
# Folders that the modules make below the variables' directories, and those that are always at one place.
CACHES = ("vllm", "flashinfer", "triton", "torchinductor", "nv", "huggingface")
RELEASES = ("releases", "python", "uv", "uv-cache")
BUNDLES = ("bundles", "current", "incoming", "records")
FIXED = {
    "/opt/vllm/libexec": "the collection's programs",
    "/etc/vllm": "the instances' generations",
    "/etc/vllm-proxy": "the proxy's configuration",
    "/var/lib/vllm": "the instances' records",
}


@dataclass(frozen=True)
class Port:
    """Who listens on a port: in words, by the variable that says so, by unit, and on which address."""

    number: int
    who: str
    where: str
    unit: str = ""
    address: str = EVERYWHERE


def role_ports(groups: Collection[str], value: Value) -> Iterator[Port]:
    """The ports of everything on a host but its instances."""
    name = "nftables_ssh_port"
    yield Port(value(name) or SSH_PORT, f"SSH ({name})", name)
    if "mirror" in groups:
        name = "wheel_mirror_port"
        yield Port(value(name), f"the mirror ({name})", name, "nginx.service")
    if "proxy" in groups:
        name = "litellm_proxy_port"
        yield Port(value(name), f"the proxy's clients ({name})", name, HAPROXY)
        name = "litellm_proxy_internal_port"
        yield Port(value(name), f"HAProxy for LiteLLM ({name})", name, HAPROXY, LOOPBACK)
        yield Port(value(name) + 1, f"HAProxy's counts over a reload ({name} and one)", name, HAPROXY, LOOPBACK)
        name = "litellm_proxy_process_port"
        for index in range(value("litellm_proxy_processes")):
            number = value(name) + index
            unit = f"onprem-vllm-litellm@{number}.service"
            yield Port(number, f"process {index + 1} of LiteLLM (from {name})", name, unit, LOOPBACK)


def instance_ports(name: str, port: int | None, serve: Mapping[str, Any]) -> Iterator[Port]:
    """The ports of one instance: its own, and those that arguments name for its workers among each other."""
    where = f"vllm_instances.{name}"
    if port is not None:
        yield Port(port, f"instance {name}", f"{where}.port")
    for flag, number in serve.items():
        if flag.endswith("-port") and isinstance(number, int) and not isinstance(number, bool):
            yield Port(number, f"instance {name} ({flag})", f"{where}.serve.{flag}")


def port_problems(ports: Iterable[Port]) -> Iterator[Problem]:
    """One problem for each port that somebody before has already, or that is none."""
    taken: dict[int, Port] = {}
    for port in ports:
        if port.number > 65535:  # of several in a row
            yield problem(port.where, f"gives {port.who} port {port.number}, and 65535 is the last", "Lower it.")
        elif (other := taken.setdefault(port.number, port)) is not port:
            what = f"{port.number} is taken by {other.who} on the same host"
            yield problem(port.where, what, "Give each of them a port of its own.")


def monitoring_ports(ports: Iterable[Port]) -> Iterator[Problem]:
    """Ports on which a host's monitoring usually listens: whether it does, preflight sees."""
    known = read_yaml(COLLECTION / "catalogue" / "inventory.yml")["monitoring"]
    for port in ports:
        if (exporter := known.get(port.number)) is not None:
            yield {
                **problem(
                    port.where,
                    f"{port.number} is where {exporter} listens on a host that has it",
                    "Choose another port, if hosts are or will be monitored by it.",
                ),
                "source": "its own default port",
            }


def directories(groups: Collection[str], value: Value, models: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each directory that a role fills on the host, with the variable it comes from."""
    if {"vllm", "proxy"} & {*groups}:
        yield from ((f"{value('uv_venv_root')}/{folder}", "uv_venv_root") for folder in RELEASES)
    if "vllm" in groups:
        yield from ((f"{value('cache_dirs_root')}/{folder}", "cache_dirs_root") for folder in CACHES)
        yield from ((f"{value('hf_cache_root')}/{model}", "hf_cache_root") for model in models)
    if "mirror" in groups:
        yield from ((f"{value('wheel_mirror_root')}/{folder}", "wheel_mirror_root") for folder in BUNDLES)


def directory_problems(found: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """One problem for each two variables whose directories are the same, or one within the other."""
    owners = dict.fromkeys(FIXED, "")
    said: set[tuple[str, str]] = set()
    for path, variable in ((normpath(path), variable) for path, variable in found):
        for other, owner in owners.items():
            within = path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/")
            if within and owner != variable and (owner or other, variable) not in said:
                said.add((owner or other, variable))
                whose = f"{owner}'s" if owner else f"that of {FIXED[other]}"
                yield problem(
                    variable,
                    f"gives {path}, and {other} is {whose}: a teardown of one takes the other's away",
                    "Name a directory of its own.",
                )
        owners[path] = variable


def account_problems(groups: Collection[str], value: Value) -> Iterator[Problem]:
    """LiteLLM and the instances under one user: a teardown of the proxy would remove the instances' user."""
    if "proxy" in groups and (user := value("litellm_proxy_user")) in (
        value("host_base_user"),
        value("vllm_service_user"),
    ):
        yield problem("litellm_proxy_user", f"is {user}, as the instances' user", "Give LiteLLM a user of its own.")


def one_machine_twice(ways: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Problem]]:
    """The hosts of an inventory that are reached in the very way of another: one machine, that two plans would rule.

    Args:
        ways: for each host its address, and what else decides which machine answers there.
    """
    first: dict[tuple[str, ...], str] = {}
    for host, way in ways.items():
        if (other := first.setdefault(tuple(way), host)) != host:
            yield (
                host,
                problem(
                    f"ansible_host of {host}",
                    f"is {way[0]}, by which {other} is reached, too: two hosts of the inventory are one machine",
                    "Correct the address, or make it one host in the groups of both.",
                ),
            )


def one_file_of_several_cas(plans: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Problem]]:
    """Proxies that write the roots of their own CAs into one file: the last one's would be all that clients trust."""
    first: dict[str, str] = {}
    for host, plan in plans.items():
        file = plan["proxy"]["tls"].get("ca_file") if plan["proxy"] else None
        if isinstance(file, str) and file and (other := first.setdefault(normpath(file), host)) != host:
            what = (
                f"is {file}, as on {other}: each of them has a CA of its own, and the last root would be the only one"
            )
            remedy = "Put inventory_hostname into its name, or give all of them one litellm_proxy_certificate."
            yield host, problem("litellm_proxy_ca_file", what, remedy)


def kept_from_mirror(
    plans: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Hosts that a mirror's firewall would keep out, as far as the addresses tell by which Ansible reaches them."""
    for mirror, plan in plans.items():
        for port in plan["firewall"]["ports"]:
            if port["for"] != "mirror" or not port["networks"]:
                continue
            networks = [ip_network(network, strict=False) for network in port["networks"]]
            for host, other in plans.items():
                own = _address(addresses[host])
                if own is None or host == mirror or not other["releases"] or any(own in one for one in networks):
                    continue
                what = f"do not hold {own}, by which {host} is reached: {mirror} would not let it fetch anything"
                remedy = "Add its network, unless it reaches the mirror from another address."
                yield (
                    host,
                    {**problem("vllm_mirror_networks", what, remedy), "source": f"ansible_host of {host}"},
                )


def names_of_several_models(plans: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Instances whose model is served under a name that another model has already: a proxy takes them for the same."""
    if not any(plan["proxy"] for plan in plans.values()):
        return  # each instance has an address of its own
    first: dict[str, tuple[str, str]] = {}
    for host, plan in plans.items():
        for instance in plan["instances"]:
            name, model = instance["served_model_name"], instance["model"]
            other, there = first.setdefault(name, (model, host))
            if model != other:
                what = f"is {name}, as which {there} serves {other}, and this is {model}: requests go to either"
                remedy = "Give it a name of its own, unless both are the same model in two forms."
                where = f"vllm_instances.{instance['name']}.served_model_name"
                yield host, {**problem(where, what, remedy), "source": "the proxy's routes, by name"}


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None  # a name: only the network itself knows
