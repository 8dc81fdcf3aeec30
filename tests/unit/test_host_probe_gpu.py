# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""GPUs as nvidia-smi tells of them: captures of real machines, fake ones for the rest, and text that is no capture."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import host_probe_command, host_probe_gpu
from ansible_collections.onprem.vllm.tests.lab import fake_gpus
from hypothesis import given, settings
from hypothesis import strategies as st

CAPTURES = Path(__file__).parent / "fixtures" / "nvidia-smi"
# Captured on real machines with one and two H200 (serials, fabric and UUIDs blanked); on the second one a program
# holds 20 GiB of GPU 0.
H200 = (CAPTURES / "h200.xml").read_text(encoding="utf-8")
TWO_H200_BUSY = (CAPTURES / "2xh200-busy.xml").read_text(encoding="utf-8")


@pytest.fixture(name="gpu_host")
def _gpu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a fake GPU host's nvidia-smi, or a script, first on the PATH that the probe uses."""

    def install(kind: str, script: str = "") -> None:
        if script:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            program.chmod(0o755)
        else:
            fake_gpus.write(kind, tmp_path)
        path = f"{tmp_path}:{host_probe_command.ENVIRONMENT['PATH']}"
        monkeypatch.setitem(host_probe_command.ENVIRONMENT, "PATH", path)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_a_real_capture_of_one_gpu(gpu_host: Callable[[str], None]) -> None:
    gpu_host("h200")
    found = host_probe_gpu.gpus()
    assert (found["driver"], found["cuda"], found["error"]) == ("580.159.04", "13.0", None)
    assert found["devices"] == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "uuid": "GPU-00000000-0000-0000-0000-000000000000",
            "architecture": "Hopper",
            "bus": "00000000:00:06.0",
            "memory_mib": 143771,
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
            "compute_capability": "9.0",
            "numa_node": None,
            "processes": [],
        }
    ]
    assert found["topology"] == {"GPU0": {"links": {}, "cpus": "0-15", "numa": "0"}}
    assert found["fabric"] is None


def test_a_real_capture_of_two_linked_gpus_one_of_them_busy(gpu_host: Callable[[str], None]) -> None:
    gpu_host("2xh200-busy")
    found = host_probe_gpu.gpus()
    first, second = found["devices"]
    assert first["processes"] == [
        {"pid": 583, "name": "python3", "memory_mib": 20998, "unit": first["processes"][0]["unit"]}
    ]
    assert (first["memory_used_mib"] >= 20998, second["memory_used_mib"], second["processes"]) == (True, 4, [])
    # The header of the real output is underlined by escape sequences.
    assert found["topology"] == {
        "GPU0": {"links": {"GPU1": "NV18"}, "cpus": "0-31", "numa": "0"},
        "GPU1": {"links": {"GPU0": "NV18"}, "cpus": "0-31", "numa": "0"},
    }
    # A virtual machine: the hypervisor has the switches and their manager, the GPUs say that they have joined.
    assert (first["fabric_state"], first["fabric_status"]) == ("Completed", "Success")
    assert found["fabric"]["switches"] == 0


@pytest.mark.parametrize(
    ("kind", "driver", "names", "capabilities", "mig", "busy"),
    [
        (
            "synthetic-8xsm120",
            "580.159.04",
            {"NVIDIA RTX PRO 6000 Blackwell Server Edition"},
            ["12.0"] * 8,
            False,
            False,
        ),
        ("synthetic-l40s", "580.159.04", {"NVIDIA L40S"}, ["8.9"], False, False),
        ("synthetic-old-driver", "550.54.15", {"NVIDIA L40S"}, ["8.9"], False, False),
        ("synthetic-mig", "580.159.04", {"NVIDIA H200"}, ["9.0"], True, False),
        ("synthetic-mig-parts", "580.159.04", {"NVIDIA H200"}, ["9.0"], True, False),
        ("synthetic-busy", "580.159.04", {"NVIDIA L40S"}, ["8.9"], False, True),
    ],
)
def test_fake_hosts(
    gpu_host: Callable[[str], None],
    kind: str,
    driver: str,
    names: set[str],
    capabilities: list[str],
    mig: bool,
    busy: bool,
) -> None:
    gpu_host(kind)
    found = host_probe_gpu.gpus()
    assert found["error"] is None
    assert found["driver"] == driver
    devices = found["devices"]
    assert {device["name"] for device in devices} == names
    assert [device["compute_capability"] for device in devices] == capabilities
    assert {device["mig"] for device in devices} == {mig}
    assert {bool(device["processes"]) for device in devices} == {busy}
    assert len({device["uuid"] for device in devices}) == len({device["bus"] for device in devices}) == len(devices)
    assert set(found["topology"]) == {f"GPU{index}" for index in range(len(devices))}


def test_fake_hosts_say_that_they_are_synthetic() -> None:
    for kind, captures in fake_gpus.KINDS.items():
        text = captures()["q.xml"]
        assert kind.startswith("synthetic-") is ("<!-- synthetic" in text), kind
        assert kind == "broken" or ET.fromstring(text).tag == "nvidia_smi_log"


