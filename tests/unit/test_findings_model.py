# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A model whose files only the host has: read there by the probe, compared with the plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe import probe
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import compare
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.tests.unit.host_facts import device, facts

REAL = Path(__file__).resolve().parents[2] / ".cache/models/tiny-qwen3"
SHARED: dict[str, Any] = {
    "vllm_mirror_url": "http://mirror1",
    "vllm_client_networks": ["10.0.0.0/8"],
    "vllm_release": "0.31.0-cu130",
    "vllm_models": {"own": {}},
    "vllm_profiles": {"own": {"accelerator": "cuda", "model": "own", "serve": {"max-model-len": 1024}}},
    "vllm_instances": {"own": {"profile": "own", "port": 8000}},
}


@pytest.fixture(name="share")
def _share(tmp_path: Path) -> Path:
    shutil.copytree(REAL, tmp_path / "share" / "own")
    return tmp_path / "share"


def plan(**changes: Any) -> dict[str, Any]:
    roots = {"hf_cache_share": "/srv/share", "hf_cache_root": "/srv/models"}
    made = compose_plan("gpu1", ["vllm"], {**SHARED, **roots, **changes})
    assert made["problems"] == []
    return made


def found(made: dict[str, Any], share: Path, **gpu: Any) -> list[dict[str, str]]:
    """What a host that is good but for its model has, as the module reads it; its /srv is here."""
    host = facts(made, lambda f: f["gpu"].update(devices=[device(0, **gpu)]))
    models = json.loads(json.dumps(made["needs"]["models"]).replace("/srv", str(share.parent)))
    host["models"] = json.loads(json.dumps(probe(models=models)["models"]))
    return compare(made, host)


def changed(share: Path, **values: Any) -> None:
    file = share / "own" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def test_a_sound_model_on_the_share_is_no_finding_and_neither_is_one_to_come(share: Path) -> None:
    made = plan()
    assert made["needs"]["models"] == [
        {
            "name": "own",
            "paths": ["/srv/models/own", "/srv/share/own"],
            "draft": False,
            "for": ["instance own"],
        }
    ]
    assert found(made, share) == []
    shutil.rmtree(share / "own")
    assert found(made, share) == []


def test_a_model_that_is_at_hand_is_read_once(share: Path) -> None:
    assert plan(vllm_models={"own": {"directory": str(share / "own")}})["needs"]["models"] == []


CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str, str]] = {
    "tokenizer": (lambda share: (share / "own/tokenizer.json").unlink(), {}, "model-incomplete", "no tokenizer"),
    "cut weights": (
        lambda share: (share / "own/model.safetensors").write_bytes(b"\0" * 64),
        {},
        "model-incomplete",
        "begins with zeros",
    ),
    "registry": (
        lambda share: changed(share, architectures=["Glm7ForCausalLM"]),
        {},
        "model-doubtful",
        "registers no Glm7ForCausalLM",
    ),
    "heads": (lambda share: changed(share, num_attention_heads=7), {}, "model-refused", "7 attention heads"),
    "length": (lambda share: changed(share, max_position_embeddings=512), {}, "model-refused", "made for 512"),
    "code": (
        lambda share: changed(share, architectures=["Own"], auto_map={"AutoModelForCausalLM": "modeling_own.Own"}),
        {},
        "model-refused",
        "modeling_own.Own",
    ),
    "family": (
        lambda share: changed(share, linear_num_value_heads=32, linear_key_head_dim=128),
        {"vllm_toolchain": "none"},
        "model-family",
        "family: [gdn]",
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_what_is_wrong_with_a_model_on_the_host_is_found_before_it_is_loaded(share: Path, case: str) -> None:
    spoil, changes, identifier, part = CASES[case]
    two = {"serve": {"tensor-parallel-size": 2}, "hardware": {"gpus": 1}} if case == "heads" else {}
    made = plan(**changes, vllm_profiles={"own": {**SHARED["vllm_profiles"]["own"], **two}})
    spoil(share)
    findings = [one for one in found(made, share) if one["id"] != "gpu-few"]
    assert identifier in [one["id"] for one in findings], findings
    [one] = [one for one in findings if one["id"] == identifier]
    assert part in " ".join(one.values())
    assert str(share) in one["found"]


def test_an_argument_that_the_model_does_not_suit_names_the_instance(share: Path) -> None:
    made = plan()
    changed(share, max_position_embeddings=512)
    [one] = found(made, share)
    assert "serve.max-model-len of instance own is 1,024" in one["found"]
    assert one["severity"] == "error"


def test_the_memory_is_estimated_from_the_host_s_files(share: Path) -> None:
    """Nobody else knows how large it is."""
    changed(share, vocab_size=4_000_000, hidden_size=8192, num_hidden_layers=80, num_key_value_heads=64)
    made = plan()
    assert made["estimates"][0]["verdict"] == "unknown"
    assert [one["id"] for one in found(made, share, memory_mib=4096)] == ["gpu-memory-small"]
    assert found(made, share, memory_mib=400_000) == []


@pytest.mark.parametrize("text", ["", "[]", "{", '{"architectures": 7, "text_config": []}', '"x"', "\0"])
def test_a_config_of_any_form_breaks_nothing(share: Path, text: str) -> None:
    (share / "own" / "config.json").write_text(text, encoding="utf-8")
    assert {one["id"] for one in found(plan(), share)} <= {"model-incomplete", "model-doubtful"}
