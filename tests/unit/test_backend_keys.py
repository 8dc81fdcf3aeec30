# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A new key of the instances: where one does not know it, the proxy keeps the former one if that harms nobody."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.backend_keys import (
    Asked,
    asked_with,
    lagging,
    not_there,
)
from ansible_collections.onprem.vllm.plugins.module_utils.haproxy_socket import Server
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_environment import environment_text

from .test_proxy_text import text

OLD, NEW = "old-key-of-tests", "new-key-of-tests"


@contextmanager
def instance(*known: str, other: int = 401, models: tuple[str, ...] = ()) -> Iterator[int]:
    """The port of a server that lists its models to some keys, and answers something else to others."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.headers["Authorization"].removeprefix("Bearer ")
            listed = self.path == "/v1/models" and key in known
            self.send_response(200 if listed else other)
            self.end_headers()
            if listed and models:
                self.wfile.write(json.dumps({"object": "list", "data": [{"id": name} for name in models]}).encode())

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


def proxy(etc: Path, key: str | None) -> Path:
    """What the role wrote of a model whose instances have a key, or none."""
    known = {"LITELLM_MASTER_KEY": "sk", **({"BACKEND_KEY_M": key} if key else {})}
    (etc / "environment").write_text(environment_text(known), encoding="utf-8")
    models = [model(key="BACKEND_KEY_M" if key else None)]
    (etc / "litellm.yaml").write_text(text("litellm.yaml.j2", litellm_proxy_models=models), encoding="utf-8")
    return etc


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    return proxy(tmp_path, OLD)


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
    etc: Path, known: list[tuple[str, ...]], said: str, may_wait: bool | None
) -> None:
    with ExitStack() as running:
        ports = [running.enter_context(instance(*keys)) for keys in known]
        found = lagging([model(*ports)], {"BACKEND_KEY_M": NEW}, etc)
    assert [(one.said, one.may_wait) for one in found] == ([(said, may_wait)] if said else [])
    assert OLD not in str(found)
    assert NEW not in str(found)


def test_one_that_does_not_answer_is_not_known_to_know_it(etc: Path) -> None:
    with instance() as gone:
        pass
    with instance(NEW, OLD) as port:
        (found,) = lagging([model(port, gone)], {"BACKEND_KEY_M": NEW}, etc)
    assert found.said == "m: gpu2 (gpu2-m) does not answer: Connection refused"
    assert found.may_wait


def test_nobody_is_asked_where_no_key_changes(etc: Path, tmp_path: Path) -> None:
    nowhere = model(9)
    assert lagging([nowhere], {"BACKEND_KEY_M": OLD}, etc) == []
    assert lagging([{**nowhere, "slug": "new"}], {"BACKEND_KEY_M": NEW}, etc) == []
    assert lagging([nowhere], {"BACKEND_KEY_M": NEW}, tmp_path / "none") == []
    assert lagging([model(9, key=None)], {}, proxy(tmp_path, None)) == []


def test_a_first_key_and_one_that_goes_are_changes_too(tmp_path: Path) -> None:
    """An instance without a key answers whatever it is asked with; LiteLLM sends "none" for none."""
    with instance(NEW) as keyed, instance(NEW, OLD, "none") as keyless:
        assert lagging([model(keyed, keyless)], {"BACKEND_KEY_M": NEW}, proxy(tmp_path, None)) == []
        (found,) = lagging([model(keyed, keyless, key=None)], {}, proxy(tmp_path, NEW))
        assert (found.said, found.may_wait) == ("m: gpu1 (gpu1-m) answers 401", True)


def test_what_litellm_sends_is_read_of_its_own_configuration(tmp_path: Path) -> None:
    models = [
        {"name": "m", "slug": "m", "key": "SHARED_KEY"},
        {"name": "org/Lone", "slug": "org-lone-1a2b3c", "key": "SHARED_KEY"},
        {"name": "open", "slug": "open", "key": None},
    ]
    assert asked_with(tmp_path) == {}
    (tmp_path / "environment").write_text(environment_text({"SHARED_KEY": 'a "$key"'}), encoding="utf-8")
    (tmp_path / "litellm.yaml").write_text(text("litellm.yaml.j2", litellm_proxy_models=models), encoding="utf-8")
    assert asked_with(tmp_path) == {
        "m": Asked("m", 'a "$key"'),
        "org-lone-1a2b3c": Asked("org/Lone", 'a "$key"'),
        "open": Asked("open", "none"),
    }
    assert "$key" not in str(asked_with(tmp_path))


def test_a_key_that_no_header_can_have_is_not_told(etc: Path) -> None:
    (found,) = lagging([model(9)], {"BACKEND_KEY_M": f"{NEW}\n"}, etc)
    assert NEW not in found.said


def known(status: str, port: int, backend: str = "model-m") -> Server:
    return Server(backend, "gpu1-m", status, 0, "127.0.0.1", port, 0)


@pytest.mark.parametrize(
    ("now", "listed", "said"),
    [
        ("here", (), ""),  # nothing changes, and nobody is asked
        ("elsewhere", ("m",), ""),  # it has moved
        ("elsewhere", (), "answers 401"),
        ("elsewhere", ("former",), "serves former"),
        ("another model", ("m",), ""),
        ("another model", ("former",), "serves former"),
        ("down", (), ""),  # nothing is lost
        ("new", (), ""),
    ],
)
def test_a_proxy_is_not_led_away_from_what_serves(now: str, listed: tuple[str, ...], said: str) -> None:
    with instance(*([NEW] if listed else []), models=listed) as port:
        server = {
            "here": known("UP", port),
            "elsewhere": known("UP 1/2", 9),
            "another model": known("UP", port, "model-former"),
            "down": known("DOWN", 9),
            "new": Server("model-m", "gpu2-m", "UP", 0, "127.0.0.1", port, 0),
        }[now]
        found = not_there([model(port)], {"BACKEND_KEY_M": NEW}, [server])
    if said:
        place = f"at 127.0.0.1 port {port} and {said} there; its requests go to 127.0.0.1 port {server.port} now"
        assert found == [f"gpu1 (gpu1-m) shall serve m {place}"]
    else:
        assert found == []


def test_a_name_is_the_address_that_it_stands_for() -> None:
    named = {**model(8000), "servers": [{**model(8000)["servers"][0], "address": "localhost"}]}
    assert not_there([named], {"BACKEND_KEY_M": NEW}, [known("UP", 8000)]) == []
    named["servers"][0]["address"] = "nobody.invalid"  # HAProxy keeps the address that it knows
    assert not_there([named], {"BACKEND_KEY_M": NEW}, [known("UP", 8000)]) == []
    assert len(not_there([named], {"BACKEND_KEY_M": NEW}, [known("UP", 8001)])) == 1
