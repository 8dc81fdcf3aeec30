# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""When a proof holds, what sandbox it is made in, and what becomes of a program that ends in its middle."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import release_probe
from ansible_collections.onprem.vllm.plugins.module_utils.generation import Content, Generations
from ansible_collections.onprem.vllm.plugins.module_utils.probe_program import finding
from ansible_collections.onprem.vllm.plugins.module_utils.release_probe import (
    Places,
    ProbesFailed,
    Subject,
    bring_about,
    forget,
    identity,
    merged,
    proven,
)
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_unit import sandbox

TEMPLATE = Path(__file__).parents[2] / "roles" / "vllm_service" / "templates" / "vllm.service.j2"
UNIT = "[Unit]\nDescription=x\n[Service]\nUser=vllm\nProtectSystem=strict\nExecStart=/bin/true\n[Install]\nWantedBy=a\n"
BAD = finding("import", "ImportError: x", "vLLM", "Mend it.")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "run").mkdir()
    driver = tmp_path / "driver"
    driver.write_text("580.159\n")
    return Places(tmp_path / "etc", tmp_path / "records", tmp_path / "run", driver)


@pytest.fixture
def wanted(tmp_path: Path) -> Subject:
    release = tmp_path / "release"
    (release / "bin").mkdir(parents=True)
    (release / "manifest.json").write_text("{}")
    (release / "bin" / "ninja").write_text("#!/bin/sh\n")
    (release / "bin" / "ninja").chmod(0o755)
    environment = {"PATH": f"{release}/bin:/usr/bin", "HF_HUB_OFFLINE": "1"}
    return Subject("glm", release, UNIT, environment, "port: 8000\n", ("import",))


def serve(wanted: Subject, places: Places, **changed: Any) -> None:
    """A current generation as role vllm_service makes it, with a secret and variables of its own."""
    content = Content(
        wanted.serve,
        wanted.unit,
        os.fspath(wanted.release),
        {**wanted.environment, "ONPREM_VLLM_URL": "http://127.0.0.1:8000"},
        {"VLLM_API_KEY": "s3cret-value"},
    )
    generations = Generations(places.etc / wanted.name)
    generations.activate(generations.write(replace(content, **changed)))


