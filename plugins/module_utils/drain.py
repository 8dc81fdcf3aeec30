# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Taking instances out of the proxy's routes and putting them back, without ever taking too many of one model."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from .atomic import write_file
from .backend_keys import Answer, Asked, ask_models
from .haproxy_socket import PREFIX, SOCKET, Server, ask, order, servers, servers_of_old_workers
from .host_lock import host_lock

# Beside it. A reload of the proxy holds the lock too: what is ordered meanwhile, the next worker would not know.
LOCK, MASTER, STATE = "routes.lock", "master.sock", "server-state"
CANARIES = "/etc/vllm-proxy/canary.map"
CONNECT_S = 2.0


class DrainRefused(RuntimeError):
    """It would leave too few instances, or it did not come about; the message says which and what to do."""


@dataclass(frozen=True)
class Limits:
    """What may be taken out, and for how long to wait.

    Attributes:
        unavailable: instances of one model that may be out at a time.
        outage: whether the last ready instance of a model may be taken out, too.
        wait_s: seconds for requests under way to end, or for instances to be up again.
    """

    unavailable: int = 1
    outage: bool = False
    wait_s: float = 600


@dataclass(frozen=True)
class Taken:
    """What came of taking instances out.

    Attributes:
        changed: whether any was in the routes, answering or not.
        serving: those that had requests until then.
        busy: those that still had some when the time was up.
    """

    changed: bool
    serving: list[str]
    busy: list[str]


def take_out(names: Sequence[str], limits: Limits, *, check: bool, path: Path = SOCKET) -> Taken:
    """Send instances no more requests, and wait until they have none, also none from before a reload.

    Raises:
        DrainRefused: too few instances of a model would be left; none is taken out then.
        HostLocked: another run takes out or puts back, or reloads the proxy, for too long.
        SocketError: HAProxy does not answer.
    """
    with _lock(path):
        found = _models(path)
        _refuse(found, names, limits)
        going = [one for one in found if one.name in names and not _is_out(one)]
        serving = sorted({one.name for one in going if one.up})
        if check:
            return Taken(bool(going), serving, [])
        _end_shares(path, names)
        _order(path, going, "drain")
    until = time.monotonic() + limits.wait_s
    while True:
        found = [one for one in _models(path) if one.name in names]
        # A reload past the playbooks may have lost the order.
        if lost := [one for one in found if one.up]:
            with _lock(path):
                _order(path, lost, "drain")
        before = [one for one in _before_reloads(path) if one.name in names]
        busy = sorted({one.name for one in [*found, *before] if one.sessions or one in lost})
        if not busy or time.monotonic() >= until:
            return Taken(bool(going), serving, busy)
        time.sleep(0.2)


def put_back(
    names: Sequence[str],
    limits: Limits,
    *,
    check: bool,
    ports: Mapping[str, int] | None = None,
    asked: Mapping[str, Asked] | None = None,
    proxy_follows: bool = False,
    taken: Sequence[str] = (),
    path: Path = SOCKET,
) -> tuple[bool, list[str]]:
    """Send instances requests again, once HAProxy finds them up.

    Args:
        ports: where instances listen now (``follow``).
        asked: how the proxy asks a model's instances, by its slug: who refuses the key, or serves another model, stays
            out, though /health says 200.
        proxy_follows: whether the proxy gets the inventory's configuration later in this run. The key is not tried
            then, and what waits for that configuration is no failure.
        taken: who had requests before this run.

    Returns:
        Whether any was out, and what waits for the proxy's next configuration, in words.

    Raises:
        DrainRefused: one that was taken out is not up in time; it stays in the routes, and gets requests as soon as it
            is. Or one refuses the key, or serves another model.
        HostLocked: another run takes out or puts back, or reloads the proxy, for too long.
        SocketError: HAProxy does not answer.
    """
    found = [one for one in _models(path) if one.name in names]
    out = {one.name for one in found if _is_out(one)}
    if check:
        return bool(out), []
    follow(found, ports or {}, path)
    found = [one for one in _models(path) if one.name in names and not one.up]
    refused = refusals(found, asked or {}, key_counts=not proxy_follows)
    going = set(names) - {*refused}
    # One that is down is not shown as taken out, and would stay so once it is up.
    with _lock(path):
        _order(path, [one for one in found if one.name in refused], "drain")
        _order(path, [one for one in found if one.name in going], "ready")
    problems: list[str] = []
    waiting: list[str] = []  # for the proxy's next configuration
    (waiting if proxy_follows else problems).extend(refused.values())
    if silent := _still_down(going, limits.wait_s, path):
        may_wait = proxy_follows and not {*silent} & {*out, *taken}
        (waiting if may_wait else problems).append(
            f"{', '.join(f'{name} ({status})' for name, status in silent.items())}: not up after {limits.wait_s:.0f} s."
            " They are in the routes again and get requests as soon as they answer; look at their hosts."
        )
    if problems:
        raise DrainRefused("\n".join(problems))
    return bool(out), waiting


