# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""A share of a model's requests for an instance that just changed, and a verdict by what the proxy's log says of it.

The instance is out of the routes, and stays so: HAProxy picks it for the share alone (``use-server`` in haproxy.cfg).
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .backend_keys import Asked
from .drain import CANARIES, follow, refusals
from .haproxy_socket import PREFIX, SOCKET, Server, order, servers

UNIT = "onprem-vllm-haproxy.service"
UP_S = 60.0
LOOK_S = 2.0
UNDER_WAY_S = 600.0
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
    """Instances, ``names``, answer worse than the others of their model; the message says by how much."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = list(names)


@dataclass(frozen=True)
class Thresholds:
    """What decides.

    Attributes:
        share: percent of a model's requests for its canary.
        seconds: for how long.
        requests: with fewer of them nothing is decided.
        errors_percent: by how much its share of failed requests may be above the others', in percent of its requests;
            what it refused, and what clients gave up, has failed as far as chance does not explain it.
        slowdown: how many times longer than the others' the median of its answers may take.
    """

    share: int = 10
    seconds: float = 600
    requests: int = 50
    errors_percent: float = 1.0
    slowdown: float = 1.5


@dataclass(frozen=True)
class Answers:
    """What one side answered.

    Attributes:
        requests: all of them.
        errors: that failed.
        refused: answered 4xx, which the instance itself did: HAProxy and LiteLLM refuse before one is chosen.
        given_up: that the client ended, or that still had no end.
        median_s: of what was answered 2xx; a refusal is quick.
    """

    requests: int
    errors: int
    refused: int
    given_up: int
    median_s: float | None

    def failed_percent(self, others: Answers) -> float:
        """The share that failed, with what was refused and given up beyond what the others and chance explain."""
        refused = self._beyond_chance(self.refused, others.refused, others.requests)
        given_up = self._beyond_chance(self.given_up, others.given_up, others.requests)
        return self._percent(self.errors + refused + given_up)

    @property
    def errors_percent(self) -> float:
        return self._percent(self.errors)

    def _beyond_chance(self, count: int, theirs: int, their_requests: int) -> float:
        """How many more than the others' share, less three standard deviations: it was drawn by lot who got which.

        Both counts vary as a Poisson process does; one is added, so that a few where none were expected are none.
        """
        scale = self.requests / max(their_requests, 1)
        expected = theirs * scale
        return max(0.0, count - expected - 3 * math.sqrt((expected + 1) * (1 + scale)))

    def _percent(self, count: float) -> float:
        return 100 * count / self.requests if self.requests else 0.0

    def __str__(self) -> str:
        parts = {"failed": self.errors, "refused": self.refused, "given up": self.given_up}
        took = "" if self.median_s is None else f", median {self.median_s:.3f} s"
        shares = ", ".join(f"{self._percent(count):.1f} % {name}" for name, count in parts.items())
        return f"{self.requests} requests, {shares}{took}"


@dataclass(frozen=True)
class Verdict:
    """What is said of one canary.

    Attributes:
        text: a line of figures, or why there are none.
        worse: whether it goes back.
        decided: whether the figures decided that.
    """

    text: str
    worse: bool = False
    decided: bool = True


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
    asked: Mapping[str, Asked] | None = None,
    path: Path = SOCKET,
    log: Callable[[float], str] = journal,
) -> list[Verdict]:
    """Give instances their share for the time, and compare; a verdict for each model, none of them worse.

    An instance without others of its model that are up has nothing to be compared with, and gets nothing. What it has
    at the end is waited for: a request that hangs is in no log yet.

    Args:
        ports: where instances listen now.
        asked: how the proxy asks a model's instances, by its slug: one that serves another model by now gets nothing.

    Raises:
        CanaryWorse: one failed more, took longer, or went down.
        CanaryUnseen: HAProxy's log cannot be read.
        SocketError: HAProxy does not answer.
    """
    canaries = _canaries(names, path)
    follow(canaries, ports or {}, path)
    refused = refusals(_now(canaries, path), asked or {}, key_counts=False)
    elsewhere = [Verdict(text, decided=False) for text in refused.values()]
    canaries = [one for one in canaries if one.name not in refused]
    if not canaries:
        return elsewhere
    for one in canaries:
        order(path, f"set server {one.backend}/{one.name} state drain")
    _wait_up(canaries, path)
    began = time.time()
    redispatched = {one.name: one.redispatched for one in _now(canaries, path)}

    def compared(*, ended: bool) -> list[Verdict]:
        text = log(began)
        found = {}
        for one in _now(canaries, path):
            lost = max(0, one.redispatched - redispatched[one.name])
            found[one.name] = _compare(one, text, lost, thresholds, ended=ended)
        if worse := {name: verdict.text for name, verdict in found.items() if verdict.worse}:
            raise CanaryWorse("\n".join(worse.values()), list(worse))
        return [*elsewhere, *found.values()]

    order(path, f"clear map {CANARIES}")
    try:
        for one in canaries:
            order(path, f"add map {CANARIES} {one.name} {thresholds.share}")
        _while(lambda: True, thresholds.seconds, lambda: compared(ended=False))
    finally:
        order(path, f"clear map {CANARIES}")
    _while(lambda: any(one.sessions for one in _now(canaries, path)), UNDER_WAY_S, lambda: compared(ended=False))
    return compared(ended=True)


def _while(wanted: Callable[[], bool], seconds: float, look: Callable[[], object]) -> None:
    """Look again and again, as long as it is wanted and for some seconds at most."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and wanted():
        look()
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))


