# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The GPUs of a host: nvidia-smi's XML, how they are linked, their NVSwitch fabric, and the NUMA nodes beside them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .host_probe_command import UNREADABLE, run, text_of
from .listeners import PROC, process_unit

Facts = dict[str, Any]
Query = Callable[..., tuple[int, str, str]]

NVIDIA = "0x10de"
# PCI class of the NVSwitches of A100, H100 and H200 boards. Those of later boards are no PCI devices of the host: there
# the GPUs' own fabric state tells.
BRIDGE_OTHER = "0x0680"
SYS = Path("/sys")
_FABRIC_UNIT = "nvidia-fabricmanager.service"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def gpus(query: Query = run, sys: Path = SYS, proc: Path = PROC) -> Facts:
    """Driver, GPUs, their links and their fabric, from nvidia-smi, /sys and systemd.

    Returns:
        ``{driver, cuda, devices, topology, fabric, error}``: error says why nothing could be read although there is a
        GPU or a driver.
    """
    none: Facts = {"driver": None, "cuda": None, "devices": [], "topology": None, "fabric": None, "error": None}
    with ThreadPoolExecutor(3) as pool:  # each call wakes every GPU where no persistence daemon keeps them awake
        whole = pool.submit(query, "nvidia-smi", "-q", "-x")
        listed = pool.submit(query, "nvidia-smi", "--query-gpu=uuid,compute_cap", "--format=csv,noheader")
        linked = pool.submit(query, "nvidia-smi", "topo", "-m")
        status, text, message = whole.result()
    switches = pci_devices(sys, BRIDGE_OTHER)
    if status == 127:
        error = "there is an NVIDIA device, but no nvidia-smi: the driver is not installed"
        return {**none, "error": error if pci_devices(sys) else None}
    if status != 0:
        reason = (text.strip() or message or f"status {status}").splitlines()[-1]
        return {**none, "error": reason if reason.startswith("nvidia-smi") else f"nvidia-smi: {reason}"}
    try:
        found = parse_nvidia_smi(text)
    except ET.ParseError as error:
        return {**none, "error": f"nvidia-smi printed no XML: {error}"}
    status, text, message = listed.result()
    capability = dict(line.split(", ", 1) for line in text.splitlines() if ", " in line) if status == 0 else {}
    if any(device["mig"] for device in found["devices"]):  # their UUIDs stand nowhere else
        name_mig_devices(found["devices"], query("nvidia-smi", "-L")[1])
    status, text, message = linked.result()
    for device in found["devices"]:
        device["compute_capability"] = capability.get(device["uuid"])
        device["numa_node"] = numa_node(device["bus"], sys)
        for process in device["processes"]:
            process["unit"] = process_unit(process["pid"], proc)
    return {
        **found,
        "topology": parse_topology(text) if status == 0 else None,
        "fabric": fabric(switches, found["devices"], query),
    }


def parse_nvidia_smi(text: str) -> Facts:
    """The parts of ``nvidia-smi -q -x`` that a plan is compared with. Memory is in MiB; what is not there is None.

    Raises:
        xml.etree.ElementTree.ParseError: the text is no XML.
    """
    root = ET.fromstring(text)  # noqa: S314 - printed by the driver's own program
    return {
        "driver": _known(root.findtext("driver_version")),
        "cuda": _known(root.findtext("cuda_version")),
        "devices": [_device(index, element) for index, element in enumerate(root.iter("gpu"))],
        "error": None,
    }


def _device(index: int, element: ET.Element) -> Facts:
    widths = "pci/pci_gpu_link_info/link_widths"
    return {
        "index": index,
        "name": _known(element.findtext("product_name")),
        "uuid": _known(element.findtext("uuid")),
        "architecture": _known(element.findtext("product_architecture")),
        "bus": element.get("id"),
        "memory_mib": _number(element.findtext("fb_memory_usage/total"), " MiB"),
        "memory_used_mib": _number(element.findtext("fb_memory_usage/used"), " MiB"),
        "mig_devices": [
            {
                "uuid": None,
                "number": _number(part.findtext("index"), ""),
                "memory_mib": _number(part.findtext("fb_memory_usage/total"), " MiB"),
                "memory_used_mib": _number(part.findtext("fb_memory_usage/used"), " MiB"),
            }
            for part in element.iterfind("mig_devices/mig_device")
        ],
        "mig": (element.findtext("mig_mode/current_mig") or "").strip() == "Enabled",
        "persistence": (element.findtext("persistence_mode") or "").strip() == "Enabled",
        "compute_mode": _known(element.findtext("compute_mode")),
        "recovery": _known(element.findtext("gpu_recovery_action")),
        "link_width": _number(element.findtext(f"{widths}/current_link_width"), "x"),
        "link_width_most": _number(element.findtext(f"{widths}/max_link_width"), "x"),
        "fabric_state": _known(element.findtext("fabric/state")),
        "fabric_status": _known(element.findtext("fabric/status")),
        "compute_capability": None,
        "processes": [
            {
                "pid": _number(process.findtext("pid"), "") or 0,
                "name": _known(process.findtext("process_name")),
                "memory_mib": _number(process.findtext("used_memory"), " MiB"),
            }
            for process in element.iterfind("processes/process_info")
        ],
    }


