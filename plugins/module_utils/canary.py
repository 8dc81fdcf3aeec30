# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""A share of a model's requests for an instance that just changed, and a verdict by what the proxy's log says of it.

The instance is out of the routes, and stays so: HAProxy picks it for the share alone (``use-server`` in haproxy.cfg).
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .drain import PREFIX, SOCKET, follow
from .haproxy_socket import Server, order, servers

MAP = "/etc/vllm-proxy/canary.map"
UNIT = "onprem-vllm-haproxy.service"
UP_S = 60.0
LOOK_S = 2.0
FEW = 10
HOPELESS_PERCENT = 50.0
# The log-format of the frontend `models` in haproxy.cfg.
LINE = re.compile(
    r"^\S+ (?P<status>-?\d+) \d+ (?:-?\d+/){4}(?P<ms>-?\d+) (?P<end>\S{4}) (?P<backend>\S+)/(?P<server>\S+) ",
    re.MULTILINE,
)


class CanaryUnseen(RuntimeError):
    """HAProxy's log cannot be read, so nothing can be said; the message holds what journalctl said."""


class CanaryWorse(RuntimeError):
    """An instance answers worse than the others of its model; the message says by how much."""


@dataclass(frozen=True)
class Thresholds:
    """What decides.

    Attributes:
        share: percent of a model's requests for its canary.
        seconds: for how long.
        requests: with fewer of them nothing is decided.
        errors_percent: by how much its share of failed requests may be above the others', in percent of its requests.
        slowdown: how many times longer than the others' the median of its answers may take.
    """

    share: int = 10
    seconds: float = 600
    requests: int = 50
    errors_percent: float = 1.0
    slowdown: float = 1.5


@dataclass(frozen=True)
class Answers:
    """What one side answered."""

    requests: int
    errors: int
    median_s: float | None

    @property
    def errors_percent(self) -> float:
        return 100 * self.errors / self.requests if self.requests else 0.0

    def __str__(self) -> str:
        took = "" if self.median_s is None else f", median {self.median_s:.3f} s"
        return f"{self.requests} requests, {self.errors_percent:.1f} % failed{took}"


def journal(since: float) -> str:
    """What HAProxy logged since a time, in seconds of the epoch.

    Raises:
        CanaryUnseen: journalctl failed. Without its lines a canary that fails would pass as one that nobody asked.
    """
    command = ["journalctl", "--unit", UNIT, "--since", f"@{since:.0f}", "--output", "cat", "--quiet", "--no-pager"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise CanaryUnseen(f"The log of {UNIT} cannot be read: {done.stderr.strip() or done.returncode}")
    return done.stdout


def tried(
    names: Sequence[str],
    thresholds: Thresholds,
    *,
    ports: Mapping[str, int] | None = None,
    path: Path = SOCKET,
    log: Callable[[float], str] = journal,
) -> list[str]:
    """Give instances their share for the time, and compare; a line of figures for each model.

    An instance without others of its model that are up has nothing to be compared with, and gets nothing.

    Args:
        ports: where instances listen now.

    Raises:
        CanaryWorse: one failed more, took longer, or went down.
        CanaryUnseen: HAProxy's log cannot be read.
        SocketError: HAProxy does not answer.
    """
    canaries = _canaries(names, path)
    if not canaries:
        return []
    follow(canaries, ports or {}, path)
    for one in canaries:
        order(path, f"set server {one.backend}/{one.name} state drain")
    _wait_up(canaries, path)
    began = time.time()
    until = time.monotonic() + thresholds.seconds
    redispatched = {one.name: one.redispatched for one in _now(canaries, path)}
    order(path, f"clear map {MAP}")
    try:
        for one in canaries:
            order(path, f"add map {MAP} {one.name} {thresholds.share}")
        while True:
            ended = time.monotonic() >= until
            text = log(began)
            told = []
            for one in _now(canaries, path):
                lost = max(0, one.redispatched - redispatched[one.name])
                told.append(_compare(one, text, lost, thresholds, ended=ended))
            if ended:
                return told
            time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
    finally:
        order(path, f"clear map {MAP}")


def _compare(canary: Server, log: str, lost: int, thresholds: Thresholds, *, ended: bool) -> str:
    """A line of figures. Before the end only what cannot become good any more is worse: few requests say little."""
    mine = read_answers(log, canary.backend, lambda server: server == canary.name, lost)
    others = read_answers(log, canary.backend, lambda server: server != canary.name)
    told = f"{canary.name}: {mine}; the others of {canary.backend.removeprefix(PREFIX)}: {others}"
    if canary.status.startswith("DOWN"):
        raise CanaryWorse(f"{told}. It went down ({canary.status}).")
    if mine.requests >= FEW and mine.errors_percent - others.errors_percent > HOPELESS_PERCENT:
        raise CanaryWorse(f"{told}. It was not tried any longer.")
    if not ended:
        return told
    if mine.requests < thresholds.requests:
        return f"{told}. Fewer than {thresholds.requests} requests decide nothing."
    if mine.errors_percent - others.errors_percent > thresholds.errors_percent:
        raise CanaryWorse(f"{told}. At most {thresholds.errors_percent:g} % more may fail.")
    if mine.median_s and others.median_s and mine.median_s > thresholds.slowdown * others.median_s:
        raise CanaryWorse(f"{told}. It may take at most {thresholds.slowdown:g} times as long.")
    return told


def read_answers(log: str, backend: str, wanted: Callable[[str], bool], lost: int = 0) -> Answers:
    """What the log tells of some servers of a backend.

    Requests that the client gave up count for nobody.

    Args:
        lost: requests that another server had to answer in their place, which the log counts there.
    """
    errors, times = lost, []
    for line in LINE.finditer(log):
        if line["backend"] != backend or not wanted(line["server"]) or line["end"].startswith(("C", "c")):
            continue
        if int(line["status"]) >= 500 or int(line["status"]) < 0 or line["end"][0] != "-":
            errors += 1
        else:
            times.append(int(line["ms"]) / 1000)
    return Answers(errors + len(times), errors, statistics.median(times) if times else None)


def _canaries(names: Sequence[str], path: Path) -> list[Server]:
    """The first of the named ones in each backend that has another server that is up."""
    found = [one for one in servers(path) if one.backend.startswith(PREFIX)]
    first: dict[str, Server] = {}
    for one in found:
        others = any(other.backend == one.backend and other.up and other.name not in names for other in found)
        if one.name in names and others:
            first.setdefault(one.backend, one)
    return list(first.values())


def _now(canaries: Iterable[Server], path: Path) -> list[Server]:
    wanted = {(one.backend, one.name) for one in canaries}
    return [one for one in servers(path) if (one.backend, one.name) in wanted]


def _wait_up(canaries: Sequence[Server], path: Path) -> None:
    until = time.monotonic() + UP_S
    while down := [f"{one.name} ({one.status})" for one in _now(canaries, path) if not one.status.startswith("DRAIN")]:
        if time.monotonic() >= until:
            raise CanaryWorse(f"{', '.join(down)}: the proxy does not reach it.")
        time.sleep(0.2)
