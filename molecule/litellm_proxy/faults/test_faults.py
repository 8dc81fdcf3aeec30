# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What goes wrong, and what is changed, while clients ask without a pause."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from testinfra.host import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import proxy_under_test as proxy


@pytest.fixture(autouse=True)
def _whole(lab):
    """Whatever a test broke is mended."""
    yield
    for port in (8001, 8002, 8003):
        lab("exec", "role2", "systemctl", "start", f"instance@{port}")
        proxy.mode(lab, port, "ok")
    up = ("role2-one", "role2-two", "role2-lone", "4001", "4002")
    proxy.wait("all servers", lambda: {proxy.servers(lab)[name] for name in up} == {"UP"}, 120)


def test_planned_changes_lose_no_request(at):
    """A new certificate, which is a reload, LiteLLM's processes restarted, and one more reload."""
    before = at("role1").check_output("openssl x509 -noout -serial -in /etc/vllm-proxy/certificate.pem")
    with proxy.load() as requests:
        done = proxy.roll("-e", "litellm_proxy_renew_days=398", "-e", "litellm_proxy_memory_max=3G")
        assert done.returncode == 0, done.stdout
        at("role1").check_output("systemctl reload onprem-vllm-haproxy")
    assert before != at("role1").check_output("openssl x509 -noout -serial -in /etc/vllm-proxy/certificate.pem")
    for unit in ("onprem-vllm-litellm@4001", "onprem-vllm-litellm@4002"):
        assert at("role1").check_output(f"systemctl show --property=MemoryMax --value {unit}") == str(3 << 30)
    assert len(requests) > 50
    assert proxy.failed(requests) == []


def test_a_killed_litellm_and_a_killed_instance_lose_only_what_they_had(at):
    with proxy.load() as requests:
        deaths = [proxy.kill(at("role1"), "onprem-vllm-litellm@4001")]
        time.sleep(5)
        deaths.append(proxy.kill(at("role2"), "instance@8001"))
        time.sleep(5)
    lost = proxy.failed(requests)
    # Single answers are asked for again elsewhere; of streams only those can be lost that were under way.
    assert [one for one in lost if not one["stream"]] == []
    for one in lost:
        assert any(proxy.under_way(one, death) for death in deaths), one
    assert len(lost) <= 6


@pytest.mark.parametrize("how", ["kill --signal=KILL", "restart"])
def test_haproxy_that_ends_comes_back_by_itself_and_loses_only_what_it_had(lab, at, how):
    with proxy.load() as requests:
        before = time.time()
        at("role1").check_output(f"systemctl {how} onprem-vllm-haproxy")
        proxy.wait("back", lambda: proxy.healthy(lab))
        back = time.time()
        time.sleep(5)
    lost = proxy.failed(requests)
    for one in lost:
        assert proxy.under_way(one, (before, back)), one
    assert [one for one in requests if one["began"] > back and one["status"] == 200]


def test_streams_outlive_a_restart_of_litellm(lab):
    """45 s of them, of which LiteLLM by itself would give 30."""
    patient = ("-e", "litellm_proxy_request_timeout_s=90")
    body = {"model": "org/Lone", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    done = proxy.roll(*patient)
    assert done.returncode == 0, done.stdout
    proxy.mode(lab, 8003, "slow")
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(proxy.ask, lab, "/v1/chat/completions", "--max-time", "120", body=body) for _unused in range(2)
        ]
        time.sleep(5)
        done = proxy.roll(*patient, "-e", "litellm_proxy_memory_max=2G")
    assert done.returncode == 0, done.stdout
    for status, stream in (one.result() for one in asked):
        assert (status, stream.rstrip().endswith("data: [DONE]")) == (200, True), stream[-300:]
    done = proxy.roll()
    assert done.returncode == 0, done.stdout


def test_an_instance_that_moved_is_asked_where_it_is(lab, at):
    """By a reload alone; the run itself ends with an answer of every model."""
    models = yaml.safe_load((proxy.LOAD.parents[1] / "vars/main.yml").read_text())["litellm_proxy_models"]
    models[1]["servers"][0]["port"] = 8004
    at("role2").check_output("systemctl stop instance@8003")
    proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["role2-lone"])
    at("role2").check_output("systemctl start instance@8004")
    try:
        done = proxy.roll("-e", json.dumps({"litellm_proxy_models": models}))
        assert done.returncode == 0, done.stdout
        proxy.wait("up", lambda: proxy.servers(lab)["role2-lone"] == "UP")
        assert json.loads(proxy.chat(lab, "org/Lone")[1])["choices"][0]["message"]["content"] == "8004"
    finally:
        at("role2").check_output("systemctl stop instance@8004; systemctl start instance@8003")
        done = proxy.roll()
    assert done.returncode == 0, done.stdout


