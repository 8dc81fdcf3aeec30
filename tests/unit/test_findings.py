# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import (
    compare,
    diagnose,
    known_causes,
    known_findings,
    report,
    table,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import load_release
from ansible_collections.onprem.vllm.tests.unit.host_facts import GIB, MIB, device, disk, facts, program

ROOT = Path(__file__).parents[2]
BASE = {
    "vllm_mirror_url": "http://m",
    "vllm_client_networks": ["10.0.0.0/8"],
    "vllm_models": {
        name: {"directory": "/x"} for name in ("tiny-qwen3", "gemma-4-26b-a4b-it", "gemma-4-26b-a4b-it-assistant")
    },
}
CPU = compose_plan(
    "h",
    ["vllm"],
    {**BASE, "vllm_release": "0.28.0-cpu", "vllm_instances": {"glm": {"profile": "tiny-cpu", "port": 8000}}},
)
GPU = compose_plan(
    "h",
    ["vllm"],
    {
        **BASE,
        "vllm_release": "0.31.0-cu130",
        "vllm_instances": {"gemma": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [0]}},
    },
)
NUMA = copy.deepcopy(GPU)
NUMA["instances"][0]["serve"]["numa-bind"] = True
NUMA["packages"] = [package for package in NUMA["packages"] if package["name"] != "numactl"]
TOOLKIT = compose_plan(
    "h",
    ["vllm"],
    {
        **BASE,
        "vllm_release": "0.31.0-cu130",
        "vllm_toolchain": "toolkit",
        "vllm_instances": {"gemma": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [0]}},
    },
)
BOTH = [CPU["problems"], GPU["problems"]]


def tenant(memory_mib: int, name: str = "python3", unit: str | None = None) -> dict[str, Any]:
    """What another program holds of a GPU."""
    return {
        "memory_used_mib": memory_mib,
        "processes": [{"pid": 3, "name": name, "memory_mib": memory_mib, "unit": unit}],
    }


def proxied(
    litellm: dict[str, str] | None = None, silent: str | None = None, **instances: tuple[str, str]
) -> dict[str, Any]:
    """A proxy as host_probe sees it; each instance with its status and what its last check found."""
    runs = {"active": "active", "sub": "running", "result": "success", "restarts": 0}
    return {
        "units": {"onprem-vllm-haproxy.service": runs, "onprem-vllm-litellm@4001.service": {**runs, **(litellm or {})}},
        "instances": [
            {"name": name, "model": "m", "status": status, "check": check, "up": status.startswith("UP")}
            for name, (status, check) in instances.items()
        ],
        "silent": silent,
    }


def failed(active: str, *causes: str, **changes: Any) -> dict[str, Any]:
    """An instance that does not serve."""
    return {
        "active": active,
        "sub": {"activating": "auto-restart", "failed": "failed"}.get(active, "dead"),
        "result": "exit-code" if active != "inactive" else "success",
        "restarts": 0,
        "causes": [{"id": cause, "line": f"line of {cause}"} for cause in causes],
        "lines": ["the last line"],
        "unreadable": None,
        **changes,
    }


def listener(port: int, **changes: Any) -> dict[str, Any]:
    return {"port": port, "addresses": ["0.0.0.0"], "pid": 7, "program": "python3", "unit": None, **changes}


def test_the_plans_are_right() -> None:
    assert BOTH == [[], []]


@pytest.mark.parametrize("plan", [CPU, GPU, NUMA, TOOLKIT], ids=["cpu", "gpu", "numa", "toolkit"])
def test_a_host_that_has_everything_has_no_finding(plan: dict[str, Any]) -> None:
    assert compare(plan, facts(plan), now=1001.0) == []


