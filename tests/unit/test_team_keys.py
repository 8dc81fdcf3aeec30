# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keys of a database on their way to HAProxy; the database itself is real in scenario litellm_proxy."""

from __future__ import annotations

import json
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_drain import running

PROGRAM = Path(__file__).parents[2] / "roles" / "litellm_proxy" / "files" / "team_keys.py"


@pytest.fixture(scope="module")
def program() -> Iterator[dict[str, Any]]:
    """The program, which Debian's psycopg2 is not here for."""
    extensions = types.ModuleType("psycopg2.extensions")
    vars(extensions).update(ISOLATION_LEVEL_AUTOCOMMIT=0, connection=object)
    psycopg2 = types.ModuleType("psycopg2")
    vars(psycopg2).update(Error=type("Error", (Exception,), {}), extensions=extensions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "psycopg2", psycopg2)
        patch.setitem(sys.modules, "psycopg2.extensions", extensions)
        yield runpy.run_path(str(PROGRAM))


class HAProxy:
    """A map in memory, changed as HAProxy 2.6 does: prepared, filled and put in place of the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, str] = {}
        self.next: dict[str, str] = {}
        self.orders: list[str] = []

    def answer(self, order: str) -> str:
        self.orders.append(order.split(" map ", maxsplit=1)[0])
        if order == f"show map {self.path}":
            return "\n".join(f"0x5581 {key} {value}" for key, value in self.lines.items())
        if order == f"prepare map {self.path}":
            self.next = {}
            return "New version created: 7"
        if order == f"commit map @7 {self.path}":
            self.lines = self.next
            return ""
        if found := re.fullmatch(rf"add map @7 {re.escape(str(self.path))} <<\n(.*)", order, re.DOTALL):
            self.next |= dict(line.split() for line in found[1].splitlines())
            return ""
        return "Unknown map identifier. Please use #<id> or <file>."


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[tuple[HAProxy, Path]]:
    found = HAProxy(tmp_path / "teams.map")
    with running(found, tmp_path / "admin.sock") as path:
        yield found, path


def test_haproxy_gets_every_key_at_once_and_only_what_is_new(
    program: dict[str, Any], haproxy: tuple[HAProxy, Path]
) -> None:
    """More than fit into one order, too."""
    server, path = haproxy
    keys = {f"{number:064x}": f"team-{number}" for number in range(450)}
    program["remember"](server.path, keys, path)
    assert server.lines == keys
    assert server.orders == ["show", "prepare", "add", "add", "add", "commit"]
    server.orders.clear()
    program["remember"](server.path, keys, path)
    assert server.orders == ["show"]
    program["remember"](server.path, {}, path)
    assert server.lines == {}


def test_a_haproxy_that_does_not_know_the_map_is_told(program: dict[str, Any], haproxy: tuple[HAProxy, Path]) -> None:
    _server, path = haproxy
    with pytest.raises(ValueError, match=r"takes no keys into .*other\.map, and says 'Unknown map"):
        program["remember"](Path("/var/lib/other.map"), {"a": "b"}, path)


def test_the_lowest_port_is_that_of_debians_clusters(
    program: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are installed; the last line of a cluster counts, one that was removed does not."""
    for name in ("CLUSTERS", "PROGRAMS"):
        monkeypatch.setitem(program["port"].__globals__, name, tmp_path / name)
    assert program["port"]() == 5432
    for version, line in {
        "13": "port = 5431",
        "15": "port = 5434\t# (restart)",
        "17": "#port = 1\nport = 5430",
    }.items():
        main = tmp_path / "CLUSTERS" / version / "main"
        (main / "conf.d").mkdir(parents=True)
        (main / "postgresql.conf").write_text(f"{line}\n", encoding="utf-8")
        if version != "13":
            (tmp_path / "PROGRAMS" / version / "bin").mkdir(parents=True)
            (tmp_path / "PROGRAMS" / version / "bin" / "postgres").touch()
    (tmp_path / "CLUSTERS" / "17" / "main" / "conf.d" / "own.conf").write_text("port='5433'\n", encoding="utf-8")
    assert program["port"]() == 5433


class Database:
    """What ``follow`` sees of PostgreSQL; real in scenario litellm_proxy."""

    def __init__(self, *notifies: str) -> None:
        self.notifies = [*notifies]
        self.open = True

    def close(self) -> None:
        self.open = False

    def poll(self) -> None:
        """Nothing came."""


SETTINGS = {"local": "onprem_vllm", "connection": "", "reader": "nobody"}


def followed(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, looks: list[Any]
) -> list[tuple[str, Any]]:
    """What ``follow`` does while a database answers like ``looks``: keys, an error to raise, or none any more."""
    done: list[tuple[str, Any]] = []
    answers = iter(looks)

    def read(database: Database) -> tuple[str, dict[str, Any]]:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, Exception):
            raise answer
        database.notifies.extend(answer.get("told", ()))
        return "its identity", dict(answer["keys"])

    def opened(_settings: object) -> Database:
        done.append(("opened", None))
        return Database()

    def write(path: Path, content: bytes, _mode: int) -> None:
        done.append((path.stem, json.loads(content)))

    names = {
        "opened": opened,
        "read": read,
        "publish": lambda keys, _reader: done.append(("published", keys)),
        "SAID": tmp_path / "said.json",
        "STATE": tmp_path,
        "_write": write,
    }
    for name, value in names.items():
        monkeypatch.setitem(program["follow"].__globals__, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: done.append(("slept", seconds)))
    monkeypatch.setattr("select.select", lambda *_words: done.append(("waited", None)))
    with pytest.raises(KeyboardInterrupt):
        program["follow"](SETTINGS)
    return done


def test_a_change_amid_a_look_is_looked_at_at_once(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks = [{"keys": {"a": 1}, "told": ["x"]}, {"keys": {}}]
    assert followed(program, monkeypatch, tmp_path, looks) == [
        ("opened", None),
        ("followed", ["onprem_vllm", "", "its identity"]),
        ("published", {"a": 1}),
        ("said", {"error": ""}),
        ("followed", ["onprem_vllm", "", "its identity"]),
        ("published", {}),
        ("waited", None),
    ]


def test_a_database_that_lost_its_keys_takes_nobodys(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An error like one that does not answer, and told once."""
    gone = program["psycopg2"].Error("relation does not exist")
    done = followed(program, monkeypatch, tmp_path, [{"keys": {"a": 1}}, gone, gone, {"keys": {"a": 1}}])
    assert [step for step in done if step[0] in ("opened", "published", "said")] == [
        ("opened", None),
        ("published", {"a": 1}),
        ("said", {"error": ""}),
        ("said", {"error": "relation does not exist"}),
        ("opened", None),
        ("opened", None),
        ("published", {"a": 1}),
        ("said", {"error": ""}),
    ]


def test_the_database_that_was_followed_does_not_begin_anew(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also after a restart, and where another proxy made its table anew. Another server is another matter."""
    follow, known = program["follow_this"], program["_known"]
    for name, value in {"STATE": tmp_path, "_write": lambda path, content, _mode: path.write_bytes(content)}.items():
        monkeypatch.setitem(known.__globals__, name, value)
    known(SETTINGS, "the table is gone")
    for _again in range(2):
        follow(SETTINGS, "one")
    with pytest.raises(LookupError, match=r"the table is gone: restore it, or remove .*/followed\.json and take what"):
        known(SETTINGS, "the table is gone")
    with pytest.raises(LookupError, match="was made anew: restore it, or remove"):
        follow(SETTINGS, "another")
    follow({**SETTINGS, "local": "", "connection": "postgresql://proxy@db1/keys"}, "another")
