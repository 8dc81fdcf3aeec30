# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Facts of a host that has all that a plan needs, for tests to change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

GIB, MIB = 1 << 30, 1 << 20


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
        "mig_devices": [],
        "persistence": True,
        "compute_mode": "Default",
        "recovery": None,
        "link_width": 16,
        "link_width_most": 16,
        "fabric_state": None,
        "fabric_status": None,
        "numa_node": 0,
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
        "files_free": 10_000_000,
        "read_only": read_only,
        "noexec": False,
    }


def program(path: str, *, runs: bool = True) -> dict[str, Any]:
    return {"path": path, "runs": runs, "version": "1.0"}


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
        "tmp": disk(100),
        "listeners": [],
        "time": {"host": 1000.0, "control": 999.9, "synchronised": True},
        "container": None,
        "numa": [{"node": 0, "cpus": "0-31", "memory": 256 * GIB}],
        "user": None,
        "instances": {},
        "models": {},
        "unknown": {},
        "programs": {
            instance["name"]: {name: program(f"/usr/bin/{name}") for name in ("cc", "c++", "nvcc", "ninja", "numactl")}
            for instance in plan["instances"]
        },
        "selinux": "absent",
        "apparmor": True,
        "pythons": {
            wanted["version"]: {"path": "/usr/bin/python", "version": wanted["version"], "headers": True}
            for wanted in plan["needs"]["pythons"]
        },
        "gpu": {
            "driver": "580.159.04",
            "cuda": "13.0",
            "devices": [device(0), device(1)],
            "error": None,
            "topology": {},
            "fabric": None,
        },
        "packages": {package["name"]: {"installed": "1", "candidate": None} for package in plan["packages"]},
        "systemd": {"running": True, "version": 255, "state": "running"},
        "firewall": {"tables": [], "programs": [], "cut": []},
    }
    good = copy.deepcopy(good)
    if change is not None:
        change(good)
    return good