MISSING = {"installed": None, "candidate": None}
CASES: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], Any], str]] = [
    ("architecture", CPU, lambda f: f.update(machine="aarch64"), "x86_64"),
    ("architecture", GPU, lambda f: f.update(machine="arm64"), "x86_64"),
    ("glibc-old", CPU, lambda f: f.update(glibc=[2, 31]), "glibc 2.31"),
    ("glibc-old", CPU, lambda f: f.update(glibc=None), "no glibc"),
    ("systemd-missing", CPU, lambda f: f.update(systemd={"running": False}), "systemd"),
    (
        "python-missing",
        CPU,
        lambda f: (f.update(pythons={"3.11": None}), f["packages"].update({"python3.11": MISSING})),
        "Python 3.11",
    ),
    ("package-missing", CPU, lambda f: f["packages"].update(libnuma1=MISSING), "libnuma1"),
    ("package-missing", GPU, lambda f: f["packages"].update({"python3.12-dev": MISSING}), "Python.h"),
    ("package-missing", GPU, lambda f: f["packages"].update(numactl=MISSING), "NUMA"),
    ("package-missing", GPU, lambda f: f["packages"].update(ffmpeg=MISSING), "host_base_apt_source"),
    ("disk-full", CPU, lambda f: [d.update(free=GIB) for d in f["disks"].values()], "1.0 GiB free"),
    ("disk-full", GPU, lambda f: [d.update(free=15 * GIB) for d in f["disks"].values()], "14 for release"),
    ("disk-read-only", CPU, lambda f: f["disks"]["/var/cache/vllm"].update(read_only=True), "/var/cache/vllm"),
    ("memory-small", CPU, lambda f: f["memory"].update(total=2 * GIB), "4 for instance glm"),
    ("shm-small", CPU, lambda f: f["shm"].update(total=64 * MIB), "64 MiB"),
    (
        "port-taken",
        CPU,
        lambda f: f["listeners"].append(listener(8000, unit="jupyter.service")),
        "python3 (process 7, jupyter.service)",
    ),
    (
        "port-taken",
        CPU,
        lambda f: f["listeners"].append(listener(8000, pid=None, program=None)),
        "another namespace",
    ),
    ("driver-old", GPU, lambda f: f["gpu"].update(driver="570.86.15"), "cu129"),
    ("driver-old", GPU, lambda f: f["gpu"].update(driver=None), "unknown"),
    ("gpu-unreadable", GPU, lambda f: f["gpu"].update(error="nvidia-smi: no", devices=[]), "nvidia-smi: no"),
    ("gpu-missing", GPU, lambda f: f["gpu"].update(devices=[]), "instance gemma"),
    ("gpu-unknown", GPU, lambda f: f["gpu"].update(devices=[device(1), device(2)]), "GPU 0"),
    ("gpu-mig", GPU, lambda f: f["gpu"].update(devices=[device(0, mig=True)]), "-mig 0"),
    ("gpu-memory-small", GPU, lambda f: f["gpu"].update(devices=[device(0, memory_mib=24576)]), "24.0 GiB"),
    ("gpu-generation", GPU, lambda f: f["gpu"].update(devices=[device(0, compute_capability="8.0")]), "8.9"),
    ("port-taken", CPU, lambda f: f["listeners"].append(listener(8000, addresses=["127.0.0.1"])), "port 8000"),
    ("port-taken", CPU, lambda f: f["listeners"].append(listener(8000, unit="sshd.service")), "disable --now sshd"),
    ("disk-noexec", CPU, lambda f: f["disks"]["/var/cache/vllm"].update(noexec=True, exists=True), "compiled kernels"),
    ("disk-files", CPU, lambda f: [d.update(files_free=9) for d in f["disks"].values()], "9 inodes"),
    ("driver-old", GPU, lambda f: f["gpu"].update(driver="470.57.02"), "Install driver 580 or newer."),
    ("driver-old", GPU, lambda f: f["gpu"].update(driver="nonsense"), "580"),
    ("compiler-missing", GPU, lambda f: f["programs"]["gemma"].update(cc=None), "no C compiler"),
    ("compiler-missing", GPU, lambda f: f["programs"]["gemma"].update({"cc": program("/x/cc", runs=False)}), "/x/cc"),
    ("headers-missing", GPU, lambda f: f["pythons"]["3.12"].update(headers=False), "Python.h"),
    ("toolkit-missing", TOOLKIT, lambda f: f["programs"]["gemma"].update(nvcc=None), "no nvcc"),
    ("toolkit-missing", TOOLKIT, lambda f: f["programs"]["gemma"].update({"c++": None}), "no C++ compiler"),
    (
        "toolkit-missing",
        TOOLKIT,
        lambda f: f["programs"]["gemma"].update({"c++": None, "nvcc": program("/usr/local/cuda/bin/nvcc", runs=False)}),
        "nvcc does not run and no C++ compiler",
    ),
    ("numa-bind-without-numactl", NUMA, lambda f: f["programs"]["gemma"].update(numactl=None), "nothing is bound"),
    ("gpu-memory-taken", GPU, lambda f: f["gpu"].update(devices=[device(0, **tenant(30000))]), "at most 0.34"),
    (
        "gpu-memory-taken",
        GPU,
        lambda f: f["gpu"].update(devices=[device(0, memory_used_mib=20000)]),  # a program of another namespace
        "does not name",
    ),
    ("gpu-needs-reset", GPU, lambda f: f["gpu"].update(devices=[device(0, recovery="Reset")]), "asks for: Reset"),
    ("gpu-compute-mode", GPU, lambda f: f["gpu"].update(devices=[device(0, compute_mode="Prohibited")]), "-c DEFAULT"),
    (
        "fabric-manager-missing",
        GPU,
        lambda f: f["gpu"].update(fabric={"switches": 4, "service": None, "version": None}),
        "error 802",
    ),
    (
        "fabric-manager-stopped",
        GPU,
        lambda f: f["gpu"].update(fabric={"switches": 4, "service": "failed", "version": "580.159.04"}),
        "is failed",
    ),
    (
        "fabric-manager-version",
        GPU,
        lambda f: f["gpu"].update(fabric={"switches": 4, "service": "active", "version": "580.95.05"}),
        "fabric manager 580.95.05, driver 580.159.04",
    ),
    (
        "fabric-not-ready",
        GPU,
        lambda f: f["gpu"].update(
            fabric={"switches": 0, "service": None, "version": None},
            devices=[device(0, fabric_state="In Progress")],
        ),
        "In Progress",
    ),
    (
        "fabric-not-ready",
        GPU,
        lambda f: f["gpu"].update(
            fabric={"switches": 0, "service": None, "version": None},
            devices=[device(0, fabric_state="Completed", fabric_status="Insufficient Resources")],
        ),
        "Insufficient Resources",
    ),
    (
        "firewall-foreign",
        CPU,
        lambda f: f.update(
            firewall={"tables": [], "programs": ["ufw"], "cut": [{"port": 8000, "chain": "ip filter INPUT"}]}
        ),
        "ufw allow from 10.0.0.0/8 to any port 8000 proto tcp",
    ),
    (
        "firewall-foreign",
        CPU,
        lambda f: f.update(
            firewall={"tables": [], "programs": ["firewalld"], "cut": [{"port": 8000, "chain": "inet firewalld x"}]}
        ),
        "--add-port=8000/tcp",
    ),
    (
        "firewall-foreign",
        CPU,
        lambda f: f.update(firewall={"tables": [], "programs": [], "cut": [{"port": 8000, "chain": "inet own in"}]}),
        "Accept tcp dport 8000",
    ),
    ("start-port-taken", CPU, lambda f: f.update(instances={"glm": failed("failed", "start-port-taken")}), "line of"),
    (
        "start-out-of-gpu-memory",
        CPU,
        lambda f: f.update(instances={"glm": failed("activating", "start-out-of-gpu-memory", restarts=3)}),
        "started again 3 times",
    ),
    ("start-no-space", CPU, lambda f: f.update(instances={"glm": failed("inactive", "start-no-space")}), "df -h"),
    ("instance-failed", CPU, lambda f: f.update(instances={"glm": failed("failed")}), "the last line"),
    (
        "instance-failed",
        CPU,
        lambda f: f.update(instances={"glm": failed("failed", unreadable="the journal cannot be read: no")}),
        "cannot be read",
    ),
    (
        "proxy-failed",
        CPU,
        lambda f: f.update(proxy=proxied(litellm={"active": "failed", "sub": "failed", "result": "exit-code"})),
        "onprem-vllm-litellm@4001.service is failed (failed, exit-code)",
    ),
    ("proxy-failed", CPU, lambda f: f.update(proxy=proxied(silent="HAProxy does not answer")), "does not answer"),
    (
        "proxy-model-away",
        CPU,
        lambda f: f.update(proxy=proxied(one=("DOWN", "Layer4 timeout"), two=("DRAIN", ""))),
        "one is DOWN: Layer4 timeout, two is DRAIN",
    ),
]
WARNINGS: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], Any], str]] = [
    ("selinux-enforcing", CPU, lambda f: f.update(selinux="enforcing"), "ausearch"),
    ("os-untested", CPU, lambda f: f.update(os={"id": "rhel", "version": "9.5", "name": ""}), "unknown system"),
    ("clock-skew", CPU, lambda f: f["time"].update(host=900.0), "100 s behind"),
    ("clock-skew", CPU, lambda f: f["time"].update(host=4000.0), "2999 s ahead of"),
    ("clock-unsynchronised", CPU, lambda f: f["time"].update(synchronised=False), "chrony"),
    ("tmp-noexec", CPU, lambda f: f["tmp"].update(noexec=True), "TMPDIR"),
    (
        "numa-unknown",
        NUMA,
        lambda f: (f["gpu"].update(devices=[device(0, numa_node=None)]), f["numa"].append({})),
        "numa-bind-nodes",
    ),
    ("gpu-busy", GPU, lambda f: f["gpu"].update(devices=[device(0, **tenant(2000))]), "2000 MiB in use by python3 (3)"),
    ("gpu-persistence", GPU, lambda f: f["gpu"].update(devices=[device(0, persistence=False)]), "nvidia-persistenced"),
    ("gpu-link-narrow", GPU, lambda f: f["gpu"].update(devices=[device(0, link_width=4)]), "4 of 16 lanes"),
    (
        "gpu-architecture",
        GPU,
        lambda f: f["gpu"].update(devices=[device(0, compute_capability="13.0")]),
        "GPU 0 (NVIDIA L40S) is sm130",
    ),
    ("instance-starting", CPU, lambda f: f.update(instances={"glm": failed("activating", result="success")}), "loaded"),
    ("instance-stopped", CPU, lambda f: f.update(instances={"glm": failed("inactive")}), "systemctl start vllm-glm"),
    (
        "host-unreadable",
        CPU,
        lambda f: f.update(memory=None, unknown={"memory": "PermissionError: /proc/meminfo"}),
        "memory: PermissionError",
    ),
    (
        "host-unreadable",
        CPU,
        lambda f: f.update(instances={"glm": {**failed("failed", unreadable="no systemd"), "active": None}}),
        "no systemd",
    ),
    (
        "proxy-keys-old",
        CPU,
        lambda f: f.update(proxy={**proxied(), "keys": "connection refused"}),
        "do not reach the proxy: connection refused",
    ),
    (
        "proxy-instance-away",
        CPU,
        lambda f: f.update(proxy=proxied(one=("DOWN", "Layer4 timeout"), two=("UP", ""))),
        "its firewall (vllm_instance_networks) lets",
    ),
    (
        "proxy-instance-away",
        CPU,
        lambda f: f.update(proxy=proxied(one=("UP 1/2", ""), two=("DRAIN", ""))),
        "the next site.yml of its host puts two back",
    ),
]


