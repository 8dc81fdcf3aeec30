# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Right inventories with one node of them spoilt: whatever it is, the plan says what is wrong and never crashes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import COLLECTION, shipped_profiles
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_report import plan_table
from ansible_collections.onprem.vllm.plugins.plugin_utils.proxy_keys import team_problems
from ansible_collections.onprem.vllm.plugins.plugin_utils.routes import compose_routes
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import CPU_RELEASE, CUDA_RELEASE, MIRROR, TINY
from hypothesis import given, strategies

GEMMA = "gemma-4-26b-l40s"
EMBEDDINGS = "gemma-4-mtp-embeddings"
LOCKED = COLLECTION / "catalogue" / "releases" / "0.28.0-cu130.yml"

# Every variable with a form of its own, each key of it used once.
WHOLE: dict[str, Any] = {
    **TINY,
    **MIRROR,
    "vllm_release": "ours",
    "vllm_releases": {
        "ours": {
            **yaml.safe_load(LOCKED.read_text(encoding="utf-8")),
            "lock": str(LOCKED.with_suffix(".txt")),
            "patches": ["ours", EMBEDDINGS],
            "for": {"architectures": ["sm89"], "profiles": ["ours"]},
            "flashinfer": {"disable_version_check": True, "reason": "Measured on our GPUs."},
            "metadata_wheels": [{"name": "ours", "version": "1", "requires": ["numpy"]}],
            "overrides": ["numpy"],
            "indexes": {"ours": "https://index.site/simple"},
            "sources": {"torch": ["ours", "default"]},
            "interpreter": {"file": "cpython.tar.gz", "sha256": "a" * 64},
        },
        "sister": {**CPU_RELEASE},
        "unused": CUDA_RELEASE,
    },
    "vllm_profiles": {
        "ours": {
            **shipped_profiles()[GEMMA],
            "patches": [EMBEDDINGS],
            "family": ["gdn"],
            "probes": ["has-flashinfer"],
            "hardware": {**shipped_profiles()[GEMMA]["hardware"], "memory_gib": 20},
            "environment": {"VLLM_LOGGING_LEVEL": "DEBUG"},
            "vllm": {
                "versions": ">=0.25.0",
                "refused": [
                    {"versions": "<0.27.0", "because": "x", "patch": EMBEDDINGS, "unless": {"torch": ">=2"}},
                    {"versions": "==0.28.0", "because": "x", "unless": {"torch": ">=2"}},
                ],
            },
        },
        "theirs": {"extends": "ours", "serve": {"max-num-seqs": 8}},
    },
    "vllm_patches": {
        "ours": {
            "package": "vllm",
            "file": "vllm/config.py",
            "why": "x",
            "upstream": ["https://github.com/vllm-project/vllm/issues/1"],
            "entries": [
                {
                    "versions": "==0.28.0",
                    "before": "a" * 64,
                    "after": "b" * 64,
                    "edit": [{"find": "a", "replace": "b", "times": 1}],
                }
            ],
            "needless": [{"versions": ">0.28.0", "because": "mended"}],
        }
    },
    "vllm_models": {
        "gemma-4-26b-a4b-it": {"repository": "google/gemma", "revision": "a" * 40, "allow_patterns": ["*"]},
        "gemma-4-26b-a4b-it-assistant": {"directory": "/staging/draft", "draft": True, "manifest_sha256": "a" * 64},
    },
    "vllm_instances": {
        "a": {
            "profile": "theirs",
            "port": 8000,
            "gpus": [0],
            "host": "10.77.0.2",
            "networks": ["10.77.0.0/24"],
            "served_model_name": "gemma",
            "model": "gemma-4-26b-a4b-it",
            "draft_model": "gemma-4-26b-a4b-it-assistant",
            "release": "ours",
            "serve": {
                "tensor-parallel-size": 1,
                "max-num-batched-tokens": "16K",
                "lora-modules": [{"name": "x", "path": "/models/gemma-4-26b-a4b-it/x"}],
                "compilation-config": {"mode": 3},
                "speculative-config": {"method": "mtp", "num_speculative_tokens": 4},
                "allowed-origins": ["*"],
                "middleware": ["ours.Ours"],
                "shutdown-timeout": 30,
                "enable-eplb": True,
                "eplb-config": {"num_redundant_experts": 2},
                "cpu-offload-gb": 1,
                "hf-overrides": {},
                "default-mm-loras": {"image": "/models/gemma-4-26b-a4b-it/y"},
                "data-parallel-size-local": 1,
                "master-port": 29501,
            },
            "environment": {"VLLM_LOG_STATS_INTERVAL": "10"},
        },
        "b": {"profile": "theirs", "port": 8001, "gpus": ["GPU-12345678"], "serve": {"data-parallel-size": 1}},
    },
    "vllm_group_overrides": {"serve": {"seed": 1, "max-model-len": 8192}, "environment": {"A": "1"}},
    "vllm_host_overrides": {"serve": {"gpu-memory-utilization": 0.9}, "networks": ["10.0.0.0/8"]},
    "vllm_secrets": {"a": {"VLLM_API_KEY": "x" * 24, "PREVIOUS_VLLM_API_KEY": "y" * 24}},
    "vllm_client_networks": ["10.1.0.0/16"],
    "vllm_instance_networks": ["10.77.0.0/24"],
    "vllm_mirror_url": "http://mirror1",
    "vllm_toolchain": "toolkit",
    "vllm_upgrade_batches": [1, "25%"],
    "vllm_address": "10.77.0.2",
    "wheel_mirror_port": 80,
    "wheel_mirror_root": "/srv/mirror",
    "wheel_mirror_releases": ["ours"],
    "litellm_proxy_keys": {
        "team": {"key": "k" * 24, "models": ["gemma"], "requests_per_minute": 5, "expires": "2030-01-01"}
    },
    "litellm_proxy_names": ["models.site"],
    "litellm_proxy_listen": ["10.1.0.1"],
    "litellm_proxy_port": 443,
    "litellm_proxy_processes": 2,
    "litellm_proxy_paths": ["/v1/chat/completions"],
    "litellm_proxy_certificate": "/etc/ssl/ours.pem",
    "litellm_proxy_release": "litellm-1.108.7-py311",
    "nftables_ssh_networks": ["10.0.0.0/8"],
    "preflight_waived": ["gpu-busy"],
    "vllm_service_stop_timeout_s": 120,
}
GROUPS = ("mirror", "vllm", "proxy")

