# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether instances know the key that the proxy asks them with, or is about to.

An instance that could not be reached, or that went back to what served before, has the former key alone; its /health
says 200 all the same, so it would keep its share of the requests and answer them 401.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .systemd_environment import read_environment

ETC = Path("/etc/vllm-proxy")
TIMEOUT_S = 10.0
NO_KEY = "none"  # what LiteLLM sends where a model's instances have no key
# Of a model in litellm.yaml, which the role litellm_proxy writes.
ASKED = re.compile(
    r"^ +api_base: \S+/(?P<slug>[^/\s]+)/v1\n +api_key: (?:os\.environ/(?P<variable>\S+)|\S+)$", re.MULTILINE
)


@dataclass(frozen=True)
class Lagging:
    """What would go wrong with a model's new key, in words, and whether keeping the former one spares every request."""

    said: str
    may_wait: bool


def asked_with(etc: Path = ETC) -> dict[str, str]:
    """What LiteLLM's processes of this host send as a model's key now, by its slug; nothing where there are none."""
    config, environment = etc / "litellm.yaml", etc / "environment"
    if not config.is_file() or not environment.is_file():
        return {}
    known = read_environment(environment.read_text(encoding="utf-8"))
    models = ASKED.finditer(config.read_text(encoding="utf-8"))
    return {model["slug"]: known.get(model["variable"], "") if model["variable"] else NO_KEY for model in models}


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
        before, after = former.get(model["slug"]), keys.get(model["key"], "") if model["key"] else NO_KEY
        if not before or not after or before == after:
            continue
        answers = {server["name"]: (server, *_ask(server, after)) for server in model["servers"]}
        without = [
            f"{server['host']} ({name}) {said}" for name, (server, status, said) in answers.items() if status != 200
        ]
        if without:
            answering = [server for server, status, _said in answers.values() if status]
            may_wait = all(_ask(server, before)[0] == 200 for server in answering)
            found.append(Lagging(f"{model['name']}: {', '.join(without)}", may_wait))
    return found


def _ask(server: Mapping[str, Any], key: str) -> tuple[int, str]:
    return ask_models(server["address"], server["port"], key)


def ask_models(address: str, port: int, key: str) -> tuple[int, str]:
    """The status of an instance's answer to a key, 0 for none, and the same in words."""
    connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return 0, f"does not answer: {getattr(error, 'strerror', None) or error or type(error).__name__}"
    except ValueError:  # its words hold the key
        return 0, "cannot be asked: its key has characters that no header can have"
    finally:
        connection.close()
    return status, f"answers {status}"