@pytest.mark.parametrize(
    ("identifier", "plan", "change", "part"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_one_thing_wrong_is_one_error_with_its_remedy(
    identifier: str, plan: dict[str, Any], change: Callable[[dict[str, Any]], Any], part: str
) -> None:
    found = compare(plan, facts(plan, change), now=1001.0)
    assert [finding["id"] for finding in found] == [identifier], found
    [finding] = found
    assert finding["severity"] == "error"
    assert part in " ".join(finding.values())
    assert all(finding[key] for key in ("found", "needed", "remedy"))


@pytest.mark.parametrize(
    ("identifier", "plan", "change", "part"), WARNINGS, ids=[f"{case[0]}-{i}" for i, case in enumerate(WARNINGS)]
)
def test_one_thing_doubtful_is_one_warning(
    identifier: str, plan: dict[str, Any], change: Callable[[dict[str, Any]], Any], part: str
) -> None:
    found = compare(plan, facts(plan, change), now=1001.0)
    assert [(finding["id"], finding["severity"]) for finding in found] == [(identifier, "warning")], found
    assert part in " ".join(found[0].values())


def test_every_finding_has_a_case() -> None:
    """The rest is tested below, in test_findings_model.py, and what facts decide in test_plan_facts.py."""
    causes = {cause["id"] for cause in known_causes()}
    covered = {case[0] for case in [*CASES, *WARNINGS]} - causes
    elsewhere = {
        *(name for name in known_findings() if name.startswith("model-")),
        "facts-missing",
        "gpu-few",
        "gpu-links-slow",
        "gpu-mixed",
        "gpu-shared",
        "host-unreachable",
        "inventory",
        "inventory-doubtful",
    }
    assert covered | elsewhere == set(known_findings())
    assert not covered & elsewhere
    assert len(CASES) + len(WARNINGS) >= 60


def test_a_gpu_that_two_instances_name_in_different_ways() -> None:
    """The plan cannot see it: only the host knows which UUID index 0 has."""
    wanted = {"profile": "gemma-4-26b-l40s", "serve": {}}
    for names, shared in ((["GPU-00000000"], True), (["GPU-00000001"], False)):
        instances = {"a": {**wanted, "port": 8000, "gpus": [0]}, "b": {**wanted, "port": 8001, "gpus": names}}
        plan = compose_plan("h", ["vllm"], {**BASE, "vllm_release": "0.31.0-cu130", "vllm_instances": instances})
        assert plan["problems"] == []
        two = facts(plan, lambda f: f["gpu"].update(devices=[device(0), device(1)]))
        found = compare(plan, two)
        assert [finding["id"] for finding in found] == ["gpu-shared"] * shared
        if shared:
            assert found[0]["found"] == "GPU 0 (GPU-00000000) is named by instance a and by instance b"


def test_gpus_of_two_kinds_for_one_instance() -> None:
    plan = copy.deepcopy(GPU)
    plan["needs"]["gpus"] = [{**plan["needs"]["gpus"][0], "count": 2, "named": []}]
    mixed = facts(plan, lambda f: f["gpu"].update(devices=[device(0), device(1, name="NVIDIA H200")]))
    assert [finding["id"] for finding in compare(plan, mixed)] == ["gpu-mixed"]


def test_an_old_driver_names_the_release_that_would_run() -> None:
    plan = compose_plan(
        "h",
        ["vllm"],
        {
            **BASE,
            "vllm_release": "0.28.0-cu130",
            "vllm_instances": {"g": {"profile": "gemma-4-26b-l40s", "port": 8000}},
        },
    )
    assert plan["problems"] == []
    [finding] = compare(plan, facts(plan, lambda f: f["gpu"].update(driver="550.54.15")))
    assert "release 0.28.0-cu129 of the same vLLM" in finding["remedy"]
    # Which the plan would refuse before that: it has no lock yet.
    assert "after make lock RELEASE=0.28.0-cu129" in finding["remedy"]
    [finding] = compare(GPU, facts(GPU, lambda f: f["gpu"].update(driver="550.54.15")))  # 0.31.0 has no such variant
    assert "0.28.0-cu129" in finding["remedy"]
    assert "same vLLM" not in finding["remedy"]


MIG = device(
    0,
    mig=True,
    mig_devices=[
        {"uuid": "MIG-00000000", "number": 0, "memory_mib": 46000, "memory_used_mib": 16, "name": "MIG 3g.71gb"},
        {"uuid": "MIG-11111111", "number": 1, "memory_mib": 18176, "memory_used_mib": 9000, "name": "MIG 1g.18gb"},
    ],
)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (["MIG-00000000"], []),
        (["MIG-11111111"], ["gpu-memory-small", "gpu-memory-taken"]),
        (["MIG-22222222"], ["gpu-unknown"]),
        ([0], ["gpu-mig"]),
        ([], ["gpu-mig"]),
    ],
)
def test_a_mig_device_counts_by_itself_and_a_cut_gpu_for_none(named: list[Any], found: list[str]) -> None:
    plan = copy.deepcopy(GPU)
    plan["needs"]["gpus"][0]["named"] = plan["instances"][0]["gpus"] = named
    findings = compare(plan, facts(plan, lambda f: f["gpu"].update(devices=[MIG])))
    assert [one["id"] for one in findings] == found
    if found == ["gpu-mig"]:
        assert "(MIG-00000000, MIG-11111111)" in findings[0]["remedy"]


