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

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "litellm_proxy"))
import proxy_under_test as proxy

proxy.FRONT, proxy.MODEL = "proxy1", "tiny-qwen3"
# Two vLLMs, LiteLLM and Ansible on two processors: an engine that gets none for a minute is slow, and not an outage.
proxy.PAUSE_S, proxy.PATIENCE_S = 0.5, 300.0
INSTANCES = {"glm1-glm", "l40s1-gemma"}
OLD_KEY, NEW_KEY = "key-of-the-instances-sought-by-tests", "key-of-tomorrow-sought-by-tests"
TEAM, NEW_TEAM = "sk-team-sought-by-tests", "sk-team-of-tomorrow-sought-by-tests"
NEW_MASTER = "sk-master-of-tomorrow-sought-by-tests"
SECRETS = [proxy.MASTER, NEW_MASTER, TEAM, NEW_TEAM, OLD_KEY, NEW_KEY]  # and what is made later
CONTROL = "marked-control-77e0"
START_SECONDS = 400


def test_both_instances_serve_the_model_and_neither_without_its_key(lab):
    assert {name for name, status in proxy.servers(lab).items() if status == "UP"} >= INSTANCES
    status, listing = proxy.ask(lab, "/v1/models")
    assert (status, [one["id"] for one in json.loads(listing)["data"]]) == (200, ["tiny-qwen3"])
    assert proxy.chat(lab, max_tokens=4)[0] == 200
    assert proxy.ask(lab, "/v1/models", key="sk-nobody-knows-this-one")[0] == 401
    get = "curl --silent --output /dev/null --max-time 5 --write-out %{http_code} http://glm1:8000/v1/models"
    assert lab("run", "sh", "-c", get) == "401"


def play(name: str, *arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """A playbook of the collection, as a person runs it who wants to see everything; no key is in what it says.

    Args:
        variables: given by a file, so that no key is on a command line.
    """
    lab_inventory = proxy.CHECKOUT / ".cache/lab/mol_long_proxy/inventory.yml"
    inventories = [proxy.CHECKOUT / "inventory/lab", Path(__file__).parents[1] / "inventory/hosts.yml", lab_inventory]
    given = proxy.WORK / "variables.json"
    given.touch(mode=0o600)
    given.write_text(json.dumps(variables))
    command = ["ansible-playbook", *[f"-i{path}" for path in inventories], f"playbooks/{name}.yml", *arguments]
    plain = {**os.environ, "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(
        [*command, "-vvv", "--diff", f"-e@{given}"],
        check=False,
        capture_output=True,
        text=True,
        cwd=proxy.CHECKOUT,
        env=plain,
    )
    leaked = [line for line in (done.stdout + done.stderr).splitlines() if any(secret in line for secret in SECRETS)]
    assert leaked == []
    return done


def question(host: str, port: int) -> str:
    """A command that prints the status of an instance asked without a key, 000 where nobody is reached.

    That nobody answers is what some tests look for, so curl's own failure counts as that answer.
    """
    ask = f"curl --silent --output /dev/null --max-time 3 --write-out %{{http_code}} http://{host}:{port}/v1/models"
    return f"{ask} || true"


def answers(lab, host: str, port: int) -> str:
    return lab("run", "sh", "-c", question(host, port))


def test_where_only_the_proxy_may_ask_instances_nobody_else_does(lab, at):
    """A client's packet to an instance's port is dropped, while requests through the proxy go on."""
    address = next(one for one in at("proxy1").interface("eth0").addresses if "." in one)
    ask = question("glm1", 8000)
    try:
        with proxy.load() as requests:
            done = play("site", "--limit", "glm1", vllm_instance_networks=[f"{address}/32"])
            assert done.returncode == 0, done.stdout
            assert (answers(lab, "glm1", 8000), lab("exec", "proxy1", "sh", "-c", ask)) == ("000", "401")
        assert proxy.failed(requests) == []
    finally:
        done = play("site", "--limit", "glm1")
    assert done.returncode == 0, done.stdout
    assert answers(lab, "glm1", 8000) == "401"


def back(lab, name: str) -> None:
    proxy.wait(f"{name} back", lambda: proxy.servers(lab)[name] == "UP", START_SECONDS)


def test_a_change_of_the_proxy_loses_no_request_and_limit_keeps_all_instances(lab):
    with proxy.load() as requests:
        changed = {"litellm_proxy_memory_max": "3G", "litellm_proxy_names": ["proxy1", "another.example"]}
        done = play("site", "--limit", "proxy", **changed)
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
        done = play("upgrade", "--limit", "glm1", vllm_service_nofile=65536, **canary)
        assert done.returncode == 0, done.stdout
    after = started(at)
    assert (before["glm1"] != after["glm1"], before["l40s1"]) == (True, after["l40s1"])
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"


def instances(port: int, **more: object) -> str:
    """``vllm_instances`` of both hosts with another port, and other values besides."""
    wanted = {"profile": "tiny-cpu", "port": port, **more}
    return f"{{{{ {{'glm' if inventory_hostname == 'glm1' else 'gemma': {wanted}}} }}}}"


def test_an_upgrade_that_does_not_get_ready_loses_no_request_and_what_came_back_gets_some(lab):
    """Layers that the model does not have: missed when its weights are loaded. It was to move, and stays."""
    wrong = {"vllm_host_overrides": {"serve": {"hf-overrides": {"num_hidden_layers": 64}}}}
    with proxy.load() as requests:
        done = play("upgrade", "--limit", "glm1", **wrong, vllm_instances=instances(8001))
        assert done.returncode != 0
    assert "was brought back and serves" in done.stdout
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"
    assert answers(lab, "glm1", 8000) == "401"


def test_a_rollback_loses_no_request(lab, at):
    before = started(at)
    with proxy.load() as requests:
        done = play("rollback", "--limit", "glm1")
        assert done.returncode == 0, done.stdout
    after = started(at)
    assert (before["glm1"] != after["glm1"], before["l40s1"]) == (True, after["l40s1"])
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"


def own_certificate(name: str) -> dict[str, str]:
    """Variables with a certificate of an operator for ``name``; its key is one of the secrets from now on."""
    pem, key = proxy.WORK / "own.pem", proxy.WORK / "own.key"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(key), "-out", str(pem)]
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-days", "30"]
    subprocess.run(["openssl", "req", "-x509", *made, *subject], check=True, capture_output=True)
    SECRETS.append(key.read_text().splitlines()[1])
    return given_certificate()


