# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the catalogue refuses is what vLLM's own parser refuses, over generated arguments, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.serve_catalogue import (
    catalogued_versions,
    findings,
    misread,
    nearest_environment,
    refused,
    serve_catalogue,
    size,
    unknown_environment,
    versions_with,
    wrong_environment,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.serve_catalogue_build import (
    FOLDER,
    catalogue_text,
    dump_serve,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.serve_config import (
    REPEATED,
    SWITCHES,
    ServeArgumentRefused,
    serve_config,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.serve_dump import _takes, environment_choices
from ansible_collections.onprem.vllm.tests.unit.vllm_parser import Parser
from ansible_collections.onprem.vllm.tests.wheel_member import wheel_member
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

CACHE = Path(__file__).resolve().parents[2] / ".cache"
JUDGED = ["0.28.0", pytest.param("0.31.0", marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def parsers() -> Iterator[dict[str, Parser]]:
    started: dict[str, Parser] = {}
    yield started
    for parser in started.values():
        parser.end()


def test_there_is_a_catalogue_of_every_shipped_version() -> None:
    assert catalogued_versions() == ("0.25.0", "0.28.0", "0.31.0", "0.33.0")
    for version in catalogued_versions():
        assert serve_catalogue(version)["vllm"] == version


def test_the_catalogue_is_what_the_tool_makes_of_vllm_itself() -> None:
    """From an environment of that very version; the file was made from the Python of the CUDA wheel."""
    dumped = dump_serve(CACHE / "vllm-0.28.0/bin/python")
    assert catalogue_text("0.28.0", dumped) == (FOLDER / "0.28.0.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", catalogued_versions())
def test_what_serve_config_knows_of_flags_is_what_the_catalogue_says(version: str) -> None:
    flags = serve_catalogue(version)["flags"]
    assert {flag for flag, spec in flags.items() if spec.get("kind") == "switch"} == SWITCHES
    assert {flag for flag, spec in flags.items() if spec.get("kind") == "append"} == REPEATED


@pytest.mark.parametrize("version", catalogued_versions())
def test_known_facts_about_the_versions(version: str) -> None:
    known = serve_catalogue(version)
    assert {"gemma4", "glm45", "glm47", "hermes"} <= set(known["tool_call_parsers"])
    assert "hermes" not in known["reasoning_parsers"]
    assert "GlmMoeDsaForCausalLM" in known["architectures"]["text"]
    assert ("choices" in known["flags"]["kv-cache-dtype"]) == (version != "0.33.0")
    assert known["flags"]["gpu-memory-utilization"]["default"] == 0.92
    assert ("calculate-kv-scales" in known["flags"]) == (version == "0.25.0")
    assert "mtp" in known["speculative"]["fields"]["method"]["choices"]


TEXTS = st.sampled_from(
    [
        *["", "None", "none", "auto", "-1", "0", "1", "16", "17", "1.5", " 4 ", "1e3", "256K", "256k", "1.5K", "1.5k"],
        *["1_000", "0x1F", "nan", "inf", "fp8", "bfloat16", "float16", "half", "{}", '{"a": 1}', "{a: 1}", "[1]"],
        *["true", "x=y", "a=b=c", '{"name": "a", "path": "/b"}', "flashinfer-cutlass", "TRITON", "mtp", "a,b"],
    ]
)
SCALARS = st.one_of(TEXTS, st.booleans(), st.integers(-2, 300), st.floats(0, 2), st.text("ab1.-", max_size=4))
VALUES = st.one_of(
    SCALARS,
    st.lists(st.one_of(TEXTS, st.integers(0, 9)), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["name", "path", "a", "mode", "backend", "method"]), TEXTS, max_size=2),
)
# Set by the plan from settings of their own, or with a check that needs files.
SKIPPED = {"config", "model", "api-key", "hf-token", "help"}


@st.composite
def arguments(draw: st.DrawFn, version: str) -> tuple[str, Any]:
    flags = serve_catalogue(version)["flags"]
    elsewhere = sorted({flag for one in catalogued_versions() for flag in serve_catalogue(one)["flags"]})
    flag = draw(st.sampled_from(elsewhere).filter(lambda name: name not in SKIPPED))
    spec = flags.get(flag, {})
    values = VALUES
    if "choices" in spec:
        values = st.one_of(values, st.sampled_from(spec["choices"]))
    if "fields" in spec:
        fields = sorted(spec["fields"])
        values = st.one_of(values, st.dictionaries(st.sampled_from([*fields, "nothing_like_it"]), SCALARS, max_size=2))
    if spec.get("kind") == "toggle":
        flag = draw(st.sampled_from([flag, *(name[2:] for name in spec["negative"])]))
    return flag, draw(values)


def asked(version: str, parsers: dict[str, Parser], directory: Path) -> Parser:
    if version not in parsers:
        parsers[version] = Parser(directory, CACHE / f"vllm-{version}/bin/python")
    return parsers[version]


@pytest.mark.hypothesis
@pytest.mark.parametrize("version", catalogued_versions())
@pytest.mark.parametrize(
    ("flag", "right", "wrong", "near"),
    [
        ("quantization", "FP8", "nvfp4", "fp4"),
        ("load-format", "safetensors", "safetenors", "safetensors"),
        ("tokenizer-mode", "Mistral", "mistrall", "mistral"),
        ("attention-backend", "flashinfer", "FLASHINFR", "FLASHINFER"),
        ("attention-backend", "auto", "FLASH", "FLASH"),
    ],
)
def test_a_name_of_vllm_s_own_parts_is_known_before_the_start(
    version: str, flag: str, right: str, wrong: str, near: str
) -> None:
    assert findings(version, {flag: right}) == []
    [found] = findings(version, {flag: wrong})
    assert (found.flag, found.stops) == (flag, True)
    assert f"vLLM {version} has no {flag} {wrong!r}" in found.what
    assert near in found.remedy


@pytest.mark.parametrize("version", JUDGED)
def test_the_parser_and_the_catalogue_judge_alike(version: str, parsers: dict[str, Parser], tmp_path: Path) -> None:
    parser = asked(version, parsers, tmp_path)
    seen = {"refused": 0, "taken": 0}

    @settings(max_examples=400, suppress_health_check=list(HealthCheck))
    @given(arguments(version))
    @example(("lora-modules", [{"name": "a", "path": "/b"}]))
    @example(("lora-modules", [{"name": "a"}]))
    @example(("tensor-parallel-size", "8"))
    @example(("max-model-len", "256K"))
    @example(("long-prefill-token-threshold", False))
    @example(("compilation-config", "256K"))
    @example(("compilation-config", '{"max_cudagraph_capture_size": 1.5K}'))
    @example(("compilation-config", '{"max_cudagraph_capture_size": 1k}'))
    def judge(given_: tuple[str, Any]) -> None:
        flag, value = given_
        mine = refused(version, flag, value)
        try:
            text = serve_config({"model": "/models/x", flag: value})
        except ServeArgumentRefused:
            assert mine is not None
            return  # vLLM never sees it
        answer = parser.ask(text)
        theirs = answer.get("refused")
        if theirs is None and answer["read"]["model_tag"] is not None:
            theirs = "a word was left over, and became the model's name"
        if mine is not None and "read as short for" in mine.what:
            assert theirs is None  # and another argument has changed
            return
        if theirs is not None and mine is None and _built(version, flag, value):
            return
        seen["taken" if theirs is None else "refused"] += 1
        assert (mine is None) == (theirs is None), (flag, value, mine, (theirs or "")[-300:])

    judge()
    assert min(seen.values()) > 50, seen


@pytest.mark.hypothesis
@pytest.mark.parametrize("version", JUDGED)
def test_the_parser_and_the_catalogue_judge_several_arguments_alike(
    version: str, parsers: dict[str, Parser], tmp_path: Path
) -> None:
    parser = asked(version, parsers, tmp_path)
    seen = {"refused": 0, "taken": 0}
    several = st.lists(arguments(version), min_size=1, max_size=4).map(dict)

    @settings(max_examples=300, suppress_health_check=list(HealthCheck))
    @given(several)
    @example({"enable-chunked-prefill": True, "no-enable-chunked-prefill": True})
    @example({"no-enforce-eager": False, "enforce-eager": True})
    @example({"max-num-seqs": "4", "seed": 1, "dtype": "half", "enforce-eager": True})
    def judge(serve: dict[str, Any]) -> None:
        mine = misread(version, serve)
        try:
            text = serve_config({"model": "/models/x", **serve})
        except ServeArgumentRefused:
            assert mine  # or the host would be the first to say it
            return
        answer = parser.ask(text)
        theirs = answer.get("refused")
        if theirs is None and answer["read"]["model_tag"] is not None:
            theirs = "a word was left over, and became the model's name"
        if any("read as short for" in one.what or "once more" in one.what for one in mine):
            return  # taken, and something else than meant
        if theirs is not None and not mine and any(_built(version, flag, value) for flag, value in serve.items()):
            return
        seen["taken" if theirs is None else "refused"] += 1
        assert bool(mine) == bool(theirs), (serve, mine, (theirs or "")[-300:])

    judge()
    assert min(seen.values()) > 30, seen


@pytest.mark.parametrize("version", JUDGED)
def test_a_field_of_a_kind_takes_what_pydantic_takes(version: str, parsers: dict[str, Parser], tmp_path: Path) -> None:
    """Every field of every configuration object whose kind is known, each with values of all kinds."""
    parser = asked(version, parsers, tmp_path)
    known = serve_catalogue(version)
    places = {flag: spec["fields"] for flag, spec in known["flags"].items() if spec.get("type") == "object"}
    values = (True, 1, 2, 2.0, 2.5, "4", " 4 ", "4.0", "4.5", "1e3", "four", "yes", "maybe", "", [1], {"a": 1})
    asked_of, refused_ones = 0, 0
    for flag, fields in places.items():
        for name, field in fields.items():
            if "type" not in field or "bounds" in field:
                continue
            for value in values:
                theirs = parser.ask(serve_config({"model": "/models/x", flag: {name: value}})).get("refused")
                mine = refused(version, flag, {name: value})
                asked_of, refused_ones = asked_of + 1, refused_ones + bool(mine)
                # A field's own check may refuse more than its kind does.
                assert mine is None or theirs, (flag, name, value, mine)
                if theirs and f"{name}\n  Input should be a valid" in theirs:
                    assert mine, (flag, name, value, theirs[-300:])
    assert asked_of > 400
    assert refused_ones > 100
    for name, field in known["speculative"]["fields"].items():
        for value in values if "type" in field else ():
            theirs = parser.field(f"vllm.config.speculative.SpeculativeConfig.{name}", value).get("refused")
            mine = [one for one in findings(version, {"speculative-config": {name: value}}) if f"{name} is" in one.what]
            assert bool(mine) == bool(theirs), (name, value, mine, theirs)


SPECULATION = [
    *({"method": method, "num_speculative_tokens": 3} for method in ("ngram", "mtp", "eagle", "eagle3", "medusa")),
    *({"method": method, "num_speculative_tokens": 3} for method in ("draft_model", "dflash", "mlp_speculator")),
    *({"method": method, "num_speculative_tokens": 3} for method in ("ngram_gpu", "extract_hidden_states", "dspark")),
    *({"method": method, "num_speculative_tokens": 3} for method in ("custom_class", "deepseek_mtp")),
    *({"method": method} for method in ("ngram", "mtp", "eagle3", "draft_model")),
    {"num_speculative_tokens": 3},
    {"method": "ngram", "num_speculative_tokens": 3, "tensor_parallel_size": 2},
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
]


@pytest.mark.parametrize("version", JUDGED)
def test_speculative_decoding_that_lacks_something_is_what_vllm_refuses(
    version: str, parsers: dict[str, Parser], tmp_path: Path
) -> None:
    """SpeculativeConfig itself, built without a model: what it then says of a missing target is no refusal."""
    parser = asked(version, parsers, tmp_path)
    for value in SPECULATION:
        theirs = parser.speculative(value).get("refused") or ""
        mine = [one for one in findings(version, {"speculative-config": value}) if one.stops]
        lacks_target = "target_model_config" in theirs or "no attribute 'hf_config'" in theirs
        assert bool(mine) == (bool(theirs) and not lacks_target), (value, mine, theirs)


def edges(bounds: dict[str, Any]) -> Iterator[float]:
    for key, bound in bounds.items():
        if key != "of":
            yield from (bound - 1, bound - 1e-6, bound, bound + 1e-6, bound + 1)
    yield from (-5, -1, 0, 1, 2, 65536, 10**12)


@pytest.mark.parametrize("version", JUDGED)
def test_a_number_s_bounds_are_those_of_vllm_s_configuration(
    version: str, parsers: dict[str, Parser], tmp_path: Path
) -> None:
    parser = asked(version, parsers, tmp_path)
    bounded = {flag: spec for flag, spec in serve_catalogue(version)["flags"].items() if "bounds" in spec}
    assert len(bounded) > 35
    for flag, spec in bounded.items():
        for value in edges(spec["bounds"]):
            if spec["type"] != "float" and value != int(value):
                continue
            number = int(value) if value == int(value) else value
            theirs = parser.field(spec["bounds"]["of"], number).get("refused")
            if flag == "max-model-len" and number == 0:
                theirs = "the class refuses it once the model is known"
            mine = [
                one.what
                for one in findings(version, {flag: number})
                if "refuses to start" in one.what or "is 0" in one.what
            ]
            assert bool(mine) == bool(theirs), (flag, number, mine, theirs)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("max-model-len", value) for value in (-5, 0, "-5", "0")),
        *(("gpu-memory-utilization", value) for value in (0, 1.01, -0.5, "nan", "inf", 95)),
        *((f"{kind}-parallel-size", value) for kind in ("tensor", "pipeline", "data") for value in (0, -1, "0")),
        *(("master-port", value) for value in (0, -1, 65536)),
        *(("data-parallel-rpc-port", 70000), ("max-num-seqs", 0), ("max-num-batched-tokens", -1), ("block-size", 0)),
        *(("cpu-offload-gb", -1), ("cpu-offload-gb", "inf"), ("kv-offloading-size", "nan"), ("max-logprobs", -2)),
        ("speculative-config", {"method": "ngram", "num_speculative_tokens": 0}),
        ("speculative-config", {"method": "ngram", "num_speculative_tokens": "-3"}),
        ("eplb-config", {"num_redundant_experts": -1}),
    ],
)
@pytest.mark.parametrize("version", [*catalogued_versions(), "0.29.0"])
def test_numbers_out_of_bounds_stop_in_every_version(version: str, flag: str, value: Any) -> None:
    if version == "0.29.0" and isinstance(value, dict):
        return  # of an uncatalogued version no object is known
    (found,) = findings(version, {flag: value})
    assert (found.stops, found.flag) == (True, flag)
    assert found.source