def test_a_gpu_too_small_for_the_estimate_where_the_profile_names_no_size() -> None:
    profile = {"extends": "gemma-4-26b-l40s", "hardware": {"gpu_memory_gib": None}}
    made = compose_plan(
        "h",
        ["vllm"],
        {
            **BASE,
            "vllm_release": "0.31.0-cu130",
            "vllm_profiles": {"mine": profile},
            "vllm_instances": {"gemma": {"profile": "mine", "port": 8000}},
        },
    )
    assert made["problems"] == []
    least = made["estimates"][0]["least_gpu_memory_gib"]
    sizes = {least * 0.9: ["gpu-memory-small"], least * 0.97: [], least: []}  # what the estimate is not sure of passes
    for gib, wanted in sizes.items():
        host = facts(made, lambda f, gib=gib: f["gpu"].update(devices=[device(0, memory_mib=int(gib * 1024))]))
        assert [one["id"] for one in compare(made, host)] == wanted, gib
    assert (
        f"{least:g} GiB for one sequence"
        in compare(made, facts(made, lambda f: f["gpu"].update(devices=[device(0, memory_mib=16384)])))[0]["needed"]
    )


def topology(*rows: str) -> dict[str, Any]:
    """Of a matrix of links, one row for each GPU."""
    return {
        f"GPU{one}": {"links": {f"GPU{other}": kind for other, kind in enumerate(row.split()) if kind != "X"}}
        for one, row in enumerate(rows)
    }


