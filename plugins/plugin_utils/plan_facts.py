# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The resolved plan: the desired one, with what the host's facts decide where no layer of settings did.

What is left to the facts stands in the plan's ``needs.decide``. A fact that cannot be seen now decides nothing: what
the running generation has stays, and a finding says so. So a GPU that is missing today changes no arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .catalogue import COLLECTION, read_yaml
from .finding import Facts, Plan, used_devices
from .plan_layers import Branch, Layer
from .probes import (
    COMPILATION,
    FUSED_ALL_REDUCE,
    GDN_BACKEND,
    SAMPLER,
    is_tensor_parallel,
    probes_without_toolchain,
    without_fused_all_reduce,
)
from .serve_catalogue import serve_catalogue

try:
    from packaging.version import Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

Setting = tuple[str, str]  # ("serve", flag) or ("environment", name)
NUMA_NODES = "numa-bind-nodes"
NODE_UNKNOWN = "neither /sys nor nvidia-smi says which NUMA node each GPU is on"
_PREFILL: Setting = ("serve", GDN_BACKEND)
_NODES: Setting = ("serve", NUMA_NODES)
_SAMPLER: Setting = ("environment", SAMPLER)


@dataclass(frozen=True)
class Decision:
    """What the facts say about one entry of ``needs.decide``.

    Attributes:
        settings: what they decide, or in doubt what the current generation has; empty where vLLM's default is right.
        because: the facts, in a few words.
        note: what a person should know of it.
        doubt: why they decide nothing.
    """

    settings: Mapping[Setting, Any] = field(default_factory=dict)
    because: str = ""
    note: str = ""
    doubt: str = ""


def left_to_facts(
    settings: Layer, toolchain: str | None, variant: str, vllm: str, gdn: bool, key_head_dim: int | None
) -> list[dict[str, Any]]:
    """What of an instance no layer sets or removes, and a host's facts can decide.

    Args:
        settings: all layers of the instance, merged.
        toolchain: ``vllm_toolchain`` where the inventory sets it; None where it does not.
        variant: of the release, such as ``cu130``.
        vllm: the version that will run.
        gdn: whether the model is of the GDN family.
        key_head_dim: ``linear_key_head_dim`` of the model; None where unknown.
    """
    found: list[dict[str, Any]] = []
    catalogue = serve_catalogue(vllm)
    if not variant.startswith("cu"):
        return found
    if toolchain is None and not _mentioned(settings, _SAMPLER) and not (gdn and _mentioned(settings, _PREFILL)):
        found.append({"what": "toolchain", "gdn": gdn})
    # What an uncatalogued version chooses, nobody has looked at.
    if gdn and toolchain != "none" and catalogue is not None and not _mentioned(settings, _PREFILL):
        found.append({"what": "prefill", "vllm": vllm, "cuda": int(variant[2:4]), "key_head_dim": key_head_dim})
    if _value(settings, ("serve", "numa-bind")) is True and not _mentioned(settings, _NODES):
        found.append({"what": "numa"})
    return found


def resolve(plan: Plan, facts: Facts) -> dict[str, Any]:
    """The plan with what these facts decide. Resolving a resolved plan changes nothing."""
    if not plan["needs"].get("decide"):
        return {**plan, "resolved": True}
    resolved: dict[str, Any] = {
        **plan,
        "instances": [
            {**found, "serve": {**found["serve"]}, "environment": {**found["environment"]}}
            for found in plan.get("instances", ())
        ],
        "origins": {**plan.get("origins", {})},
        "notes": [*plan.get("notes", ())],
        "resolved": True,
    }
    by_name = {f"instance {found['name']}": found for found in resolved["instances"]}
    without: set[str] = set()
    for entry, decision in decisions(plan, facts):
        instance = by_name[entry["for"]]
        if entry["what"] == "toolchain" and decision.settings:
            without.add(entry["for"])
            instance["probes"] = probes_without_toolchain(instance["probes"], gdn=entry["gdn"])
        for (part, name), value in decision.settings.items():
            instance[part][name] = value
            origin = "current generation" if decision.doubt else f"facts: {decision.because}"
            resolved["origins"][f"instances.{instance['name']}.{part}.{name}"] = origin
        note = {"where": f"vllm_instances.{instance['name']}", "what": decision.note}
        if decision.note and note not in resolved["notes"]:
            resolved["notes"].append(note)
    for found in resolved["instances"]:
        found["environment"] = dict(sorted(found["environment"].items()))
    on_gpus = {wanted["for"] for wanted in plan["needs"]["gpus"]}
    if on_gpus and on_gpus <= without:
        resolved["packages"] = _without_toolkit(plan["packages"])
    return resolved