def given_certificate() -> dict[str, str]:
    """Variables with the certificate that was made last."""
    certificate, key = ((proxy.WORK / f"own.{name}").read_text() for name in ("pem", "key"))
    return {"litellm_proxy_certificate": certificate, "litellm_proxy_certificate_key": key}


def test_a_certificate_that_clients_would_not_accept_stops_the_run_before_any_instance_restarts(at):
    """With the change that the next test rolls out."""
    before = started(at)
    changed = {"vllm_service_nofile": 131072, "vllm_instances": instances(8001)}
    done = play("site", **changed, **own_certificate("proxy9"))
    assert done.returncode != 0
    assert "The certificate is not for proxy1" in done.stdout
    assert "PLAY [Install beside what serves]" not in done.stdout
    assert started(at) == before


def test_a_changed_configuration_moves_every_instance_and_loses_no_request(lab, at):
    before = started(at)
    with proxy.load() as requests:
        done = play("site", vllm_service_nofile=131072, vllm_instances=instances(8001))
        assert done.returncode == 0, done.stdout
    assert all(before[host] != process for host, process in started(at).items())
    assert proxy.failed(requests) == []
    assert {name for name, status in proxy.servers(lab).items() if status == "UP"} >= INSTANCES
    assert [answers(lab, host, port) for host in ("glm1", "l40s1") for port in (8000, 8001)] == ["000", "401"] * 2


def test_a_run_of_the_proxy_alone_is_not_led_away_from_what_serves():
    """The inventory has the former port again, and another name, and the hosts are left out."""
    # A team's key for a model that nobody serves is refused.
    renamed = {"vllm_instances": instances(8001, served_model_name="renamed"), "litellm_proxy_keys": {}}
    for change, said in (({}, "does not answer"), (renamed, "serves tiny-qwen3")):
        with proxy.load() as requests:
            done = play("site", "--limit", "proxy", **change)
            assert done.returncode != 0
        assert "The proxy keeps its routes, for the inventory's would lead away from what serves" in done.stdout
        assert said in done.stdout
        assert proxy.failed(requests) == []


