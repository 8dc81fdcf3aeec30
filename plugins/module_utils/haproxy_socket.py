# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""HAProxy's administration socket and its master's, which only root may open."""

from __future__ import annotations

import csv
import socket
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 10.0
SOCKET = Path("/run/onprem-vllm-haproxy/admin.sock")
PREFIX = "model-"  # of the backends that lead to instances; a model's slug follows


class SocketError(RuntimeError):
    """HAProxy does not answer, or refused a command; the message says what it said."""


@dataclass(frozen=True)
class Server:
    """One server of a backend."""

    backend: str
    name: str
    status: str  # UP, DOWN, DRAIN, MAINT, "UP 1/2" and so on
    sessions: int  # requests that are under way
    address: str  # where it is asked; empty where HAProxy does not say, with port 0
    port: int
    redispatched: int  # requests that another server answered in its place, since HAProxy started
    check: str = ""  # what its last health check found, in HAProxy's words

    @property
    def up(self) -> bool:
        return self.status.startswith("UP")


def ask(path: Path, command: str) -> str:
    """The answer to one command.

    Raises:
        SocketError: nobody answers.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(f"{command}\n".encode())
            connection.shutdown(socket.SHUT_WR)  # the master waits for another command otherwise
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
    except OSError as error:
        raise SocketError(f"HAProxy does not answer on {path}: {error.strerror or error}") from error
    return answer.decode(errors="replace").strip()


def order(path: Path, command: str) -> None:
    """Give an order that is silent where it is carried out.

    Raises:
        SocketError: it was not.
    """
    if said := ask(path, command):
        raise SocketError(f"HAProxy refused {command!r}: {said}")


def description(path: Path) -> str:
    """``description`` of the configuration that the running process has read."""
    lines = dict(line.partition(":")[::2] for line in ask(path, "show info").splitlines())
    return lines.get("description", "").strip()


def servers(path: Path, backend: str = "") -> list[Server]:
    """All servers, or those of one backend."""
    return [one for one in _read(ask(path, "show stat")) if one.backend == (backend or one.backend)]


def servers_of_old_workers(master: Path) -> list[Server]:
    """All servers once more for each worker that a reload replaced, and that goes on with the requests it had."""
    workers = ask(master, "show proc").partition("# old workers")[2].partition("# programs")[0].split("\n")
    pids = [words[0] for words in map(str.split, workers) if words[1:2] == ["worker"]]
    return [one for pid in pids for one in _read(ask(master, f"@!{pid} show stat"))]


def _read(table: str) -> list[Server]:
    """What ``show stat`` answers; the master's words about a worker that has just ended are no row."""
    return [
        Server(
            row["pxname"],
            row["svname"],
            row["status"],
            int(row["scur"] or 0),
            *_place(row.get("addr") or ""),
            int(row.get("wredis") or 0),
            " ".join(filter(None, (row.get("check_desc"), row.get("last_chk")))),
        )
        for row in csv.DictReader(table.removeprefix("# ").splitlines())
        if row["svname"] not in ("FRONTEND", "BACKEND")
    ]


def _place(address: str) -> tuple[str, int]:
    """Address and port of ``10.0.0.1:8000`` and ``[fd00::1]:8000``; a path of a socket has none."""
    host, _colon, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else ("", 0)
