# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Taking instances out of the proxy's routes and putting them back, without ever taking too many of one model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .haproxy_socket import Server, order, servers

SOCKET = Path("/run/onprem-vllm-haproxy/admin.sock")
PREFIX = "model-"


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
    """Send instances no more requests, and wait until they have none.

    Returns:
        Whether any was in, and those that still had requests when the time was up.

    Raises:
        DrainRefused: too few instances of a model would be left; none is taken out then.
        SocketError: HAProxy does not answer.
    """
    found = _models(path)
    going = [one for one in found if one.name in names and not _is_out(one)]
    problems = []
    # One that is down serves nobody: taking it out makes none fewer.
    for backend in sorted({one.backend for one in going if one.up}):
        model = [one for one in found if one.backend == backend]
        left = [one for one in model if one.up and one.name not in names]
        out = [one for one in model if not one.up or one.name in names]
        if not left and not limits.outage:
            problems.append(f"{backend.removeprefix(PREFIX)} would have no instance left that is ready")
        elif left and len(out) > limits.unavailable:
            problems.append(
                f"{len(out)} instances of {backend.removeprefix(PREFIX)} would be out at a time "
                f"({', '.join(sorted(one.name for one in out))}), and vllm_max_unavailable is {limits.unavailable}"
            )
    if problems:
        raise DrainRefused(
            "; ".join(problems) + ". Nothing was taken out. Wait until the others are ready, give the model another "
            "instance, or accept the outage with vllm_accept_outage."
        )
    if check:
        return bool(going), []
    for one in going:
        order(path, f"set server {one.backend}/{one.name} state drain")
    until = time.monotonic() + limits.wait_s
    while busy := [one.name for one in _models(path) if one.name in names and one.sessions]:
        if time.monotonic() >= until:
            return bool(going), busy
        time.sleep(0.2)
    return bool(going), []


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
        ports: where instances listen now. One that HAProxy still asks elsewhere is not waited for: only the proxy's
            next configuration leads to it.

    Raises:
        DrainRefused: one is not up in time; it stays in the routes, and gets requests as soon as it is.
        SocketError: HAProxy does not answer.
    """
    found = [one for one in _models(path) if one.name in names]
    was_out = any(_is_out(one) for one in found)
    if check:
        return was_out
    # One that is down is not shown as taken out, and would stay so once it is up.
    for one in [one for one in found if not one.up]:
        order(path, f"set server {one.backend}/{one.name} state ready")
    until = time.monotonic() + limits.wait_s
    moved = {one.name for one in found if one.port and (ports or {}).get(one.name, one.port) != one.port}
    while down := [
        f"{one.name} ({one.status})"
        for one in _models(path)
        if one.name in names and one.name not in moved and not one.up
    ]:
        if time.monotonic() >= until:
            raise DrainRefused(
                f"{', '.join(sorted(down))}: not up after {limits.wait_s:.0f} s. They are in the routes again and get "
                "requests as soon as they answer; look at their hosts."
            )
        time.sleep(0.2)
    return was_out


def _models(path: Path) -> list[Server]:
    return [one for one in servers(path) if one.backend.startswith(PREFIX)]


def _is_out(server: Server) -> bool:
    return server.status.startswith(("DRAIN", "MAINT"))