def follow(found: Sequence[Server], ports: Mapping[str, int], path: Path) -> None:
    """Ask instances where they listen now: the proxy's next configuration comes after the last one has moved.

    One stays where it is as long as it does not answer there.
    """
    for one in found:
        port = ports.get(one.name, one.port)
        if one.port and one.port != port and _listens(one.address, port):
            ask(path, f"set server {one.backend}/{one.name} addr {one.address} port {port}")


def refusals(found: Sequence[Server], asked: Mapping[str, Asked], *, key_counts: bool) -> dict[str, str]:
    """Who would answer the proxy 401 or 404, by name, in words; of who says anything else, HAProxy's checks decide."""
    said = {}
    for one in found:
        way = asked.get(one.backend.removeprefix(PREFIX))
        answer = ask_models(one.address, one.port, way.key) if way and one.port else Answer(0, "")
        if answer.status in (401, 403) and key_counts:
            said[one.name] = (
                f"{one.name}: refused the key that this proxy asks with, and stays out of the routes. VLLM_API_KEY is "
                "another one there, as in a generation from before it changed. Run site.yml for its host and the "
                "proxy, which brings both the inventory's, or roll back to a generation that has the proxy's "
                "(rollback.yml, vllm_generation); either puts it back."
            )
        elif way and answer.models and way.model not in answer.models:
            said[one.name] = (
                f"{one.name}: serves {', '.join(answer.models)}, and this proxy asks it for {way.model}, so it stays "
                "out of the routes. Run site.yml for its host and the proxy, which brings both the inventory's, or "
                "roll back."
            )
    return said


def _still_down(names: set[str], wait_s: float, path: Path) -> dict[str, str]:
    """Who is not up in time, and what HAProxy says of each."""
    until = time.monotonic() + wait_s
    while down := {one.name: one.status for one in _models(path) if one.name in names and not one.up}:
        if time.monotonic() >= until:
            break
        time.sleep(0.2)
    return dict(sorted(down.items()))


def _end_shares(path: Path, names: Sequence[str]) -> None:
    """What a canary's run left behind: HAProxy picks for a share past all states."""
    entries = [line.split() for line in ask(path, f"show map {CANARIES}").splitlines()]
    for name in sorted({words[1] for words in entries if len(words) == 3} & {*names}):
        order(path, f"del map {CANARIES} {name}")


def away(path: Path = SOCKET) -> list[dict[str, str]]:
    """Instances that get no requests now, because they were taken out or do not answer.

    Raises:
        SocketError: HAProxy does not answer.
    """
    return [
        {"name": one.name, "model": one.backend.removeprefix(PREFIX), "status": one.status}
        for one in _models(path)
        if not one.up
    ]


def _refuse(found: Sequence[Server], names: Sequence[str], limits: Limits) -> None:
    """Raise DrainRefused where too few instances of a model would be left."""
    problems = []
    # One that is down serves nobody: taking it out makes none fewer.
    for backend in sorted({one.backend for one in found if one.name in names and one.up}):
        name, model = backend.removeprefix(PREFIX), [one for one in found if one.backend == backend]
        left = [one for one in model if one.up and one.name not in names]
        out = sorted(one.name for one in model if not one.up or one.name in names)
        away = sorted(f"{one.name} ({one.status})" for one in model if not one.up and one.name not in names)
        # Else more are taken out at once than may be, however the others are.
        others = f"bring {', '.join(away)} back" if away else "give the model another instance"
        first = f"{others}, or " if len(out) - len(away) <= limits.unavailable else ""
        if not left and not limits.outage:
            problems.append(
                f"{name} would have no instance left that is ready: {first}accept the outage with vllm_accept_outage"
            )
        elif left and len(out) > limits.unavailable:
            problems.append(
                f"{len(out)} instances of {name} would be out at a time ({', '.join(out)}), and "
                f"vllm_max_unavailable is {limits.unavailable}: {first}set it to {len(out)}"
            )
    if problems:
        raise DrainRefused(f"{'; '.join(problems)}. Nothing was taken out.")


def _lock(path: Path) -> AbstractContextManager[None]:
    return host_lock("instances out of the routes or back", path=path.with_name(LOCK))


def _order(path: Path, going: Sequence[Server], state: str) -> None:
    for one in going:
        order(path, f"set server {one.backend}/{one.name} state {state}")
    if going:  # an HAProxy that comes back after a crash goes by it
        write_file(path.with_name(STATE), f"{ask(path, 'show servers state')}\n".encode())


def _before_reloads(path: Path) -> list[Server]:
    """Servers as workers see them that a reload replaced; none where HAProxy was started without a master's socket."""
    master = path.with_name(MASTER)
    return servers_of_old_workers(master) if master.exists() else []


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), CONNECT_S):
            return True
    except OSError:
        return False


def _models(path: Path) -> list[Server]:
    return [one for one in servers(path) if one.backend.startswith(PREFIX)]


def _is_out(server: Server) -> bool:
    return server.status.startswith(("DRAIN", "MAINT"))
