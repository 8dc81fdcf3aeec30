# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The inventories that are shipped, planned by the real ansible-playbook with no host reachable."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

COLLECTION = Path(__file__).resolve().parents[2]
PLAYBOOKS = COLLECTION / "playbooks"


def ansible_playbook(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("ansible-playbook")
    return subprocess.run(
        [str(program), *arguments],
        cwd=COLLECTION,
        env={**os.environ, "ANSIBLE_FORCE_COLOR": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def query(inventory: str, expression: str, *arguments: str) -> Any:
    done = ansible_playbook(
        *("-i", inventory, "playbooks/plan.yml", "-e", json.dumps({"plan_query": expression}), *arguments),
        ANSIBLE_CALLBACK_RESULT_FORMAT="json",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.search(r"TASK \[Show the plans\].*?=> (\{.*?^\})", done.stdout, re.DOTALL | re.MULTILINE)
    assert shown is not None, done.stdout
    return json.loads(json.loads(shown[1])["msg"])


def production_command(path: Path) -> dict[str, Any]:
    """The `vllm serve` command at the head of a group's variables, as arguments with their values."""
    head = path.read_text(encoding="utf-8").removeprefix("---\n").partition("\nvllm_")[0]
    command = " ".join(line[1:].strip() for line in head.splitlines() if line.startswith("#   "))
    program, serve, model, *words = shlex.split(command)
    assert (program, serve) == ("vllm", "serve")
    arguments: dict[str, Any] = {"model": model}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word.removeprefix("--")
            arguments[flag] = True
        else:
            assert arguments[flag] is True, word
            arguments[flag] = yaml.safe_load(word)
    return arguments


@pytest.fixture(scope="module")
def example() -> list[dict[str, Any]]:
    return query("inventory/example", "[]")


@pytest.mark.parametrize(("group", "name"), [("glm_8gpu", "glm"), ("l40s", "gemma")])
def test_example_renders_to_the_production_command(example: list[dict[str, Any]], group: str, name: str) -> None:
    expected = production_command(COLLECTION / "inventory" / "example" / "group_vars" / f"{group}.yml")
    assert len(expected) >= 10
    [serve] = [found["serve"] for plan in example for found in plan["instances"] if found["name"] == name]
    assert {**expected, "shutdown-timeout": 60} == serve


def test_example_passes_its_plan(example: list[dict[str, Any]]) -> None:
    assert [plan["host"] for plan in example] == ["mirror1", "gpu1", "gpu2", "proxy1"]
    assert [plan["problems"] for plan in example] == [[], [], [], []]
    assert example[2]["instances"][0]["environment"]["CUDA_VISIBLE_DEVICES"] == "0"


def test_lab_passes_its_plan_and_finds_the_mirror_by_its_address() -> None:
    """The mirror's address is a template over hostvars, which hostvars itself does not evaluate."""
    plans = query("inventory/lab", "[].{host: host, problems: problems, mirror: mirror.url, ports: firewall.ports}")
    assert [found["host"] for found in plans] == ["mirror1", "glm1", "l40s1"]
    assert all(found["problems"] == [] for found in plans)
    assert {found["mirror"] for found in plans} == {"http://10.77.0.13"}
    assert [port["port"] for found in plans for port in found["ports"]] == [80, 8000, 8000]


def test_site_names_all_problems_of_all_hosts_and_touches_none() -> None:
    """Nothing answers at these addresses: a run that touched a host would say unreachable."""
    wrong = {"vllm_release": "0.28.0-gpu", "vllm_client_networks": ["10.0.0.0/40"], "vllm_instnces": {}}
    done = ansible_playbook("-i", "inventory/example", "playbooks/site.yml", "--check", "-e", json.dumps(wrong))
    assert done.returncode != 0
    for part in (
        "3 problems",
        "0.28.0-gpu",
        "10.0.0.0/40",
        "vllm_instnces",
        "[gpu1, gpu2]",
        "[mirror1, gpu1, gpu2, proxy1]",
    ):
        assert part in done.stdout + done.stderr, part
    assert "UNREACHABLE" not in done.stdout
    assert "Look at every host" not in done.stdout


def test_a_plan_under_limit_is_the_same(example: list[dict[str, Any]]) -> None:
    assert query("inventory/example", "[]", "--limit", "gpu2") == example[2:3]


def rollout() -> list[dict[str, Any]]:
    """The plays of site.yml, which are those of upgrade.yml too."""
    site, upgrade = (
        [
            step["ansible.builtin.import_playbook"]
            for step in yaml.safe_load((PLAYBOOKS / name).read_text(encoding="utf-8"))
        ]
        for name in ("site.yml", "upgrade.yml")
    )
    assert site == upgrade
    return [play for part in site for play in yaml.safe_load((PLAYBOOKS / part).read_text(encoding="utf-8"))]


def test_a_release_is_proven_before_it_serves() -> None:
    plays = {play["name"]: play for play in rollout()}
    assert list(plays).index("Install beside what serves") < list(plays).index("Serve")
    install = plays["Install beside what serves"]
    assert "onprem.vllm.uv_venv" in [role["role"] for role in install["roles"]]
    assert [task["ansible.builtin.import_role"] for task in install["tasks"]] == [
        {"name": "onprem.vllm.vllm_service", "tasks_from": "variables"},
        {"name": "onprem.vllm.flashinfer", "tasks_from": "probe"},
    ]


def imported(tasks: list[dict[str, Any]]) -> list[str]:
    """The roles that tasks import whole, those of blocks among them."""
    names = []
    for task in tasks:
        names += imported(task.get("block", []))
        if included := task.get("ansible.builtin.include_tasks"):
            names += imported(yaml.safe_load((PLAYBOOKS / included).read_text(encoding="utf-8")))
        role = task.get("ansible.builtin.import_role", {})
        names += [role["name"]] if role and "tasks_from" not in role else []
    return names


def test_site_runs_the_roles_that_the_plan_names_in_its_order() -> None:
    plays = rollout()
    catalogue = yaml.safe_load((COLLECTION / "catalogue" / "inventory.yml").read_text(encoding="utf-8"))
    for group in ("mirror", "vllm", "proxy"):
        run = [
            name.removeprefix("onprem.vllm.")
            for play in plays
            if group in re.split(r"\W+", play["hosts"])
            for name in [role["role"] for role in play.get("roles", [])] + imported(play.get("tasks", []))
        ]
        assert run == [entry["role"] for entry in catalogue["roles"] if group in entry["groups"]]
    order = [entry["role"] for entry in catalogue["roles"]]
    assert order.index("nftables") < min(map(order.index, ("wheel_mirror", "vllm_service", "litellm_proxy")))


def test_teardown_takes_the_roles_back_in_reverse() -> None:
    plays = yaml.safe_load((COLLECTION / "playbooks" / "teardown.yml").read_text(encoding="utf-8"))
    catalogue = yaml.safe_load((COLLECTION / "catalogue" / "inventory.yml").read_text(encoding="utf-8"))
    [proxy, vllm, mirror] = [
        [
            task["ansible.builtin.import_role"]["name"].removeprefix("onprem.vllm.")
            for task in play["tasks"]
            if "ansible.builtin.import_role" in task
        ]
        for play in plays
        if play["hosts"] in ("proxy", "vllm", "mirror")
    ]
    wanted = {
        group: [entry["role"] for entry in reversed(catalogue["roles"]) if group in entry["groups"]]
        for group in ("proxy", "vllm", "mirror")
    }
    # Preflight only looks.
    assert (proxy, vllm, mirror) == tuple(roles[:-1] for roles in wanted.values())
    assert {roles[-1] for roles in wanted.values()} == {"preflight"}


def test_a_variable_has_the_default_in_playbooks_that_is_documented() -> None:
    documented = yaml.safe_load((COLLECTION / "catalogue" / "inventory.yml").read_text(encoding="utf-8"))["variables"]
    texts = [path.read_text(encoding="utf-8") for path in PLAYBOOKS.rglob("*.yml")]
    found = {one for text in texts for one in re.findall(r"\b(vllm_\w+) \| default\(([\d.]+|true|false)\)", text)}
    assert {("vllm_reboot_timeout_s", "1800"), ("vllm_drain_timeout_s", "600")} < found
    assert {name: yaml.safe_load(value) for name, value in found if "default" in documented[name]} == {
        name: documented[name]["default"] for name, _value in found if "default" in documented[name]
    }
