# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The memory estimate against what was measured on a GPU, what others published, and real vLLM on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import shipped_profiles
from ansible_collections.onprem.vllm.plugins.plugin_utils.memory_estimate import (
    GIB,
    GRAPHS_GIB,
    GRAPHS_OF_SEVERAL_GPUS_GIB,
    LIBRARIES_GIB,
    LIBRARIES_OF_SEVERAL_GPUS_GIB,
    OUTSIDE_GIB,
    demand,
    estimate,
    estimate_on_cpu,
    experts,
    kv_cache_tokens,
    layer_kinds,
    serving_of,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.model_knowledge import Model, model_at, model_of

CACHE = Path(__file__).resolve().parents[2] / ".cache"
# Measured on one H200 and on two, vLLM 0.25.0: weights at random, figures of its own log.
H200 = json.loads((Path(__file__).parent / "fixtures/memory/h200-vllm-0.25.0.json").read_text(encoding="utf-8"))


def profile_model(name: str) -> Model:
    numbers = shipped_profiles()[name]["numbers"]
    return model_of(numbers["config"], int(numbers["weights_gib"] * GIB), numbers["source"])


# 35 billion parameters, GDN: 40 layers of which every fourth attends (Qwen3.6-35B-A3B, its config.json).
QWEN_35B = {
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_key_value_heads": 2,
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
}


def test_gdn_states_and_cache_as_logged_on_an_rtx_5090() -> None:
    """https://github.com/noonghunna/club-3090/issues/612: 5.98 GiB of FP8 cache held 567,978 tokens at 131,072."""
    model = model_of(QWEN_35B, None, "")
    needed = demand(model, serving_of({"max-model-len": 131072, "kv-cache-dtype": "fp8"}, model))
    # Pages of states and of attention have one size, and with prefix caching a sequence has two states.
    assert kv_cache_tokens(5.98 * GIB, needed, 131072) == pytest.approx(567978, rel=0.001)


def test_sparse_mla_cache_as_measured_on_rtx_pro_6000() -> None:
    """https://github.com/SemiAnalysisAI/InferenceX/pull/2335: 464,768 tokens in 23.91 GB, without an indexer's keys."""
    model = profile_model("glm-5.2-nvfp4-8gpu")
    serving = serving_of({"kv-cache-dtype": "fp8", "tensor-parallel-size": 8, "max-model-len": 262144}, model)
    indexer = 78 * (128 + 4)
    assert (demand(model, serving).token - indexer) * 464768 == pytest.approx(23.91e9, rel=0.01)


def test_windows_counted_as_full_layers_as_vllm_0_20_did() -> None:
    """https://github.com/vllm-project/vllm/issues/43308: about 50 GB held about 55,000 tokens of Gemma 4 31B."""
    config = {
        "num_hidden_layers": 60,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    }
    model = model_of(config, None, "")
    # A window longer than the context is a full layer.
    needed = demand(model, serving_of({"max-model-len": 1024}, model))
    assert 50e9 / (needed.token + needed.sequence / 1024) == pytest.approx(55000, rel=0.05)
    # From 0.21 on only the window is kept: about 525,000 tokens. The report does not say the context.
    held = []
    for length in (131072, 262144):
        kept = demand(model, serving_of({"max-model-len": length, "max-num-batched-tokens": 2048}, model))
        held.append(kv_cache_tokens(50e9, kept, length))
    assert held[0] < 525000 < held[1] < 1.15 * held[0]


def test_weights_are_divided_by_the_gpus_as_logged_for_llama_405b() -> None:
    """https://github.com/vllm-project/vllm/issues/6746: eight ranks took 57.752 GB each, of a 462 GB checkpoint."""
    model = model_of({"num_hidden_layers": 126}, int(8 * 57.752e9), "")
    assert demand(model, serving_of({"tensor-parallel-size": 8}, model)).weights == pytest.approx(57.752e9, rel=0.001)


# -- measured on an H200 ----------------------------------------------------------------------------------------------


def measured(name: str) -> tuple[Model, Model | None, dict[str, Any], dict[str, float]]:
    run = H200["runs"][name]
    of = H200["models"][run["model"]]
    draft = model_of({}, of["draft_weights"], "") if "draft_weights" in of else None
    return model_of(of["config"], of["weights"], ""), draft, run["serve"], run["logged"]


@pytest.mark.parametrize("name", sorted(H200["runs"]))
def test_the_layout_of_the_kv_cache_is_the_one_that_vllm_logged(name: str) -> None:
    model, draft, serve, logged = measured(name)
    serving = serving_of(serve, model)
    held = kv_cache_tokens(logged["kv_cache"], demand(model, serving, draft), serving.length)
    assert held == pytest.approx(logged["tokens"], rel=0.0002)


# The reserves for graphs and libraries are those of one model's runs, that for libraries of several GPUs is of another;
# the runs of all others are held out.
FITTED = {name for name, run in H200["runs"].items() if run["model"] == "qwen3-next-64e"}
SEVERAL = "qwen3-30b-a3b-tp2"


def test_the_reserves_are_the_largest_of_the_runs_that_they_are_taken_from() -> None:
    logged = [H200["runs"][name]["logged"] for name in FITTED]
    assert pytest.approx(max(run["graphs"] for run in logged) / GIB, abs=0.01) == GRAPHS_GIB
    assert pytest.approx(max(run["libraries"] for run in logged) / GIB, abs=0.01) == LIBRARIES_GIB
    of_two = H200["runs"][SEVERAL]["logged"]["libraries"] / GIB
    assert pytest.approx(of_two, abs=0.01) == LIBRARIES_OF_SEVERAL_GPUS_GIB


@pytest.mark.parametrize("name", sorted(H200["runs"].keys() - FITTED))
def test_what_is_left_for_the_kv_cache_is_what_vllm_logged(name: str) -> None:
    model, draft, serve, logged = measured(name)
    gpu_gib = H200["gpu_memory_bytes"] / GIB
    found = estimate(model, serve, gpu_gib, draft)
    needed = demand(model, serving_of(serve, model), draft)
    # That reserve is what another node had with 8 GPUs: no more than that is known of it.
    over_nccl = needed.graphs == GRAPHS_OF_SEVERAL_GPUS_GIB * GIB
    kept_back = (needed.graphs - logged["graphs"]) / GIB if over_nccl else 0.0
    assert found["kv_cache_gib"] + kept_back == pytest.approx(logged["kv_cache"] / GIB, rel=0.02)
    sequences = found["full_context_sequences"] + kept_back / found["full_context_gib"]
    assert sequences * serve["max-model-len"] == pytest.approx(logged["tokens"], rel=0.02)
    # Weights: projections that are kept twice are not of the checkpoint.
    assert needed.weights + needed.draft == pytest.approx(logged["weights"], rel=0.075)
    peak = logged["activations"] + logged["libraries"]
    assert needed.activations == pytest.approx(peak, rel=0.1)
    assert logged["graphs"] <= needed.graphs
    assert over_nccl or needed.graphs == pytest.approx(logged["graphs"], abs=0.35 * GIB)


def test_graphs_that_are_not_taken_off_find_room_outside_of_the_budget() -> None:
    """Runner 2 does not estimate its graphs: what it captured, with CUDA's context, must fit what is left free."""
    captured = [run["logged"]["captured_gib"] for run in H200["runs"].values() if "captured_gib" in run["logged"]]
    assert len(captured) > 4
    context, context_of_two = 0.52, 1.53
    assert context + max(captured) < OUTSIDE_GIB
    assert context_of_two + H200["runs"]["qwen3-8b-tp2"]["logged"]["captured_gib"] < OUTSIDE_GIB


def test_defaults_follow_the_size_of_the_gpu() -> None:
    model = model_of({"num_hidden_layers": 1, "max_position_embeddings": 4096}, None, "")
    large, small = serving_of({}, model, 139.8), serving_of({}, model, 44.4)
    assert (large.sequences, large.batched) == (1024, 8192)
    assert (small.sequences, small.batched) == (256, 2048)
    asked = serving_of({"max-num-seqs": 5, "max-num-batched-tokens": "4k"}, model, 139.8)
    assert (asked.sequences, asked.batched) == (5, 4000)


# -- the reference nodes: what is stable there, and what ran out ------------------------------------------------------


def glm(**changes: Any) -> dict[str, Any]:
    serve = {
        **shipped_profiles()["glm-5.2-nvfp4-8gpu"]["serve"],
        **{k.replace("_", "-"): v for k, v in changes.items()},
    }
    return estimate(profile_model("glm-5.2-nvfp4-8gpu"), serve, 95.0)


def test_the_reference_node_fits_and_what_ran_out_there_is_tight_with_the_rung_that_helped() -> None:
    assert glm()["verdict"] == "fits"
    ran_out = glm(gpu_memory_utilization=0.98)
    assert ran_out["verdict"] == "tight"
    assert ran_out["remedy"]["what"] == "lower utilisation"
    assert ran_out["remedy"]["serve"]["gpu-memory-utilization"] <= 0.97


def test_one_l40s_holds_gemma_with_its_draft() -> None:
    numbers = shipped_profiles()["gemma-4-26b-l40s"]
    draft = model_of({}, int(numbers["numbers"]["draft_gib"] * GIB), "")
    found = estimate(profile_model("gemma-4-26b-l40s"), numbers["serve"], 44.4, draft)
    assert found["verdict"] == "fits"
    assert found["full_context_sequences"] > 2


@pytest.mark.parametrize(
    ("changes", "gpu_gib", "rung"),
    [
        ({"max_model_len": 1048576}, 95, "shorter context"),
        ({"max_model_len": 2048}, 62.5, "eager mode"),
        ({"tensor_parallel_size": 4}, 105, "weights offloaded"),
        ({"tensor_parallel_size": 2}, 95, "more GPUs"),
    ],
)
def test_the_first_rung_that_would_help(changes: dict[str, Any], gpu_gib: float, rung: str) -> None:
    serve = {
        **shipped_profiles()["glm-5.2-nvfp4-8gpu"]["serve"],
        **{k.replace("_", "-"): v for k, v in changes.items()},
    }
    model = profile_model("glm-5.2-nvfp4-8gpu")
    found = estimate(model, serve, gpu_gib)
    assert found["verdict"] != "fits"
    assert found["remedy"]["what"].startswith(rung), found
    better = estimate(model, {**serve, **found["remedy"]["serve"]}, gpu_gib)
    assert better["verdict"] in ("fits", "tight")
    assert better["verdict"] != found["verdict"]


def test_an_unknown_gpu_gets_no_verdict_and_still_says_what_it_must_have() -> None:
    found = estimate(
        profile_model("qwen2.5-vl-72b-awq-2gpu"), {"tensor-parallel-size": 2, "max-model-len": 32768}, None
    )
    assert found["verdict"] == "unknown"
    assert 25 < found["least_gpu_memory_gib"] < 40


@pytest.mark.parametrize("name", sorted(name for name, profile in shipped_profiles().items() if "numbers" in profile))
def test_every_shipped_profile_fits_the_gpus_it_asks_for(name: str) -> None:
    profile = shipped_profiles()[name]
    assert estimate(profile_model(name), profile["serve"], profile["hardware"]["gpu_memory_gib"])["verdict"] == "fits"


DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "quantization_config": {"quant_method": "fp8"},
}


