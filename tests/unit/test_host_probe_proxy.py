# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a host's probe says of its proxy."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import host_probe_proxy
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe_proxy import proxy
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_unit import UnitState

from .test_drain import HAProxy, running

LITELLM = "onprem-vllm-litellm@4001.service"
HAPROXY = "onprem-vllm-haproxy.service"
KEYS = "onprem-vllm-keys.service"


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A proxy's units, of which LiteLLM's failed."""
    states = {HAPROXY: ("active", "running"), LITELLM: ("failed", "failed"), KEYS: ("active", "running")}

    def state(unit: str) -> UnitState:
        active, sub = states[unit]
        return UnitState(True, active, sub, "exit-code", 0, 3, "", False, False, 1, 1)

    monkeypatch.setattr(host_probe_proxy, "unit_state", state)
    (tmp_path / "multi-user.target.wants").mkdir()
    for name in (HAPROXY, LITELLM):
        (tmp_path / "multi-user.target.wants" / name).symlink_to("/nowhere")
    (tmp_path / HAPROXY).touch()
    (tmp_path / "onprem-vllm-litellm@.service").touch()
    return tmp_path


def test_a_host_without_a_proxy_has_none(tmp_path: Path) -> None:
    assert proxy(tmp_path / "admin.sock", tmp_path) is None


def test_its_units_and_every_instance_and_not_litellms_own_processes(units: Path) -> None:
    with running(HAProxy(one="UP", two="DOWN"), units / "admin.sock") as path:
        found = proxy(path, units)
    assert found is not None
    assert {name: state["active"] for name, state in found["units"].items()} == {HAPROXY: "active", LITELLM: "failed"}
    assert [(one["name"], one["model"], one["status"], one["up"]) for one in found["instances"]] == [
        ("one", "m", "UP", True),
        ("two", "m", "DOWN", False),
    ]
    assert (found["silent"], found["keys"]) == (None, None)


def test_a_haproxy_that_says_nothing_is_said(units: Path) -> None:
    found = proxy(units / "none.sock", units)
    assert found is not None
    assert found["instances"] == []
    assert "does not answer" in found["silent"]


def test_a_database_of_keys_that_does_not_answer_is_said(units: Path) -> None:
    (units / "multi-user.target.wants" / KEYS).symlink_to("/nowhere")
    (units / "said.json").write_text('{"error": "connection refused"}', encoding="utf-8")
    with running(HAProxy(one="UP"), units / "admin.sock") as path:
        found = proxy(path, units, units / "said.json")
    assert found is not None
    assert found["keys"] == "connection refused"
    assert KEYS in found["units"]
