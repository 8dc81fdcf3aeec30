# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What was taken out of the routes is put back, also where Ansible skips `always`: a host does not answer any more."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

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


def taking_out(name: str) -> dict[str, Any]:
    """The block of a playbook that has the task which takes out."""
    read = yaml.safe_load((PLAYBOOKS / f"{name}.yml").read_text("utf-8"))
    tasks = [task for play in read for task in play.get("tasks", [play])]
    while True:
        (block,) = [task for task in tasks if "take_out" in str(task.get("block"))]
        if any("take_out" in str(task.get("ansible.builtin.import_tasks")) for task in block["block"]):
            return dict(block)
        tasks = block["block"]


@pytest.mark.parametrize("name", ["tasks/restart", "reboot", "rollback"])
def test_each_playbook_puts_back_whatever_happens(name: str) -> None:
    block = taking_out(name)
    assert block["ignore_unreachable"] is True
    assert "put_back.yml" in str(block["always"])


def test_what_follows_a_role_that_could_not_be_run_is_not_done() -> None:
    """What serves on the way back is started behind a firewall, or not at all."""
    for task, after in itertools.pairwise(taking_out("tasks/restart")["block"]):
        if "ansible.builtin.import_role" in task:
            assert after["ansible.builtin.import_tasks"] == "tasks/reached.yml", task["name"]


LOOK = """          onprem.vllm.instance_info: {verify: none}
          register: __running
"""
LOOKED = """          ansible.builtin.set_fact: {__running: {instances: [{name: called-otherwise}]}}
"""


def test_a_host_that_is_lost_after_it_was_taken_out_is_put_back(tmp_path: Path) -> None:
    """The names are those of what it runs, which the inventory may call otherwise."""
    text = (PLAYBOOKS / "reboot.yml").read_text(encoding="utf-8")
    assert text.count(LOOK) == 1
    text = text.replace(LOOK, LOOKED).replace("import_tasks: tasks/", f"import_tasks: {PLAYBOOKS}/tasks/")
    (tmp_path / "reboot.yml").write_text(text, encoding="utf-8")
    hosts = inventory(tmp_path, vllm={"gpu1": LOST}, proxy={"proxy1": HERE})
    done = ansible_playbook(
        *("-i", "inventory/example", "-i", hosts, str(tmp_path / "reboot.yml"), "--limit", "gpu1", "-vv"),
        *("-e", "ansible_become=false"),
    )
    assert done.returncode != 0
    after = done.stdout.partition("TASK [Reboot]")[2]
    assert "UNREACHABLE" in after.partition(BACK)[0]
    assert "ok: [gpu1 -> proxy1]" in after.partition(BACK)[2]
    assert "gpu1-called-otherwise" in after.partition(BACK)[2]


def test_a_host_that_does_not_answer_is_not_taken_out(tmp_path: Path) -> None:
    hosts = inventory(tmp_path, vllm={"gpu1": LOST}, proxy={"proxy1": HERE})
    done = ansible_playbook(
        *("-i", "inventory/example", "-i", hosts, "playbooks/reboot.yml", "--limit", "gpu1"),
        *("-e", "ansible_become=false"),
    )
    assert done.returncode != 0
    assert "TASK [Look whether every proxy could take them out]" not in done.stdout


def test_where_a_proxy_does_not_answer_nothing_is_taken_out_and_the_others_are_put_back(tmp_path: Path) -> None:
    hosts = inventory(tmp_path, vllm={"gpu1": HERE}, proxy={"proxy1": LOST, "proxy2": HERE})
    tasks = PLAYBOOKS / "tasks"
    play = {
        "hosts": "vllm",
        "gather_facts": False,
        "vars": {"__servers": ["gpu1-m"]},
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


JUDGE = """
from ansible.module_utils.basic import AnsibleModule
names = ("servers", "ports", "share", "seconds", "requests", "errors_percent", "slowdown")
AnsibleModule(argument_spec={name: {"type": "raw"} for name in names}).fail_json(msg="judged", worse=%r)
"""
ROUTE = """
import json
from ansible.module_utils.basic import AnsibleModule
names = ("servers", "ports", "state", "wait_s", "proxy_follows", "taken")
module = AnsibleModule(argument_spec={name: {"type": "raw"} for name in names})
if module.params["state"] == "in":
    with open(%r, "a") as record:
        record.write(json.dumps([module.params[name] for name in ("servers", "proxy_follows", "ports")]) + "\\n")
module.exit_json()
"""
PRESENT = """
from ansible.module_utils.basic import AnsibleModule
AnsibleModule(argument_spec={"verify": {"type": "raw"}}).exit_json(instances=%r)
"""
PORTS = {"one": 8000, "two": 8001, "three": None, "left": 8003}
LISTENING = {"gpu1-one": 8000, "gpu1-two": 8001}
GO_BACK = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"refused": {"type": "bool"}})
if module.params["refused"]:
    module.fail_json(msg="Its release is gone.")
module.exit_json()
"""
ROLL_BACK = """
- go_back: {refused: "{{ vllm_service_rollback_instance in refused }}"}
  register: vllm_service_rollback_result
