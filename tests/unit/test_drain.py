# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which instances may be taken out, told by what HAProxy says of all."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.onprem.vllm.plugins.module_utils import proxy
from ansible_collections.onprem.vllm.plugins.module_utils.backend_keys import Asked
from ansible_collections.onprem.vllm.plugins.module_utils.drain import (
    CANARIES,
    LOCK,
    DrainRefused,
    Limits,
    Taken,
    away,
    put_back,
    take_out,
)
from ansible_collections.onprem.vllm.plugins.module_utils.host_lock import HostLocked, host_lock
from ansible_collections.onprem.vllm.plugins.module_utils.proxy_certificate import Certificate
from ansible_collections.onprem.vllm.plugins.modules import drain as module

from .test_backend_keys import instance
from .test_proxy import made


class HAProxy:
    """Speaks HAProxy's socket protocol: ``show stat`` and ``set server``, on a state that a test may change."""

    def __init__(self, **status: str) -> None:
        self.status = {name.replace("_", "-"): value for name, value in status.items()}
        self.sessions: dict[str, list[int]] = {}
        self.ports: dict[str, int] = {}
        self.old: dict[str, list[int]] = {}  # sessions that a worker from before a reload has
        self.orders: list[str] = []
        self.shares: dict[str, int] = {}
        self.obeys = True

    def answer(self, command: str) -> str:
        if command == "show proc":
            head = "#<PID>  <type>  <reloads>\n40  master  1 [failed: 0]\n# workers\n42  worker  0\n"
            return head + ("# old workers\n41  worker  1\n" if self.old else "") + "# programs\n\n"
        if command in ("show stat", "@!41 show stat"):
            sessions = self.sessions if command == "show stat" else self.old
            rows = [
                f"model-m,{name},{self._busy(sessions, name)},{value},127.0.0.1:{self.ports.get(name, 8000)},"
                for name, value in self.status.items()
            ]
            first = ["# pxname,svname,scur,status,addr,", "clients,FRONTEND,1,OPEN,,", "litellm,4001,9,UP,[::1]:4001,"]
            return "\n".join([*first, *rows])
        if command == "show servers state":
            return "\n".join(["1", *self.status.values()])
        if command == f"show map {CANARIES}":
            return "\n".join(f"0x5581 {name} {share}" for name, share in self.shares.items())
        self.orders.append(command)
        if command.startswith("del map "):
            del self.shares[command.split()[3]]
        if " map " in command or not self.obeys:
            return ""
        if " addr " in command:
            _set, _server, place, _addr, _address, _port, port = command.split()
            self.ports[place.split("/")[1]] = int(port)
            return "no need to change the addr, port changed from '8000' to '8001' by 'stats socket command'"
        name, state = command.split("/")[1].split(" state ")
        self.status[name] = {"drain": "DRAIN", "ready": "UP"}[state] if self.status[name] != "DOWN" else "DOWN"
        return ""

    def _busy(self, sessions: dict[str, list[int]], name: str) -> int:
        left = sessions.get(name, [0])
        return left.pop(0) if len(left) > 1 else left[0]


class Answering(Protocol):
    """Whatever answers HAProxy's orders."""

    def answer(self, command: str) -> str:
        """The answer to one."""


