# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import os
import socket
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import host_probe

FIXTURES = Path(__file__).parent / "fixtures" / "nvidia-smi"
# Captured on a real machine with one H200 (serials blanked).
H200 = (FIXTURES / "h200.xml").read_text(encoding="utf-8")


def test_a_real_capture_of_nvidia_smi() -> None:
    found = host_probe.parse_nvidia_smi(H200)
    assert (found["driver"], found["cuda"], found["error"]) == ("580.159.04", "13.0", None)
    [device] = found["devices"]
    assert device == {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "architecture": "Hopper",
        "bus": "00000000:00:06.0",
        "memory_mib": 143771,
        "memory_used_mib": 0,
        "mig": False,
        "persistence": True,
        "compute_capability": None,
        "processes": [],
    }


def test_several_gpus_with_mig_and_tenants() -> None:
    """Made from the real capture by the documented form of the fields; proves parsing only."""
    head, gpu, tail = (
        H200.partition("<gpu id")[0],
        H200[H200.index("<gpu id") : H200.index("</gpu>") + 6],
        "</nvidia_smi_log>",
    )
    busy = gpu.replace("<current_mig>Disabled", "<current_mig>Enabled").replace("<used>0 MiB", "<used>9000 MiB", 1)
    busy = busy.replace(
        "<processes>\n",
        "<processes><process_info><pid>4711</pid><type>C</type><process_name>python3</process_name>"
        "<used_memory>8990 MiB</used_memory></process_info>\n",
        1,
    )
    first, second = host_probe.parse_nvidia_smi(head + gpu + busy + tail)["devices"]
    assert (first["index"], first["mig"], first["processes"]) == (0, False, [])
    assert (second["index"], second["mig"], second["memory_used_mib"]) == (1, True, 9000)
    assert second["processes"] == [{"pid": 4711, "name": "python3", "memory_mib": 8990}]


def test_output_that_is_no_xml_is_refused() -> None:
    with pytest.raises(ET.ParseError):
        host_probe.parse_nvidia_smi("NVIDIA-SMI has failed")


@pytest.fixture(name="nvidia_smi")
def _nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program nvidia-smi first on the PATH that the probe uses."""

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setitem(host_probe._ENVIRONMENT, "PATH", f"{tmp_path}:{host_probe._ENVIRONMENT['PATH']}")

    return install


def test_gpus_with_their_compute_capability(nvidia_smi) -> None:
    nvidia_smi(
        f'case "$1" in -q) cat {FIXTURES / "h200.xml"};; '
        "*) echo 'GPU-00000000-0000-0000-0000-000000000000, 9.0';; esac"
    )
    found = host_probe.gpus()
    assert found["error"] is None
    assert found["devices"][0]["compute_capability"] == "9.0"


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("echo 'NVIDIA-SMI has failed because it couldn'\"'\"'t communicate with the driver.'; exit 9", "communicate"),
        ("echo 'Driver/library version mismatch' >&2; exit 18", "mismatch"),
        ("echo 'no xml at all'", "no XML"),
        ("sleep 5", "did not answer within"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_finding_and_no_crash(
    nvidia_smi, monkeypatch: pytest.MonkeyPatch, script: str, part: str
) -> None:
    monkeypatch.setattr(host_probe, "COMMAND_TIMEOUT_S", 1.0)
    nvidia_smi(script)
    found = host_probe.gpus()
    assert part in found["error"]
    assert found["devices"] == []


def test_who_listens_on_a_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        ports = [four.getsockname()[1], six.getsockname()[1]]
        with socket.create_server(("127.0.0.1", 0)) as other:
            found = host_probe.listeners(ports)
            assert other.getsockname()[1] not in {entry["port"] for entry in found}
    assert {entry["port"] for entry in found} == set(ports)
    assert {entry["pid"] for entry in found} == {os.getpid()}
    assert all(entry["program"] for entry in found)
    assert host_probe.listeners(ports) == []


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/vllm-glm.service\n", "vllm-glm.service"),
        ("0::/machine.slice/libpod-1.scope/system.slice/nginx.service\n", "nginx.service"),
        ("1:name=systemd:/system.slice/vllm-glm.service/inner\n0::/\n", "vllm-glm.service"),
        ("0::/user.slice/user-0.slice/session-1.scope\n", None),
        ("", None),
    ],
)
def test_the_unit_of_a_process(cgroup: str, unit: str | None) -> None:
    assert host_probe.unit_of(cgroup) == unit


def test_packages_installed_missing_and_to_be_had() -> None:
    asked: list[tuple[str, ...]] = []

    def query(*command: str) -> tuple[int, str, str]:
        asked.append(command)
        if command[0] == "dpkg-query":
            return 1, "gcc\t4:12.2.0-3\tii \nffmpeg\t7:5.1\trc \n", "no packages found matching nope"
        return 0, "ffmpeg:\n  Installed: (none)\n  Candidate: 7:5.1\nnope:\n  Candidate: (none)\n", ""

    assert host_probe.installed_packages(["gcc", "ffmpeg", "nope"], query) == {
        "gcc": {"installed": "4:12.2.0-3", "candidate": None},
        "ffmpeg": {"installed": None, "candidate": "7:5.1"},  # removed, with its configuration left
        "nope": {"installed": None, "candidate": None},
    }
    assert asked[1][2:] == ("ffmpeg", "nope")


def test_apt_is_not_asked_where_nothing_is_missing() -> None:
    def query(*command: str) -> tuple[int, str, str]:
        assert command[0] == "dpkg-query"
        return 0, "gcc\t1\tii \n", ""

    assert host_probe.installed_packages(["gcc"], query)["gcc"]["installed"] == "1"


def test_a_path_that_does_not_exist_has_its_parent_s_file_system(tmp_path: Path) -> None:
    found = host_probe.filesystem(str(tmp_path / "a" / "b"))
    there = host_probe.filesystem(str(tmp_path))
    assert (found["exists"], there["exists"]) == (False, True)
    assert found["device"] == there["device"] == tmp_path.stat().st_dev
    assert 0 < found["free"] <= found["total"]


def test_os_release(tmp_path: Path) -> None:
    path = tmp_path / "os-release"
    path.write_text('ID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n', encoding="utf-8")
    assert host_probe.os_release(path) == {"id": "ubuntu", "version": "24.04", "name": "Ubuntu 24.04.3 LTS"}
    assert host_probe.os_release(tmp_path / "none") == {"id": "", "version": "", "name": ""}


def test_memory(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n", encoding="ascii")
    assert host_probe.memory(path) == {"total": 2 << 20, "available": 1 << 20}


def test_this_interpreter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(host_probe._ENVIRONMENT, "PATH", str(Path(sys.base_prefix) / "bin"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = host_probe.python(version)
    assert found is not None
    assert found["version"] == ".".join(map(str, sys.version_info[:3]))
    assert found["headers"] is (Path(sys.base_prefix) / "include" / f"python{version}" / "Python.h").exists()
    assert host_probe.python("2.1") is None


def test_probe_of_this_machine_is_whole_and_changes_nothing() -> None:
    facts = host_probe.probe(paths=["/"], packages=["no-such-package-at-all"], ports=[1], pythons=["2.1"], user="root")
    assert facts["user"] == {"uid": 0, "shell": facts["user"]["shell"], "home": "/root"}
    assert facts["pythons"] == {"2.1": None}
    assert facts["packages"] == {"no-such-package-at-all": {"installed": None, "candidate": None}}
    assert set(facts["disks"]) == {"/"}
    assert facts["glibc"][0] == 2
    assert facts["cpus"] >= 1
