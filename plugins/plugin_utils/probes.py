# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which probes a release must pass for an instance, and what a host without a CUDA toolchain needs set.

The probes themselves are module_utils/probe_program.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# In the order in which they run: what needs no import first, because an import may end the process.
PROBES = (
    "versions-agree",
    "sampler-off",
    "gdn-triton",
    "compiler",
    "jit-tools",
    "numa-bind",
    "offline",
    "import",
    "has-flashinfer",
    "read-only",
)
SIGNATURE = re.compile(r"signature:[A-Za-z_][\w.]*\.[A-Za-z_]\w*:[A-Za-z_]\w*")

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
GDN_BACKEND = "gdn-prefill-backend"
COMPILATION = "compilation-config"
FUSED_ALL_REDUCE = "fuse_allreduce_rms"


def is_probe(identifier: str) -> bool:
    """Whether there is such a probe."""
    return identifier in PROBES or SIGNATURE.fullmatch(identifier) is not None


def settings_without_toolchain(family: Collection[str], tensor_parallel: bool) -> dict[str, dict[str, Any]]:
    """What keeps vLLM from FlashInfer's kernels that are compiled at run time.

    The sampler alone, or the GDN backend alone, still ends the engine on a host without ninja and nvcc (measured on
    an H200 with 0.25.0): a model of the GDN family needs both. With several GPUs on SM90 and SM10x all-reduce and norm
    are one kernel of FlashInfer's (enable_allreduce_rms_fusion in vllm/config/vllm.py): on two H200 the engine ended
    while it was profiled. Elsewhere that switch is off anyway.
    """
    return {
        "environment": {SAMPLER: "0"},
        "serve": {
            **({GDN_BACKEND: "triton"} if "gdn" in family else {}),
            **(without_fused_all_reduce({}) if tensor_parallel else {}),
        },
    }


def is_tensor_parallel(serve: Mapping[str, Any]) -> bool:
    """Whether an instance computes each layer on several GPUs."""
    found = serve.get("tensor-parallel-size")
    return isinstance(found, int) and found > 1


def without_fused_all_reduce(serve: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that turns it off, with what is set beside it; nothing where it is set already, or in a text."""
    config = serve.get(COMPILATION, {})
    passes = config.get("pass_config", {}) if isinstance(config, Mapping) else None
    if not isinstance(passes, Mapping) or FUSED_ALL_REDUCE in passes:
        return {}
    return {COMPILATION: {**config, "pass_config": {**passes, FUSED_ALL_REDUCE: False}}}


def probes_of(
    listed: Collection[str], family: Collection[str], toolchain: str | None, serve: Mapping[str, Any]
) -> list[str]:
    """The probes of one instance: what its profile lists, and what accelerator, toolchain and arguments imply.

    Args:
        listed: those of the profile.
        family: the families of the model.
        toolchain: ``toolkit`` or ``none``; None where the release runs on the CPU.
        serve: arguments of vLLM.
    """
    wanted = {*listed, "offline", "import", "read-only"}
    if toolchain is not None:
        wanted |= {"versions-agree", "compiler"}
    if toolchain == "toolkit":
        wanted.add("jit-tools")
    if toolchain == "none":
        wanted.add("sampler-off")
        if "gdn" in family:
            wanted.add("gdn-triton")
    if serve.get("numa-bind") is True:
        wanted.add("numa-bind")
    return _ordered(wanted)


def probes_without_toolchain(probes: Collection[str], *, gdn: bool) -> list[str]:
    """Probes of a host with a toolkit as they are on one without."""
    return _ordered({*probes} - {"jit-tools"} | {"sampler-off", *(["gdn-triton"] if gdn else [])})


def _ordered(wanted: set[str]) -> list[str]:
    return [*(one for one in PROBES if one in wanted), *sorted(wanted - {*PROBES})]
