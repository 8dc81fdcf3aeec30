# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The proxy's certificate and files, with the real openssl; what runs on a host is in molecule/litellm_proxy."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import haproxy_socket, proxy, proxy_certificate
from ansible_collections.onprem.vllm.plugins.module_utils.host_lock import HostLocked
from ansible_collections.onprem.vllm.plugins.module_utils.proxy import (
    DIGEST_VARIABLE,
    KEYS,
    Host,
    KeyStore,
    Places,
    Proxy,
    ProxyFailed,
    bring_about,
)
from ansible_collections.onprem.vllm.plugins.module_utils.proxy_certificate import (
    Certificate,
    CertificateRefused,
    OwnCa,
    _openssl,
    check,
)
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_unit import StartFailed, SystemdError, UnitState

NAMES = ("llm.example.internal", "10.20.0.11", "fd00::11")
SECRET = "sk-master-0123456789"


@pytest.fixture
def ca(tmp_path: Path) -> OwnCa:
    return OwnCa(tmp_path / "ca")


def test_what_the_own_ca_issues_is_accepted_by_who_trusts_its_root(ca: OwnCa, tmp_path: Path) -> None:
    issued = ca.issue(NAMES)
    check(issued, NAMES)
    (tmp_path / "served.pem").write_bytes(issued.pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "served.pem")
    client = ssl.create_default_context(cafile=str(ca.root))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 asks by itself
    for name in NAMES:
        here, there = socket.socketpair()
        with here, there:
            thread = threading.Thread(target=lambda end=there: server.wrap_socket(end, server_side=True).close())
            thread.start()
            with client.wrap_socket(here, server_hostname=name) as connection:
                assert connection.getpeercert()["subject"] == ((("commonName", NAMES[0]),),)
            thread.join()
    assert (ca.directory.stat().st_mode & 0o777, (ca.directory / "root.key").stat().st_mode & 0o777) == (0o700, 0o400)


def test_a_certificate_is_issued_anew_where_it_must_be_and_the_root_stays(ca: OwnCa) -> None:
    assert ca.due(NAMES, 30) == "there is none yet"
    first = ca.issue(NAMES)
    root = ca.root.read_bytes()
    assert ca.due(NAMES, 30) == ""
    assert ca.issued() == first
    assert "expires within 398 days" in ca.due(NAMES, proxy_certificate.LEAF_DAYS + 1)
    assert "is not for new.example.internal" in ca.due([*NAMES, "new.example.internal"], 30)
    assert ca.issue(NAMES) != first
    assert ca.root.read_bytes() == root


def test_a_ca_that_was_made_halfway_is_made_whole(ca: OwnCa) -> None:
    """As a run leaves it that is killed after each of its writes."""
    ca.issue(NAMES)
    root = ca.root.read_bytes()
    (ca.directory / "issued.json").unlink()
    ca.root.unlink()
    (ca.directory / ".issuing-killed").mkdir()
    (ca.directory / ".issuing-killed" / "leaf.key").touch()
    assert ca.due(NAMES, 30) == "there is none yet"
    check(ca.issue(NAMES), NAMES)
    assert ca.root.read_bytes() == root
    assert {path.name for path in ca.directory.iterdir()} == {"root.key", "root.pem", "issued.json"}


def test_a_root_that_lost_its_key_is_not_replaced_by_one_that_no_client_trusts(ca: OwnCa, tmp_path: Path) -> None:
    ca.issue(NAMES)
    root, key = ca.root.read_bytes(), (ca.directory / "root.key").read_text(encoding="utf-8")
    (ca.directory / "root.key").unlink()
    with pytest.raises(CertificateRefused, match=r"has no root\.key\. Bring the files there back from a backup"):
        ca.issue(NAMES)
    # As older versions wrote it: the key alone.
    key = key[: key.index("-----BEGIN CERTIFICATE")]
    (ca.directory / "root.key").write_text(key, encoding="utf-8")
    check(ca.issue(NAMES), NAMES)
    other = OwnCa(tmp_path / "other")
    other.issue(NAMES)
    (ca.directory / "root.key").write_text(
        (other.directory / "root.key").read_text(encoding="utf-8").partition("-----BEGIN CERTIFICATE")[0],
        encoding="utf-8",
    )
    with pytest.raises(CertificateRefused, match=r"is not the one of root\.pem"):
        ca.issue(NAMES)
    assert ca.root.read_bytes() == root


