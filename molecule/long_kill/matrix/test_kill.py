# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A rollout killed anywhere loses nothing, and the next one repairs: on bare hosts, and on hosts that serve."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "default"))
import site_under_test as site

KILLED = -9
MAX_RUNS = 200
HELD, MAX_REFUSED = "This host is being changed by", 30  # each waits half a minute for it
SHORTER = {"vllm_group_overrides": {"serve": {"max-model-len": 512}}}


def kill_through(seen: Path, *arguments: str, after_each=lambda: None) -> int:
    """Roll out again and again, killed at the next moment each time, until a run gets to its end; number of kills.

    Every task that the last run shows must have been one that a run was killed at, and some were hit in the middle too.
    """
    environment = {
        "ANSIBLE_CALLBACK_PLUGINS": str(site.CHECKOUT / "tests/lab/callbacks"),
        "ANSIBLE_CALLBACKS_ENABLED": "kill_at_task",
        "KILL_AT_TASK_SEEN": str(seen),
    }
    kills = refused = 0
    while kills < MAX_RUNS:
        done = site.site(*arguments, environment=environment)
        if HELD in done.stdout and done.returncode != KILLED:
            # What a killed run started on a host goes on to its end, and the next run is told so.
            refused += 1
            assert refused < MAX_REFUSED, done.stdout[-6000:]
            continue
        if done.returncode != KILLED:
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr
            starts = re.findall(r"^start of \S+:\d+ (.*)$", seen.read_text(), re.MULTILINE)
            shown = set(re.findall(r"^(?:TASK|RUNNING HANDLER) \[(.*)\] \*+$", done.stdout, re.MULTILINE))
            assert shown
            assert shown <= set(starts), f"no run was killed at {shown - set(starts)}"
            assert kills > len(starts), f"{kills} kills, {len(starts)} of them at the start of a task"
            return kills
        kills += 1
        print(seen.read_text().splitlines()[-1], flush=True)
        after_each()
    pytest.fail(f"no end after {MAX_RUNS} kills; the last one at the {seen.read_text().splitlines()[-1]}")


def nothing_left_over(lab) -> None:
    """No half-built release, no file written beside its place, no lock held, no guard armed."""
    for host in site.INSTANCES:
        assert site.half_built(lab, host) == ""
        timers = lab("exec", host, "systemctl", "list-units", "--no-legend", "--plain", "--all", "onprem-vllm-*.timer")
        assert timers == "", timers


def test_bare_hosts_killed_at_every_task(lab, tmp_path):
    kills = kill_through(tmp_path / "seen")
    print(f"{kills} kills", flush=True)
    site.ask_every_group(lab)
    nothing_left_over(lab)
    assert site.changed(site.site().stdout) == 0


def test_serving_hosts_killed_at_every_task_of_a_change_keep_serving(lab, tmp_path):
    """A change of one argument: until its restart the old process answers, after it the new one."""

    def answers() -> None:
        for host in site.INSTANCES:
            site.wait(f"vLLM on {host}", lambda host=host: site.process(host, lab)["ActiveState"] != "activating")
        site.ask_every_group(lab)

    change = ("-e", json.dumps(SHORTER))
    kills = kill_through(tmp_path / "seen", *change, after_each=answers)
    print(f"{kills} kills", flush=True)
    for host in site.INSTANCES:
        assert site.served_models(host, lab)[0]["max_model_len"] == 512
    nothing_left_over(lab)
    assert site.changed(site.site(*change).stdout) == 0
    back = site.site()
    assert back.returncode == 0, back.stdout
    site.ask_every_group(lab)
