# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""serve.yml by the real ansible-playbook, its steps replaced by their names: who goes when, and what a failure ends."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.tests.unit.test_inventory import PLAYBOOKS, ansible_playbook

READ = "Have vLLM read the arguments of all before the first of several turns"
START = "Start each instance, ready by a completion of its own"
UP: dict[str, Any] = {"interrupted": ["m"], "routed": [{"serving": ["m"]}]}
DOWN: dict[str, Any] = {"interrupted": []}
MUTE: dict[str, Any] = {"interrupted": ["m"], "routed": [{"serving": []}, {"serving": []}]}
PROXIES = ("proxy1",)
MODEL = {"served_model_name": "model", "port": 8000}


def stand_in(task: dict[str, Any]) -> dict[str, Any]:
    """A task of serve.yml without its effect: it fails on the hosts for which ``broken`` names it."""
    kept = {
        name: value for name, value in task.items() if name in ("name", "when", "vars", "tags", "ignore_unreachable")
    }
    if task["name"] == "Look which are restarted or removed":
        found = {"interrupted": "{{ interrupted }}", "together": "{{ together | default([]) }}"}
        return {**kept, "set_fact": {"vllm_service_result": found}}
    if task["name"] == "Look which of them get requests now":
        return {**kept, "set_fact": {"__routed": {"results": "{{ routed | default([]) }}"}}}
    if {"ansible.builtin.group_by", "ansible.builtin.set_fact", "ansible.builtin.include_tasks"} & {*task}:
        return task
    if sections := {
        name: [stand_in(one) for one in task[name]] for name in ("block", "rescue", "always") if name in task
    }:
        return {**kept, **sections}
    if "left_alone" in str(task):
        return {**task, "ansible.builtin.import_tasks": str(PLAYBOOKS / "tasks" / "left_alone.yml")}
    # Which instances are taken out and put back, and which the role is to look after (none means all).
    shown = {
        "Take out": "__servers",
        "Put back": "__servers",
        "Open the firewall": "nftables_ports | map(attribute='port')",
        START: "vllm_service_only",
    }.get(task["name"], "[]")
    message = f"about <{{{{ {shown} | join(' ') }}}}>"
    return {**kept, "debug": {"msg": message}, "failed_when": f"'{task['name']}' in broken | default([])"}


def serve(
    folder: Path, hosts: dict[str, dict[str, Any]], *arguments: str, proxies: tuple[str, ...] = PROXIES, **given: Any
) -> subprocess.CompletedProcess[str]:
    plays = yaml.safe_load((PLAYBOOKS / "serve.yml").read_text(encoding="utf-8"))
    for play in plays:
        play["tasks"] = [stand_in(task) for task in play["tasks"]]
        play["become"] = False
    turn = yaml.safe_load((PLAYBOOKS / "tasks" / "restart.yml").read_text(encoding="utf-8"))
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / "restart.yml").write_text(yaml.safe_dump([stand_in(task) for task in turn]), encoding="utf-8")
    front = {"hosts": "proxy", "gather_facts": False, "tasks": [{"name": "Front", "debug": {}}]}
    (folder / "play.yml").write_text(yaml.safe_dump([*plays, front]), encoding="utf-8")
    plans = {
        host: {
            "instances": [{"name": name, **MODEL} for name in one.get("has", ["m"])],
            "firewall": {"ports": one.get("opens", [])},
        }
        for host, one in hosts.items()
    }
    variables = {
        "ansible_connection": "local",
        "vllm_plans": plans,
        **given,
    }
    groups = {"vllm": {"hosts": hosts}, **({"proxy": {"hosts": dict.fromkeys(proxies)}} if proxies else {})}
    (folder / "hosts.yml").write_text(
        yaml.safe_dump({"all": {"vars": variables, "children": groups}}), encoding="utf-8"
    )
    return ansible_playbook("-i", str(folder / "hosts.yml"), str(folder / "play.yml"), *arguments)


