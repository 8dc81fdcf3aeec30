# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every scenario's verify: one that proved nothing fails, and one that fails shows what the hosts say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1] / "tests" / "lab" / "lab.py"
OWN_TESTS = Path(os.environ["MOLECULE_VERIFIER_TEST_DIRECTORY"])
passed: list[str] = []


def lab(*arguments: str) -> str:
    """The output of a command of lab.py for the scenario's lab."""
    command = [sys.executable, str(LAB), "--lab", os.environ["LAB"], *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(name="lab")
def lab_fixture():
    return lab


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call" and call.excinfo is None and OWN_TESTS in item.path.parents:
        passed.append(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == 0 and not passed:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if not passed:
        terminalreporter.write_line(f"No test of {OWN_TESTS} passed: this verify proved nothing.", red=True)
    if exitstatus != 0:
        terminalreporter.section("journal of failed units")
        terminalreporter.write(lab("failures"))