SOCKETS = topology("X NODE SYS SYS", "NODE X SYS SYS", "SYS SYS X NODE", "SYS SYS NODE X")
BRIDGES = topology("X PHB NV4 SYS", "PHB X SYS NV4", "NV4 SYS X PHB", "SYS NV4 PHB X")
SWITCHED = topology("X NV18 NV18 NV18", "NV18 X NV18 NV18", "NV18 NV18 X NV18", "NV18 NV18 NV18 X")


@pytest.mark.parametrize(
    ("linked", "named", "better"),
    [
        (SOCKETS, [0, 2], "[0, 1]"),
        (SOCKETS, [0, 1], None),
        (SOCKETS, [0, 1, 2, 3], None),  # there is no other choice
        (SOCKETS, [], None),
        (BRIDGES, [0, 1], "[0, 2]"),
        (BRIDGES, [], "[0, 2]"),
        (BRIDGES, [1, 3], None),
        (SWITCHED, [0, 3], None),
        ({}, [0, 2], None),
    ],
)
def test_gpus_that_are_linked_slowly_where_others_are_linked_better(
    linked: dict[str, Any], named: list[int], better: str | None
) -> None:
    plan = copy.deepcopy(GPU)
    plan["needs"]["gpus"][0]["named"] = plan["instances"][0]["gpus"] = named
    plan["instances"][0]["serve"]["tensor-parallel-size"] = len(named) or 2
    devices = [device(number) for number in range(4)]
    found = compare(plan, facts(plan, lambda f: f["gpu"].update(devices=devices, topology=linked)))
    assert [one["id"] for one in found] == ["gpu-links-slow"] * bool(better)
    if better:
        assert f"gpus: {better}" in found[0]["remedy"]


