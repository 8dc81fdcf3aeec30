# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What keeps a host's GPUs, their driver and their fabric from being what its plan needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .catalogue import COLLECTION, read_yaml
from .finding import OUR_UNIT, Facts, Finding, Plan, by_name, gpu_instances, new_finding, used_devices
from .findings_model import estimated_gib
from .memory_estimate import UNSURE_SHARE
from .release_definition import load_release, shipped_releases

try:
    from packaging.version import InvalidVersion, Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

# A GPU with more than this in use before anything of ours runs has another tenant (a bare context takes less).
_BUSY_MIB = 1024
# vLLM's default where serve.gpu-memory-utilization is not set (0.25.0 to 0.33.0).
_UTILIZATION = 0.92
# Links of nvidia-smi topo -m.
_NVLINK = re.compile(r"NV\d+")
_ONE_PROCESSOR = re.compile(r"NV\d+|PIX|PXB|PHB|NODE")


def driver(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The driver, and whether there are GPUs at all."""
    if not plan["needs"]["gpus"]:
        return
    gpu = facts["gpu"]
    if gpu["error"]:
        yield new_finding("gpu-unreadable", gpu["error"], "a working NVIDIA driver", "Install or repair the driver.")
        return
    if not gpu["devices"]:
        needed = "; ".join(f"{wanted['count']} for {wanted['for']}" for wanted in plan["needs"]["gpus"])
        yield new_finding(
            "gpu-missing",
            "no GPU",
            f"GPUs: {needed}",
            "Choose a profile and release for the CPU, or a host with GPUs.",
        )
        return
    for wanted in plan["needs"]["drivers"]:
        driver = _version(gpu["driver"])
        if driver is None or driver < Version(wanted["version"]):
            yield new_finding(
                "driver-old",
                f"NVIDIA driver {gpu['driver'] or 'unknown'}",
                f"{wanted['version']} or newer for variant {wanted['variant']} of release {wanted['for']}",
                f"Install driver {wanted['version']} or newer{_older_variant(plan, wanted, driver)}.",
            )


def _older_variant(plan: Plan, wanted: Mapping[str, Any], driver: Version | None) -> str:
    """Shipped releases that run with the driver as it is, of the same vLLM where there is one, with a lock if any."""
    floors = read_yaml(COLLECTION / "catalogue" / "inventory.yml")["drivers"]
    fitting = {variant for variant, floor in floors.items() if driver is not None and driver >= Version(floor)}
    vllm = next((release["vllm"] for release in plan.get("releases", ()) if release["name"] == wanted["for"]), None)
    others = [release for release in map(load_release, shipped_releases()) if release.variant in fitting]
    same = [release for release in others if release.vllm == vllm]
    meant = same or others
    if not meant:
        return ""
    ready = [release for release in meant if release.lock_sha256 is not None]
    named = " or ".join(release.name for release in ready or meant)
    first = "" if ready else f" after make lock RELEASE={meant[0].lock_of} where its indexes can be reached"
    if same:
        return f", or choose release {named} of the same vLLM, which runs with this driver{first}"
    return f", or choose release {named}, which runs with this driver{first}, or define {vllm}'s of the same variant"


def gpus(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The GPUs of each instance: kind, number, tenants and state."""
    devices = facts["gpu"]["devices"]
    if not devices:
        return
    instances = {wanted["for"]: instance for instance, wanted in gpu_instances(plan)}
    estimated = estimated_gib(plan, facts)
    used_by_any: dict[int, Mapping[str, Any]] = {}
    for wanted in plan["needs"]["gpus"]:
        known = by_name(devices)
        parts = ", ".join(str(name) for name in known if str(name).startswith("MIG-"))
        if missing := [str(name) for name in wanted["named"] if name not in known]:
            yield new_finding(
                "gpu-unknown",
                f"the host has GPUs 0 to {len(devices) - 1}" + (f" and MIG devices {parts}" if parts else ""),
                f"GPU {', '.join(missing)} for {wanted['for']}",
                "Correct gpus of the instance; nvidia-smi -L lists what there is.",
            )
        used = used_devices({"gpus": wanted["named"]}, devices)
        used_by_any |= {device["index"]: device for device in used}
        if len(used) + len(missing) < wanted["count"]:
            yield new_finding(
                "gpu-few",
                f"{len(used)} GPUs",
                f"{wanted['count']} for {wanted['for']}",
                "Choose a profile for fewer GPUs, or another host.",
            )
        kinds = sorted({str(device["name"]) for device in used})
        if len(kinds) > 1 and wanted["count"] > 1:
            yield new_finding(
                "gpu-mixed",
                f"{' and '.join(kinds)}",
                f"GPUs of one kind for {wanted['for']}",
                "Name equal GPUs in gpus of the instance.",
            )
        for device in used:
            yield from _gpu(device, wanted, estimated.get(wanted["for"], 0.0))
            yield from _tenants(device, wanted, instances.get(wanted["for"]), facts)
    for device in used_by_any.values():
        yield from _state(device)


def shared(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """GPUs that two instances name, which the plan cannot see where one names it by index, the other by UUID."""
    known = by_name(facts["gpu"]["devices"])
    owners: dict[str, str] = {}
    for wanted in plan["needs"]["gpus"]:
        for device in (known[name] for name in wanted["named"] if name in known):
            if (other := owners.setdefault(device["uuid"], wanted["for"])) != wanted["for"]:
                yield new_finding(
                    "gpu-shared",
                    f"GPU {device['index']} ({device['uuid']}) is named by {other} and by {wanted['for']}",
                    "a GPU of its own for each",
                    f"Correct gpus of {wanted['for']}.",
                )


def links(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Tensor parallelism over a slow link, where GPUs that nobody has named are linked better.

    Each layer waits for its GPUs to exchange what they computed: over NVLink (NV), within one processor's PCIe, or
    across processors (SYS), in this order (nvidia-smi topo -m).
    """
    devices = facts["gpu"]["devices"]
    topology = facts["gpu"].get("topology") or {}
    taken = [*_taken(plan, devices)]
    for instance, wanted in gpu_instances(plan):
        size = instance["serve"].get("tensor-parallel-size", 1)
        if not isinstance(size, int) or size < 2:
            continue
        used = [device["index"] for device in used_devices(instance, devices)][:size]
        free = [
            device["index"]
            for device in devices
            if all(gpu != device["index"] or name == instance["name"] for name, gpu in taken)
        ]
        if len(used) < size:
            continue
        for how, good in (("NVLink", _NVLINK), ("one processor's PCIe", _ONE_PROCESSOR)):
            if _all_linked(used, topology, good):
                break
            better = next(_sets(free, size, topology, good), None)
            if better is not None:
                yield new_finding(
                    "gpu-links-slow",
                    f"GPU {', '.join(map(str, used))} are not all linked by {how}: {_worst(used, topology)}",
                    f"the fastest links that the host has, for tensor-parallel-size {size} of {wanted['for']}",
                    f"Set gpus: [{', '.join(map(str, better))}], which are.",
                )
                break


def _taken(plan: Plan, devices: list[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    for instance, _unused in gpu_instances(plan):
        for device in used_devices(instance, devices) if instance["gpus"] else ():
            yield instance["name"], device["index"]


def _kinds(gpus: list[int], topology: Mapping[str, Any]) -> list[str]:
    """The kind of link of each pair; empty text where nvidia-smi names none."""
    pairs = ((one, other) for one in gpus for other in gpus if one < other)
    return [str(((topology.get(f"GPU{one}") or {}).get("links") or {}).get(f"GPU{other}", "")) for one, other in pairs]


def _all_linked(gpus: list[int], topology: Mapping[str, Any], good: re.Pattern[str]) -> bool:
    """Whether all pairs are, or it is not known."""
    return all(not kind or good.match(kind) for kind in _kinds(gpus, topology))


def _sets(gpus: list[int], size: int, topology: Mapping[str, Any], good: re.Pattern[str]) -> Iterator[list[int]]:
    """Sets of that size whose pairs all have such a link, each begun with another GPU."""
    for first in gpus:
        found = [first]
        for other in gpus:
            if other > first and len(found) < size and all(map(good.match, _kinds([*found, other], topology))):
                found.append(other)
        if len(found) == size:
            yield found


def _worst(gpus: list[int], topology: Mapping[str, Any]) -> str:
    kinds = sorted({kind for kind in _kinds(gpus, topology) if kind}, key=lambda kind: not _ONE_PROCESSOR.match(kind))
    return ", ".join(kinds)


def _gpu(device: Mapping[str, Any], wanted: Mapping[str, Any], least_gib: float) -> Iterator[Finding]:
    """Whether a GPU is what an instance was made for; ``least_gib`` is the least memory that the plan estimates."""
    name = f"GPU {device['index']} ({device['name']})"
    if device["mig"]:
        parts = ", ".join(part["uuid"] for part in device.get("mig_devices") or ())
        yield new_finding(
            "gpu-mig",
            f"{name} is in MIG mode",
            f"the whole GPU for {wanted['for']}",
            f"nvidia-smi -i {device['index']} -mig 0, or name MIG devices in gpus of the instance"
            + (f" ({parts})." if parts else "."),
        )
    memory = device["memory_mib"]
    if wanted["memory_gib"] and memory is not None and memory < wanted["memory_gib"] * 1024:
        yield new_finding(
            "gpu-memory-small",
            f"{name} has {memory / 1024:.1f} GiB",
            f"{wanted['memory_gib']:g} GiB for {wanted['for']}",
            "Choose a profile for this GPU.",
        )
    elif memory is not None and memory * (1 + UNSURE_SHARE) < least_gib * 1024:
        yield new_finding(
            "gpu-memory-small",
            f"{name} has {memory / 1024:.1f} GiB",
            f"{least_gib:g} GiB for one sequence of full context of {wanted['for']}, by the memory estimate",
            "Choose another GPU or profile, or lower max-model-len; how it is estimated stands in docs/memory.md.",
        )
    capability = _version(device["compute_capability"])
    if wanted["compute_capability"] and capability is not None and capability < Version(wanted["compute_capability"]):
        yield new_finding(
            "gpu-generation",
            f"{name} has compute capability {device['compute_capability']}",
            f"{wanted['compute_capability']} for {wanted['for']}",
            "Choose a profile for this GPU.",
        )
    architecture = f"sm{(device['compute_capability'] or '').replace('.', '')}"
    if capability is not None and wanted["architectures"] and architecture not in wanted["architectures"]:
        yield new_finding(
            "gpu-architecture",
            f"{name} is {architecture}",
            f"{', '.join(wanted['architectures'])}, for which release {wanted['release']} of {wanted['for']} is made",
            "Choose a release that is made for this GPU (catalogue/releases, key for).",
        )


def _tenants(
    device: Mapping[str, Any], wanted: Mapping[str, Any], instance: Mapping[str, Any] | None, facts: Facts
) -> Iterator[Finding]:
    """What others hold of a GPU's memory. vLLM refuses to start where less is free than its share of all of it."""
    ours = [process for process in device["processes"] if _is_ours(process)]
    others = [process for process in device["processes"] if process not in ours]
    if not device["processes"] and any(OUR_UNIT.fullmatch(held["unit"] or "") for held in facts["listeners"] or ()):
        return  # a container that cannot see the GPU's processes: what is in use is our own instance's
    held = (device["memory_used_mib"] or 0) - sum(process["memory_mib"] or 0 for process in ours)
    if (ours and not others) or held <= _BUSY_MIB:
        return
    names = ", ".join(f"{process['name'] or 'a process'} ({process['pid']})" for process in others)
    name = f"GPU {device['index']} ({device['name']})"
    found = f"{name} has {held} MiB in use by {names or 'processes that it does not name'}"
    total = device["memory_mib"] or 0
    share = (instance or {}).get("serve", {}).get("gpu-memory-utilization", _UTILIZATION)
    if isinstance(share, (int, float)) and total - held < share * total:
        most = int((total - held) / total * 100) / 100
        yield new_finding(
            "gpu-memory-taken",
            f"{found}; {total - held} of {total} MiB are free",
            f"{share * total:.0f} MiB free for {wanted['for']} (gpu-memory-utilization {share:g})",
            f"Stop what uses it, choose another GPU, or set serve.gpu-memory-utilization to at most {most:g}.",
        )
    else:
        yield new_finding(
            "gpu-busy",
            found,
            f"the GPU's memory and time for {wanted['for']}",
            "Stop what uses it, or choose another GPU.",
        )


def _is_ours(process: Mapping[str, Any]) -> bool:
    if process.get("unit"):
        return OUR_UNIT.fullmatch(process["unit"]) is not None
    return "vllm" in (process["name"] or "").lower()


def _state(device: Mapping[str, Any]) -> Iterator[Finding]:
    """How a GPU is doing, whoever uses it."""
    index, name = device["index"], f"GPU {device['index']} ({device['name']})"
    if not device["persistence"]:
        yield new_finding(
            "gpu-persistence",
            f"persistence mode of {name} is off",
            "a driver that stays loaded between starts",
            "systemctl enable --now nvidia-persistenced",
        )
    if (action := device.get("recovery")) is not None:
        yield new_finding(
            "gpu-needs-reset",
            f"{name} asks for: {action}",
            "a GPU without a pending fault",
            f"nvidia-smi --gpu-reset -i {index} once nothing uses it, or reboot; then look for Xid in `dmesg`.",
        )
    if device.get("compute_mode") == "Prohibited":
        yield new_finding(
            "gpu-compute-mode",
            f"compute mode of {name} is Prohibited",
            "Default, or Exclusive_Process",
            f"nvidia-smi -i {index} -c DEFAULT",
        )
    width, most = device.get("link_width"), device.get("link_width_most")
    if width is not None and most is not None and width < most:
        yield new_finding(
            "gpu-link-narrow",
            f"the PCIe link of {name} has {width} of {most} lanes",
            f"{most} lanes",
            "Reseat the card or its riser, and look at the slot's lanes in the firmware.",
        )


def fabric(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The NVSwitch fabric and its manager."""
    gpu = facts["gpu"]
    fabric = gpu.get("fabric")
    if not plan["needs"]["gpus"] or not fabric:
        return
    install = f"Install nvidia-fabricmanager of version {gpu['driver']}, from where the driver came."
    if fabric["switches"]:
        if fabric["service"] is None:
            yield new_finding(
                "fabric-manager-missing",
                f"{fabric['switches']} NVSwitches, and no nvidia-fabricmanager.service",
                "a fabric manager; without it CUDA fails with error 802",
                install,
            )
        elif fabric["service"] != "active":
            yield new_finding(
                "fabric-manager-stopped",
                f"nvidia-fabricmanager.service is {fabric['service']}",
                "it running; without it CUDA fails with error 802",
                "systemctl enable --now nvidia-fabricmanager; why it fails stands in its journal.",
            )
        if fabric["version"] and gpu["driver"] and fabric["version"] != gpu["driver"]:
            yield new_finding(
                "fabric-manager-version",
                f"fabric manager {fabric['version']}, driver {gpu['driver']}",
                "the same version of both",
                install,
            )
    for device in gpu["devices"]:
        state, status = device.get("fabric_state"), device.get("fabric_status")
        if state is not None and (state != "Completed" or status not in ("Success", None)):
            yield new_finding(
                "fabric-not-ready",
                f"GPU {device['index']} ({device['name']}): fabric {state}, {status or 'no status'}",
                "Completed, Success; before that CUDA fails with error 802",
                "systemctl restart nvidia-fabricmanager, on a virtual machine the hypervisor's; then nvidia-smi -q.",
            )


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None
