# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every scenario's verify: one that proved nothing fails, and one that fails shows what the hosts say."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import testinfra

CHECKOUT = Path(__file__).resolve().parents[1]
SHARED = CHECKOUT / "molecule" / "shared"
# Everything that is written on a host; wheels and models were verified by their hashes.
WRITTEN = "/etc /home /opt/vllm/libexec /root /run /tmp /var"
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
def files_with():
    """Files of a host that hold a text, readable by whomever.

    grep's status is not looked at: it is 1 without a match and 2 where a file of /run went away; who uses this proves
    that it finds what is leaked on purpose.
    """
    return lambda text, host: lab(
        "exec", host, "sh", "-c", f"grep -rlsF -e {shlex.quote(text)} {WRITTEN} || true"
    ).splitlines()


@pytest.fixture
def said_on():
    """What any user of a host, or a collector of its logs, can read: the journal and every command line."""
    return lambda host: lab("exec", host, "sh", "-c", "journalctl --no-pager --output=export; ps axww -o args")


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
