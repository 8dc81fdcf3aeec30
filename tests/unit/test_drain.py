# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which instances may be taken out, told by what HAProxy says of all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.drain import DrainRefused, Limits, put_back, take_out


class HAProxy:
    """Speaks HAProxy's socket protocol: ``show stat`` and ``set server``, on a state that a test may change."""

    def __init__(self, **status: str) -> None:
        self.status = {name.replace("_", "-"): value for name, value in status.items()}
        self.sessions: dict[str, list[int]] = {}
        self.orders: list[str] = []

    def answer(self, command: str) -> str:
        if command == "show stat":
            rows = [f"model-m,{name},{self._busy(name)},{value},10.0.0.1:8000," for name, value in self.status.items()]
            first = ["# pxname,svname,scur,status,addr,", "clients,FRONTEND,1,OPEN,,", "litellm,4001,9,UP,[::1]:4001,"]
            return "\n".join([*first, *rows])
        self.orders.append(command)
        if " map " in command:
            return ""
        name, state = command.split("/")[1].split(" state ")
        self.status[name] = {"drain": "DRAIN", "ready": "UP"}[state] if self.status[name] != "DOWN" else "DOWN"
        return ""

    def _busy(self, name: str) -> int:
        left = self.sessions.get(name, [0])
        return left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def running(haproxy: HAProxy, path: Path) -> Iterator[Path]:
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
                    connection.sendall(haproxy.answer(connection.recv(1000).decode().strip()).encode())

        threading.Thread(target=serve, daemon=True).start()
        yield path
        listening.shutdown(socket.SHUT_RDWR)


def test_requests_under_way_are_waited_for(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.sessions["a"] = [2, 2, 1, 0]
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(), check=False, path=path) == (True, [])
        assert haproxy.orders == ["set server model-m/a state drain"]
        assert haproxy.sessions["a"] == [0]
        assert take_out(["a"], Limits(), check=False, path=path) == (False, [])
        assert put_back(["a"], Limits(), check=False, path=path) is True
        assert put_back(["a"], Limits(), check=False, path=path) is False
    assert haproxy.orders == ["set server model-m/a state drain", "set server model-m/a state ready"]


def test_who_does_not_end_is_named_and_the_wait_is_bounded(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP", b="UP")
    haproxy.sessions["a"] = [1]
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(wait_s=0.5), check=False, path=path) == (True, ["a"])


@pytest.mark.parametrize(
    ("status", "names", "limits", "message"),
    [
        ({"a": "UP"}, ["a"], Limits(), "m would have no instance left that is ready"),
        ({"a": "UP", "b": "DOWN"}, ["a"], Limits(), "m would have no instance left"),
        ({"a": "UP", "b": "DRAIN"}, ["a"], Limits(unavailable=2), "m would have no instance left"),
        ({"a": "UP", "b": "UP", "c": "UP"}, ["a", "b"], Limits(), "2 instances of m would be out at a time (a, b)"),
        ({"a": "UP", "b": "UP", "c": "DOWN"}, ["a"], Limits(), "2 instances of m would be out at a time (a, c)"),
    ],
)
def test_too_many_are_refused_and_none_is_touched(tmp_path, status, names, limits, message):
    haproxy = HAProxy(**status)
    with running(haproxy, tmp_path / "s") as path, pytest.raises(DrainRefused) as caught:
        take_out(names, limits, check=False, path=path)
    assert message in str(caught.value)
    assert haproxy.orders == []


@pytest.mark.parametrize("status", [{"a": "DOWN"}, {"a": "DOWN", "b": "DOWN", "c": "UP"}])
def test_one_that_is_down_may_always_be_taken_out(tmp_path, status):
    haproxy = HAProxy(**status)
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(), check=False, path=path) == (True, [])
    assert haproxy.orders == ["set server model-m/a state drain"]


def test_an_outage_that_is_accepted_and_a_check_that_changes_nothing(tmp_path: Path) -> None:
    haproxy = HAProxy(a="UP")
    with running(haproxy, tmp_path / "s") as path:
        assert take_out(["a"], Limits(outage=True), check=True, path=path) == (True, [])
        assert haproxy.orders == []
        assert take_out(["a"], Limits(outage=True), check=False, path=path) == (True, [])
        assert put_back(["a"], Limits(), check=True, path=path) is True
    assert haproxy.orders == ["set server model-m/a state drain"]


def test_one_that_is_down_while_it_is_out_is_put_back_too(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DOWN", b="UP")
    with running(haproxy, tmp_path / "s") as path:
        threading.Timer(0.5, lambda: haproxy.status.update(a="UP")).start()
        assert put_back(["a", "b"], Limits(wait_s=10), check=False, path=path) is False
    assert haproxy.orders == ["set server model-m/a state ready"]


def test_who_does_not_come_up_is_named(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DOWN", b="UP")
    with running(haproxy, tmp_path / "s") as path, pytest.raises(DrainRefused, match=r"a \(DOWN\): not up after 0 s"):
        put_back(["a"], Limits(wait_s=0.3), check=False, path=path)


def test_one_that_moved_to_another_port_is_put_back_and_not_waited_for(tmp_path: Path) -> None:
    haproxy = HAProxy(a="DOWN", b="UP")
    with running(haproxy, tmp_path / "s") as path:
        put_back(["a", "b"], Limits(wait_s=0.3), check=False, ports={"a": 8001, "b": 8000}, path=path)
        assert haproxy.orders == ["set server model-m/a state ready"]
        with pytest.raises(DrainRefused, match=r"a \(DOWN\): not up"):
            put_back(["a", "b"], Limits(wait_s=0.3), check=False, ports={"a": 8000, "b": 8000}, path=path)
