# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import compare, report
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import load_release

GIB, MIB = 1 << 30, 1 << 20
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
BOTH = [CPU["problems"], GPU["problems"]]


def device(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "name": "NVIDIA L40S",
        "uuid": f"GPU-{index:08d}",
        "architecture": "Ada Lovelace",
        "bus": f"0:{index}",
        "memory_mib": 46068,
        "memory_used_mib": 0,
        "mig": False,
        "persistence": True,
        "compute_capability": "8.9",
        "processes": [],
        **changes,
    }


def disk(free_gib: float, *, exists: bool = False, read_only: bool = False, device: int = 1) -> dict[str, Any]:
    return {
        "exists": exists,
        "device": device,
        "total": 1000 * GIB,
        "free": int(free_gib * GIB),
        "read_only": read_only,
        "noexec": False,
    }


def facts(plan: dict[str, Any], change: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """A host that has all that the plan needs, then one thing changed."""
    good: dict[str, Any] = {
        "os": {"id": "ubuntu", "version": "24.04", "name": "Ubuntu 24.04.3 LTS"},
        "machine": "x86_64",
        "kernel": "6.8",
        "glibc": [2, 39],
        "cpus": 32,
        "memory": {"total": 256 * GIB, "available": 200 * GIB},
        "shm": {**disk(128), "total": 128 * GIB},
        "disks": {space["path"]: disk(500) for space in plan["needs"]["disk"]},
        "listeners": [],
        "time": 0.0,
        "user": None,
        "selinux": "absent",
        "apparmor": True,
        "pythons": {
            wanted["version"]: {"path": "/usr/bin/python", "version": wanted["version"], "headers": True}
            for wanted in plan["needs"]["pythons"]
        },
        "gpu": {"driver": "580.159.04", "cuda": "13.0", "devices": [device(0), device(1)], "error": None},
        "packages": {package["name"]: {"installed": "1", "candidate": None} for package in plan["packages"]},
        "systemd": {"running": True, "version": 255, "state": "running"},
        "firewall_tables": [],
    }
    good = copy.deepcopy(good)
    if change is not None:
        change(good)
    return good


def test_the_plans_are_right() -> None:
    assert BOTH == [[], []]


@pytest.mark.parametrize("plan", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_host_that_has_everything_has_no_finding(plan: dict[str, Any]) -> None:
    assert compare(plan, facts(plan)) == []


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
        lambda f: f["listeners"].append({"port": 8000, "pid": 7, "program": "python3", "unit": "jupyter.service"}),
        "python3 (process 7, jupyter.service)",
    ),
    (
        "port-taken",
        CPU,
        lambda f: f["listeners"].append({"port": 8000, "pid": None, "program": None, "unit": None}),
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
]


@pytest.mark.parametrize(
    ("identifier", "plan", "change", "part"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_one_thing_wrong_is_one_error_with_its_remedy(
    identifier: str, plan: dict[str, Any], change: Callable[[dict[str, Any]], Any], part: str
) -> None:
    found = compare(plan, facts(plan, change))
    assert [finding["id"] for finding in found] == [identifier], found
    [finding] = found
    assert finding["severity"] == "error"
    assert part in " ".join(finding.values())
    assert all(finding[key] for key in ("found", "needed", "remedy"))


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
        lambda f: f["listeners"].append({"port": 8000, "pid": 7, "program": "vllm", "unit": "vllm-glm.service"}),
        lambda f: f["listeners"].append({"port": 8000, "pid": 7, "program": "vllm", "unit": "vllm-old.service"}),
        lambda f: f["listeners"].append({"port": 9100, "pid": 7, "program": "exporter", "unit": None}),
        lambda f: [d.update(free=0, exists=True) for d in f["disks"].values()],  # all of it is there already
        lambda f: f["gpu"].update(devices=[], driver=None, error="none"),  # a CPU profile asks for none
    ],
)
def test_what_is_no_finding(change: Callable[[dict[str, Any]], Any]) -> None:
    assert compare(CPU, facts(CPU, change)) == []


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
            device(0, memory_used_mib=9000, processes=[{"pid": 3, "name": "python3", "memory_mib": 8900}])
        ]

    found = compare(GPU, facts(GPU, change))
    assert {finding["id"]: finding["severity"] for finding in found} == {
        "os-untested": "warning",
        "gpu-busy": "warning",
    }


def test_a_gpu_that_the_release_is_not_made_for_is_a_warning() -> None:
    newer = facts(GPU, lambda f: f["gpu"].update(devices=[device(0, compute_capability="13.0")]))
    (found,) = compare(GPU, newer)
    assert (found["id"], found["severity"], found["found"]) == (
        "gpu-architecture",
        "warning",
        "GPU 0 (NVIDIA L40S) is sm130",
    )
    assert "for which release 0.31.0-cu130 of instance" in found["needed"]
    open_to_all = copy.deepcopy(GPU)
    open_to_all["needs"]["gpus"][0]["architectures"] = []  # a site's release that says nothing
    assert compare(open_to_all, newer) == []


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


def test_a_waived_error_is_a_warning_and_says_so() -> None:
    small = facts(CPU, lambda f: f["memory"].update(total=GIB))
    [finding] = compare(CPU, small, ["memory-small"])
    assert finding["severity"] == "warning"
    assert "waived" in finding["found"]
    [finding] = compare(CPU, small, ["disk-full"])
    assert finding["severity"] == "error"


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
