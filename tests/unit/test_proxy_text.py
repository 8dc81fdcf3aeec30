# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The proxy's units and configurations, rendered as the role does it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLE = Path(__file__).parents[2] / "roles" / "litellm_proxy"
MODEL = {"name": "tiny", "slug": "tiny", "key": None, "servers": [{"name": "a", "address": "gpu1", "port": 8001}]}


def trusted(value: Any) -> Any:
    """As Ansible takes what it reads from a role's own files."""
    if isinstance(value, dict):
        return {name: trusted(one) for name, one in value.items()}
    if isinstance(value, list):
        return [trusted(one) for one in value]
    return trust_as_template(value) if isinstance(value, str) else value


def templar(**variables: Any) -> Templar:
    known: dict[str, Any] = {"inventory_hostname": "proxy1", "litellm_proxy_models": [MODEL]}
    for name in ("defaults", "vars"):
        known = {**trusted(yaml.safe_load((ROLE / name / "main.yml").read_text(encoding="utf-8"))), **known}
    return Templar(loader=DataLoader(), variables={**known, **variables})


def text(name: str, **variables: Any) -> str:
    template = (ROLE / "templates" / name).read_text(encoding="utf-8")
    return str(templar(**variables).template(trust_as_template(template)))


def settings(name: str, **variables: Any) -> dict[str, str]:
    """The settings of a unit."""
    return dict(line.split("=", 1) for line in text(name, **variables).splitlines() if "=" in line and line[0] != "#")


def test_litellm_gets_as_long_to_answer_what_it_has_as_a_request_may_take() -> None:
    environment = trust_as_template("{{ __litellm_proxy_environment }}")
    found = templar(litellm_proxy_request_timeout_s=900).template(environment)
    assert found["GRACEFUL_SHUTDOWN_TIMEOUT"] == 900
    assert settings("onprem-vllm-litellm@.service.j2", litellm_proxy_request_timeout_s=900)["TimeoutStopSec"] == "910"


@pytest.mark.parametrize("name", ["onprem-vllm-litellm@.service.j2", "onprem-vllm-haproxy.service.j2"])
def test_a_process_that_ends_comes_back_however_often(name: str) -> None:
    found = settings(name)
    assert (found["Restart"], found["StartLimitIntervalSec"]) == ("always", "0")
    assert int(found["RestartSec"]) > 0


def section(head: str, **variables: Any) -> list[str]:
    """The lines of one section of HAProxy's configuration."""
    lines = text("haproxy.cfg.j2", **variables).splitlines()
    begin = lines.index(head) + 1
    end = next((index for index in range(begin, len(lines)) if lines[index][:1].isalpha()), len(lines))
    return [line.strip() for line in lines[begin:end] if line.strip()]


def position(lines: list[str], what: str) -> int:
    return next(index for index, line in enumerate(lines) if what in line)


def test_what_nobody_may_send_ends_before_litellm_is_asked() -> None:
    clients = section("frontend clients")
    found = [position(clients, what) for what in ("status 405", "GET takes no body", "status 411", "lua.too_large")]
    assert found == sorted(found)
    # By its key and not by its rate, which an unknown one has not.
    assert position(clients, "lua.unknown_key if { var(txn.team) -m str -- - }") < position(
        clients, "set-var(txn.limit)"
    )


def test_idle_clients_leave_connections_for_what_litellm_asks() -> None:
    assert "maxconn 4000" in section("frontend clients")
    assert not [line for line in section("global") if line.startswith("maxconn")]


def test_every_refusal_that_is_named_is_there() -> None:
    named = re.findall(r"use-service lua\.(\w+)", text("haproxy.cfg.j2"))
    lua = (ROLE / "files" / "refuse.lua").read_text(encoding="utf-8")
    assert sorted(named) == sorted(re.findall(r'^refuse\("(\w+)"', lua, re.MULTILINE))


def test_no_request_is_sent_on_a_connection_that_a_server_may_just_close() -> None:
    assert "option http-server-close" in section("defaults")


@pytest.mark.parametrize("mib", [1, 32, 256, 4096])
def test_a_body_s_size_is_compared_in_64_bits_and_within_a_range(mib: int) -> None:
    clients = section("frontend clients", litellm_proxy_body_limit_mib=mib)
    assert clients[position(clients, "status 413")].endswith(f"unless {{ req.body_size 0:{mib << 23} }}")
    assert f"http-request use-service lua.too_large unless {{ req.body_size 0:{mib << 20} }}" in clients
    assert not [line for line in clients if not line.startswith("#") and "hdr_val" in line]


def test_a_host_that_is_gone_without_a_word_is_noticed_in_25_s() -> None:
    defaults = section("defaults")
    for line in ("option srvtcpka", "srvtcpka-idle 10s", "srvtcpka-intvl 5s", "srvtcpka-cnt 3"):
        assert line in defaults
    assert "on-marked-down" not in [word for line in section("backend model-tiny") for word in line.split()]


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    servers = [
        {"name": "a", "address": "10.77.0.5", "port": 8001},
        {"name": "b", "address": "fd77::5", "port": 8002},
        {"name": "c", "address": "gpu1.example", "port": 8003},
    ]
    lines = section("backend model-tiny", litellm_proxy_models=[{**MODEL, "servers": servers}])
    assert [line for line in lines if line.startswith("server ")] == [
        "server a 10.77.0.5:8001",
        "server b [fd77::5]:8002",
        "server c gpu1.example:8003",
    ]


def test_each_model_has_its_path() -> None:
    lines = section("frontend models", litellm_proxy_models=[MODEL, {**MODEL, "slug": "org-lone"}])
    assert lines[position(lines, "no such model")].endswith("unless { path_beg /tiny/ /org-lone/ }")


def test_journald_drops_no_line_of_haproxy() -> None:
    assert settings("onprem-vllm-haproxy.service.j2")["LogRateLimitIntervalSec"] == "0"