"""


def judged(
    folder: Path,
    host: dict[str, object],
    worse: list[str],
    refused: list[str],
    *,
    fails: bool = True,
    present: tuple[str, ...] = ("one", "two", "three"),
    alone: bool = False,
    other_proxy: dict[str, object] | None = None,
) -> tuple[str, list[list[object]]]:
    """What a run with canaries one and two says, and what it puts back: servers, whether the proxy follows, ports.

    The tasks are those of the collection; the modules of the proxy, and the role, are stand-ins.
    """
    stand_ins = {"onprem.vllm.canary": "judge", "onprem.vllm.drain": "route", "onprem.vllm.vllm_service": "serving"}
    stand_ins["onprem.vllm.instance_info"] = "present"
    record = folder / "record"
    for part in ("tasks", "library", "roles/serving/tasks"):
        (folder / part).mkdir(parents=True)
    for tasks in (PLAYBOOKS / "tasks").glob("*.yml"):
        text = tasks.read_text(encoding="utf-8")
        for name, stand_in in stand_ins.items():
            text = text.replace(name, stand_in)
        (folder / "tasks" / tasks.name).write_text(text, encoding="utf-8")
    (folder / "library" / "judge.py").write_text(JUDGE % worse, encoding="utf-8")
    (folder / "library" / "route.py").write_text(ROUTE % str(record), encoding="utf-8")
    here = [{"name": name, "port": PORTS[name]} for name in present]
    (folder / "library" / "present.py").write_text(PRESENT % here, encoding="utf-8")
    (folder / "library" / "go_back.py").write_text(GO_BACK, encoding="utf-8")
    (folder / "roles/serving/tasks/rollback.yml").write_text(ROLL_BACK, encoding="utf-8")
    servers = ["gpu1-one", "gpu1-two", "gpu1-three"]
    play = {
        "hosts": "vllm",
        "gather_facts": False,
        "any_errors_fatal": True,
        "vars": {
            "vllm_plan": {"instances": [{"name": "one", "port": 8000}]},
            "__following": ["proxy1"],
            "vllm_canary_share": 10,
            "__canaries": ["one", "two"],
            "refused": refused,
        },
        "tasks": [
            {
                "ignore_unreachable": True,
                "block": [{"import_tasks": "tasks/canary.yml", "when": fails, "tags": ["vllm_service"]}],
                "always": [
                    {
                        "import_tasks": "tasks/put_back.yml",
                        "vars": {"__servers": servers, "__these_alone": alone},
                        "tags": ["vllm_service"],
                    }
                ],
            }
        ],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    hosts = inventory(folder, vllm={"gpu1": host}, proxy={"proxy1": HERE, "proxy2": other_proxy or HERE})
    done = ansible_playbook("-i", hosts, str(folder / "play.yml"), "--tags", "vllm_service")
    assert (done.returncode != 0) == fails, done.stdout
    said = " ".join(done.stdout.split())
    return said, [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def test_a_canary_that_is_worse_and_cannot_go_back_stays_out_of_the_routes(tmp_path: Path) -> None:
    said, back = judged(tmp_path, HERE, worse=["gpu1-one"], refused=["one"])
    assert back == [[["gpu1-two", "gpu1-three"], False, LISTENING]] * 2
    assert "Back on what served before: gpu1-two. gpu1-one did not go back (Its release is gone). As it was" in said
    assert "it stays out of the routes of every proxy. Whatever run on gpu1 comes next puts it back" in said


def test_of_a_host_that_does_not_answer_what_was_worse_stays_out(tmp_path: Path) -> None:
    said, back = judged(tmp_path, LOST, worse=["gpu1-one"], refused=[])
    assert back == [[["gpu1-two", "gpu1-three"], False, {}]] * 2  # where it listens is not known
    assert "Connection refused). As it was worse, it stays out" in said


def test_what_went_back_and_what_could_not_be_judged_is_put_back(tmp_path: Path) -> None:
    everything = ["gpu1-one", "gpu1-two", "gpu1-three"]
    said, back = judged(tmp_path / "back", HERE, worse=["gpu1-one"], refused=[])
    assert back == [[everything, False, LISTENING]] * 2
    assert "Back on what served before: gpu1-one, gpu1-two." in said
    said, back = judged(tmp_path / "not-judged", HERE, worse=[], refused=["one", "two"])
    assert back == [[everything, False, LISTENING]] * 2
    assert "gpu1-two did not go back (Its release is gone). It is put back in the routes as it is." in said


def test_a_proxy_that_this_run_comes_to_later_is_told_so(tmp_path: Path) -> None:
    """proxy1 takes part, proxy2 does not: it keeps its key and its names of models."""
    _said, back = judged(tmp_path, HERE, worse=[], refused=[], fails=False)
    assert [follows for _servers, follows, _ports in back] == [True, False]


def test_what_the_host_has_is_put_back_and_what_was_removed_is_not(tmp_path: Path) -> None:
    _said, back = judged(tmp_path, HERE, worse=[], refused=[], fails=False, present=("two", "left"))
    assert [servers for servers, _follows, _ports in back] == [["gpu1-two", "gpu1-left"]] * 2


def test_a_rollback_of_one_puts_back_that_one_alone(tmp_path: Path) -> None:
    _said, back = judged(tmp_path, HERE, worse=[], refused=[], fails=False, present=("two", "left"), alone=True)
    assert [servers for servers, _follows, _ports in back] == [["gpu1-two"]] * 2


def test_a_canary_goes_back_also_where_a_proxy_does_not_answer(tmp_path: Path) -> None:
    said, back = judged(tmp_path, HERE, worse=["gpu1-one"], refused=[], other_proxy=LOST)
    assert "Back on what served before: gpu1-one, gpu1-two." in said
    assert [servers for servers, _follows, _ports in back] == [["gpu1-one", "gpu1-two", "gpu1-three"]]


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
