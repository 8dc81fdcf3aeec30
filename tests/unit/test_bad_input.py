# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Bad input of every kind, each with the one problem that it must give: none is accepted, none crashes the plan."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import shipped_profiles
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import (
    CPU_RELEASE,
    CUDA_RELEASE,
    GPU,
    MIXED,
    PROFILE,
    RELEASE,
    SM120,
    TINY,
    instance,
    plan,
)


def gemma(**settings: Any) -> dict[str, Any]:
    return {"vllm_instances": {"gemma": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [0], **settings}}}


def serve(**arguments: Any) -> dict[str, Any]:
    """Arguments of the tiny instance; _ stands for -."""
    return instance(serve={name.replace("_", "-"): value for name, value in arguments.items()})


def numbers(**config: Any) -> dict[str, Any]:
    """Numbers of a profile for the memory estimate."""
    return {"weights_gib": 1, "config": config, "source": "a test"}


# On vLLM 0.31, where a share of the GPU's memory has a second name.
SHARED = {**TINY, "vllm_release": "0.31.0-cpu", "vllm_host_overrides": {"serve": {"gpu-memory-utilization": 0.9}}}
# On a version whose arguments nobody has looked at.
UNCATALOGUED = {
    **TINY,
    "vllm_release": "mine",
    "vllm_releases": {"mine": {**CPU_RELEASE, "vllm": "0.29.0", "lock": str(RELEASE.lock_path)}},
}


MINE = "vllm_profiles.tiny-cpu"


