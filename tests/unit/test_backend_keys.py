# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A new key of the instances: where one does not know it, the proxy keeps the former one if that harms nobody."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.backend_keys import lagging
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_environment import environment_text

OLD, NEW = "old-key-of-tests", "new-key-of-tests"


@contextmanager
def instance(*known: str) -> Iterator[int]:
    """The port of a server that lists its models to some keys."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.headers["Authorization"].removeprefix("Bearer ")
            self.send_response(200 if self.path == "/v1/models" and key in known else 401)
            self.end_headers()

        def log_message(self, *unused: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def model(*ports: int, key: str | None = "BACKEND_KEY_M") -> dict[str, Any]:
    servers = [
        {"name": f"gpu{number}-m", "host": f"gpu{number}", "address": "127.0.0.1", "port": port}
        for number, port in enumerate(ports, start=1)
    ]
    return {"name": "m", "slug": "m", "key": key, "servers": servers}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    path = tmp_path / "environment"
    path.write_text(environment_text({"BACKEND_KEY_M": OLD, "LITELLM_MASTER_KEY": "sk"}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("known", "said", "may_wait"),
    [
        ([(NEW, OLD), (NEW, OLD)], "", None),
        ([(NEW,), (NEW,)], "", None),
        ([(NEW, OLD), (OLD,)], "m: gpu2 (gpu2-m) answers 401", True),  # it went back to what served before
        (
            [(NEW,), (OLD,)],
            "m: gpu2 (gpu2-m) answers 401",
            False,
        ),  # a key that became known: the first has only the new
    ],
)
def test_a_key_that_one_does_not_know_waits_where_all_know_the_former(
    environment: Path, known: list[tuple[str, ...]], said: str, may_wait: bool | None
) -> None:
    with ExitStack() as running:
        ports = [running.enter_context(instance(*keys)) for keys in known]
        found = lagging([model(*ports)], {"BACKEND_KEY_M": NEW}, environment)
    assert [(one.said, one.may_wait) for one in found] == ([(said, may_wait)] if said else [])
    assert OLD not in str(found)
    assert NEW not in str(found)


def test_one_that_does_not_answer_is_not_known_to_know_it(environment: Path) -> None:
    with instance() as gone:
        pass
    with instance(NEW, OLD) as port:
        (found,) = lagging([model(port, gone)], {"BACKEND_KEY_M": NEW}, environment)
    assert found.said == "m: gpu2 (gpu2-m) does not answer: Connection refused"
    assert found.may_wait


def test_nobody_is_asked_where_no_key_changes(environment: Path, tmp_path: Path) -> None:
    nowhere = model(9)
    assert lagging([nowhere], {"BACKEND_KEY_M": OLD}, environment) == []
    assert lagging([model(9, key=None)], {}, environment) == []
    assert lagging([model(9, key="BACKEND_KEY_OF_A_NEW_ONE")], {"BACKEND_KEY_OF_A_NEW_ONE": NEW}, environment) == []
    assert lagging([nowhere], {"BACKEND_KEY_M": NEW}, tmp_path / "none") == []
