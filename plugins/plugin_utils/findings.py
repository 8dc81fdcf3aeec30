# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A host's facts compared with its plan: every finding at once, each with what was found, what is needed, a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

try:
    from packaging.version import InvalidVersion, Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error


Finding = dict[str, str]
Plan = Mapping[str, Any]
Facts = Mapping[str, Any]

GIB = 1 << 30
MIB = 1 << 20
ERROR, WARNING = "error", "warning"
SUPPORTED = {("ubuntu", "24.04"), ("debian", "12"), ("debian", "13")}
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
# A GPU with more than this in use before anything of ours runs has another tenant (a bare context takes less).
_BUSY_MIB = 1024


def compare(plan: Plan, facts: Facts, waived: Iterable[str] = ()) -> list[Finding]:
    """All findings, errors first.

    Args:
        plan: the host's plan; ``needs`` and ``packages`` are read.
        facts: what the module ``host_probe`` returned for it.
        waived: identifiers of errors that the operator takes on; they become warnings.
    """
    taken_on = set(waived)
    found = [finding for check in _CHECKS for finding in check(plan, facts)]
    for finding in found:
        if finding["id"] in taken_on and finding["severity"] == ERROR:
            finding["severity"] = WARNING
            finding["found"] += " (waived)"
    return sorted(found, key=lambda finding: finding["severity"] != ERROR)


def report(host: str, findings: Iterable[Finding]) -> str:
    """Findings as text for a person, empty where there is none."""
    lines: list[str] = []
    for finding in findings:
        lines += [
            f"{finding['severity']} {finding['id']}  [{host}]",
            f"    found:  {finding['found']}",
            f"    needed: {finding['needed']}",
            f"    -> {finding['remedy']}",
        ]
    return "\n".join(lines)


def _finding(identifier: str, found: str, needed: str, remedy: str, severity: str = ERROR) -> Finding:
    return {"id": identifier, "severity": severity, "found": found, "needed": needed, "remedy": remedy}


def _system(plan: Plan, facts: Facts) -> Iterator[Finding]:
    system = facts["os"]
    if (system["id"], system["version"]) not in SUPPORTED:
        yield _finding(
            "os-untested",
            system["name"] or "an unknown system",
            "Ubuntu 24.04, Debian 12 or Debian 13",
            "Go on if you know the system; what was run where stands in docs/tested.md.",
            WARNING,
        )
    if not facts["systemd"]["running"]:
        yield _finding(
            "systemd-missing",
            "systemd is not running this host",
            "systemd as process 1, for units and timers",
            "Use a host, or a container started with systemd as its init.",
        )
    for platform in plan["needs"]["platforms"]:
        machine = _MACHINES.get(facts["machine"]) or str(facts["machine"])
        if machine != platform["machine"]:
            yield _finding(
                "architecture",
                machine,
                f"{platform['machine']} for {platform['for']}",
                f"Choose a release for {machine}, or another host.",
            )
        if facts["glibc"] is None or list(facts["glibc"]) < list(platform["glibc"]):
            found = "no glibc" if facts["glibc"] is None else "glibc {}.{}".format(*facts["glibc"])
            yield _finding(
                "glibc-old",
                found,
                "glibc {}.{} for {}".format(*platform["glibc"], platform["for"]),
                "Use a newer distribution (Debian 12 has 2.36, Ubuntu 24.04 has 2.39).",
            )


def _python(plan: Plan, facts: Facts) -> Iterator[Finding]:
    for wanted in plan["needs"]["pythons"]:
        version = wanted["version"]
        package = facts["packages"].get(f"python{version}") or {}
        obtainable = bool(package.get("candidate")) or plan["needs"]["apt_source"]
        if facts["pythons"].get(version) is None and not obtainable:
            yield _finding(
                "python-missing",
                f"no python{version}, and apt knows no package python{version}",
                f"Python {version} for {wanted['for']}",
                f"Use a release for a Python that {facts['os']['name'] or 'this system'} has, or put an interpreter "
                "archive into the release (key interpreter).",
            )


