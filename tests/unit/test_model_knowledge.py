# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the plan reads from a model's own files, and what it makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.model_knowledge import model_at, model_of
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import TINY, instance, plan

REAL = Path(__file__).resolve().parents[2] / ".cache/models/tiny-qwen3"
GDN = {"linear_num_value_heads": 32, "linear_key_head_dim": 128}


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REAL, tmp_path / "tiny"))


def at_hand(model: Path, **settings: Any) -> dict[str, Any]:
    return plan(TINY, vllm_models={"tiny-qwen3": {"directory": str(model)}}, **instance(**settings))


def changed(model: Path, **values: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "families"),
    [
        ({}, []),
        (GDN, ["GDN", "hybrid"]),
        ({"text_config": GDN, "vision_config": {}}, ["GDN", "hybrid", "multimodal"]),
        ({"kv_lora_rank": 512, "index_topk": 2048, "n_routed_experts": 256}, ["MLA", "sparse attention", "MoE"]),
        ({"layer_types": ["mamba", "attention"]}, ["hybrid"]),
        ({"num_local_experts": 8, "quantization_config": {"quant_method": "fp8"}}, ["MoE", "quantised (fp8)"]),
        ({"quantization_config": {"quant_algo": "NVFP4", "quant_method": "modelopt"}}, ["quantised (nvfp4)"]),
    ],
)
def test_families(config: dict[str, Any], families: list[str]) -> None:
    assert model_of(config, None, "").families == families


def test_the_tiny_model_is_known_from_its_files(model: Path) -> None:
    found = model_at(model)
    assert found is not None
    assert (found.architectures, found.heads, found.missing) == (["Qwen3ForCausalLM"], 4, ())
    assert found.weight_bytes == (model / "model.safetensors").stat().st_size
    made = at_hand(model)
    assert (made["problems"], made["warnings"]) == ([], [])
    (estimate,) = made["estimates"]
    # Two layers, keys and values, two heads of 32 numbers in 16 bits.
    assert estimate["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 2
    assert estimate["source"] == f"{model}/config.json"


def test_quantisation_from_modelopt_s_own_file(model: Path) -> None:
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}', encoding="utf-8")
    changed(model, num_experts=8)
    assert model_at(model).families == ["MoE", "quantised (nvfp4)"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer"),
        (lambda model: (model / "model.safetensors").unlink(), "no weights"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\0" * 64), "begins with zeros"),
        (
            lambda model: (model / "model-00001-of-00002.safetensors").write_bytes(b""),
            "model-00002-of-00002.safetensors",
        ),
        (lambda model: changed(model, auto_map={"AutoConfig": "own.Config"}), "own.py is missing"),
        (lambda model: changed(model, auto_map={"AutoConfig": "org/code--own.Config"}), "another repository"),
    ],
)
def test_what_is_missing_of_a_model_at_hand_is_a_problem(model: Path, spoil: Any, said: str) -> None:
    spoil(model)
    problems = at_hand(model)["problems"]
    assert any(said in found["what"] and found["where"] == "vllm_models.tiny-qwen3" for found in problems), problems


def test_a_draft_needs_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    for draft, missing in ((False, 1), (True, 0)):
        assert len(model_at(model, draft).missing) == missing


def test_an_architecture_that_the_version_does_not_register(model: Path) -> None:
    changed(model, architectures=["Glm5NextForCausalLM"])
    (found,) = at_hand(model)["warnings"]
    assert found["where"] == "vllm_instances.glm.model"
    assert "vLLM 0.28.0 registers no Glm5NextForCausalLM" in found["what"]
    assert "registry.py" in found["source"]


def test_heads_that_cannot_be_divided(model: Path) -> None:
    problems = at_hand(model, serve={"tensor-parallel-size": 3})["problems"]
    assert [found["where"] for found in problems] == ["vllm_instances.glm.serve.tensor-parallel-size"]
    assert "4 attention heads" in problems[0]["what"]
    assert problems[0]["remedy"] == "Use one of 1, 2, 4."


def test_a_context_beyond_the_model_s(model: Path) -> None:
    (found,) = at_hand(model, serve={"max-model-len": 4096})["problems"]
    assert "made for 2,048" in found["what"]
    changed(model, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert at_hand(model, serve={"max-model-len": 4096})["problems"] == []


def test_own_code_that_is_all_there_is_noted(model: Path) -> None:
    changed(model, auto_map={"AutoConfig": "own.Config"})
    (model / "own.py").write_text("class Config: ...", encoding="utf-8")
    made = at_hand(model)
    assert made["problems"] == []
    assert any("Python code of its own (own.Config)" in note["what"] for note in made["notes"])


def test_a_model_in_the_bundle_is_at_hand_too(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle/models").mkdir(parents=True)
    model.rename(tmp_path / "bundle/models/tiny-qwen3")
    made = plan(TINY, wheel_mirror_bundle=str(tmp_path / "bundle"))
    assert made["estimates"][0]["source"].startswith(str(tmp_path))


def test_a_model_that_is_not_at_hand_is_a_note_and_no_problem() -> None:
    made = plan(TINY)
    assert made["problems"] == []
    assert any("not at hand" in note["what"] for note in made["notes"])
    assert made["estimates"][0]["verdict"] == "unknown"