def test_gpus_of_another_instance_are_not_offered() -> None:
    plan = copy.deepcopy(GPU)
    other = {**copy.deepcopy(plan["instances"][0]), "name": "other", "gpus": [1]}
    plan["instances"][0] |= {"gpus": [0, 2]}
    plan["instances"][0]["serve"]["tensor-parallel-size"] = 2
    plan["instances"].append(other)
    plan["needs"]["gpus"][0]["named"] = [0, 2]
    plan["needs"]["gpus"].append({**plan["needs"]["gpus"][0], "named": [1], "for": "instance other"})
    plan["estimates"] = []
    devices = [device(number) for number in range(4)]
    found = compare(plan, facts(plan, lambda f: f["gpu"].update(devices=devices, topology=SOCKETS)))
    assert [one["remedy"] for one in found] == ["Set gpus: [2, 3], which are."]


def test_too_few_gpus() -> None:
    plan = copy.deepcopy(GPU)
    plan["needs"]["gpus"] = [{**plan["needs"]["gpus"][0], "count": 8, "named": []}]
    assert [finding["id"] for finding in compare(plan, facts(plan))] == ["gpu-few"]


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["packages"].update({"python3.11": {"installed": None, "candidate": None}}),  # built from source
        lambda f: (
            f.update(pythons={"3.11": None}),
            f["packages"].update({"python3.11": {"installed": None, "candidate": "1"}}),
        ),
        lambda f: f["packages"].update(libnuma1={"installed": None, "candidate": "2"}),  # host_base installs it
        lambda f: f["listeners"].append(listener(8000, unit="vllm-glm.service")),
        lambda f: f["listeners"].append(listener(8000, unit="vllm-old.service")),
        lambda f: f["listeners"].append(listener(9100)),
        lambda f: [d.update(free=0, files_free=0, exists=True) for d in f["disks"].values()],  # all is there already
        lambda f: [d.update(files_free=None) for d in f["disks"].values()],  # btrfs counts no inodes
        lambda f: f["gpu"].update(devices=[], driver=None, error="none"),  # a CPU profile asks for none
        lambda f: f["time"].update(host=1000.9),  # within the time that the question took
        lambda f: f["time"].update(control=None),
        lambda f: f.update(container="podman", time={"host": 1000, "control": 999, "synchronised": False}),
        lambda f: f["firewall"].update(cut=[{"port": 9, "chain": "ip filter INPUT"}]),  # not opened by the plan
        lambda f: f["firewall"].update(tables=None),
        lambda f: f.update(selinux="permissive"),
        lambda f: f.update(instances={"glm": None}),  # a bare host
        lambda f: f.update(instances={"glm": failed("active")}),
        lambda f: f.update(proxy=proxied(one=("UP", "Layer7 check passed"))),
    ],
)
def test_what_is_no_finding(change: Callable[[dict[str, Any]], Any]) -> None:
    assert compare(CPU, facts(CPU, change), now=1001.0) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["programs"].clear(),
        # host_base installs them: what they bring is not there yet.
        lambda f: (
            f["programs"]["gemma"].update({"cc": None, "numactl": None}),
            f["packages"].update(
                gcc={"installed": None, "candidate": "1"}, numactl={"installed": None, "candidate": "1"}
            ),
        ),
        lambda f: (
            f["pythons"]["3.12"].update(headers=False),
            f["packages"].update({"python3.12-dev": {"installed": None, "candidate": "1"}}),
        ),
        lambda f: f["gpu"].update(devices=[device(0, **tenant(44000, "VLLM::EngineCore", "vllm-gemma.service"))]),
        lambda f: f["gpu"].update(devices=[device(0, **tenant(44000, "VLLM::EngineCore"))]),
        lambda f: f["gpu"].update(devices=[device(0, **tenant(300))]),  # a bare context
        lambda f: f["gpu"].update(devices=[device(0), device(1, mig=True, **tenant(44000))]),  # not ours to use
        lambda f: f["gpu"].update(devices=[device(0, link_width=None, fabric_state="Completed")]),
        # In a container nvidia-smi names no process: what is in use is that of the instance that serves.
        lambda f: (
            f["gpu"].update(devices=[device(0, memory_used_mib=44000)]),
            f["listeners"].append(listener(8000, unit="vllm-gemma.service")),
        ),
    ],
)
def test_what_is_no_finding_of_a_gpu_host(change: Callable[[dict[str, Any]], Any]) -> None:
    assert compare(GPU, facts(GPU, change)) == []


def test_a_foreign_program_named_like_ours_is_known_by_its_unit() -> None:
    busy = tenant(44000, "VLLM::EngineCore", "somebody-else.service")
    found = compare(GPU, facts(GPU, lambda f: f["gpu"].update(devices=[device(0, **busy)])))
    assert [finding["id"] for finding in found] == ["gpu-memory-taken"]


def test_a_port_of_another_address_is_free() -> None:
    plan = copy.deepcopy(CPU)
    plan["needs"]["ports"][0]["address"] = "10.0.0.5"
    taken = {address: [listener(8000, addresses=[address])] for address in ("127.0.0.1", "10.0.0.5", "0.0.0.0", "::")}
    assert {
        address: [finding["id"] for finding in compare(plan, facts(plan, lambda f, h=held: f.update(listeners=h)))]
        for address, held in taken.items()
    } == {"127.0.0.1": [], "10.0.0.5": ["port-taken"], "0.0.0.0": ["port-taken"], "::": ["port-taken"]}