def _packages(plan: Plan, facts: Facts) -> Iterator[Finding]:
    if plan["needs"]["apt_source"]:
        return  # apt has not read that mirror yet; host_base names what it lacks
    pythons = {f"python{wanted['version']}" for wanted in plan["needs"]["pythons"]}
    for package in plan["packages"]:
        name = package["name"]
        state = facts["packages"].get(name) or {}
        found_python = name in pythons and facts["pythons"].get(name.removeprefix("python")) is not None
        if state.get("installed") or state.get("candidate") or found_python or name in pythons:
            continue
        yield _finding(
            "package-missing",
            f"{name} is not installed, and apt knows no way to get it",
            f"{name} for {package['for']}",
            f"Install {name} in the host's image, or set host_base_apt_source to a mirror that has it.",
        )


def _disk(plan: Plan, facts: Facts) -> Iterator[Finding]:
    wanted: dict[int, list[Mapping[str, Any]]] = {}
    for space in plan["needs"]["disk"]:
        disk = facts["disks"].get(space["path"])
        if disk is None:
            continue
        if disk["read_only"]:
            yield _finding(
                "disk-read-only",
                f"{space['path']} lies on a read-only file system",
                f"a writable one for {space['for']}",
                "Mount it read-write, or choose another root.",
            )
        if not disk["exists"]:  # what is there already has its space
            wanted.setdefault(disk["device"], []).append({**space, **disk})
    for spaces in wanted.values():
        needed = sum(space["gib"] for space in spaces)
        free = spaces[0]["free"] / GIB
        if free < needed:
            parts = ", ".join(f"{space['gib']:g} for {space['for']}" for space in spaces)
            yield _finding(
                "disk-full",
                f"{free:.1f} GiB free below {spaces[0]['path']}",
                f"{needed:g} GiB ({parts})",
                "Free or add space, or put uv_venv_root, hf_cache_root or cache_dirs_root on another file system.",
            )


def _memory(plan: Plan, facts: Facts) -> Iterator[Finding]:
    wanted = plan["needs"]["memory_gib"]
    needed = sum(entry["gib"] for entry in wanted)
    total = facts["memory"]["total"] / GIB
    if total < needed:
        yield _finding(
            "memory-small",
            f"{total:.1f} GiB of memory",
            f"{needed:g} GiB ({', '.join('{:g} for {}'.format(entry['gib'], entry['for']) for entry in wanted)})",
            "Add memory, or run fewer instances on this host.",
        )
    shm = facts["shm"]["total"] / MIB
    least = plan["needs"]["shm_mib"]
    if shm < least:
        yield _finding(
            "shm-small",
            f"/dev/shm holds {shm:.0f} MiB",  # noqa: S108 - the shared memory itself
            f"{least} MiB, for what vLLM's processes exchange",
            "mount -o remount,size=2G /dev/shm, and its size in /etc/fstab; for a container --shm-size=2g.",
        )


def _ports(plan: Plan, facts: Facts) -> Iterator[Finding]:
    for wanted in plan["needs"]["ports"]:
        for listener in facts["listeners"]:
            unit = listener["unit"] or ""
            ours = unit == wanted["unit"] or re.fullmatch(r"vllm-[\w-]+\.service", unit)
            if listener["port"] == wanted["port"] and not ours:
                holder = listener["program"] or "a process of another namespace"
                pid = f" (process {listener['pid']}{', ' + unit if unit else ''})" if listener["pid"] else ""
                yield _finding(
                    "port-taken",
                    f"port {wanted['port']} is held by {holder}{pid}",
                    f"port {wanted['port']} for {wanted['for']}",
                    "Stop what holds it, or set another port.",
                )


