# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""The table ``inet vllm``: compared as the kernel reads it, applied under a guard, kept over reboots once proven.

Three steps, because the proof needs both ends of the wire. ``stage`` arms a timer that puts the old table back, then
loads the new one. The control node opens a new connection. ``confirm``, which comes in by it, stops the timer and
writes the files that outlive a reboot. Whatever dies in between, the timer fires.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .atomic import write_file
from .firewall_rules import (
    CUT_ENTRY,
    SshConnection,
    accepted,
    cut_listeners,
    cut_problem,
    lockout_problems,
    running_ssh_connection,
)
from .host_lock import host_lock
from .listeners import listeners

RULES_FILE = Path("/etc/vllm/firewall.nft")
UNIT = "onprem-vllm-firewall.service"
UNIT_FILE = Path("/etc/systemd/system") / UNIT
NFTABLES_DROP_IN = Path("/etc/systemd/system/nftables.service.d/onprem-vllm-firewall.conf")
GUARD = "onprem-vllm-firewall-guard"
GUARD_DIRECTORY = Path("/run/onprem-vllm-firewall")
FILES = (RULES_FILE, UNIT_FILE, NFTABLES_DROP_IN)
RESTORE_FILE = GUARD_DIRECTORY / "restore.nft"
DROP_TABLE = "add table inet vllm\ndelete table inet vllm\n"  # nft 1.0.6 has no `destroy`
# Where the old table would not load any more, an open host that can be reached beats a closed one that cannot.
RESTORE_COMMAND = (
    f"[ -e {RESTORE_FILE} ] || exit 0; nft -f {RESTORE_FILE} || nft delete table inet vllm; rm -rf {GUARD_DIRECTORY}"
)
# A scratch network namespace, so that the comparison is between two texts that the same kernel and nft wrote.
# The witness table shows a rule set that reaches beyond its own.
CANONICAL = "nft add table inet onprem_witness && nft -f - && nft list tables && echo && nft -s list table inet vllm"
CANONICAL_TABLES = "table inet onprem_witness\ntable inet vllm\n"
DEFAULT_SSH_PORT = 22


