# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a host's facts decide of its plan, on every fake GPU host; after a change that is meant: RENEW=1 pytest this."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.filter.resolved import resolved
from ansible_collections.onprem.vllm.plugins.module_utils import host_probe_command, host_probe_gpu
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe_instances import decided
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import compare
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_facts import resolve
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_report import plan_table
from ansible_collections.onprem.vllm.plugins.plugin_utils.serve_config import serve_config
from ansible_collections.onprem.vllm.tests.lab import fake_gpus
from ansible_collections.onprem.vllm.tests.unit.host_facts import device, facts

GOLDEN = Path(__file__).with_name("golden")
NEXT: dict[str, Any] = {
    "vllm_mirror_url": "http://mirror1",
    "vllm_client_networks": ["10.0.0.0/8"],
    "vllm_release": "0.31.0-cu130",
    "vllm_models": {"next": {"directory": "/staging/next"}},
    # One that starts on any of the hosts.
    "vllm_profiles": {
        "next": {
            "extends": "qwen3-next-80b-fp8-2gpu",
            "model": "next",
            "hardware": {"gpus": 1, "gpu_memory_gib": 40, "compute_capability": "8.0"},
            "numbers": {"weights_gib": 20, "source": "a test", "config": {"linear_key_head_dim": 128}},
            "serve": {"tensor-parallel-size": None, "max-model-len": 32768},
        }
    },
    "vllm_instances": {"next": {"profile": "next", "port": 8000}},
}
WEIGHTS = {"weights_gib": 20, "source": "a test"}
PREFILL, SAMPLER = "serve.gdn-prefill-backend", "environment.VLLM_USE_FLASHINFER_SAMPLER"


def plan(**changes: Any) -> dict[str, Any]:
    made = compose_plan("gpu1", ["vllm"], {**copy.deepcopy(NEXT), **changes})
    assert made["problems"] == []
    return made


def instance(**settings: Any) -> dict[str, Any]:
    return {"vllm_instances": {"next": {"profile": "next", "port": 8000, **settings}}}


def gpu(made: dict[str, Any], *capabilities: str, **changes: Any) -> dict[str, Any]:
    """A host with these GPUs."""
    devices = [device(number, compute_capability=one) for number, one in enumerate(capabilities)]
    found = facts(made, lambda f: f["gpu"].update(devices=devices))
    found["current"] = {"next": None}
    return {**found, **changes}


def of(made: dict[str, Any]) -> dict[str, Any]:
    """What the only instance has from facts or its current generation, with the origin."""
    [one] = made["instances"]
    prefix = f"instances.{one['name']}."
    return {
        path.removeprefix(prefix): (one[path.split(".")[2]][path.split(".")[3]], origin)
        for path, origin in made["origins"].items()
        if origin.startswith(("facts", "current"))
    }


def without_nvcc(found: dict[str, Any]) -> dict[str, Any]:
    for programs in found["programs"].values():
        programs["nvcc"] = None
    return found