def test_a_new_name_of_one_instance_stays_out_and_the_other_keeps_the_former(lab):
    """It would answer 404. The host alone is run: the proxy does not know the new name yet."""
    with proxy.load() as requests:
        done = play("site", "--limit", "glm1", vllm_instances=instances(8001, served_model_name="renamed"))
        assert done.returncode != 0
    assert "glm1-glm: serves renamed, and this proxy asks it for tiny-qwen3, so it stays out" in done.stdout
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "DRAIN"
    with proxy.load() as requests:
        done = play("rollback", "--limit", "glm1")
        assert done.returncode == 0, done.stdout
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["glm1-glm"] == "UP"


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

    def status(host: str, key: str) -> str:
        get = ["curl", "--silent", "--output", "/dev/null", "--max-time", "5", "--write-out", "%{http_code}"]
        return lab("run", *get, "--header", f"Authorization: Bearer {key}", f"http://{host}:8000/v1/models")

    both = {"VLLM_API_KEY": NEW_KEY, "PREVIOUS_VLLM_API_KEY": OLD_KEY}
    for keys, of_old in ((both, "200"), ({"VLLM_API_KEY": NEW_KEY}, "401")):
        with proxy.load() as requests:
            done = play("site", keys_of_instances=keys)
            assert done.returncode == 0, done.stdout
        assert proxy.failed(requests) == []
        for host in ("glm1", "l40s1"):
            assert (status(host, NEW_KEY), status(host, OLD_KEY), status(host, "other")) == ("200", of_old, "401")


def test_new_keys_of_clients_and_a_certificate_of_the_operator_lose_no_request(lab):
    """A team's key and the certificate under load; then the master key, with which the load asks."""
    assert [proxy.chat(lab, key=key, max_tokens=4)[0] for key in (TEAM, NEW_TEAM)] == [200, 401]
    own = own_certificate("proxy1")
    changed = {
        "keys_of_instances": {"VLLM_API_KEY": NEW_KEY},
        "litellm_proxy_keys": {"team": {"key": NEW_TEAM, "models": ["tiny-qwen3"]}},
    }
    root = (proxy.WORK / "ca.pem").read_text()
    # A client that was told of the change trusts both.
    (proxy.WORK / "ca.pem").write_text(root + own["litellm_proxy_certificate"])
    with proxy.load() as requests:
        done = play("site", "--limit", "proxy", **changed, **own)
        assert done.returncode == 0, done.stdout
    assert proxy.failed(requests) == []
    assert [proxy.chat(lab, key=key, max_tokens=4)[0] for key in (TEAM, NEW_TEAM)] == [401, 200]
    done = play("site", "--limit", "proxy", **changed, **own, litellm_proxy_master_key=NEW_MASTER)
    assert done.returncode == 0, done.stdout
    assert [proxy.chat(lab, key=key, max_tokens=4)[0] for key in (proxy.MASTER, NEW_MASTER)] == [401, 200]


def test_the_search_finds_what_is_leaked_on_purpose(lab, files_with, said_on, monkeypatch):
    """In the output of a playbook, a file and the journal; so the next test's silence says something."""
    monkeypatch.setattr(sys.modules[__name__], "SECRETS", ["Compose the plans"])
    with pytest.raises(AssertionError, match="Compose the plans"):
        play("plan")
    lab("exec", "proxy1", "sh", "-c", f"echo x={CONTROL} > /etc/leaked; echo {CONTROL} | systemd-cat; sleep 1")
    try:
        assert "/etc/leaked" in files_with(CONTROL, "proxy1")
        assert f"MESSAGE={CONTROL}" in said_on("proxy1")
    finally:
        lab("exec", "proxy1", "rm", "/etc/leaked")


@pytest.mark.parametrize(
    ("name", "more"), [("status", ()), ("plan", ("-e", "plan_compare=true")), ("teardown", ("--check",))]
)
def test_what_only_looks_shows_no_key(name, more):
    done = play(name, *more)
    assert done.returncode == 0, done.stdout


