# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Inventories that are right, for the tests of the plan to change."""

from __future__ import annotations

import copy
from typing import Any

import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import shipped_profiles
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import load_release

RELEASE = load_release("0.28.0-cpu")
RELEASE_ID = RELEASE.id

# A site release of the CUDA kind with a real lock.
CUDA_RELEASE = {
    "vllm": "0.31.0",
    "variant": "cu130",
    "python": "3.12",
    "platform": "x86_64-manylinux_2_36",
    "requirements": ["vllm==0.31.0"],
    "lock": str(load_release("0.31.0-cu130").lock_path),
}
TINY: dict[str, Any] = {
    "vllm_mirror_url": "http://mirror1",
    "vllm_release": "0.28.0-cpu",
    "vllm_client_networks": ["10.77.0.0/24"],
    "vllm_models": {"tiny-qwen3": {"directory": "/staging/tiny-qwen3"}},
    "vllm_instances": {"glm": {"profile": "tiny-cpu", "port": 8000}},
}
GPU: dict[str, Any] = {
    **TINY,
    "vllm_release": "site-cu130",
    "vllm_releases": {"site-cu130": CUDA_RELEASE},
    "vllm_models": {
        "glm-5.2-nvfp4": {"repository": "nvidia/GLM-5.2-NVFP4", "revision": "a" * 40},
        "gemma-4-26b-a4b-it": {"directory": "/staging/gemma"},
        "gemma-4-26b-a4b-it-assistant": {"directory": "/staging/gemma-assistant"},
    },
    "vllm_instances": {"glm": {"profile": "glm-5.2-nvfp4-8gpu", "port": 8000}},
}


SM120 = "sm120-sparse-mla-dense-prefill"
CPU_RELEASE = {
    **yaml.safe_load(RELEASE.lock_path.with_suffix(".yml").read_text(encoding="utf-8")),
    "lock": "0.28.0-cpu",
}
PROFILE = shipped_profiles()["tiny-cpu"]
# A release that runs a mix of FlashInfer's packages and says so; on a CPU there is none, and the plan does not mind.
MIXED: dict[str, Any] = {
    **TINY,
    "vllm_release": "mixed",
    "vllm_releases": {
        "mixed": {**CPU_RELEASE, "flashinfer": {"disable_version_check": True, "reason": "Measured on our GPUs."}}
    },
}
MIRROR: dict[str, Any] = {
    "wheel_mirror_bundle": "/srv/bundle",
    "vllm_mirror_networks": ["10.77.0.0/24", "fd77::/64"],
}


def plan(base: dict[str, Any] | None = None, groups: tuple[str, ...] = ("vllm",), **changes: Any) -> dict[str, Any]:
    variables = {**copy.deepcopy(TINY if base is None else base), **changes}
    return compose_plan("glm1", groups, {name: value for name, value in variables.items() if value is not ...})


def instance(**settings: Any) -> dict[str, Any]:
    return {"vllm_instances": {"glm": {"profile": "tiny-cpu", "port": 8000, **settings}}}
