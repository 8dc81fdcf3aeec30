# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""Releases proven on a host before they serve: each instance's probes, where and as whom its unit would run vLLM.

What was proven is recorded beside the instance's readiness. A record counts as long as nothing that it rests on has
changed: release, environment, sandbox, probes, this program, the host's compilers and driver, and the generation.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import probe_program
from .atomic import sha256_bytes, write_file
from .generation import Generations
from .host_lock import HostLocked, host_lock
from .probe_program import ERROR, WARNING, Finding, finding
from .systemd_environment import EnvironmentRefused, environment_text, read_environment
from .systemd_unit import SystemdError, lines_that_matter, sandbox, systemctl, unit_state

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
WAIVED = "waived"
RECORD = "probes.json"
# Programs that probes start: exchanged or gone, what was proven with them is proven no longer.
_TOOLS = ("ninja", "nvcc", "c++", "gcc", "clang", "numactl")


class ProbesFailed(RuntimeError):
    """The probes could not be carried out at all; the message says why. A probe that fails is a finding instead."""


@dataclass(frozen=True)
class Places:
    """Directories of the host."""

    etc: Path = Path("/etc/vllm")
    records: Path = Path("/var/lib/vllm")
    run: Path = Path("/run")
    driver: Path = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Subject:
    """One instance whose release is to be proven.

    Attributes:
        release: directory of the release.
        unit: text of its unit, from which the sandbox is taken.
        environment: that of the process, without secrets.
        serve: text of its file for ``vllm serve --config``.
        probes: identifiers, in the order in which they run.
    """

    name: str
    release: Path
    unit: str
    environment: Mapping[str, str]
    serve: str
    probes: tuple[str, ...]

    @property
    def transient(self) -> str:
        """The unit in which its probes run; no instance can have its name."""
        return f"onprem-vllm-probe-{self.name}.service"


def subject(entry: Mapping[str, Any]) -> Subject:
    """A Subject from the module's parameters.

    Raises:
        ProbesFailed: its name cannot be a unit's.
    """
    if not NAME.match(entry["name"]):
        raise ProbesFailed(
            f"{entry['name']!r} cannot be the name of an instance: use letters, digits, '_', '.' and '-'."
        )
    return Subject(
        name=entry["name"],
        release=Path(entry["release_path"]),
        unit=entry["unit"],
        environment={str(name): str(value) for name, value in entry["environment"].items()},
        serve=entry["serve"],
        probes=tuple(entry["probes"]),
    )


def identity(wanted: Subject, places: Places) -> str:
    """A hash over all that a proof rests on, cheap enough to be taken in every run.

    Raises:
        OSError: the release has no manifest.
    """
    path = wanted.environment.get("PATH", "")
    tools = [shutil.which(name, path=path) or "" for name in _TOOLS]
    tools += ["/usr/local/cuda/bin/nvcc", *sorted(map(str, Path("/usr/include").glob("python3*/Python.h")))]
    rests_on = [
        sha256_bytes((wanted.release / "manifest.json").read_bytes()),
        os.fspath(wanted.release),
        sorted(wanted.environment.items()),
        sandbox(wanted.unit),
        wanted.probes,
        program(),
        [_state(Path(tool)) for tool in tools if tool],
        _text(places.driver),
    ]
    return hashlib.sha256(json.dumps(rests_on).encode()).hexdigest()


def program() -> str:
    """The text of the probes."""
    return inspect.getsource(probe_program)


