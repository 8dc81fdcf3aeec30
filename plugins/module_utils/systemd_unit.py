# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""One systemd service: its state, its start up to the moment it is started or has failed, and why it failed."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Directives about the life of the process. All others are the sandbox.
_LIFE = re.compile(
    r"Type|Exec(?:Start|Stop|Reload|Condition)\w*|Restart\w*|RuntimeMaxSec|Timeout\w+|Kill\w+|SendSIG\w+|FinalKillSignal"
    r"|SuccessExitStatus|Syslog\w+|Standard\w+|EnvironmentFile|RemainAfterExit|NotifyAccess|PIDFile|Watchdog\w+"
)
COMMAND_TIMEOUT_S = 90.0
_SHOWN = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "NRestarts",
    "InvocationID",
    "Job",
    "NeedDaemonReload",
    "ExecMainCode",
    "ExecMainStatus",
)
# Lines that name a cause. vLLM's last line says "see root cause above": the first such line counts, not the last.
_CAUSE = re.compile(r"\b\w*(?:Error|Exception|Exit)\b: |^readiness: |error: |[Ff]ailed to |[Nn]o such file|status=\d+/")


class SystemdError(RuntimeError):
    """systemd refused or did not answer; the message carries what it said."""


class StartFailed(RuntimeError):
    """A service did not get to started; the message says how it ended and quotes the journal lines that matter."""

    def __init__(self, message: str, invocations: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.invocations = tuple(invocations)


@dataclass(frozen=True)
class UnitState:
    """What systemd says about a service, as far as it matters here."""

    loaded: bool
    active: str
    sub: str
    result: str
    main_pid: int
    restarts: int
    invocation: str
    job: bool
    stale: bool
    exit_code: int
    exit_status: int

    @property
    def starting(self) -> bool:
        """Whether its processes run and systemd waits for them to be ready."""
        return self.active == "activating" and self.sub in ("start-pre", "start", "start-post")


def systemctl(*words: str, timeout_s: float | None = COMMAND_TIMEOUT_S) -> str:
    """The output of ``systemctl``.

    Raises:
        SystemdError: it failed, is missing or did not end in time.
    """
    return _run(["systemctl", "--no-ask-password", *words], timeout_s)


def unit_state(unit: str) -> UnitState:
    """The state of ``unit``; one that does not exist is not loaded and inactive."""
    text = systemctl("show", "--property", ",".join(_SHOWN), unit)
    shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def number(name: str) -> int:
        value = shown.get(name, "0")
        return int(value) if value.isdigit() else 0

    return UnitState(
        loaded=shown.get("LoadState") == "loaded",
        active=shown.get("ActiveState", "inactive"),
        sub=shown.get("SubState", "dead"),
        result=shown.get("Result", ""),
        main_pid=number("MainPID"),
        restarts=number("NRestarts"),
        invocation=shown.get("InvocationID", ""),
        job=shown.get("Job", "") not in ("", "0"),
        stale=shown.get("NeedDaemonReload") == "yes",
        exit_code=number("ExecMainCode"),
        exit_status=number("ExecMainStatus"),
    )


def process_environment(pid: int, name: str) -> str | None:
    """The value a running process was started with, or None where the process or the variable is not there."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    for entry in content.split(b"\0"):
        key, mark, value = entry.partition(b"=")
        if mark and key == name.encode():
            return value.decode(errors="replace")
    return None


def verify_unit(name: str, text: str) -> None:
    """Let systemd read a unit before it counts.

    Raises:
        SystemdError: it finds anything, unknown settings included; the message quotes it.
    """
    with tempfile.TemporaryDirectory(prefix="onprem-vllm-") as directory:
        path = Path(directory) / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)  # systemd remarks on a mode that is not the usual one
        done = _ended(["systemd-analyze", "--man=no", "verify", str(path)], COMMAND_TIMEOUT_S)
    # Other units of the host are read along, and some distributions ship ones that are remarked on.
    remarks = [line for line in done.stderr.splitlines() if name in line]
    if remarks or done.returncode:
        found = "\n".join(remarks) or done.stderr.strip()
        raise SystemdError(f"systemd does not accept {name}:\n{found.replace(str(path), name)}")


def start_and_wait(unit: str, bound_s: float) -> None:
    """Restart ``unit`` and wait until systemd calls it started.

    A start limit that earlier failures used up does not count against this start.

    Raises:
        StartFailed: it failed, was restarted by systemd on the way, or was not started after ``bound_s`` seconds. It is
            stopped then, so that systemd tries no further.
    """
    before = unit_state(unit)
    if before.loaded:
        systemctl("reset-failed", unit)
    systemctl("restart", "--no-block", unit)
    wait_started(unit, bound_s, before.invocation)


def wait_started(unit: str, bound_s: float, earlier_invocation: str = "") -> None:
    """Wait until the start of ``unit`` that is under way has ended; see start_and_wait().

    The bound begins once the process before has ended: how long that may take is the unit's own TimeoutStopSec.
    """
    until = time.monotonic() + bound_s
    pause = 0.1
    invocations: list[str] = []
    while True:
        state = unit_state(unit)
        fresh = state.invocation != earlier_invocation
        if fresh and state.invocation and state.invocation not in invocations:
            invocations.append(state.invocation)
        if not fresh and state.active == "deactivating":
            until = time.monotonic() + bound_s
        failure = None
        if fresh and state.restarts:
            failure = _end_of_process(state) + " and was started again by systemd"
        elif fresh and state.active == "active":
            return
        elif (state.sub.startswith("auto-restart") or state.active == "failed") and (fresh or not state.job):
            failure = _end_of_process(state)
        elif state.active == "inactive" and not state.job:
            failure = "it stopped before it was ready"
        elif time.monotonic() >= until:
            failure = f"it was not ready after {bound_s:.0f} s (state {state.active}/{state.sub})"
        if failure is not None:
            seen = invocations or [state.invocation]
            lines = journal(seen[:1])
            stop(unit)
            quoted = "".join(f"\n  {line}" for line in lines) or "\n  (the journal holds nothing of it)"
            raise StartFailed(f"{unit}: {failure}. From its journal:{quoted}", seen)
        time.sleep(pause)
        pause = min(pause * 1.3, 1.0)


def stop(unit: str) -> None:
    """Stop ``unit``, also one that waits for its next automatic start. One that is not there is stopped.

    However long it takes: systemd ends it by the unit's own TimeoutStopSec, which a second bound here would only miss.
    """
    if unit_state(unit).loaded:
        systemctl("stop", unit, timeout_s=None)


def journal(invocations: Sequence[str], most: int = 14) -> list[str]:
    """The lines of a service's runs that name a cause, then its last ones, ``most`` in all, oldest first."""
    return lines_that_matter(_journal(invocations, "cat", 600).splitlines(), most)


def whole_journal(invocations: Sequence[str], most_bytes: int = 1 << 20) -> str:
    """All that a service's runs said, with times; of a longer one the first quarter and the rest from its end."""
    text = _journal(invocations, "short-iso", 20000)
    if len(text.encode()) <= most_bytes:
        return text
    content = text.encode()
    head = content[: most_bytes // 4].decode(errors="replace").rpartition("\n")[0]
    tail = content[-most_bytes // 4 * 3 :].decode(errors="replace").partition("\n")[2]
    return f"{head}\n(left out here: {len(content) - most_bytes} bytes and more)\n{tail}"


def _journal(invocations: Sequence[str], output: str, lines: int) -> str:
    matches: list[str] = []
    for invocation in invocations:
        if invocation:
            matches += [*(["+"] if matches else []), f"_SYSTEMD_INVOCATION_ID={invocation}", "+"]
            matches += [f"INVOCATION_ID={invocation}"]
    if not matches:
        return ""
    command = ["journalctl", "--quiet", "--no-pager", "--output", output, "--lines", str(lines), *matches]
    return _ended(command, COMMAND_TIMEOUT_S).stdout


def sandbox(unit: str) -> list[str]:
    """The directives of a unit that make up its sandbox and limits, as properties of a transient one.

    They come out of the unit's own text: one that is added there holds for what is tried before a start as well.
    """
    found = []
    section = ""
    for line in unit.replace("\\\n", " ").splitlines():
        text = line.strip()
        if text.startswith("["):
            section = text
        elif section == "[Service]" and "=" in text and not text.startswith(("#", ";")):
            name = text.partition("=")[0].strip()
            if not _LIFE.fullmatch(name):
                found.append(f"{name}={text.partition('=')[2].strip()}")
    return found


def lines_that_matter(lines: Sequence[str], most: int = 14) -> list[str]:
    """The first lines that name a cause and the last lines, each once, in their order."""
    said = [line.rstrip() for line in lines if line.strip()]
    causes = [index for index, line in enumerate(said) if _CAUSE.search(line)]
    kept: list[int] = []
    for index in [*causes[: most // 2], *range(max(0, len(said) - most // 2), len(said))]:
        if said[index] not in [said[other] for other in kept]:
            kept.append(index)
    return [said[index][:500] for index in sorted(kept)]


def _end_of_process(state: UnitState) -> str:
    if state.result == "start-limit-hit":
        return "systemd gave up after too many starts"
    if state.result == "timeout":
        return "it ran into the unit's time limit"
    if state.exit_code == 2:
        return f"its main process was killed by signal {state.exit_status}"
    if state.exit_code == 1 and state.exit_status:
        return f"its main process ended with status {state.exit_status}"
    return f"it failed ({state.result or state.sub})"


def _run(words: list[str], timeout_s: float | None) -> str:
    done = _ended(words, timeout_s)
    if done.returncode:
        raise SystemdError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip() or f'status {done.returncode}'}")
    return done.stdout


def _ended(words: list[str], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=timeout_s,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise SystemdError(f"{' '.join(words)}: no end after {timeout_s} s") from None
    except OSError as error:
        raise SystemdError(
            f"{words[0]} cannot be run ({error.strerror}): this host needs systemd as its init."
        ) from error
