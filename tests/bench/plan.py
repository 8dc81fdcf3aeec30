# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How long the plan takes, for 8 to 64 hosts with two instances each behind a proxy, and how that grows. Needs no host.

Processor seconds of the filters alone (the machine may be busy with other things), with Ansible's own inventory and
templating, and of the whole ``ansible-playbook plan.yml`` beside a play that only lists the same hosts, because most of
a small plan is Ansible's start. Run from the checkout's root with ``PYTHONPATH=.collections``.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from ansible_collections.onprem.vllm.plugins.filter.plan_table import plan_table
from ansible_collections.onprem.vllm.plugins.filter.plans import plans
from ansible_collections.onprem.vllm.plugins.filter.routes import routes

PASSES = 5
COUNTS = (8, 16, 32, 64)
# Nothing that the plan does with one host may depend on the others: from 8 to 64 hosts eight times, and a tenth more.
MOST_GROWTH = 8.8
MODELS = ("gemma-4-26b-a4b-it", "gemma-4-26b-a4b-it-assistant")
LIST = "- {hosts: all, gather_facts: false, tasks: [{debug: {msg: '{{ ansible_play_hosts_all }}'}, run_once: true}]}\n"


def write_inventory(folder: Path, count: int) -> None:
    """A site of ``count`` serving hosts with two instances each, a mirror and a proxy."""
    serving = {f"gpu{number}": {"ansible_host": f"10.20.{number // 250}.{number % 250 + 1}"} for number in range(count)}
    everybody = {
        "vllm_mirror_url": "http://{{ hostvars[groups['mirror'][0]].ansible_host }}",
        "vllm_client_networks": ["10.0.0.0/8"],
        "vllm_instance_networks": ["{{ hostvars[groups['proxy'][0]].ansible_host }}/32"],
        "vllm_models": {name: {"directory": "/x"} for name in MODELS},
        "vllm_release": "0.31.0-cu130",
        "vllm_instances": {
            name: {
                "profile": "gemma-4-26b-l40s",
                "port": 8000 + gpu,
                "gpus": [gpu],
                "served_model_name": f"gemma-{name}",
            }
            for gpu, name in enumerate(("one", "two"))
        },
    }
    children = {
        "mirror": {
            "hosts": {"m": {"ansible_host": "10.19.0.1"}},
            "vars": {"wheel_mirror_bundle": "/x", "vllm_mirror_networks": ["10.0.0.0/8"]},
        },
        "vllm": {"hosts": serving},
        "proxy": {"hosts": {"p": {"ansible_host": "10.19.0.2"}}},
    }
    text = yaml.safe_dump({"all": {"vars": everybody, "children": children}})
    (folder / "hosts.yml").write_text(text, encoding="utf-8")


def hostvars_of(folder: Path) -> HostVars:
    """Ansible's own reading of the inventory."""
    loader = DataLoader()
    inventory = InventoryManager(loader=loader, sources=[str(folder / "hosts.yml")])
    return HostVars(inventory, VariableManager(loader=loader, inventory=inventory), loader)


def processor_seconds(work: Callable[[], Any]) -> float:
    """The least of some passes, of this process: what the machine does besides only adds."""
    taken = []
    for _number in range(PASSES):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return min(taken)


def playbook_seconds(folder: Path, playbook: str) -> tuple[float, float]:
    """Processor and wall seconds of one ansible-playbook."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    environment = {**os.environ, "ANSIBLE_FORCE_COLOR": "0"}
    done = subprocess.run(
        ["ansible-playbook", "-i", str(folder / "hosts.yml"), playbook],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    wall = time.perf_counter() - begin
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    """Measure and print."""
    print("processor seconds (of the playbooks wall seconds, too)")
    print("hosts | instances | plans | a host, ms | routes with plans | the table | plan.yml      | a play alone")
    first: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        alone = Path(directory) / "list.yml"
        alone.write_text(LIST, encoding="utf-8")
        for count in COUNTS:
            folder = Path(directory) / str(count)
            folder.mkdir()
            write_inventory(folder, count)
            hostvars = hostvars_of(folder)
            serving = [f"gpu{number}" for number in range(count)]
            everybody = [*serving, "m", "p"]
            made = plans(hostvars, everybody)
            wrong = [found for plan in made.values() for found in plan["problems"]]
            assert not wrong, wrong[:3]
            assert sum(len(plan["instances"]) for plan in made.values()) == 2 * count
            whole = processor_seconds(lambda h=hostvars, e=everybody: plans(h, e))
            routed = processor_seconds(lambda h=hostvars, s=serving: routes(h, s, ["p"]))
            shown = processor_seconds(lambda m=made: plan_table(m.values()))
            cpu, wall = playbook_seconds(folder, "playbooks/plan.yml")
            bare, bare_wall = playbook_seconds(folder, str(alone))
            first[count] = whole
            print(
                f"{count:5} | {2 * count:9} | {whole:5.2f} | {whole / count * 1000:10.1f} | {routed:17.2f} | "
                f"{shown:9.2f} | {cpu:5.1f} ({wall:5.1f}) | {bare:4.1f} ({bare_wall:4.1f})"
            )
    growth = first[COUNTS[-1]] / first[COUNTS[0]]
    print(f"from {COUNTS[0]} to {COUNTS[-1]} hosts the plans take {growth:.1f} times as long; target: {MOST_GROWTH}")


if __name__ == "__main__":
    main()
