# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What became of a host's proxy: the state of its units, and the instances of which HAProxy says how they are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from .haproxy_socket import PREFIX, SOCKET, SocketError, servers
from .model_files import json_of
from .proxy import HAPROXY, KEYS, LITELLM, Places
from .systemd_unit import unit_state

Facts = dict[str, Any]

SYSTEM_UNITS = Path("/etc/systemd/system")


def proxy(path: Path = SOCKET, units: Path = SYSTEM_UNITS, said: Path = Places.keys_said) -> Facts | None:
    """The proxy's units and what HAProxy says of each instance; None where the host has no proxy.

    Returns:
        ``{units: {unit: {active, sub, result, restarts}}, instances: [{name, model, status, check, up}], silent,
        keys}``: ``silent`` why HAProxy does not say anything, ``keys`` why the database of the keys does not.

    Raises:
        SystemdError: systemd does not say how a unit is.
    """
    if not (units / HAPROXY).is_file():
        return None
    enabled = sorted(link.name for link in [*units.glob(f"*/{LITELLM.format('*')}"), *units.glob(f"*/{KEYS}")])
    states = {name: asdict(unit_state(name)) for name in (HAPROXY, *enabled)}
    facts: Facts = {
        "units": {
            name: {key: state[key] for key in ("active", "sub", "result", "restarts")} for name, state in states.items()
        },
        "instances": [],
        "silent": None,
        "keys": json_of(said).get("error") if KEYS in enabled else None,
    }
    try:
        facts["instances"] = [
            {
                "name": one.name,
                "model": one.backend.removeprefix(PREFIX),
                "status": one.status,
                "check": one.check,
                "up": one.up,
            }
            for one in servers(path)
            if one.backend.startswith(PREFIX)
        ]
    except SocketError as error:
        facts["silent"] = str(error)
    return facts
