# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What became of a host's instances: the state of each unit, and for one that does not serve, why, from its journal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .generation import Generations
from .host_probe_command import run
from .model_files import json_of
from .systemd_environment import read_environment
from .systemd_unit import SystemdError, UnitState, lines_that_matter, unit_state

Facts = dict[str, Any]
Query = Callable[..., tuple[int, str, str]]

# The engine logs a few hundred lines in a start, and a traceback in each of its processes.
LINES_READ = 4000
# A unit that systemd starts again and again has just begun its next start: the one before says why.
RUNS_READ = 2
LONGEST_LINE = 400
# What a host's facts may decide of an instance (plugin_utils/plan_facts.py): arguments and variables.
DECIDED_ARGUMENTS = ("gdn-prefill-backend", "numa-bind-nodes", "compilation-config")
DECIDED_VARIABLES = ("VLLM_USE_FLASHINFER_SAMPLER",)
# vLLM's own prefix of a line, in front of what a cause is known by.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((ERROR|WARNING|INFO|DEBUG) \d\d-\d\d [\d:.]+ \[[^]]*\] )?")
# Whatever a program prints of a secret that is not one of ours.
_SECRET = re.compile(
    r"(?i)((?:api[_-]?key|token|password|secret|authorization)\w*['\"]?\s*[=:]\s*(?:bearer\s+)?)['\"]?[^\s'\",;)}\]]+"
    r"|\b(hf_|sk-)[A-Za-z0-9_-]{8,}"
)


@dataclass(frozen=True)
class Cause:
    """What a failed start is known by.

    Args:
        identifier: stable name.
        pattern: regular expression that a line of the journal matches.
        symptom: it only says that something failed: it counts where no other cause was found.
    """

    identifier: str
    pattern: re.Pattern[str]
    symptom: bool = False


def compiled(causes: Iterable[Mapping[str, Any]]) -> list[Cause]:
    """The causes of catalogue/causes.yml, of which ``id``, ``pattern`` and ``symptom`` are read.

    Raises:
        ValueError: a pattern is no regular expression.
    """
    result = []
    for cause in causes:
        try:
            pattern = re.compile(str(cause["pattern"]))
        except re.error as error:
            raise ValueError(f"the pattern of cause {cause['id']} is no regular expression: {error}") from error
        result.append(Cause(str(cause["id"]), pattern, bool(cause.get("symptom"))))
    return result


def decided(name: str, etc: Path = Path("/etc/vllm")) -> Facts | None:
    """What an instance's current generation has of the settings that facts may decide; None where it has none."""
    generations = Generations(etc / name)
    number = generations.current()
    if number is None:
        return None
    files, _release = generations.read(number)
    environment = read_environment(files.get("environment", b"").decode(errors="replace"))
    found: Facts = {name: environment[name] for name in DECIDED_VARIABLES if name in environment}
    for line in files.get("serve.yaml", b"").decode(errors="replace").splitlines():
        flag, _colon, value = line.partition(": ")
        if flag in DECIDED_ARGUMENTS:
            found[flag] = json.loads(value) if value.startswith("[") else value
    return found


def instance(name: str, causes: Sequence[Cause], etc: Path = Path("/etc/vllm"), query: Query = run) -> Facts | None:
    """The unit of an instance, and where it does not serve, the causes that its journal names; None where it is none.

    Returns:
        ``{active, sub, result, restarts, causes: [{id, line}], lines, unreadable, probes}``. No secret is in the lines.
    """
    unit = f"vllm-{name}.service"
    try:
        state = unit_state(unit)
    except SystemdError as error:
        return {"active": None, "causes": [], "lines": [], "unreadable": str(error)}
    if not state.loaded:
        return None
    facts: Facts = {
        **{key: asdict(state)[key] for key in ("active", "sub", "result", "restarts")},
        "causes": [],
        "lines": [],
        "unreadable": None,
        "probes": recorded(name),
    }
    if state.active == "active":
        return facts
    lines, facts["unreadable"] = journal(unit, state, query)
    hide = hider(secrets(etc / name))
    facts["causes"] = [{**found, "line": hide(found["line"])} for found in named_causes(lines, causes)]
    facts["lines"] = [hide(line) for line in lines_that_matter(lines, 8)]
    return facts