@pytest.mark.parametrize("kind", sorted(fake_gpus.KINDS))
def test_the_resolved_plans_of_the_fake_hosts_are_the_golden_ones(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus.write(kind, tmp_path)
    monkeypatch.setitem(host_probe_command.ENVIRONMENT, "PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = plan(vllm_host_overrides={"serve": {"numa-bind": True}})
    found = gpu(made, gpu=host_probe_gpu.gpus(sys=tmp_path, proc=tmp_path))
    result = {}
    for toolchain, host in (("nvcc", found), ("no nvcc", without_nvcc(copy.deepcopy(found)))):
        resolved_plan = resolve(made, host)
        result[toolchain] = {
            "decided": {path: list(value) for path, value in of(resolved_plan).items()},
            "notes": [note["what"] for note in resolved_plan["notes"] if note not in made["notes"]],
            "probes": resolved_plan["instances"][0]["probes"],
            "findings": [f"{one['severity']} {one['id']}: {one['found']}" for one in compare(made, host)],
        }
    path = GOLDEN / f"resolved-{kind}.json"
    if os.environ.get("RENEW"):
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    assert result == json.loads(path.read_text(encoding="utf-8")), "see git diff after RENEW=1"


@pytest.mark.parametrize(
    ("release", "capability", "backend"),
    [
        ("0.31.0-cu130", "8.0", "triton"),
        ("0.31.0-cu130", "8.9", "triton"),
        ("0.31.0-cu130", "9.0", "flashinfer"),
        ("0.31.0-cu130", "10.0", "flashinfer"),
        ("0.31.0-cu130", "10.3", "flashinfer"),
        ("0.28.0-cu130", "12.0", "triton"),
        ("0.31.0-cu130", "12.0", "flashinfer"),
        ("0.31.0-cu130", "7.0", None),  # nobody has said
        ("0.31.0-cu130", "11.0", None),
    ],
)
def test_the_prefill_backend_is_the_one_that_this_vllm_chooses_on_this_gpu(
    release: str, capability: str, backend: str | None
) -> None:
    made = plan(vllm_release=release)
    kind = f"SM{capability.replace('.', '')}"
    wanted = {PREFILL: (backend, f"facts: {kind}")} if backend else {}
    assert of(resolve(made, gpu(made, capability))) == wanted
    if backend:
        assert f"GDN-based models: vLLM {release[:6]} prefills on {kind} with {backend}" in plan_table(
            resolve(made, gpu(made, capability))
        )


def test_on_blackwell_the_model_s_heads_and_cuda_count() -> None:
    profile = {**NEXT["vllm_profiles"]["next"], "numbers": {"config": {"linear_key_head_dim": 64}, **WEIGHTS}}
    made = plan(vllm_profiles={"next": profile})
    assert of(resolve(made, gpu(made, "10.0"))) == {PREFILL: ("triton", "facts: SM100")}
    unknown = {**profile, "numbers": None, "family": ["gdn"]}
    made = plan(vllm_profiles={"next": unknown})
    assert of(resolve(made, gpu(made, "10.0"))) == {}
    made["needs"]["decide"][-1] |= {"key_head_dim": 128, "cuda": 12}
    assert of(resolve(made, gpu(made, "10.0"))) == {PREFILL: ("triton", "facts: SM100")}


def test_a_model_of_another_family_has_nothing_to_decide() -> None:
    made = plan(vllm_profiles={"next": {"accelerator": "cuda", "model": "next"}})
    assert of(resolve(made, gpu(made, "9.0"))) == {}


@pytest.mark.parametrize("value", ["triton", None])
@pytest.mark.parametrize("layer", ["vllm_group_overrides", "vllm_host_overrides", "vllm_instances", "vllm_profiles"])
def test_what_a_layer_sets_or_removes_is_not_decided(layer: str, value: str | None) -> None:
    settings: dict[str, Any] = {"serve": {"gdn-prefill-backend": value}}
    if layer == "vllm_instances":
        settings = instance(**settings)["vllm_instances"]
    elif layer == "vllm_profiles":
        settings = {"next": {**NEXT["vllm_profiles"]["next"], **settings}}
    made = plan(**{layer: settings})
    result = resolve(made, without_nvcc(gpu(made, "9.0")))
    assert result["instances"][0]["serve"].get("gdn-prefill-backend") == value
    assert of(result) == {}


def test_a_host_without_nvcc_gets_both_switches_where_the_inventory_does_not_say() -> None:
    made = plan()
    result = resolve(made, without_nvcc(gpu(made, "9.0")))
    assert of(result) == {SAMPLER: ("0", "facts: no nvcc"), PREFILL: ("triton", "facts: no nvcc")}
    said = plan(vllm_toolchain="none")
    assert result["instances"][0]["serve"] == said["instances"][0]["serve"]
    assert result["instances"][0]["environment"] == said["instances"][0]["environment"]
    assert result["instances"][0]["probes"] == said["instances"][0]["probes"]
    assert result["packages"] == said["packages"]
    assert compare(made, without_nvcc(gpu(made, "9.0"))) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_toolchain": "toolkit"},
        instance(environment={"VLLM_USE_FLASHINFER_SAMPLER": "1"}),
        instance(environment={"VLLM_USE_FLASHINFER_SAMPLER": None}),
        instance(serve={"gdn-prefill-backend": "flashinfer"}),
    ],
)
def test_a_toolkit_that_the_inventory_wants_is_missing_where_there_is_none(changes: dict[str, Any]) -> None:
    made = plan(**changes)
    host = without_nvcc(gpu(made, "9.0"))
    assert SAMPLER not in of(resolve(made, host))
    assert [one["id"] for one in compare(made, host)] == ["toolkit-missing"]


def test_a_profile_that_needs_flashinfer_is_not_left_without_it() -> None:
    profile = {**NEXT["vllm_profiles"]["next"], "probes": ["has-flashinfer"]}
    made = plan(vllm_profiles={"next": profile})
    assert [one["id"] for one in compare(made, without_nvcc(gpu(made, "9.0")))] == ["toolkit-missing"]