def test_a_drained_instance_stays_out_over_a_crash(lab, at):
    assert proxy.drain("out", "role2-one").returncode == 0
    proxy.kill(at("role1"), "onprem-vllm-haproxy")
    proxy.wait("HAProxy again", lambda: proxy.healthy(lab), 30)
    assert proxy.servers(lab)["role2-one"] == "DRAIN"
    assert proxy.drain("in", "role2-one").returncode == 0
    proxy.kill(at("role1"), "onprem-vllm-haproxy")
    proxy.wait("HAProxy again", lambda: proxy.healthy(lab), 30)
    proxy.wait("in the routes", lambda: proxy.servers(lab)["role2-one"] == "UP", 30)


def test_a_stream_from_before_a_reload_has_ended_before_its_instance_is_out(lab, at):
    """HAProxy's old worker has it, which ends after the time for a request."""
    done = proxy.roll("-e", "litellm_proxy_request_timeout_s=90")
    assert done.returncode == 0, done.stdout
    body = {"model": "org/Lone", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    proxy.mode(lab, 8003, "slow")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(proxy.ask, lab, "/v1/chat/completions", "--max-time", "120", body=body)
        time.sleep(5)
        at("role1").check_output("systemctl reload onprem-vllm-haproxy")
        done = proxy.module("drain", servers=["role2-lone"], state="out", wait_s=60, accept_outage=True)
        at("role2").check_output("systemctl kill --signal=KILL instance@8003")
    assert done.returncode == 0, done.stdout
    status, stream = asked.result()
    assert (status, stream.rstrip().endswith("data: [DONE]")) == (200, True), stream[-300:]
    assert proxy.drain("in", "role2-lone").returncode == 0
    done = proxy.roll()
    assert done.returncode == 0, done.stdout


def test_a_canary_gets_its_share_alone_and_is_judged_by_what_it_answered(lab):
    """Of 2 instances one is tried, as good as the other; then broken in each way, which the share alone sees."""
    with proxy.load() as requests:
        assert proxy.drain("out", "role2-one").returncode == 0
        done = proxy.canary("role2-one", share=20, seconds=15, requests=5)
        assert done.returncode == 0, done.stdout
    assert proxy.failed(requests) == []
    asked = int(re.search(r"role2-one: (\d+) requests, 0.0 % failed", done.stdout)[1])
    others = int(re.search(r"the others of tiny: (\d+) requests", done.stdout)[1])
    assert 0.08 < asked / (asked + others) < 0.4, (asked, others)
    assert proxy.servers(lab)["role2-one"] == "DRAIN"
    for mode in ("broken", "refusing", "hanging"):
        proxy.mode(lab, 8001, mode)
        with proxy.load() as requests:
            done = proxy.canary("role2-one", share=20, seconds=60, requests=5)
        assert done.returncode != 0, mode
        assert re.search(r'"worse": \[\s*"role2-one"', done.stdout), done.stdout
        assert 0 < len(proxy.failed(requests)) < 0.5 * len(requests), mode
        proxy.mode(lab, 8001, "ok")
    assert proxy.drain("in", "role2-one").returncode == 0


def test_an_instance_with_another_key_is_not_put_back(lab):
    """As after a rollback past a change of the key; its /health says 200."""
    assert proxy.drain("out", "role2-one").returncode == 0
    proxy.mode(lab, 8001, "rekeyed")
    done = proxy.drain("in", "role2-one")
    assert done.returncode != 0
    assert "role2-one: refused the key that this proxy asks with" in done.stdout + done.stderr
    assert "key-of-the-instances-sought-by-tests" not in done.stdout + done.stderr
    assert proxy.servers(lab)["role2-one"] == "DRAIN"
    assert {proxy.chat(lab)[0] for _unused in range(4)} == {200}
    proxy.mode(lab, 8001, "ok")
    assert proxy.drain("in", "role2-one").returncode == 0


def test_a_stopped_instance_leaves_and_comes_back_by_itself(lab, at):
    at("role2").check_output("systemctl stop instance@8001")
    assert proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["role2-one"]) < 15
    assert {proxy.chat(lab)[0] for _unused in range(4)} == {200}
    at("role2").check_output("systemctl stop instance@8002")
    proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["role2-two"])
    assert proxy.chat(lab)[0] == 503
    assert proxy.chat(lab, "org/Lone")[0] == 200
    at("role2").check_output("systemctl start instance@8001")
    assert proxy.wait("back", lambda: proxy.servers(lab)["role2-one"] == "UP") < 15
    assert proxy.chat(lab)[0] == 200


