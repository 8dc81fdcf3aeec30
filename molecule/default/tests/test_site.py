# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The site once it is rolled out: it answers, it is closed otherwise, and what serves can write none of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import site_under_test as site

serving = pytest.mark.parametrize("name", site.INSTANCES)


def test_every_group_answers_a_completion_from_outside(lab):
    answers = site.ask_every_group(lab)
    assert answers.count(" answered ") == len(site.INSTANCES)


@serving
def test_the_instance_is_a_service_that_comes_back_at_boot(at, name):
    service = at(name).service(f"vllm-{site.INSTANCES[name]}.service")
    assert service.is_enabled
    assert service.is_running


@serving
def test_the_service_user_has_no_shell_and_runs_the_process(at, lab, name):
    state = site.process(name, lab)
    host = at(name)
    assert host.user(state["User"]).shell.endswith("/nologin")
    assert host.check_output(f"ps -o user= -p {state['MainPID']}") == state["User"] != "root"


@serving
def test_what_serves_can_write_neither_release_nor_model_nor_configuration(at, lab, name):
    user = site.process(name, lab)["User"]
    writable = at(name).check_output(
        f"runuser -u {user} -- find /opt/vllm /models /etc/vllm -not -type l -writable 2>/dev/null || true"
    )
    assert writable == ""


@serving
def test_secrets_and_environment_are_roots_alone(at, name):
    environment = at(name).file(f"/etc/vllm/{site.INSTANCES[name]}/current/environment")
    assert (environment.user, environment.mode) == ("root", 0o400)


@serving
def test_the_process_was_told_to_stay_off_the_network(at, lab, name):
    pid = site.process(name, lab)["MainPID"]
    environment = at(name).check_output(f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines()
    assert {"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "FLASHINFER_NO_DOWNLOAD=1"} <= set(environment)


@serving
def test_only_ssh_and_the_instance_are_open(at, lab, name):
    """A listener that nobody asked for is cut by the firewall, the instance beside it is not."""
    at(name).check_output("systemd-run --quiet --unit=stray python3 -m http.server 9999")
    try:
        site.wait("stray listener", lambda: at(name).socket("tcp://0.0.0.0:9999").is_listening, 20)
        assert site.get(lab, f"{name}:{site.PORT}/health")[0] == 200
        assert site.get(lab, f"{name}:9999/")[0] == 0
    finally:
        at(name).check_output("systemctl stop stray")


@serving
def test_the_mirror_serves_the_bundle_and_the_host_sees_it(at, name):
    served = json.loads(at(name).check_output("curl --silent --fail http://mirror1/manifest.json"))
    assert served == site.manifest()


def test_not_a_packet_left_the_lab_and_the_sink_would_have_seen_one(lab):
    """The air gap, and the test of its test: one packet let go on purpose is counted."""
    assert lab("sink") == "0\n"
    lab("exec", "glm1", "bash", "-c", "echo leak > /dev/udp/192.0.2.1/9")
    assert lab("sink", "--reset") == "1\n"
