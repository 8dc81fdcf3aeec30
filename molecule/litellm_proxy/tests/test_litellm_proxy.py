# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a client finds, and what the host looks like."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import proxy_under_test as proxy

UNITS = ("onprem-vllm-haproxy", "onprem-vllm-litellm@4001", "onprem-vllm-litellm@4002")


def test_every_model_answers_and_both_instances_of_one_do(lab):
    assert proxy.ask(lab, "/health") == (200, "ok\n")
    status, listing = proxy.ask(lab, "/v1/models")
    assert (status, {one["id"] for one in json.loads(listing)["data"]}) == (200, {"tiny", "org/Lone"})
    answers = [json.loads(proxy.chat(lab)[1])["choices"][0]["message"]["content"] for _unused in range(6)]
    assert set(answers) == {"8001", "8002"}
    assert json.loads(proxy.chat(lab, "org/Lone")[1])["choices"][0]["message"]["content"] == "8003"
    status, stream = proxy.chat(lab, stream=True)
    assert status == 200
    assert stream.count("data: {") >= 10
    assert stream.rstrip().endswith("data: [DONE]")


def test_keys(lab):
    assert proxy.ask(lab, "/v1/models", key="")[0] == 401
    assert proxy.chat(lab, key="sk-nobody-knows-this-one")[0] == 401
    status, said = proxy.chat(lab, key="sk-over-sought-by-tests")
    assert (status, "the key of over has expired" in said) == (401, True)
    assert proxy.chat(lab, "org/Lone", key="sk-tomorrow-sought-by-tests")[0] == 200
    status, said = proxy.chat(lab, "org/Lone", key=proxy.LIMITED)
    assert (status, "the key of limited may use tiny" in said) == (403, True)
    assert proxy.chat(lab, key=proxy.LIMITED, fallbacks=["org/Lone"])[0] == 400
    listing = json.loads(proxy.ask(lab, "/v1/models", key=proxy.LIMITED)[1])
    assert [one["id"] for one in listing["data"]] == ["tiny"]


def test_a_key_has_its_requests_per_minute_and_others_go_on(lab):
    found = [proxy.chat(lab, key=proxy.LIMITED)[0] for _unused in range(6)]
    assert found[-1] == 429
    assert set(found) <= {200, 429}
    assert (
        proxy.ask(lab, "/v1/models", "-o", "/dev/null", "-D", "-", key=proxy.LIMITED)[1].lower().count("retry-after: ")
    )
    # A key in another header would not be counted, so none is taken from there.
    more = ["-H", f"x-litellm-api-key: {proxy.MASTER}", "-H", f"x-api-key: {proxy.MASTER}"]
    assert proxy.ask(lab, "/v1/models", *more, key="sk-nobody-knows-this-one")[0] == 401
    assert proxy.chat(lab)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/metrics", "/tokenize", "/pause", "/docs", "/health/readiness", "/key/generate", "/v1/model/info"),
        *("/v1/../metrics", "/v1/models/..%2f..%2fmetrics", "//v1/models", "/v1/models/", "/tiny/v1/models"),
    ],
)
def test_nothing_else_is_served(lab, path):
    assert proxy.ask(lab, path, "--path-as-is")[0] == 404


def test_only_tls_from_1_2_on_and_the_certificate_is_for_the_names(lab):
    for version, rc in (("1.1", 35), ("1.2", 0), ("1.3", 0)):
        tried = f"--tlsv{version} --tls-max {version} --ciphers DEFAULT@SECLEVEL=0"
        command = f"curl -s -o /dev/null --cacert {proxy.WORK}/ca.pem {tried} https://role1/health; echo $?"
        assert int(lab("run", "sh", "-c", command)) == rc, version
    for name, rc in (("proxy.example.internal", 0), ("other.example.internal", 60)):
        resolved = f"--connect-to {name}:443:role1:443"
        command = f"curl -s -o /dev/null --cacert {proxy.WORK}/ca.pem {resolved} https://{name}/health; echo $?"
        assert int(lab("run", "sh", "-c", command)) == rc, name


@pytest.mark.parametrize("unit", UNITS)
def test_units_come_back_at_boot_and_run_as_they_should(at, unit):
    host = at("role1")
    assert host.service(unit).is_enabled
    pid = host.check_output(f"systemctl show --property=MainPID --value {unit}")
    users = set(host.check_output(f"ps -o user= --ppid {pid} -p {pid}").split())
    assert users == ({"root", "haproxy"} if unit == "onprem-vllm-haproxy" else {"vllm-proxy"})
    assert host.user("vllm-proxy").shell.endswith("/nologin")


def test_a_probe_says_which_units_run_and_whom_haproxy_asks():
    found = proxy.probe()
    assert (found["unknown"], found["proxy"]["silent"]) == ({}, None)
    assert {name: state["active"] for name, state in found["proxy"]["units"].items()} == dict.fromkeys(
        (f"{unit}.service" for unit in (*UNITS, "onprem-vllm-keys")), "active"
    )
    models = {one["name"]: one["model"] for one in found["proxy"]["instances"] if one["up"]}
    assert models == {"role2-one": "tiny", "role2-two": "tiny", "role2-lone": "org-lone-1a2b3c"}


def test_only_the_front_is_reachable_from_outside(at):
    listening = {line.split()[3] for line in at("role1").check_output("ss -Hltn").splitlines()}
    inside = {f"127.0.0.1:{port}" for port in (4001, 4002, 4100, 4101)}
    assert inside <= listening
    outside = {one for one in listening if not one.startswith(("127.", "[::1]")) and not one.endswith(":22")}
    assert outside == {"0.0.0.0:443", "[::]:443"}


def test_secrets_lie_in_root_only_files_and_keys_of_teams_nowhere(at):
    host = at("role1")
    for name, owner in (("environment", "root"), ("keys.json", "vllm-proxy"), ("certificate.pem", "root")):
        file = host.file(f"/etc/vllm-proxy/{name}")
        assert (file.user, file.mode) == (owner, 0o400), name
    places = "/etc /run /var/log /opt/vllm/libexec /proc/[0-9]*/cmdline"
    for secret in proxy.SECRETS:
        # grep itself must not be what it finds.
        sought = f"{secret[:-1]}[{secret[-1]}]"
        found = host.run(f"grep -rslE '{sought}' {places}; journalctl --no-pager | grep -cE '{sought}'").stdout.split()
        team = secret not in (proxy.MASTER, proxy.SECRETS[-1])
        assert found == ([] if team else ["/etc/vllm-proxy/environment"]) + ["0"], secret[:12]
    assert host.run("runuser -u vllm-proxy -- find /etc/vllm-proxy /opt/vllm -not -type l -writable").stdout == (
        "/etc/vllm-proxy/keys.json\n" if host.file("/etc/vllm-proxy/keys.json").mode & 0o200 else ""
    )
    assert host.run("runuser -u vllm-proxy -- cat /run/onprem-vllm-haproxy/admin.sock").rc != 0