@contextmanager
def setting(host: Host, directives: str, *units: str) -> Iterator[None]:
    """Units that run with more directives, and without them afterwards."""
    places = [f"/run/systemd/system/{unit}.service.d" for unit in units]
    restart = f"systemctl daemon-reload && systemctl restart {' '.join(units)}"
    for place in places:
        host.check_output(f"mkdir {place} && printf '[Service]\n{directives}' > {place}/test.conf")
    host.check_output(restart)
    try:
        yield
    finally:
        host.check_output(f"rm -r {' '.join(places)} && {restart}")


def test_an_instance_that_dies_at_every_start_stays_out_and_is_reported(lab, at):
    """Before it listens, as an instance whose warm-up fails."""
    dies = r"ExecStart=\nExecStart=/bin/sleep 0.3\nRestartSec=0.2\n[Unit]\nStartLimitIntervalSec=0\n"
    with setting(at("role2"), dies, "instance@8001"):
        proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["role2-one"])
        with proxy.load() as requests:
            for _unused in range(20):
                assert "DOWN" in proxy.servers(lab)["role2-one"]
                time.sleep(1)
        [found] = [one for one in proxy.probe()["proxy"]["instances"] if one["name"] == "role2-one"]
        starts = at("role2").check_output("systemctl show --property=NRestarts --value instance@8001")
    assert int(starts) > 5
    assert proxy.failed(requests) == []
    assert (found["up"], bool(found["check"])) == (False, True)


# The clock of the day as many seconds ahead as a file says, which is in memory before HAProxy shuts itself in.
CLOCK = r"""
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *ahead;

__attribute__((constructor)) static void begin(void)
{
    ahead = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, open("/etc/clock", O_RDONLY), 0);
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    int status = syscall(SYS_clock_gettime, which, now);
    if (ahead && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return status;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (result)
        *result = found.tv_sec;
    return found.tv_sec;
}
"""


def test_a_clock_that_jumps_fails_no_request_and_keys_end_by_it(lab, at):
    """An hour ahead, then one behind: of HAProxy and LiteLLM alone, for the hosts of a lab share their machine's."""
    host = at("role1")

    def ahead(seconds: int) -> None:
        write = f"import struct; open('/etc/clock', 'r+b').write(struct.pack('q', {seconds}))"
        lab("exec", "role1", "python3", "-c", write)

    lab("exec", "role1", "sh", "-c", f"cat > /tmp/clock.c <<'END'\n{CLOCK}\nEND")
    host.check_output("gcc -shared -fPIC -Wall -Werror -o /usr/local/lib/clock.so /tmp/clock.c && touch /etc/clock")
    ahead(0)
    soon = (datetime.now(UTC) + timedelta(minutes=30)).isoformat()
    key = host.check_output(f"python3 /opt/vllm/libexec/team_keys.py add soon --expires {soon}")
    units = ("onprem-vllm-haproxy", "onprem-vllm-litellm@4001", "onprem-vllm-litellm@4002")
    with setting(host, "Environment=LD_PRELOAD=/usr/local/lib/clock.so", *units):
        proxy.wait("the key", lambda: proxy.chat(lab, key=key)[0] == 200, 60)
        with proxy.load() as requests:
            for seconds, status in ((3600, 401), (-3600, 200)):
                ahead(seconds)
                proxy.wait(f"{status}", lambda status=status: proxy.chat(lab, key=key)[0] == status)
                time.sleep(5)
                assert proxy.healthy(lab)
        assert proxy.failed(requests) == []
    host.check_output("rm /etc/clock; python3 /opt/vllm/libexec/team_keys.py remove soon")


