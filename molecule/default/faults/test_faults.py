# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a site survives by itself: a reboot, a killed process, a mirror that lost power. Then nothing is left to do."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import site_under_test as site


def test_a_reboot_and_a_kill_are_made_good_without_a_rollout(lab, at):
    """One host reboots while vLLM is killed on the other; both come back by themselves, and answer others once warm."""
    before = site.process("l40s1", lab)
    lab("exec", "l40s1", "kill", "-KILL", before["MainPID"])
    seen = set()

    def restarted():
        others, _body = site.get(lab, f"l40s1:{site.PORT}/health")
        state = site.process("l40s1", lab)
        serves = state["ActiveState"] == "active" and state["NRestarts"] != before["NRestarts"]
        seen.add((serves, others, site.get(lab, f"127.0.0.1:{site.PORT}/health", inside="l40s1")[0]))
        return serves

    with ThreadPoolExecutor() as pool:
        reboots = [pool.submit(lab, "reboot", "glm1"), pool.submit(lab, "reboot", "mirror1", "--kill")]
        site.wait("vLLM on l40s1", restarted)
        for reboot in reboots:
            reboot.result()
    site.wait("vLLM on glm1", lambda: site.process("glm1", lab)["ActiveState"] == "active")
    assert (False, 0, 200) in seen, seen
    assert not any(others == 200 for serves, others, _itself in seen if not serves), seen
    after = site.process("l40s1", lab)
    assert after["MainPID"] != before["MainPID"]
    assert int(after["NRestarts"]) > int(before["NRestarts"])
    site.ask_every_group(lab)
    at("glm1").check_output("curl --silent --fail --output /dev/null http://mirror1/manifest.json")
    assert at("glm1").check_output("nft list table inet vllm")


def test_a_rollout_after_that_has_nothing_to_do_and_restarts_nothing(lab):
    before = {name: site.process(name, lab)["MainPID"] for name in site.INSTANCES}
    done = site.site()
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.changed(done.stdout) == 0, done.stdout
    assert {name: site.process(name, lab)["MainPID"] for name in site.INSTANCES} == before


def test_a_wrong_inventory_changes_nothing_and_names_every_mistake(lab):
    """Three mistakes at once: all are named, before any host is asked."""
    instances = {
        "a b": {"profile": "tiny-cpu", "port": 8000},
        "b": {"profile": "no-such", "port": 8001},
        "c": {"profile": "tiny-cpu", "port": 70000},
    }
    before = {name: site.process(name, lab)["MainPID"] for name in site.INSTANCES}
    done = site.site("-e", json.dumps({"vllm_instances": instances}))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    for mistake in ["a b", "no-such", "70000"]:
        assert mistake in said
    assert site.changed(done.stdout) == 0
    assert {name: site.process(name, lab)["MainPID"] for name in site.INSTANCES} == before
