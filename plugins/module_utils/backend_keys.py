# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether instances know the key that the proxy is about to ask them with.

An instance that could not be reached, or that went back to what served before, has the former key alone; its /health
says 200 all the same, so it would keep its share of the requests and answer them 401.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .systemd_environment import read_environment

ENVIRONMENT = Path("/etc/vllm-proxy/environment")
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Lagging:
    """What would go wrong with a model's new key, in words, and whether keeping the former one spares every request."""

    said: str
    may_wait: bool


def lagging(models: Sequence[Mapping[str, Any]], keys: Mapping[str, str], path: Path = ENVIRONMENT) -> list[Lagging]:
    """Models whose key changes while one of their instances does not accept the new one.

    Args:
        models: of the routes.
        keys: as they shall be, by the variable that a model names as its ``key``.
        path: of the environment that LiteLLM's processes have now; where there is none, no key changes.
    """
    former = read_environment(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = []
    for model in models:
        before, after = former.get(model["key"] or ""), keys.get(model["key"] or "")
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
    """The status of an answer to a key, 0 for none, and the same in words."""
    connection = http.client.HTTPConnection(server["address"], server["port"], timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return 0, f"does not answer: {getattr(error, 'strerror', None) or error or type(error).__name__}"
    finally:
        connection.close()
    return status, f"answers {status}"