def entry(wanted: Subject) -> dict[str, Any]:
    return {
        "name": wanted.name,
        "release_path": os.fspath(wanted.release),
        "unit": wanted.unit,
        "environment": dict(wanted.environment),
        "serve": wanted.serve,
        "probes": list(wanted.probes),
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Which instances were probed; what they find is in ``found``, by name (systemd itself: molecule/flashinfer)."""
    names: list[str] = []

    def prove(one: Subject, _places: Places, _timeout_s: float) -> list[dict[str, str]]:
        names.append(one.name)
        return json.loads(os.environ.get("FOUND", "[]"))

    monkeypatch.setattr(release_probe, "prove", prove)
    lock = release_probe.host_lock
    monkeypatch.setattr(release_probe, "host_lock", lambda purpose: lock(purpose, path=tmp_path / "lock"))
    return names


# -- sandbox ---------------------------------------------------------------------------------------------------------


def test_every_directive_of_the_unit_is_in_the_sandbox_but_those_of_its_life() -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    service = text.partition("[Service]")[2].partition("[Install]")[0]
    names = [line.partition("=")[0] for line in service.splitlines() if line and not line.startswith("#")]
    kept = [one.partition("=")[0] for one in sandbox(text)]
    assert {*names} - {*kept} == {
        *("Type", "SyslogIdentifier", "EnvironmentFile", "ExecStartPre", "ExecStart", "ExecStartPost", "ExecStop"),
        *("ExecStopPost", "TimeoutStartSec", "TimeoutStopSec", "KillSignal", "KillMode", "SuccessExitStatus"),
        *("Restart", "RestartSec", "RestartPreventExitStatus"),
    }
    assert [name for name in names if name in kept] == kept
    for one in ("ProtectSystem=strict", "CapabilityBoundingSet=", "NoNewPrivileges=true", "PrivateTmp=true"):
        assert one in sandbox(text)
    assert {"User", "Group", "UMask", "SystemCallFilter", "MemoryMax", "LimitNOFILE", "WorkingDirectory"} <= {*kept}


def test_a_directive_that_is_added_to_the_unit_holds_for_the_probes() -> None:
    added = UNIT.replace("User=vllm\n", "User=vllm\nNoExecPaths=/\nExecPaths = /usr \\\n /opt\n# Group=x\n")
    assert sandbox(added) == ["User=vllm", "NoExecPaths=/", "ExecPaths=/usr   /opt", "ProtectSystem=strict"]


# -- when a proof holds ----------------------------------------------------------------------------------------------


def test_what_is_proven_is_not_probed_again_once_it_serves(wanted: Subject, places: Places, ran: list[str]) -> None:
    first = bring_about([entry(wanted)], places=places)
    assert (first["changed"], first["probed"], first["findings"]) == (True, ["glm"], [])
    serve(wanted, places)
    again = bring_about([entry(wanted)], places=places)
    assert (again["changed"], again["probed"]) == (False, [])
    assert ran == ["glm"]


def test_without_a_generation_it_is_due_again(wanted: Subject, places: Places, ran: list[str]) -> None:
    for _unused in range(2):
        bring_about([entry(wanted)], places=places)
    assert ran == ["glm", "glm"]


@pytest.mark.parametrize(
    "changed",
    [
        {"serve": "port: 8001\n"},
        {"unit": UNIT + "# edited\n"},
        {"release": "/opt/vllm/releases/other"},
        {"environment": {"PATH": "/usr/bin"}},
    ],
)
def test_a_new_generation_that_is_due_makes_the_probes_due(
    wanted: Subject, places: Places, ran: list[str], changed: dict[str, Any]
) -> None:
    bring_about([entry(wanted)], places=places)
    serve(wanted, places, **changed)
    assert bring_about([entry(wanted)], places=places)["probed"] == ["glm"]
    assert len(ran) == 2


def change_manifest(wanted: Subject, _places: Places) -> Subject:
    (wanted.release / "manifest.json").write_text('{"packages": {}}')
    return wanted


def change_tool(wanted: Subject, _places: Places) -> Subject:
    (wanted.release / "bin" / "ninja").unlink()
    return wanted


def change_driver(wanted: Subject, places: Places) -> Subject:
    places.driver.write_text("590.1\n")
    return wanted


@pytest.mark.parametrize(
    "change",
    [
        change_manifest,
        change_tool,
        change_driver,
        lambda wanted, _places: replace(wanted, probes=("import", "read-only")),
        lambda wanted, _places: replace(wanted, environment={**wanted.environment, "OMP_NUM_THREADS": "8"}),
        lambda wanted, _places: replace(wanted, unit=UNIT.replace("strict", "full")),
    ],
)
def test_a_proof_rests_on_all_of_this(wanted: Subject, places: Places, change: Any) -> None:
    before = identity(wanted, places)
    assert identity(wanted, places) == before
    assert identity(change(wanted, places), places) != before


def test_a_proof_rests_on_the_program(wanted: Subject, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(wanted, places)
    monkeypatch.setattr(release_probe, "program", lambda: "# another\n")
    assert identity(wanted, places) != before


@pytest.mark.usefixtures("ran")
def test_a_record_that_others_could_have_written_proves_nothing(
    wanted: Subject, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_about([entry(wanted)], places=places)
    serve(wanted, places)
    record = places.records / "glm" / "probes.json"
    assert proven(wanted, places) == []
    assert record.stat().st_mode & 0o777 == 0o644
    record.chmod(0o664)
    assert proven(wanted, places) is None
    record.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert proven(wanted, places) is None


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": 1}', '{"identity": "x", "findings": [1]}'])
def test_a_damaged_record_proves_nothing(wanted: Subject, places: Places, text: str) -> None:
    (places.records / "glm").mkdir(parents=True)
    (places.records / "glm" / "probes.json").write_text(text)
    serve(wanted, places)
    assert bring_about([entry(wanted)], places=places)["probed"] == ["glm"]


def test_an_error_is_not_recorded_and_comes_again(
    wanted: Subject, places: Places, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOUND", json.dumps([BAD]))
    serve(wanted, places)
    for _unused in range(2):
        result = bring_about([entry(wanted)], places=places)
        assert result["changed"] is False
        assert [one["severity"] for one in result["findings"]] == ["error"]
    assert ran == ["glm", "glm"]
    assert not places.records.exists()


def test_a_waived_error_is_recorded_and_shown_each_time(
    wanted: Subject, places: Places, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOUND", json.dumps([BAD]))
    serve(wanted, places)
    for _unused in range(2):
        (one,) = bring_about([entry(wanted)], waived=["import"], places=places)["findings"]
        assert (one["severity"], one["found"]) == ("waived", "ImportError: x")
    assert ran == ["glm"]
    (one,) = bring_about([entry(wanted)], places=places)["findings"]  # no longer waived
    assert one["severity"] == "error"


def test_check_mode_says_what_is_due_and_probes_nothing(wanted: Subject, places: Places, ran: list[str]) -> None:
    absent = {**entry(wanted), "name": "next", "release_path": "/opt/vllm/releases/not-built-yet"}
    result = bring_about([entry(wanted), absent], check_mode=True, places=places)
    assert (result["changed"], result["probed"], ran) == (True, ["glm", "next"], [])
    assert not places.records.exists()
    with pytest.raises(ProbesFailed, match="not-built-yet is no whole release"):
        bring_about([absent], places=places)


def test_an_instance_without_probes_is_left_alone(wanted: Subject, places: Places, ran: list[str]) -> None:
    result = bring_about([{**entry(wanted), "probes": []}], places=places)
    assert (result, ran) == ({"changed": False, "probed": [], "findings": []}, [])


@pytest.mark.usefixtures("ran")
def test_records_are_forgotten_and_the_readiness_of_instances_is_not(wanted: Subject, places: Places) -> None:
    bring_about([{**entry(wanted), "name": name} for name in ("glm", "two", "starts")], places=places)
    serve(replace(wanted, name="starts"), places)
    (places.records / "two" / "readiness.json").write_text("{}")
    assert forget(places, check_mode=True)
    assert forget(places)
    left = sorted(str(path.relative_to(places.records)) for path in places.records.rglob("*"))
    assert left == ["starts", "two", "two/readiness.json"]
    assert not forget(places)


def test_a_name_that_is_no_unit_is_refused(wanted: Subject, places: Places) -> None:
    with pytest.raises(ProbesFailed, match=r"'\.\./x' cannot be the name"):
        bring_about([{**entry(wanted), "name": "../x"}], places=places)


# -- what was reported -----------------------------------------------------------------------------------------------


def done(status: int, *events: Any, said: str = "") -> subprocess.CompletedProcess[str]:
    text = "".join(f"{event if isinstance(event, str) else json.dumps(event)}\n" for event in events)
    return subprocess.CompletedProcess([], status, text, said)


@pytest.mark.parametrize(
    ("ended", "identifier", "found"),
    [
        (done(203), "start", "status 203"),
        (done(0), "start", "status 0"),
        (done(139, {"begin": "import"}), "import", "the process ended with status 139"),
        (
            done(1, {"begin": "import"}, said="INFO x\nOSError: libcuda.so.1: cannot open\n"),
            "import",
            "OSError: libcuda.so.1",
        ),
        (done(1, {"begin": "import"}, {"end": "import", "findings": []}), "end", "status 1"),
    ],
)
def test_a_program_that_ended_too_early_is_a_finding_where_it_stood(
    ended: subprocess.CompletedProcess[str], identifier: str, found: str
) -> None:
    (one,) = release_probe._read(ended)
    assert one["id"] == identifier
    assert found in one["found"]


def test_what_was_found_before_the_end_is_kept() -> None:
    events = [{"begin": "offline"}, "noise", "1", {"end": "offline", "findings": [BAD]}, {"begin": "import"}]
    assert [one["id"] for one in release_probe._read(done(137, *events))] == ["import", "import"]
    assert release_probe._read(done(0, *events[:4])) == [BAD]


def test_one_finding_of_several_instances_stands_once_and_errors_come_first() -> None:
    note = finding("versions-agree", "a mix", "a set", "None.", "warning")
    found = merged({"a": [note, BAD], "b": [BAD]}, [])
    assert [(one["id"], one["needed"]) for one in found] == [
        ("import", "vLLM, for instances a, b"),
        ("versions-agree", "a set, for instance a"),
    ]