def name_mig_devices(devices: list[Facts], text: str) -> None:
    """Give the MIG devices their UUIDs and names from ``nvidia-smi -L``; those that it does not list are left out."""
    by_number: dict[tuple[str, int], tuple[str, str]] = {}
    gpu = ""
    for line in text.splitlines():
        if found := re.match(r"GPU \d+: .*\(UUID: (\S+)\)", line):
            gpu = found[1]
        elif found := re.match(r"\s+(MIG \S+)\s+Device\s+(\d+): \(UUID: (MIG-\S+)\)", line):
            by_number[gpu, int(found[2])] = (found[3], found[1])
    for device in devices:
        device["mig_devices"] = [
            {**part, "uuid": listed[0], "name": f"{device['name']} {listed[1]}"}
            for part in device["mig_devices"]
            if (listed := by_number.get((str(device["uuid"]), part["number"])))
        ]


def parse_topology(text: str) -> Facts:
    """``nvidia-smi topo -m`` as ``{GPU0: {links: {GPU1: NV18}, cpus: 0-15, numa: 0}}``.

    The last part of a row may hold an empty column more than the header, so columns are taken from the left.
    """
    lines = [_ESCAPE.sub("", line).split("\t") for line in text.splitlines()]
    header = next((line for line in lines if any(cell.strip() == "CPU Affinity" for cell in line)), [])
    names = [cell.strip() for cell in header]
    found: Facts = {}
    for line in lines:
        cells = [cell.strip() for cell in line]
        if line is header or not cells[0] or cells[0] not in names:
            continue
        row = dict(zip(names, cells, strict=False))
        found[cells[0]] = {
            "links": {name: kind for name, kind in row.items() if re.fullmatch(r"(GPU|NIC)\d+", name) and kind != "X"},
            "cpus": row.get("CPU Affinity") or None,
            "numa": row.get("NUMA Affinity") or None,
        }
    return found


def fabric(switches: int, devices: list[Facts], query: Query = run) -> Facts | None:
    """The NVSwitch fabric: how many switches the host sees, its service and that one's version; None where none is.

    Where a hypervisor runs the fabric manager, the host sees no switch and only the GPUs' own state.
    """
    if not switches and not any(device["fabric_state"] for device in devices):
        return None
    shown = query("systemctl", "show", "--property", "LoadState,ActiveState", _FABRIC_UNIT)[1]
    state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)", query("nv-fabricmanager", "--version")[1])
    return {
        "switches": switches,
        "service": None if state.get("LoadState") != "loaded" else state.get("ActiveState"),
        "version": version[1] if version else None,
    }


def numa(sys: Path = SYS) -> list[Facts]:
    """The NUMA nodes that have processors, with these and their memory in bytes."""
    nodes = []
    for path in sorted(sys.glob("devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        total = re.search(r"MemTotal:\s+(\d+) kB", text_of(path / "meminfo") or "")
        if cpus := text_of(path / "cpulist"):
            nodes.append({"node": int(path.name[4:]), "cpus": cpus, "memory": int(total[1]) * 1024 if total else None})
    return nodes


def numa_node(bus: str | None, sys: Path = SYS) -> int | None:
    """The NUMA node a PCI device hangs on; None where the firmware does not say."""
    found = re.fullmatch(r"[0-9A-Fa-f]*([0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+)", bus or "")
    text = text_of(sys / "bus/pci/devices" / found[1].lower() / "numa_node") if found else None
    return int(text) if text and text.isdigit() else None


def pci_devices(sys: Path = SYS, kind: str = "0x") -> int:
    """How many NVIDIA devices of a PCI class are there."""
    try:
        return sum(
            text_of(path) == NVIDIA and (text_of(path.with_name("class")) or "").startswith(kind)
            for path in sys.glob("bus/pci/devices/*/vendor")
        )
    except UNREADABLE:
        return 0


def _known(text: str | None) -> str | None:
    text = (text or "").strip()
    return None if text in ("", "N/A", "[N/A]", "None") else text


def _number(text: str | None, unit: str) -> int | None:
    found = re.match(rf"([0-9]{{1,15}}){unit}", (text or "").strip())
    return int(found[1]) if found else None
