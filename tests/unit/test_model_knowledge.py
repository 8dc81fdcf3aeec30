# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the plan reads from a model's own files, and what it makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.model_knowledge import drafted_by, model_at, model_of
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import GPU, PROFILE, TINY, instance, plan

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
    assert any(
        "code of its own" in note["what"] and "config.json asks for own.Config" in note["what"]
        for note in made["notes"]
    )
    assert made["warnings"] == []


def code_of(model: Path, owner: str) -> None:
    (model / "own.py").write_text("class Own: ...", encoding="utf-8")
    file = model / owner
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**known, "auto_map": {"AutoTokenizer": ["own.Own", None]}}), encoding="utf-8")


@pytest.mark.parametrize("owner", ["tokenizer_config.json", "processor_config.json", "preprocessor_config.json"])
def test_own_code_of_tokenizer_or_processor_is_told_by_its_owner_until_it_is_trusted(model: Path, owner: str) -> None:
    code_of(model, owner)
    (found,) = at_hand(model)["warnings"]
    assert found["where"] == "vllm_instances.glm.serve.trust-remote-code"
    assert f"{owner} names code of the model's own (own.Own)" in found["what"]
    assert at_hand(model, serve={"trust-remote-code": True})["warnings"] == []


def test_own_code_that_stands_in_for_vllm_s_implementation_must_be_trusted(model: Path) -> None:
    code_of(model, "config.json")
    changed(model, architectures=["OwnForCausalLM"])
    (found,) = at_hand(model)["problems"]
    assert found["where"] == "vllm_instances.glm.serve.trust-remote-code"
    assert "vLLM 0.28.0 has nothing for OwnForCausalLM but the model's own code (own.Own)" in found["what"]
    assert at_hand(model, serve={"trust-remote-code": True})["problems"] == []


@pytest.mark.parametrize(
    ("implementation", "stops"), [(None, False), ("auto", False), ("vllm", True), ("transformers", None)]
)
def test_an_unregistered_architecture_stops_where_nothing_else_may_run_it(
    model: Path, implementation: str | None, stops: bool | None
) -> None:
    changed(model, architectures=["OwnForCausalLM"])
    made = at_hand(model, serve={"model-impl": implementation})
    assert (len(made["problems"]), len(made["warnings"])) == {None: (0, 0), True: (1, 0), False: (0, 1)}[stops]


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}, "mtp"),
        ({"architectures": ["DeepSeekMTPModel"]}, "mtp"),
        ({"architectures": ["EagleDeepSeekMTPModel"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"architectures": ["MedusaModel"]}, "medusa"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, None),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, None),
    ],
)
def test_the_method_that_a_draft_is_made_for(config: dict[str, Any], method: str | None) -> None:
    assert drafted_by(model_of(config, None, "")) == method


def test_a_draft_s_own_files_say_more_than_a_profile(model: Path) -> None:
    changed(model, architectures=["LlamaForCausalLMEagle3"])
    models = {"tiny-qwen3": {"directory": "/x"}, "ours": {"directory": str(model), "draft": True}}
    drafted = {"draft_model": "ours", "serve": {"speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}}
    (found,) = plan(TINY, vllm_models=models, **instance(**drafted))["problems"]
    assert "the draft ours is of the kind 'eagle3' by its config.json" in found["what"]
    drafted["serve"]["speculative-config"]["method"] = "eagle3"
    made = plan(TINY, vllm_models=models, **instance(**drafted))
    assert (made["problems"], made["warnings"]) == ([], [])


def test_a_draft_that_is_named_by_its_path_is_staged_and_looked_at(model: Path) -> None:
    (model / "model.safetensors").unlink()
    models = {"tiny-qwen3": {"directory": "/x"}, "ours": {"directory": str(model)}}
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": "/models/ours"}
    made = plan(TINY, vllm_models=models, **instance(serve={"speculative-config": config}))
    assert [one["name"] for one in made["models"]] == ["tiny-qwen3", "ours"]
    assert ["vllm_models.ours" for _one in made["problems"]] == [one["where"] for one in made["problems"]] != []


def test_an_own_limit_of_the_context_may_be_taken_on(model: Path) -> None:
    longer = {"serve": {"max-model-len": 4096}, "environment": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}
    assert at_hand(model, **longer)["problems"] == []


def test_the_family_is_known_from_the_files_where_no_profile_says_it(model: Path) -> None:
    """Without a toolchain a GDN-based model needs its prefill backend set, and the engine ends without it."""
    changed(model, **GDN, linear_num_key_heads=16, linear_value_head_dim=128)
    cuda = {**PROFILE, "accelerator": "cuda", "hardware": {}}
    base = {**GPU, "vllm_profiles": {"ours": cuda}, "vllm_toolchain": "none"}
    made = plan(
        base,
        vllm_models={"tiny-qwen3": {"directory": str(model)}},
        vllm_instances={"glm": {"profile": "ours", "port": 8000}},
    )
    (found,) = made["instances"]
    assert found["serve"]["gdn-prefill-backend"] == "triton"
    assert made["origins"]["instances.glm.serve.gdn-prefill-backend"] == "toolchain none"
    assert {"gdn-triton", "sampler-off"} <= {*found["probes"]}


def test_a_profile_s_numbers_are_those_of_its_own_model_alone() -> None:
    """A site's profile for another model, laid over a shipped one, says nothing of that model's heads."""
    ours = {"extends": "glm-5.2-nvfp4-8gpu", "model": "ours", "serve": {"tensor-parallel-size": 7}}
    models = {"ours": {"directory": "/x"}}
    one = {"vllm_instances": {"glm": {"profile": "ours", "port": 8000}}}
    assert plan(GPU, vllm_profiles={"ours": ours}, vllm_models=models, **one)["problems"] == []
    numbers = {"weights_gib": 1, "config": {"num_attention_heads": 8}, "source": "a test"}
    made = plan(GPU, vllm_profiles={"ours": {**ours, "numbers": numbers}}, vllm_models=models, **one)
    assert ["8 attention heads" in found["what"] for found in made["problems"]] == [True]


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
