# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the proxy of a host will be, from litellm_proxy_*: of the keys only the teams' names and limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from typing import Any

PREFIX = "litellm_proxy_"
# Settings that the plan shows as they are, by what they are about.
SETTINGS = {
    "": ("names", "listen", "port", "internal_port", "process_port", "processes", "paths", "release", "user"),
    "limits": (
        *("body_limit_mib", "client_timeout_s", "request_timeout_s", "max_connections", "start_timeout_s"),
        *("answer_timeout_s", "memory_max"),
    ),
}
OWN_CA = "own CA on the proxy host"
OF_THE_SITE = "certificate of the site"
# What litellm_proxy_database may be besides an address; the module proxy knows it too.
LOCAL = "local"
# libpq's: scheme, then perhaps user, host, port, database, settings. A password has a variable of its own.
_ADDRESS = re.compile(r"postgres(ql)?://(?P<user>[^/@\s]*@)?[^@\s]+")


def proxy_part(value: Callable[[str], Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The part ``proxy`` of a plan, and the origin of each of its values.

    Args:
        value: a variable, or its default.
        given: the variables that the inventory sets.
    """
    origins: dict[str, str] = {}
    part: dict[str, Any] = {}

    def origin(name: str) -> str:
        return PREFIX + name if PREFIX + name in given else "default"

    for section, names in SETTINGS.items():
        found = part.setdefault(section, {}) if section else part
        for name in names:
            found[name] = value(PREFIX + name)
            origins[".".join(filter(None, ("proxy", section, name)))] = origin(name)
    site = bool(value(f"{PREFIX}certificate"))
    part["tls"] = {"source": OF_THE_SITE if site else OWN_CA}
    origins["proxy.tls.source"] = origin("certificate")
    for name in () if site else ("renew_days", "ca_file"):
        part["tls"][name] = value(PREFIX + name)
        origins[f"proxy.tls.{name}"] = origin(name)
    database = value(f"{PREFIX}database")
    part["database"] = "" if database_problem(database) else database  # what is wrong may be a password in it
    origins["proxy.database"] = origin("database")
    part["teams"] = _teams(value(f"{PREFIX}keys"))
    origins["proxy.teams"] = origin("keys")
    return part, origins


def database_problem(database: str) -> str:
    """What is wrong with ``litellm_proxy_database``; empty where nothing is. No password is in it."""
    if database in ("", LOCAL):
        return ""
    address = _ADDRESS.fullmatch(database)
    if address is None:
        return "is neither local nor an address such as postgresql://proxy@db1.example.internal/keys"
    if "sslpassword=" in database:
        return "has the password of a client's TLS key in it, which plans would show: name a key file without one"
    if ":" in (address["user"] or "") or "password=" in database:
        return "has a password in it, which plans and processes would show"
    return ""


def database_packages(database: str) -> list[str]:
    """Debian's packages that the keys of a database need on the proxy."""
    return (["postgresql"] if database == LOCAL else []) + (["python3-psycopg2"] if database else [])


def _teams(keys: Any) -> list[dict[str, Any]]:
    """Each team with what its key may do; what is wrong with one is a problem of the routes."""
    teams = []
    for name, entry in keys.items() if isinstance(keys, Mapping) else ():
        entry = entry if isinstance(entry, Mapping) else {}  # noqa: PLW2901 - as if it said nothing
        models, expires = entry.get("models"), entry.get("expires")
        teams.append(
            {
                "name": str(name),
                "models": [str(model) for model in models] if isinstance(models, list) else [],
                "requests_per_minute": _whole(entry.get("requests_per_minute")),
                "expires": str(expires) if isinstance(expires, (str, date)) and expires else None,
            }
        )
    return teams


def _whole(value: Any) -> int | None:
    text = str(value)
    return int(text) if not isinstance(value, bool) and text.isascii() and text.isdecimal() and len(text) < 12 else None


def with_routes(plans: Iterable[Mapping[str, Any]], routes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Plans with the proxy's routes in them, which only all plans together give: a model's instances as addresses."""
    found = [dict(plan) for plan in plans]
    models = (routes or {}).get("models") or []
    for plan in found:
        if plan.get("proxy"):
            plan["proxy"] = {
                "address": ((routes or {}).get("addresses") or {}).get(plan["host"]),
                **plan["proxy"],
                "routes": [
                    {"name": model["name"], "servers": [_server(one) for one in model["servers"]], "key": model["key"]}
                    for model in models
                ],
            }
    return found


def _server(server: Mapping[str, Any]) -> str:
    address = f"[{server['address']}]" if ":" in server["address"] else server["address"]
    return f"{server['name']} {address}:{server['port']}"
