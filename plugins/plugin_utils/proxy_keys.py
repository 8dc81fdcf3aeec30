# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The keys of teams as the proxy knows them: by their sha256, so that nothing on its disk lets anybody in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from datetime import UTC, date, datetime
from typing import Any

from .role_variables import Problem, nearest, problem, sentence
from .sealed import Sealed

# A hash hides only what cannot be guessed.
SHORTEST_KEY = 20
MASTER = "master"
OPTIONS = ("key", "models", "requests_per_minute", "expires")
TEAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
NEW_KEY = "Make one with: openssl rand -hex 24"


class KeysRefused(ValueError):
    """Keys that cannot be as they are given; the message lists every problem and no key."""


def proxy_keys(teams: Any, master_key: Any, models: Collection[str]) -> dict[str, dict[str, Any]]:
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
    problems: list[Problem] = []
    found: dict[str, dict[str, Any]] = {}
    _add(found, MASTER, {"key": master_key}, models, "litellm_proxy_master_key", problems)
    _add_teams(found, teams, models, problems)
    if problems:
        raise KeysRefused("; ".join(f"{one['where']}: {one['what']}" for one in problems))
    return found


def team_problems(teams: Any, models: Collection[str]) -> list[Problem]:
    """Everything that is wrong with ``litellm_proxy_keys``, without any key in it."""
    problems: list[Problem] = []
    _add_teams({}, teams, models, problems)
    return problems


def _add_teams(found: dict[str, dict[str, Any]], teams: Any, models: Collection[str], problems: list[Problem]) -> None:
    if not isinstance(teams, Mapping):
        problems.append(problem("litellm_proxy_keys", "is no map of teams", "Write {} where there are none."))
        return
    for team, entry in teams.items():
        _add(found, str(team), entry, models, _where(str(team)), problems)


def _add(
    found: dict[str, dict[str, Any]],
    team: str,
    entry: Any,
    models: Collection[str],
    where: str,
    problems: list[Problem],
) -> None:
    """Add one entry to ``found``, or what is wrong with it to ``problems``."""
    if not isinstance(entry, Mapping):
        problems.append(problem(where, "is no map", f"Write {{key: ...}}, and perhaps {', '.join(OPTIONS[1:])}."))
        return
    if team == MASTER and where != "litellm_proxy_master_key":
        problems.append(
            problem(where, "has the name under which the master key is counted", "Name the team otherwise.")
        )
    if not TEAM.fullmatch(team):
        # It is a line of HAProxy's maps, and stands in logs and in answers to clients.
        problems.append(
            problem(
                where, "is no name of a team", "Use letters, digits and ._@-, at most 63, the first a letter or digit."
            )
        )
    # A misspelt limit would be none: the key would open what it shall not.
    problems.extend(
        problem(f"{where}.{name}", "is no setting of a key", sentence(nearest(str(name), OPTIONS)))
        for name in entry
        if name not in OPTIONS
    )
    key = entry.get("key")
    if not isinstance(key, Sealed) and (
        not isinstance(key, str) or len(key) < SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key
    ):
        problems.append(
            problem(where, f"must have at least {SHORTEST_KEY} printable ASCII characters without blanks", NEW_KEY)
        )
        return
    limit = entry.get("requests_per_minute")
    if limit is not None and (isinstance(limit, bool) or not str(limit).isdecimal() or not 0 < int(limit) < 2**31):
        problems.append(
            problem(
                f"{where}.requests_per_minute",
                "is no whole number above 0",
                "Correct it; without a limit leave it out.",
            )
        )
        limit = None
    digest = hashlib.sha256(key.encode()).hexdigest()
    if digest in found and not isinstance(key, Sealed):
        problems.append(problem(where, f"is also the key of {found[digest]['team']}", NEW_KEY))
    found[digest] = {
        "team": team,
        "models": _models(entry, where, models, problems),
        "requests_per_minute": int(limit or 0),
        "expires": _expires(entry.get("expires"), where, problems),
    }


def _models(entry: Mapping[str, Any], where: str, models: Collection[str], problems: list[Problem]) -> list[str]:
    wanted = entry.get("models")
    if wanted is None:
        return []
    if not isinstance(wanted, list) or not wanted or not all(isinstance(name, str) for name in wanted):
        problems.append(
            problem(f"{where}.models", "is no list of names", "Name one model or more; leave it out for all of them.")
        )
        return []
    if unknown := sorted({*wanted} - {*models}):
        known = ", ".join(sorted(models))
        problems.append(
            problem(
                f"{where}.models",
                f"{', '.join(unknown)} is served by no instance (served: {known})",
                "Correct the name, or define an instance that serves it.",
            )
        )
    return list(wanted)


def _where(team: str) -> str:
    return f"litellm_proxy_keys.{team}"


def _expires(value: Any, where: str, problems: list[Problem]) -> float | None:
    """A date (its first moment) or a time, UTC where it names no zone, as Unix time."""
    if value in (None, ""):
        return None
    if isinstance(value, int | float):
        value = "a number"  # 20270630 reads as a date, and is a moment of 1970
    if isinstance(value, date) and not isinstance(value, datetime):
        value = value.isoformat()
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        problems.append(
            problem(f"{where}.expires", f"{value!r} is no date, such as 2027-01-31, or time", "Correct it.")
        )
        return None
