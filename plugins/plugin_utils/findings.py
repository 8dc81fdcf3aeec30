# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A host's facts compared with its plan: every finding at once, each with what was found, what is needed, a remedy.

Which findings there are, and how much each weighs, stands in catalogue/findings.yml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from .catalogue import COLLECTION, read_yaml
from .role_variables import nearest

try:
    from packaging.version import InvalidVersion, Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error


Finding = dict[str, str]
Plan = Mapping[str, Any]
Facts = Mapping[str, Any]

GIB = 1 << 30
MIB = 1 << 20
ERROR, WARNING, WAIVED = "error", "warning", "waived"
SEVERITIES = (ERROR, WARNING, WAIVED)
SUPPORTED = {("ubuntu", "24.04"), ("debian", "12"), ("debian", "13")}
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
# A GPU with more than this in use before anything of ours runs has another tenant (a bare context takes less).
_BUSY_MIB = 1024
# vLLM's default where serve.gpu-memory-utilization is not set (0.25.0 to 0.33.0).
_UTILIZATION = 0.92
# A release for the CPU has 35,000 files, one for CUDA more.
_RELEASE_FILES = 60_000
# Less than what a token or a certificate allows, more than what a slow connection takes.
_SKEW_S = 10.0
_OUR_UNIT = re.compile(r"vllm-[\w-]+\.service")
_ANY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not bound to


def known_findings() -> Mapping[str, Mapping[str, str]]:
    """Every finding by its identifier, with severity, meaning and remedy."""
    return read_yaml(COLLECTION / "catalogue" / "findings.yml")


def known_causes() -> list[dict[str, Any]]:
    """What failed starts are known by: id, pattern, what, remedy, and where that is known from."""
    return read_yaml(COLLECTION / "catalogue" / "causes.yml")


def compare(plan: Plan, facts: Facts, waived: Iterable[str] = (), now: float | None = None) -> list[Finding]:
    """All findings, errors first and waived ones last.

    Args:
        plan: the host's plan; ``needs``, ``packages``, ``releases`` and ``instances`` are read.
        facts: what the module ``host_probe`` returned for it.
        waived: identifiers of findings that the operator takes on.
        now: the control node's clock, not before the facts came back; without it clocks are not compared.

    Raises:
        ValueError: ``waived`` names a finding that does not exist.
    """
    found = _unreadable(facts)
    for parts, check in _CHECKS:
        if not set(parts) & set(facts.get("unknown") or {}):
            found += check(plan, facts)
    if now is not None and not (facts.get("unknown") or {}).get("time"):
        found += _clock(facts, now)
    return weighed(found, waived)


def weighed(findings: Iterable[Finding], waived: Iterable[str] = ()) -> list[Finding]:
    """Findings by severity, those that the operator takes on marked and last.

    Raises:
        ValueError: ``waived`` names a finding that does not exist.
    """
    taken_on = set(waived)
    known = known_findings()
    for name in sorted(taken_on - known.keys()):
        raise ValueError(f"preflight_waived names {name!r}, and there is no such finding: {nearest(name, known)}")
    marked = [{**finding, "severity": WAIVED} if finding["id"] in taken_on else finding for finding in findings]
    return sorted(marked, key=lambda finding: SEVERITIES.index(finding["severity"]))


def diagnose(plan: Plan, probe: Mapping[str, Any], waived: Iterable[str], now: float) -> list[Finding]:
    """What is wrong with one host: its inventory, its connection, and its facts against its plan.

    Args:
        plan: the host's plan, problems and all.
        probe: the result of the module ``host_probe``, or of Ansible where it could not run.
        waived: identifiers of findings that the operator takes on.
        now: the control node's clock, not before the facts came back.

    Raises:
        ValueError: ``waived`` names a finding that does not exist.
    """
    found = [
        _finding("inventory", f"{problem['where']} {problem['what']}", "an inventory that composes", problem["remedy"])
        for problem in plan["problems"]
    ]
    if "host" not in probe:
        found.append(
            _finding(
                "host-unreachable",
                str(probe.get("msg") or "Ansible did not reach it"),
                "a host that Ansible reaches as root",
                "Try `ansible <host> -b -m ansible.builtin.ping`; correct its address, user or key.",
            )
        )
        return weighed(found, waived)
    return weighed([*found, *compare(plan, probe["host"], (), now)], waived)


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


