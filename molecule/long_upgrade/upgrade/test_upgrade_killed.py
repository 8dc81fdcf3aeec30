# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The control node dies while upgrade.yml activates: one generation serves after the next run, whatever the moment."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving_host import HOST, LIMIT, NEWER, get, play, site, status, version

CURRENT = "/etc/vllm/glm/current"


def state(lab, unit):
    return lab("exec", HOST, "systemctl", "show", "--property=ActiveState", "--value", unit).strip()


def generation(lab):
    return lab("exec", HOST, "readlink", CURRENT).strip()


# What is seen on the host, and how many seconds later the control node dies.
MOMENTS = {
    "its arguments are read": ("reading", 0),
    "the new generation is current": ("new", 0),
    "the new process starts": ("new starting", 0),
    "the new process loads": ("new starting", 15),
}


def seen(lab, before):
    facts = {
        "reading": state(lab, "onprem-vllm-check-glm.service") == "active",
        "new": generation(lab) != before,
        "starting": state(lab, "vllm-glm.service") == "activating",
    }
    return {name for name, holds in facts.items() if holds}


def upgrade_killed(lab, moment):
    """Start upgrade.yml and end all of its processes, workers and ssh with them, at a moment of the activation."""
    facts, seconds = MOMENTS[moment]
    before = generation(lab)
    # A process namespace: whatever Ansible starts ends with it, as with the machine's power.
    command = ["unshare", "--pid", "--fork", "--kill-child", "ansible-playbook", *site.INVENTORIES]
    log = site.LAB_DIRECTORY / "killed.log"
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [*command, "playbooks/upgrade.yml", *LIMIT, *NEWER], cwd=site.CHECKOUT, stdout=stream, stderr=stream
        ) as upgrade,
    ):

        def moment_or_end():
            assert upgrade.poll() is None, f"ended before {moment}:\n{log.read_text()}"
            return set(facts.split()) <= seen(lab, before)

        site.wait(moment, moment_or_end)
        time.sleep(seconds)
        assert upgrade.poll() is None, f"ended before {moment} + {seconds} s:\n{log.read_text()}"
        upgrade.kill()
    assert "PLAY RECAP" not in log.read_text()


@pytest.fixture
def older(lab):
    """The host serves 0.28.0, whatever a test before has left."""
    code, said = play("site")
    assert code == 0, said
    assert version(lab) == "0.28.0"


def one_generation_serves_after_the_next_run(lab):
    """What the dead control node started on the host goes on to its end there, and holds the host's lock until then."""
    free = ["flock", "--nonblock", "--conflict-exit-code", "0", "/run/lock/onprem-vllm.lock", "echo", "free"]
    site.wait("the end of what was started", lambda: lab("exec", HOST, *free).strip() == "free")
    code, said = play("upgrade", *NEWER)
    assert code == 0, said
    assert version(lab) == "0.31.0"
    found = status()
    assert (found["ready"], found["serves"]) == (True, found["generation"])
    assert generation(lab).endswith(f"/{found['generation']}")
    assert lab("exec", HOST, "pgrep", "--count", "--full", "bin/vllm serve").strip() == "1"
    assert site.half_built(lab, HOST) == ""
    code, said = play("upgrade", *NEWER)
    assert (code, site.changed(said)) == (0, 0), said


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_control_node_dies(lab, moment):
    upgrade_killed(lab, moment)
    site.wait("an answer, of one or the other, without any further run", lambda: get(lab, "/version") != "")
    one_generation_serves_after_the_next_run(lab)


@pytest.mark.usefixtures("older")
def test_the_control_node_dies_and_the_host_reboots(lab):
    upgrade_killed(lab, "the new process starts")
    lab("reboot", HOST)
    site.wait("the instance after the reboot", lambda: state(lab, "vllm-glm.service") == "active")
    one_generation_serves_after_the_next_run(lab)