def recorded(name: str, records: Path = Path("/var/lib/vllm")) -> list[dict[str, str]]:
    """What the probes of its release found and let pass: warnings, and errors that were waived (release_probe)."""
    found = json_of(records / name / "probes.json").get("findings")
    keys = ("id", "severity", "found", "needed", "remedy")
    return [
        {key: str(one[key]) for key in keys}
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict) and set(keys) <= set(one)
    ]


def journal(unit: str, state: UnitState, query: Query = run) -> tuple[list[str], str | None]:
    """The lines of the last start of a unit, of the last two where systemd starts it again and again.

    Returns:
        The lines, and why there are none.
    """
    status, text, message = query(
        *("journalctl", "--quiet", "--no-pager", "--output", "json", "--lines", str(LINES_READ), "--unit", unit),
        *("--output-fields", "MESSAGE,_SYSTEMD_INVOCATION_ID,INVOCATION_ID"),
    )
    if status != 0:
        return [], f"the journal cannot be read: {message or f'status {status}'}"
    runs: dict[str, list[str]] = {}
    last = ""
    for line in text.splitlines():
        entry = json.loads(line)
        last = entry.get("_SYSTEMD_INVOCATION_ID") if last == "" else last
        # systemd's own lines carry the unit's invocation in INVOCATION_ID, the unit's in _SYSTEMD_INVOCATION_ID.
        last = entry.get("INVOCATION_ID") or entry.get("_SYSTEMD_INVOCATION_ID") or last
        runs.setdefault(last or "", []).extend(_message(entry.get("MESSAGE")).splitlines())
    wanted = RUNS_READ if state.restarts or state.active == "activating" else 1
    lines = [line for run_lines in list(runs.values())[-wanted:] for line in run_lines]
    return lines, None if lines else "the journal holds nothing of it"


def _message(value: Any) -> str:
    """A message; journald gives one that is no text as a list of bytes."""
    if isinstance(value, list):
        return bytes(byte for byte in value if isinstance(byte, int) and 0 <= byte < 256).decode(errors="replace")
    return str(value or "")


def named_causes(lines: Sequence[str], causes: Sequence[Cause]) -> list[dict[str, str]]:
    """The causes that lines name, in the causes' order, each with the first line that does."""
    found: list[tuple[Cause, str]] = []
    for cause in causes:
        line = next((line for line in lines if cause.pattern.search(line)), None)
        if line is not None:
            found.append((cause, line))
    if any(not cause.symptom for cause, _line in found):
        found = [(cause, line) for cause, line in found if not cause.symptom]
    return [{"id": cause.identifier, "line": _PREFIX.sub("", line.strip())[:LONGEST_LINE]} for cause, line in found]


def secrets(directory: Path) -> set[str]:
    """The values of the secrets of all generations of an instance that are still there."""
    generations = Generations(directory)
    values: set[str] = set()
    for number in generations.numbers():
        files, _release = generations.read(number)
        environment = read_environment(files.get("environment", b"").decode(errors="replace"))
        try:
            manifest = json.loads(files.get("manifest.json", b""))
            public = set(manifest["environment"])
        except (ValueError, LookupError, TypeError):
            public = set()  # of a damaged generation everything is hidden
        values |= {value for name, value in environment.items() if name not in public and value}
    return values


def hider(values: Iterable[str]) -> Callable[[str], str]:
    """A function that takes secrets out of a line: these values, and what looks like one."""
    known = sorted(values, key=len, reverse=True)

    def hide(line: str) -> str:
        for value in known:
            line = line.replace(value, "(hidden)")
        return _SECRET.sub(lambda match: f"{match[1] or ''}(hidden)", line)

    return hide