@pytest.mark.parametrize(
    ("kind", "script", "part"),
    [
        ("broken", "", "communicate"),
        ("", "echo 'Driver/library version mismatch' >&2; exit 18", "mismatch"),
        ("", "echo 'no xml at all'", "no XML"),
        ("", "exec sleep 5", "did not answer within"),
        ("", "exit 3", "status 3"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_finding_and_no_crash(
    gpu_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: str, script: str, part: str
) -> None:
    monkeypatch.setattr(host_probe_command, "COMMAND_TIMEOUT_S", 1.0)
    gpu_host(kind, script)
    found = host_probe_gpu.gpus()
    assert part in found["error"]
    assert found["devices"] == []


def test_a_host_without_nvidia_smi(tmp_path: Path) -> None:
    def missing(*command: str) -> tuple[int, str, str]:
        return 127, "", f"{command[0]} is not installed"

    assert host_probe_gpu.gpus(missing, tmp_path)["error"] is None
    device = tmp_path / "bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    assert "driver is not installed" in host_probe_gpu.gpus(missing, tmp_path)["error"]


def test_mig_devices_have_the_memory_of_the_xml_and_the_uuids_of_the_list(gpu_host: Callable[[str], None]) -> None:
    gpu_host("synthetic-mig-parts")
    [device] = host_probe_gpu.gpus()["devices"]
    uuid = "MIG-00000000-0000-0000-0000-00000000000"
    assert device["mig_devices"] == [
        {
            "uuid": f"{uuid}0",
            "number": 0,
            "memory_mib": 71424,
            "memory_used_mib": 16,
            "name": "NVIDIA H200 MIG 3g.71gb",
        },
        {
            "uuid": f"{uuid}1",
            "number": 1,
            "memory_mib": 18176,
            "memory_used_mib": 16,
            "name": "NVIDIA H200 MIG 1g.18gb",
        },
    ]
    host_probe_gpu.name_mig_devices([device], "GPU 0: NVIDIA H200 (UUID: GPU-another)\nnonsense\n")
    assert device["mig_devices"] == []


@pytest.mark.parametrize(
    ("shown", "version", "expected"),
    [
        (
            "LoadState=loaded\nActiveState=active\n",
            "Fabric Manager version is : 580.159.04\n",
            ("active", "580.159.04"),
        ),
        ("LoadState=loaded\nActiveState=failed\n", "Fabric Manager version is : 570.86.15\n", ("failed", "570.86.15")),
        ("LoadState=not-found\nActiveState=inactive\n", "", (None, None)),
        ("", "", (None, None)),
    ],
)
def test_the_fabric_manager(tmp_path: Path, shown: str, version: str, expected: tuple[Any, Any]) -> None:
    """The forms are those of systemctl and of the manager's own --version."""
    for number in range(4):
        device = tmp_path / f"bus/pci/devices/0000:8{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x068000\n" if number else "0x030200\n")
    switches = host_probe_gpu.pci_devices(tmp_path, host_probe_gpu.BRIDGE_OTHER)
    found = host_probe_gpu.fabric(switches, [], lambda *words: (0, shown if words[0] == "systemctl" else version, ""))
    assert found == {"switches": 3, "service": expected[0], "version": expected[1]}


def test_numa_nodes(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-31"), (1, "32-63"), (2, "")):  # the last one is memory alone
        directory = tmp_path / f"devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")
        (directory / "meminfo").write_text(f"Node {node} MemTotal:       1024 kB\n")
    assert host_probe_gpu.numa(tmp_path) == [
        {"node": 0, "cpus": "0-31", "memory": 1 << 20},
        {"node": 1, "cpus": "32-63", "memory": 1 << 20},
    ]
    device = tmp_path / "bus/pci/devices/0000:0a:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert host_probe_gpu.numa_node("00000000:0A:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")  # the firmware does not say
    assert host_probe_gpu.numa_node("00000000:0A:00.0", tmp_path) is None
    assert host_probe_gpu.numa_node("nonsense", tmp_path) is None


WORDS = st.sampled_from(["", "N/A", "[N/A]", "Enabled", "99999999999999999999 MiB", "-1", "x", "é", "1x", "<gpu>", "&"])


@settings(max_examples=100)
@given(data=st.data())
def test_mutated_xml_never_raises_anything_but_what_says_that_it_is_none(data: st.DataObject) -> None:
    """Cut, swap and drop parts of a real capture: the facts are then poorer, and findings can still be made of them."""
    text = data.draw(st.sampled_from([H200, TWO_H200_BUSY]))
    for _number in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 3000)))
        text = text[:start] + data.draw(WORDS) + text[end:]

    def query(*words: str) -> tuple[int, str, str]:
        return (0, text if "-q" in words else text[: len(text) // 2], "")

    found = host_probe_gpu.gpus(query)
    assert (found["error"] is None) or found["devices"] == []
    assert all(device["memory_mib"] is None or device["memory_mib"] >= 0 for device in found["devices"])


TAGS = sorted({element.tag for element in ET.fromstring(TWO_H200_BUSY).iter()})


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(TAGS), st.none() | WORDS, max_size=25))
def test_xml_with_other_values_or_without_parts_is_read(changes: dict[str, str | None]) -> None:
    """Well-formed answers of other drivers: elements that are missing, empty, or hold something unknown."""
    root = ET.fromstring(TWO_H200_BUSY)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in changes:
                if changes[child.tag] is None:
                    parent.remove(child)
                elif not len(child):
                    child.text = changes[child.tag]
    found = host_probe_gpu.parse_nvidia_smi(ET.tostring(root, encoding="unicode"))
    assert len(found["devices"]) == (0 if changes.get("gpu", "") is None else 2)


@given(st.text())
def test_any_text_is_a_topology_or_none(text: str) -> None:
    assert isinstance(host_probe_gpu.parse_topology(text), dict)
