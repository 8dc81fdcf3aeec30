# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What keeps a host's system from being as its plan says: software, space and network."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .finding import GIB, MIB, OUR_UNIT, Facts, Finding, Plan, gpu_instances, new_finding, used_devices
from .plan_facts import numa_node_of

SUPPORTED = {("ubuntu", "24.04"), ("debian", "12"), ("debian", "13")}
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
# A release for the CPU has 35,000 files, one for CUDA more.
_RELEASE_FILES = 60_000
_ANY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not bound to


def system(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Distribution, architecture and C library."""
    system = facts["os"]
    if (system["id"], system["version"]) not in SUPPORTED:
        yield new_finding(
            "os-untested",
            system["name"] or "an unknown system",
            "Ubuntu 24.04, Debian 12 or Debian 13",
            "Go on if you know the system; what was run where stands in docs/tested.md.",
        )
    for platform in plan["needs"]["platforms"]:
        machine = _MACHINES.get(facts["machine"]) or str(facts["machine"])
        if machine != platform["machine"]:
            yield new_finding(
                "architecture",
                machine,
                f"{platform['machine']} for {platform['for']}",
                f"Choose a release for {machine}, or another host.",
            )
        if facts["glibc"] is None or list(facts["glibc"]) < list(platform["glibc"]):
            found = "no glibc" if facts["glibc"] is None else "glibc {}.{}".format(*facts["glibc"])
            yield new_finding(
                "glibc-old",
                found,
                "glibc {}.{} for {}".format(*platform["glibc"], platform["for"]),
                "Use a newer distribution (Debian 12 has 2.36, Ubuntu 24.04 has 2.39).",
            )


def systemd(_plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Whether systemd runs the host."""
    if not facts["systemd"]["running"]:
        yield new_finding(
            "systemd-missing",
            "systemd is not running this host",
            "systemd as process 1, for units and timers",
            "Use a host, or a container started with systemd as its init.",
        )


def selinux(_plan: Plan, facts: Facts) -> Iterator[Finding]:
    """A policy that does not know the instances."""
    if facts["selinux"] == "enforcing":
        yield new_finding(
            "selinux-enforcing",
            "SELinux enforces its policy",
            "a policy that lets the units use GPUs, caches and ports; the collection brings none",
            "Look at `ausearch -m avc -ts recent` after the first start and add what it shows, or `setenforce 0`.",
        )


# -- what is installed ---------------------------------------------------------------------------------------------


def python(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The releases' interpreters."""
    for wanted in plan["needs"]["pythons"]:
        version = wanted["version"]
        if facts["pythons"].get(version) is None and not _obtainable(plan, facts, f"python{version}"):
            yield new_finding(
                "python-missing",
                f"no python{version}, and apt knows no package python{version}",
                f"Python {version} for {wanted['for']}",
                f"Use a release for a Python that {(facts['os'] or {}).get('name') or 'this system'} has, or put an "
                "interpreter archive into the release (key interpreter).",
            )


def packages(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Packages that nothing would bring."""
    if plan["needs"]["apt_source"]:
        return  # apt has not read that mirror yet; host_base names what it lacks
    pythons = {f"python{wanted['version']}" for wanted in plan["needs"]["pythons"]}
    for package in plan["packages"]:
        name = package["name"]
        if name in pythons or _installed(facts, name) or _obtainable(plan, facts, name):
            continue
        yield new_finding(
            "package-missing",
            f"{name} is not installed, and apt knows no way to get it",
            f"{name} for {package['for']}",
            f"Install {name} in the host's image, or set host_base_apt_source to a mirror that has it.",
        )


def _installed(facts: Facts, package: str) -> bool:
    return bool((facts["packages"].get(package) or {}).get("installed"))


def _obtainable(plan: Plan, facts: Facts, package: str) -> bool:
    return bool((facts["packages"].get(package) or {}).get("candidate")) or plan["needs"]["apt_source"]


def _comes_with_the_rollout(plan: Plan, facts: Facts, package: str) -> bool:
    """Whether host_base will install a package, or its absence is a finding of its own."""
    return any(wanted["name"] == package for wanted in plan["packages"]) and not _installed(facts, package)


def programs(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Compilers and headers as each GPU instance's unit would find them."""
    must_compile = any(wanted["toolkit"] for wanted in plan["needs"]["gpus"])
    otherwise = "" if must_compile else ", or set vllm_toolchain: none"
    for instance, wanted in gpu_instances(plan):
        found = facts["programs"].get(instance["name"])
        if found is None:
            continue
        where = f"in the environment of instance {instance['name']}"
        path = instance.get("environment", {}).get("PATH", "")
        if (reason := _not_usable(found["cc"], "C compiler")) and not _comes_with_the_rollout(plan, facts, "gcc"):
            yield new_finding(
                "compiler-missing",
                f"{reason} {where} (PATH {path})",
                f"a C compiler for Triton, which compiles a launcher at every start of {wanted['for']}",
                "Correct CC or PATH in environment of the instance, or install gcc.",
            )
        if "jit-tools" in instance.get("probes", ()):
            reasons = [_not_usable(found["nvcc"], "nvcc")]
            if not _comes_with_the_rollout(plan, facts, "g++"):
                reasons.append(_not_usable(found["c++"], "C++ compiler"))
            if reason := " and ".join(filter(None, reasons)):
                yield new_finding(
                    "toolkit-missing",
                    f"{reason} {where} (PATH {path})",
                    f"nvcc and a C++ compiler for FlashInfer in {wanted['for']}, for vllm_toolchain is toolkit",
                    f"Install the CUDA toolkit (nvcc on PATH or in /usr/local/cuda) and g++{otherwise}.",
                )
    for wanted in plan["needs"]["pythons"]:
        version = wanted["version"]
        python = facts["pythons"].get(version) if facts["pythons"] else None
        package = f"python{version}-dev"
        needed = any(entry["name"] == package for entry in plan["packages"])
        if python and not python["headers"] and needed and _installed(facts, package):
            yield new_finding(
                "headers-missing",
                f"{python['path']} has no Python.h, although {package} is installed",
                f"the headers of the interpreter that {wanted['for']} is made with",
                f"Take {python['path']} off the system's PATH, so that the package's own interpreter is found.",
            )


def _not_usable(program: Mapping[str, Any] | None, what: str) -> str:
    if program is None:
        return f"no {what}"
    return "" if program["runs"] else f"{program['path']} does not run"


def numa(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """What serve.numa-bind needs."""
    for instance in plan.get("instances", ()):
        if instance["serve"].get("numa-bind") is not True:
            continue
        numactl = (facts["programs"].get(instance["name"]) or {}).get("numactl")
        if numactl is None and not _comes_with_the_rollout(plan, facts, "numactl"):
            yield new_finding(
                "numa-bind-without-numactl",
                f"no numactl in the environment of instance {instance['name']}",
                "numactl, by which vLLM binds workers to the NUMA node of their GPU; without it nothing is bound",
                "Install numactl, or remove numa-bind from serve.",
            )
        unknown = [
            str(device["index"])
            for device in used_devices(instance, (facts["gpu"] or {}).get("devices") or [])
            if numa_node_of(device, facts) is None
        ]
        if unknown and not instance["serve"].get("numa-bind-nodes"):
            yield new_finding(
                "numa-unknown",
                f"neither /sys nor nvidia-smi says which NUMA node GPU {', '.join(unknown)} is on",
                f"the nodes, for numa-bind of instance {instance['name']}",
                "Set serve.numa-bind-nodes, one node for each GPU, or remove numa-bind.",
            )


# -- space ---------------------------------------------------------------------------------------------------------


def disk(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Space, inodes and mount options, counted for each file system."""
    wanted: dict[int, list[Mapping[str, Any]]] = {}
    for space in plan["needs"]["disk"]:
        disk = facts["disks"].get(space["path"])
        if disk is None:
            continue
        if disk["read_only"]:
            yield new_finding(
                "disk-read-only",
                f"{space['path']} lies on a read-only file system",
                f"a writable one for {space['for']}",
                "Mount it read-write, or choose another root.",
            )
        programs = space["for"].startswith(("release ", "caches"))
        if disk["noexec"] and programs:
            yield new_finding(
                "disk-noexec",
                f"{space['path']} lies on a file system mounted noexec",
                f"one that programs and compiled kernels may be loaded from, for {space['for']}",
                "mount -o remount,exec and /etc/fstab, or set uv_venv_root or cache_dirs_root.",
            )
        if disk["exists"]:
            continue  # what is there already has its space
        wanted.setdefault(disk["device"], []).append({**space, **disk})
        files = disk.get("files_free")
        if files is not None and files < _RELEASE_FILES and space["for"].startswith("release "):
            yield new_finding(
                "disk-files",
                f"{files} inodes free below {space['path']}",
                f"{_RELEASE_FILES} for {space['for']}",
                "Remove files there, or put uv_venv_root on a file system with more inodes.",
            )
    for spaces in wanted.values():
        needed = sum(space["gib"] for space in spaces)
        free = spaces[0]["free"] / GIB
        if free < needed:
            parts = ", ".join(f"{space['gib']:g} for {space['for']}" for space in spaces)
            yield new_finding(
                "disk-full",
                f"{free:.1f} GiB free below {spaces[0]['path']}",
                f"{needed:g} GiB ({parts})",
                "Free or add space, or put uv_venv_root, hf_cache_root or cache_dirs_root on another file system.",
            )


def tmp(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Where Triton and torch load from what they compiled."""
    if facts["tmp"]["noexec"] and plan.get("instances"):
        yield new_finding(
            "tmp-noexec",
            "/tmp is mounted noexec",  # noqa: S108 - the directory itself
            "a directory that Triton and torch may load what they compiled from",
            "Set TMPDIR in environment of the instance to a directory below its cache, or mount -o remount,exec /tmp.",
        )


def memory(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Memory of the host."""
    wanted = plan["needs"]["memory_gib"]
    needed = sum(entry["gib"] for entry in wanted)
    total = facts["memory"]["total"] / GIB
    if total < needed:
        yield new_finding(
            "memory-small",
            f"{total:.1f} GiB of memory",
            f"{needed:g} GiB ({', '.join('{:g} for {}'.format(entry['gib'], entry['for']) for entry in wanted)})",
            "Add memory, or run fewer instances on this host.",
        )


def shm(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Shared memory of vLLM's processes."""
    shm = facts["shm"]["total"] / MIB
    least = plan["needs"]["shm_mib"]
    if shm < least:
        yield new_finding(
            "shm-small",
            f"/dev/shm holds {shm:.0f} MiB",  # noqa: S108 - the shared memory itself
            f"{least} MiB, for what vLLM's processes exchange",
            "mount -o remount,size=2G /dev/shm, and its size in /etc/fstab; for a container --shm-size=2g.",
        )


# -- network -------------------------------------------------------------------------------------------------------


def ports(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Who else holds a port of the plan."""
    for wanted in plan["needs"]["ports"]:
        own = wanted["address"]
        for listener in facts["listeners"]:
            unit = listener["unit"] or ""
            if listener["port"] != wanted["port"] or unit == wanted["unit"] or OUR_UNIT.fullmatch(unit):
                continue
            if not _meet(own, listener.get("addresses") or ["0.0.0.0"]):  # noqa: S104
                continue
            holder = listener["program"] or "a process of another namespace"
            pid = f" (process {listener['pid']}{', ' + unit if unit else ''})" if listener["pid"] else ""
            stop = f"systemctl disable --now {unit}" if unit.endswith(".service") else "Stop it"
            yield new_finding(
                "port-taken",
                f"port {wanted['port']} is held by {holder}{pid}",
                f"port {wanted['port']} for {wanted['for']}",
                f"{stop}, or set another port.",
            )


def _meet(own: str, others: Collection[str]) -> bool:
    """Whether a socket cannot be bound beside those of the same port; a name may resolve to any address."""
    return own in _ANY_ADDRESS or bool(_ANY_ADDRESS & set(others)) or own in others or not re.match(r"[\d:]", own)


def firewall(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Firewalls that cut a port which the plan opens."""
    opened = {entry["port"]: entry for entry in (plan.get("firewall") or {}).get("ports", ()) if entry["networks"]}
    programs = facts["firewall"]["programs"]
    for cut in facts["firewall"]["cut"]:
        entry = opened.get(cut["port"])
        if entry is None:
            continue
        number = cut["port"]
        commands = {
            "ufw": " and ".join(
                f"ufw allow from {network} to any port {number} proto tcp" for network in entry["networks"]
            ),
            "firewalld": f"firewall-cmd --permanent --add-port={number}/tcp && firewall-cmd --reload",
        }
        known = [commands[name] for name in programs if name in commands]
        yield new_finding(
            "firewall-foreign",
            f"chain {cut['chain']}{' (' + ', '.join(programs) + ')' if programs else ''} drops new connections to "
            f"port {number}",
            f"port {number} open to {', '.join(entry['networks'])} for {entry['for']}; every firewall must let it in",
            f"{' or '.join(known) or f'Accept tcp dport {number} in that chain'}, or remove that firewall.",
        )