def test_a_redundant_expert_takes_what_vllm_s_documentation_says() -> None:
    """https://github.com/vllm-project/vllm/pull/24537: about 2.4 GB for one of DeepSeek V3 on each rank."""
    count, each = experts(model_of(DEEPSEEK_V3, None, ""))
    assert count == 256
    assert each / GIB == pytest.approx(2.4, rel=0.02)


def test_experts_are_spread_over_the_data_parallel_ranks_and_nothing_else_is() -> None:
    """FusedMoEParallelConfig.make: tensor x data, whether as whole experts or as parts of each."""
    model = profile_model("glm-5.2-nvfp4-8gpu")
    count, each = experts(model)
    spread, rest = count * each / GIB, model.weight_bytes / GIB - count * each / GIB
    turned = 1048576 * 64 * 2 / GIB  # the rotary table, on every GPU
    assert spread == pytest.approx(75 * 256 * 3 * 6144 * 2048 * 4.5 / 8 / GIB)
    for whole in (True, False):
        found = glm(tensor_parallel_size=1, data_parallel_size=8, enable_expert_parallel=whole)
        assert found["weights_gib"] == pytest.approx(rest + spread / 8 + turned, abs=0.01)
        assert found["gpus"] == 8
    two = glm(tensor_parallel_size=4, data_parallel_size=2)
    assert two["weights_gib"] == pytest.approx((rest + spread / 2) / 4 + turned, abs=0.01)
    assert glm()["weights_gib"] == pytest.approx(416 / 8 + turned, abs=0.01)
    balanced = glm(data_parallel_size=2, enable_eplb=True, eplb_config={"num_redundant_experts": 32})
    assert balanced["weights_gib"] == pytest.approx((rest + spread * (288 / 256) / 2) / 8 + turned, abs=0.01)