@pytest.mark.parametrize("version", [*catalogued_versions(), "0.29.0"])
def test_numbers_within_their_bounds_are_taken(version: str) -> None:
    right = {"max-model-len": -1, "max-logprobs": -1, "gpu-memory-utilization": 1, "seed": -7, "master-port": 29501}
    right |= {"max-num-seqs": 1, "cpu-offload-gb": 0, "data-parallel-size": "1", "max-num-batched-tokens": "8K"}
    assert findings(version, right) == []


def _built(version: str, flag: str, value: Any) -> bool:
    """Whether the argument is an object with known keys: its own checks run as it is built, and stay vLLM's."""
    spec = serve_catalogue(version)["flags"].get(flag, {})
    if spec.get("type") == "object" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return spec.get("type") == "object" and isinstance(value, dict) and set(value) <= set(spec["fields"])


@pytest.mark.parametrize("version", catalogued_versions())
def test_the_values_that_profiles_use_are_taken(version: str) -> None:
    serve = {
        "tensor-parallel-size": 8,
        "enable-expert-parallel": True,
        "kv-cache-dtype": "fp8",
        "max-model-len": "256K",
        "gpu-memory-utilization": 0.95,
        "enable-prefix-caching": False,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 4},
        "tool-call-parser": "glm47",
        "reasoning-parser": "glm45",
        "gdn-prefill-backend": "triton",
    }
    assert findings(version, serve) == []


