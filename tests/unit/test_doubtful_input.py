# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Input that can be carried out and is probably not meant so, each with the one warning that it must give."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import GPU, PROFILE, TINY, instance, plan


def serve(**arguments: Any) -> dict[str, Any]:
    """Arguments of the tiny instance; _ stands for -."""
    return instance(serve={name.replace("_", "-"): value for name, value in arguments.items()})


def glm(**arguments: Any) -> dict[str, Any]:
    settings = {name.replace("_", "-"): value for name, value in arguments.items()}
    return {"vllm_instances": {"glm": {"profile": "glm-5.2-nvfp4-8gpu", "port": 8000, "serve": settings}}}


DRAFT = {
    "vllm_models": {"tiny-qwen3": {"directory": "/x"}, "draft": {"directory": "/y"}},
    "vllm_profiles": {"tiny-cpu": {**PROFILE, "draft_model": "draft"}},
}

DOUBTFUL = [
    # what is doubtful, the base, changes, where, a part of what or remedy
    (
        "more GPUs than the profile is for",
        GPU,
        glm(tensor_parallel_size=16),
        "vllm_instances.glm.serve.tensor-parallel-size",
        "make 16 GPUs, and profile glm-5.2-nvfp4-8gpu is for 8",
    ),
    (
        "more GPUs by pipelines",
        GPU,
        glm(pipeline_parallel_size=2),
        "vllm_instances.glm.serve.pipeline-parallel-size",
        "make 16 GPUs",
    ),
    *(
        (
            f"all of the memory with a context of {length}",
            GPU,
            glm(gpu_memory_utilization=0.98, max_model_len=length),
            "vllm_instances.glm.serve.gpu-memory-utilization",
            "with a context of 1,048,576" if length in ("auto", -1) else "with a context of 262,144",
        )
        for length in ("auto", -1, "256K", 262144)
    ),
    (
        "a GPU that is filled to the brim",
        GPU,
        glm(gpu_memory_utilization=0.98),
        "vllm_instances.glm",
        "Lower utilisation: gpu-memory-utilization",
    ),
    (
        "a little beyond the GPU",
        GPU,
        glm(gpu_memory_utilization=0.83),
        "vllm_instances.glm",
        "Shorter context",
    ),
    (
        "far beyond the GPU, and taken on",
        GPU,
        {**glm(tensor_parallel_size=2), "preflight_waived": ["gpu-memory-small"]},
        "vllm_instances.glm",
        "More GPUs",
    ),
    (
        "as much context as fits, which is vLLM's own matter",
        GPU,
        glm(tensor_parallel_size=2, max_model_len="auto"),
        "vllm_instances.glm",
        "vLLM itself shortens the context to what fits",
    ),
    (
        "weights of a size that is not known",
        GPU,
        {
            "vllm_instances": {
                "g": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [0], "serve": {"quantization": "torchao"}}
            }
        },
        "vllm_instances.g",
        "quantization torchao is not known",
    ),
    (
        "draft that its method does not use",
        TINY,
        {**DRAFT, **serve(speculative_config={"method": "ngram", "num_speculative_tokens": 3})},
        "vllm_instances.glm.draft_model",
        "uses no draft model",
    ),
    ("draft that nothing uses", TINY, DRAFT, "vllm_instances.glm.draft_model", "no speculative-config uses it"),
    *(
        (f"{flag} of nobody", TINY, serve(**{flag: path}), f"vllm_instances.glm.serve.{flag.replace('_', '-')}", path)
        for flag, path in (
            ("tokenizer", "/srv/tokenizer"),
            ("chat_template", "/srv/ours.jinja"),
            ("tool_parser_plugin", "/srv/ours.py"),
            ("ssl_keyfile", "/etc/ssl/private/ours.pem"),
        )
    ),
    *(
        (
            f"{what} of the host that its only instance sets itself",
            TINY,
            {**own, "vllm_host_overrides": host},
            where,
            part,
        )
        for what, host, own, where, part in (
            (
                "an argument",
                {"serve": {"max-num-seqs": 3}},
                serve(max_num_seqs=5),
                "vllm_host_overrides.serve.max-num-seqs",
                "changes nothing: what counts is vllm_instances.glm.serve.max-num-seqs",
            ),
            (
                "an argument taken away",
                {"serve": {"max-num-seqs": None}},
                serve(max_num_seqs=5),
                "vllm_host_overrides.serve.max-num-seqs",
                "what counts is vllm_instances.glm.serve.max-num-seqs",
            ),
            ("a port", {"port": 8001}, {}, "vllm_host_overrides.port", "what counts is vllm_instances.glm.port"),
        )
    ),
    ("a user of its own for one role", TINY, {"host_base_user": "llm"}, "host_base_user", "Set vllm_service_user"),
    (
        "a list that the playbooks make",
        TINY,
        {"uv_venv_needed": ["/opt/vllm/releases/a"]},
        "uv_venv_needed",
        "changes nothing",
    ),
]


