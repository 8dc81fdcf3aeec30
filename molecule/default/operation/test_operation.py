# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What an operator does with a site that serves: compare, upgrade, look, roll back; in this order, on one host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import site_under_test as site

HOST = "glm1"
LENGTH = 512
SHORTER = ("-e", json.dumps({"vllm_group_overrides": {"serve": {"max-model-len": LENGTH}}}))


def play(name, *arguments):
    done = site.site("--limit", f"mirror,{HOST}", *arguments, playbook=f"playbooks/{name}.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status():
    return site.status("--limit", HOST)[HOST, "glm"]


def served_length(lab):
    return site.served_models(HOST, lab)[0]["max_model_len"]


def test_the_plan_says_which_instance_would_restart_and_why_and_changes_nothing(lab):
    before = site.process(HOST, lab)["MainPID"]
    assert "No instance would restart" in play("plan", "-e", "plan_compare=true")
    said = play("plan", "-e", "plan_compare=true", *SHORTER)
    assert "glm would restart: new generation 2: serve max-model-len" in said
    assert f"+max-model-len: {LENGTH}" in said
    assert site.process(HOST, lab)["MainPID"] == before
    assert (status()["generation"], served_length(lab) != LENGTH) == (1, True)


@pytest.mark.parametrize("tags", ["nftables", "uv_venv", "vllm_service,cache_dirs"])
def test_roles_are_run_by_their_tags_without_what_the_others_would_have_told(tags):
    assert site.changed(play("site", "--tags", tags)) == 0


def test_an_upgrade_activates_a_new_generation(lab):
    play("upgrade", *SHORTER)
    assert served_length(lab) == LENGTH
    found = status()
    assert (found["generation"], found["serves"], found["rollback"], found["ready"]) == (2, 2, 1, True)
    assert site.changed(play("upgrade", *SHORTER)) == 0


def test_a_rollback_brings_back_what_served_before(lab):
    said = play("rollback", *SHORTER)
    assert "glm: generation 1" in said
    assert "The inventory still asks for another state" in said
    assert served_length(lab) != LENGTH
    found = status()
    assert (found["generation"], found["serves"], found["rollback"], found["drift"]) == (1, 1, 2, [])
    assert site.changed(play("upgrade")) == 0
