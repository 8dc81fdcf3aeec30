# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A serving host goes to another vLLM and back, and comes back by itself from one that fails; in this order."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving_host import HOST, NEWER, get, play, site, status, version

ASK = """
import json, sys, time, urllib.request
with urllib.request.urlopen(sys.argv[1] + "/v1/models") as answer:
    asked = {"model": json.load(answer)["data"][0]["id"], "prompt": "The", "max_tokens": 1, "ignore_eos": True}
kind = {"Content-Type": "application/json"}
while True:
    request = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(asked).encode(), kind)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            if json.load(answer)["choices"][0]["text"]:
                print(time.monotonic(), flush=True)
    except OSError:
        pass
    time.sleep(0.2)
"""


class Answers:
    """Asks for completions all the time, from outside, and knows the longest time between two answers."""

    def __init__(self):
        tool = [sys.executable, str(site.CHECKOUT / "tests/lab/lab.py"), "--lab", os.environ["LAB"], "run"]
        asked = [sys.executable, "-c", ASK, f"http://{HOST}:{site.PORT}"]
        self.process = subprocess.Popen([*tool, *asked], stdout=subprocess.PIPE, text=True)

    def stop(self):
        """Seconds."""
        self.process.terminate()
        times = [float(line) for line in self.process.communicate(timeout=60)[0].split()]
        return max(after - before for before, after in itertools.pairwise(times))


@pytest.fixture
def answers():
    asking = Answers()
    yield asking
    asking.process.kill()


def test_the_host_serves(lab):
    code, said = play("site")
    assert code == 0, said
    assert version(lab) == "0.28.0"


def test_check_mode_says_what_an_upgrade_would_do_and_does_nothing(lab):
    before = site.process(HOST, lab)["MainPID"]
    code, said = play("upgrade", *NEWER, "--check", "--diff")
    assert code == 0, said
    assert "release 0.31.0-cpu-" in said
    assert "+/opt/vllm/releases/0.31.0-cpu-" in said
    assert site.process(HOST, lab)["MainPID"] == before


def test_an_upgrade_changes_one_variable(lab, answers, capsys):
    code, said = play("upgrade", *NEWER)
    assert code == 0, said
    gap = answers.stop()
    assert version(lab) == "0.31.0"
    found = status()
    assert (found["generation"], found["serves"], found["rollback"], found["ready"]) == (2, 2, 1, True)
    assert (found["release"]["vllm"], found["drift"]) == ("0.31.0", ["the inventory asks for release " + asked(lab)])
    with capsys.disabled():
        print(f"upgrade: {gap:.1f} s without an answer")


def test_a_reboot_brings_the_same_generation_back_and_leaves_nothing_to_do(lab):
    lab("reboot", HOST)
    site.wait("0.31.0 after the reboot", lambda: "0.31.0" in get(lab, "/version"))
    code, said = play("upgrade", *NEWER)
    assert (code, site.changed(said)) == (0, 0), said
    assert (status()["serves"], status()["ready"]) == (2, True)


def asked(lab):
    """The id of the release that the inventory without further variables asks for."""
    return lab("exec", HOST, "sh", "-c", "basename /opt/vllm/releases/0.28.0-cpu-*").strip()


def test_the_way_back_needs_no_mirror(lab, answers, capsys):
    lab("exec", "mirror1", "sh", "-c", "systemctl stop nginx")
    try:
        code, said = play("rollback", *NEWER)
    finally:
        lab("exec", "mirror1", "systemctl", "start", "nginx")
    assert code == 0, said
    assert "The inventory still asks for another state" in said
    with capsys.disabled():
        print(f"rollback: {answers.stop():.1f} s without an answer")
    assert version(lab) == "0.28.0"
    found = status()
    assert (found["generation"], found["serves"], found["rollback"], found["drift"]) == (1, 1, 2, [])


def test_arguments_that_the_new_vllm_refuses_stop_nothing(lab):
    """What no catalogue knows: vLLM alone refuses this number."""
    before = site.process(HOST, lab)["MainPID"]
    wrong = {"vllm_group_overrides": {"serve": {"compilation-config": {"mode": 99}}}}
    code, said = play("upgrade", *NEWER, "-e", json.dumps(wrong))
    assert code != 0
    assert "Input should be 0, 1, 2 or 3" in said
    assert "Nothing was stopped or changed" in said
    assert site.process(HOST, lab)["MainPID"] == before
    assert version(lab) == "0.28.0"


def test_an_upgrade_that_does_not_get_ready_comes_back_by_itself_and_leaves_its_log(lab):
    """Layers that the model does not have: read without complaint, and missed when its weights are loaded."""
    wrong = {"vllm_group_overrides": {"serve": {"hf-overrides": {"num_hidden_layers": 64}}}}
    code, said = play("upgrade", *NEWER, "-e", json.dumps(wrong))
    assert code != 0
    assert f"fatal: [{HOST}]" in said
    assert "Generation 1 was brought back and serves" in said
    assert version(lab) == "0.28.0"
    found = status()
    assert (found["generation"], found["ready"], found["logs"]) == (1, True, ["/var/lib/vllm/glm/failed-3.log"])
    assert "weights were not initialized" in lab("exec", HOST, "cat", found["logs"][0])


def test_status_tells_what_was_changed_by_hand(lab):
    lab("exec", HOST, "sh", "-c", "echo '# by hand' >> /etc/vllm/glm/current/serve.yaml")
    lab(
        "exec",
        HOST,
        "sh",
        "-c",
        "echo '# by hand' >> $(ls /opt/vllm/releases/0.28*/lib/python*/site-packages/vllm/envs.py)",
    )
    drift = status()["drift"]
    assert "serve.yaml of generation 1 was changed by hand" in drift
    assert any("vllm/envs.py" in line for line in drift)
    assert play("status", "-e", "status_fail=true")[0] != 0
    code, said = play("rollback", "-e", "vllm_generation=1")
    assert code != 0
    assert "was changed by hand since it was written (serve.yaml)" in said


def test_old_generations_go_and_with_them_the_release_that_nothing_needs(lab):
    few = ("-e", '{"vllm_service_keep_generations": 1, "uv_venv_keep_releases": 1, "uv_venv_rebuild": true}')
    shorter = ("-e", json.dumps({"vllm_group_overrides": {"serve": {"max-model-len": 512}}}))
    code, said = play("site", *few, *shorter)
    assert code == 0, said
    assert lab("exec", HOST, "ls", "/etc/vllm/glm/generations").split() == ["1", "4"]
    assert lab("exec", HOST, "ls", "/opt/vllm/releases").split() == [asked(lab)]
    assert lab("exec", HOST, "sh", "-c", "find /var/cache -maxdepth 3 -name '0.31*'") == ""
    code, said = play("site", *few, *shorter)
    assert (code, site.changed(said)) == (0, 0), said
