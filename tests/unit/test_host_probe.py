# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import host_probe, host_probe_command, host_probe_programs


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
    monkeypatch.setitem(host_probe_command.ENVIRONMENT, "PATH", str(Path(sys.base_prefix) / "bin"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = host_probe_programs.python(version)
    assert found is not None
    assert found["version"] == ".".join(map(str, sys.version_info[:3]))
    assert found["headers"] is (Path(sys.base_prefix) / "include" / f"python{version}" / "Python.h").exists()
    assert host_probe_programs.python("2.1") is None


def tool(directory: Path, name: str, says: str = "tool 1.2.3", status: int = 0) -> str:
    """A program that prints its version; what it is called with must be known to it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_programs_as_the_unit_s_environment_finds_them(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    gcc = tool(second, "gcc", "gcc (Debian 12.2.0-14) 12.2.0")
    tool(second, "clang", "clang version 14.0.6")
    ninja = tool(first, "ninja", "1.13.2")
    tool(second, "ninja", "1.11.1")
    nvcc = tool(tmp_path / "cuda" / "bin", "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    found = host_probe_programs.programs({"PATH": f"{first}:{second}", "CUDA_HOME": str(tmp_path / "cuda")})
    assert found == {
        "cc": {"path": gcc, "runs": True, "version": "12.2.0"},  # gcc before clang, as Triton
        "c++": None,
        "nvcc": {"path": nvcc, "runs": True, "version": "13.0"},
        "ninja": {"path": ninja, "runs": True, "version": "1.13.2"},
        "numactl": None,
    }
    chosen = tool(tmp_path / "third", "my-cc", "my-cc 9.1", status=1)
    assert host_probe_programs.programs({"PATH": str(first), "CC": chosen})["cc"] == {
        "path": chosen,
        "runs": False,
        "version": "9.1",
    }


def test_programs_of_equal_environments_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "gcc")
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(host_probe, "programs", lambda environment: asked.append(environment) or {"cc": len(asked)})
    same = {"PATH": str(tmp_path), "HOME": "/a"}
    found = host_probe.probe(environments={"a": same, "b": {**same, "HOME": "/b"}, "c": {"PATH": "/nowhere"}})
    assert len(asked) == 2
    assert found["programs"]["a"] == found["programs"]["b"] != found["programs"]["c"]


def test_the_clock() -> None:
    before = time.time()
    clock = host_probe.clock(before)
    assert clock["control"] == before
    assert before <= clock["host"] <= time.time()
    assert isinstance(clock["synchronised"], bool)


def test_probe_of_this_machine_is_whole_and_changes_nothing() -> None:
    facts = host_probe.probe(paths=["/"], packages=["no-such-package-at-all"], ports=[1], pythons=["2.1"], user="root")
    assert facts["unknown"] == {}
    assert facts["user"] == {"uid": 0, "shell": facts["user"]["shell"], "home": "/root"}
    assert facts["pythons"] == {"2.1": None}
    assert facts["packages"] == {"no-such-package-at-all": {"installed": None, "candidate": None}}
    assert set(facts["disks"]) == {"/"}
    assert facts["glibc"][0] == 2
    assert facts["cpus"] >= 1
    assert facts["numa"][0]["node"] == 0


def test_what_cannot_be_looked_at_is_unknown_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_unused: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(host_probe, "memory", broken)
    monkeypatch.setattr(host_probe, "gpus", lambda: {}["devices"])
    facts = host_probe.probe()
    assert facts["memory"] is facts["gpu"] is None
    assert "/proc/meminfo" in facts["unknown"]["memory"]
    assert set(facts["unknown"]) == {"memory", "gpu"}
