# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which instances of which hosts serve a model: what the proxy asks, from the plans of all hosts at once."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .role_variables import Problem, problem
from .sealed import Sealed

API_KEY = "VLLM_API_KEY"
_EVERYWHERE = {"0.0.0.0": 4, "::": 6}  # noqa: S104 - what an instance listens on, not this program
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

Secrets = Mapping[str, Mapping[str, Mapping[str, str]]]


def slug(name: str) -> str:
    """A model's name as HAProxy's names and paths may be, different for different names.

    >>> slug("glm-5"), slug("org/GLM 5")
    ('glm-5', 'org-glm-5-b6ae0c')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def key_variable(model: str) -> str:
    """The environment variable in which LiteLLM finds the key of a model's instances."""
    return "BACKEND_KEY_" + slug(model).replace("-", "_").upper()


def compose_routes(
    plans: Mapping[str, Mapping[str, Any]],
    addresses: Mapping[str, str],
    secrets: Secrets,
    proxies: Mapping[str, str],
) -> dict[str, Any]:
    """One entry per model name with all instances that serve it, whatever hosts a run is limited to.

    Args:
        plans: of every host of group vllm: a host that is left out is one whose instances get no requests.
        addresses: where each of these hosts is reached.
        secrets: ``vllm_secrets`` of each of these hosts; no value of it is in what is returned.
        proxies: the address of each proxy host.

    Returns:
        ``host`` (for reports), ``addresses`` (of the proxies), ``models`` and ``problems``. The plans' own problems are
        not among them, and have to be looked at first: an instance that cannot be planned is missing in the routes.
    """
    problems: list[Problem] = []
    models: dict[str, dict[str, Any]] = {}
    keys: dict[str, dict[str | None, str]] = {}
    for host, plan in sorted(plans.items()):
        for instance in plan["instances"]:
            where = f"{host}: vllm_instances.{instance['name']}"
            address = _address(instance, addresses[host], where, problems)
            problems += _closed(plan, instance, where, proxies)
            if "ssl-certfile" in instance["serve"]:
                problems.append(
                    problem(
                        f"{where}.serve.ssl-certfile", "is set, and the proxy asks instances without TLS", "Remove it."
                    )
                )
            name = instance["served_model_name"]
            key = _key(secrets, host, instance)
            if not isinstance(key, Sealed):
                keys.setdefault(name, {}).setdefault(key, where)
            model = models.setdefault(name, {"name": name, "slug": slug(name), "key": None, "servers": []})
            model["key"] = key_variable(name) if key is not None else None
            model["servers"].append(
                {"name": f"{host}-{instance['name']}", "host": host, "address": address, "port": instance["port"]}
            )
    for name, found in keys.items():
        if len(found) > 1:
            problems.append(
                problem(
                    f"vllm_secrets ({', '.join(found.values())})",
                    f"these instances serve {name} with different keys (or one without), and the proxy has one for all",
                    f"Give them the same {API_KEY}.",
                )
            )
    named: dict[str, str] = {}
    for server in (server for model in models.values() for server in model["servers"]):
        if (other := named.setdefault(server["name"], server["host"])) != server["host"]:
            problems.append(
                problem(
                    f"{server['host']}: vllm_instances",
                    f"an instance is {server['name']} in the routes, and so is one of {other}: drained, both would be",
                    "Rename one of the instances.",
                )
            )
    if proxies and not models and not any(plan["problems"] for plan in plans.values()):
        problems.append(problem("vllm_instances", "no host has any: the proxy would serve nothing", "Define some."))
    return {
        "host": "the proxy's routes",
        "addresses": dict(proxies),
        "models": [models[name] for name in sorted(models)],
        "problems": problems,
    }


def route_keys(plans: Mapping[str, Mapping[str, Any]], secrets: Secrets) -> dict[str, str]:
    """The keys of the models' instances, by the variable that the routes name for each."""
    return {
        key_variable(instance["served_model_name"]): key
        for host, plan in plans.items()
        for instance in plan["instances"]
        if (key := _key(secrets, host, instance)) is not None
    }


def _key(secrets: Secrets, host: str, instance: Mapping[str, Any]) -> str | None:
    if API_KEY not in instance["secrets"]:
        return None
    return secrets[host][instance["name"]][API_KEY]


def _address(instance: Mapping[str, Any], address: str, where: str, problems: list[Problem]) -> str:
    """Where the proxy reaches an instance: the host's address, or the only one that the instance listens on."""
    listens = instance["host"]
    if listens in _LOOPBACK:
        problems.append(
            problem(f"{where}.host", f"is {listens}: the proxy cannot reach it there", "Remove it, or name an address.")
        )
    elif listens not in _EVERYWHERE:
        return str(listens)
    elif listens == "0.0.0.0" and ":" in address:  # noqa: S104 - see above
        problems.append(
            problem(f"{where}.host", f"is {listens}, and the proxy comes by IPv6 to {address}", 'Set host: "::".')
        )
    return address


def _closed(
    plan: Mapping[str, Any], instance: Mapping[str, Any], where: str, proxies: Mapping[str, str]
) -> Iterable[Problem]:
    """What is wrong with the firewall before an instance: open to clients, or closed to a proxy."""
    if not proxies:
        return
    if plan["origins"].get(f"instances.{instance['name']}.networks") == "vllm_client_networks":
        yield problem(
            "vllm_instance_networks",
            f"is not set, so clients reach the instances of {plan['host']} past the proxy",
            "List the addresses of proxy and monitoring.",
        )
        return
    networks = [
        ipaddress.ip_network(network, strict=False)
        for port in plan["firewall"]["ports"]
        if port["port"] == instance["port"]
        for network in port["networks"]
    ]
    for proxy, address in proxies.items():
        try:
            own = ipaddress.ip_address(address)
        except ValueError:
            continue  # a name: only the network itself knows
        if not any(own in network for network in networks):
            yield problem(
                f"{where}.networks",
                f"do not hold {address} of {proxy}: the firewall would keep the proxy out",
                "Add it, or to vllm_instance_networks.",
            )