def _state(path: Path) -> list[object]:
    try:
        found = path.stat()
    except OSError:
        return [os.fspath(path)]
    return [os.fspath(path.resolve()), found.st_size, found.st_mtime_ns]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def proven(wanted: Subject, places: Places) -> list[Finding] | None:
    """The findings of an earlier run that still hold (errors among them were waived), None where the probes are due."""
    path = places.records / wanted.name / RECORD
    try:
        state = path.lstat()
        record = json.loads(path.read_text(encoding="utf-8"))
        same = record["identity"] == identity(wanted, places)
        findings = [{key: str(one[key]) for key in finding("", "", "", "")} for one in record["findings"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    trusted = state.st_uid == os.geteuid() and not state.st_mode & 0o022
    return findings if same and trusted and not generation_due(wanted, places) else None


def generation_due(wanted: Subject, places: Places) -> bool:
    """Whether the instance will get a new generation, as far as it can be said without its secrets."""
    generations = Generations(places.etc / wanted.name)
    current = generations.current()
    if current is None:
        return True
    files, release = generations.read(current)
    variables = read_environment(files.get("environment", b"").decode(errors="replace"))
    return not (
        release == os.fspath(wanted.release)
        and files.get("serve.yaml") == wanted.serve.encode()
        and files.get("unit") == wanted.unit.encode()
        and all(variables.get(name) == value for name, value in wanted.environment.items())
    )


def prove(wanted: Subject, places: Places, timeout_s: float) -> list[Finding]:
    """Run the probes of one instance as a transient unit with its unit's sandbox.

    Raises:
        SystemdError: systemd does not answer.
        OSError: nothing can be written below /run.
    """
    if unit_state(wanted.transient).loaded:  # of a run that was killed
        systemctl("stop", wanted.transient)
    with tempfile.TemporaryDirectory(prefix="onprem-vllm-probe-", dir=places.run) as directory:
        environment = Path(directory) / "environment"
        try:
            write_file(environment, environment_text(wanted.environment).encode(), 0o400)
        except EnvironmentRefused as error:
            return [finding("environment", str(error), "variables that systemd passes on", "Correct the variable.")]
        properties = [
            *sandbox(wanted.unit),
            f"EnvironmentFile={environment}",
            f"RuntimeMaxSec={timeout_s:.0f}",
            "KillMode=mixed",
        ]
        command = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--no-ask-password"]
        command += [f"--unit={wanted.transient}", "--service-type=exec", f"--description=Probes of {wanted.name}"]
        command += [f"--property={one}" for one in properties]
        given = json.dumps({"wanted": wanted.probes, "serve": wanted.serve})
        try:
            done = subprocess.run(
                [*command, f"{wanted.release}/bin/python", "-"],
                input=f"{program()}\nstart(**json.loads({given!r}))\n",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s + 60,
                check=False,
            )
        except subprocess.TimeoutExpired:
            systemctl("stop", wanted.transient)
            return [_cut_short("start", f"no end after {timeout_s:.0f} s", "")]
        except OSError as error:
            raise SystemdError(f"systemd-run cannot be run: {error.strerror}") from error
    return _read(done)


def _read(done: subprocess.CompletedProcess[str]) -> list[Finding]:
    """What the program reported, and where it broke off."""
    findings: list[Finding] = []
    open_probe = "start"
    for line in done.stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # written by a library past sys.stdout
        if not isinstance(event, dict):
            continue
        open_probe = event.get("begin", "")
        findings.extend(event.get("findings", []))
    if done.returncode != 0 or open_probe:
        said = "; ".join(lines_that_matter(done.stderr.splitlines(), 6))
        findings.append(_cut_short(open_probe or "end", f"the process ended with status {done.returncode}", said))
    return findings


def _cut_short(identifier: str, how: str, said: str) -> Finding:
    return finding(
        identifier,
        f"{how}{f': {said}' if said else ''}",
        "the probes to end, in the unit's sandbox and as its user",
        "Look at what it said; without anything, at journalctl -u 'onprem-vllm-probe-*' and dmesg.",
    )


def merged(findings: Mapping[str, Iterable[Finding]], waived: Iterable[str]) -> list[Finding]:
    """The findings of all instances, each once with the instances it holds for; errors first, waived ones last."""
    taken_on = set(waived)
    holds_for: dict[str, list[str]] = {}
    for name, found in findings.items():
        for one in found:
            holds_for.setdefault(json.dumps(one, sort_keys=True), []).append(name)
    result = []
    for text, names in holds_for.items():
        one = json.loads(text)
        one["needed"] += f", for instance{'s' * (len(names) > 1)} {', '.join(names)}"
        if one["severity"] == ERROR and one["id"] in taken_on:
            one["severity"] = WAIVED
        result.append(one)
    return sorted(result, key=lambda one: (ERROR, WARNING, WAIVED).index(one["severity"]))


def bring_about(
    entries: Sequence[Mapping[str, Any]],
    *,
    waived: Sequence[str] = (),
    timeout_s: float = 300,
    check_mode: bool = False,
    places: Places | None = None,
) -> dict[str, Any]:
    """Prove what is not proven yet, and record it; what the module returns.

    Args:
        entries: the module's ``instances``.
        waived: identifiers of errors that the operator takes on.
        timeout_s: seconds that the probes of one instance may take.

    Raises:
        ProbesFailed: a release is missing, or systemd does not answer.
    """
    places = places or Places()
    subjects = [subject(entry) for entry in entries]
    findings: dict[str, list[Finding]] = {}
    due: list[Subject] = []
    for one in subjects:
        held = proven(one, places) if one.probes else []
        if held is None:
            due.append(one)
        else:
            findings[one.name] = held
    result: dict[str, Any] = {"changed": bool(due) and check_mode, "probed": [one.name for one in due]}
    if due and not check_mode:
        if missing := [str(one.release) for one in due if not (one.release / "manifest.json").is_file()]:
            raise ProbesFailed(f"{', '.join(missing)} is no whole release: install it first (role uv_venv).")
        try:
            with host_lock(f"probes of {', '.join(one.name for one in due)}"), ThreadPoolExecutor() as pool:
                found = pool.map(lambda one: prove(one, places, timeout_s), due)
                findings.update(zip([one.name for one in due], found, strict=True))
            for one in due:
                result["changed"] |= _record(one, findings[one.name], waived, places)
        except (HostLocked, SystemdError, OSError) as error:
            raise ProbesFailed(str(error)) from error
    return {**result, "findings": merged(findings, waived)}


def _record(wanted: Subject, findings: Sequence[Finding], waived: Sequence[str], places: Places) -> bool:
    """Keep what was proven, and say whether it was; what was recorded earlier of another state needs no removal."""
    path = places.records / wanted.name / RECORD
    if any(one["severity"] == ERROR and one["id"] not in waived for one in findings):
        return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    content = {"identity": identity(wanted, places), "probes": wanted.probes, "findings": findings}
    write_file(path, (json.dumps(content, indent=2) + "\n").encode(), 0o644)
    return True


def forget(places: Places | None = None, *, check_mode: bool = False) -> bool:
    """Remove every record, and the directories that held nothing else and no instance needs; whether there was one."""
    places = places or Places()
    records = sorted(places.records.glob(f"*/{RECORD}"))
    if check_mode:
        return bool(records)
    for record in records:
        record.unlink()
        # The readiness step of an instance, which starts now perhaps, writes there.
        if not any(record.parent.iterdir()) and not (places.etc / record.parent.name).exists():
            record.parent.rmdir()
    if records and not any(places.records.iterdir()):
        places.records.rmdir()
    return bool(records)
