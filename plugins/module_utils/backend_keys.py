# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether instances answer to what the proxy asks them with, or is about to: place, model and key.

An instance that could not be reached, or that went back to what served before, has the former key, name or port alone.
Its /health says 200 all the same, so it would keep its share of the requests and answer them 401 or 404.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .haproxy_socket import PREFIX, Server
from .systemd_environment import read_environment

ETC = Path("/etc/vllm-proxy")
TIMEOUT_S = 10.0
LISTING_BYTES = 1 << 20
NO_KEY = "none"  # what LiteLLM sends where a model's instances have no key
# Of a model in litellm.yaml, which the role litellm_proxy writes.
ASKED = re.compile(
    r'^ +model: "hosted_vllm/(?P<model>.*)"\n +api_base: \S+/(?P<slug>[^/\s]+)/v1\n'
    r" +api_key: (?:os\.environ/(?P<variable>\S+)|\S+)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Asked:
    """How LiteLLM asks the instances of a model: by which name, and with which key."""

    model: str
    key: str = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """What an instance says to a key: the status, 0 for none; the same in words; the models that it lists."""

    status: int
    said: str
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lagging:
    """What would go wrong with a model's new key, in words, and whether keeping the former one spares every request."""

    said: str
    may_wait: bool


def asked_with(etc: Path = ETC) -> dict[str, Asked]:
    """What LiteLLM's processes of this host ask a model's instances with now, by its slug; nothing where none are."""
    config, environment = etc / "litellm.yaml", etc / "environment"
    if not config.is_file() or not environment.is_file():
        return {}
    known = read_environment(environment.read_text(encoding="utf-8"))
    return {
        model["slug"]: Asked(
            json.loads(f'"{model["model"]}"'), known.get(model["variable"], "") if model["variable"] else NO_KEY
        )
        for model in ASKED.finditer(config.read_text(encoding="utf-8"))
    }


def lagging(models: Sequence[Mapping[str, Any]], keys: Mapping[str, str], etc: Path = ETC) -> list[Lagging]:
    """Models whose key changes, or goes, while one of their instances does not accept that.

    Args:
        models: of the routes.
        keys: as they shall be, by the variable that a model names as its ``key``.
        etc: what LiteLLM's processes have now; where there is nothing, no key changes.
    """
    former = asked_with(etc)
    found = []
    for model in models:
        asked = former.get(model["slug"])
        before, after = asked.key if asked else "", keys.get(model["key"], "") if model["key"] else NO_KEY
        if not before or not after or before == after:
            continue
        answers = [(server, _ask(server, after)) for server in model["servers"]]
        without = [f"{server['host']} ({server['name']}) {one.said}" for server, one in answers if one.status != 200]
        if without:
            answering = [server for server, one in answers if one.status]
            may_wait = all(_ask(server, before).status == 200 for server in answering)
            found.append(Lagging(f"{model['name']}: {', '.join(without)}", may_wait))
    return found


def not_there(models: Sequence[Mapping[str, Any]], keys: Mapping[str, str], known: Sequence[Server]) -> list[str]:
    """Instances that get requests now and would no longer where the routes lead: another place, another model.

    Args:
        models: of the routes.
        keys: as they shall be, by the variable that a model names as its ``key``.
        known: what HAProxy leads to now.
    """
    found = []
    for model in models:
        key = keys.get(model["key"], "") if model["key"] else NO_KEY
        for server in model["servers"]:
            now = [one for one in known if one.name == server["name"] and one.up and one.port]
            if not now or any(_is_at(one, server) and one.backend == PREFIX + model["slug"] for one in now):
                continue
            answer = _ask(server, key)
            if answer.status != 200 or (answer.models and model["name"] not in answer.models):
                said = f"serves {', '.join(answer.models)}" if answer.models else answer.said
                place = ", ".join(f"{one.address} port {one.port}" for one in now)
                found.append(
                    f"{server['host']} ({server['name']}) shall serve {model['name']} at {server['address']} port "
                    f"{server['port']} and {said} there; its requests go to {place} now"
                )
    return found


def _is_at(server: Server, place: Mapping[str, Any]) -> bool:
    """Whether HAProxy asks a server where the routes lead; HAProxy tells addresses, and the routes may have a name."""
    if server.port != place["port"]:
        return False
    try:
        addresses = {ipaddress.ip_address(place["address"])}
    except ValueError:
        try:
            addresses = {ipaddress.ip_address(one[4][0]) for one in socket.getaddrinfo(place["address"], None)}
        except OSError:  # HAProxy keeps the address that it knows, too
            return True
    return ipaddress.ip_address(server.address) in addresses


def _ask(server: Mapping[str, Any], key: str) -> Answer:
    return ask_models(server["address"], server["port"], key)


def ask_models(address: str, port: int, key: str) -> Answer:
    """What an instance says to a key."""
    connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        status, body = response.status, response.read(LISTING_BYTES)
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, f"does not answer: {getattr(error, 'strerror', None) or error or type(error).__name__}")
    except ValueError:  # its words hold the key
        return Answer(0, "cannot be asked: its key has characters that no header can have")
    finally:
        connection.close()
    return Answer(status, f"answers {status}", _listed(body) if status == 200 else ())


def _listed(body: bytes) -> tuple[str, ...]:
    """The names in a list of models, ``{"data": [{"id": ...}]}``; none where it is no such list."""
    try:
        return tuple(str(entry["id"]) for entry in json.loads(body)["data"])
    except (ValueError, LookupError, TypeError):
        return ()
