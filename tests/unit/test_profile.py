# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import shipped_profiles
from ansible_collections.onprem.vllm.plugins.plugin_utils.patch_catalogue import load_patches
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_layers import resolve
from ansible_collections.onprem.vllm.plugins.plugin_utils.profile import checked_shipped_profiles, load_profiles


def load(name: str, site: dict[str, Any] | None = None) -> Any:
    problems: list[dict[str, str]] = []
    profile = load_profiles(site or {}, problems)[name]
    assert problems == []
    assert profile is not None
    return profile


def test_the_shipped_profiles_are_right_in_themselves() -> None:
    assert {"tiny-cpu", "glm-5.2-nvfp4-8gpu", "glm-5.3-nvfp4-8gpu", "gemma-4-26b-l40s"} <= set(shipped_profiles())
    assert checked_shipped_profiles() == []


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_the_patches_that_a_shipped_profile_names_exist(name: str) -> None:
    profile = load(name)
    refused = profile.about["vllm"].get("refused") or []
    assert {*profile.patches, *(one["patch"] for one in refused if "patch" in one)} <= load_patches().keys()


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_a_shipped_profile_can_be_served(name: str) -> None:
    profile = load(name)
    settings, _unused = resolve(profile.settings)
    assert settings["model"]
    assert settings["serve"]["max-model-len"] > 0
    assert profile.about["accelerator"] in ("cpu", "cuda")
    assert profile.about["description"]
    assert profile.about["vllm"]["versions"]


@pytest.mark.parametrize(
    ("profile", "vllm", "reason"),
    [
        ("glm-5.2-nvfp4-8gpu", "0.25.0", "kv_scale_format"),
        ("glm-5.2-nvfp4-8gpu", "0.25.1", "kv_scale_format"),
        ("glm-5.2-nvfp4-8gpu", "0.26.0", "dense prefill"),
        ("glm-5.2-nvfp4-8gpu", "0.28.0", "dense prefill"),
        ("glm-5.2-nvfp4-8gpu", "0.29.0", None),
        ("glm-5.3-nvfp4-8gpu", "0.28.0", "dense prefill"),
        ("glm-5.3-nvfp4-8gpu", "0.33.0", None),
        ("gemma-4-26b-l40s", "0.26.0", "_maybe_share_embeddings"),
        ("gemma-4-26b-l40s", "0.27.0", None),
        ("gemma-4-26b-l40s", "0.24.0", "it is for vLLM >=0.25.0"),
        ("tiny-cpu", "0.28.0", None),
        ("tiny-cpu", "0.24.0", "it is for"),
    ],
)
def test_versions_that_a_profile_refuses_are_named_with_the_reason(profile: str, vllm: str, reason: str | None) -> None:
    refusals = load(profile).refusals(vllm)
    assert len(refusals) == (reason is not None)
    if reason is not None:
        assert reason in refusals[0].reason


def test_glm_5_3_is_served_like_5_2_under_its_own_name() -> None:
    older, _unused = resolve(load("glm-5.2-nvfp4-8gpu").settings)
    newer, origins = resolve(load("glm-5.3-nvfp4-8gpu").settings)
    assert newer["serve"] == older["serve"]
    assert (newer["model"], newer["served_model_name"]) == ("glm-5.3-nvfp4", "glm-5.3")
    assert origins["serve", "tensor-parallel-size"] == "profile glm-5.2-nvfp4-8gpu"
    assert origins["model",] == "profile glm-5.3-nvfp4-8gpu"


def test_a_site_s_profile_replaces_a_shipped_one_of_its_name() -> None:
    settings, _unused = resolve(load("tiny-cpu", {"tiny-cpu": {"model": "other"}}).settings)
    assert settings == {"model": "other"}


def test_a_site_can_lift_a_refusal_with_an_extension() -> None:
    mine = {"patched": {"extends": "glm-5.2-nvfp4-8gpu", "vllm": {"refused": None}}}
    assert load("patched", mine).refusals("0.28.0") == []


def test_a_refusal_is_lifted_by_the_patch_that_answers_it_and_by_no_other() -> None:
    glm = load("glm-5.3-nvfp4-8gpu")
    (refusal,) = glm.refusals("0.28.0", ["gemma-4-mtp-embeddings"])
    assert refusal.patch == "sm120-sparse-mla-dense-prefill"
    assert glm.refusals("0.28.0", ["sm120-sparse-mla-dense-prefill"]) == []
    assert glm.refusals("0.25.0", ["sm120-sparse-mla-dense-prefill"]) != []


@pytest.mark.parametrize(
    ("locked", "lifted"),
    [
        ({"flashinfer-python": "0.6.16.post3"}, True),
        ({"flashinfer-python": "0.6.14"}, True),
        ({"flashinfer-python": "0.6.13"}, False),
        ({"flashinfer-cubin": "0.6.16"}, False),
        ({}, False),
    ],
)
def test_a_refusal_is_lifted_by_the_packages_of_the_release(locked: dict[str, str], lifted: bool) -> None:
    assert (load("glm-5.2-nvfp4-8gpu").refusals("0.25.0", locked=locked) == []) == lifted


def test_every_package_that_a_refusal_names_must_fit() -> None:
    refused = {"versions": "<1", "because": "x", "unless": {"A_b": ">=2", "c": "==3"}}
    mine = load("mine", {"mine": {"extends": "tiny-cpu", "vllm": {"refused": [refused]}}})
    assert mine.refusals("0.28.0", locked={"a-b": "2.1", "c": "3+cu130"}) == []
    assert len(mine.refusals("0.28.0", locked={"a-b": "2.1"})) == 1