def batches(done: subprocess.CompletedProcess[str], task: str = START) -> list[list[str]]:
    """The hosts on which a task was run, by batch."""
    tasks = re.findall(rf"^TASK \[{re.escape(task)}\].*?(?=^TASK|^PLAY)", done.stdout, re.DOTALL | re.MULTILINE)
    return [sorted(re.findall(r"^(?:ok|fatal): \[(\w+)\]", one, re.MULTILINE)) for one in tasks]


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        ({"gpu1": UP, "gpu2": DOWN, "gpu3": UP, "gpu4": MUTE}, [["gpu2", "gpu4"], ["gpu1"], ["gpu3"]]),
        # Of two proxies one sends requests, or does not answer.
        ({"gpu1": UP, "gpu2": {**MUTE, "routed": [{"serving": ["m"]}, {"serving": []}]}}, [["gpu1"], ["gpu2"]]),
        ({"gpu1": UP, "gpu2": {**MUTE, "routed": [{"unreachable": True}, {"serving": []}]}}, [["gpu1"], ["gpu2"]]),
        ({"gpu1": DOWN, "gpu2": DOWN}, [["gpu1", "gpu2"]]),
    ],
)
def test_what_is_down_goes_first_and_at_once_and_what_serves_one_after_the_other(
    tmp_path: Path, hosts: dict[str, dict[str, Any]], order: list[list[str]]
) -> None:
    done = serve(tmp_path, hosts)
    assert done.returncode == 0, done.stdout
    assert batches(done) == order
    assert batches(done, "Front") == [["proxy1"]]
    assert "WARNING" not in done.stdout + done.stderr


def test_without_a_proxy_all_go_at_once(tmp_path: Path) -> None:
    assert batches(serve(tmp_path, {"gpu1": UP, "gpu2": DOWN}, proxies=())) == [["gpu1", "gpu2"]]


def test_tags_that_leave_the_look_out_change_all_at_once(tmp_path: Path) -> None:
    done = serve(tmp_path, {"gpu1": UP, "gpu2": UP}, "--tags", "nftables")
    assert batches(done, "Go on only where the firewall stands") == [["gpu1", "gpu2"]]


@pytest.mark.parametrize(
    ("canary", "proxies", "order"),
    [
        (0, PROXIES, ["gpu3", "gpu1", "gpu2"]),
        (10, PROXIES, ["gpu1", "gpu2", "gpu3"]),  # gpu3 would serve the new state before it was judged
        (0, (), ["gpu1", "gpu2", "gpu3"]),
    ],
)
def test_an_upgrade_tries_where_nothing_is_lost_or_the_canary(
    tmp_path: Path, canary: int, proxies: tuple[str, ...], order: list[str]
) -> None:
    hosts = {"gpu1": UP, "gpu2": UP, "gpu3": DOWN}
    given = {"__try_first": True, "__stop_at_first_failure": True, "__batches": [1], "vllm_canary_share": canary}
    assert batches(serve(tmp_path, hosts, proxies=proxies, **given)) == [[host] for host in order]


@pytest.mark.parametrize(("step", "stop"), [("Take out", False), (START, False), (START, True)])
def test_a_host_that_fails_ends_the_run_which_says_what_was_not_touched(tmp_path: Path, step: str, stop: bool) -> None:
    hosts = {"gpu1": {**UP, "broken": [step]}, "gpu2": UP, "gpu3": DOWN}
    done = serve(tmp_path, hosts, "--limit", "vllm:proxy", __stop_at_first_failure=stop)
    assert done.returncode != 0
    assert batches(done, "Take out") == [["gpu3"], ["gpu1"]]
    assert batches(done, "Front") == []
    assert batches(done, "Put back") == [["gpu3"], ["gpu1"]]
    said = " ".join(done.stdout.split())
    assert "gpu1 failed, as the task before says. The run ends here; left as they were: gpu2, proxy1." in said
    assert "--limit 'vllm:proxy:!gpu1'." in said


def test_one_that_cannot_be_put_back_ends_the_run_with_a_word_about_the_others(tmp_path: Path) -> None:
    done = serve(tmp_path, {"gpu1": {**UP, "broken": ["Put back"]}, "gpu2": UP})
    assert batches(done) == [["gpu1"]]
    said = " ".join(done.stdout.split())
    assert "gpu1 failed, as the task before says. The run ends here; left as they were: gpu2, proxy1." in said


def test_one_of_several_that_were_down_fails_alone(tmp_path: Path) -> None:
    done = serve(tmp_path, {"gpu1": UP, "gpu2": {**DOWN, "broken": [START]}, "gpu3": DOWN})
    assert done.returncode != 0
    assert batches(done) == [["gpu2", "gpu3"], ["gpu1"]]
    assert batches(done, "Front") == [["proxy1"]]
    assert "gpu2 failed, as the task before says." in done.stdout
    assert "The run ends here" not in done.stdout


def test_all_that_were_down_fail_and_none_that_serves_is_tried(tmp_path: Path) -> None:
    broken = {**DOWN, "broken": [START]}
    done = serve(tmp_path, {"gpu1": UP, "gpu2": broken, "gpu3": broken})
    assert batches(done) == [["gpu2", "gpu3"]]
    said = " ".join(done.stdout.split())
    assert "gpu2, gpu3 failed, as the task before says. The run ends here; left as they were: gpu1, proxy1." in said
    assert "--limit 'all:!gpu2:!gpu3'." in said