def decisions(plan: Plan, facts: Facts) -> Iterator[tuple[Mapping[str, Any], Decision]]:
    """Each entry of ``needs.decide`` with what the facts say about it."""
    instances = {f"instance {found['name']}": found for found in plan.get("instances", ())}
    wanted = {one["for"]: one for one in plan["needs"]["gpus"]}
    without = set()
    for entry in plan["needs"].get("decide", ()):
        instance = instances[entry["for"]]
        if entry["what"] == "prefill" and entry["for"] in without:
            continue  # a host that cannot compile has nothing left to choose from
        if entry["what"] == "toolchain":
            decision = _toolchain(entry, instance, facts)
        else:
            devices, doubt = _devices(instance, (wanted.get(entry["for"]) or {}).get("count", 1), facts)
            decide = _prefill if entry["what"] == "prefill" else _numa
            decision = Decision(doubt=doubt) if doubt else decide(entry, devices, facts)
        if decision.doubt:
            decision = replace(decision, settings=_kept(entry, instance, facts))
        if entry["what"] == "toolchain" and decision.settings:
            without.add(entry["for"])
        yield entry, decision


def what_is_decided(entry: Mapping[str, Any]) -> str:
    """The setting that an entry of ``needs.decide`` is about, as a person writes it."""
    return {"toolchain": "vllm_toolchain", "prefill": f"serve.{GDN_BACKEND}", "numa": f"serve.{NUMA_NODES}"}[
        entry["what"]
    ]


def _toolchain(entry: Mapping[str, Any], instance: Mapping[str, Any], facts: Facts) -> Decision:
    """A host without nvcc can compile none of FlashInfer's kernels. One that ran with a toolkit has lost it, which is a
    finding (toolkit-missing), no decision."""
    if facts.get("programs") is None:
        return Decision(doubt="what its unit would find on PATH is not known")
    name = instance["name"]
    current, programs = _current(name, facts), facts["programs"].get(name)
    if programs is None or programs["nvcc"] is not None or (current is not None and current.get(SAMPLER) != "0"):
        return Decision()
    settings: dict[Setting, Any] = {_SAMPLER: "0"}
    if entry["gdn"]:
        settings[_PREFILL] = "triton"
    settings |= _all_reduce(instance)
    return Decision(
        settings,
        "no nvcc",
        "vllm_toolchain is not set, and the host has no nvcc: FlashInfer can compile nothing here",
    )


def _prefill(entry: Mapping[str, Any], devices: list[Mapping[str, Any]], _facts: Facts) -> Decision:
    """What vLLM itself chooses for GDN-based models, said in the plan.

    Source: _resolve_gdn_prefill_backend in vllm/model_executor/layers/mamba/gdn/ of 0.28.0, and the same of 0.25.0,
    0.31.0 and 0.33.0: FlashInfer on SM90; on SM10x, from 0.30 on SM12x as well, with key heads of 128 and CUDA 13;
    Triton on SM8x.
    """
    chosen = {str(device["compute_capability"]): _prefill_of(device, entry) for device in devices}
    kinds = " and ".join(f"SM{capability.replace('.', '')}" for capability in sorted(chosen))
    backends = {*chosen.values()}
    if None in backends or len(backends) > 1:
        return Decision(doubt=f"what vLLM {entry['vllm']} chooses on {kinds} is not known to be one backend")
    backend = backends.pop()
    note = f"GDN-based models: vLLM {entry['vllm']} prefills on {kinds} with {backend}"
    if backend == "flashinfer":
        note += ", whose kernels are compiled at the first start; with triton there is nothing to wait for"
    return Decision({_PREFILL: backend}, kinds, note)


def _prefill_of(device: Mapping[str, Any], entry: Mapping[str, Any]) -> str | None:
    major, _dot, minor = str(device["compute_capability"]).partition(".")
    if (major, minor) == ("9", "0"):
        return "flashinfer"
    if major == "8" or (major == "12" and Version(entry["vllm"]) < Version("0.30")):
        return "triton"
    if major not in ("10", "12") or entry["key_head_dim"] is None:
        return None
    return "flashinfer" if entry["key_head_dim"] == 128 and entry["cuda"] >= 13 else "triton"


