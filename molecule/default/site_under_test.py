# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the tests of the whole site share: which instances there are, asking them, and rolling out again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
LAB_DIRECTORY = CHECKOUT / ".cache" / "lab" / os.environ["LAB"]
KEYS = CHECKOUT / "molecule/default/inventory/secrets.yml"
INVENTORIES = [
    argument
    for path in (CHECKOUT / "inventory/lab", KEYS, LAB_DIRECTORY / "inventory.yml")
    for argument in ("-i", str(path))
]
INSTANCES = {"glm1": "glm", "l40s1": "gemma"}
PORT = 8000
KEY = yaml.safe_load(KEYS.read_text())["l40s"]["vars"]["vllm_secrets"]["gemma"]["VLLM_API_KEY"]
START_SECONDS = 400  # vLLM's start, with room for two cores that do other things as well

Lab = Callable[..., str]


def ask_every_group(lab: Lab, *more: str) -> str:
    """One completion from each instance, asked from outside the hosts; fails where one does not answer.

    Args:
        more: further arguments for Ansible, of the inventory.
    """
    listing = subprocess.run(
        ["ansible-inventory", *INVENTORIES, *more, "--list"], check=True, capture_output=True, text=True, cwd=CHECKOUT
    )
    (LAB_DIRECTORY / "inventory.json").write_text(listing.stdout)
    return lab("run", sys.executable, str(CHECKOUT / "tests/lab/ask.py"), str(LAB_DIRECTORY / "inventory.json"))


def site(
    *arguments: str, environment: dict[str, str] | None = None, playbook: str = "site.yml"
) -> subprocess.CompletedProcess[str]:
    """A rollout of site.yml, or another playbook, as a person runs it."""
    command = ["ansible-playbook", *INVENTORIES, playbook, *arguments]
    # What is read here is read by a test; molecule asks for colours.
    plain = {"ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}
    whole = {**os.environ, **plain, **(environment or {})}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=CHECKOUT, env=whole)


def changed(output: str) -> int:
    """The number of changes over all hosts, from a play recap."""
    counts = re.findall(r"changed=(\d+)", output.rsplit("PLAY RECAP", maxsplit=1)[-1])
    assert counts, output
    return sum(map(int, counts))


def status(*arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What playbook status knows of the instances, by host and name."""
    alone = {"ANSIBLE_STDOUT_CALLBACK": "onprem.vllm.answer"}
    asked = site(*arguments, "-e", "status_format=json", environment=alone, playbook="playbooks/status.yml")
    assert asked.returncode == 0, asked.stderr
    hosts = json.loads(asked.stdout).items()
    return {(host, one["name"]): one for host, answer in hosts for one in answer.get("instances", ())}


def get(lab: Lab, address: str, *, inside: str = "") -> tuple[int, str]:
    """Status and body of a request from outside the hosts, or on the host ``inside``; status 0 where nobody answers."""
    where = ("exec", inside) if inside else ("run",)
    ask = f"curl --silent --max-time 5 --write-out '\\n%{{http_code}}' http://{address}"
    # That nobody answers is an answer here, 000, and curl's failure says no more.
    body, _newline, code = lab(*where, "sh", "-c", f"{ask} || true").rpartition("\n")
    return int(code), body


def half_built(lab: Lab, host: str) -> str:
    """Paths of releases and models that are there under no name of their own."""
    return lab("exec", host, "find", "/opt/vllm/releases", "/models", "-mindepth", "1", "-maxdepth", "1", "-name", ".*")


def wait(what: str, done: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(1)


def process(host: str, lab: Lab) -> dict[str, str]:
    """The unit's state on a host: MainPID, NRestarts, ActiveState and so on."""
    shown = lab(
        "exec",
        host,
        "systemctl",
        "show",
        f"vllm-{INSTANCES[host]}.service",
        "--property=MainPID,NRestarts,ActiveState,SubState,User",
    )
    return dict(line.split("=", 1) for line in shown.splitlines())


def served_models(host: str, lab: Lab) -> list[dict[str, Any]]:
    """What a host's instance answers to who asks for its models, with the key."""
    curl = ["curl", "--silent", "--fail", "--header", f"Authorization: Bearer {KEY}"]
    read: dict[str, list[dict[str, Any]]] = json.loads(lab("run", *curl, f"http://{host}:{PORT}/v1/models"))
    return read["data"]


def manifest() -> dict[str, dict[str, dict[str, object]]]:
    """The manifest of the bundle that the mirror shall serve."""
    read: dict[str, dict[str, dict[str, object]]] = json.loads((CHECKOUT / ".cache/bundle/manifest.json").read_text())
    return read