def table(findings: Iterable[Finding], hosts: int) -> str:
    """Findings of several hosts as text: each once, with its hosts; errors first, then how many there are.

    Args:
        findings: as diagnose() returns them, each with ``host``.
        hosts: how many hosts were looked at.
    """
    by_content: dict[tuple[str, ...], list[str]] = {}
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding["severity"])):
        content = tuple(finding[key] for key in ("severity", "id", "found", "needed", "remedy"))
        by_content.setdefault(content, []).append(finding["host"])
    lines: list[str] = []
    width = max((len(identifier) for _severity, identifier, *_rest in by_content), default=0)
    for (severity, identifier, found, needed, remedy), names in by_content.items():
        lines.append(f"{severity:<7}  {identifier:<{width}}  {', '.join(names)}")
        lines += [f"         found:  {found}", f"         needed: {needed}", f"         -> {remedy}"]
    counts = {severity: sum(content[0] == severity for content in by_content) for severity in SEVERITIES}
    said = [
        f"{count} {severity}{'s' if severity != WAIVED and count != 1 else ''}" for severity, count in counts.items()
    ]
    return "\n".join([*lines, f"{hosts} host{'s' if hosts != 1 else ''}: {', '.join(said)}"])


def _finding(identifier: str, found: str, needed: str, remedy: str) -> Finding:
    severity = known_findings()[identifier]["severity"]
    return {"id": identifier, "severity": severity, "found": found, "needed": needed, "remedy": remedy}


def _unreadable(facts: Facts) -> list[Finding]:
    return [
        _finding(
            "host-unreadable",
            f"{part}: {reason}",
            "a look at it, to say whether it fits the plan",
            "Run as root (become: true); else correct what the reason names.",
        )
        for part, reason in (facts.get("unknown") or {}).items()
    ]


# -- the system ----------------------------------------------------------------------------------------------------


