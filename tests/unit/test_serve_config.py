# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What vLLM's own parser reads from serve.yaml is what the plan said, value by value."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible.template import Templar, trust_as_template
from ansible_collections.onprem.vllm.plugins.filter.serve_config import FilterModule
from ansible_collections.onprem.vllm.plugins.plugin_utils.serve_config import ServeArgumentRefused, serve_config
from ansible_collections.onprem.vllm.tests.unit.vllm_parser import Parser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("ONPREM_VLLM_PYTHON", CHECKOUT / ".cache/vllm-0.28.0/bin/python"))


@pytest.fixture(scope="session")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parser]:
    started = Parser(tmp_path_factory.mktemp("serve"), PYTHON)
    yield started
    started.end()


# Every character a command line carries; vLLM reads "" and "None" as no value, and -- is refused.
TEXTS = st.one_of(
    st.sampled_from(
        [
            *[
                "-",
                "---",
                "-1",
                "-x",
                "--port=1",
                "-O3",
                "-a.b",
                "--a.b c",
                "a=b",
                "yes",
                "null",
                "1e3",
                "0x1F",
                "256K",
            ],
            *["2024-01-01", "'", '"', "a: b", "a #b", "$HOME %n %%", "{{ x }}", "{a: 1}", " padded ", "line\nline"],
            *["\t", "\\", "!!python/object:x", "&a", "*a", "- a", "|", ">", "~", "\u2028", "\x85", "\ufeff"],
            *["\U0001f642 ü", "--help=model", "--config", "k" * 1500, "=", "<<", "\U000e0001", "12:30:45", "0o7", "_1"],
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40),
).filter(lambda text: text not in ("None", "--"))
PLAIN_TEXTS = TEXTS.filter(lambda text: not text.startswith("-"))
NUMBERS = st.one_of(st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
MAPPINGS = st.dictionaries(TEXTS, JSON, min_size=1, max_size=4)
BOOLEANS = [
    *["enable-prefix-caching", "enable-chunked-prefill", "enforce-eager", "async-scheduling", "trust-remote-code"],
    *[
        "disable-log-stats",
        "headless",
        "enable-auto-tool-choice",
        "disable-uvicorn-access-log",
        "enable-expert-parallel",
    ],
]
ARGUMENTS = st.fixed_dictionaries(
    {"model": PLAIN_TEXTS},
    optional={
        **{name: st.booleans() for name in BOOLEANS},
        "served-model-name": st.one_of(TEXTS, st.lists(PLAIN_TEXTS, min_size=1, max_size=3)),
        "tokenizer": TEXTS,
        "chat-template": TEXTS,
        "root-path": TEXTS,
        "seed": st.integers(-(2**31), 2**31),
        "gpu-memory-utilization": st.floats(0.01, 1.0),
        "max-logprobs": st.integers(-1, 100),
        "max-num-seqs": st.integers(1, 2**20),
        "rope_theta_is_no_flag": st.none(),
        "hf-overrides": MAPPINGS,
        "default-chat-template-kwargs": MAPPINGS,
        "speculative-config": MAPPINGS,
        "override-generation-config": MAPPINGS,
        "allowed-origins": st.lists(TEXTS, max_size=3),
        "middleware": st.lists(TEXTS, max_size=3, unique=True),
        "cudagraph-capture-sizes": st.lists(st.integers(1, 512), min_size=1, max_size=4),
        "ignore-patterns": st.lists(PLAIN_TEXTS, min_size=1, max_size=3),
    },
)
LISTS = {"served-model-name"}  # one word is read as a list of one


def same(wanted: Any, read: Any) -> bool:
    """Equal and of one type, NaN apart: 1, 1.0 and True are three values."""
    if isinstance(wanted, dict):
        return (
            isinstance(read, dict)
            and list(wanted) == list(read)
            and all(same(wanted[key], read[key]) for key in wanted)
        )
    if isinstance(wanted, list):
        return (
            isinstance(read, list)
            and len(wanted) == len(read)
            and all(same(one, other) for one, other in zip(wanted, read, strict=True))
        )
    if isinstance(wanted, float) and isinstance(read, float):
        return wanted == read or (math.isnan(wanted) and math.isnan(read))
    return type(wanted) is type(read) and wanted == read


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@example(arguments={"model": "a", "middleware": ["k" * 1010, "k" * 1500]})
@example(arguments={"model": "a", "chat-template": "-" + "k" * 3000, "hf-overrides": {"k" * 1500: 1}})
@given(arguments=ARGUMENTS)
def test_vllm_reads_every_value_as_the_plan_has_it(parser: Parser, arguments: dict[str, Any]) -> None:
    text = serve_config(arguments)
    read = parser.read(text)
    for name, value in arguments.items():
        if value is None:
            continue
        wanted = [value] if name in LISTS and not isinstance(value, list) else value
        found = read[name.replace("-", "_")]
        assert same(sorted_keys(wanted), sorted_keys(found)), (name, wanted, found, text)


def sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("arguments", "dest", "wanted"),
    [
        ({"max-model-len": "256K"}, "max_model_len", 262144),
        ({"max-model-len": "256k"}, "max_model_len", 256000),
        ({"max-model-len": -1}, "max_model_len", -1),
        ({"enable-prefix-caching": False}, "enable_prefix_caching", False),
        ({"no-enable-prefix-caching": True}, "enable_prefix_caching", False),
        ({"no-enable-prefix-caching": False}, "enable_prefix_caching", True),
        ({"disable_log_stats": True}, "disable_log_stats", True),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size", 8),
        ({"chat-template": "-0.5"}, "chat_template", "-0.5"),
    ],
)
def test_forms_that_vllm_is_known_to_lose(parser: Parser, arguments: dict[str, Any], dest: str, wanted: Any) -> None:
    assert parser.read(serve_config({"model": "/models/x", **arguments}))[dest] == wanted


def test_lora_modules_are_read_as_json(parser: Parser) -> None:
    modules = [{"name": "a b", "path": "/models/'lora'"}, {"name": "c", "path": "/d"}]
    read = parser.read(serve_config({"model": "/models/x", "lora-modules": modules}))["lora_modules"]
    assert [{key: module[key] for key in ("name", "path")} for module in read] == modules


def test_the_parser_of_the_test_sees_what_a_plain_file_loses(parser: Parser) -> None:
    """Were this to change in vLLM, the forms written here would have lost their reason."""
    assert parser.read("model: x\nenable-prefix-caching: false\n")["enable_prefix_caching"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"--port": 1}, "without --"),
        ({"compilation-config.mode": 3}, "as a mapping"),
        ({"max_model_len": 1, "max-model-len": 2}, "given twice"),
        ({"enforce-eager": True, "no-enforce-eager": True}, "given twice"),
        ({"api-key": "s3cr3t-value"}, "VLLM_API_KEY"),
        ({"hf_token": "s3cr3t-value"}, "HF_TOKEN"),
        ({"config": "/x.yaml"}, "take it out"),
        ({"model": "-x"}, "absolute path"),
        ({"served-model-name": []}, "empty list"),
        ({"served-model-name": ["a", "-b"]}, "starts with a dash"),
        ({"served-model-name": ["a", None]}, "NoneType"),
        ({"middleware": ["a", "a"]}, "twice"),
        ({"middleware": ["--"]}, "end mark"),
        ({"tokenizer": "--"}, "end mark"),
        ({"tokenizer": "a\0b"}, "U+0000"),
        ({"hf-overrides": {"a": {1: 2}}}, "becomes text"),
        ({"hf-overrides": {"a": [b"x"]}}, "no form in JSON"),
        (["a"], "must be a mapping"),
    ],
)
def test_what_has_no_form_is_refused_with_a_remedy(arguments: Any, said: str) -> None:
    with pytest.raises(ServeArgumentRefused, match=re.escape(said)) as refused:
        serve_config(arguments)
    assert "s3cr3t-value" not in str(refused.value)


def test_the_same_arguments_in_another_order_are_the_same_text() -> None:
    assert serve_config({"a": 1, "b": {"d": 1, "c": 2}}) == serve_config({"b": {"c": 2, "d": 1}, "a": 1})


def test_no_arguments_are_no_text() -> None:
    assert serve_config({}) == ""


def test_the_filter_takes_what_templating_hands_over() -> None:
    templar = Templar(
        variables={"model": "/models/x", "serve": {"model": trust_as_template("{{ model }}"), "a": [1.5]}}
    )
    lazy = templar.template(trust_as_template("{{ serve }}"))
    assert yaml.safe_load(FilterModule().filters()["serve_config"](lazy)) == {"model": "/models/x", "a": [1.5]}
    with pytest.raises(AnsibleFilterError, match="no flag of vllm serve"):
        FilterModule().filters()["serve_config"]({"--x": 1})