def test_a_host_signs_with_the_root_that_clients_were_given_or_not_at_all(ca: OwnCa, tmp_path: Path) -> None:
    """After a teardown, on a reinstalled host or another one."""
    ca.keep("", "/srv/ca.pem")
    ca.keep("no certificate", "/srv/ca.pem")
    former = OwnCa(tmp_path / "former")
    former.issue(NAMES)
    known = former.root.read_text(encoding="utf-8")
    with pytest.raises(CertificateRefused) as refused:
        ca.keep(known, "/srv/ca.pem")
    for part in ("(/srv/ca.pem on", "this host has no CA", f"Put the backup of {ca.directory}", "delete or rename"):
        assert part in str(refused.value)
    assert not ca.directory.exists()
    ca.issue(NAMES)
    with pytest.raises(CertificateRefused, match="has another") as refused:
        ca.keep(known, "/srv/ca.pem")
    for root in (ca.root, former.root):
        shown = _openssl("x509", "-noout", "-fingerprint", "-sha256", "-in", str(root))
        assert shown.partition("=")[2].strip() in str(refused.value)


def test_the_root_that_was_handed_out_may_stand_among_others_and_in_the_key_s_file_alone(
    ca: OwnCa, tmp_path: Path
) -> None:
    ca.issue(NAMES)
    other = OwnCa(tmp_path / "other")
    other.issue(NAMES)
    known = other.root.read_text(encoding="utf-8") + ca.root.read_text(encoding="utf-8")
    ca.keep(known, "")
    ca.root.unlink()
    ca.keep(known, "")
    with pytest.raises(CertificateRefused, match="has another"):
        ca.keep(other.root.read_text(encoding="utf-8"), "")
    (ca.directory / "root.key").unlink()
    ca.keep(known, "")  # a CA that lost its root: issuing says so


def test_a_client_whose_clock_is_behind_accepts_what_was_just_issued(ca: OwnCa, tmp_path: Path) -> None:
    """Half an hour, and not two; nor does one accept it that is a second ahead of its end."""
    (tmp_path / "leaf.pem").write_text(ca.issue(NAMES).chain, encoding="utf-8")
    began = time.time()

    def accepted(moment: float) -> bool:
        verify = ["openssl", "verify", "-x509_strict", "-attime", f"{moment:.0f}", "-CAfile", str(ca.root)]
        return subprocess.run([*verify, str(tmp_path / "leaf.pem")], check=False, capture_output=True).returncode == 0

    end = began + proxy_certificate.LEAF_DAYS * 86400
    assert [accepted(began + seconds) for seconds in (-7200, -1800, 0)] == [False, True, True]
    assert [accepted(end - 60), accepted(end + 60)] == [True, False]


def test_a_root_of_a_clock_that_was_ahead_is_told(ca: OwnCa, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30 * 86400)
    ca.issue(NAMES)
    monkeypatch.undo()
    with pytest.raises(
        CertificateRefused, match=r"is not valid before .* UTC\. Look at this host's clock, then and now"
    ):
        ca.due(NAMES, 30)


def test_names_longer_than_a_subject_are_issued_for(ca: OwnCa) -> None:
    long = f"{'a' * 60}.{'b' * 60}.example.internal"
    check(ca.issue([long]), [long])


def test_nothing_outlives_its_root_and_a_root_that_ends_is_told(ca: OwnCa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_certificate, "CA_DAYS", 40)
    issued = ca.issue(NAMES)
    assert ca.due(NAMES, 30) == ""
    assert ssl_days(issued.chain) <= ssl_days(ca.root.read_text(encoding="utf-8")) <= 40
    with pytest.raises(CertificateRefused, match=r"ends within 60 days\. .* every client must be given"):
        ca.due(NAMES, 60)


def ssl_days(chain: str) -> float:
    """Days until a certificate ends."""
    ends = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate"], input=chain, capture_output=True, text=True, check=True
    )
    return (ssl.cert_time_to_seconds(ends.stdout.partition("=")[2].strip()) - time.time()) / 86400