@pytest.mark.parametrize(
    ("base", "changes", "where", "part"), [row[1:] for row in DOUBTFUL], ids=[row[0] for row in DOUBTFUL]
)
def test_doubtful_input(base: dict, changes: dict, where: str, part: str) -> None:
    made = plan(base, **changes)
    assert made["problems"] == []
    assert any(
        found["where"] == where and part in found["what"] + " " + found["remedy"] for found in made["warnings"]
    ), made["warnings"]
    for found in made["warnings"]:
        assert set(found) == {"where", "what", "remedy", "source"}
        assert all(isinstance(text, str) and text for text in found.values())


RIGHT = [
    # what is right, the base, changes
    ("numbers as text", TINY, serve(max_num_seqs="4", gpu_memory_utilization="0.9", tensor_parallel_size="1")),
    ("one in a list", TINY, serve(reasoning_parser=["qwen3"], max_model_len=[1024])),
    ("speculation as text", TINY, serve(speculative_config='{"method": "ngram", "num_speculative_tokens": "4"}')),
    ("its own MTP layers", TINY, serve(speculative_config={"method": "mtp", "num_speculative_tokens": 1})),
    ("suffixes, as many as fit", TINY, serve(speculative_config={"method": "suffix"})),
    ("the model's own tokenizer", TINY, serve(tokenizer="/models/tiny-qwen3")),
    ("a template within the model", TINY, serve(chat_template="/models/tiny-qwen3/chat_template.jinja")),
    ("a template itself", TINY, serve(chat_template="{% for message in messages %}{{ message }}{% endfor %}")),
    ("generation as vLLM has it", TINY, serve(generation_config="vllm")),
    ("an adapter within the model", TINY, serve(enable_lora=True, lora_modules=["a=/models/tiny-qwen3/lora"])),
    ("all of it on one host", TINY, serve(nnodes=1, node_rank=0, headless=False, data_parallel_size_local=1)),
]


@pytest.mark.parametrize(("base", "changes"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT])
def test_what_is_right_is_no_matter(base: dict, changes: dict) -> None:
    made = plan(base, **changes)
    assert (made["problems"], made["warnings"]) == ([], [])


def test_arguments_have_one_form_in_the_plan_however_they_are_written() -> None:
    written = serve(max_num_seqs=["8"], speculative_config='{"method": "ngram", "num_speculative_tokens": 4}', seed="7")
    (found,) = plan(TINY, **written)["instances"]
    assert (found["serve"]["max-num-seqs"], found["serve"]["seed"]) == (8, 7)
    assert found["serve"]["speculative-config"] == {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("sizes", "count"), [({}, 8), ({"tensor_parallel_size": 4}, 8), ({"data_parallel_size": 2}, 16)]
)
def test_preflight_looks_for_as_many_gpus_as_the_instance_takes(sizes: dict[str, int], count: int) -> None:
    (wanted,) = plan(GPU, **glm(**sizes))["needs"]["gpus"]
    assert wanted["count"] == count


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_host_overrides": {"serve": {"max-num-seqs": 3}}},
        {"vllm_host_overrides": {"serve": {"max-num-seqs": 5}}, **serve(max_num_seqs=5)},
        {"vllm_host_overrides": {"serve": {"max-num-seqs": 3}}, **serve(seed=5)},
        {  # counts for the other instance
            "vllm_host_overrides": {"serve": {"max-num-seqs": 3}},
            "vllm_instances": {**serve(max_num_seqs=5)["vllm_instances"], "two": {"profile": "tiny-cpu", "port": 8001}},
        },
        {"vllm_host_overrides": {"serve": {"max-num-seqs": 3}}, "vllm_instances": {}},
    ],
)
def test_an_override_of_the_host_that_an_instance_takes_is_no_matter(changes: dict[str, Any]) -> None:
    made = plan(TINY, **changes)
    assert [made["problems"], made["warnings"]] == [[], []]