def test_keys_lie_in_files_of_root_alone_and_in_no_log(at, files_with, said_on):
    """Whatever was rolled out before; of teams' keys a host has nothing but what they are checked with."""
    places = {
        "proxy1": ("/etc/vllm-proxy/environment", "/etc/vllm-proxy/certificate.pem"),
        "glm1": ("/etc/vllm/glm/generations/",),
        "l40s1": ("/etc/vllm/gemma/generations/",),
        "mirror1": (),
    }
    found: dict[str, set[str]] = {secret: set() for secret in SECRETS}
    for host, allowed in places.items():
        said = said_on(host)
        assert [secret for secret in SECRETS if secret in said] == []
        for secret in SECRETS:
            for path in files_with(secret, host):
                file = at(host).file(path)
                assert path.startswith(allowed), (host, path)
                assert (file.user, file.mode) == ("root", 0o400), (host, path)
                found[secret].add(host)
    # What was replaced or refused is nowhere.
    held = {
        **{secret: set() for secret in SECRETS},
        NEW_MASTER: {"proxy1"},
        OLD_KEY: {"glm1", "l40s1"},  # generations to roll back to
        NEW_KEY: {"proxy1", "glm1", "l40s1"},
        SECRETS[-1]: {"proxy1"},
    }
    assert found == held


def test_doctor_names_an_instance_that_the_proxy_does_not_reach(lab, at):
    """It serves on its own host, and a rule of someone else keeps the proxy out."""
    at("glm1").check_output(
        "nft 'add table inet other { chain in { type filter hook input priority 0; tcp dport 8000 drop; }; }'"
    )
    try:
        proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["glm1-glm"], 60)
        report = proxy.WORK / "findings.json"
        done = play("doctor", "-e", "doctor_format=json", "-e", f"doctor_file={report}", "-e", "doctor_fail_on=never")
        assert done.returncode == 0, done.stdout
        [finding] = [one for one in json.loads(report.read_text()) if one["id"] == "proxy-instance-away"]
    finally:
        at("glm1").check_output("nft delete table inet other")
    assert finding["host"] == "proxy1"
    assert finding["found"].startswith("glm1-glm is DOWN: ")
    back(lab, "glm1-glm")


def test_two_instances_of_a_model_on_one_host_restart_in_turns_and_lose_no_request(lab, at, monkeypatch):
    """Together they would be more than may be out."""
    monkeypatch.setattr(proxy, "MASTER", NEW_MASTER)

    def of_host(glm1: dict[str, object], other: dict[str, object]) -> str:
        return f"{{{{ {glm1} if inventory_hostname == 'glm1' else {other} }}}}"

    wanted = [{"profile": "tiny-cpu", "port": port} for port in (8000, 8001)]
    key = {"VLLM_API_KEY": NEW_KEY}
    given = {
        "vllm_instances": of_host({"glm": wanted[0], "more": wanted[1]}, {"gemma": wanted[0]}),
        "vllm_secrets": of_host({"glm": key, "more": key}, {"gemma": key}),
        "litellm_proxy_master_key": NEW_MASTER,
        **given_certificate(),
    }
    hosts = ("--limit", "glm1:proxy1")
    done = play("site", *hosts, **given)
    assert done.returncode == 0, done.stdout
    both = {f"glm1-{name}": f"systemctl show --property=MainPID --value vllm-{name}" for name in ("glm", "more")}
    assert {name: proxy.servers(lab)[name] for name in both} == dict.fromkeys(both, "UP")
    before = {name: at("glm1").check_output(command) for name, command in both.items()}
    with proxy.load() as requests:
        done = play("site", *hosts, **given, vllm_service_nofile=65536)
        assert done.returncode == 0, done.stdout
    assert all(before[name] != at("glm1").check_output(command) for name, command in both.items())
    assert proxy.failed(requests) == []
    assert {name: proxy.servers(lab)[name] for name in both} == dict.fromkeys(both, "UP")


def test_a_host_that_is_taken_back_loses_no_request_and_a_model_s_only_one_is_not(lab, at, monkeypatch):
    monkeypatch.setattr(proxy, "MASTER", NEW_MASTER)
    with proxy.load() as requests:
        done = play("teardown", "--limit", "l40s1")
        assert done.returncode == 0, done.stdout
    assert proxy.failed(requests) == []
    assert not at("l40s1").file("/etc/systemd/system/vllm-gemma.service").exists
    done = play("teardown", "--limit", "glm1")
    assert done.returncode != 0
    assert "tiny-qwen3 would have no instance left that is ready" in done.stdout
    assert proxy.chat(lab, key=NEW_MASTER, max_tokens=4)[0] == 200
