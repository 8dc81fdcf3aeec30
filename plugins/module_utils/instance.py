# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""All instances of one host: generations, units, restarts where due, readiness, and back where it failed.

The order makes every step repairable: a generation is written whole, linked, its unit installed, then restarted.
A run that dies in between leaves a process that serves another generation than ``current`` says; the next run sees
that in the process itself and restarts it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .argument_check import check_arguments, remedy
from .atomic import sync_directory, write_file
from .finding_report import finding_report
from .generation import GENERATION_VARIABLE, Content, Generations, changed_names, differences
from .host_lock import HostLocked, host_lock
from .systemd_environment import EnvironmentRefused, check_assignment, hidden
from .systemd_unit import (
    StartFailed,
    SystemdError,
    UnitState,
    process_environment,
    start_and_wait,
    stop,
    systemctl,
    unit_state,
    verify_unit,
    wait_started,
    whole_journal,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
MARK = "# Managed by the Ansible collection onprem.vllm"
RESERVED = "ONPREM_VLLM_"
# Shorter ones would be found in ordinary words.
SECRET_SOUGHT_LENGTH = 8


class InstancesFailed(RuntimeError):
    """An instance did not become ready, or the host refused a step; ``result`` says what was done all the same."""

    def __init__(self, message: str, result: dict[str, object]) -> None:
        super().__init__(message)
        self.result = result


class InstancesRefused(ValueError):
    """The instances cannot be as asked; nothing was changed. The message lists every problem."""


@dataclass(frozen=True)
class Instance:
    """One instance as it shall be."""

    name: str
    served_model_name: str
    url: str
    content: Content

    @property
    def unit(self) -> str:
        return unit_name(self.name)


@dataclass(frozen=True)
class Limits:
    """How long an instance may take, in seconds, and how many generations are kept."""

    start_s: float = 900
    stop_s: float = 120
    device_s: float = 60
    keep: int = 5

    @property
    def start_bound_s(self) -> float:
        """Longer than systemd itself waits in all, so that systemd's own verdict comes first."""
        return self.stop_s + self.device_s + self.start_s + 60


@dataclass(frozen=True)
class Places:
    """Directories of the host."""

    etc: Path = Path("/etc/vllm")
    units: Path = Path("/etc/systemd/system")
    records: Path = Path("/var/lib/vllm")
    caches: Path = Path("/var/cache/vllm")
    programs: Path = Path("/opt/vllm/libexec")

    def record(self, name: str) -> Path:
        """Where the readiness step of an instance writes what it found."""
        return self.records / name / "readiness.json"

    def log(self, name: str, generation: int) -> Path:
        """Where the log of a generation's failed start is kept."""
        return self.records / name / f"failed-{generation}.log"


@dataclass
class Step:
    """What one instance needs, decided from the host's state."""

    instance: Instance
    generations: Generations
    current: int | None
    changed: list[str]
    number: int
    install_unit: bool
    enable: bool
    restart: str
    wait: bool
    loose: list[str]
    state: UnitState
    stored: bool = False  # the generation is there already: a rollback

    @property
    def new(self) -> bool:
        return bool(self.changed)

    @property
    def changes(self) -> bool:
        return bool(self.new or self.install_unit or self.enable or self.restart or self.loose)


@dataclass
class Outcome:
    """What was done with one instance."""

    name: str
    generation: int
    changed: bool = False
    restarted: bool = False
    ready_seconds: float | None = None
    rolled_back: bool = False
    reason: str = ""
    log: str = ""
    releases: list[str] = field(default_factory=list)
    failure: str = field(default="", repr=False)

    def returned(self) -> dict[str, object]:
        """The part of the module's result that stands for this instance."""
        return {
            "name": self.name,
            "generation": self.generation,
            "changed": self.changed,
            "restarted": self.restarted,
            "ready_seconds": self.ready_seconds,
            "rolled_back": self.rolled_back,
            "reason": self.reason,
            "log": self.log,
            "releases": self.releases,
        }


def unit_name(name: str) -> str:
    """The systemd unit of an instance."""
    return f"vllm-{name}.service"


def build(entry: Mapping[str, object]) -> Instance:
    """An Instance from the module's parameters, with the variables its unit's own steps read.

    ``name``, ``release_path``, ``serve``, ``unit``, ``environment``, ``secrets``, ``host``, ``port``, ``gpus``,
    ``gpu_memory``, ``served_model_name`` and ``tls_certificate`` are read.
    """
    host = str(entry["host"])
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    certificate = entry.get("tls_certificate")
    scheme = "https" if certificate else "http"
    url = f"{scheme}://[{reached}]:{entry['port']}" if ":" in reached else f"{scheme}://{reached}:{entry['port']}"
    gpus = tuple(str(gpu) for gpu in _list(entry["gpus"]))
    own = {
        f"{RESERVED}URL": url,
        f"{RESERVED}MODEL": str(entry["served_model_name"]),
        f"{RESERVED}GPUS": ",".join(gpus),
    }
    if memory := _mapping(entry.get("gpu_memory")):
        own |= {f"{RESERVED}GPU_COUNT": memory["gpus"], f"{RESERVED}GPU_MEMORY_UTILIZATION": memory["utilization"]}
    if certificate:
        own[f"{RESERVED}TLS_CERTIFICATE"] = str(certificate)
    return Instance(
        name=str(entry["name"]),
        served_model_name=str(entry["served_model_name"]),
        url=url,
        content=Content(
            serve=str(entry["serve"]),
            unit=str(entry["unit"]),
            release=str(entry["release_path"]),
            environment={**_mapping(entry["environment"]), **own},
            secrets=_mapping(entry["secrets"]),
            port=int(str(entry["port"])),
            gpus=gpus,
        ),
    )


def _mapping(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def variable_problems(entry: Mapping[str, object]) -> list[str]:
    """What is wrong with the variables of one instance as given, before build() makes text of them."""
    where = f"instance {entry['name']!r}"
    problems = []
    for group in ("environment", "secrets"):
        variables = entry[group]
        for name, value in variables.items() if isinstance(variables, Mapping) else ():
            if str(name).startswith(RESERVED):
                problems.append(f"{where}: {name} is set by the collection itself; take it out of the {group}.")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                problems.append(
                    f"{where}: the value of {name} is neither text nor a number; write the very text the program"
                    ' expects, in quotes ("1", "true").'
                )
    return problems


def check(instances: Sequence[Instance], found: Sequence[str] = ()) -> None:
    """Refuse what cannot work before anything changes.

    Args:
        found: problems known already, told together with the others.

    Raises:
        InstancesRefused: with every problem and its remedy, a line each.
    """
    problems = list(found)
    names: set[str] = set()
    ports: dict[int, str] = {}
    for instance in instances:
        where = f"instance {instance.name!r}"
        content = instance.content
        if not NAME.match(instance.name):
            problems.append(
                f"{where}: the name becomes a systemd unit and a directory; use at most 64 letters, digits, '_', '.'"
                " and '-', and begin with a letter or digit."
            )
        if instance.name in names:
            problems.append(f"{where}: is listed twice; give each instance its own name.")
        names.add(instance.name)
        if content.port in ports:
            problems.append(
                f"{where}: port {content.port} is also that of instance {ports[content.port]!r}; give it another."
            )
        ports.setdefault(content.port, instance.name)
        if MARK not in content.unit.splitlines()[:3]:
            problems.append(f"{where}: the unit must carry the line {MARK!r} at its top, so that it is known as ours.")
        for name, value in {**content.environment, **content.secrets}.items():
            try:
                check_assignment(name, value)
            except EnvironmentRefused as error:
                problems.append(f"{where}: {error}")
        problems += [
            f"{where}: {name} is given as a secret and in the plain environment; keep the secret."
            for name in sorted({*content.secrets} & {*content.environment})
        ]
        for name, value in content.secrets.items():
            if len(value) >= SECRET_SOUGHT_LENGTH and any(
                value in text for text in (content.serve, content.unit, *content.environment.values())
            ):
                problems.append(
                    f"{where}: the value of the secret {name} also stands in its serve arguments, environment or unit,"
                    " which others can read; take it out there."
                )
    if problems:
        raise InstancesRefused("\n".join(problems))


def check_releases(instances: Sequence[Instance]) -> None:
    """Refuse instances whose release is not there whole.

    Raises:
        InstancesRefused: with every missing release.
    """
    problems = []
    for instance in instances:
        release = Path(instance.content.release)
        if not (release / "manifest.json").is_file() or not os.access(release / "bin" / "vllm", os.X_OK):
            problems.append(
                f"instance {instance.name!r}: the release {release} is missing or not whole (manifest.json and bin/vllm"
                " are looked for); install it first (role uv_venv)."
            )
    if problems:
        raise InstancesRefused("\n".join(problems))


class Host:
    """The instances of this host; see the module's text for the order of things."""

    def __init__(self, limits: Limits, places: Places | None = None) -> None:
        self.limits = limits
        self.places = places or Places()

    def ours(self) -> list[str]:
        """Names of all instances on the host that this collection made."""
        found = set()
        if self.places.etc.is_dir():
            found |= {path.parent.name for path in self.places.etc.glob("*/generations") if path.is_dir()}
        if self.places.units.is_dir():
            for path in self.places.units.glob("vllm-*.service"):
                if path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace").splitlines()[:3]:
                    found.add(path.name.removeprefix("vllm-").removesuffix(".service"))
        return sorted(name for name in found if NAME.match(name))

    def others(self, names: Sequence[str]) -> list[str]:
        """Instances of ours that are not in ``names``."""
        return [name for name in self.ours() if name not in names]

    def remove(self, name: str, *, keep_caches: bool) -> None:
        """Stop an instance and remove all it owns. Its generations go last: they tell that it was ours.

        Raises:
            SystemdError: it does not stop.
        """
        unit = unit_name(name)
        path = self.places.units / unit
        state = unit_state(unit)
        if state.loaded:
            stop(unit)
        self._wanted_by(unit).unlink(missing_ok=True)
        if path.exists():
            path.unlink()
            sync_directory(path.parent)
        systemctl("daemon-reload")
        if state.loaded and unit_state(unit).active == "failed":
            systemctl("reset-failed", unit)
        shutil.rmtree(self.places.records / name, ignore_errors=True)
        if not keep_caches:
            shutil.rmtree(self.places.caches / name, ignore_errors=True)
        shutil.rmtree(self.places.etc / name, ignore_errors=True)

    def remove_shared(self) -> bool:
        """Remove what only instances need, once none is left; say whether there was something."""
        found = False
        for path in (self.places.programs, self.places.records, self.places.etc):
            if path == self.places.programs and path.is_dir():
                shutil.rmtree(path)
                found = True
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
                found = True
        return found

    def installed_unit(self, name: str) -> str | None:
        """The text of an instance's unit as systemd has it on disk."""
        return _text(self.places.units / unit_name(name))

    def is_enabled(self, name: str) -> bool:
        """Whether it starts at boot."""
        return self._wanted_by(unit_name(name)).is_symlink()

    def _wanted_by(self, unit: str) -> Path:
        return self.places.units / "multi-user.target.wants" / unit

    def lacks_programs(self, programs: Mapping[str, str]) -> bool:
        """Whether one of the files that units and vLLM run is not there as its text, or not for all to read."""
        return any(
            _text(path) != text or path.stat().st_mode & 0o7777 != 0o644
            for path, text in ((self.places.programs / name, text) for name, text in programs.items())
        )

    def install_programs(self, programs: Mapping[str, str]) -> None:
        """Put these files in place; running instances are not touched by it."""
        self.places.programs.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name, text in programs.items():
            write_file(self.places.programs / name, text.encode(), 0o644)

    def look(self, instance: Instance) -> Step:
        """Decide from the host's actual state what ``instance`` needs; changes nothing."""
        generations = Generations(self.places.etc / instance.name)
        current = generations.current()
        state = unit_state(instance.unit)
        served = process_environment(state.main_pid, GENERATION_VARIABLE) if state.main_pid else None
        installed = self.installed_unit(instance.name)
        changed = ["serve.yaml", "environment", "release", "unit"]
        if current is not None:
            changed = generations.differs(current, instance.content)
            if not changed and installed != instance.content.unit and served == str(current):
                # A unit edited by hand: nobody knows which text the process started with. A new number makes the
                # restart due until it has happened, also if this run dies before it.
                changed = ["unit as installed"]
        number = current if current is not None and not changed else max(generations.numbers(), default=0) + 1
        restart = ""
        if changed:
            restart = f"new generation {number}"
            if current is not None:
                # By names alone: this line goes into logs.
                names = changed_names(generations.read(current), instance.content)
                restart += f": {names or ', '.join(changed)}"
        elif state.active == "active" or state.starting:
            if served != str(current):
                restart = f"it serves generation {served or 'unknown'}, not {current}"
        else:
            restart = f"it was {state.active}"
        return Step(
            instance=instance,
            generations=generations,
            current=current,
            changed=changed,
            number=number,
            install_unit=installed != instance.content.unit or state.stale,
            enable=not self.is_enabled(instance.name),
            restart=restart,
            wait=state.starting and not restart,
            loose=[] if changed or current is None else generations.loose(current),
            state=state,
        )

    def diffs(self, step: Step) -> list[dict[str, str]]:
        """Ansible diffs of a step, without secrets."""
        if not step.new:
            return []
        before: tuple[Mapping[str, bytes], str] = ({}, "")
        if step.current is not None:
            before = step.generations.read(step.current)
        manifest = step.generations.manifest(step.current)
        found = differences(before, manifest, step.instance.content, step.number)
        return [
            {
                **diff,
                "before_header": f"{step.instance.name} generation {step.current or 'none'}: {diff['before_header']}",
                "after_header": f"{step.instance.name} generation {step.number}: {diff['after_header']}",
            }
            for diff in found
        ]

    def refused_arguments(self, steps: Sequence[Step], program: str) -> tuple[list[dict[str, str]], list[str]]:
        """What the releases' own vLLM says to new arguments: (refusals as findings, what could not be asked).

        Only what an instance would be restarted for and vLLM reads differently is asked: it costs an import of vLLM.

        Raises:
            SystemdError: systemd-run is missing.
        """
        refusals, doubts = [], []
        for step in steps:
            content = step.instance.content
            if not {"serve.yaml", "environment", "release"} & set(step.changed) or not Path(content.release).is_dir():
                continue
            bound_s = max(self.limits.start_s, 120)
            refusal, doubt = check_arguments(step.instance.name, content, step.number, program, bound_s)
            where = f"instance {step.instance.name!r}: the vLLM of {content.release}"
            if refusal:
                refusals.append(
                    {
                        "id": "arguments-refused",
                        "severity": "error",
                        "found": f"{where} refuses its serve arguments:{refusal}",
                        "needed": "arguments that the release's own vLLM takes, before anything is stopped for them",
                        "remedy": f"{remedy(refusal)} Nothing was stopped or changed.",
                    }
                )
            elif doubt:
                doubts.append(f"{where} could not be asked about its serve arguments, so its start will tell: {doubt}")
        return refusals, doubts

    def apply(self, steps: Sequence[Step], *, stop_at_failure: bool = False) -> list[Outcome]:
        """Carry the steps out, one instance after the other.

        Args:
            stop_at_failure: leave the instances after one that failed as they are; otherwise each gets its turn.
        """
        for step in steps:
            if step.new or step.install_unit:
                verify_unit(step.instance.unit, step.instance.content.unit)
        stopped = self._free_claims(steps)
        outcomes: list[Outcome] = []
        for step in steps:
            failed = [outcome.name for outcome in outcomes if outcome.failure]
            if stop_at_failure and failed:
                outcomes.append(self._leave(step, failed[0], step.instance.name in stopped))
            else:
                outcomes.append(self._apply(step))
        return outcomes

    def _leave(self, step: Step, failed: str, stopped: bool) -> Outcome:
        """Leave an instance as it is; one that was stopped to free its port or GPU comes back."""
        outcome = Outcome(step.instance.name, step.current or 0, reason=f"left alone: instance {failed} failed")
        if stopped:
            try:
                start_and_wait(step.instance.unit, self.limits.start_bound_s)
            except StartFailed as error:
                outcome.failure = (
                    f"instance {step.instance.name!r} was stopped for another and did not come back: {error}"
                )
        return outcome

    def _free_claims(self, steps: Sequence[Step]) -> set[str]:
        """Stop instances that restart anyway and hold a port or GPU that another one needs for its start; which."""
        holders = self.in_the_way([step.instance.name for step in steps if step.restart], steps)
        for name in holders:
            stop(unit_name(name))
        return set(holders)

    def in_the_way(self, going: Sequence[str], steps: Sequence[Step]) -> list[str]:
        """Those of ``going`` that run and hold a port or GPU that another instance needs for its start."""
        found = []
        for name in going:
            state = unit_state(unit_name(name))
            served = process_environment(state.main_pid, GENERATION_VARIABLE) if state.main_pid else None
            if served is None or not served.isdigit():
                continue
            manifest = Generations(self.places.etc / name).manifest(int(served))
            gpus = {str(gpu) for gpu in _list(manifest.get("gpus"))}
            needs = [step.instance.content for step in steps if step.restart and step.instance.name != name]
            if any(content.port == manifest.get("port") or gpus & {*content.gpus} for content in needs):
                found.append(name)
        return found

    def together(self, going: Sequence[str], steps: Sequence[Step]) -> list[str]:
        """Those of ``going`` for which no order of single ones works: in the way of another, or to serve another model.

        A proxy counts the instances of the former model, and asks for it.
        """
        found = set(self.in_the_way(going, steps))
        for step in steps:
            name, process = step.instance.name, step.state.main_pid
            model = process_environment(process, f"{RESERVED}MODEL") if process and name in going else None
            if model not in (None, step.instance.served_model_name):
                found.add(name)
        return [name for name in going if name in found]

    def _apply(self, step: Step) -> Outcome:
        instance, generations = step.instance, step.generations
        outcome = Outcome(instance.name, step.number, changed=step.changes, reason=step.restart)
        generations.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.places.record(instance.name).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        generations.sweep()
        if step.new:
            if not step.stored:
                outcome.generation = generations.write(instance.content)
            generations.activate(outcome.generation)
        elif step.loose:
            generations.tighten(step.number)
        self._install(instance.unit, instance.content.unit.encode(), reload=step.state.stale)
        if step.enable:
            systemctl("enable", "--quiet", instance.unit)
        try:
            if step.restart:
                outcome.restarted = True
                start_and_wait(instance.unit, self.limits.start_bound_s)
            elif step.wait:
                wait_started(instance.unit, self.limits.start_bound_s)
        except StartFailed as error:
            failed = outcome.generation
            self._fall_back(step, outcome, str(error))
            self._keep_log(step, failed, error.invocations, outcome)
        else:
            generations.mark_ready(outcome.generation)
            outcome.ready_seconds = self._ready_seconds(instance.name, outcome.generation)
        generations.prune(self.limits.keep)
        for path in self.places.log(instance.name, 0).parent.glob("failed-*.log"):
            if path.stem.removeprefix("failed-") not in map(str, generations.numbers()):
                path.unlink()
        outcome.releases = self.releases_kept(step)
        return outcome

    def releases_kept(self, step: Step) -> list[str]:
        """The releases that generations of an instance need, once its step is done."""
        gone = step.generations.superfluous(self.limits.keep, step.number if step.new else None)
        kept = {step.generations.read(number)[1] for number in step.generations.numbers() if number not in gone}
        return sorted({*kept, step.instance.content.release} - {""})

    def _keep_log(self, step: Step, failed: int, invocations: Sequence[str], outcome: Outcome) -> None:
        """Keep what a failed generation said: the journal is overwritten, and lies in memory on many hosts."""
        path = self.places.log(step.instance.name, failed)
        text = hidden(whole_journal(invocations), step.generations.secrets(failed))
        try:
            write_file(path, text.encode(), 0o600)
        except OSError as error:
            outcome.failure += f"\nIts log could not be kept: {error}."
            return
        outcome.log = str(path)
        outcome.failure += f"\nAll that generation {failed} said is kept in {path}."

    def _install(self, unit: str, text: bytes, *, reload: bool) -> None:
        path = self.places.units / unit
        if _text(path) != text.decode():
            write_file(path, text, 0o644)
            reload = True
        if reload:
            systemctl("daemon-reload")

    def _fall_back(self, step: Step, outcome: Outcome, failure: str) -> None:
        """Bring the last generation that was ready back; the module fails either way, with the first cause."""
        generations, unit = step.generations, step.instance.unit
        tried = outcome.generation
        fallback = generations.ready()
        outcome.failure = f"instance {step.instance.name!r}, generation {tried}: {failure}"
        if fallback is None or fallback == tried:
            outcome.failure += (
                "\nNo other generation of it was ever ready, so it stays stopped. Correct the cause and run again."
            )
            return
        files, release = generations.read(fallback)
        if not (Path(release) / "bin" / "vllm").exists():
            outcome.failure += f"\nGeneration {fallback} could not come back: its release {release} is gone."
            return
        generations.activate(fallback)
        self._install(unit, files.get("unit", step.instance.content.unit.encode()), reload=False)
        outcome.generation = fallback
        try:
            start_and_wait(unit, self.limits.start_bound_s)
        except StartFailed as error:
            outcome.failure += f"\nGeneration {fallback}, which was ready before, did not come back either: {error}"
            return
        outcome.rolled_back = True
        outcome.ready_seconds = self._ready_seconds(step.instance.name, fallback)
        outcome.failure += f"\nGeneration {fallback} was brought back and serves. Correct the cause and run again."

    def _ready_seconds(self, name: str, generation: int) -> float | None:
        try:
            found = json.loads(self.places.record(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or str(found.get("generation")) != str(generation):
            return None
        seconds = found.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None


def bring_about(
    entries: Sequence[Mapping[str, object]],
    host: Host,
    *,
    programs: Mapping[str, str] | None = None,
    purge_others: bool = False,
    keep_caches: bool = False,
    check_mode: bool = False,
    argument_check: str | None = None,
    stop_at_failure: bool = False,
) -> dict[str, object]:
    """Make the host's instances what ``entries`` say, or predict it; what the module returns.

    Args:
        entries: the module's ``instances``, see build().
        programs: texts of the files that units and vLLM run, by their names.
        purge_others: remove instances of ours that are not in ``entries``, before any other one starts.
        argument_check: text of the program that lets a release's vLLM read its arguments; not asked where None.
        stop_at_failure: leave the instances after one that failed as they are.

    Raises:
        InstancesFailed: refused, not ready or interrupted by an error. No secret is in its message.
    """
    result: dict[str, object] = {"changed": False, "instances": [], "removed": [], "diff": []}
    result |= {"interrupted": [], "together": []}
    instances = [build(entry) for entry in entries]
    names = [instance.name for instance in instances]
    try:
        check(instances, [problem for entry in entries for problem in variable_problems(entry)])
        if check_mode:
            others = host.others(names) if purge_others else []
            _predict(instances, host, programs or {}, others, result, argument_check)
            return result
        with host_lock(f"instances {', '.join(names) or 'removal'}"):
            failures = _carry_out(
                instances, host, programs or {}, purge_others, keep_caches, result, argument_check, stop_at_failure
            )
    except (InstancesRefused, HostLocked, SystemdError, OSError) as error:
        raise InstancesFailed(without_secrets(str(error), instances), result) from None
    if failures:
        raise InstancesFailed(without_secrets("\n".join(failures), instances), result)
    return result


def _predict(
    instances: Sequence[Instance],
    host: Host,
    programs: Mapping[str, str],
    others: list[str],
    result: dict[str, object],
    argument_check: str | None,
) -> None:
    steps = [host.look(instance) for instance in instances]
    _ask_releases(host, steps, others, argument_check, result)
    result["removed"] = others
    _tell_interrupted(host, steps, others, result)
    result["instances"] = [
        Outcome(
            step.instance.name,
            step.number,
            step.changes,
            restarted=bool(step.restart),
            reason=step.restart,
            releases=host.releases_kept(step),
        ).returned()
        for step in steps
    ]
    lacking = bool(instances) and host.lacks_programs(programs)
    result["changed"] = bool(others) or lacking or any(step.changes for step in steps)
    result["diff"] = [diff for step in steps for diff in host.diffs(step)]


def _carry_out(
    instances: Sequence[Instance],
    host: Host,
    programs: Mapping[str, str],
    purge_others: bool,
    keep_caches: bool,
    result: dict[str, object],
    argument_check: str | None,
    stop_at_failure: bool,
) -> list[str]:
    check_releases(instances)
    others = host.others([instance.name for instance in instances]) if purge_others else []
    steps = [host.look(instance) for instance in instances]
    _ask_releases(host, steps, others, argument_check, result)
    _tell_interrupted(host, steps, others, result)
    removed: list[str] = []
    result["removed"] = removed
    for name in others:
        result["changed"] = True
        host.remove(name, keep_caches=keep_caches)
        removed.append(name)
    if purge_others and not instances and host.remove_shared():
        result["changed"] = True
    if instances and host.lacks_programs(programs):
        result["changed"] = True
        host.install_programs(programs)
    steps = [host.look(instance) for instance in instances]
    result["diff"] = [diff for step in steps for diff in host.diffs(step)]
    if any(step.changes for step in steps):
        result["changed"] = True
    outcomes = host.apply(steps, stop_at_failure=stop_at_failure)
    result["instances"] = [outcome.returned() for outcome in outcomes]
    return [outcome.failure for outcome in outcomes if outcome.failure]


def _tell_interrupted(host: Host, steps: Sequence[Step], others: Sequence[str], result: dict[str, object]) -> None:
    """Those that serve, or may by the time they are restarted: one that is down now may have come back by then."""
    restarted = [
        step.instance.name
        for step in steps
        if step.restart and (step.state.main_pid or step.generations.ready() is not None)
    ]
    result["interrupted"] = [*others, *restarted]
    result["together"] = host.together([*others, *restarted], steps)


def _ask_releases(
    host: Host, steps: Sequence[Step], others: Sequence[str], program: str | None, result: dict[str, object]
) -> None:
    """Refuse arguments that the new releases' own vLLM refuses, before anything is stopped for them.

    Where nothing runs there is nothing to lose, and the start itself says the same.

    Raises:
        InstancesRefused: with what vLLM says, for every instance.
    """
    if program is None or not (others or any(step.state.main_pid for step in steps)):
        return
    refusals, result["doubts"] = host.refused_arguments(steps, program)
    instances = [step.instance for step in steps]
    told = [{key: without_secrets(text, instances) for key, text in one.items()} for one in refusals]
    result["findings"] = told
    if told:
        raise InstancesRefused("\n".join(map(finding_report, told)))


def without_secrets(text: str, instances: Sequence[Instance]) -> str:
    """``text`` with the value of every secret of ``instances`` hidden."""
    return hidden(text, [value for instance in instances for value in instance.content.secrets.values()])


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