def _system(plan: Plan, facts: Facts) -> Iterator[Finding]:
    system = facts["os"]
    if (system["id"], system["version"]) not in SUPPORTED:
        yield _finding(
            "os-untested",
            system["name"] or "an unknown system",
            "Ubuntu 24.04, Debian 12 or Debian 13",
            "Go on if you know the system; what was run where stands in docs/tested.md.",
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


def _systemd(_plan: Plan, facts: Facts) -> Iterator[Finding]:
    if not facts["systemd"]["running"]:
        yield _finding(
            "systemd-missing",
            "systemd is not running this host",
            "systemd as process 1, for units and timers",
            "Use a host, or a container started with systemd as its init.",
        )


def _selinux(_plan: Plan, facts: Facts) -> Iterator[Finding]:
    if facts["selinux"] == "enforcing":
        yield _finding(
            "selinux-enforcing",
            "SELinux enforces its policy",
            "a policy that lets the units use GPUs, caches and ports; the collection brings none",
            "Look at `ausearch -m avc -ts recent` after the first start and add what it shows, or `setenforce 0`.",
        )


def _clock(facts: Facts, now: float) -> Iterator[Finding]:
    """The clocks' difference is known within the time that the question took; only what lies outside it counts."""
    clock = facts["time"]
    remedy = "Install chrony, with a server that this host reaches (an air gap has one of its own), on every host."
    if clock["control"] is not None:
        behind, ahead = clock["control"] - clock["host"], clock["host"] - now
        if (difference := max(behind, ahead)) > _SKEW_S:
            yield _finding(
                "clock-skew",
                f"the clock is {difference:.0f} s {'behind' if behind > ahead else 'ahead of'} the control node's",
                f"less than {_SKEW_S:.0f} s",
                remedy,
            )
            return
    if clock["synchronised"] is False and facts.get("container") is None:  # a container has its machine's clock
        yield _finding(
            "clock-unsynchronised", "no time service keeps the kernel's clock in step", "one that does", remedy
        )


# -- what is installed ---------------------------------------------------------------------------------------------


def _python(plan: Plan, facts: Facts) -> Iterator[Finding]:
    for wanted in plan["needs"]["pythons"]:
        version = wanted["version"]
        if facts["pythons"].get(version) is None and not _obtainable(plan, facts, f"python{version}"):
            yield _finding(
                "python-missing",
                f"no python{version}, and apt knows no package python{version}",
                f"Python {version} for {wanted['for']}",
                f"Use a release for a Python that {(facts['os'] or {}).get('name') or 'this system'} has, or put an "
                "interpreter archive into the release (key interpreter).",
            )


def _packages(plan: Plan, facts: Facts) -> Iterator[Finding]:
    if plan["needs"]["apt_source"]:
        return  # apt has not read that mirror yet; host_base names what it lacks
    pythons = {f"python{wanted['version']}" for wanted in plan["needs"]["pythons"]}
    for package in plan["packages"]:
        name = package["name"]
        if name in pythons or _installed(facts, name) or _obtainable(plan, facts, name):
            continue
        yield _finding(
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


def _programs(plan: Plan, facts: Facts) -> Iterator[Finding]:
    for instance, wanted in _gpu_instances(plan):
        found = facts["programs"].get(instance["name"])
        if found is None:
            continue
        where = f"in the environment of instance {instance['name']}"
        path = instance.get("environment", {}).get("PATH", "")
        if (reason := _not_usable(found["cc"], "C compiler")) and not _comes_with_the_rollout(plan, facts, "gcc"):
            yield _finding(
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
                yield _finding(
                    "toolkit-missing",
                    f"{reason} {where} (PATH {path})",
                    f"nvcc and a C++ compiler for FlashInfer in {wanted['for']}, for vllm_toolchain is toolkit",
                    "Install the CUDA toolkit (nvcc on PATH or in /usr/local/cuda) and g++, or set "
                    "vllm_toolchain: none.",
                )
    for wanted in plan["needs"]["pythons"]:
        version = wanted["version"]
        python = facts["pythons"].get(version) if facts["pythons"] else None
        package = f"python{version}-dev"
        needed = any(entry["name"] == package for entry in plan["packages"])
        if python and not python["headers"] and needed and _installed(facts, package):
            yield _finding(
                "headers-missing",
                f"{python['path']} has no Python.h, although {package} is installed",
                f"the headers of the interpreter that {wanted['for']} is made with",
                f"Take {python['path']} off the system's PATH, so that the package's own interpreter is found.",
            )


def _not_usable(program: Mapping[str, Any] | None, what: str) -> str:
    if program is None:
        return f"no {what}"
    return "" if program["runs"] else f"{program['path']} does not run"


def _numa(plan: Plan, facts: Facts) -> Iterator[Finding]:
    for instance in plan.get("instances", ()):
        if instance["serve"].get("numa-bind") is not True:
            continue
        numactl = (facts["programs"].get(instance["name"]) or {}).get("numactl")
        if numactl is None and not _comes_with_the_rollout(plan, facts, "numactl"):
            yield _finding(
                "numa-bind-without-numactl",
                f"no numactl in the environment of instance {instance['name']}",
                "numactl, by which vLLM binds workers to the NUMA node of their GPU; without it nothing is bound",
                "Install numactl, or remove numa-bind from serve.",
            )
        topology = (facts["gpu"] or {}).get("topology") or {}
        unknown = [
            str(device["index"])
            for device in _used_devices(instance, (facts["gpu"] or {}).get("devices") or [])
            if device.get("numa_node") is None
            and not re.fullmatch(r"\d+", (topology.get(f"GPU{device['index']}") or {}).get("numa") or "")
        ]
        if unknown and not instance["serve"].get("numa-bind-nodes"):
            yield _finding(
                "numa-unknown",
                f"neither /sys nor nvidia-smi says which NUMA node GPU {', '.join(unknown)} is on",
                f"the nodes, for numa-bind of instance {instance['name']}",
                "Set serve.numa-bind-nodes, one node for each GPU, or remove numa-bind.",
            )


# -- space ---------------------------------------------------------------------------------------------------------


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
        programs = space["for"].startswith(("release ", "caches"))
        if disk["noexec"] and programs:
            yield _finding(
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
            yield _finding(
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
            yield _finding(
                "disk-full",
                f"{free:.1f} GiB free below {spaces[0]['path']}",
                f"{needed:g} GiB ({parts})",
                "Free or add space, or put uv_venv_root, hf_cache_root or cache_dirs_root on another file system.",
            )


def _tmp(plan: Plan, facts: Facts) -> Iterator[Finding]:
    if facts["tmp"]["noexec"] and plan.get("instances"):
        yield _finding(
            "tmp-noexec",
            "/tmp is mounted noexec",  # noqa: S108 - the directory itself
            "a directory that Triton and torch may load what they compiled from",
            "Set TMPDIR in environment of the instance to a directory below its cache, or mount -o remount,exec /tmp.",
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


def _shm(plan: Plan, facts: Facts) -> Iterator[Finding]:
    shm = facts["shm"]["total"] / MIB
    least = plan["needs"]["shm_mib"]
    if shm < least:
        yield _finding(
            "shm-small",
            f"/dev/shm holds {shm:.0f} MiB",  # noqa: S108 - the shared memory itself
            f"{least} MiB, for what vLLM's processes exchange",
            "mount -o remount,size=2G /dev/shm, and its size in /etc/fstab; for a container --shm-size=2g.",
        )


# -- network -------------------------------------------------------------------------------------------------------


def _ports(plan: Plan, facts: Facts) -> Iterator[Finding]:
    addresses = {f"vllm-{instance['name']}.service": instance["host"] for instance in plan.get("instances", ())}
    for wanted in plan["needs"]["ports"]:
        own = addresses.get(wanted["unit"], "0.0.0.0")  # noqa: S104 - compared with, not bound to
        for listener in facts["listeners"]:
            unit = listener["unit"] or ""
            if listener["port"] != wanted["port"] or unit == wanted["unit"] or _OUR_UNIT.fullmatch(unit):
                continue
            if not _meet(own, listener.get("addresses") or ["0.0.0.0"]):  # noqa: S104
                continue
            holder = listener["program"] or "a process of another namespace"
            pid = f" (process {listener['pid']}{', ' + unit if unit else ''})" if listener["pid"] else ""
            stop = f"systemctl disable --now {unit}" if unit.endswith(".service") else "Stop it"
            yield _finding(
                "port-taken",
                f"port {wanted['port']} is held by {holder}{pid}",
                f"port {wanted['port']} for {wanted['for']}",
                f"{stop}, or set another port.",
            )


def _meet(own: str, others: Collection[str]) -> bool:
    """Whether a socket cannot be bound beside those of the same port; a name may resolve to any address."""
    return own in _ANY_ADDRESS or bool(_ANY_ADDRESS & set(others)) or own in others or not re.match(r"[\d:]", own)


def _firewall(plan: Plan, facts: Facts) -> Iterator[Finding]:
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
        yield _finding(
            "firewall-foreign",
            f"chain {cut['chain']}{' (' + ', '.join(programs) + ')' if programs else ''} drops new connections to "
            f"port {number}",
            f"port {number} open to {', '.join(entry['networks'])} for {entry['for']}; every firewall must let it in",
            f"{' or '.join(known) or f'Accept tcp dport {number} in that chain'}, or remove that firewall.",
        )


# -- GPUs ----------------------------------------------------------------------------------------------------------


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
        driver = _version(gpu["driver"])
        if driver is None or driver < Version(wanted["version"]):
            yield _finding(
                "driver-old",
                f"NVIDIA driver {gpu['driver'] or 'unknown'}",
                f"{wanted['version']} or newer for variant {wanted['variant']} of release {wanted['for']}",
                f"Install driver {wanted['version']} or newer{_older_variant(plan, wanted, driver)}.",
            )


def _older_variant(plan: Plan, wanted: Mapping[str, Any], driver: Version | None) -> str:
    """The shipped releases that run with the driver as it is, of the same vLLM where there is one."""
    floors = read_yaml(COLLECTION / "catalogue" / "inventory.yml")["drivers"]
    fitting = {variant for variant, floor in floors.items() if driver is not None and driver >= Version(floor)}
    vllm = next((release["vllm"] for release in plan.get("releases", ()) if release["name"] == wanted["for"]), None)
    shipped = {path.stem: read_yaml(path) for path in sorted((COLLECTION / "catalogue" / "releases").glob("*.yml"))}
    others = {name: entry for name, entry in shipped.items() if entry["variant"] in fitting}
    if not others:
        return ""
    same = [name for name, entry in others.items() if entry["vllm"] == vllm]
    named = " or ".join(same or others)
    if same:
        return f", or choose release {named} of the same vLLM, which runs with this driver"
    return f", or choose release {named}, which runs with this driver, or define {vllm}'s of the same variant"


def _gpu_instances(plan: Plan) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each instance that runs on GPUs, with what it needs of them."""
    by_name = {f"instance {instance['name']}": instance for instance in plan.get("instances", ())}
    for wanted in plan["needs"]["gpus"]:
        if wanted["for"] in by_name:
            yield by_name[wanted["for"]], wanted


def _used_devices(instance: Mapping[str, Any], devices: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    named = instance.get("gpus") or []
    return [device for device in devices if not named or device["index"] in named or device["uuid"] in named]


def _gpus(plan: Plan, facts: Facts) -> Iterator[Finding]:
    devices = facts["gpu"]["devices"]
    if not devices:
        return
    instances = {wanted["for"]: instance for instance, wanted in _gpu_instances(plan)}
    used_by_any: dict[int, Mapping[str, Any]] = {}
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
        used_by_any |= {device["index"]: device for device in used}
        if len(used) < wanted["count"]:
            yield _finding(
                "gpu-few",
                f"{len(used)} GPUs",
                f"{wanted['count']} for {wanted['for']}",
                "Choose a profile for fewer GPUs, or another host.",
            )
        kinds = sorted({str(device["name"]) for device in used})
        if len(kinds) > 1 and wanted["count"] > 1:
            yield _finding(
                "gpu-mixed",
                f"{' and '.join(kinds)}",
                f"GPUs of one kind for {wanted['for']}",
                "Name equal GPUs in gpus of the instance.",
            )
        for device in used:
            yield from _gpu(device, wanted)
            yield from _tenants(device, wanted, instances.get(wanted["for"]), facts)
    for device in used_by_any.values():
        yield from _state(device)


def _gpu(device: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether a GPU is what an instance was made for."""
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
        )


def _tenants(
    device: Mapping[str, Any], wanted: Mapping[str, Any], instance: Mapping[str, Any] | None, facts: Facts
) -> Iterator[Finding]:
    """What others hold of a GPU's memory. vLLM refuses to start where less is free than its share of all of it."""
    ours = [process for process in device["processes"] if _is_ours(process)]
    others = [process for process in device["processes"] if process not in ours]
    if not device["processes"] and any(_OUR_UNIT.fullmatch(held["unit"] or "") for held in facts["listeners"] or ()):
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
        yield _finding(
            "gpu-memory-taken",
            f"{found}; {total - held} of {total} MiB are free",
            f"{share * total:.0f} MiB free for {wanted['for']} (gpu-memory-utilization {share:g})",
            f"Stop what uses it, choose another GPU, or set serve.gpu-memory-utilization to at most {most:g}.",
        )
    else:
        yield _finding(
            "gpu-busy",
            found,
            f"the GPU's memory and time for {wanted['for']}",
            "Stop what uses it, or choose another GPU.",
        )


def _is_ours(process: Mapping[str, Any]) -> bool:
    if process.get("unit"):
        return _OUR_UNIT.fullmatch(process["unit"]) is not None
    return "vllm" in (process["name"] or "").lower()


def _state(device: Mapping[str, Any]) -> Iterator[Finding]:
    """How a GPU is doing, whoever uses it."""
    index, name = device["index"], f"GPU {device['index']} ({device['name']})"
    if not device["persistence"]:
        yield _finding(
            "gpu-persistence",
            f"persistence mode of {name} is off",
            "a driver that stays loaded between starts",
            "systemctl enable --now nvidia-persistenced",
        )
    if (action := device.get("recovery")) is not None:
        yield _finding(
            "gpu-needs-reset",
            f"{name} asks for: {action}",
            "a GPU without a pending fault",
            f"nvidia-smi --gpu-reset -i {index} once nothing uses it, or reboot; then look for Xid in `dmesg`.",
        )
    if device.get("compute_mode") == "Prohibited":
        yield _finding(
            "gpu-compute-mode",
            f"compute mode of {name} is Prohibited",
            "Default, or Exclusive_Process",
            f"nvidia-smi -i {index} -c DEFAULT",
        )
    width, most = device.get("link_width"), device.get("link_width_most")
    if width is not None and most is not None and width < most:
        yield _finding(
            "gpu-link-narrow",
            f"the PCIe link of {name} has {width} of {most} lanes",
            f"{most} lanes",
            "Reseat the card or its riser, and look at the slot's lanes in the firmware.",
        )


def _fabric(plan: Plan, facts: Facts) -> Iterator[Finding]:
    gpu = facts["gpu"]
    fabric = gpu.get("fabric")
    if not plan["needs"]["gpus"] or not fabric:
        return
    install = f"Install nvidia-fabricmanager of version {gpu['driver']}, from where the driver came."
    if fabric["switches"]:
        if fabric["service"] is None:
            yield _finding(
                "fabric-manager-missing",
                f"{fabric['switches']} NVSwitches, and no nvidia-fabricmanager.service",
                "a fabric manager; without it CUDA fails with error 802",
                install,
            )
        elif fabric["service"] != "active":
            yield _finding(
                "fabric-manager-stopped",
                f"nvidia-fabricmanager.service is {fabric['service']}",
                "it running; without it CUDA fails with error 802",
                "systemctl enable --now nvidia-fabricmanager; why it fails stands in its journal.",
            )
        if fabric["version"] and gpu["driver"] and fabric["version"] != gpu["driver"]:
            yield _finding(
                "fabric-manager-version",
                f"fabric manager {fabric['version']}, driver {gpu['driver']}",
                "the same version of both",
                install,
            )
    for device in gpu["devices"]:
        state, status = device.get("fabric_state"), device.get("fabric_status")
        if state is not None and (state != "Completed" or status not in ("Success", None)):
            yield _finding(
                "fabric-not-ready",
                f"GPU {device['index']} ({device['name']}): fabric {state}, {status or 'no status'}",
                "Completed, Success; before that CUDA fails with error 802",
                "systemctl restart nvidia-fabricmanager, on a virtual machine the hypervisor's; then nvidia-smi -q.",
            )


# -- instances -----------------------------------------------------------------------------------------------------


def _instances(_plan: Plan, facts: Facts) -> Iterator[Finding]:
    causes = {cause["id"]: cause for cause in known_causes()}
    for name, found in (facts.get("instances") or {}).items():
        if found is None or found["active"] in ("active", "reloading"):
            continue
        if found["active"] is None:
            yield _finding(
                "host-unreadable",
                found["unreadable"],
                f"the state of vllm-{name}.service",
                "Run as root (become: true).",
            )
            continue
        restarts = f", started again {found['restarts']} times" if found["restarts"] else ""
        state = f"vllm-{name}.service is {found['active']} ({found['sub']}{restarts})"
        for cause in found["causes"]:
            known = causes[cause["id"]]
            yield {
                "id": cause["id"],
                "severity": ERROR,
                "found": f"{state}: {cause['line']}",
                "needed": known["what"],
                "remedy": known["remedy"].replace("<instance>", name),
            }
        if not found["causes"]:
            yield _without_cause(name, state, found)


def _without_cause(name: str, state: str, found: Mapping[str, Any]) -> Finding:
    failed = found["active"] == "failed" or found["restarts"] or found["result"] not in ("success", "", None)
    if failed:
        said = found["unreadable"] or " | ".join(found["lines"])
        return _finding(
            "instance-failed",
            f"{state}: {said}",
            "an instance that serves",
            f"journalctl -u vllm-{name}, or `ansible-playbook onprem.vllm.site` to start it again.",
        )
    if found["active"] == "activating":
        return _finding("instance-starting", state, "an instance that serves", "Ask again once it has loaded.")
    return _finding(
        "instance-stopped",
        state,
        "an instance that serves",
        f"systemctl start vllm-{name}, or remove it from vllm_instances.",
    )


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


# Each check with the parts of the facts that it cannot do without.
_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Plan, Facts], Iterable[Finding]]], ...] = (
    (("os", "machine", "glibc"), _system),
    (("systemd",), _systemd),
    (("selinux",), _selinux),
    (("pythons", "packages"), _python),
    (("packages",), _packages),
    (("programs", "packages"), _programs),
    (("programs", "packages"), _numa),
    (("disks",), _disk),
    (("tmp",), _tmp),
    (("memory",), _memory),
    (("shm",), _shm),
    (("listeners",), _ports),
    (("firewall",), _firewall),
    (("gpu",), _driver),
    (("gpu",), _gpus),
    (("gpu",), _fabric),
    (("instances",), _instances),
)