@contextmanager
def running(haproxy: Answering, path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _address = listening.accept()
                except OSError:
                    return
                with connection:
                    order = b""
                    # One with a payload ends with an empty line.
                    while not order.endswith(b"\n") or (b"<<\n" in order and not order.endswith(b"\n\n")):
                        order += connection.recv(1 << 16)
                    connection.sendall(haproxy.answer(order.decode().strip()).encode())

        threading.Thread(target=serve, daemon=True).start()
        yield path
        listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def listening_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def unused_port() -> int:
    with listening_port() as port:
        return port


def test_requests_under_way_are_waited_for(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.sessions["a"] = [2, 2, 1, 0]
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(), check=False, path=path) == Taken(changed=True, serving=["a"], busy=[])
        assert haproxy.orders == ["set server model-m/a state drain"]
        assert haproxy.sessions["a"] == [0]
        assert (tmp_path / "server-state").read_text() == "1\nDRAIN\nUP\n"
        assert take_out(["a"], Limits(), check=False, path=path) == Taken(changed=False, serving=[], busy=[])
        assert put_back(["a"], Limits(), check=False, path=path) == (True, [])
        assert put_back(["a"], Limits(), check=False, path=path) == (False, [])
        assert (tmp_path / "server-state").read_text() == "1\nUP\nUP\n"
    assert haproxy.orders == ["set server model-m/a state drain", "set server model-m/a state ready"]


def test_who_does_not_end_is_named_and_the_wait_is_bounded(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.sessions["a"] = [1]
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(wait_s=0.5), check=False, path=path).busy == ["a"]


NONE_LEFT = "m would have no instance left that is ready"
TWO_OUT = "2 instances of m would be out at a time"
OUTAGE = "accept the outage with vllm_accept_outage"


@pytest.mark.parametrize(
    ("status", "names", "limits", "message"),
    [
        ({"a": "UP"}, ["a"], Limits(), f"{NONE_LEFT}: give the model another instance, or {OUTAGE}"),
        ({"a": "UP", "b": "UP"}, ["a", "b"], Limits(), f"{NONE_LEFT}: {OUTAGE}"),
        ({"a": "UP", "b": "DOWN"}, ["a"], Limits(), f"{NONE_LEFT}: bring b (DOWN) back, or {OUTAGE}"),
        ({"a": "UP", "b": "DRAIN"}, ["a"], Limits(unavailable=2), f"{NONE_LEFT}: bring b (DRAIN) back, or {OUTAGE}"),
        (
            {"a": "UP", "b": "UP", "c": "UP"},
            ["a", "b"],
            Limits(),
            f"{TWO_OUT} (a, b), and vllm_max_unavailable is 1: set it to 2",
        ),
        (
            {"a": "UP", "b": "UP", "c": "DOWN"},
            ["a"],
            Limits(),
            f"{TWO_OUT} (a, c), and vllm_max_unavailable is 1: bring c (DOWN) back, or set it to 2",
        ),
    ],
)
def test_too_many_are_refused_and_none_is_touched_and_each_remedy_works(tmp_path, status, names, limits, message):
    haproxy = HAProxy(**status)
    with running(haproxy, tmp_path / "s") as path:
        with pytest.raises(DrainRefused) as caught:
            take_out(names, limits, check=False, path=path)
        assert str(caught.value) == f"{message}. Nothing was taken out."
        assert haproxy.orders == []
        wider = Limits(limits.unavailable, outage=True) if OUTAGE in message else Limits(int(message[-1]))
        assert take_out(names, wider, check=True, path=path).changed
        if "back" in message:
            haproxy.status.update(dict.fromkeys(set(status) - set(names), "UP"))
        if "another" in message:
            haproxy.status["new"] = "UP"
        if "back" in message or "another" in message:
            assert take_out(names, limits, check=True, path=path).changed


@pytest.mark.parametrize("status", [{"a": "DOWN"}, {"a": "DOWN", "b": "DOWN", "c": "UP"}])
def test_one_that_is_down_may_always_be_taken_out(tmp_path, status):
    haproxy = HAProxy(**status)
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(), check=False, path=path).changed
    assert haproxy.orders == ["set server model-m/a state drain"]


def test_an_outage_that_is_accepted_and_a_check_that_changes_nothing(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP")
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(outage=True), check=True, path=path).changed
        assert haproxy.orders == []
        assert take_out(["a"], Limits(outage=True), check=False, path=path).changed
        assert put_back(["a"], Limits(), check=True, path=path) == (True, [])
    assert haproxy.orders == ["set server model-m/a state drain"]