def test_an_instance_that_accepts_and_never_answers(lab):
    proxy.mode(lab, 8003, "mute")
    began = time.monotonic()
    status, _said = proxy.chat(lab, "org/Lone")
    assert status in (503, 504)
    assert time.monotonic() - began < 15
    proxy.wait("out", lambda: "DOWN" in proxy.servers(lab)["role2-lone"], 30)
    assert proxy.chat(lab)[0] == 200


IDLE = """
import socket, ssl, time
context = ssl.create_default_context(cafile=CA)
held = []
for number in range(200):
    raw = socket.create_connection(("role1", 443))
    held.append(raw if number % 2 else context.wrap_socket(raw, server_hostname="role1"))
time.sleep(12)
print(sum(1 for one in held if one.recv(1000) is not None))
"""


def test_200_connections_that_never_send(lab):
    script = IDLE.replace("CA", repr(str(proxy.WORK / "ca.pem")))
    tool = [sys.executable, str(proxy.CHECKOUT / "tests/lab/lab.py"), "--lab", os.environ["LAB"], "run"]
    with subprocess.Popen([*tool, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as idle:
        time.sleep(2)
        assert {proxy.chat(lab)[0] for _unused in range(3)} == {200}
        held, _unused = idle.communicate(timeout=60)
    assert held.strip() == "200"


def made(path: Path, days: str, name: str) -> None:
    """A certificate that ends in so many days, and its key."""
    alternatives = f"subjectAltName=DNS:{name},DNS:proxy.example.internal"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{path}.key"]
    request = ["openssl", "req", "-new", *key, "-out", f"{path}.csr", "-subj", f"/CN={name}", "-addext", alternatives]
    subprocess.run(request, check=True, capture_output=True)
    sign = ["-req", "-in", f"{path}.csr", "-signkey", f"{path}.key", "-copy_extensions", "copy", "-days", days]
    subprocess.run(["openssl", "x509", *sign, "-out", f"{path}.pem"], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("days", "name", "key", "said"),
    [
        ("-1", "role1", "own", "The certificate has expired"),
        ("30", "role9", "own", "The certificate is not for role1"),
        ("30", "role1", "other", "do not belong together"),
    ],
)
def test_a_certificate_that_clients_would_not_accept_is_refused_before_it_is_installed(lab, at, days, name, key, said):
    before = at("role1").check_output("sha256sum /etc/vllm-proxy/*.pem /etc/vllm-proxy/haproxy.cfg")
    made(proxy.WORK / "own", days, name)
    made(proxy.WORK / "other", "30", "role1")
    given = {
        "litellm_proxy_certificate": (proxy.WORK / "own.pem").read_text(),
        "litellm_proxy_certificate_key": (proxy.WORK / f"{key}.key").read_text(),
    }
    done = proxy.roll("-e", json.dumps(given))
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert before == at("role1").check_output("sha256sum /etc/vllm-proxy/*.pem /etc/vllm-proxy/haproxy.cfg")
    assert proxy.chat(lab)[0] == 200


def test_keys_of_another_server_and_of_none(lab, at, files_with, said_on):
    """PostgreSQL on the other host, with a password that no output shows; then no database; then the own one again."""
    password = "password-of-the-database-sought-by-tests"
    server = at("role2")
    server.check_output(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=role2"
        " -addext subjectAltName=DNS:role2 -keyout /var/lib/postgresql/own.key -out /var/lib/postgresql/own.pem"
        " && chown postgres: /var/lib/postgresql/own.*"
    )
    settings = {"listen_addresses": "*", "ssl_cert_file": "/var/lib/postgresql/own.pem"}
    settings["ssl_key_file"] = "/var/lib/postgresql/own.key"
    lines = " ".join(f"\"{name} = '{value}'\"" for name, value in settings.items())
    server.check_output(
        f"systemctl start postgresql && cd /etc/postgresql/*/main && printf '%s\\n' {lines} >> postgresql.conf"
        " && echo 'hostssl keys proxy all scram-sha-256' >> pg_hba.conf && systemctl restart postgresql"
    )
    for order in (f"CREATE ROLE proxy LOGIN PASSWORD '{password}'", "CREATE DATABASE keys OWNER proxy"):
        server.check_output(f'runuser -u postgres -- psql -qc "{order}"')
    program = "python3 /opt/vllm/libexec/team_keys.py"
    own = at("role1").check_output(f"{program} add own")
    root = server.check_output("cat /var/lib/postgresql/own.pem")
    lab("exec", "role1", "sh", "-c", f"echo '{root}' > /etc/ssl/certs/keys.pem")
    there = {
        "litellm_proxy_database": "postgresql://proxy@role2/keys?sslmode=verify-full&sslrootcert=/etc/ssl/certs/keys.pem",
        "litellm_proxy_database_password": password,
    }
    given = proxy.WORK / "database.json"
    given.touch(mode=0o600)
    wrong = {
        "password authentication failed": {"litellm_proxy_database_password": f"{password}-wrong"},
        "certificate verify failed": {
            "litellm_proxy_database": there["litellm_proxy_database"].replace("keys.pem", "ssl-cert-snakeoil.pem")
        },
    }
    for said, instead in wrong.items():
        given.write_text(json.dumps(there | instead))
        done = proxy.roll("-vvv", "--diff", "-e", f"@{given}")
        assert done.returncode != 0
        assert "The keys of the database do not reach the proxy" in done.stdout
        assert said in done.stdout
        assert password not in done.stdout + done.stderr
    given.write_text(json.dumps(there))
    with proxy.load() as requests:
        done = proxy.roll("-vvv", "--diff", "-e", f"@{given}")
        assert done.returncode == 0, done.stdout
    assert proxy.failed(requests) == []
    assert password not in done.stdout + done.stderr
    shared = at("role1").check_output(f"{program} add shared")
    proxy.wait("the key", lambda: proxy.chat(lab, key=shared)[0] == 200)
    assert proxy.chat(lab, key=own)[0] == 401
    assert files_with(password, "role1") == ["/etc/vllm-proxy/database.json"]
    assert password not in said_on("role1")
    done = proxy.roll("-e", "litellm_proxy_database=")
    assert done.returncode == 0, done.stdout
    assert [proxy.chat(lab, key=key)[0] for key in (own, shared, proxy.MASTER)] == [401, 401, 200]
    assert not at("role1").file("/etc/systemd/system/onprem-vllm-keys.service").exists
    done = proxy.roll()
    assert done.returncode == 0, done.stdout
    proxy.wait("the key", lambda: proxy.chat(lab, key=own)[0] == 200)
    at("role1").check_output(f"{program} remove own")


def test_a_host_that_is_gone_without_a_word_and_one_that_is_only_silent(lab, at):
    """What the gone one had not answered is asked of the other; a stream of one that misses its checks goes on."""
    host = at("role2")
    done = proxy.roll("-e", "litellm_proxy_request_timeout_s=100")
    assert done.returncode == 0, done.stdout
    assert proxy.drain("out", "role2-two").returncode == 0
    proxy.mode(lab, 8003, "slow")
    body = {"model": proxy.MODEL, "messages": [{"role": "user", "content": "hello"}]}
    chat = ("/v1/chat/completions", "--max-time", "150")
    try:
        with ThreadPoolExecutor() as pool:
            stream = pool.submit(proxy.ask, lab, *chat, body={**body, "model": "org/Lone", "stream": True})
            time.sleep(5)
            # Frozen, an instance takes a request and does not answer it.
            host.check_output("systemctl kill --signal=STOP instance@8001 instance@8003")
            asked = pool.submit(proxy.ask, lab, *chat, body=body)
            time.sleep(2)
            assert not asked.done()
            host.check_output(
                "nft 'add table inet gone { chain in { type filter hook input priority 0; tcp dport 8001 drop; };"
                " chain out { type filter hook output priority 0; tcp sport 8001 drop; }; }'"
            )
            gone = time.monotonic()
            assert proxy.drain("in", "role2-two").returncode == 0
            status, said = asked.result()
            assert (status, json.loads(said)["choices"][0]["message"]["content"]) == (200, "8002"), said
            assert 15 < time.monotonic() - gone < 60
            assert "DOWN" in proxy.servers(lab)["role2-lone"]
            host.check_output("systemctl kill --signal=CONT instance@8003")
            status, said = stream.result()
            assert (status, said.rstrip().endswith("data: [DONE]")) == (200, True), said[-300:]
    finally:
        host.run("nft delete table inet gone")
        host.run("systemctl kill --signal=CONT instance@8001 instance@8003")
        proxy.drain("in", "role2-two")
    done = proxy.roll()
    assert done.returncode == 0, done.stdout