FUSED = {"pass_config": {"fuse_allreduce_rms": True}}
FLASHINFER = {"vllm_profiles": {"next": {**NEXT["vllm_profiles"]["next"], "probes": ["has-flashinfer"]}}}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        (instance(environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"}), False),
        (instance(serve={"gdn-prefill-backend": "triton"}), False),
        (FLASHINFER, True),
        (instance(environment={"VLLM_USE_FLASHINFER_SAMPLER": "1"}), True),
        (instance(environment={"VLLM_USE_FLASHINFER_SAMPLER": None}), True),
        (instance(serve={"gdn-prefill-backend": "flashinfer"}), True),
        (instance(serve={"gdn-prefill-backend": None}), True),
        (instance(serve={"tensor-parallel-size": 2, "compilation-config": {"mode": 3}}), False),
        (instance(serve={"tensor-parallel-size": 2, "compilation-config": FUSED}), True),
        (instance(serve={"compilation-config": FUSED}), False),
    ],
)
def test_to_do_without_a_toolkit_is_proposed_just_where_the_plan_accepts_it(
    changes: dict[str, Any], refused: bool
) -> None:
    without = compose_plan("gpu1", ["vllm"], {**copy.deepcopy(NEXT), **changes, "vllm_toolchain": "none"})
    assert bool(without["problems"]) == refused
    made = plan(vllm_toolchain="toolkit", **changes)
    assert made["needs"]["gpus"][0]["toolkit"] == refused
    [found] = [one for one in compare(made, without_nvcc(gpu(made, "9.0", "9.0"))) if one["id"] == "toolkit-missing"]
    assert ("vllm_toolchain: none" in found["remedy"]) != refused


def test_a_toolkit_that_was_there_and_is_gone_changes_no_running_instance() -> None:
    made = plan()
    ran = {"current": {"next": {"gdn-prefill-backend": "flashinfer"}}}
    host = without_nvcc(gpu(made, "9.0", **ran))
    assert of(resolve(made, host)) == {PREFILL: ("flashinfer", "facts: SM90")}
    assert [one["id"] for one in compare(made, host)] == ["toolkit-missing"]


def two_gpus(**serve: Any) -> dict[str, Any]:
    profile = {**NEXT["vllm_profiles"]["next"], "serve": {"tensor-parallel-size": 2, "max-model-len": 32768, **serve}}
    return plan(vllm_profiles={"next": {**profile, "hardware": {**profile["hardware"], "gpus": 2}}})


@pytest.mark.parametrize("beside", [{}, {"mode": 3, "pass_config": {"fuse_norm_quant": True}}])
def test_several_gpus_without_nvcc_do_without_flashinfer_s_all_reduce(beside: dict[str, Any]) -> None:
    made = two_gpus(**({"compilation-config": beside} if beside else {}))
    result = resolve(made, without_nvcc(gpu(made, "9.0", "9.0")))
    wanted = {**beside, "pass_config": {**beside.get("pass_config", {}), "fuse_allreduce_rms": False}}
    assert result["instances"][0]["serve"]["compilation-config"] == wanted
    assert "compilation-config" not in resolve(made, gpu(made, "9.0", "9.0"))["instances"][0]["serve"] or beside
    # The host cannot be looked at any more: what runs stays as it is.
    ran = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "gdn-prefill-backend": "triton"}
    host = gpu(made, "9.0", "9.0", programs=None, unknown={"programs": "no"}, current={"next": ran})
    older = resolve(made, host)["instances"][0]["serve"]
    assert older.get("compilation-config", {}) == beside
    ran["compilation-config"] = "{pass_config: {fuse_allreduce_rms: false}}"
    assert resolve(made, host)["instances"] == result["instances"]


def test_what_is_set_about_the_all_reduce_is_left_alone() -> None:
    made = two_gpus(**{"compilation-config": {"pass_config": {"fuse_allreduce_rms": True}}})
    result = resolve(made, without_nvcc(gpu(made, "9.0", "9.0")))
    assert result["instances"][0]["serve"]["compilation-config"] == {"pass_config": {"fuse_allreduce_rms": True}}


GONE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no GPU": lambda f: f["gpu"].update(devices=[]),
    "driver": lambda f: f["gpu"].update(devices=[], error="nvidia-smi: no"),
    "unknown": lambda f: f.update(gpu=None, unknown={"gpu": "no"}),
    "capability": lambda f: f["gpu"]["devices"][0].update(compute_capability=None),
    "another": lambda f: f["gpu"].update(devices=[device(1, compute_capability="8.9")]),
    "programs": lambda f: f.update(programs=None, unknown={"programs": "no"}),
}