def test_one_that_is_down_while_it_is_out_is_put_back_too(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DOWN", b="UP")
    with running(haproxy, tmp_path / "s") as path:
        threading.Timer(0.5, lambda: haproxy.status.update(a="UP")).start()
        assert put_back(["a", "b"], Limits(wait_s=10), check=False, path=path) == (False, [])
    assert haproxy.orders == ["set server model-m/a state ready"]


def test_who_does_not_come_up_is_named(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DOWN", b="UP")
    with running(haproxy, tmp_path / "s") as path, pytest.raises(DrainRefused, match=r"a \(DOWN\): not up after 0 s"):
        put_back(["a"], Limits(wait_s=0.3), check=False, path=path)


def test_one_that_refuses_the_proxy_s_key_stays_out_and_the_others_are_put_back(tmp_path: Path) -> None:
    """As after a rollback to a generation from before the key changed: its /health says 200."""
    haproxy = HAProxy(a="DRAIN", b="DRAIN", c="UP", d="DRAIN", e="DRAIN")
    with (
        running(haproxy, tmp_path / "s") as path,
        instance("sought-former") as a,
        instance("sought") as b,
        instance() as c,
        instance(other=503) as d,
    ):
        haproxy.ports = {"a": a, "b": b, "c": c, "d": d, "e": unused_port()}
        with pytest.raises(DrainRefused, match="a: refused the key that this proxy asks with, and stays out") as caught:
            put_back([*"abcde"], Limits(wait_s=10), check=False, asked=asked_with("sought"), path=path)
        assert haproxy.status == {"a": "DRAIN", **dict.fromkeys("bcde", "UP")}
        assert haproxy.orders[0] == "set server model-m/a state drain"
        assert "sought" not in str(caught.value)
        former = asked_with("sought-former")
        assert put_back(["a"], Limits(wait_s=10), check=False, asked=former, path=path) == (True, [])
    assert haproxy.status["a"] == "UP"


def test_one_that_moved_to_another_port_is_asked_there(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DOWN", b="UP")
    with running(haproxy, tmp_path / "s") as path, listening_port() as port:
        haproxy.ports["a"] = unused_port()
        threading.Timer(0.5, lambda: haproxy.status.update(a="UP")).start()
        put_back(["a", "b"], Limits(wait_s=10), check=False, ports={"a": port, "b": 8000}, path=path)
    assert haproxy.orders == [
        f"set server model-m/a addr 127.0.0.1 port {port}",
        "set server model-m/a state ready",
    ]


def test_one_that_does_not_answer_there_is_asked_where_it_was(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DRAIN", b="UP")
    with running(haproxy, tmp_path / "s") as path, listening_port() as old:
        haproxy.ports["a"] = old
        put_back(["a"], Limits(wait_s=10), check=False, ports={"a": unused_port()}, path=path)
    assert haproxy.orders == ["set server model-m/a state ready"]


def test_two_that_swapped_their_ports_are_asked_there(tmp_path: Path) -> None:
    """Both answer where the other one was, so that what listens says nothing of who it is."""
    haproxy = HAProxy(a="DRAIN", b="DRAIN")
    with running(haproxy, tmp_path / "s") as path, listening_port() as one, listening_port() as other:
        haproxy.ports = {"a": one, "b": other}
        put_back(["a", "b"], Limits(wait_s=10), check=False, ports={"a": other, "b": one}, path=path)
        assert haproxy.ports == {"a": other, "b": one}


def asked_with(key: str) -> dict[str, Asked]:
    return {"m": Asked("m", key), "n": Asked("n", "x")}


@pytest.mark.parametrize("follows", [False, True])
def test_one_that_serves_another_model_stays_out_until_the_proxy_knows(tmp_path: Path, follows: bool) -> None:
    """As after a change of its name, or a rollback past one: /health says 200, and every request would be a 404."""
    haproxy = HAProxy(a="DRAIN", b="DRAIN", c="UP")
    said = "a: serves another, and this proxy asks it for m, so it stays out of the routes"
    with (
        running(haproxy, tmp_path / "s") as path,
        instance("key", models=("another",)) as a,
        instance("key", models=("m", "adapter")) as b,
    ):
        haproxy.ports = {"a": a, "b": b}

        def back() -> tuple[bool, list[str]]:
            known = asked_with("key")
            return put_back([*"ab"], Limits(wait_s=10), check=False, asked=known, proxy_follows=follows, path=path)

        if follows:
            was_out, (waiting,) = back()
            assert was_out
            assert waiting.startswith(said)
        else:
            with pytest.raises(DrainRefused, match=said):
                back()
    assert haproxy.status == {"a": "DRAIN", "b": "UP", "c": "UP"}


def test_where_the_proxy_gets_the_new_key_the_former_is_not_tried(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DRAIN", b="UP")
    with running(haproxy, tmp_path / "s") as path, instance("new") as a:
        haproxy.ports = {"a": a}
        put_back(["a"], Limits(wait_s=10), check=False, asked=asked_with("former"), proxy_follows=True, path=path)
    assert haproxy.status["a"] == "UP"


@pytest.mark.parametrize(
    ("status", "taken", "fails"), [("DOWN", [], False), ("DOWN", ["a"], True), ("DRAIN", [], True)]
)
def test_who_was_down_before_may_wait_for_what_the_proxy_gets_later(
    tmp_path: Path, status: str, taken: list[str], fails: bool
) -> None:
    """A host with a new address is down where HAProxy asks, and only the end of the run tells it the other one."""
    haproxy = HAProxy(a=status, b="UP")
    haproxy.obeys = False
    with running(haproxy, tmp_path / "s") as path:

        def back() -> list[str]:
            limits = Limits(wait_s=0.3)
            return put_back(["a"], limits, check=False, proxy_follows=True, taken=taken, path=path)[1]

        if fails:
            with pytest.raises(DrainRefused, match="not up after 0 s"):
                back()
        else:
            (said,) = back()
            assert said.startswith("a (DOWN): not up after 0 s")


def test_a_share_that_a_canary_s_run_left_ends_with_it(tmp_path: Path) -> None:
    """HAProxy picks for a share past all states, so that one that is taken out would get requests still."""
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.shares = {"a": 10, "c": 5}
    with running(haproxy, tmp_path / "s") as path:
        take_out(["a"], Limits(), check=True, path=path)
        assert haproxy.shares == {"a": 10, "c": 5}
        take_out(["a", "x"], Limits(), check=False, path=path)
    assert haproxy.shares == {"c": 5}


def test_requests_from_before_a_reload_are_waited_for(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.old = {"a": [1, 1, 0], "b": [7]}
    with running(haproxy, tmp_path / "s") as path, running(haproxy, tmp_path / "master.sock"):
        assert take_out(["a"], Limits(), check=False, path=path).changed
        assert haproxy.old["a"] == [0]
        haproxy.old = {"a": [1]}
        assert take_out(["a"], Limits(wait_s=0.3), check=False, path=path) == Taken(
            changed=False, serving=[], busy=["a"]
        )


def test_an_old_worker_that_ends_meanwhile_has_no_requests(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.old = {"a": [1]}
    answer = haproxy.answer
    haproxy.answer = lambda command: "Can't find the target PID" if command.startswith("@!") else answer(command)  # type: ignore[method-assign]
    with running(haproxy, tmp_path / "s") as path, running(haproxy, tmp_path / "master.sock"):
        assert take_out(["a"], Limits(), check=False, path=path).changed


def test_an_order_that_a_reload_lost_is_given_again(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.sessions["a"] = [1, 1, 1, 1, 1, 0]
    with running(haproxy, tmp_path / "s") as path:
        haproxy.obeys = False
        threading.Timer(0.3, lambda: setattr(haproxy, "obeys", True)).start()
        assert take_out(["a"], Limits(wait_s=10), check=False, path=path).changed
    assert haproxy.status["a"] == "DRAIN"
    assert set(haproxy.orders) == {"set server model-m/a state drain"}


def test_of_two_that_are_taken_out_at_the_same_time_the_second_is_refused(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    said: list[str] = []

    def take(name: str) -> None:
        try:
            take_out([name], Limits(), check=False, path=path)
        except DrainRefused as error:
            said.append(str(error))

    with running(haproxy, tmp_path / "s") as path:
        threads = [threading.Thread(target=take, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(said) == 1
    assert "no instance left" in said[0]
    assert sorted(haproxy.status.values()) == ["DRAIN", "UP"]


def test_nobody_takes_out_while_the_proxy_is_reloaded(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    with running(haproxy, tmp_path / "s") as path:
        taking = threading.Thread(target=take_out, args=(["a"], Limits()), kwargs={"check": False, "path": path})
        with host_lock("a reload", path=tmp_path / LOCK):
            taking.start()
            taking.join(0.5)
            assert haproxy.orders == []
        taking.join()
    assert haproxy.orders == ["set server model-m/a state drain"]


def test_a_reload_of_the_proxy_holds_the_lock_until_its_new_worker_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made(tmp_path)
    files = host.haproxy_files(Certificate("certificate", "key"))
    held: list[bool] = []

    def digest() -> str | None:
        try:
            with host_lock("a drain", 0, host.places.runtime / LOCK):
                held.append(False)
        except HostLocked:
            held.append(True)
        return proxy._mark(files) if len(held) > 3 else "former"

    monkeypatch.setattr(host, "haproxy_digest", digest)
    monkeypatch.setattr(proxy, "unit_state", lambda _unit: SimpleNamespace(active="active"))
    for name in ("systemctl", "write", "_reload_where_stale"):
        monkeypatch.setattr(proxy, name, lambda *_unused: None)
    assert host.front(files) == "reloaded"
    assert held == [False, True, True, True, False]


def test_those_without_requests_are_told(tmp_path: Path) -> None:
    with running(HAProxy(a="DRAIN", b="UP", c="DOWN 1/2"), tmp_path / "s") as path:
        assert away(path) == [
            {"name": "a", "model": "m", "status": "DRAIN"},
            {"name": "c", "model": "m", "status": "DOWN 1/2"},
        ]


def test_the_module_tells_which_of_those_asked_for_get_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are not in the routes may be asked past them."""
    path = tmp_path / "s"
    monkeypatch.setattr(module, "SOCKET", path)
    for name in ("put_back", "away"):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), path=path))

    def serving() -> list[str]:
        asked = {"servers": ["a", "b", "c", "new"], "state": "in", "_ansible_check_mode": True}
        with patch_module_args(asked), pytest.raises(SystemExit):
            module.main()
        found: list[str] = json.loads(capsys.readouterr().out)["serving"]
        return found

    assert serving() == ["a", "b", "c", "new"]  # no HAProxy runs
    haproxy = HAProxy(a="DRAIN", b="UP", c="DOWN")
    with running(haproxy, path):
        assert serving() == ["b", "new"]
    assert haproxy.orders == []
