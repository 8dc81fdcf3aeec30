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
from .haproxy_socket import Server, ask, order, servers, servers_of_old_workers
from .host_lock import host_lock

SOCKET = Path("/run/onprem-vllm-haproxy/admin.sock")
# Beside it. A reload of the proxy holds the lock too: what is ordered meanwhile, the next worker would not know.
LOCK, MASTER, STATE = "routes.lock", "master.sock", "server-state"
PREFIX = "model-"
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


def take_out(names: Sequence[str], limits: Limits, *, check: bool, path: Path = SOCKET) -> tuple[bool, list[str]]:
    """Send instances no more requests, and wait until they have none, also none from before a reload.

    Returns:
        Whether any was in, and those that still had requests when the time was up.

    Raises:
        DrainRefused: too few instances of a model would be left; none is taken out then.
        HostLocked: another run takes out or puts back, or reloads the proxy, for too long.
        SocketError: HAProxy does not answer.
    """
    with _lock(path):
        found = _models(path)
        _refuse(found, names, limits)
        going = [one for one in found if one.name in names and not _is_out(one)]
        if check:
            return bool(going), []
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
            return bool(going), busy
        time.sleep(0.2)


def put_back(
    names: Sequence[str],
    limits: Limits,
    *,
    check: bool,
    ports: Mapping[str, int] | None = None,
    path: Path = SOCKET,
) -> bool:
    """Send instances requests again, once HAProxy finds them up; whether any was out.

    Args:
        ports: where instances shall listen now (``follow``).

    Raises:
        DrainRefused: one is not up in time; it stays in the routes, and gets requests as soon as it is.
        HostLocked: another run takes out or puts back, or reloads the proxy, for too long.
        SocketError: HAProxy does not answer.
    """
    found = [one for one in _models(path) if one.name in names]
    was_out = any(_is_out(one) for one in found)
    if check:
        return was_out
    follow(found, ports or {}, path)
    # One that is down is not shown as taken out, and would stay so once it is up.
    with _lock(path):
        _order(path, [one for one in found if not one.up], "ready")
    until = time.monotonic() + limits.wait_s
    while down := [f"{one.name} ({one.status})" for one in _models(path) if one.name in names and not one.up]:
        if time.monotonic() >= until:
            raise DrainRefused(
                f"{', '.join(sorted(down))}: not up after {limits.wait_s:.0f} s. They are in the routes again and get "
                "requests as soon as they answer; look at their hosts."
            )
        time.sleep(0.2)
    return was_out


def follow(found: Sequence[Server], ports: Mapping[str, int], path: Path) -> None:
    """Ask instances where they listen now: the proxy's next configuration comes after the last one has moved.

    One stays where it is as long as it answers there, or nowhere else: a change that failed was taken back.
    """
    for one in found:
        port = ports.get(one.name, one.port)
        moved = one.port and one.port != port
        if moved and _listens(one.address, port) and not _listens(one.address, one.port):
            ask(path, f"set server {one.backend}/{one.name} addr {one.address} port {port}")


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
        name = backend.removeprefix(PREFIX)
        model = [one for one in found if one.backend == backend]
        left = [one for one in model if one.up and one.name not in names]
        out = [one for one in model if not one.up or one.name in names]
        together = [one for one in out if one.name in names]
        if not left and not limits.outage:
            problems.append(
                f"{name} would have no instance left that is ready. Wait until others are, give the model one on "
                "another host, or accept the outage with vllm_accept_outage."
            )
        elif left and len(out) > limits.unavailable:
            # One call takes out what is restarted together, which is what one host has of a model.
            remedy = (
                f"Those of one host go out together: set vllm_max_unavailable to {len(out)}, if what is left can take "
                "all requests."
                if len(together) > 1
                else "Wait until the others are ready, or raise it."
            )
            problems.append(
                f"{len(out)} instances of {name} would be out at a time "
                f"({', '.join(sorted(one.name for one in out))}), and vllm_max_unavailable is {limits.unavailable}. "
                f"{remedy}"
            )
    if problems:
        raise DrainRefused(f"{' '.join(problems)} Nothing was taken out.")


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