def test_the_memory_that_ran_out_is_a_warning_with_its_source() -> None:
    (found,) = findings("0.31.0", {"gpu-memory-utilization": 0.98, "max-model-len": 262144})
    assert (found.stops, found.flag) == (False, "gpu-memory-utilization")
    assert "ran out of memory" in found.what
    assert found.source
    assert findings("0.31.0", {"gpu-memory-utilization": 0.98, "max-model-len": 32768}) == []
    assert findings("0.31.0", {"gpu-memory-utilization": 0.95, "max-model-len": 262144}) == []


@pytest.mark.parametrize("length", [None, "auto", -1, "-1"])
def test_the_model_s_own_context_counts_where_none_is_set(length: Any) -> None:
    serve = {"gpu-memory-utilization": 0.98, "max-model-len": length}
    (found,) = findings("0.31.0", serve, 262144)
    assert "with a context of 262,144" in found.what
    assert findings("0.31.0", serve, 32768) == findings("0.31.0", serve) == []
    assert findings("0.31.0", {**serve, "max-model-len": 32768}, 262144) == []


def test_a_plugin_s_parser_is_nobody_s_business() -> None:
    assert findings("0.31.0", {"tool-call-parser": "ours", "tool-parser-plugin": "/opt/ours.py"}) == []
    (found,) = findings("0.31.0", {"tool-call-parser": "ours"})
    assert found.stops