def _numa(_entry: Mapping[str, Any], devices: list[Mapping[str, Any]], facts: Facts) -> Decision:
    """The node of each GPU in the order in which vLLM sees them.

    Without the list vLLM looks itself, and the engine ends where it finds nothing: on a host of one node, and where the
    process may not use all CPUs (vllm/utils/numa_utils.py, 0.28.0, _is_auto_numa_available and _get_numa_node).
    """
    nodes = [numa_node_of(device, facts) for device in devices]
    if None in nodes:
        return Decision(doubt=NODE_UNKNOWN)
    return Decision({_NODES: nodes}, "NUMA node of each GPU")


def numa_node_of(device: Mapping[str, Any], facts: Facts) -> int | None:
    """The NUMA node that a GPU hangs on: by /sys, by nvidia-smi, or the only one there is."""
    if (node := device.get("numa_node")) is not None:
        return int(node)
    topology = (facts["gpu"] or {}).get("topology") or {}
    affinity = str((topology.get(f"GPU{device['index']}") or {}).get("numa"))
    if affinity.isdecimal():
        return int(affinity)
    nodes = facts.get("numa") or []
    return int(nodes[0]["node"]) if len(nodes) == 1 else None


def _devices(instance: Mapping[str, Any], count: int, facts: Facts) -> tuple[list[Mapping[str, Any]], str]:
    """The GPUs of an instance in the order in which it sees them, or why they cannot be told."""
    gpu = facts.get("gpu") or {}
    devices = gpu.get("devices") or []
    named = instance.get("gpus") or []
    found = used_devices(instance, devices)
    if gpu.get("error") or not devices:
        return [], str(gpu.get("error") or "no GPU is seen")
    if len(found) < max(count, len(named)):
        return [], f"{len(found)} of its {max(count, len(named))} GPUs are seen"
    if any(device["compute_capability"] is None for device in found):
        return [], "nvidia-smi does not say what its GPUs can do"
    return found, ""


def _current(name: str, facts: Facts) -> Mapping[str, Any] | None:
    return (facts.get("current") or {}).get(name)


def _all_reduce(instance: Mapping[str, Any]) -> dict[Setting, Any]:
    """What keeps several GPUs from FlashInfer's all-reduce, which is compiled at run time."""
    if not is_tensor_parallel(instance["serve"]):
        return {}
    return {("serve", flag): value for flag, value in without_fused_all_reduce(instance["serve"]).items()}


def _kept(entry: Mapping[str, Any], instance: Mapping[str, Any], facts: Facts) -> dict[Setting, Any]:
    """What the current generation has of what an entry would decide."""
    current = _current(instance["name"], facts) or {}
    settings = {"toolchain": [_SAMPLER, *([_PREFILL] if entry.get("gdn") else [])], "prefill": [_PREFILL]}
    kept = {one: current[one[1]] for one in settings.get(entry["what"], [_NODES]) if current.get(one[1]) is not None}
    if entry["what"] != "toolchain":
        return kept
    # As it stands in serve.yaml; of the rest of that argument the plan knows better.
    if f"{FUSED_ALL_REDUCE}: false" in str(current.get(COMPILATION)):
        kept |= _all_reduce(instance)
    return kept if kept.get(_SAMPLER) == "0" else {}


def _without_toolkit(packages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Packages without those that only FlashInfer's compilation needs."""
    toolkit = read_yaml(COLLECTION / "catalogue" / "inventory.yml")["packages"]["toolchain_toolkit"]
    reasons = {one["name"]: one["for"] for one in toolkit}
    return [
        package
        for package in packages
        if package["name"] not in reasons
        or any(not part.endswith(reasons[package["name"]]) for part in package["for"].split("; "))
    ]


def _mentioned(settings: Layer, path: Setting) -> bool:
    """Whether some layer sets or removes it; what takes its whole map away does, too."""
    part = settings.children.get(path[0]) if isinstance(settings, Branch) else None
    if part is None:
        return False
    return not isinstance(part, Branch) or part.fresh or path[1] in part.children


def _value(settings: Layer, path: Setting) -> Any:
    part = settings.children.get(path[0]) if isinstance(settings, Branch) else None
    return getattr(part.children.get(path[1]), "value", None) if isinstance(part, Branch) else None
