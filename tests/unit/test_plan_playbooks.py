# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Playbooks on the example inventory, whose hosts do not answer: what is said before any is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_ranges import ranges
from ansible_collections.onprem.vllm.tests.unit.test_inventory import PLAYBOOKS, ansible_playbook


def test_teardown_removes_nothing_that_is_the_system_s() -> None:
    wrong = {"uv_venv_root": "/", "vllm_service_user": "root", "vllm_release": "no-such"}
    done = ansible_playbook("-i", "inventory/example", "playbooks/teardown.yml", "-e", json.dumps(wrong))
    assert done.returncode != 0
    for part in ("uv_venv_root", "the system's own", "vllm_service_user", "[gpu1]"):
        assert part in done.stdout + done.stderr, part
    assert "UNREACHABLE" not in done.stdout
    assert "no-such" not in done.stdout, "what else is wrong is no reason to keep a host as it is"


def test_teardown_knows_every_directory_and_account_that_it_removes() -> None:
    text = Path(PLAYBOOKS / "teardown.yml").read_text(encoding="utf-8")
    [wrong] = [task["vars"]["wrong"] for task in yaml.safe_load(text)[0]["tasks"] if "vars" in task]
    named = set(re.findall(r"'(\w+_\w+)'", wrong))
    roots = {name for name in ranges()["paths"] if re.fullmatch(r"(?!.*release_root)\w+_root", name)}
    # Owner and group of the caches come from the plan.
    assert named == roots | {name for name in ranges()["accounts"] if not name.startswith("cache_dirs_")}
