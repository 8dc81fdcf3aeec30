# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What was taken out of the routes is put back, also where Ansible skips `always`: a host does not answer any more."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.onprem.vllm.tests.unit.test_inventory import PLAYBOOKS, ansible_playbook

LOST = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
HERE = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
BACK = "TASK [Back in the routes of every proxy]"


def inventory(folder: Path, **groups: dict[str, dict[str, object]]) -> str:
    """Hosts that answer, or not, on top of another inventory's variables."""
    children = {group: {"hosts": hosts} for group, hosts in groups.items()}
    (folder / "inventory").mkdir()
    (folder / "inventory" / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": children}}), encoding="utf-8")
    return str(folder / "inventory")


@pytest.mark.parametrize("name", ["serve", "reboot", "rollback"])
def test_each_playbook_puts_back_whatever_happens(name: str) -> None:
    plays = yaml.safe_load((PLAYBOOKS / f"{name}.yml").read_text(encoding="utf-8"))
    blocks = [task for play in plays for task in play["tasks"] if "take_out" in str(task.get("block"))]
    assert len(blocks) == 1
    assert blocks[0]["ignore_unreachable"] is True
    assert "put_back.yml" in str(blocks[0]["always"])


def test_what_follows_a_role_that_could_not_be_run_is_not_done() -> None:
    """What serves on the way back is started behind a firewall, or not at all."""
    plays = yaml.safe_load((PLAYBOOKS / "serve.yml").read_text(encoding="utf-8"))
    (tasks,) = [task["block"] for play in plays for task in play["tasks"] if "take_out" in str(task.get("block"))]
    for task, after in itertools.pairwise(tasks):
        if "ansible.builtin.import_role" in task:
            assert after["ansible.builtin.import_tasks"] == "tasks/reached.yml", task["name"]


def test_a_host_that_is_lost_after_it_was_taken_out_is_put_back(tmp_path: Path) -> None:
    hosts = inventory(tmp_path, vllm={"gpu1": LOST}, proxy={"proxy1": HERE})
    done = ansible_playbook(
        *("-i", "inventory/example", "-i", hosts, "playbooks/reboot.yml", "--limit", "gpu1"),
        *("-e", "ansible_become=false"),
    )
    assert done.returncode != 0
    after = done.stdout.partition("TASK [Reboot]")[2]
    assert "UNREACHABLE" in after.partition(BACK)[0]
    assert "ok: [gpu1 -> proxy1]" in after.partition(BACK)[2]


def test_where_a_proxy_does_not_answer_nothing_is_taken_out_and_the_others_are_put_back(tmp_path: Path) -> None:
    hosts = inventory(tmp_path, vllm={"gpu1": HERE}, proxy={"proxy1": LOST, "proxy2": HERE})
    tasks = PLAYBOOKS / "tasks"
    play = {
        "hosts": "vllm",
        "gather_facts": False,
        "vars": {"__servers": ["gpu1-m"], "__ports": [8000]},
        "tasks": [
            {
                "ignore_unreachable": True,
                "block": [{"import_tasks": str(tasks / "take_out.yml")}, {"debug": {"msg": "it restarts"}}],
                "always": [{"import_tasks": str(tasks / "put_back.yml")}],
            }
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = ansible_playbook("-i", hosts, str(tmp_path / "play.yml"))
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "proxy1 cannot be reached, as the task before says" in said
    assert "Out of the routes" not in said
    assert "it restarts" not in said
    assert "ok: [gpu1 -> proxy2]" in done.stdout.partition(BACK)[2]
    assert "may be out of its routes still" not in said


@pytest.mark.parametrize("accepted", [False, True])
def test_a_host_that_is_a_proxy_too_is_rebooted_only_where_its_outage_is_accepted(
    tmp_path: Path, accepted: bool
) -> None:
    away = {**LOST, "ansible_host": "127.0.0.2"}
    hosts = inventory(tmp_path, vllm={"gpu1": LOST, "gpu2": away}, proxy={"gpu2": {}})
    given = ("-e", json.dumps({"ansible_become": False, "vllm_accept_outage": accepted}))
    done = ansible_playbook("-i", "inventory/example", "-i", hosts, "playbooks/reboot.yml", *given)
    assert done.returncode != 0
    assert ("gpu2 is in group proxy, too" in done.stdout) is not accepted
    assert ("PLAY [Reboot, host by host]" in done.stdout) is accepted
    assert ("--limit 'all:!gpu2'" in done.stdout) is not accepted
