# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Findings about a real GPU host: what module host_probe told of a virtual machine with two H200 and no systemd.

Captured on Ubuntu 24.04 with driver 580.159.04, vLLM 0.25.0 in its release's place, idle and while two instances ran;
UUIDs are blanked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import compare
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan

CAPTURES = Path(__file__).parent / "fixtures" / "host_probe"
# What this host lacks indeed: it boots no systemd, and its image has neither nftables nor lists of apt.
LACKS = [("systemd-missing", "error"), ("package-missing", "error")]


def host(state: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CAPTURES / f"2xh200-{state}.json").read_text(encoding="utf-8"))
    return found


def plan(gpus: tuple[int, ...] = (0,), **hardware: Any) -> dict[str, Any]:
    made = compose_plan(
        "gpu1",
        ["vllm"],
        {
            "vllm_mirror_url": "http://10.20.0.10",
            "vllm_client_networks": ["10.20.8.0/22"],
            "vllm_release": "0.25.0-cu130",
            "vllm_toolchain": "none",  # as in the plan whose questions the host was asked
            "vllm_models": {"gdn": {"directory": "/staging/gdn"}},
            "vllm_profiles": {
                "gdn": {
                    "description": "Random weights.",
                    "accelerator": "cuda",
                    "family": ["gdn"],
                    "hardware": {"gpus": len(gpus), "gpu_memory_gib": 20, "model_gib": 5, **hardware},
                    "model": "gdn",
                    "served_model_name": "gdn",
                    "serve": {"tensor-parallel-size": len(gpus)},
                }
            },
            "vllm_instances": {"gdn": {"profile": "gdn", "port": 8000, "gpus": list(gpus)}},
        },
    )
    assert made["problems"] == []
    return made


def found(made: dict[str, Any], state: str) -> list[tuple[str, str]]:
    return [(one["id"], one["severity"]) for one in compare(made, host(state))]


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_nothing_but_what_the_host_lacks_is_found(state: str) -> None:
    assert found(plan(gpus=(0, 1), compute_capability="9.0"), state) == LACKS


def test_everything_could_be_looked_at() -> None:
    for state in ("idle", "busy"):
        assert host(state)["unknown"] == {}


def test_what_does_not_fit_this_host_is_found() -> None:
    assert ("gpu-unknown", "error") in found(plan(gpus=(2,)), "idle")
    assert ("gpu-memory-small", "error") in found(plan(gpu_memory_gib=180), "idle")
    assert ("gpu-generation", "error") in found(plan(compute_capability="10.0"), "idle")


def test_memory_that_another_program_holds_is_found() -> None:
    facts = host("busy")
    facts["gpu"]["devices"][0]["processes"][0] |= {"name": "python3", "unit": "session-3.scope"}
    taken = {one["id"]: one["found"] for one in compare(plan(), facts)}
    assert "128705 MiB in use by python3" in taken["gpu-memory-taken"]