def test_a_part_that_is_unknown_is_said_and_the_rest_is_compared() -> None:
    good = facts(CPU)
    for part in set(good) - {"unknown"}:
        broken = facts(CPU, lambda f, part=part: f.update({part: None, "unknown": {part: "no"}}))
        assert [finding["id"] for finding in compare(CPU, broken, now=1001.0)] == ["host-unreadable"], part


def test_space_is_counted_per_file_system() -> None:
    """Three needs that each fit may not fit together."""
    paths = [space["path"] for space in CPU["needs"]["disk"]]
    assert len(paths) == 3
    one = facts(CPU, lambda f: f["disks"].update({path: disk(6) for path in paths}))
    three = facts(CPU, lambda f: f["disks"].update({path: disk(6, device=i) for i, path in enumerate(paths)}))
    assert [finding["id"] for finding in compare(CPU, one)] == ["disk-full"]
    assert compare(CPU, three) == []


def test_an_apt_source_to_come_may_have_what_apt_does_not_know_yet() -> None:
    plan = compose_plan(
        "h",
        ["vllm"],
        {
            **BASE,
            "vllm_release": "0.28.0-cpu",
            "vllm_instances": {"glm": {"profile": "tiny-cpu", "port": 8000}},
            "host_base_apt_source": {"uris": ["http://apt"], "suites": ["bookworm"]},
        },
    )
    assert plan["problems"] == []
    bare = facts(
        plan, lambda f: (f.update(pythons={"3.11": None}), f["packages"].update(dict.fromkeys(f["packages"], MISSING)))
    )
    assert compare(plan, bare) == []


def test_warnings() -> None:
    def change(f: dict[str, Any]) -> None:
        f["os"] = {"id": "fedora", "version": "43", "name": "Fedora 43"}
        f["gpu"]["devices"] = [
            device(0, memory_used_mib=2100, processes=[{"pid": 3, "name": "python3", "memory_mib": 2000}])
        ]

    found = compare(GPU, facts(GPU, change))
    assert {finding["id"]: finding["severity"] for finding in found} == {
        "os-untested": "warning",
        "gpu-busy": "warning",
    }


def test_a_release_that_says_nothing_is_for_all_gpus() -> None:
    plan = copy.deepcopy(GPU)
    plan["needs"]["gpus"][0]["architectures"] = []
    newer = facts(plan, lambda f: f["gpu"].update(devices=[device(0, compute_capability="13.0")]))
    assert compare(plan, newer) == []


def test_all_findings_at_once_errors_first() -> None:
    def change(f: dict[str, Any]) -> None:
        f.update(os={"id": "", "version": "", "name": ""}, machine="aarch64", glibc=[2, 28], pythons={"3.11": None})
        f["packages"] = {}
        f["memory"]["total"] = f["shm"]["total"] = 0
        f["disks"] = {path: disk(0) for path in f["disks"]}

    found = compare(CPU, facts(CPU, change))
    assert {finding["id"] for finding in found} >= {
        *("architecture", "glibc-old", "python-missing", "package-missing", "memory-small", "shm-small", "disk-full"),
        "os-untested",
    }
    severities = [finding["severity"] for finding in found]
    assert severities == sorted(severities)


def test_a_waived_finding_is_said_last_and_does_not_stop() -> None:
    small = facts(CPU, lambda f: (f["memory"].update(total=GIB), f.update(selinux="enforcing")))
    found = compare(CPU, small, ["memory-small"])
    assert [(finding["id"], finding["severity"]) for finding in found] == [
        ("selinux-enforcing", "warning"),
        ("memory-small", "waived"),
    ]
    assert "waived memory-small  [h]" in report("h", found)
    assert {finding["severity"] for finding in compare(CPU, small, ["memory-small", "selinux-enforcing"])} == {"waived"}
    assert compare(CPU, small, ["disk-full"])[0]["severity"] == "error"


def test_what_the_probes_of_a_release_let_pass_is_said_waived_errors_as_such() -> None:
    told = {"found": "a module is missing", "needed": "it", "remedy": "Stage it."}
    probes = [{"id": "import", "severity": "error", **told}, {"id": "versions-agree", "severity": "warning", **told}]
    found = compare(CPU, facts(CPU, lambda f: f.update(instances={"glm": failed("active", probes=probes)})))
    assert [(one["id"], one["severity"]) for one in found] == [("versions-agree", "warning"), ("import", "waived")]
    assert found[0]["needed"] == "it, for instance glm"


def test_a_waiver_of_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'memory-smal'.*did you mean memory-small"):
        compare(CPU, facts(CPU), ["memory-smal"])