def test_of_an_uncatalogued_version_only_what_holds_for_all_is_judged() -> None:
    assert findings("0.29.0", {"no-such-flag": 1, "tensor-parallel-size": "x"}) == []
    (found,) = findings("0.29.0", {"max-model-len": "256k"})
    assert "262,144" in found.what


def test_versions_that_have_a_flag() -> None:
    assert versions_with("override-attention-dtype") == ["0.25.0"]
    assert versions_with("tensor-parallel-size") == list(catalogued_versions())
    assert versions_with("nothing") == []


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ("256K", 262144),
        ("256k", 256000),
        ("25.6k", 25600),
        (8, 8),
        (" 7 ", 7),
        ("1.5K", None),
        (True, None),
        ("", None),
    ],
)
def test_sizes_are_read_like_vllm_s(value: Any, tokens: int | None) -> None:
    assert size(value) == tokens


def test_environment_variables_of_vllm_that_are_misspelt() -> None:
    names = ["VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_KV_CACHE_SPACE", "PATH"]
    assert unknown_environment("0.28.0", names) == ["VLLM_CPU_KV_CACHE_SPACE"]


@pytest.mark.parametrize("version", catalogued_versions())
def test_environment_variables_that_vllm_reads_as_numbers(version: str) -> None:
    right = {
        "VLLM_CPU_KVCACHE_SPACE": " 4 ",
        "VLLM_LOG_STATS_INTERVAL": "0.5",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "PATH": "/",
    }
    assert list(wrong_environment(version, right)) == []
    wrong = {"VLLM_CPU_KVCACHE_SPACE": "4G", "VLLM_LOG_STATS_INTERVAL": "often", "VLLM_ENGINE_READY_TIMEOUT_S": "1.5"}
    assert {name: kind for name, kind, _remedy in wrong_environment(version, wrong)} == {
        "VLLM_CPU_KVCACHE_SPACE": "a whole number",
        "VLLM_LOG_STATS_INTERVAL": "a number",
        "VLLM_ENGINE_READY_TIMEOUT_S": "a whole number",
    }
    # What takes a word besides, or several, is no number.
    numbers = serve_catalogue(version)["environment_numbers"]
    assert len(numbers["int"]) > 100
    assert not {"VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_HOST_IP"} & {
        *numbers["int"],
        *numbers["float"],
    }