class FirewallError(RuntimeError):
    """The firewall is not as wanted; the message says why and what to do. ``problems`` has them apart."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True)
class Wanted:
    """One host's firewall.

    Args:
        rules: ``table inet vllm { … }`` as nft text; it may use ``$ssh_port``.
        unit: text of the unit that loads the table at boot.
        nftables_drop_in: text of a drop-in for nftables.service, which flushes every table; empty for none.
        ssh_port: None for the port that this run came in on.
        ssh_networks: merged networks that the SSH rule lets in, for the check before anything changes.
        cut_listeners: listeners (``tcp/9100``) that the operator agrees to cut.
        guard_s: seconds after which an unconfirmed change is taken back.
    """

    rules: str
    unit: str
    nftables_drop_in: str
    ssh_port: int | None
    ssh_networks: Sequence[str]
    cut_listeners: Sequence[str] = ()
    guard_s: int = 30


@dataclass
class Outcome:
    """What a step did, or in check mode would do."""

    changed: bool = False
    staged: bool = False
    connection: SshConnection | None = None
    before: str = ""
    after: str = ""
    files: list[tuple[str, str, str]] = field(default_factory=list)  # path, before, after
    warnings: list[str] = field(default_factory=list)


def stage(wanted: Wanted, *, check_mode: bool) -> Outcome:
    """Compare, refuse what would cut someone off, and put the table in force under the guard.

    Where the table is right and only its files are not, they are written at once: nothing that is in force changes.

    Raises:
        FirewallError: refused (nothing changed), or nft or systemd failed.
        HostLocked: another run changes this host.
    """
    if check_mode:
        return _compare(wanted)[0]
    if not guard_pending():
        outcome, _unused = _compare(wanted)
        if not outcome.changed:
            return outcome
    with _lock_without_pending_guard(wanted.guard_s):
        outcome, text = _compare(wanted)
        if not outcome.changed:
            return outcome
        if outcome.before == outcome.after:
            _persist(wanted, text)
            return outcome
        _run(["nft", "-c", "-f", "-"], text)
        _arm(outcome.before, wanted.guard_s)
        _run(["nft", "-f", "-"], text)
        outcome.staged = True
    return outcome


def confirm(wanted: Wanted, staged_connection: SshConnection | None) -> Outcome:
    """Stop the guard and make the table outlive a reboot. To be called through a connection made since ``stage``.

    Args:
        staged_connection: the connection that ``stage`` came by; this one must be another.

    Raises:
        FirewallError: this is the old connection, or the guard was faster.
        HostLocked: another run changes this host.
    """
    connection = running_ssh_connection()
    if staged_connection is not None and connection == staged_connection:
        raise FirewallError(
            f"the rules were to be proven by a new connection, but this is still the one from {connection.client} port "
            f"{connection.client_port}: use Ansible's ssh connection plugin for this host"
        )
    text = _text(wanted, connection)
    with host_lock("firewall"):
        _disarm()
        if _live() != _canonical(text):
            raise FirewallError(
                f"the new rules were not confirmed within {wanted.guard_s} s, and the host put the old ones back: "
                "run again, with a longer nftables_guard_s where new connections are slow"
            )
        shutil.rmtree(GUARD_DIRECTORY, ignore_errors=True)
        _persist(wanted, text)
    return Outcome(changed=True, connection=connection)


def undo() -> Outcome:
    """Put the old table back now rather than when the guard fires; changed says whether that was still to be done."""
    with host_lock("firewall"):
        before = _read(RESTORE_FILE)
        if before:
            # First this, then the timer: who is killed in between leaves a host that can be reached.
            _run(["nft", "-f", "-"], before)
        _disarm()
        shutil.rmtree(GUARD_DIRECTORY, ignore_errors=True)
    return Outcome(changed=bool(before))


def remove(*, check_mode: bool) -> Outcome:
    """Take back the table, its unit and its files. It only opens, so no guard is needed."""
    outcome = Outcome(before=(_live() or "") if shutil.which("nft") else "")
    outcome.files = [(str(path), _read(path), "") for path in FILES if path.exists()]
    outcome.changed = bool(outcome.before or outcome.files)
    if check_mode or not outcome.changed:
        return outcome
    with _lock_without_pending_guard(60):
        if UNIT_FILE.exists():
            _run(["systemctl", "disable", "--now", UNIT])
        for path in FILES:
            path.unlink(missing_ok=True)
        _run(["systemctl", "daemon-reload"])
        for folder in (NFTABLES_DROP_IN.parent, RULES_FILE.parent):
            with suppress(OSError):
                folder.rmdir()  # others' drop-ins, and what instances have there, stay, and their folder with them
        if outcome.before:
            _run(["nft", "-f", "-"], DROP_TABLE)
    return outcome


def guard_pending() -> bool:
    """Whether a staged table waits for its confirmation, or is being taken back."""
    return RESTORE_FILE.exists() and any(_active(f"{GUARD}.{kind}") for kind in ("timer", "service"))


def _compare(wanted: Wanted) -> tuple[Outcome, str]:
    """What would change, with the text to load; refuses with every problem there is."""
    connection = running_ssh_connection()
    text = _text(wanted, connection)
    outcome = Outcome(connection=connection)
    problems = lockout_problems(connection, _ssh_port(wanted, connection), wanted.ssh_networks)
    problems += [
        f"nftables_cut_listeners: {entry!r} is no listener: write it as tcp/9100"
        for entry in wanted.cut_listeners
        if not CUT_ENTRY.fullmatch(entry)
    ]
    live: str | None = None
    if shutil.which("nft"):
        live = _live()
        try:
            outcome.after = _canonical(text)
        except FirewallError as error:
            raise FirewallError([*problems, *error.problems]) from None
    else:
        outcome.after = wanted.rules.replace("$ssh_port", str(_ssh_port(wanted, connection)))
        outcome.warnings.append("nft is not installed on this host yet: the rules were not checked by it")
    outcome.before = live or ""
    outcome.files = [(str(path), _read(path), new) for path, new in _files(wanted, text).items() if _read(path) != new]
    outcome.changed = outcome.before != outcome.after or bool(outcome.files) or not _unit_stands()
    newly, already = cut_listeners(listeners(accepted(outcome.after)), outcome.after, live)
    for listener in newly:
        if listener.label not in wanted.cut_listeners:
            problems.append(cut_problem(listener))
    outcome.warnings += [
        f"{listener} is cut off: the firewall in force has no rule for it"
        for listener in already
        if listener.label not in wanted.cut_listeners
    ]
    if problems:
        raise FirewallError(problems)
    return outcome, text


def _ssh_port(wanted: Wanted, connection: SshConnection | None) -> int:
    """The port to keep open: the operator's, else the running connection's, else the one in force, else 22."""
    if wanted.ssh_port is not None:
        return wanted.ssh_port
    if connection is not None:
        return connection.server_port
    first, _unused, _unused = _read(RULES_FILE).partition("\n")
    port = first.removeprefix("define ssh_port = ")
    return int(port) if port.isdigit() else DEFAULT_SSH_PORT


def _text(wanted: Wanted, connection: SshConnection | None) -> str:
    """The one transaction that replaces the table, whether there was one or not; the file for boot holds the same."""
    return f"define ssh_port = {_ssh_port(wanted, connection)}\n{DROP_TABLE}{wanted.rules.rstrip()}\n"


def _live() -> str | None:
    """The table in force, without counters, or None."""
    listed = subprocess.run(["nft", "-s", "list", "table", "inet", "vllm"], capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return listed.stdout
    if "No such file or directory" in listed.stderr:
        return None
    raise FirewallError(f"nft could not list the table inet vllm: {listed.stderr.strip()}")


def _canonical(text: str) -> str:
    """``text`` as this host's kernel and nft read it, found in a scratch network namespace.

    Raises:
        FirewallError: nft refuses it, or it touches another table than ``inet vllm``.
    """
    loaded = subprocess.run(
        ["unshare", "--net", "sh", "-c", CANONICAL], input=text, capture_output=True, text=True, check=False
    )
    if loaded.stderr.startswith("unshare:"):
        raise FirewallError(
            f"this host allows no scratch network namespace to check the rules in: {loaded.stderr.strip()}"
        )
    if loaded.returncode != 0:
        raise FirewallError(
            f"nft refuses the rules (see nftables_extra_rules and nftables_ports): {loaded.stderr.strip()}"
        )
    tables, _unused, listing = loaded.stdout.partition("\n\n")
    if f"{tables}\n" != CANONICAL_TABLES:
        raise FirewallError(
            "the rules reach beyond the table inet vllm, which is the only one this collection touches: "
            "see nftables_extra_rules"
        )
    return listing


def _arm(before: str, guard_s: int) -> None:
    """Start the timer that puts ``before`` (the old table's text, or nothing) back."""
    GUARD_DIRECTORY.mkdir(mode=0o700, exist_ok=True)
    write_file(RESTORE_FILE, f"{DROP_TABLE}{before}".encode(), 0o600)
    _run(["nft", "-c", "-f", str(RESTORE_FILE)])
    subprocess.run(["systemctl", "reset-failed", f"{GUARD}.service"], capture_output=True, check=False)
    _run(
        [
            "systemd-run",
            "--quiet",
            "--collect",
            f"--unit={GUARD}",
            f"--on-active={max(guard_s - 1, 1)}s",
            "--timer-property=AccuracySec=500ms",  # systemd's default is a minute: armed for 15 s it fired after 42
            "--property=Type=oneshot",
            "sh",
            "-c",
            RESTORE_COMMAND,
        ]
    )


def _disarm() -> None:
    """Stop the timer; where it has just fired, wait for its end, so that nobody acts on half a truth."""
    subprocess.run(["systemctl", "stop", f"{GUARD}.timer"], capture_output=True, check=False)
    until = time.monotonic() + 10
    while _active(f"{GUARD}.service") and time.monotonic() < until:
        time.sleep(0.1)


def _files(wanted: Wanted, text: str) -> dict[Path, str]:
    """What stands where once the table is proven; the order is that of writing."""
    return dict(zip(FILES, (text, wanted.unit, wanted.nftables_drop_in), strict=True))


def _persist(wanted: Wanted, text: str) -> None:
    for path, new in _files(wanted, text).items():
        if _read(path) == new:
            continue
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_file(path, new.encode())
    _run(["systemctl", "daemon-reload"])
    # Starting it loads the file once more: what cannot be loaded at boot is found now.
    _run(["systemctl", "enable", "--now", UNIT])


def _unit_stands() -> bool:
    shown = subprocess.run(
        ["systemctl", "show", "--property=ActiveState,UnitFileState,NeedDaemonReload", UNIT],
        capture_output=True,
        text=True,
        check=False,
    )
    return set(shown.stdout.split()) == {"ActiveState=active", "UnitFileState=enabled", "NeedDaemonReload=no"}


def _active(unit: str) -> bool:
    shown = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False)
    return shown.stdout.strip() in {"active", "activating", "deactivating"}


@contextmanager
def _lock_without_pending_guard(guard_s: int) -> Iterator[None]:
    """The host's lock, once no other run's table waits for its confirmation.

    Waiting happens without the lock: the run that staged needs it to confirm.
    """
    until = time.monotonic() + guard_s + 10
    while True:
        with host_lock("firewall"):
            if not guard_pending():
                yield
                return
        if time.monotonic() >= until:
            raise FirewallError(
                f"another run's rules still wait for their confirmation: see systemctl status {GUARD}.timer"
            )
        time.sleep(0.3)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _run(command: Sequence[str], text: str | None = None) -> None:
    """Run a command that must succeed.

    Raises:
        FirewallError: it is missing or failed; the message has its own words.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FirewallError(f"{command[0]} is not installed on this host") from None
    if done.returncode != 0:
        raise FirewallError(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout).strip()}")