def test_diagnosis_of_hosts_that_cannot_be_compared() -> None:
    [finding] = diagnose(CPU, {"unreachable": True, "msg": "no route to host"}, [], 0.0)
    assert (finding["id"], finding["severity"], finding["found"]) == ("host-unreachable", "error", "no route to host")
    assert diagnose(CPU, {}, [], 0.0)[0]["id"] == "host-unreachable"
    wrong = {**CPU, "problems": [{"where": "vllm_mirror_url", "what": "is not set", "remedy": "Set it."}]}
    doubtful = {**CPU, "warnings": wrong["problems"]}
    assert [finding["id"] for finding in diagnose(doubtful, {"host": facts(CPU)}, [], 1001.0)] == ["inventory-doubtful"]
    [finding] = diagnose(wrong, {"host": facts(CPU)}, [], 1001.0)
    assert (finding["id"], finding["found"], finding["remedy"]) == (
        "inventory",
        "vllm_mirror_url is not set",
        "Set it.",
    )


def test_what_one_host_s_inventory_says_does_not_end_the_diagnosis() -> None:
    """Its other findings are told, and so are those of all other hosts."""
    text = copy.deepcopy(GPU)
    text["needs"]["gpus"][0]["compute_capability"] = "sm89"
    found = diagnose(
        {**text, "problems": [], "warnings": GPU["warnings"]}, {"host": facts(GPU)}, ["memory-smal"], 1001.0
    )
    (wrong,) = [finding for finding in found if finding["severity"] == "error"]
    assert wrong["id"] == "inventory"
    assert "sm89" in wrong["found"]


def test_table_names_each_finding_once_with_its_hosts() -> None:
    found = [
        {"host": host, **finding}
        for host in ("a", "b")
        for finding in compare(CPU, facts(CPU, lambda f: f.update(glibc=[2, 31])))
    ]
    text = table(found, 3)
    assert text.count("glibc-old") == 1
    assert "error    glibc-old  a, b" in text
    assert text.splitlines()[-1] == "3 hosts: 1 error, 0 warnings, 0 waived"
    assert table([], 1) == "1 host: 0 errors, 0 warnings, 0 waived"
    assert json.loads(json.dumps(found)) == found


def test_report() -> None:
    text = report("glm1", compare(CPU, facts(CPU, lambda f: f.update(glibc=[2, 31]))))
    assert text.splitlines()[0] == "error glibc-old  [glm1]"
    assert text.splitlines()[-1].startswith("    -> Use a newer")
    assert report("glm1", []) == ""


def test_the_needs_are_those_of_the_release() -> None:
    release = load_release("0.28.0-cpu")
    assert CPU["needs"]["platforms"] == [
        {"machine": release.machine, "glibc": list(release.glibc), "for": "release 0.28.0-cpu"}
    ]
    assert GPU["needs"]["drivers"] == [{"version": "580", "variant": "cu130", "for": "0.31.0-cu130"}]


def in_document(kind: str) -> str:
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    return text[text.index(f"## {kind}") :].split("\n## ", 1)[0]


def test_the_document_lists_every_finding_with_its_weight_meaning_and_remedy() -> None:
    listed = "".join(
        f"| `{name}` | {entry['severity']} | {entry['means']} | {entry['remedy']} |\n"
        for name, entry in known_findings().items()
    )
    assert listed in in_document("Findings")


def test_the_document_lists_every_cause() -> None:
    listed = "".join(f"| `{cause['id']}` | {cause['what']} | {cause['remedy']} |\n" for cause in known_causes())
    assert listed in in_document("Causes of a failed start")


def test_the_code_knows_no_other_findings() -> None:
    """Every identifier stands somewhere in the code, and none there is missing in the catalogue."""
    text = "".join(path.read_text("utf-8") for path in (ROOT / "plugins" / "plugin_utils").glob("findings*.py"))
    used = set(re.findall(r'new_finding\(\s*"([a-z-]+)"', text)) | {"inventory", "inventory-doubtful"}  # in a loop
    assert used == set(known_findings())
    assert not {cause["id"] for cause in known_causes()} & used


def test_findings_and_causes_have_all_their_parts() -> None:
    for name, entry in known_findings().items():
        assert set(entry) == {"severity", "means", "remedy"}, name
        assert entry["severity"] in ("error", "warning"), name
    ids = [cause["id"] for cause in known_causes()]
    assert len(ids) == len(set(ids))
    for cause in known_causes():
        assert (
            {"id", "pattern", "what", "remedy", "source"}
            <= set(cause)
            <= {*("id", "pattern", "what", "remedy", "source", "symptom")}
        )


def test_waivers_are_checked_in_the_plan_already() -> None:
    spec = yaml.safe_load((ROOT / "roles/preflight/meta/argument_specs.yml").read_text(encoding="utf-8"))
    waived = spec["argument_specs"]["main"]["options"]["preflight_waived"]
    assert waived["choices"] == list(known_findings())