BAD = [
    # what is wrong, the base, changes, where, a part of what or remedy
    ("unknown profile", TINY, instance(profile="tiny-cpuu"), "vllm_instances.glm.profile", "tiny-cpu?"),
    ("profile missing", TINY, {"vllm_instances": {"glm": {"port": 8000}}}, "vllm_instances.glm.profile", "missing"),
    ("unknown release", TINY, {"vllm_release": "0.28.0-cp"}, "vllm_release", "0.28.0-cpu"),
    ("unknown release of an instance", TINY, instance(release="9"), "vllm_instances.glm.release", "no release '9'"),
    ("no release at all", TINY, {"vllm_release": ...}, "vllm_instances.glm.release", "vllm_release"),
    ("release without a lock", GPU, {"vllm_release": "0.28.0-cu129"}, "vllm_release", "make lock RELEASE=0.28.0-cu129"),
    (
        "release defined wrongly",
        TINY,
        {"vllm_releases": {"x": {**CPU_RELEASE, "variant": "rocm"}}},  # though no instance has it
        "vllm_releases.x.variant",
        "cpu or a CUDA variant",
    ),
    ("release is no map", TINY, {"vllm_release": "x", "vllm_releases": {"x": 3}}, "vllm_releases.x", "mapping"),
    ("model unknown", TINY, {"vllm_models": {}}, "vllm_instances.glm.model", "vllm_models.tiny-qwen3"),
    ("model is a path", TINY, instance(model="../x"), "vllm_instances.glm.model", "no model name"),
    ("model without source", TINY, {"vllm_models": {"tiny-qwen3": {}}}, "vllm_models.tiny-qwen3", "exactly one"),
    (
        "model with two sources",
        TINY,
        {"vllm_models": {"tiny-qwen3": {"directory": "/a", "repository": "a/b", "revision": "a" * 40}}},
        "vllm_models.tiny-qwen3",
        "exactly one",
    ),
    (
        "model at a branch",
        TINY,
        {"vllm_models": {"tiny-qwen3": {"repository": "a/b", "revision": "main"}}},
        "vllm_models.tiny-qwen3.revision",
        "40 digits",
    ),
    (
        "unknown key of a model",
        TINY,
        {"vllm_models": {"tiny-qwen3": {"directry": "/a"}}},
        "vllm_models.tiny-qwen3.directry",
        "directory",
    ),
    (
        "manifest hash cut",
        TINY,
        {"vllm_models": {"tiny-qwen3": {"directory": "/a", "manifest_sha256": "abc"}}},
        "vllm_models.tiny-qwen3.manifest_sha256",
        "64 hex",
    ),
    (
        "port twice",
        TINY,
        {"vllm_instances": {name: {"profile": "tiny-cpu", "port": 8000} for name in ("glm", "b")}},
        "vllm_instances.b.port",
        "taken by instance glm",
    ),
    ("port too high", TINY, instance(port=65536), "vllm_instances.glm.port", "1024 to 65535"),
    ("port privileged", TINY, instance(port=80), "vllm_instances.glm.port", "1024 to 65535"),
    ("port is a word", TINY, instance(port="http"), "vllm_instances.glm.port", "expected int"),
    ("port is a boolean", TINY, instance(port=True), "vllm_instances.glm.port", "expected int"),
    ("port missing", TINY, {"vllm_instances": {"glm": {"profile": "tiny-cpu"}}}, "vllm_instances.glm.port", "missing"),
    (
        "no unit name",
        TINY,
        {"vllm_instances": {"glm 5": {"profile": "tiny-cpu", "port": 8000}}},
        "vllm_instances.glm 5",
        "no unit name",
    ),
    (
        "a template's unit name",
        TINY,
        {"vllm_instances": {"glm@1": {"profile": "tiny-cpu", "port": 8000}}},
        "vllm_instances.glm@1",
        "no unit name",
    ),
    (
        "name that YAML reads as a number",
        TINY,
        {"vllm_instances": {1: {"profile": "tiny-cpu", "port": 8000}}},
        "vllm_instances.1",
        "Quote",
    ),
    ("no network", TINY, {"vllm_client_networks": ["10.77.0.0/33"]}, "vllm_client_networks", "10.77.0.0/33"),
    ("network with host bits", TINY, instance(networks=["10.7.0.1/24"]), "vllm_instances.glm.networks", "host bits"),
    ("network is text", TINY, {"vllm_client_networks": "10.77.0.0/24"}, "vllm_client_networks", "expected a list"),
    ("clients not said", TINY, {"vllm_client_networks": ...}, "vllm_client_networks", "nobody could reach"),
    ("misspelt variable", TINY, {"vllm_instnces": {}}, "vllm_instnces", "vllm_instances"),
    ("misspelt variable of a role", TINY, {"vllm_service_nofiles": 1}, "vllm_service_nofiles", "vllm_service_nofile"),
    ("misspelt prefix", TINY, {"vlm_instances": {}}, "vlm_instances", "vllm_instances"),
    ("wrong type of a role's variable", TINY, {"vllm_service_nofile": "many"}, "vllm_service_nofile", "expected int"),
    ("wrong choice of a role's variable", TINY, {"hf_cache_verify": "half"}, "hf_cache_verify", "full"),
    ("unquoted version", TINY, {"vllm_release": 0.28}, "vllm_release", "quotes"),
    ("instances as a list", TINY, {"vllm_instances": [{"name": "glm"}]}, "vllm_instances", "expected a map"),
    ("instance is a word", TINY, {"vllm_instances": {"glm": "tiny-cpu"}}, "vllm_instances.glm", "expected a map"),
    ("unknown key of an instance", TINY, instance(ports=8000), "vllm_instances.glm.ports", "port?"),
    (
        "unknown key of overrides",
        TINY,
        {"vllm_host_overrides": {"env": {}}},
        "vllm_host_overrides.env",
        "environment",
    ),
    ("serve is a list", TINY, instance(serve=["--port"]), "vllm_instances.glm.serve", "expected a map"),
    (
        "argument with underscores",
        TINY,
        instance(serve={"max_model_len": 5}),
        "vllm_instances.glm.serve.max_model_len",
        "Write max-model-len",
    ),
    (
        "argument with dashes in front",
        TINY,
        {"vllm_group_overrides": {"serve": {"--seed": 5}}},
        "vllm_group_overrides.serve.--seed",
        "Write seed",
    ),
    ("port as an argument", TINY, instance(serve={"port": 1}), "vllm_instances.glm.serve.port", "Set `port`"),
    ("key as an argument", TINY, instance(serve={"api-key": "x"}), "vllm_instances.glm.serve.api-key", "vllm_secrets"),
    ("256k", TINY, instance(serve={"max-model-len": "256k"}), "vllm_instances.glm.serve.max-model-len", "262,144"),
    (
        "tool choice without parser",
        TINY,
        instance(serve={"enable-auto-tool-choice": True}),
        "vllm_instances.glm.serve.enable-auto-tool-choice",
        "tool-call-parser",
    ),
    (
        "shutdown timeout at the stop limit",
        TINY,
        {"vllm_service_shutdown_timeout_s": 120},
        "vllm_service_shutdown_timeout_s",
        "stop limit of 120 s",
    ),
    (
        "shutdown timeout of one instance",
        TINY,
        instance(serve={"shutdown-timeout": 500}),
        "vllm_instances.glm.serve.shutdown-timeout",
        "stop limit",
    ),
    ("no address", TINY, instance(host="glm1.example"), "vllm_instances.glm.host", "no address"),
    ("no mirror", TINY, {"vllm_mirror_url": ...}, "vllm_mirror_url", "not set"),
    ("mirror without scheme", TINY, {"vllm_mirror_url": "mirror1:80"}, "vllm_mirror_url", "no address"),
    ("mirror with a password", TINY, {"vllm_mirror_url": "http://u:p@m"}, "vllm_mirror_url", "without user"),
    ("mirror with a wrong port", TINY, {"vllm_mirror_url": "http://m:99999"}, "vllm_mirror_url", "no address"),
    (
        "environment name",
        TINY,
        instance(environment={"A B": "1"}),
        "vllm_instances.glm.environment.A B",
        "no name of an environment variable",
    ),
    ("environment boolean", TINY, instance(environment={"A": True}), "vllm_instances.glm.environment.A", "quotes"),
    ("environment list", TINY, instance(environment={"A": [1]}), "vllm_instances.glm.environment.A", "text"),
    (
        "environment of two lines",
        TINY,
        instance(environment={"A": "1\nB=2"}),
        "vllm_instances.glm.environment.A",
        "line",
    ),
    (
        "online",
        TINY,
        instance(environment={"HF_HUB_OFFLINE": "0"}),
        "vllm_instances.glm.environment.HF_HUB_OFFLINE",
        "open to nobody",
    ),
    (
        "the collection's own environment",
        TINY,
        instance(environment={"ONPREM_VLLM_GENERATION": "9"}),
        "vllm_instances.glm.environment.ONPREM_VLLM_GENERATION",
        "open to nobody",
    ),
    (
        "secret of that name",
        TINY,
        {"vllm_secrets": {"glm": {"ONPREM_VLLM_URL": "x"}}},
        "vllm_secrets.glm.ONPREM_VLLM_URL",
        "nobody",
    ),
    (
        "secret in the open",
        TINY,
        instance(environment={"VLLM_API_KEY": "x"}),
        "vllm_instances.glm.environment.VLLM_API_KEY",
        "vllm_secrets",
    ),
    ("secrets of nobody", TINY, {"vllm_secrets": {"glmm": {"A": "x"}}}, "vllm_secrets.glmm", "glm?"),
    ("secret is no text", TINY, {"vllm_secrets": {"glm": {"A": 7}}}, "vllm_secrets.glm.A", "no text"),
    (
        "secret twice",
        TINY,
        {"vllm_secrets": {"glm": {"VLLM_CPU_KVCACHE_SPACE": "x"}}},
        "vllm_secrets.glm.VLLM_CPU_KVCACHE_SPACE",
        "Keep one",
    ),
    ("CUDA profile on a CPU release", GPU, {"vllm_release": "0.31.0-cpu"}, "vllm_instances.glm.release", "for cuda"),
    (
        "vLLM too old for the profile",
        GPU,
        {"vllm_release": "0.28.0-cu130"},
        "vllm_instances.glm.release",
        "dense prefill",
    ),
    (
        "vLLM outside the profile's range",
        GPU,
        {"vllm_releases": {"site-cu130": {**CUDA_RELEASE, "vllm": "0.24.0"}}},  # nobody knows what it pins
        "vllm_instances.glm.release",
        "it is for vLLM >=0.25.0",
    ),
    (
        "GPU twice on a host",
        GPU,
        {
            "vllm_instances": {
                name: {"profile": "gemma-4-26b-l40s", "port": port, "gpus": [0]}
                for name, port in (("a", 1024), ("b", 8000))
            }
        },
        "vllm_instances.b.gpus",
        "GPU 0 is taken by instance a",
    ),
    (
        "GPUs named by one of two",
        GPU,
        {
            "vllm_instances": {
                "a": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [0]},
                "b": {"profile": "gemma-4-26b-l40s", "port": 8001},
            }
        },
        "vllm_instances.b.gpus",
        "names none uses all",
    ),
    (
        "too few GPUs named",
        GPU,
        {"vllm_instances": {"glm": {"profile": "glm-5.2-nvfp4-8gpu", "port": 8000, "gpus": [0, 1]}}},
        "vllm_instances.glm.gpus",
        "names 2 GPUs",
    ),
    ("GPU on a CPU release", TINY, instance(gpus=[0]), "vllm_instances.glm.gpus", "runs on the CPU"),
    ("GPU of no kind", TINY, instance(gpus=["first"]), "vllm_instances.glm.gpus", "no GPU"),
    (
        "GPU named twice",
        GPU,
        {"vllm_instances": {"g": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [1, "1"]}}},
        "vllm_instances.g.gpus",
        "stands twice",
    ),
    (
        "parallel size is a word",
        GPU,
        {
            "vllm_instances": {
                "glm": {"profile": "glm-5.2-nvfp4-8gpu", "port": 8000, "serve": {"tensor-parallel-size": "x"}}
            }
        },
        "vllm_instances.glm.serve.tensor-parallel-size",
        "whole number",
    ),
    (
        "profile extends itself",
        TINY,
        {"vllm_profiles": {"a": {"extends": "b"}, "b": {"extends": "a"}}},
        "vllm_profiles.a.extends",
        "circle",
    ),
    (
        "profile extends nothing known",
        TINY,
        {"vllm_profiles": {"a": {"extends": "tiny-cp"}}},
        "vllm_profiles.a.extends",
        "tiny-cpu",
    ),
    (
        "profile with a wrong range",
        TINY,
        {"vllm_profiles": {"a": {"vllm": {"versions": "0.28 and up"}}}},
        "vllm_profiles.a.vllm",
        "no version range",
    ),
    (
        "profile with an unknown key",
        TINY,
        {"vllm_profiles": {"a": {"args": {}}}},
        "vllm_profiles.a.args",
        "no such key",
    ),
    ("patch defined wrongly", TINY, {"vllm_patches": {"x": ["file"]}}, "vllm_patches.x", "mapping"),
    (
        "wrong patch of a release",
        TINY,
        {
            "vllm_patches": {"x": 3},
            "vllm_release": "mine",
            "vllm_releases": {"mine": {**CPU_RELEASE, "patches": ["x"]}},
        },
        "vllm_patches.x",
        "mapping",
    ),
    (
        "wrong patch of a profile",
        TINY,
        {"vllm_patches": {"x": 3}, "vllm_profiles": {"tiny-cpu": {**PROFILE, "patches": ["x"]}}},
        "vllm_patches.x",
        "mapping",
    ),
    (
        "unknown patch of a release",
        TINY,
        {"vllm_release": "mine", "vllm_releases": {"mine": {**CPU_RELEASE, "patches": ["gemma-4-mtp-embedings"]}}},
        "vllm_releases.mine.patches",
        "gemma-4-mtp-embeddings?",
    ),
    (
        "unknown patch of a profile",
        TINY,
        {"vllm_profiles": {"tiny-cpu": {**PROFILE, "patches": ["nothing-like-it"]}}},
        "vllm_profiles.tiny-cpu.patches",
        "there is no patch",
    ),
    (
        "patch that the profile needs and the release lacks",
        TINY,
        {"vllm_profiles": {"tiny-cpu": {**PROFILE, "patches": [SM120]}}},
        "vllm_instances.glm.release",
        "0.28.0-cu130-sm120",
    ),
    (
        "mixed FlashInfer set",
        GPU,
        {"vllm_releases": {"site-cu130": {**CUDA_RELEASE, "vllm": "0.33.0"}}},
        "release site-cu130",
        'overrides: {flashinfer-python: "0.7.0.post1"}',
    ),
    (
        "FlashInfer's version check switched off by an instance",
        TINY,
        instance(environment={"FLASHINFER_DISABLE_VERSION_CHECK": "1"}),
        "vllm_instances.glm.environment.FLASHINFER_DISABLE_VERSION_CHECK",
        "disable_version_check: true",
    ),
    (
        "FlashInfer's version check switched off for a group",
        TINY,
        {"vllm_group_overrides": {"environment": {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}}},
        "vllm_group_overrides.environment.FLASHINFER_DISABLE_VERSION_CHECK",
        "a release's decision",
    ),
    (
        "FlashInfer's version check switched off by a profile",
        TINY,
        {"vllm_profiles": {"tiny-cpu": {**PROFILE, "environment": {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}}}},
        "vllm_profiles.tiny-cpu.environment.FLASHINFER_DISABLE_VERSION_CHECK",
        "a release's decision",
    ),
    (
        "FlashInfer's version check switched off in secret",
        TINY,
        {"vllm_secrets": {"glm": {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}}},
        "vllm_secrets.glm.FLASHINFER_DISABLE_VERSION_CHECK",
        "a release's decision",
    ),
    (
        "what the release decided is removed",
        MIXED,
        instance(environment={"FLASHINFER_DISABLE_VERSION_CHECK": None}),
        "vllm_instances.glm.environment.FLASHINFER_DISABLE_VERSION_CHECK",
        "made to run with it",
    ),
    (
        "what the release decided is decided once more",
        MIXED,
        instance(environment={"FLASHINFER_DISABLE_VERSION_CHECK": "1"}),
        "vllm_instances.glm.environment.FLASHINFER_DISABLE_VERSION_CHECK",
        "a release's decision",
    ),
    (
        "refusal that names no patch there is",
        TINY,
        {
            "vllm_profiles": {
                "tiny-cpu": {
                    **PROFILE,
                    "vllm": {"refused": [{"versions": "<1", "because": "x", "patch": "gemma-4-mtp"}]},
                }
            }
        },
        "vllm_instances.glm.release",
        "gemma-4-mtp-embeddings?",
    ),
    (
        "what the release decided is set to something else",
        MIXED,
        {"vllm_host_overrides": {"environment": {"FLASHINFER_DISABLE_VERSION_CHECK": "0"}}},
        "vllm_host_overrides.environment.FLASHINFER_DISABLE_VERSION_CHECK",
        "a release's decision",
    ),
    (
        "refusal with a wrong range of a package",
        TINY,
        {"vllm_profiles": {"a": {"vllm": {"refused": [{"versions": "<1", "because": "x", "unless": {"b": "new"}}]}}}},
        "vllm_profiles.a.vllm",
        "no version range",
    ),
    (
        "profile that refuses without a reason",
        TINY,
        {"vllm_profiles": {"a": {"vllm": {"refused": [{"versions": "<1"}]}}}},
        "vllm_profiles.a.vllm.refused[0].because",
        "missing",
    ),
    # -- against the vLLM that will run
    ("unknown argument", TINY, serve(max_model_length=5), "vllm_instances.glm.serve.max-model-length", "max-model-len"),
    ("abbreviated argument", TINY, serve(max_model=5), "vllm_instances.glm.serve.max-model", "max-model-len in full"),
    ("short argument", TINY, serve(tp=1), "vllm_instances.glm.serve.tp", "Write tensor-parallel-size"),
    (
        "argument of an older version",
        TINY,
        serve(calculate_kv_scales=True),
        "vllm_instances.glm.serve.calculate-kv-scales",
        "0.25.0 has it",
    ),
    (
        "argument of a newer version",
        TINY,
        serve(reasoning_effort_map={"low": 1}),
        "vllm_instances.glm.serve.reasoning-effort-map",
        "0.33.0 has it",
    ),
    (
        "argument is no number",
        TINY,
        serve(max_num_seqs="many"),
        "vllm_instances.glm.serve.max-num-seqs",
        "whole number",
    ),
    ("argument is no whole number", TINY, serve(seed=1.5), "vllm_instances.glm.serve.seed", "whole number"),
    ("argument is a map", TINY, serve(max_num_seqs={"a": 1}), "vllm_instances.glm.serve.max-num-seqs", "whole number"),
    ("argument is a list", TINY, serve(seed=[1, 2]), "vllm_instances.glm.serve.seed", "takes one value"),
    ("argument without its value", TINY, serve(dtype=True), "vllm_instances.glm.serve.dtype", "wants a value"),
    (
        "switch with a value",
        TINY,
        serve(enforce_eager="yes"),
        "vllm_instances.glm.serve.enforce-eager",
        "true or false",
    ),
    ("false where there is no negative", TINY, serve(dtype=False), "vllm_instances.glm.serve.dtype", "negative form"),
    ("wrong choice", TINY, serve(dtype="bf16"), "vllm_instances.glm.serve.dtype", "bfloat16"),
    ("wrong choice of a list", TINY, serve(collect_detailed_traces=["al"]), None, "all"),
    ("KV cache of no kind", TINY, serve(kv_cache_dtype="fp9"), "vllm_instances.glm.serve.kv-cache-dtype", "fp8"),
    ("text is no size", TINY, serve(max_model_len="long"), "vllm_instances.glm.serve.max-model-len", "256K"),
    ("fraction of a binary size", TINY, serve(max_model_len="1.5K"), "vllm_instances.glm.serve.max-model-len", "256K"),
    (
        "unknown key of an object",
        TINY,
        serve(compilation_config={"mod": 3}),
        "vllm_instances.glm.serve.compilation-config",
        "mode",
    ),
    ("object is text", TINY, serve(compilation_config="fast"), "vllm_instances.glm.serve.compilation-config", "map"),
    ("map is text", TINY, serve(speculative_config="fast"), "vllm_instances.glm.serve.speculative-config", "map"),
    ("tool parser of no version", TINY, serve(tool_call_parser="hermess"), None, "Did you mean hermes"),
    (
        "reasoning parser that is a tool parser",
        TINY,
        serve(reasoning_parser="hermes"),
        "vllm_instances.glm.serve.reasoning-parser",
        "no parser 'hermes'",
    ),
    ("quantization of no version", TINY, serve(quantization="nvfp4"), "vllm_instances.glm.serve.quantization", "nvfp4"),
    ("load format", TINY, serve(load_format="safetenors"), "vllm_instances.glm.serve.load-format", "safetensors"),
    ("tokenizer mode", TINY, serve(tokenizer_mode="mistrall"), "vllm_instances.glm.serve.tokenizer-mode", "mistral"),
    (
        "attention backend",
        TINY,
        serve(attention_backend="FLASHINFR"),
        "vllm_instances.glm.serve.attention-backend",
        "FLASHINFER",
    ),
    ("unknown speculative method", TINY, serve(speculative_config={"method": "mpt"}), None, "Did you mean mtp"),
    (
        "unknown key of speculative decoding",
        TINY,
        serve(speculative_config={"method": "ngram", "num_tokens": 3}),
        "vllm_instances.glm.serve.speculative-config",
        "num_speculative_tokens",
    ),
    ("batch below the sequences", TINY, serve(max_num_batched_tokens=2), None, "below max-num-seqs 4"),
    (
        "batch below the context without chunks",
        TINY,
        serve(max_num_batched_tokens=512, enable_chunked_prefill=False),
        "vllm_instances.glm.serve.max-num-batched-tokens",
        "below the context of 1,024",
    ),
    ("all of the memory and more", TINY, serve(gpu_memory_utilization=95), None, "above 0 and up to 1"),
    ("no memory", TINY, serve(gpu_memory_utilization=0), None, "above 0 and up to 1"),
    ("negative context", TINY, serve(max_model_len=-5), "vllm_instances.glm.serve.max-model-len", "from -1"),
    ("no context", TINY, serve(max_model_len=0), "vllm_instances.glm.serve.max-model-len", "from 1, or auto"),
    ("no GPU to split over", TINY, serve(tensor_parallel_size=0), None, "whole number from 1"),
    ("port of the workers", TINY, serve(master_port=70000), None, "to 65535"),
    ("share that is no number", TINY, serve(watermark=float("nan")), None, "no finite number"),
    ("endless offload", TINY, serve(cpu_offload_gb=float("inf")), None, "no finite number"),
    ("negative timeout", TINY, {"vllm_service_stop_timeout_s": -1}, "vllm_service_stop_timeout_s", "from 1 to 86400 s"),
    ("root for teardown to empty", TINY, {"uv_venv_root": "/"}, "uv_venv_root", "system's own"),
    (
        "argument of a profile of the site",
        TINY,
        {"vllm_profiles": {"tiny-cpu": {**PROFILE, "serve": {"dtyp": "auto"}}}},
        "vllm_profiles.tiny-cpu.serve.dtyp",
        "dtype",
    ),
    *(
        (
            f"served name {name!r}",
            TINY,
            instance(served_model_name=name),
            "vllm_instances.glm.served_model_name",
            "proxy",
        )
        for name in (
            *("a b", "a\nb", "*", "a*", "a?b", "a#b", "a%20b", "a&b", "{a}", '"a"', "a'", "modèle", "-a", "a/", "/a"),
            *("a//b", "os.environ/KEY", "a,b", "a;b", "a\\b", "x" * 129, "$HOME", "`id`", "a\0", "<a>"),
        )
    ),
    (
        "served name of a profile",
        TINY,
        {"vllm_profiles": {"tiny-cpu": {**PROFILE, "served_model_name": "a b"}}},
        "vllm_profiles.tiny-cpu.served_model_name",
        "proxy passes on",
    ),
    # -- what belongs together
    (
        "draft taken away, its method left",
        GPU,
        gemma(draft_model=None),
        "vllm_instances.gemma.draft_model",
        "speculative-config",
    ),
    (
        "method that does not fit the draft",
        GPU,
        gemma(serve={"speculative-config": {"method": "draft_model"}}),
        "vllm_instances.gemma.serve.speculative-config.method",
        "Write mtp",
    ),
    (
        "method taken away",
        GPU,
        gemma(serve={"speculative-config": {"method": None}}),
        "vllm_instances.gemma.serve.speculative-config.method",
        "Write mtp",
    ),
    (
        "speculative decoding as text that is wrong beside a draft",
        GPU,
        gemma(serve={"speculative-config": '{"method": "foo", "num_speculative_tokens": 4}'}),
        "vllm_instances.gemma.serve.speculative-config.method",
        "Write mtp",
    ),
    (
        "speculative decoding as text that is wrong",
        TINY,
        serve(speculative_config='{"method": "foo", "num_speculative_tokens": 4}'),
        "vllm_instances.glm.serve.speculative-config",
        "'foo' is none of the choices",
    ),
    ("speculative decoding as a list", TINY, serve(speculative_config="[1]"), None, "it is no map"),
    (
        "method of another kind in a profile laid over the shipped one",
        GPU,
        {
            "vllm_profiles": {
                "ours": {"extends": "gemma-4-26b-l40s", "serve": {"speculative-config": {"method": "eagle3"}}}
            },
            **gemma(profile="ours"),
        },
        "vllm_profiles.ours.serve.speculative-config.method",
        "of the kind 'mtp' by profile gemma-4-26b-l40s",
    ),
    *(
        (
            f"method {method} without a draft",
            TINY,
            serve(speculative_config={"method": method, "num_speculative_tokens": 3}),
            "vllm_instances.glm.serve.speculative-config",
            "which needs a model",
        )
        for method in ("eagle3", "draft_model", "medusa", "dflash", "custom_class")
    ),
    ("no method and no draft", TINY, serve(speculative_config={"num_speculative_tokens": 3}), None, "neither a method"),
    ("guessing without a number", TINY, serve(speculative_config={"method": "ngram"}), None, "how many tokens"),
    *(
        (
            f"speculated tokens {value!r}",
            TINY,
            serve(speculative_config={"method": "ngram", "num_speculative_tokens": value}),
            "vllm_instances.glm.serve.speculative-config",
            "Give a whole number",
        )
        for value in ("four", 2.5, "2.5", [4], "")
    ),
    (
        "text for a truth",
        TINY,
        serve(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "parallel_drafting": "maybe"}),
        None,
        "Give true or false",
    ),
    (
        "lookups of a length below the shortest",
        TINY,
        serve(
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 5,
                "prompt_lookup_max": 2,
            }
        ),
        None,
        "prompt_lookup_min 5 above prompt_lookup_max 2",
    ),
    (
        "draft split like nothing",
        GPU,
        gemma(serve={"speculative-config": {"draft_tensor_parallel_size": 2}}),
        "vllm_instances.gemma.serve.speculative-config",
        "over 2 GPUs, the model over 1",
    ),
    (
        "the method as an argument of its own",
        TINY,
        serve(spec_method="ngram"),
        None,
        "method of serve.speculative-config",
    ),
    # -- one thing said twice, or in another form
    (
        "on and off at once",
        TINY,
        serve(enable_chunked_prefill=True, no_enable_chunked_prefill=True),
        "vllm_instances.glm.serve.no-enable-chunked-prefill",
        "once more",
    ),
    (
        "on and off at once, of a version nobody looked at",
        UNCATALOGUED,
        serve(enforce_eager=True, no_enforce_eager=True),
        "vllm_instances.glm.serve.no-enforce-eager",
        "once more",
    ),
    ("one share by two names", SHARED, serve(device_memory_utilization=0.9), None, "gpu-memory-utilization once more"),
    (
        "a parser in a list",
        TINY,
        serve(reasoning_parser=["glm999"]),
        "vllm_instances.glm.serve.reasoning-parser",
        "glm",
    ),
    ("a share in a list", TINY, serve(gpu_memory_utilization=[1.5]), None, "above 0 and up to 1"),
    (
        "batch below the sequences as text",
        TINY,
        serve(max_num_seqs="256", max_num_batched_tokens=100),
        "vllm_instances.glm.serve.max-num-batched-tokens",
        "below max-num-seqs 256",
    ),
    ("empty list", TINY, serve(allowed_media_domains=[]), None, "drops an empty list"),
    ("key for the Hub", TINY, serve(hf_token="x"), "vllm_instances.glm.serve.hf-token", "mirror alone"),
    # -- one process on one host
    *(
        (f"part of a larger server: {flag}", TINY, serve(**{flag: value}), None, "an instance is one on one")
        for flag, value in {
            "nnodes": 2,
            "node_rank": 1,
            "headless": True,
            "data_parallel_rank": 0,
            "data_parallel_start_rank": 2,
            "data_parallel_hybrid_lb": True,
            "data_parallel_external_lb": True,
            "data_parallel_size_local": 2,
        }.items()
    ),
    ("an interface that nobody speaks", TINY, serve(grpc=True), "vllm_instances.glm.serve.grpc", "gRPC"),
    # -- numbers and words in the environment
    *(
        (
            f"{name} {value!r}",
            TINY,
            instance(environment={name: value}),
            f"vllm_instances.glm.environment.{name}",
            part,
        )
        for name, value, part in (
            ("VLLM_CPU_KVCACHE_SPACE", "lots", "Give a whole number"),
            ("VLLM_CPU_KVCACHE_SPACE", "0.5", "Give a whole number"),
            ("VLLM_CPU_KVCACHE_SPACE", 0.5, "Give a whole number"),
            ("VLLM_CPU_KVCACHE_SPACE", "", "Give a whole number"),
            ("VLLM_USE_FLASHINFER_SAMPLER", "true", "Give a whole number"),
            ("VLLM_LOG_STATS_INTERVAL", "10s", "Give a number"),
            ("VLLM_WORKER_MULTIPROC_METHOD", "forkk", "Did you mean fork"),
            ("VLLM_LOGGING_LEVEL", "loud", "DEBUG"),
            ("VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", "container,all", "container"),
        )
    ),
    # -- what would bypass the plan
    *(
        (
            f"GPUs {how}",
            GPU,
            {**gemma(gpus=gpus), **changes},
            where,
            "Set `gpus`",
        )
        for how, gpus, changes, where in (
            (
                "chosen in the environment",
                [0],
                {"vllm_host_overrides": {"environment": {"CUDA_VISIBLE_DEVICES": "3"}}},
                "vllm_host_overrides.environment.CUDA_VISIBLE_DEVICES",
            ),
            (
                "chosen in the environment alone",
                None,
                {"vllm_group_overrides": {"environment": {"CUDA_VISIBLE_DEVICES": "3"}}},
                "vllm_group_overrides.environment.CUDA_VISIBLE_DEVICES",
            ),
            (
                "chosen in secret",
                None,
                {"vllm_secrets": {"gemma": {"CUDA_VISIBLE_DEVICES": "3"}}},
                "vllm_secrets.gemma.CUDA_VISIBLE_DEVICES",
            ),
        )
    ),
    # -- what does not fit
    (
        "model far beyond the GPUs",
        GPU,
        {
            "vllm_instances": {
                "glm": {"profile": "glm-5.2-nvfp4-8gpu", "port": 8000, "serve": {"tensor-parallel-size": 2}}
            }
        },
        "vllm_instances.glm",
        "More GPUs: tensor-parallel-size: 8",
    ),
    (
        "context beyond the KV cache of a CPU",
        TINY,
        {
            "vllm_profiles": {"tiny-cpu": {**PROFILE, "numbers": shipped_profiles()["glm-5.2-nvfp4-8gpu"]["numbers"]}},
            **serve(max_model_len=131072),
        },
        "vllm_instances.glm",
        "GiB of KV cache are needed for one sequence of full context, and VLLM_CPU_KVCACHE_SPACE gives 1 GiB",
    ),
    # -- what arguments name on the host
    *(
        (f"{flag} {path}", TINY, serve(**{flag: path}), f"vllm_instances.glm.serve.{flag.replace('_', '-')}", part)
        for flag, path, part in (
            ("tokenizer", "zai-org/GLM-5", "ask the Hub"),
            ("tokenizer", "/models/none", "where none comes from"),
            ("tokenizer", "/models/tiny-qwen3/../none", "no absolute path"),
            ("hf_config_path", "zai-org/GLM-5", "ask the Hub"),
            ("generation_config", "./config", "no absolute path"),
            ("chat_template", "templates/glm.jinja", "no absolute path"),
            ("tool_parser_plugin", "ours.py", "no absolute path"),
            ("lora_modules", [{"name": "a", "path": "/models/none"}], "where none comes from"),
            ("lora_modules", ["a=org/adapter"], "ask the Hub"),
        )
    ),
    (
        "draft from the Hub",
        TINY,
        serve(speculative_config={"method": "eagle3", "num_speculative_tokens": 3, "model": "org/eagle"}),
        "vllm_instances.glm.serve.speculative-config.model",
        "ask the Hub",
    ),
    (
        "draft that is not staged",
        TINY,
        serve(speculative_config={"method": "eagle3", "num_speculative_tokens": 3, "model": "/models/nowhere"}),
        "vllm_instances.glm.serve.speculative-config.model",
        "where nowhere comes from",
    ),
    (
        "adapter of images from the Hub",
        TINY,
        serve(default_mm_loras={"image": "org/adapter"}),
        "vllm_instances.glm.serve.default-mm-loras.image",
        "ask the Hub",
    ),
    # -- against the numbers of a profile, with no file at hand
    (
        "heads that cannot be divided",
        GPU,
        {
            "vllm_instances": {
                "glm": {"profile": "glm-5.2-nvfp4-8gpu", "port": 8000, "serve": {"tensor-parallel-size": 7}}
            }
        },
        "vllm_instances.glm.serve.tensor-parallel-size",
        "64 attention heads",
    ),
    (
        "context beyond the model's",
        GPU,
        gemma(serve={"max-model-len": 524288}),
        "vllm_instances.gemma.serve.max-model-len",
        "made for 262,144",
    ),
    (
        "architecture that this version has not, and nothing else may run",
        TINY,
        {
            "vllm_profiles": {"tiny-cpu": {**PROFILE, "numbers": numbers(architectures=["Glm5NextForCausalLM"])}},
            **serve(model_impl="vllm"),
        },
        "vllm_instances.glm.model",
        "0.31.0, 0.33.0 do",
    ),
    # -- text of a form
    *(
        (
            f"compute capability {value!r}",
            TINY,
            {"vllm_profiles": {"a": {"hardware": {"compute_capability": value}}}},
            "vllm_profiles.a.hardware.compute_capability",
            'text such as "8.9"',
        )
        for value in ("sm89", "8", "", "8.9.1", "eight", "8.9a", "-8.9")
    ),
    (
        "home of whoever runs it",
        TINY,
        {"vllm_models": {"tiny-qwen3": {"directory": "~/gemma"}}},
        "vllm_models.tiny-qwen3.directory",
        "only a shell replaces",
    ),
    # -- entries of lists, and what lacks a key
    *(
        (f"{what} of a profile", TINY, {"vllm_profiles": {"tiny-cpu": {**PROFILE, **changes}}}, where, part)
        for what, changes, where, part in (
            ("package without a reason", {"packages": [{"name": "a"}]}, f"{MINE}.packages[0].for", "missing"),
            ("package that is text", {"packages": ["ffmpeg"]}, f"{MINE}.packages[0]", "expected a map"),
            ("package that is null", {"packages": [None]}, f"{MINE}.packages[0]", "is null"),
            ("probe that is null", {"probes": [None]}, f"{MINE}.probes[0]", "is null"),
            ("refusal that is text", {"vllm": {"refused": ["<1"]}}, f"{MINE}.vllm.refused[0]", "expected a map"),
            (
                "refusal without versions",
                {"vllm": {"refused": [{"because": "x"}]}},
                f"{MINE}.vllm.refused[0].versions",
                "missing",
            ),
            (
                "refusal with null for versions",
                {"vllm": {"refused": [{"because": "x", "versions": None}]}},
                f"{MINE}.vllm.refused[0].versions",
                "missing",
            ),
            (
                "refusal of a package's null",
                {"vllm": {"refused": [{"because": "x", "versions": "<1", "unless": {"torch": None}}]}},
                f"{MINE}.vllm",
                "None is no version range",
            ),
        )
    ),
    ("network that is null", TINY, {"vllm_client_networks": [None]}, "vllm_client_networks[0]", "is null"),
    (
        "release of no version",
        TINY,
        {"vllm_releases": {"x": {**CPU_RELEASE, "vllm": ""}}},
        "vllm_releases.x.vllm",
        "''",
    ),
    (
        "key that no release has",
        TINY,
        {"vllm_releases": {"x": {**CPU_RELEASE, "vlm": "0.28.0"}}},
        "vllm_releases.x.vlm",
        "did you mean vllm",
    ),
    # -- what would follow from another problem is not said
    (
        "no GPU of one of three instances",
        GPU,
        {
            "vllm_instances": {
                name: {"profile": "gemma-4-26b-l40s", "port": 8000 + place, "gpus": gpus}
                for place, (name, gpus) in enumerate({"a": [0], "b": [-1], "c": [1]}.items())
            }
        },
        "vllm_instances.b.gpus",
        "no GPU",
    ),
    (
        "GPUs of one of two instances that are no list",
        GPU,
        {
            "vllm_instances": {
                "a": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": 0},
                "b": {"profile": "gemma-4-26b-l40s", "port": 8001, "gpus": [1]},
            }
        },
        "vllm_instances.a.gpus",
        "expected a list",
    ),
    *(
        (f"{name} misread", TINY, {name: value}, name, part)
        for name, value, part in (
            ("vllm_instance_networks", {"a": 1}, "expected a list"),
            ("vllm_models", [], "expected a map"),
            ("vllm_instances", [], "expected a map"),
        )
    ),
    (
        "the port of a host's instances is no number",
        TINY,
        {"vllm_instances": {"glm": {"profile": "tiny-cpu"}}, "vllm_host_overrides": {"port": "x"}},
        "vllm_host_overrides.port",
        "expected int",
    ),
    ("overrides are text", TINY, {"vllm_instances": {"glm": {}}, "vllm_host_overrides": "x"}, None, "expected a map"),
    (
        "the model of a profile is no text",
        TINY,
        {"vllm_profiles": {"tiny-cpu": {**PROFILE, "model": 3}}},
        "vllm_profiles.tiny-cpu.model",
        "expected str",
    ),
    (
        "what a profile extends is no profile",
        TINY,
        {"vllm_profiles": {"a": 3, "b": {"extends": "a"}}},
        "vllm_profiles.a",
        "expected a map",
    ),
    (
        "stop limit that is no number, and a shutdown within it",
        TINY,
        {"vllm_service_stop_timeout_s": "x", "vllm_service_shutdown_timeout_s": 150},
        "vllm_service_stop_timeout_s",
        "expected int",
    ),
    (
        "environment of a group with two instances",
        TINY,
        {
            "vllm_group_overrides": {"environment": {"A": [1]}},
            "vllm_instances": {
                name: {"profile": "tiny-cpu", "port": port} for name, port in (("a", 8000), ("b", 8001))
            },
        },
        "vllm_group_overrides.environment.A",
        "text",
    ),
    # -- messages that are true
    *(
        (f"shutdown timeout {value!r}", TINY, serve(shutdown_timeout=value), None, "no whole number of seconds")
        for value in (-5, "long", 1.5)
    ),
    ("argument without a name", TINY, instance(serve={"": 1}), "vllm_instances.glm.serve.", "Remove it"),
    ("origins as text", TINY, serve(allowed_origins="*"), "vllm_instances.glm.serve.allowed-origins", "Give a list"),
    ("origins as a map", TINY, serve(allowed_origins={"a": 1}), "vllm_instances.glm.serve.allowed-origins", "a list"),
    (
        "parser taken away from a profile that chooses tools",
        GPU,
        gemma(serve={"tool-call-parser": None}),
        "vllm_instances.gemma.serve.tool-call-parser",
        "(profile gemma-4-26b-l40s.serve.enable-auto-tool-choice)",
    ),
    (
        "parser taken away from all of a host",
        GPU,
        {**gemma(), "vllm_host_overrides": {"serve": {"tool-call-parser": None}}},
        "vllm_host_overrides.serve.tool-call-parser",
        "is removed",
    ),
    (
        "tokens to guess taken away",
        {
            **TINY,
            "vllm_profiles": {
                "tiny-cpu": {
                    **PROFILE,
                    "serve": {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}},
                }
            },
        },
        serve(speculative_config={"num_speculative_tokens": None}),
        "vllm_instances.glm.serve.speculative-config",
        "how many tokens",
    ),
    (
        "patch that is needed, but by versions of which the profile has none",
        GPU,
        {"vllm_release": "0.25.0-cu130", **gemma()},
        "vllm_instances.gemma.release",
        "one that does not need it (>=0.27.0);",
    ),
    ("one of two names", TINY, {"wheel_mirror_prot": 80}, "wheel_mirror_prot", "wheel_mirror_port"),
    # -- what vLLM takes and no instance serves with
    ("listens on no port", TINY, serve(uds="/tmp/x.sock"), "vllm_instances.glm.serve.uds", "in place of its port"),
    ("no API server", TINY, serve(api_server_count=0), "vllm_instances.glm.serve.api-server-count", "from 1"),
    # -- what no conversion takes
    *(
        (f"speculative method {value!r}", TINY, serve(speculative_config={"method": value}), None, "no text")
        for value in ([], {"a": 1}, 3)
    ),
    (
        "speculative method of a version nobody looked at",
        UNCATALOGUED,
        serve(speculative_config={"method": []}),
        None,
        "no text",
    ),
    *(
        (
            f"{flag} beyond any host: {len(str(value))} digits as {type(value).__name__}",
            TINY,
            serve(**{flag: value}),
            f"vllm_instances.glm.serve.{flag.replace('_', '-')}",
            part,
        )
        for flag, part in (
            ("tensor_parallel_size", "from 1 to 1024"),
            ("master_port", "to 65535"),
            ("gpu_memory_utilization", "up to 1"),
        )
        for value in ("9" * 400, 10**400)
    ),
    ("a model of no name", TINY, instance(model="\0"), "vllm_instances.glm.model", "no model name"),
    # -- null
    ("null instance", TINY, {"vllm_instances": {"glm": None}}, "vllm_instances.glm", "is empty"),
    ("null arguments", TINY, instance(serve=None), "vllm_instances.glm.serve", "set single entries"),
    ("null environment", TINY, instance(environment=None), "vllm_instances.glm.environment", "set single entries"),
    (
        "null arguments of a group",
        TINY,
        {"vllm_group_overrides": {"serve": None}},
        "vllm_group_overrides.serve",
        "set single entries",
    ),
    (
        "null for an argument misspelt in a group's overrides",
        GPU,
        {"vllm_group_overrides": {"serve": {"enable-expert-paralel": None}}},
        "vllm_group_overrides.serve.enable-expert-paralel",
        "did you mean enable-expert-parallel",
    ),
    (
        "null for an argument with underscores",
        TINY,
        instance(serve={"max_model_len": None}),
        "vllm_instances.glm.serve.max_model_len",
        "max-model-len",
    ),
    (
        "null for a variable of vLLM's that is misspelt",
        TINY,
        {"vllm_host_overrides": {"environment": {"VLLM_CPU_KVCACHE_SPAC": None}}},
        "vllm_host_overrides.environment.VLLM_CPU_KVCACHE_SPAC",
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    ("null profile", TINY, instance(profile=None), "vllm_instances.glm.profile", "missing"),
]


@pytest.mark.parametrize(("base", "changes", "where", "part"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input(base: dict, changes: dict, where: str | None, part: str) -> None:
    problems = plan(base, **changes)["problems"]
    assert any(
        (where is None or found["where"] == where) and part in found["what"] + " " + found["remedy"]
        for found in problems
    ), problems
    for found in problems:
        assert set(found) == {"where", "what", "remedy"}
        assert all(isinstance(text, str) and text for text in found.values())
    # One cause, one problem: what merely follows from it is noise to whoever has to correct it.
    assert len(problems) == 1, problems


def test_the_table_is_long_enough_and_says_each_thing_once() -> None:
    assert len({row[0] for row in BAD}) == len(BAD) >= 60
