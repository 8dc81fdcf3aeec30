# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The keys of teams as the proxy knows them: by their sha256, so that nothing on its disk lets anybody in."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from datetime import UTC, date, datetime
from typing import Any

# A hash hides only what cannot be guessed.
SHORTEST_KEY = 20
MASTER = "master"


class KeysRefused(ValueError):
    """Keys that cannot be as they are given; the message lists every problem and no key."""


def proxy_keys(
    teams: Mapping[str, Mapping[str, Any]], master_key: str, models: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Team keys and the master key by sha256.

    Args:
        teams: by name, each with ``key`` and perhaps ``models``, ``requests_per_minute`` and ``expires``.
        models: the names of all models, which a team's models must be among.

    Returns:
        ``{sha256: {"team", "models" ([] for all), "requests_per_minute" (0 for no limit), "expires" (Unix time, None
        for never)}}``

    Raises:
        KeysRefused: with every problem.
    """
    problems: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    everybody: list[tuple[str, Mapping[str, Any]]] = [(MASTER, {"key": master_key}), *teams.items()]
    for team, entry in everybody:
        where = "litellm_proxy_master_key" if team == MASTER and entry.get("key") == master_key else _where(team)
        key = str(entry.get("key") or "")
        if len(key) < SHORTEST_KEY or not key.isprintable() or " " in key:
            problems.append(f"{where}: must have at least {SHORTEST_KEY} printable characters without blanks")
            continue
        limit = entry.get("requests_per_minute") or 0
        if isinstance(limit, bool) or not str(limit).isdecimal():
            problems.append(f"{_where(team)}.requests_per_minute: is no whole number")
            limit = 0
        wanted = [str(name) for name in entry.get("models") or []]
        if unknown := sorted({*wanted} - {*models}):
            known = ", ".join(sorted(models))
            problems.append(f"{_where(team)}.models: {', '.join(unknown)} is served by no instance (served: {known})")
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest in found:
            problems.append(f"{where}: is also the key of {found[digest]['team']}")
        found[digest] = {
            "team": team,
            "models": wanted,
            "requests_per_minute": int(limit),
            "expires": _expires(entry.get("expires"), team, problems),
        }
    if problems:
        raise KeysRefused("; ".join(problems))
    return found


def _where(team: str) -> str:
    return f"litellm_proxy_keys.{team}"


def _expires(value: Any, team: str, problems: list[str]) -> float | None:
    """A date (its first moment) or a time, UTC where it names no zone, as Unix time."""
    if value in (None, ""):
        return None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = value.isoformat()
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        problems.append(f"{_where(team)}.expires: {value!r} is no date, such as 2027-01-31, or time")
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