VALUES: tuple[Any, ...] = (
    *(None, True, [], {}, [None], [[]], [{}], {"x": None}, "", "x", "a b", "9" * 400, "-5", "auto", "{", "\0"),
    *(-1, 0, 3, 10**400, 1.5, 1e300, float("inf"), float("nan")),
)

Path = tuple[Any, ...]


def nodes(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every node of an inventory but the whole."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from nodes(child, (*path, key))


PATHS = sorted(nodes(WHOLE), key=str)
REMOVED, RENAMED = object(), object()
WAYS = (*VALUES, REMOVED, RENAMED)


def spoilt(path: Path, way: Any) -> dict[str, Any]:
    """The inventory with one node replaced by a value, removed, or under another name."""
    variables = copy.deepcopy(WHOLE)
    *above, last = path
    parent: Any = variables
    for key in above:
        parent = parent[key]
    if way is REMOVED:
        del parent[last]
    elif way is RENAMED:
        if isinstance(parent, dict):
            parent[f"{last}x" if above else last] = parent.pop(last)
    else:
        parent[last] = way
    return variables


def plan_of(variables: dict[str, Any]) -> dict[str, Any]:
    """The plan, and what is made of it where it is shown: the routes, the report."""
    made = compose_plan("glm1", GROUPS, variables)
    secrets = variables.get("vllm_secrets")
    routed = compose_routes({"glm1": made}, {"glm1": "10.77.0.2"}, {"glm1": secrets}, {"proxy1": "10.77.0.9"})
    models = [model["name"] for model in routed["models"]]
    told = [*made["problems"], *routed["problems"], *team_problems(variables.get("litellm_proxy_keys", {}), models)]
    for found in told:
        assert set(found) == {"where", "what", "remedy"}
        assert all(isinstance(text, str) and text for text in found.values())
    assert all(made["problems"].count(found) == 1 for found in made["problems"])
    json.dumps(made)
    plan_table(made)
    return made


def test_what_is_spoilt_is_right_at_first():
    assert plan_of(copy.deepcopy(WHOLE))["problems"] == []


@given(strategies.sampled_from(PATHS), strategies.sampled_from(WAYS))
def test_one_wrong_node_is_a_problem_at_most(path: Path, way: Any):
    plan_of(spoilt(path, way))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path[0] for path in PATHS}))
def test_every_wrong_node_is_a_problem_at_most(name: str):
    for path in PATHS:
        if path[0] == name:
            for way in WAYS:
                plan_of(spoilt(path, way))
