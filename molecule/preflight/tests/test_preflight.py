# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The playbook doctor on the scenario's hosts: what it finds, its exit status, its forms, and that it only looks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

SCENARIO = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
CHECKOUT = SCENARIO.parents[1]
FINDINGS = {
    "cpu": [("start-port-taken", "error")],
    "sm120": [("toolkit-missing", "waived")],
    "l40s": [],
    "h200": [],
    "migpart": [],
    "none": [("gpu-missing", "error")],
    "olddriver": [("port-taken", "error"), ("driver-old", "error")],
    "busy": [("gpu-memory-taken", "error")],
    "mig": [("gpu-mig", "error")],
    "broken": [("gpu-unreadable", "waived")],
}
KEY = "a-very-secret-key-of-this-host"


def playbook(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    lab = CHECKOUT / ".cache" / "lab" / os.environ["LAB"] / "inventory.yml"
    command = [
        "ansible-playbook",
        "-i",
        str(lab),
        "-i",
        str(SCENARIO / "inventory"),
        f"playbooks/{name}.yml",
        *words,
    ]
    surroundings = {**os.environ, **environment}
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False, env=surroundings)


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return playbook("doctor", *words)


@pytest.fixture(scope="session", name="answer")
def _answer(tmp_path_factory):
    """One run over all hosts, as JSON."""
    path = tmp_path_factory.mktemp("doctor") / "findings.json"
    done = doctor("-e", "doctor_format=json", "-e", f"doctor_file={path}")
    return done, json.loads(path.read_text(encoding="utf-8"))


def test_each_host_has_its_findings_and_no_other(host, answer):
    name = host.backend.host
    found = [(finding["id"], finding["severity"]) for finding in answer[1] if finding["host"] == name]
    assert found == FINDINGS[name]


def test_errors_fail_the_run_and_nothing_was_changed(answer):
    done, _findings = answer
    assert done.returncode == 2, done.stdout
    assert "changed=0" in done.stdout.replace("changed=1", "", 1)  # the report's own file on the control node
    assert "6 findings of severity error" in done.stdout


def test_the_journal_s_cause_is_named_without_the_key(answer):
    done, findings = answer
    (cause,) = [finding for finding in findings if finding["host"] == "cpu"]
    assert "vllm-tiny.service is activating (auto-restart)" in cause["found"]
    assert "[Errno 98] Address already in use, key (hidden)" in cause["found"]
    assert "ss -ltnp" in cause["remedy"]
    assert KEY not in done.stdout + done.stderr + json.dumps(findings)


def test_a_sound_host_passes_in_the_form_for_people():
    done = doctor("--limit", "sm120:l40s:h200:migpart:broken", "-e", "doctor_fail_on=warning")
    assert done.returncode == 0, done.stdout
    said = " ".join(done.stdout.split())
    assert "waived gpu-unreadable broken" in said
    assert "waived toolkit-missing sm120" in said
    assert "5 hosts: 0 errors, 0 warnings, 2 waived" in done.stdout


def test_the_resolved_plan_says_what_the_hosts_facts_decide_and_the_desired_one_asks_no_host():
    """GDN on an H200 without nvcc; a host with a toolkit by its inventory; one for the CPU."""
    part = "instances[0].{serve: serve, environment: environment}, origins: origins"
    query = json.dumps({"plan_query": f"[].{{host: host, of: {part}}}"})
    answers = {}
    for resolved in ("true", "false"):
        done = playbook(
            *("plan", "--limit", "h200:sm120:cpu", "-e", query, "-e", f"plan_resolved={resolved}"),
            ANSIBLE_STDOUT_CALLBACK="onprem.vllm.answer",
        )
        assert done.returncode == 0, done.stderr
        answers[resolved] = {found["host"]: found for found in json.loads(done.stdout)}
    for host in ("sm120", "cpu"):
        assert answers["true"][host] == answers["false"][host]
    decided, desired = answers["true"]["h200"], answers["false"]["h200"]
    new = {path: origin for path, origin in decided["origins"].items() if path not in desired["origins"]}
    assert new == {
        "instances.next.serve.gdn-prefill-backend": "facts: no nvcc",
        "instances.next.environment.VLLM_USE_FLASHINFER_SAMPLER": "facts: no nvcc",
    }
    assert decided["of"]["serve"] == {**desired["of"]["serve"], "gdn-prefill-backend": "triton"}
    assert decided["of"]["environment"] == {**desired["of"]["environment"], "VLLM_USE_FLASHINFER_SAMPLER": "0"}


@pytest.mark.parametrize("path", ["/opt/vllm", "/models", "/var/lib/vllm"])
def test_nothing_was_made(host, path):
    assert not host.file(path).exists
    assert not host.user("vllm").exists
