# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Two vLLM instances of one model behind the proxy, and clients that ask without a pause while things change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "litellm_proxy"))
import proxy_under_test as proxy

proxy.FRONT, proxy.MODEL = "proxy1", "tiny-qwen3"
INSTANCES = {"glm1-glm", "l40s1-gemma"}
START_SECONDS = 400


def test_both_instances_serve_the_model_and_neither_without_its_key(lab):
    assert {name for name, status in proxy.servers(lab).items() if status == "UP"} >= INSTANCES
    status, listing = proxy.ask(lab, "/v1/models")
    assert (status, [one["id"] for one in json.loads(listing)["data"]]) == (200, ["tiny-qwen3"])
    assert proxy.chat(lab, max_tokens=4)[0] == 200
    assert proxy.ask(lab, "/v1/models", key="sk-nobody-knows-this-one")[0] == 401
    get = "curl --silent --output /dev/null --max-time 5 --write-out %{http_code} http://glm1:8000/v1/models"
    assert lab("run", "sh", "-c", get) == "401"


def play(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A playbook of the collection, as a person runs it."""
    lab_inventory = proxy.CHECKOUT / ".cache/lab/mol_long_proxy/inventory.yml"
    inventories = [proxy.CHECKOUT / "inventory/lab", Path(__file__).parents[1] / "inventory/hosts.yml", lab_inventory]
    command = ["ansible-playbook", *[f"-i{path}" for path in inventories], f"playbooks/{name}.yml", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=proxy.CHECKOUT)


def back(lab, name: str) -> None:
    proxy.wait(f"{name} back", lambda: proxy.servers(lab)[name] == "UP", START_SECONDS)


def test_a_change_of_the_proxy_loses_no_request_and_limit_keeps_all_instances(lab):
    with proxy.load() as requests:
        changed = {"litellm_proxy_memory_max": "3G", "litellm_proxy_names": ["proxy1", "another.example"]}
        done = play("site", "--limit", "proxy", "-e", json.dumps(changed))
        assert done.returncode == 0, done.stdout
    assert "changed=1" in done.stdout
    assert proxy.failed(requests) == []
    assert set(proxy.servers(lab)) >= INSTANCES


def started(at) -> dict[str, str]:
    """The process of each instance."""
    units = {"glm1": "vllm-glm", "l40s1": "vllm-gemma"}
    return {host: at(host).check_output(f"systemctl show --property=MainPID --value {units[host]}") for host in units}


def test_an_upgrade_loses_no_request(lab, at):
    """A change of the unit stands for one: drained, restarted, ready, tried on a share, and in the routes again."""
    before = started(at)
    canary = {"vllm_canary_share": 20, "vllm_canary_s": 30, "vllm_canary_requests": 5, "vllm_canary_slowdown": 20}
    with proxy.load() as requests:
        done = play("upgrade", "--limit", "glm1", "-e", "vllm_service_nofile=65536", "-e", json.dumps(canary))
        assert done.returncode == 0, done.stdout
    after = started(at)
    assert (before["glm1"] != after["glm1"], before["l40s1"]) == (True, after["l40s1"])
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"


def test_an_upgrade_that_does_not_get_ready_loses_no_request_and_what_came_back_gets_some(lab):
    """Layers that the model does not have: missed when its weights are loaded."""
    wrong = {"vllm_group_overrides": {"serve": {"hf-overrides": {"num_hidden_layers": 64}}}}
    with proxy.load() as requests:
        done = play("upgrade", "--limit", "glm1", "-e", json.dumps(wrong))
        assert done.returncode != 0
    assert "was brought back and serves" in done.stdout
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"


def test_a_rollback_loses_no_request(lab, at):
    before = started(at)
    with proxy.load() as requests:
        done = play("rollback", "--limit", "glm1")
        assert done.returncode == 0, done.stdout
    after = started(at)
    assert (before["glm1"] != after["glm1"], before["l40s1"]) == (True, after["l40s1"])
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"


def test_a_changed_configuration_restarts_every_instance_and_loses_no_request(lab, at):
    before = started(at)
    with proxy.load() as requests:
        done = play("site", "-e", "vllm_service_nofile=131072")
        assert done.returncode == 0, done.stdout
    assert all(before[host] != process for host, process in started(at).items())
    assert proxy.failed(requests) == []
    assert {name for name, status in proxy.servers(lab).items() if status == "UP"} >= INSTANCES


def runs(host: str) -> bool:
    """Whether a host of the lab is up."""
    tool = [sys.executable, str(proxy.CHECKOUT / "tests/lab/lab.py"), "--lab", os.environ["LAB"]]
    return subprocess.run([*tool, "exec", host, "true"], check=False, capture_output=True).returncode == 0


def test_a_reboot_loses_no_request(lab):
    with proxy.load() as requests, ThreadPoolExecutor() as pool:
        rebooting = pool.submit(play, "reboot", "--limit", "glm1")
        # A container ends where a machine would start again.
        proxy.wait("its end", lambda: rebooting.done() or not runs("glm1"), START_SECONDS)
        lab("reboot", "glm1")
        done = rebooting.result()
        assert done.returncode == 0, done.stdout
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"


def test_a_restart_of_an_instance_loses_no_request(lab, at):
    """Without drain: vLLM answers what it has, and what comes meanwhile goes to the other instance."""
    with proxy.load() as requests:
        at("glm1").check_output("systemctl restart --no-block vllm-glm")
        proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["glm1-glm"], 90)
        time.sleep(3)
    assert proxy.failed(requests) == []
    back(lab, "glm1-glm")


def test_a_killed_instance_loses_its_streams_alone_and_comes_back_by_itself(lab, at):
    with proxy.load() as requests:
        death = proxy.kill(at("glm1"), "vllm-glm")
        proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["glm1-glm"], 30)
        time.sleep(3)
    for one in proxy.failed(requests):
        assert one["stream"], one
        assert proxy.under_way(one, death), one
    back(lab, "glm1-glm")
    assert proxy.chat(lab, max_tokens=4)[0] == 200


def test_a_new_key_of_the_instances_loses_no_request(lab):
    """The previous one is right as well until the proxy has the new one; then it is taken away."""
    old, new = "key-of-the-instances-sought-by-tests", "key-of-tomorrow-sought-by-tests"

    def status(host: str, key: str) -> str:
        get = ["curl", "--silent", "--output", "/dev/null", "--max-time", "5", "--write-out", "%{http_code}"]
        return lab("run", *get, "--header", f"Authorization: Bearer {key}", f"http://{host}:8000/v1/models")

    for keys, of_old in (({"VLLM_API_KEY": new, "PREVIOUS_VLLM_API_KEY": old}, "200"), ({"VLLM_API_KEY": new}, "401")):
        with proxy.load() as requests:
            done = play("site", "-e", json.dumps({"keys_of_instances": keys}))
            assert done.returncode == 0, done.stdout
        assert proxy.failed(requests) == []
        for host in ("glm1", "l40s1"):
            assert (status(host, new), status(host, old), status(host, "other")) == ("200", of_old, "401")
