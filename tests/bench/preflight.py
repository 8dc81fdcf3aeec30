# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How long preflight computes on the control node, for 8 to 64 hosts with two instances each. Figures, no verdict.

The facts are this machine's own, with the GPUs of the captured and synthetic hosts of tests/lab/fake_gpus.py. What the
hosts themselves take is measured apart: one probe of this machine. Run from the checkout's root with
``PYTHONPATH=.collections``.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.onprem.vllm.plugins.module_utils import host_probe_command
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe import probe
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import diagnose, table
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.tests.lab import fake_gpus

KINDS = [kind for kind in fake_gpus.KINDS if kind != "broken"]
PASSES = 5


def plan(host: str) -> dict[str, Any]:
    """A host with two instances."""
    names = ("gemma-4-26b-a4b-it", "gemma-4-26b-a4b-it-assistant")
    return compose_plan(
        host,
        ["vllm"],
        {
            "vllm_mirror_url": "http://mirror",
            "vllm_client_networks": ["10.0.0.0/8"],
            "vllm_models": {name: {"directory": "/x"} for name in names},
            "vllm_release": "0.31.0-cu130",
            "vllm_instances": {
                name: {"profile": "gemma-4-26b-l40s", "port": 8000 + gpu, "gpus": [gpu]}
                for gpu, name in enumerate(("one", "two"))
            },
        },
    )


def facts(kind: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """What the module returns on a host of this kind, as it comes over the wire."""
    with tempfile.TemporaryDirectory() as directory:
        fake_gpus.write(kind, Path(directory))
        path = host_probe_command.ENVIRONMENT["PATH"]
        host_probe_command.ENVIRONMENT["PATH"] = f"{directory}:{path}"
        try:
            found = probe(
                paths=[space["path"] for space in wanted["needs"]["disk"]],
                packages=[package["name"] for package in wanted["packages"]],
                ports=[port["port"] for port in wanted["needs"]["ports"]],
                pythons=[python["version"] for python in wanted["needs"]["pythons"]],
                user=wanted["service"]["user"],
                environments={instance["name"]: instance["environment"] for instance in wanted["instances"]},
                control_time=time.time(),
            )
        finally:
            host_probe_command.ENVIRONMENT["PATH"] = path
    return json.loads(json.dumps(found))


def seconds(work: Callable[[], Any]) -> float:
    """The median of some passes."""
    taken = []
    for _number in range(PASSES):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main() -> None:
    """Measure and print."""
    first = plan("host0")
    assert first["problems"] == [], first["problems"]
    begin = time.perf_counter()
    captured = [facts(kind, first) for kind in KINDS]
    print(f"one probe of this machine: {(time.perf_counter() - begin) / len(KINDS):.2f} s")
    print("hosts | instances | findings of all hosts, ms | a host, ms | the table, ms | findings")
    for count in (8, 16, 32, 64):
        hosts = {f"host{number}": {**copy.deepcopy(first), "host": f"host{number}"} for number in range(count)}
        probes = {name: {"host": captured[number % len(captured)]} for number, name in enumerate(hosts)}

        def compared(hosts: dict[str, Any] = hosts, probes: dict[str, Any] = probes) -> list[dict[str, str]]:
            now = time.time()
            return [
                {"host": name, **finding}
                for name, wanted in hosts.items()
                for finding in diagnose(wanted, probes[name], [], now)
            ]

        found = compared()
        whole, shown = seconds(compared), seconds(lambda found=found, count=count: table(found, count))
        print(
            f"{count:5} | {2 * count:9} | {whole * 1000:25.1f} | {whole / count * 1000:10.2f} | {shown * 1000:13.1f} | "
            f"{len(found)}"
        )


if __name__ == "__main__":
    main()