def test_a_host_that_failed_before_ends_nothing(tmp_path: Path) -> None:
    done = serve(tmp_path, {"gpu1": {"interrupted": "{{ fails_here }}"}, "gpu2": UP, "gpu3": UP})
    assert batches(done) == [["gpu2"], ["gpu3"]]
    assert batches(done, "Front") == [["proxy1"]]


def turns(done: subprocess.CompletedProcess[str], task: str) -> list[list[str]]:
    """What a task was about, of one host, turn by turn."""
    texts = re.findall(rf"^TASK \[{re.escape(task)}\].*?(?=^TASK|^PLAY)", done.stdout, re.DOTALL | re.MULTILINE)
    return [found[1].split() for text in texts if (found := re.search(r"about <(.*?)>", text))]


THREE: dict[str, Any] = {
    "has": ["a", "b", "c"],
    "interrupted": ["a", "b", "c"],
    "routed": [{"serving": ["gpu1-a", "gpu1-b"]}],
}


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ({}, [["c"], ["a"], ["b"]]),
        ({"vllm_max_unavailable": 2}, [["c"], ["a", "b"]]),
        ({"together": ["a"]}, [["a", "b", "c"]]),
    ],
)
def test_a_model_s_instances_on_one_host_go_out_in_turns(
    tmp_path: Path, given: dict[str, object], order: list[list[str]]
) -> None:
    done = serve(tmp_path, {"gpu1": {**THREE, **given}, "gpu2": DOWN})
    assert done.returncode == 0, done.stdout
    assert batches(done, "Front") == [["proxy1"]]
    of_gpu1 = done.stdout.partition("PLAY [Serve]")[2].partition("PLAY [Serve]")[2]
    shown = subprocess.CompletedProcess([], 0, of_gpu1)
    assert turns(shown, "Take out") == [[f"gpu1-{name}" for name in names] for names in order]
    assert turns(shown, START) == [*order[:-1], []], "after the last one all are as planned, removed ones too"
    # What the last one starts is no matter of those before.
    assert turns(shown, "Put back") == [[f"gpu1-{name}" for name in names] for names in (*order[:-1], THREE["has"])]
    assert len(batches(shown, READ)) == (len(order) > 1), "a bad argument of the last one is told before the first turn"


def test_hosts_that_go_at_once_do_so_whatever_each_restarts(tmp_path: Path) -> None:
    """And one that has turns left goes on alone."""
    quiet = {"routed": [{"serving": []}]}
    hosts = {"gpu1": {**THREE, **quiet}, "gpu2": {"interrupted": ["m"], **quiet}, "gpu3": DOWN}
    assert batches(serve(tmp_path, hosts)) == [["gpu1", "gpu2", "gpu3"]]


@pytest.mark.parametrize("step", ["Take out", START, "Put back"])
def test_a_turn_that_fails_is_the_last_one(tmp_path: Path, step: str) -> None:
    done = serve(tmp_path, {"gpu1": {**THREE, "broken": [step]}, "gpu2": UP})
    assert done.returncode != 0
    assert batches(done, "Take out") == [["gpu1"]]
    assert batches(done, "Put back") == [["gpu1"]]
    said = " ".join(done.stdout.split())
    assert "gpu1 failed, as the task before says. Of gpu1's instances these were not restarted: a, b." in said
    assert "The run ends here; left as they were: gpu2, proxy1." in said


def test_a_port_that_an_instance_leaves_in_a_later_turn_stays_open_until_then(tmp_path: Path) -> None:
    """Two turns come before it."""
    opens = [{"for": "instance b", "port": 8000, "networks": ["10.0.0.0/8"]}]
    routed = [{"serving": ["gpu1-a", "gpu1-b", "gpu1-c"]}]
    hosts = {"gpu1": {**THREE, "has": ["b", "c"], "opens": opens, "routed": routed}}
    done = serve(tmp_path, hosts, __before={"instances": [{"name": "a", "port": 8001}]})
    assert turns(done, "Take out") == [["gpu1-b"], ["gpu1-c"], ["gpu1-a"]]
    assert turns(done, "Open the firewall") == [["8000", "8001"]] * 3


def test_a_canary_is_of_the_first_turn(tmp_path: Path) -> None:
    given = {"__try_first": True, "__batches": [1], "vllm_canary_share": 10}
    done = serve(tmp_path, {"gpu1": THREE, "gpu2": UP}, **given)
    tried = "Try what serves a model first on a share of its requests, and go back where it is worse"
    assert done.returncode == 0, done.stdout
    assert batches(done) == [["gpu1"], ["gpu1"], ["gpu1"], ["gpu2"]]
    assert batches(done, tried) == [["gpu1"]]