def _driver(plan: Plan, facts: Facts) -> Iterator[Finding]:
    if not plan["needs"]["gpus"]:
        return
    gpu = facts["gpu"]
    if gpu["error"]:
        yield _finding("gpu-unreadable", gpu["error"], "a working NVIDIA driver", "Install or repair the driver.")
        return
    if not gpu["devices"]:
        needed = "; ".join(f"{wanted['count']} for {wanted['for']}" for wanted in plan["needs"]["gpus"])
        yield _finding(
            "gpu-missing",
            "no GPU",
            f"GPUs: {needed}",
            "Choose a profile and release for the CPU, or a host with GPUs.",
        )
        return
    for wanted in plan["needs"]["drivers"]:
        if (found := _version(gpu["driver"])) is None or found < Version(wanted["version"]):
            older = " or choose a release of an older variant such as cu129" if wanted["variant"] == "cu130" else ""
            yield _finding(
                "driver-old",
                f"NVIDIA driver {gpu['driver'] or 'unknown'}",
                f"{wanted['version']} or newer for variant {wanted['variant']} of release {wanted['for']}",
                f"Install a newer driver{older}.",
            )


def _gpus(plan: Plan, facts: Facts) -> Iterator[Finding]:
    devices = facts["gpu"]["devices"]
    if not devices:
        return
    for wanted in plan["needs"]["gpus"]:
        named = wanted["named"]
        known: dict[Any, Any] = {device["uuid"]: device for device in devices}
        known.update({device["index"]: device for device in devices})
        if missing := [str(name) for name in named if name not in known and not str(name).startswith("MIG-")]:
            yield _finding(
                "gpu-unknown",
                f"the host has GPUs 0 to {len(devices) - 1}",
                f"GPU {', '.join(missing)} for {wanted['for']}",
                "Correct gpus of the instance.",
            )
        used = [known[name] for name in named if name in known] or devices
        if len(used) < wanted["count"]:
            yield _finding(
                "gpu-few",
                f"{len(used)} GPUs",
                f"{wanted['count']} for {wanted['for']}",
                "Choose a profile for fewer GPUs, or another host.",
            )
        for device in used:
            yield from _gpu(device, wanted)


def _gpu(device: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Finding]:
    name = f"GPU {device['index']} ({device['name']})"
    if device["mig"]:
        yield _finding(
            "gpu-mig",
            f"{name} is in MIG mode",
            f"the whole GPU for {wanted['for']}",
            f"nvidia-smi -i {device['index']} -mig 0, or name the MIG devices in gpus of the instance.",
        )
    memory = device["memory_mib"]
    if wanted["memory_gib"] and memory is not None and memory < wanted["memory_gib"] * 1024:
        yield _finding(
            "gpu-memory-small",
            f"{name} has {memory / 1024:.1f} GiB",
            f"{wanted['memory_gib']:g} GiB for {wanted['for']}",
            "Choose a profile for this GPU.",
        )
    capability = _version(device["compute_capability"])
    if wanted["compute_capability"] and capability is not None and capability < Version(wanted["compute_capability"]):
        yield _finding(
            "gpu-generation",
            f"{name} has compute capability {device['compute_capability']}",
            f"{wanted['compute_capability']} for {wanted['for']}",
            "Choose a profile for this GPU.",
        )
    architecture = f"sm{(device['compute_capability'] or '').replace('.', '')}"
    if capability is not None and wanted["architectures"] and architecture not in wanted["architectures"]:
        yield _finding(
            "gpu-architecture",
            f"{name} is {architecture}",
            f"{', '.join(wanted['architectures'])}, for which release {wanted['release']} of {wanted['for']} is made",
            "Choose a release that is made for this GPU (catalogue/releases, key for).",
            WARNING,
        )
    foreign = [process for process in device["processes"] if "vllm" not in (process["name"] or "").lower()]
    if foreign and (device["memory_used_mib"] or 0) > _BUSY_MIB:
        names = ", ".join(f"{process['name'] or 'a process'} ({process['pid']})" for process in foreign)
        yield _finding(
            "gpu-busy",
            f"{name} has {device['memory_used_mib']} MiB in use by {names}",
            f"the GPU's memory for {wanted['for']}",
            "Stop what uses it, or choose another GPU.",
            WARNING,
        )


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


_CHECKS: tuple[Callable[[Plan, Facts], Iterator[Finding]], ...] = (
    _system,
    _python,
    _packages,
    _disk,
    _memory,
    _ports,
    _driver,
    _gpus,
)