def _compare(canary: Server, log: str, lost: int, thresholds: Thresholds, *, ended: bool) -> Verdict:
    """The verdict of one.

    Before the end only what cannot become good any more is: few requests say little.
    """
    under_way = canary.sessions if ended else 0
    mine = read_answers(log, canary.backend, lambda server: server == canary.name, lost, under_way)
    others = read_answers(log, canary.backend, lambda server: server != canary.name)
    told = f"{canary.name}: {mine}; the others of {canary.backend.removeprefix(PREFIX)}: {others}"
    more_percent = mine.failed_percent(others) - others.errors_percent
    if canary.status.startswith("DOWN"):
        return Verdict(f"{told}. It went down ({canary.status}).", worse=True)
    if mine.requests >= FEW and more_percent > HOPELESS_PERCENT:
        return Verdict(f"{told}. It was not tried any longer.", worse=True)
    if not ended:
        return Verdict(told)
    if mine.requests < thresholds.requests:
        return Verdict(f"{told}. Fewer than {thresholds.requests} requests decide nothing.", decided=False)
    if more_percent > thresholds.errors_percent:
        beyond = "what was refused or given up beyond chance among them"
        return Verdict(f"{told}. At most {thresholds.errors_percent:g} % more may fail, {beyond}.", worse=True)
    if mine.median_s and others.median_s and mine.median_s > thresholds.slowdown * others.median_s:
        return Verdict(f"{told}. It may take at most {thresholds.slowdown:g} times as long.", worse=True)
    return Verdict(told)


def read_answers(log: str, backend: str, wanted: Callable[[str], bool], lost: int = 0, under_way: int = 0) -> Answers:
    """What the log tells of some servers of a backend.

    Args:
        lost: requests that another server had to answer in their place, which the log counts there.
        under_way: requests without an end, which no log has.
    """
    requests, errors, refused, given_up = lost + under_way, lost, 0, under_way
    times = []
    for line in LINE.finditer(log):
        if line["backend"] != backend or not wanted(line["server"]):
            continue
        requests += 1
        status = int(line["status"])
        if line["end"].startswith(("C", "c")):
            given_up += 1
        elif status >= 500 or status < 0 or line["end"][0] != "-":
            errors += 1
        elif status >= 400:
            refused += 1
        else:
            times.append(int(line["ms"]) / 1000)
    return Answers(requests, errors, refused, given_up, statistics.median(times) if times else None)


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
    while down := [one for one in _now(canaries, path) if not one.status.startswith("DRAIN")]:
        if time.monotonic() >= until:
            said = ", ".join(f"{one.name} ({one.status})" for one in down)
            raise CanaryWorse(f"{said}: the proxy does not reach it.", [one.name for one in down])
        time.sleep(0.2)
