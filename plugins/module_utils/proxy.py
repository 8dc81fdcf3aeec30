# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""The proxy of a host: HAProxy in front and behind, LiteLLM's processes between, changed one after the other.

Each part carries a digest of what it was started with, so that a restart or reload that a dead run owed is found in
the running process. Everything is looked at before the first file is written; LiteLLM's first process is the trial of
a new configuration, and where it fails the files that ran before come back.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import haproxy_socket
from .atomic import write_file
from .drain import LOCK
from .host_lock import HostLocked, host_lock
from .proxy_certificate import Certificate, CertificateRefused, OwnCa, check
from .systemd_environment import EnvironmentRefused, environment_text, hidden, read_environment
from .systemd_unit import (
    StartFailed,
    SystemdError,
    process_environment,
    stop,
    systemctl,
    unit_state,
    verify_unit,
    wait_started,
)

DIGEST_VARIABLE = "ONPREM_VLLM_PROXY"
DIGEST_MARK = "@digest@"
HAPROXY = "onprem-vllm-haproxy.service"
DATABASE = "onprem_vllm_keys"  # on a host's own server
KEYS = "onprem-vllm-keys.service"
LITELLM = "onprem-vllm-litellm@{}.service"
LITELLM_TEMPLATE = "onprem-vllm-litellm@.service"
HIDDEN = "(hidden)"
MASTER = "master"  # the team of the master key, as the filter proxy_keys calls it
# How to ask a model, by the paths that clients may use; of an embedding model only the last is answered.
QUESTIONS: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/embeddings": {"input": "hello"},
}


class ProxyFailed(RuntimeError):
    """The proxy is not as it shall be; the message says what, where, what to do. No secret is in it."""


@dataclass(frozen=True)
class Places:
    """Directories of the host."""

    etc: Path = Path("/etc/vllm-proxy")
    units: Path = Path("/etc/systemd/system")
    runtime: Path = Path("/run/onprem-vllm-haproxy")
    trial: Path = Path("/run/onprem-vllm-haproxy-check")
    programs: Path = Path("/opt/vllm/libexec")
    keys: Path = Path("/var/lib/onprem-vllm-keys")
    keys_said: Path = Path("/run/onprem-vllm-keys/said.json")

    @property
    def ca(self) -> Path:
        """The own CA."""
        return self.etc / "ca"

    @property
    def admin(self) -> Path:
        """HAProxy's administration socket."""
        return self.runtime / "admin.sock"


@dataclass(frozen=True)
class KeyStore:
    """Keys of teams in PostgreSQL, besides those of the inventory.

    Attributes:
        unit: text of the unit that follows the database.
        program: text of the program that it runs.
        local: name of a database on this host's own server; empty for another server.
        connection: libpq's address of another server.
        password: for it.
    """

    unit: str
    program: str
    local: str = ""
    connection: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True)
class Proxy:
    """The proxy as it shall be; see the module's options."""

    release: str
    litellm_config: str
    litellm_unit: str
    litellm_auth: str
    haproxy_config: str
    haproxy_unit: str
    haproxy_lua: str
    program: str
    environment: Mapping[str, str]
    keys: Mapping[str, Mapping[str, object]]
    models: tuple[str, ...]
    ports: tuple[int, ...]
    port: int
    names: tuple[str, ...]
    owner: tuple[int, int]
    listen: tuple[str, ...] = ("127.0.0.1",)
    paths: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    certificate: Certificate | None = field(default=None, repr=False)
    store: KeyStore | None = None
    user: str = "vllm-proxy"
    renew_days: int = 30
    start_s: float = 120
    answer_s: float = 60