def test_rungs_stand_on_each_other_where_none_helps_alone() -> None:
    serve = {**shipped_profiles()["glm-5.2-nvfp4-8gpu"]["serve"], "max-model-len": 1048576}
    model = profile_model("glm-5.2-nvfp4-8gpu")
    found = estimate(model, serve, 64.0, None, 8)
    rungs = found["remedy"]["what"].split(", ")
    assert len(rungs) > 1
    assert rungs[0] == "shorter context"
    for flag, value in found["remedy"]["serve"].items():
        assert estimate(model, {**serve, flag: value}, 64.0)["verdict"] == "does not fit", flag
    assert estimate(model, {**serve, **found["remedy"]["serve"]}, 64.0)["verdict"] in ("fits", "tight")


@pytest.mark.parametrize(("gpus", "sizes"), [(8, {8}), (None, {8}), (4, set())])
def test_more_gpus_are_as_many_as_there_are_and_heads_allow(gpus: int | None, sizes: set[int]) -> None:
    model = profile_model("glm-5.2-nvfp4-8gpu")
    serve = {**shipped_profiles()["glm-5.2-nvfp4-8gpu"]["serve"], "tensor-parallel-size": 2}
    remedy = estimate(model, serve, 95.0, None, gpus)["remedy"]
    assert {remedy["serve"]["tensor-parallel-size"]} == sizes if sizes else remedy is None
    odd = model_of({**model.config, "num_attention_heads": 6}, model.weight_bytes, "")
    assert estimate(odd, {**serve, "tensor-parallel-size": 2}, 95.0, None, gpus)["remedy"] is None


