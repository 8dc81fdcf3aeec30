# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The key before, before real vLLM's own authentication."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import TINY, plan

CHECKOUT = Path(__file__).resolve().parents[2]
VLLM = CHECKOUT / ".cache/vllm-0.28.0/bin/python"
NEW, OLD = "key-of-today-1", "key-of-yesterday"
KEYS = {"VLLM_API_KEY": NEW, "PREVIOUS_VLLM_API_KEY": OLD}
ASK = """
import asyncio, json, os, sys
from previous_key import PreviousKey
from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware

async def answers(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})

async def ask(headers):
    statuses = []
    async def send(message):
        statuses.append(message.get("status"))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "root_path": "", "headers": headers}
    app = PreviousKey(AuthenticationMiddleware(answers, tokens=[os.environ["VLLM_API_KEY"]]))
    await app(scope, None, send)
    return statuses[0]

asked = [[(name.encode(), value.encode()) for name, value in headers] for headers in json.load(sys.stdin)]
print(json.dumps([asyncio.run(ask(headers)) for headers in asked]))
"""


def test_both_keys_are_right_and_nothing_else_is() -> None:
    asked = {
        200: [f"Bearer {NEW}", f"Bearer {OLD}", f"bearer {OLD}"],
        401: ["Bearer other", f"Bearer {OLD} ", f"Bearer {OLD}x", f"Basic {OLD}", OLD, "", "Bearer "],
    }
    headers = [[["authorization", value]] for values in asked.values() for value in values]
    headers += [[["x-api-key", OLD]], []]
    done = subprocess.run(
        [VLLM, "-c", ASK],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(CHECKOUT / "roles/vllm_service/files"), **KEYS},
        input=json.dumps(headers),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [200] * 3 + [401] * 9


def of(made: dict[str, Any]) -> dict[str, Any]:
    assert made["problems"] == []
    (instance,) = made["instances"]
    return instance


def test_the_plan_takes_both_for_as_long_as_the_previous_one_is_there() -> None:
    made = plan(vllm_secrets={"glm": KEYS})
    assert of(made)["serve"]["middleware"] == ["previous_key.PreviousKey"]
    assert of(made)["environment"]["PYTHONPATH"] == "/opt/vllm/libexec"
    where = "vllm_secrets.glm.PREVIOUS_VLLM_API_KEY"
    assert made["origins"]["instances.glm.serve.middleware"] == where
    assert [note["what"] for note in made["notes"] if note["where"] == where]
    after = of(plan(vllm_secrets={"glm": {"VLLM_API_KEY": NEW}}))
    assert ("middleware" in after["serve"], "PYTHONPATH" in after["environment"]) == (False, False)


def test_it_stands_beside_what_the_site_has_itself() -> None:
    own = {"serve": {"middleware": ["a.B"]}, "environment": {"PYTHONPATH": "/srv/a"}}
    instances = {"glm": {**TINY["vllm_instances"]["glm"], **own}}
    made = of(plan(vllm_secrets={"glm": KEYS}, vllm_instances=instances))
    assert made["serve"]["middleware"] == ["a.B", "previous_key.PreviousKey"]
    assert made["environment"]["PYTHONPATH"] == "/opt/vllm/libexec:/srv/a"


@pytest.mark.parametrize("keys", [{"PREVIOUS_VLLM_API_KEY": OLD}, {"VLLM_API_KEY": OLD, "PREVIOUS_VLLM_API_KEY": OLD}])
def test_a_previous_key_without_another_one_is_a_mistake(keys: dict[str, str]) -> None:
    (found,) = plan(vllm_secrets={"glm": keys})["problems"]
    assert found["where"] == "vllm_secrets.glm.PREVIOUS_VLLM_API_KEY"
    assert OLD not in str(found)