@dataclass(frozen=True)
class File:
    """A file as it shall be; ``shown`` is what a diff may show of it."""

    path: Path
    content: bytes
    mode: int = 0o644
    owner: tuple[int, int] = (0, 0)
    shown: str = HIDDEN

    def stands(self) -> bool:
        """Whether it is there just so."""
        try:
            found = self.path.lstat()
            return (
                (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (self.mode, *self.owner)
                and not self.path.is_symlink()
                and self.path.read_bytes() == self.content
            )
        except OSError:
            return False

    def difference(self) -> dict[str, str]:
        """Ansible's diff, without what nobody shall see."""
        try:
            before = self.path.read_bytes().decode(errors="replace") if self.shown != HIDDEN else f"{HIDDEN}\n"
        except OSError:
            before = ""
        name = str(self.path)
        after = f"{HIDDEN}, changed\n" if self.shown == HIDDEN else self.shown
        return {"before_header": name, "after_header": name, "before": before, "after": after}


def digest(*parts: bytes) -> str:
    """12 hex digits over all parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:12]


class Host:
    """The proxy on this host."""

    def __init__(self, proxy: Proxy, places: Places | None = None) -> None:
        self.proxy = proxy
        self.places = places or Places()
        self.ca = OwnCa(self.places.ca)

    # -- what shall be there ------------------------------------------------------------------------------------------

    def litellm_files(self) -> list[File]:
        """What LiteLLM's processes read at their start, and the keys, which they read whenever they change.

        Raises:
            EnvironmentRefused: a variable that systemd would not pass on.
        """
        proxy, etc = self.proxy, self.places.etc
        text = environment_text({**proxy.environment, **proxy.secrets})
        mark = digest(
            *(part.encode() for part in (text, proxy.litellm_config, proxy.litellm_auth, proxy.litellm_unit)),
            proxy.release.encode(),
        )
        marked = environment_text({**proxy.environment, **proxy.secrets, DIGEST_VARIABLE: mark})
        known = {
            key: {name: entry[name] for name in ("team", "models", "expires")} for key, entry in proxy.keys.items()
        }
        keys = json.dumps(known, indent=1, sort_keys=True).encode()
        return [
            self._plain(etc / "litellm.yaml", proxy.litellm_config),
            self._plain(etc / "onprem_vllm_keys.py", proxy.litellm_auth),
            self._plain(self.places.units / LITELLM_TEMPLATE, proxy.litellm_unit),
            File(etc / "environment", marked.encode(), 0o400),
            File(etc / "keys.json", keys, 0o400, proxy.owner, keys.decode()),
        ]

    def haproxy_files(self, certificate: Certificate) -> list[File]:
        """What HAProxy reads when it starts or reloads."""
        proxy, etc = self.proxy, self.places.etc
        limits = "".join(
            f"{key} {entry['requests_per_minute']}\n"
            for key, entry in sorted(proxy.keys.items())
            if entry["requests_per_minute"]
        )
        teams = "".join(f"{key} {entry['team']}\n" for key, entry in sorted(proxy.keys.items()))
        parts = (proxy.haproxy_config, limits, teams, proxy.haproxy_unit, proxy.haproxy_lua)
        mark = digest(*(part.encode() for part in parts), certificate.pem)
        return [
            self._plain(etc / "haproxy.cfg", proxy.haproxy_config.replace(DIGEST_MARK, mark)),
            self._plain(self.places.units / HAPROXY, proxy.haproxy_unit),
            self._plain(self.places.programs / "proxy.py", proxy.program),  # a reload runs it
            self._plain(etc / "refuse.lua", proxy.haproxy_lua),
            File(etc / "limits.map", limits.encode(), 0o400, shown=limits),
            File(etc / "teams.map", teams.encode(), 0o400, shown=teams),
            File(etc / "canary.map", b"", 0o400),  # filled in HAProxy's memory alone, by the module canary
            File(etc / "certificate.pem", certificate.pem, 0o400),
        ]

    def store_files(self) -> list[File]:
        """What follows the database of the keys; nothing where there is none."""
        store = self.proxy.store
        if store is None:
            return []
        way = {"local": store.local, "connection": store.connection, "password": store.password}
        settings = {**way, "reader": self.proxy.user}
        # Of a password too, so nobody else may read it.
        mark = digest(*(part.encode() for part in (store.unit, store.program, json.dumps(settings, sort_keys=True))))
        known = json.dumps({**settings, "models": self.proxy.models}, indent=1).encode()
        return [
            self._plain(self.places.programs / "team_keys.py", store.program),
            File(self.places.etc / "database.json", known, 0o400),
            File(self.places.etc / "keys.environment", f"{DIGEST_VARIABLE}={mark}\n".encode(), 0o400),
            self._plain(self.places.units / KEYS, store.unit),
        ]

    @staticmethod
    def _plain(path: Path, text: str) -> File:
        return File(path, text.encode(), shown=text)

    # -- what is there ------------------------------------------------------------------------------------------------

    def running_digest(self, port: int) -> str | None:
        """What the process of a port was started with, None where it does not run."""
        state = unit_state(LITELLM.format(port))
        if state.active != "active" or not state.main_pid:
            return None
        return process_environment(state.main_pid, DIGEST_VARIABLE) or ""

    def store_is_due(self, files: Sequence[File]) -> bool:
        """Whether what follows the database runs with other content than its files, or is there and not wanted."""
        if not files:
            return any(path.exists() for path in _of_the_store(self.places))
        state = unit_state(KEYS)
        if state.active != "active" or not state.main_pid:
            return True
        running = process_environment(state.main_pid, DIGEST_VARIABLE) or "nothing"
        return f"{DIGEST_VARIABLE}={running}\n".encode() != _named(files, "keys.environment")

    def haproxy_digest(self) -> str | None:
        """What HAProxy has read, None where it does not run."""
        try:
            return haproxy_socket.description(self.places.admin)
        except haproxy_socket.SocketError:
            return None

    def others(self) -> list[str]:
        """Processes of ours that shall be no more."""
        wanted = {LITELLM.format(port) for port in self.proxy.ports}
        links = (self.places.units / "multi-user.target.wants").glob(LITELLM.format("*"))
        return sorted(path.name for path in links if path.name not in wanted)

    # -- the change ---------------------------------------------------------------------------------------------------

    def certificate(self, *, issue: bool) -> tuple[Certificate | None, str]:
        """The certificate to serve with, and why a new one is issued; None where check mode may not issue the first.

        Raises:
            CertificateRefused: a given one that clients would not accept.
        """
        given = self.proxy.certificate
        if given is not None:
            check(given, self.proxy.names)
            return given, ""
        due = self.ca.due(self.proxy.names, self.proxy.renew_days)
        if due and issue:
            return self.ca.issue(self.proxy.names), due
        return self.ca.issued(), due

    def validate(self, haproxy: Sequence[File], litellm: Sequence[File]) -> None:
        """Let HAProxy and systemd read what they will, before any of it counts.

        HAProxy's key lies in memory meanwhile, and what a killed run left there goes with the next one.

        Raises:
            ProxyFailed: HAProxy refuses its configuration; the message quotes it.
            SystemdError: systemd refuses a unit.
        """
        etc, trial = self.places.etc, self.places.trial
        if trial.is_dir():
            shutil.rmtree(trial)
        trial.mkdir(mode=0o700)
        try:
            for file in haproxy:
                if file.path.parent == etc:
                    content = file.content
                    if file.path.name == "haproxy.cfg":
                        content = content.replace(f"{etc}/".encode(), f"{trial}/".encode())
                    write_file(trial / file.path.name, content, 0o600)
            try:
                done = subprocess.run(
                    ["haproxy", "-c", "-q", "-f", f"{trial}/haproxy.cfg"],
                    capture_output=True,
                    text=True,
                    check=False,
                    env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                )
            except OSError as error:
                raise ProxyFailed(f"haproxy cannot be run ({error.strerror}): install the package haproxy.") from error
        finally:
            shutil.rmtree(trial)
        if done.returncode:
            raise ProxyFailed(f"HAProxy does not accept its configuration:\n{done.stderr.strip()}")
        for file in [*haproxy, *litellm]:
            if file.path.parent == self.places.units:
                verify_unit(file.path.name.replace("@.", "@1."), file.content.decode())

    def make_room_for_keys(self) -> None:
        """HAProxy does not start where a map is missing; what stands in one is not ours to say."""
        self.places.keys.mkdir(mode=0o755, exist_ok=True)
        for name in ("teams.map", "limits.map"):
            (self.places.keys / name).touch(mode=0o400)

    def follow_store(self, files: Sequence[File], *, due: bool) -> str:
        """Bring the keys of the database to the proxy from now on, or no longer; what to tell if it does not answer."""
        store = self.proxy.store
        if store is None:
            if due:
                remove_store(self.places)
            return ""
        write(files)
        _reload_where_stale(KEYS)
        systemctl("enable", "--quiet", KEYS)
        if due:
            before = unit_state(KEYS)
            if before.loaded:
                systemctl("reset-failed", KEYS)
            systemctl("restart", "--no-block", KEYS)
            try:
                wait_started(KEYS, 60, before.invocation)
            except StartFailed as error:
                return f"What follows the database of the keys does not start: {hidden(str(error), [store.password])}"
        # It tries again every few seconds, and the database may just come up.
        if _within(20, lambda: self.store_said() == ""):
            return ""
        said = hidden(self.store_said() or "nothing", [store.password])
        return (
            f"The keys of the database do not reach the proxy: {said}\nThe keys that were known before go on. "
            "Look at litellm_proxy_database, and at that server's log."
        )

    def store_said(self) -> str | None:
        """Why the database does not answer, empty where it does; None where nobody has said it."""
        try:
            return str(json.loads(self.places.keys_said.read_bytes())["error"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def front(self, files: Sequence[File]) -> str:
        """Bring HAProxy to what its files say; what was done, empty for nothing."""
        wanted = _mark(files)
        write(files)
        _reload_where_stale(HAPROXY)
        systemctl("enable", "--quiet", HAPROXY)
        if self.haproxy_digest() == wanted:
            return ""
        if unit_state(HAPROXY).active == "active":
            with host_lock("a reload of the proxy", path=self.places.runtime / LOCK):
                systemctl("reload", HAPROXY)
                _within(20, lambda: self.haproxy_digest() == wanted)
            done = "reloaded"
        else:
            before = unit_state(HAPROXY)
            if before.loaded:
                systemctl("reset-failed", HAPROXY)
            systemctl("restart", "--no-block", HAPROXY)
            wait_started(HAPROXY, 60, before.invocation)
            done = "started"
        if not _within(20, lambda: self.haproxy_digest() == wanted):
            raise ProxyFailed(f"HAProxy was {done} and still has its old configuration: journalctl -u {HAPROXY}")
        return done

    def processes(self, files: Sequence[File]) -> list[str]:
        """Bring LiteLLM's processes to what their files say, one after the other; the units that were restarted.

        Raises:
            ProxyFailed: the new configuration does not start; what ran before runs again.
        """
        before = {file.path: file.path.read_bytes() for file in files if file.path.is_file()}
        wanted = read_environment(_named(files, "environment").decode())[DIGEST_VARIABLE]
        write(files)
        _reload_where_stale(LITELLM.format(self.proxy.ports[0]))
        due = [port for port in self.proxy.ports if self.running_digest(port) != wanted]
        # Where none serves there is none to wait for: they load side by side.
        together = all(self.running_digest(port) is None for port in self.proxy.ports)
        proven = [port for port in self.proxy.ports if port not in due]
        for group in [due] if together else [[port] for port in due]:
            try:
                self._start(group)
            except StartFailed as error:
                message = hidden(str(error), self.proxy.secrets.values())
                if proven:
                    systemctl("start", "--no-block", LITELLM.format(group[0]))
                    other = LITELLM.format(proven[0])
                    message += f"\n{other} serves with the same files. This one is started again until it does, too."
                elif not together and before:
                    message += self._back(files, before, due[0])
                raise ProxyFailed(f"LiteLLM does not start: {message}") from None
            proven += group
        return [LITELLM.format(port) for port in due]

    def _start(self, ports: Sequence[int]) -> None:
        earlier = {}
        for port in ports:
            unit = LITELLM.format(port)
            state = unit_state(unit)
            earlier[unit] = state.invocation
            systemctl("enable", "--quiet", unit)
            # What ended it before does not count against this start: neither its restarts nor a limit.
            if state.loaded:
                systemctl("reset-failed", unit)
            systemctl("restart", "--no-block", unit)
        for unit, invocation in earlier.items():
            wait_started(unit, self.proxy.start_s + 30, invocation)
        names = {str(port) for port in ports}
        # The next process goes down only when HAProxy asks this one again.
        if not _within(20, lambda: names <= {one.name for one in self._servers() if one.up}):
            raise StartFailed(f"HAProxy does not reach LiteLLM on {', '.join(sorted(names))}")

    def _servers(self) -> list[haproxy_socket.Server]:
        try:
            return haproxy_socket.servers(self.places.admin, "litellm")
        except haproxy_socket.SocketError:
            return []

    def _back(self, files: Sequence[File], before: Mapping[Path, bytes], port: int) -> str:
        """Bring the files that ran before back; what to tell of it. The other process was not touched."""
        for file in files:
            if file.path in before:
                keys = file.path.name == "keys.json"
                content = _with_former_master(before[file.path], file.content) if keys else before[file.path]
                write_file(file.path, content, file.mode, file.owner)
        systemctl("daemon-reload")
        told = "\nThe files that ran before were brought back"
        try:
            self._start([port])
        except StartFailed as error:
            again = hidden(str(error), self.proxy.secrets.values())
            return f"{told}, and this process does not start with them either: {again}"
        return f"{told} and serve. Correct the cause and run again."

    def answers(self) -> dict[str, object]:
        """Seconds that each model took to answer through the front door, or what came instead."""
        return {model: self._answer(model) for model in self.proxy.models}

    def _answer(self, model: str) -> object:
        until = time.monotonic() + self.proxy.answer_s
        while True:
            began = time.monotonic()
            try:
                found = self._ask(model)
            except (OSError, ValueError, http.client.HTTPException) as error:
                found = str(error) or type(error).__name__
            if not found:
                return round(time.monotonic() - began, 3)
            if time.monotonic() >= until:
                return hidden(found, self.proxy.secrets.values())
            time.sleep(1)

    def _ask(self, model: str) -> str:
        """Empty where the model answered in any way that is open to clients, else what came first.

        Where none is that is known here, HAProxy and LiteLLM alone are asked.
        """
        open_ways = [path for path in QUESTIONS if path in self.proxy.paths]
        said = [] if open_ways else [self._said("/health", None)]
        for path in open_ways:
            said.append(self._said(path, {"model": model, **QUESTIONS[path]}))
            if not said[-1]:
                return ""
        return said[0]

    def _said(self, path: str, question: Mapping[str, object] | None) -> str:
        """Empty for an answer of 200, else what came. The certificate must be the very one that was installed."""
        installed = (self.places.etc / "certificate.pem").read_text(encoding="utf-8")
        leaf = installed[installed.index("-----BEGIN CERT") : installed.index("-----END CERT") + 25]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # compared as a whole below
        address = next(iter(self.proxy.listen), "127.0.0.1").strip("[]")
        address = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - asked, not bound
        connection = http.client.HTTPSConnection(address, self.proxy.port, timeout=60, context=context)
        try:
            connection.connect()
            served = connection.sock.getpeercert(binary_form=True)
            if served != ssl.PEM_cert_to_DER_cert(leaf.strip()):
                return "another certificate is served than was installed"
            key = self.proxy.secrets.get("LITELLM_MASTER_KEY", "")
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("POST" if question else "GET", path, json.dumps(question) if question else None, headers)
            answer = connection.getresponse()
            content = answer.read(2000).decode(errors="replace")
        finally:
            connection.close()
        return "" if answer.status == 200 else f"status {answer.status}: {content[:300]}"


def bring_about(host: Host, *, check_mode: bool) -> dict[str, object]:
    """Make the proxy what it shall be, or predict it; what the module returns.

    Raises:
        ProxyFailed: refused, not started, or a model does not answer.
    """
    try:
        if check_mode:
            return _carry_out(host, check_mode=True)
        with host_lock("proxy"):
            return _carry_out(host, check_mode=False)
    except (CertificateRefused, EnvironmentRefused, HostLocked, StartFailed, SystemdError, OSError) as error:
        raise ProxyFailed(hidden(str(error), host.proxy.secrets.values())) from None
    except haproxy_socket.SocketError as error:
        raise ProxyFailed(str(error)) from None


def _carry_out(host: Host, *, check_mode: bool) -> dict[str, object]:
    certificate, issued = host.certificate(issue=not check_mode)
    litellm = host.litellm_files()
    store = host.store_files()
    haproxy = host.haproxy_files(certificate) if certificate is not None else []
    changed = [file for file in [*haproxy, *litellm, *store] if not file.stands()]
    follow = host.store_is_due(store)
    others = host.others()
    root = host.ca.root if host.proxy.certificate is None else None  # a given one is no business of the own CA
    result: dict[str, object] = {
        "issued": issued,
        "stopped": others,
        "diff": [file.difference() for file in changed],
        "ca": root.read_text(encoding="utf-8") if root and root.is_file() else "",
    }
    if check_mode:
        wanted = read_environment(_named(litellm, "environment").decode())[DIGEST_VARIABLE]
        due = [LITELLM.format(port) for port in host.proxy.ports if host.running_digest(port) != wanted]
        reload = not haproxy or host.haproxy_digest() != _mark(haproxy)
        return {
            **result,
            "restarted": due,
            "changed": bool(changed or others or due or reload or issued or follow),
            "answers": {},
        }
    program = Path(host.proxy.release, "bin", "litellm")
    if not os.access(program, os.X_OK) or not Path(host.proxy.release, "manifest.json").is_file():
        raise ProxyFailed(f"The release {host.proxy.release} is missing or not whole; install it first (role uv_venv).")
    if store:
        host.make_room_for_keys()
    host.validate(haproxy, [*litellm, *store])
    front = host.front(haproxy)
    without_keys = host.follow_store(store, due=follow)
    restarted = host.processes(litellm)
    for unit in others:
        stop(unit)
        systemctl("disable", "--quiet", unit)
    answers = host.answers()
    result |= {"restarted": restarted, "haproxy": front, "answers": answers}
    result["changed"] = bool(changed or others or restarted or front or issued or follow)
    problems = [without_keys] if without_keys else []
    if silent := {name: said for name, said in answers.items() if isinstance(said, str)}:
        lines = "".join(f"\n  {name}: {said}" for name, said in silent.items())
        problems.append(
            f"These models do not answer through the proxy:{lines}\n"
            "Look at their instances (site.yml on group vllm), and at their firewall (vllm_instance_networks)."
        )
    if problems:
        raise ProxyFailed("\n".join(["Everything is in place, but:", *problems]))
    return result


def remove(places: Places, *, check_mode: bool) -> bool:
    """Take everything back but the release; whether there was something.

    Raises:
        ProxyFailed: another run changes this host, or something does not stop or go.
    """
    units = [*places.units.glob(LITELLM.format("*")), places.units / HAPROXY, places.units / KEYS]
    wants = places.units / "multi-user.target.wants"
    # LiteLLM last: while HAProxy runs, requests keep it up.
    links = [wants / KEYS, wants / HAPROXY, *wants.glob(LITELLM.format("*"))]
    found = (
        places.etc.is_dir()
        or places.keys.is_dir()
        or any(path.exists() or path.is_symlink() for path in [*units, *links])
    )
    if found and not check_mode:
        try:
            with host_lock("proxy (removing)"):
                _take_away(places, links, units)
        except (HostLocked, SystemdError, OSError) as error:
            raise ProxyFailed(str(error)) from None
    return found


def _take_away(places: Places, links: Sequence[Path], units: Sequence[Path]) -> None:
    for link in links:
        if link.is_symlink():
            stop(link.name)
            link.unlink()
    for path in units:
        path.unlink(missing_ok=True)
    systemctl("daemon-reload")
    for name in ("proxy.py", "team_keys.py"):
        (places.programs / name).unlink(missing_ok=True)
    if places.programs.is_dir() and not any(places.programs.iterdir()):
        places.programs.rmdir()
    for directory in (places.etc, places.keys):  # they hold keys: what stays of them must be told
        if directory.is_dir():
            shutil.rmtree(directory)


def _of_the_store(places: Places) -> list[Path]:
    """Everything that is there for a database of keys; the unit is the last to go."""
    files = [places.etc / name for name in ("database.json", "keys.environment")]
    return [places.keys, *files, places.programs / "team_keys.py", places.units / KEYS]


def remove_store(places: Places) -> None:
    """Nothing follows the database any more; what is in it stays."""
    if (places.units / "multi-user.target.wants" / KEYS).is_symlink():
        stop(KEYS)
        systemctl("disable", "--quiet", KEYS)
    for path in _of_the_store(places):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    systemctl("daemon-reload")


def write(files: Sequence[File]) -> None:
    """Put the files that are not as they shall be in place."""
    for file in files:
        if not file.stands():
            file.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_file(file.path, file.content, file.mode, file.owner)


def _with_former_master(before: bytes, keys: bytes) -> bytes:
    """Keys as they shall be, for a revoked one must not come back, and the master key that the former environment has.

    Only LiteLLM's readiness step gets in with that one: HAProxy knows the new keys alone.
    """
    try:
        former = {key: entry for key, entry in json.loads(before).items() if entry["team"] == MASTER}
    except (ValueError, LookupError, TypeError, AttributeError):
        former = {}  # a damaged file has no key to keep; LiteLLM then says itself that it does not start
    return json.dumps({**former, **json.loads(keys)}, indent=1, sort_keys=True).encode()


def _reload_where_stale(unit: str) -> None:
    state = unit_state(unit)
    if state.stale or not state.loaded:
        systemctl("daemon-reload")


def _named(files: Sequence[File], name: str) -> bytes:
    return next(file.content for file in files if file.path.name == name)


def _mark(files: Sequence[File]) -> str:
    """The digest that HAProxy's configuration carries."""
    line = next(line for line in _named(files, "haproxy.cfg").decode().splitlines() if "description " in line)
    return line.split()[-1]


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
    return True
