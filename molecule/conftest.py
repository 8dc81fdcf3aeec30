# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every scenario's verify: one that proved nothing fails, and one that fails shows what the hosts say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import testinfra

CHECKOUT = Path(__file__).resolve().parents[1]
SHARED = CHECKOUT / "molecule" / "shared"
passed: list[str] = []


def lab(*arguments: str) -> str:
    """The output of a command of lab.py for the scenario's lab."""
    command = [sys.executable, str(CHECKOUT / "tests/lab/lab.py"), "--lab", os.environ["LAB"], *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\nended with {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


@pytest.fixture(name="lab")
def lab_fixture():
    return lab


@pytest.fixture
def at(request):
    """One host by name, where a test is not for every host: ``at("glm1").check_output("true")``, as root."""
    inventory = request.config.getoption("--ansible-inventory")
    return lambda name: testinfra.get_host(f"ansible://{name}", ansible_inventory=inventory, sudo=True)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call" and call.excinfo is None and SHARED not in item.path.parents:
        passed.append(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == 0 and not passed:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if not passed:
        terminalreporter.write_line("No test but the shared ones passed: this verify proved nothing.", red=True)
    if exitstatus != 0:
        terminalreporter.section("journal of failed units")
        terminalreporter.write(lab("failures"))