@pytest.mark.parametrize(
    ("space", "verdict", "remedy"),
    [
        ("16", "fits", None),
        ("8", "fits", None),
        ("7", "does not fit", {"what": "a larger KV cache", "environment": {"VLLM_CPU_KVCACHE_SPACE": "8"}}),
        (None, "unknown", None),
        ("0", "unknown", None),
    ],
)
def test_the_cache_of_a_cpu_holds_a_sequence_or_does_not(
    space: str | None, verdict: str, remedy: dict[str, Any] | None
) -> None:
    """Two times 8 heads of 128, 2 bytes each, in 16 layers: 64 KiB a token, 8 GiB for 131,072 tokens."""
    config = {
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    }
    model = model_of(config, 4 * GIB, "by hand")
    found = estimate_on_cpu(model, {"max-model-len": 131072}, {"VLLM_CPU_KVCACHE_SPACE": space} if space else {})
    assert (found["verdict"], found.get("remedy"), found["full_context_gib"]) == (verdict, remedy, 8.0)
    assert found.get("full_context_sequences") == (None if verdict == "unknown" else round(int(space or 0) / 8, 2))


def test_layers_by_kind() -> None:
    assert layer_kinds(profile_model("qwen3-next-80b-fp8-2gpu")) == {"full": 12, "sliding": 0, "mla": 0, "gdn": 36}
    assert layer_kinds(profile_model("gemma-4-26b-l40s")) == {"full": 5, "sliding": 25, "mla": 0, "gdn": 0}
    assert layer_kinds(profile_model("glm-5.2-nvfp4-8gpu")) == {"full": 0, "sliding": 0, "mla": 78, "gdn": 0}


@pytest.mark.slow
def test_what_real_vllm_lays_out_for_the_tiny_model(tmp_path: Path) -> None:
    """vLLM 0.28.0 on the CPU is given 1 GiB for its KV cache, and logs how many tokens that holds."""
    program = (
        "from vllm import LLM\n"
        "if __name__ == '__main__':\n"
        f"    LLM({str(CACHE / 'models/tiny-qwen3')!r}, max_model_len=1024, enforce_eager=True, max_num_seqs=4)\n"
    )
    (tmp_path / "load.py").write_text(program, encoding="utf-8")
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    python = CACHE / "vllm-0.28.0/bin/python"
    ended = subprocess.run(
        [python, "load.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    text = ended.stdout + ended.stderr
    logged = re.search(r"KV cache size: ([\d,]+) tokens", text)
    assert logged, text[-3000:]
    model = model_at(CACHE / "models/tiny-qwen3")
    assert model is not None
    found = estimate_on_cpu(model, {"max-model-len": 1024}, {"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert found["full_context_sequences"] * 1024 == pytest.approx(int(logged[1].replace(",", "")), rel=0.01)