@pytest.mark.parametrize("version", catalogued_versions())
def test_environment_variables_with_choices_are_those_of_the_wheel(version: str, tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_bytes(wheel_member("vllm", version, "vllm/envs.py"))
    spec = importlib.util.spec_from_file_location("envs", tmp_path / "envs.py")
    assert spec is not None
    assert spec.loader is not None
    envs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(envs)
    known = serve_catalogue(version)["environment_choices"]
    assert environment_choices(envs.environment_variables) == known
    # vLLM's own reading, of every variable that has choices, agrees on the words and on others.
    words = {*("forkk", "", " ", "none", "FORK"), *(word for one in known.values() for word in one["choices"])}
    words |= {f"{one}, {other}" for one in ("container", "no") for other in ("code_interpreter", "CONTAINER", "")}
    for name in known.keys() - {"VLLM_LOGGING_LEVEL"}:
        for word in words:
            refused = [found for found, *_rest in wrong_environment(version, {name: word}) if found == name]
            assert _takes(name, envs.environment_variables[name], word) == (not refused), (name, word)


def test_the_levels_of_the_log_are_python_s_in_any_case() -> None:
    for word in ("DEBUG", "debug", "Warning", "NOTSET"):
        assert list(wrong_environment("0.28.0", {"VLLM_LOGGING_LEVEL": word})) == []
    ((name, kind, _remedy),) = wrong_environment("0.28.0", {"VLLM_LOGGING_LEVEL": "loud"})
    assert name == "VLLM_LOGGING_LEVEL"
    assert "DEBUG, ERROR" in kind


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("VLLM_LOGGING_LEVL", "Did you mean VLLM_LOGGING_LEVEL"),
        ("VLLM_CPU_KV_CACHE_SPACE", "Did you mean VLLM_CPU_KVCACHE_SPACE"),
        ("VLLM_USE_V1", "Remove it"),  # gone, and no other is near
    ],
)
def test_a_misspelt_environment_variable_was_meant_to_be(name: str, remedy: str) -> None:
    assert nearest_environment("0.28.0", name).startswith(remedy)