@pytest.mark.parametrize(
    ("days", "names", "message"),
    [
        (-1, NAMES, "The certificate has expired"),
        (397, [*NAMES, "other.example.internal"], "is not for other.example.internal"),
        (397, ["10.20.0.12"], "is not for 10.20.0.12"),
    ],
)
def test_what_clients_would_not_accept_is_refused(
    ca: OwnCa, monkeypatch: pytest.MonkeyPatch, days: int, names: list[str], message: str
) -> None:
    monkeypatch.setattr(proxy_certificate, "LEAF_DAYS", days)
    issued = ca.issue(NAMES)
    with pytest.raises(CertificateRefused, match=message):
        check(issued, names)


def test_a_certificate_of_tomorrow_another_s_key_and_no_pem_are_refused(
    ca: OwnCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ca.issue(NAMES), ca.issue(NAMES)
    for wrong in (Certificate(one.chain, other.key), Certificate("no certificate", one.key)):
        with pytest.raises(CertificateRefused, match="do not belong together"):
            check(wrong, NAMES)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    with pytest.raises(CertificateRefused, match="is not valid before"):
        check(one, NAMES)


def made(tmp_path: Path, **more: object) -> Host:
    asked = {
        "release": "/opt/vllm/releases/litellm-1",
        "litellm_config": "model_list: []\n",
        "litellm_unit": "[Service]\n",
        "litellm_auth": "",
        "haproxy_config": "global\n    description @digest@\n",
        "haproxy_unit": "[Service]\n",
        "haproxy_lua": "",
        "program": "",
        "environment": {"A": "1"},
        "keys": {"ab" * 32: {"team": "a", "models": [], "requests_per_minute": 5, "expires": None}},
        "models": (),
        "ports": (4001,),
        "port": 443,
        "names": NAMES,
        "owner": (os.geteuid(), os.getegid()),
        "secrets": {"LITELLM_MASTER_KEY": SECRET},
    }
    places = {name: tmp_path / name for name in ("etc", "units", "runtime", "programs", "trial", "keys", "keys_said")}
    return Host(Proxy(**{**asked, **more}), Places(**places))  # type: ignore[arg-type]


def marks(host: Host, certificate: Certificate) -> tuple[bytes, bytes]:
    """What tells a running LiteLLM and a running HAProxy from one with other content."""
    environment = next(file.content for file in host.litellm_files() if file.path.name == "environment")
    config = next(file.content for file in host.haproxy_files(certificate) if file.path.name == "haproxy.cfg")
    return next(line for line in environment.splitlines() if line.startswith(DIGEST_VARIABLE.encode())), config


def test_each_part_is_due_exactly_where_it_reads_something_else(tmp_path: Path) -> None:
    one, other = Certificate("one", "key"), Certificate("two", "key")
    litellm, haproxy = marks(made(tmp_path), one)
    assert marks(made(tmp_path), one) == (litellm, haproxy)
    assert marks(made(tmp_path), other)[0] == litellm
    assert marks(made(tmp_path), other)[1] != haproxy
    for change in ({"secrets": {"LITELLM_MASTER_KEY": "other"}}, {"release": "/x"}, {"litellm_config": "x: 1\n"}):
        changed = marks(made(tmp_path, **change), one)
        assert changed[0] != litellm
        assert changed[1] == haproxy
    # Keys are read anew by LiteLLM while it runs; HAProxy's counts of them are a reload.
    keys = {"cd" * 32: {"team": "b", "models": [], "requests_per_minute": 6, "expires": None}}
    changed = marks(made(tmp_path, keys=keys), one)
    assert changed[0] == litellm
    assert changed[1] != haproxy


def test_no_secret_is_in_a_diff_and_what_holds_one_is_root_s_alone(tmp_path: Path) -> None:
    host = made(tmp_path)
    files = [*host.litellm_files(), *host.haproxy_files(Certificate("chain", "secret-key"))]
    assert SECRET not in str([file.difference() for file in files])
    assert "secret-key" not in str([file.difference() for file in files])
    holding = {file.path.name for file in files if SECRET.encode() in file.content or b"secret-key" in file.content}
    assert holding == {"environment", "certificate.pem"}
    assert {file.mode for file in files if file.path.name in holding} == {0o400}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What systemd was told, on a host where every unit runs with something else and every start succeeds."""
    words: list[str] = []
    running = UnitState(True, "active", "running", "success", 0, 0, "old", False, False, 0, 0)
    monkeypatch.setattr(proxy, "unit_state", lambda _unit: running)
    monkeypatch.setattr(proxy, "systemctl", lambda *given, **_unused: words.append(" ".join(given)))
    monkeypatch.setattr(proxy, "wait_started", lambda unit, *_unused: words.append(f"wait for {unit}"))
    up = [haproxy_socket.Server("litellm", port, "UP", 0, int(port), 0, 0) for port in ("4001", "4002")]
    monkeypatch.setattr(Host, "_servers", lambda _host: up)
    monkeypatch.setattr(Host, "running_digest", lambda _host, _port: "another")
    return words


def test_a_planned_restart_does_not_count_those_before(tmp_path: Path, told: list[str]) -> None:
    host = made(tmp_path, ports=(4001, 4002))
    assert host.processes(host.litellm_files()) == [f"onprem-vllm-litellm@{port}.service" for port in (4001, 4002)]
    for port in (4001, 4002):
        unit = f"onprem-vllm-litellm@{port}.service"
        assert told.index(f"reset-failed {unit}") < told.index(f"restart --no-block {unit}")
    # One after the other.
    assert told.index("wait for onprem-vllm-litellm@4001.service") < told.index(
        "restart --no-block onprem-vllm-litellm@4002.service"
    )


@pytest.mark.usefixtures("told")
def test_what_a_failed_run_brings_back_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revoked, shortened and added keys stay as they shall be; the former master key only lets LiteLLM start."""

    def key(team: str, **more: object) -> dict[str, object]:
        return {"team": team, "models": [], "requests_per_minute": 0, "expires": None, **more}

    former = {"a" * 64: key("master"), "b" * 64: key("revoked"), "c" * 64: key("shortened")}
    host = made(tmp_path, keys=former)
    host.processes(host.litellm_files())
    wanted = {"d" * 64: key("master"), "c" * 64: key("shortened", expires=1.0), "e" * 64: key("added")}
    host = made(tmp_path, keys=wanted, litellm_config="wrong: true\n", ports=(4001, 4002))
    starts = iter([StartFailed("no"), None])

    def wait(*_unused: object) -> None:
        if failure := next(starts):
            raise failure

    monkeypatch.setattr(proxy, "wait_started", wait)
    with pytest.raises(ProxyFailed, match="were brought back and serve"):
        host.processes(host.litellm_files())
    assert (host.places.etc / "litellm.yaml").read_text(encoding="utf-8") == "model_list: []\n"
    kept = json.loads((host.places.etc / "keys.json").read_text(encoding="utf-8"))
    assert {entry["team"] for entry in kept.values()} == {"master", "shortened", "added"}
    assert ({"a" * 64, "d" * 64} < {*kept}, kept["c" * 64]["expires"]) == (True, 1.0)


@pytest.mark.parametrize(
    "error",
    [HostLocked("another run"), SystemdError("systemctl stop failed"), PermissionError(13, "Permission denied")],
)
def test_a_teardown_that_cannot_go_on_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    host = made(tmp_path)
    host.places.etc.mkdir()

    def refuse(*_unused: object) -> None:
        raise error

    monkeypatch.setattr(proxy, "host_lock", refuse)
    with pytest.raises(ProxyFailed, match=re.escape(str(error))):
        proxy.remove(host.places, check_mode=False)


@pytest.mark.parametrize("run", ["first", "second"])
def test_a_second_process_that_does_not_start_is_tried_again_with_what_the_first_serves_with(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """In the run that brought the files, and in the one after it, which finds the first process serving with them."""
    host = made(tmp_path, ports=(4001, 4002))
    host.processes(host.litellm_files())
    host = made(tmp_path, litellm_config="new: true\n", ports=(4001, 4002))
    files = host.litellm_files()
    mark = proxy.read_environment(proxy._named(files, "environment").decode())[proxy.DIGEST_VARIABLE]
    if run == "second":
        monkeypatch.setattr(Host, "running_digest", lambda _host, port: mark if port == 4001 else None)

    def wait(unit: str, *_unused: object) -> None:
        if "4002" in unit:
            raise StartFailed("no memory")

    monkeypatch.setattr(proxy, "wait_started", wait)
    with pytest.raises(ProxyFailed, match=r"no memory\nonprem-vllm-litellm@4001\.service serves with the same files"):
        host.processes(files)
    assert told[-1] == "start --no-block onprem-vllm-litellm@4002.service"
    assert (host.places.etc / "litellm.yaml").read_text(encoding="utf-8") == "new: true\n"


STORE = KeyStore("[Service]\n", "print()\n", "", "postgresql://db/keys", SECRET)


def test_what_follows_the_database_is_due_where_it_runs_with_something_else(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made(tmp_path, store=STORE)
    host.places.keys_said.write_text('{"error": ""}', encoding="utf-8")
    files = host.store_files()
    assert host.store_is_due(files)
    assert host.follow_store(files, due=True) == ""
    assert f"restart --no-block {KEYS}" in told
    mark = (host.places.etc / "keys.environment").read_text(encoding="utf-8").partition("=")[2].strip()
    running = UnitState(True, "active", "running", "success", 7, 0, "old", False, False, 0, 0)
    monkeypatch.setattr(proxy, "unit_state", lambda _unit: running)
    monkeypatch.setattr(proxy, "process_environment", lambda _pid, _name: mark)
    assert not host.store_is_due(files)
    # A model more is read when it is needed.
    assert not (models := made(tmp_path, store=STORE, models=("a", "b"))).store_is_due(models.store_files())
    for change in ({"program": "print(1)\n"}, {"connection": "postgresql://other/keys"}, {"password": "other"}):
        changed = made(tmp_path, store=dataclasses.replace(STORE, **change))
        assert changed.store_is_due(changed.store_files()), change
    assert SECRET not in str([file.difference() for file in files]) + str(host.proxy)
    # A digest of a password is a way to try passwords.
    secret = [file.path.name for file in files if SECRET.encode() in file.content or mark.encode() in file.content]
    assert secret == ["database.json", "keys.environment"]
    assert {file.mode for file in files if file.path.name in secret} == {0o400}
    assert mark not in str([file.difference() for file in files])


@pytest.mark.usefixtures("told")
def test_a_database_that_does_not_answer_is_told_and_its_password_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_within", lambda _seconds, done: done())
    host = made(tmp_path, store=STORE)
    assert "do not reach the proxy: nothing" in host.follow_store(host.store_files(), due=True)
    host.places.keys_said.write_text(json.dumps({"error": f"no entry for {SECRET}"}), encoding="utf-8")
    said = host.follow_store(host.store_files(), due=False)
    assert "do not reach the proxy: no entry for (hidden)\nThe keys that were known before go on" in said


@pytest.mark.usefixtures("told")
def test_what_follows_the_database_and_does_not_start_is_told_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else of a run stops at it."""

    def wait(*_unused: object) -> None:
        raise StartFailed(f"No module named psycopg2; {SECRET}")

    monkeypatch.setattr(proxy, "wait_started", wait)
    host = made(tmp_path, store=STORE)
    said = host.follow_store(host.store_files(), due=True)
    assert said == "What follows the database of the keys does not start: No module named psycopg2; (hidden)"


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4])
def test_without_a_database_nothing_of_it_stays_whatever_a_killed_run_left(
    tmp_path: Path, told: list[str], left: int
) -> None:
    host = made(tmp_path, store=STORE)
    host.places.keys_said.write_text('{"error": ""}', encoding="utf-8")
    host.make_room_for_keys()
    host.follow_store(host.store_files(), due=True)
    parts = [host.places.keys, *(file.path for file in host.store_files())]
    for part in parts[:left]:
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    host = made(tmp_path)
    assert host.store_is_due(host.store_files())
    host.follow_store(host.store_files(), due=True)
    assert not host.store_is_due(host.store_files())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [host.places.keys_said], told


def test_room_for_keys_leaves_those_that_are_there(tmp_path: Path) -> None:
    host = made(tmp_path, store=STORE)
    host.make_room_for_keys()
    (host.places.keys / "teams.map").chmod(0o600)
    (host.places.keys / "teams.map").write_text("a b\n", encoding="utf-8")
    host.make_room_for_keys()
    assert (host.places.keys / "teams.map").read_text(encoding="utf-8") == "a b\n"


def test_a_check_writes_no_more_secrets_than_it_needs_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made(tmp_path)
    (host.places.trial / "left").mkdir(parents=True)
    (host.places.trial / "certificate.pem").write_text("the key of a killed run", encoding="utf-8")
    seen: dict[str, int] = {}

    def haproxy(_words: list[str], **_unused: object) -> subprocess.CompletedProcess[str]:
        seen.update(
            {path.name: path.stat().st_mode & 0o777 for path in [host.places.trial, *host.places.trial.iterdir()]}
        )
        return subprocess.CompletedProcess([], 1, "", "unknown keyword")

    monkeypatch.setattr("subprocess.run", haproxy)
    with pytest.raises(ProxyFailed, match="unknown keyword"):
        host.validate(host.haproxy_files(Certificate("chain", "key")), host.litellm_files())
    assert {*seen} == {
        host.places.trial.name,
        *("haproxy.cfg", "refuse.lua", "limits.map", "teams.map", "canary.map", "certificate.pem"),
    }
    assert {*seen.values()} == {0o700, 0o600}
    assert not host.places.trial.exists()


def test_a_certificate_is_read_without_a_file_that_a_killed_run_would_leave(
    ca: OwnCa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = ca.issue(NAMES)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    check(issued, NAMES)
    assert ca.due(NAMES, 30) == ""


@pytest.mark.usefixtures("told")
def test_clients_are_handed_the_root_of_the_own_ca_only_where_it_signs(tmp_path: Path) -> None:
    host = made(tmp_path)
    given = host.ca.issue(NAMES)
    assert bring_about(host, check_mode=True)["ca"] == host.ca.root.read_text(encoding="utf-8")
    assert bring_about(made(tmp_path, certificate=given), check_mode=True)["ca"] == ""


def test_a_certificate_that_does_not_fit_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    host = made(tmp_path, certificate=Certificate("no certificate", "no key"))
    with pytest.raises(ProxyFailed, match="do not belong together"):
        bring_about(host, check_mode=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("paths", "asked"),
    [
        (("/v1/models", "/v1/completions", "/v1/embeddings"), ["POST /v1/completions", "POST /v1/embeddings"]),
        (("/v1/chat/completions",), ["POST /v1/chat/completions"]),
        (("/v1/rerank",), ["GET /health"]),
    ],
)
def test_a_model_is_asked_where_and_as_clients_may(tmp_path: Path, paths: tuple[str, ...], asked: list[str]) -> None:
    """Of completions this one knows nothing, as an embedding model."""
    seen: list[str] = []

    class Front(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_unused: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            seen.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.send_error(404) if self.path == "/v1/completions" else self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

    with http.server.HTTPServer(("127.0.0.2", 0), Front) as server:
        host = made(tmp_path, listen=("127.0.0.2",), port=server.server_port, paths=paths, models=("tiny",))
        host.places.etc.mkdir()
        (host.places.etc / "certificate.pem").write_bytes(host.ca.issue(NAMES).pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(host.places.etc / "certificate.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert isinstance(host.answers()["tiny"], float)
        finally:
            server.shutdown()
            thread.join()
    assert seen == asked


def test_haproxy_is_asked_through_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    answers = {
        "show info": "Name: HAProxy\ndescription: abc\n",
        "show stat": "# pxname,svname,scur,status,\n"
        "model-a,FRONTEND,1,OPEN,\nmodel-a,one,2,UP 1/2,\nmodel-b,two,,DRAIN,\n",
        "set server x/y state drain": "No such server.\n",
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            for _unused in range(4):
                connection, _address = listening.accept()
                with connection:
                    connection.sendall(answers[connection.recv(1000).decode().strip()].encode())

        thread = threading.Thread(target=serve)
        thread.start()
        assert haproxy_socket.description(path) == "abc"
        assert [(one.name, one.sessions, one.up) for one in haproxy_socket.servers(path)] == [
            ("one", 2, True),
            ("two", 0, False),
        ]
        assert [one.name for one in haproxy_socket.servers(path, "model-b")] == ["two"]
        with pytest.raises(haproxy_socket.SocketError, match="No such server"):
            haproxy_socket.order(path, "set server x/y state drain")
        thread.join()
    with pytest.raises(haproxy_socket.SocketError, match="does not answer"):
        haproxy_socket.ask(tmp_path / "none.sock", "show info")