@pytest.mark.parametrize("gone", sorted(GONE))
def test_a_fact_that_is_missing_today_changes_no_running_instance_and_is_said(gone: str) -> None:
    """The second run, when the GPU has fallen off the bus: what the first decided stays."""
    made = plan(**instance(gpus=[0], serve={"numa-bind": True}))
    first = resolve(made, without_nvcc(gpu(made, "9.0")) if gone == "programs" else gpu(made, "9.0"))
    ran = {key.split(".")[1]: value for key, (value, _origin) in of(first).items()}
    host = gpu(made, "9.0", current={"next": ran})
    GONE[gone](host)
    second = resolve(made, host)
    assert second["instances"] == first["instances"]
    assert {origin for _value, origin in of(second).values()} <= {"current generation", "facts: NUMA node of each GPU"}
    doubts = [one for one in compare(made, host) if one["id"] == "facts-missing"]
    assert doubts
    assert all(one["severity"] == "warning" for one in doubts)
    host["current"] = {"next": None}  # a bare host: nothing is made up
    assert SAMPLER not in of(resolve(made, host))
    if gone != "programs":
        assert PREFILL not in of(resolve(made, host))


def test_resolving_again_changes_nothing_and_the_desired_plan_is_left_alone() -> None:
    made = plan(**instance(serve={"numa-bind": True}))
    before = copy.deepcopy(made)
    for host in (gpu(made, "9.0", "9.0"), without_nvcc(gpu(made, "8.9"))):
        once = resolve(made, host)
        assert resolve(once, host) == once
        assert made == before


@pytest.mark.parametrize(
    ("named", "nodes"), [([], [0, 1, 1]), ([2, 0], [1, 0]), (["GPU-00000001", 0], [1, 0]), ([1, 2], [1, 1])]
)
def test_numa_nodes_are_those_of_the_gpus_in_the_order_of_the_instance(named: list[Any], nodes: list[int]) -> None:
    size = {"serve": {"numa-bind": True, "tensor-parallel-size": len(named) or 3}}
    made = compose_plan("gpu1", ["vllm"], {**NEXT, **instance(gpus=named, **size)})
    host = gpu(made, "9.0", "9.0", "9.0")
    for one, node in zip(host["gpu"]["devices"], (0, 1, 1), strict=True):
        one["numa_node"] = node
    assert of(resolve(made, host))["serve.numa-bind-nodes"] == (nodes, "facts: NUMA node of each GPU")


def test_numa_nodes_where_the_firmware_does_not_say() -> None:
    made = plan(**instance(serve={"numa-bind": True}))
    host = gpu(made, "9.0")
    host["gpu"]["devices"][0]["numa_node"] = None
    assert of(resolve(made, host))["serve.numa-bind-nodes"][0] == [0]  # the host has one node
    host["numa"].append({"node": 1, "cpus": "32-63", "memory": 1})
    assert "serve.numa-bind-nodes" not in of(resolve(made, host))
    host["gpu"]["topology"] = {"GPU0": {"links": {}, "cpus": "32-63", "numa": "1"}}
    assert of(resolve(made, host))["serve.numa-bind-nodes"][0] == [1]
    own = plan(**instance(serve={"numa-bind": True, "numa-bind-nodes": [7]}))
    assert "serve.numa-bind-nodes" not in of(resolve(own, host))


def test_one_host_s_facts_decide_nothing_of_another() -> None:
    made = plan()
    hosts = {"a": gpu(made, "9.0"), "b": gpu(made, "8.9")}
    variables = {name: {"preflight_probe": {"host": host}} for name, host in hosts.items()}
    plans = dict.fromkeys((*hosts, "unreachable", "out of limit"), made)
    variables |= {"unreachable": {"preflight_probe": {"unreachable": True}}, "out of limit": {}}
    found = resolved(plans, variables)
    assert found == {**plans, **{name: resolve(made, host) for name, host in hosts.items()}}
    assert resolved(plans, {**variables, "b": {}})["a"] == found["a"]


def test_what_a_generation_has_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert decided("next", tmp_path) is None
    generation = tmp_path / "next" / "generations" / "3"
    generation.mkdir(parents=True)
    serve = {"model": "/models/next", "gdn-prefill-backend": "triton", "numa-bind": True, "numa-bind-nodes": [0, 1]}
    (generation / "serve.yaml").write_text(serve_config(serve), encoding="utf-8")
    (generation / "environment").write_text('A="gdn"\nVLLM_USE_FLASHINFER_SAMPLER="0"\n', encoding="utf-8")
    (tmp_path / "next" / "current").symlink_to("generations/3")
    assert decided("next", tmp_path) == {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "gdn-prefill-backend": "triton",
        "numa-bind-nodes": [0, 1],
    }
