#!/usr/bin/env python
# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Throw-away hosts for tests and the demo: Debian 12 with systemd and sshd, in a network with no way out.

A lab is a set of podman containers, each in a network namespace of its own. Ansible and ssh reach them from an
ordinary shell through the lab's ssh_config; see README.md. Needs root, Python 3.12 and the programs in PROGRAMS.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import image
import network

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).resolve().parents[2]
STATES = CHECKOUT / ".cache" / "lab"
DEMO = "demo"
LABEL = "onprem.lab"
BOOT_SECONDS = 90
STOP_SECONDS = 100
SHM_SIZE = "1g"

PROGRAMS = {
    "podman": "podman",
    "crun": "crun",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}

# What root can do on a real host, less what would act on the machine's kernel as a whole (clock, modules, reboot).
CAPABILITIES = {
    "AUDIT_WRITE": 29,
    "DAC_READ_SEARCH": 2,
    "IPC_LOCK": 14,
    "LINUX_IMMUTABLE": 9,
    "MKNOD": 27,
    "NET_ADMIN": 12,
    "NET_BROADCAST": 11,
    "NET_RAW": 13,
    "SYS_ADMIN": 21,
    "SYS_NICE": 23,
    "SYS_PTRACE": 19,
    "SYS_RESOURCE": 24,
    "SYS_TTY_CONFIG": 26,
}
CGROUP2_MAGIC = "cgroup2fs"


class LabError(Exception):
    """What is wrong, where, and what to do."""


# --- state --------------------------------------------------------------------------------------------------------


def check_name(name: str, what: str) -> str:
    """A lab's or a host's name, or an error that says what one looks like."""
    pattern, form = {
        "lab": (r"[a-z][a-z0-9_]{0,30}", "a letter, then letters, digits and underscores"),
        "host": (r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", "a DNS label: a letter, then letters, digits and hyphens"),
    }[what]
    if not re.fullmatch(pattern, name):
        raise LabError(f"{name!r} is no name for a {what}: {form}, at most 32 in all, lower case")
    if what == "host" and name in network.RESERVED:
        raise LabError(f"{name!r} is the name of a part of every lab; give the host another")
    return name


@dataclass
class State:
    """What a lab keeps in its directory: its subnet's slot, and each host's number in it."""

    slot: int
    hosts: dict[str, int] = field(default_factory=dict)

    def add(self, host: str) -> None:
        """Give a host the first free number; one that has a number keeps it, and so its address."""
        if host in self.hosts:
            return
        taken = set(self.hosts.values())
        free = next((number for number in network.HOST_NUMBERS if number not in taken), None)
        if free is None:
            raise LabError(f"a lab has room for {len(network.HOST_NUMBERS)} hosts; start another: --lab NAME")
        self.hosts[host] = free

    @classmethod
    def read(cls, directory: Path) -> State | None:
        """The state in a directory, None where there is none or what is there is no state."""
        try:
            content = json.loads((directory / "state.json").read_text())
            return cls(int(content["slot"]), {str(host): int(number) for host, number in content["hosts"].items()})
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, directory: Path) -> None:
        beside = directory / "state.json.new"
        beside.write_text(json.dumps({"slot": self.slot, "hosts": self.hosts}, indent=2) + "\n")
        beside.replace(directory / "state.json")


def free_slot(lab: str, states: Path) -> int:
    """The subnet of a new lab: 0 for the demo, whose inventory is written down, else the first that no lab has."""
    if lab == DEMO:
        return 0
    taken = {state.slot for path in states.glob("*/state.json") if (state := State.read(path.parent))}
    slot = next((slot for slot in network.SLOTS[1:] if slot not in taken), None)
    if slot is None:
        raise LabError("every subnet is taken; take down labs that are no longer needed: lab.py --lab NAME down")
    return slot


# --- the machine --------------------------------------------------------------------------------------------------


def missing_packages() -> list[str]:
    return sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})


@dataclass(frozen=True)
class Machine:
    """What this machine allows, looked at and never assumed."""

    cgroup2: bool
    capabilities: int
    systemd: bool

    @classmethod
    def look(cls) -> Machine:
        kind = subprocess.run(["stat", "-fc", "%T", "/sys/fs/cgroup"], check=True, capture_output=True, text=True)
        status = Path("/proc/self/status").read_text()
        found = re.search(r"^CapBnd:\s*([0-9a-f]+)$", status, re.MULTILINE)
        return cls(
            cgroup2=kind.stdout.strip() == CGROUP2_MAGIC,
            capabilities=int(found[1], 16) if found else 0,
            systemd=Path("/run/systemd/system").is_dir(),
        )

    def can(self, capability: str) -> bool:
        return bool(self.capabilities >> CAPABILITIES[capability] & 1)

    @property
    def borrows_cgroup(self) -> bool:
        """Whether podman cannot make a host's cgroup itself: none of version 2 is mounted, or crun may not raise
        the limits that its device filter wants. The container then runs in a cgroup made here.
        """
        return not (self.cgroup2 and self.can("SYS_RESOURCE"))

    def podman(self, *arguments: str, cgroup: str | None = None) -> list[str]:
        """A podman command; with ``cgroup``, one that starts a container and, if need be, starts it in there."""
        command = ["podman", "--runtime", "crun", "--events-backend", "none"]
        if not self.systemd or self.borrows_cgroup:
            command += ["--cgroup-manager", "cgroupfs"]
        command += arguments
        if cgroup is None or not self.borrows_cgroup:
            return command
        enter = f'mkdir -p "/sys/fs/cgroup/{cgroup}"; echo $$ > "/sys/fs/cgroup/{cgroup}/cgroup.procs"'
        return self.with_cgroup2(f'{enter}; exec "$@"', *command)

    def with_cgroup2(self, script: str, *arguments: str) -> list[str]:
        """A command that runs a shell script where /sys/fs/cgroup is of version 2, seen by this process alone."""
        mount = "umount -R /sys/fs/cgroup 2>/dev/null; mount -t cgroup2 none /sys/fs/cgroup"
        prepare = "" if self.cgroup2 else f"{mount}; "
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", prepare + script, "sh", *arguments]

    def container_options(self) -> list[str]:
        options = ["--cgroupns=private", "--systemd=always"]
        options += [f"--cap-add={name}" for name in CAPABILITIES if self.can(name)]
        if self.borrows_cgroup:
            options.append("--cgroups=disabled")
        if not self.can("SYS_RESOURCE"):
            # podman's own defaults lie above what this machine may set; podman itself runs under pid_max.
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
            tasks = min(resource.getrlimit(resource.RLIMIT_NPROC)[1] % (1 << 63), pid_max, 32768)
            options += [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={tasks}:{tasks}"]
        return options


# --- a lab --------------------------------------------------------------------------------------------------------


class Lab:
    def __init__(self, name: str, machine: Machine) -> None:
        self.name = check_name(name, "lab")
        self.machine = machine
        self.directory = STATES / name

    # what it is

    def state(self) -> State:
        state = State.read(self.directory)
        if state is None:
            raise LabError(f"lab {self.name} is not up; start it: tests/lab/lab.py --lab {self.name} up HOST...")
        return state

    def container(self, host: str) -> str:
        return f"{self.name}-{host}"

    def cgroup(self, host: str) -> str:
        return f"onprem-lab/{network.namespace(self.name, host)}"

    def subnet(self) -> network.Subnet:
        return network.Subnet(self.state().slot)

    def known(self, host: str) -> str:
        if host not in self.state().hosts:
            raise LabError(f"lab {self.name} has no host {host!r}; it has: {', '.join(self.state().hosts)}")
        return host

    def containers(self) -> dict[str, str]:
        """The state of every container that carries this lab's label, by container name."""
        command = self.machine.podman("ps", "--all", "--filter", f"label={LABEL}={self.name}", "--format", "json")
        return {entry["Names"][0]: entry["State"] for entry in json.loads(_output(command))}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Two runs that change one lab come one after the other."""
        STATES.mkdir(parents=True, exist_ok=True)
        path = STATES / f".{self.name}.lock"
        while True:
            with path.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # `down` removes the file: whoever waited for it then holds a lock that nobody else will meet.
                if path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                    yield
                    return

    # its life

    def up(self, hosts: list[str]) -> None:
        """Start hosts, the known ones where none is named; whatever of it is there already stays as it is."""
        if sys.version_info < (3, 12):  # connect.py, which ssh starts with this Python
            raise LabError(
                f"a lab needs Python 3.12, this is {sys.version.split()[0]}; use .venv/bin/python (make tools)"
            )
        for host in hosts:
            check_name(host, "host")
        self.ensure_image()
        with self.locked():
            self.directory.mkdir(parents=True, exist_ok=True)
            with (STATES / ".slots.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                state = State.read(self.directory) or State(free_slot(self.name, STATES))
                state.write(self.directory)
            for host in hosts:
                state.add(host)
            if not state.hosts:
                raise LabError(f"lab {self.name} has no hosts yet; name them: lab.py --lab {self.name} up HOST...")
            state.write(self.directory)
            self.write_files(state)
            network.create(self.name, self.subnet())
            containers = self.containers()
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda host: self.up_host(host, containers), hosts or list(state.hosts)))

    def up_host(self, host: str, containers: dict[str, str]) -> None:
        begin = time.monotonic()
        state = self.state()
        name = self.container(host)
        network.create_host(self.name, host, self.subnet(), state.hosts[host])
        if name not in containers:
            self.create_container(host)
        if containers.get(name) != "running":
            self.start(host)
        self.wait(host)
        ipv4, ipv6 = self.subnet().addresses(state.hosts[host])
        say(f"lab {self.name}: {host} is up at {ipv4} and {ipv6} ({time.monotonic() - begin:.1f} s)")

    def create_container(self, host: str) -> None:
        """Make a host from the image, with its own identity as real files on its own file system."""
        options = [
            *self.machine.container_options(),
            f"--name={self.container(host)}",
            f"--label={LABEL}={self.name}",
            f"--hostname={host}",
            # systemd inside confines services itself, with mounts that podman's own masks would forbid.
            "--security-opt=unmask=ALL",
            "--security-opt=seccomp=unconfined",
            f"--shm-size={SHM_SIZE}",
            f"--network=ns:{network.NAMESPACES / network.namespace(self.name, host)}",
            "--dns=none",
            "--no-hosts",
        ]
        _run(self.machine.podman("create", *options, image.tag(), "/sbin/init", cgroup=self.cgroup(host)))

    def start(self, host: str) -> None:
        self.clear_cgroup(host)
        copy = self.machine.podman("cp", "-", f"{self.container(host)}:/", cgroup=self.cgroup(host))
        _run(copy, stdin=self.identity(host))
        _run(self.machine.podman("start", self.container(host), cgroup=self.cgroup(host)))

    def identity(self, host: str) -> bytes:
        """The files that make a host this one: who may log in, its host key, and the names of its neighbours."""
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for path, mode, content in [
                ("etc/hosts", 0o644, self.directory / "hosts"),
                ("etc/ssh/authorized_keys.d/ops", 0o644, self.directory / "id_ed25519.pub"),
                ("etc/ssh/ssh_host_ed25519_key", 0o600, self.directory / f"{host}.key"),
                ("etc/ssh/ssh_host_ed25519_key.pub", 0o644, self.directory / f"{host}.key.pub"),
            ]:
                entry = tarfile.TarInfo(path)
                entry.mode, entry.size = mode, content.stat().st_size
                archive.addfile(entry, io.BytesIO(content.read_bytes()))
        return stream.getvalue()

    def wait(self, host: str) -> None:
        """Return once systemd has started everything and sshd answers."""
        deadline = time.monotonic() + BOOT_SECONDS
        name = self.container(host)
        asked = self.machine.podman("exec", name, "systemctl", "is-system-running", "--wait")
        while True:
            answer = subprocess.run(asked, check=False, capture_output=True, text=True)
            system = answer.stdout.strip()
            if system == "running" and self.ssh_answers(host):
                return
            if system == "degraded" or time.monotonic() > deadline:
                failed = self.output(host, "systemctl", "--failed", "--no-legend", "--plain")
                raise LabError(
                    f"lab {self.name}: {host} did not come up (systemd says {system or answer.stderr.strip()!r}); "
                    f"failed units: {failed.strip() or 'none'}. See: lab.py --lab {self.name} logs {host}"
                )
            time.sleep(0.1)

    def ssh_answers(self, host: str) -> bool:
        address = self.subnet().addresses(self.state().hosts[host])[0]
        probe = 'exec 3<>/dev/tcp/$0/22 && read -r -t 2 -n 4 banner <&3 && [ "$banner" = SSH- ]'
        inside = ["nsenter", f"--net={network.NAMESPACES / network.namespace(self.name, 'controller')}"]
        return subprocess.run([*inside, "bash", "-c", probe, address], check=False, capture_output=True).returncode == 0

    def reboot(self, host: str, *, kill: bool) -> None:
        """End a host, in order or at once as by a power cut, and start it again on the same file system."""
        begin = time.monotonic()
        with self.locked():
            name = self.container(self.known(host))
            if self.containers().get(name) == "running":
                _run(self.machine.podman(*(["kill", name] if kill else ["stop", "-t", str(STOP_SECONDS), name])))
                _run(self.machine.podman("wait", name))
            network.close_ssh(self.name, self.subnet().addresses(self.state().hosts[host])[0])
            self.start(host)
            self.wait(host)
        say(f"lab {self.name}: {host} is back ({time.monotonic() - begin:.1f} s)")

    def down(self) -> None:
        """Take away every trace, also of a lab whose state or whose machine's last run was lost."""
        with self.locked():
            network.close_ssh(self.name)
            containers = list(self.containers())
            if containers:
                _run(self.machine.podman("rm", "--force", "--time", "0", *containers))
            for name in network.namespaces(self.name):
                network.delete(name)
            if self.machine.borrows_cgroup:
                self.clear_cgroup("*")
            shutil.rmtree(self.directory, ignore_errors=True)
            (STATES / f".{self.name}.lock").unlink(missing_ok=True)
        say(f"lab {self.name}: down")

    def clear_cgroup(self, host: str) -> None:
        """Remove the cgroups that a container left behind: podman does not, where it did not make them."""
        if not self.machine.borrows_cgroup:
            return
        pattern = f"/sys/fs/cgroup/{self.cgroup(host)}"
        remove = 'for d in $1; do [ ! -d "$d" ] || find "$d" -depth -type d -exec rmdir {} \\;; done'
        parent = "rmdir /sys/fs/cgroup/onprem-lab 2>/dev/null || true"
        _run(self.machine.with_cgroup2(f"{remove}; {parent}", pattern))

    # its files

    def ensure_image(self) -> None:
        found = subprocess.run(["podman", "image", "exists", image.tag()], check=False)
        if found.returncode == 0:
            return
        STATES.mkdir(parents=True, exist_ok=True)
        with (STATES / ".image.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if subprocess.run(["podman", "image", "exists", image.tag()], check=False).returncode == 0:
                return
            begin = time.monotonic()
            say(f"lab: building the hosts' image {image.tag()} (one to three minutes)")
            image.build(STATES)
            say(f"lab: image built ({time.monotonic() - begin:.0f} s)")

    def write_files(self, state: State) -> None:
        """Write keys, names, ssh_config and inventory for the hosts in ``state``."""
        subnet = network.Subnet(state.slot)
        for name in ("id_ed25519", *(f"{host}.key" for host in state.hosts)):
            if not (self.directory / name).exists():
                comment = f"lab {self.name}"
                _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(self.directory / name)])
        addresses = {host: subnet.addresses(number) for host, number in state.hosts.items()}
        addresses["controller"] = subnet.addresses(network.CONTROLLER_NUMBER)
        names = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        names += [f"{address} {host}" for host, pair in addresses.items() for address in pair]
        self.write("hosts", names)
        keys = {host: (self.directory / f"{host}.key.pub").read_text().split()[:2] for host in state.hosts}
        self.write("known_hosts", [" ".join([",".join([h, *addresses[h]]), *key]) for h, key in keys.items()])
        ipv4 = {host: addresses[host][0] for host in state.hosts}
        self.write("ssh_config", ssh_config(self.name, self.directory, ipv4))
        self.write("inventory.yml", inventory(self.directory, subnet, ipv4))

    def write(self, name: str, lines: list[str]) -> None:
        beside = self.directory / f"{name}.new"
        beside.write_text("\n".join(lines) + "\n")
        beside.replace(self.directory / name)

    # its use

    def output(self, host: str, *command: str) -> str:
        asked = self.machine.podman("exec", self.container(host), *command)
        return subprocess.run(asked, check=False, capture_output=True, text=True).stdout

    def exec(self, host: str, command: list[str]) -> None:
        """Become a command that runs as root in a host, without network or SSH."""
        terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
        name = self.container(self.known(host))
        _become(self.machine.podman("exec", "--interactive", *terminal, name, *(command or ["bash", "--login"])))

    def run(self, command: list[str]) -> None:
        """Become a command that runs on the controller: outside the hosts, with their names in /etc/hosts."""
        self.state()
        names = 'mount --bind "$0" /etc/hosts && exec "$@"'
        inside = ["nsenter", f"--net={network.NAMESPACES / network.namespace(self.name, 'controller')}"]
        own_mounts = ["unshare", "--mount", "--propagation", "private", "sh", "-c", names]
        _become([*inside, *own_mounts, str(self.directory / "hosts"), *(command or ["bash"])])

    def ssh(self, host: str, command: list[str]) -> None:
        _become(["ssh", "-F", str(self.directory / "ssh_config"), self.known(host), *command])

    def logs(self, host: str, lines: int) -> None:
        """Print the end of a host's journal, then that of each failed unit."""
        self.known(host)
        print(self.output(host, "journalctl", "--no-pager", "--lines", str(lines)), end="")
        self.failures([host], lines)

    def changes(self, host: str) -> None:
        """Print what differs on a host from its image: changed (C), added (A) or deleted (D); times do not count."""
        name = self.container(self.known(host))
        image = _output(self.machine.podman("inspect", "--format", "{{.Image}}", name)).strip()
        before = _output(self.machine.podman("image", "mount", image)).strip()
        try:
            # Not by `podman mount`: on a host that runs, what lies in the image could not be written any more.
            now = f"/proc/{_output(self.machine.podman('inspect', '--format', '{{.State.Pid}}', name)).strip()}/root"
            for line in _output(self.machine.podman("diff", name)).splitlines():
                kind, path = line.split(" ", 1)
                if kind != "C" or _seen(Path(before + path)) != _seen(Path(now + path)):
                    print(line)
        finally:
            _output(self.machine.podman("image", "unmount", image))

    def failures(self, hosts: list[str], lines: int) -> None:
        """Print the end of each failed unit's journal; nothing where none failed or the lab is not up."""
        for host in hosts:
            failed = self.output(host, "systemctl", "--failed", "--no-legend", "--plain")
            for unit in [line.split()[0] for line in failed.splitlines()]:
                print(f"--- {host}: {unit} failed")
                print(self.output(host, "journalctl", "--no-pager", "--lines", str(lines), "--unit", unit), end="")

    def status(self) -> bool:
        """Print each host's state; True where all are running."""
        state, containers = self.state(), self.containers()
        healthy = True
        for host, number in state.hosts.items():
            container = containers.get(self.container(host), "missing")
            system = self.output(host, "systemctl", "is-system-running").strip() if container == "running" else "-"
            healthy = healthy and system == "running"
            print(f"{host:16} {' '.join(self.subnet().addresses(number)):32} container {container}, systemd {system}")
        if network.is_alive(network.namespace(self.name, "sink")):
            print(f"{'sink':16} {network.sink(self.name)[0]} packets")
        return healthy

    def sink(self, *, reset: bool, details: bool) -> None:
        self.state()
        packets, leaks = network.sink(self.name)
        print(packets)
        if details:
            for leak in leaks:
                print(f"{leak.source} -> {leak.destination} {leak.protocol}: {leak.packets}")
        if reset:
            network.reset_sink(self.name)


def ssh_config(lab: str, directory: Path, addresses: dict[str, str]) -> list[str]:
    """An ssh_config with which an ordinary shell reaches a lab's hosts, and only those it means."""
    connect = [os.path.realpath(sys.executable), "-IS", str(Path(__file__).resolve().parent / "connect.py")]
    proxy = f"{shlex.join([*connect, network.namespace(lab, 'controller')])} %h %p"
    lines = [f"# Written by tests/lab/lab.py for lab {lab}."]
    for host, address in addresses.items():
        lines += [f"Host {host}", f"  HostName {address}"]
    return [
        *lines,
        "Host *",
        "  User ops",
        f'  IdentityFile "{directory}/id_ed25519"',
        "  IdentitiesOnly yes",
        f'  UserKnownHostsFile "{directory}/known_hosts"',
        "  StrictHostKeyChecking yes",
        f"  ProxyCommand {proxy}",
        "  ProxyUseFdpass yes",
    ]


def standing_connections(directory: Path) -> str:
    """Where Ansible keeps the standing SSH connections to a lab's hosts.

    It tells them apart by address, and two checkouts give the same addresses to their labs: one's run would go on in
    the other's hosts. A socket's path has room for 107 characters, so the lab's own directory may be too long.
    """
    return f"~/.ansible/cp/{hashlib.sha256(str(directory).encode()).hexdigest()[:12]}"


def inventory(directory: Path, subnet: network.Subnet, addresses: dict[str, str]) -> list[str]:
    """An inventory of a lab's hosts, ungrouped, as YAML lines (a JSON value is YAML too, and quotes itself).

    Everything stands at the hosts, so that it wins over the group variables of another inventory given beside it.
    """
    arguments = json.dumps("-F " + shlex.quote(str(directory / "ssh_config")))
    connections = json.dumps(standing_connections(directory))
    networks = json.dumps([str(subnet.ipv4), str(subnet.ipv6)])
    lines = ["---", "all:", "  hosts:"]
    for host, address in addresses.items():
        lines += [
            f"    {host}:",
            f"      ansible_host: {address}",
            "      ansible_user: ops",
            f"      ansible_ssh_common_args: {arguments}",
            f"      ansible_control_path_dir: {connections}",
            f"      lab_networks: {networks}",
        ]
    return lines


# --- edges --------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(command: list[str], stdin: bytes = b"") -> None:
    done = subprocess.run(command, check=False, capture_output=True, input=stdin)
    if done.returncode:
        raise LabError(f"{shlex.join(command)}\nended with {done.returncode}: {done.stderr.decode().strip()}")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{shlex.join(command)}\nended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _become(command: list[str]) -> None:
    sys.stdout.flush()
    os.execvp(command[0], command)


def _seen(path: Path) -> tuple[int, int, int, bytes]:
    """What a file is: mode, owner and content; of a directory its entries are files of their own."""
    status = path.lstat()
    content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
    return status.st_mode, status.st_uid, status.st_gid, content


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="lab.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    top.add_argument("--lab", default=DEMO, metavar="NAME", help="which lab (default: demo)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    command("needs", "print the apt packages that this machine lacks for a lab")
    command("image", "build the hosts' image, unless it is there")
    command("up", "start hosts (without names: those the lab has) and wait until they answer").add_argument(
        "hosts", nargs="*", metavar="HOST"
    )
    command("down", "take the lab away: hosts, network, processes, state")
    command("status", "print each host's state; status 1 unless all are running")
    command("inventory", "print the path of an inventory of the lab's hosts")
    on_host = command("exec", "run a command as root in a host, without network or SSH")
    on_host.add_argument("host", metavar="HOST")
    on_host.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    command("run", "run a command on the controller, outside the hosts").add_argument(
        "words", nargs=argparse.REMAINDER, metavar="CMD"
    )
    over_ssh = command("ssh", "log in to a host, or run a command there")
    over_ssh.add_argument("host", metavar="HOST")
    over_ssh.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    again = command("reboot", "end a host and start it again: same files, same address")
    again.add_argument("host", metavar="HOST")
    again.add_argument("--kill", action="store_true", help="end it at once, as by a power cut")
    logs = command("logs", "print the end of a host's journal and of its failed units'")
    logs.add_argument("host", metavar="HOST")
    logs.add_argument("--lines", type=int, default=200)
    changed = command("changes", "print which files a host has changed since it was made")
    changed.add_argument("host", metavar="HOST")
    failures = command("failures", "print the end of every failed unit's journal, on all hosts")
    failures.add_argument("--lines", type=int, default=100)
    sink = command("sink", "print how many packets tried to leave the lab")
    sink.add_argument("--details", action="store_true", help="and from where to where")
    sink.add_argument("--reset", action="store_true", help="and count from zero again")
    return top


def main() -> int:
    arguments = parser().parse_args()
    if arguments.command == "needs":
        print(" ".join(missing_packages()))
        return 0
    if os.geteuid() != 0:
        raise LabError("lab.py makes network namespaces and containers, which only root may; run it as root")
    if missing := missing_packages():
        raise LabError(f"the lab needs programs that are not here; run: apt-get install {' '.join(missing)}")
    lab = Lab(arguments.lab, Machine.look())
    match arguments.command:
        case "image":
            lab.ensure_image()
        case "up":
            lab.up(arguments.hosts)
        case "down":
            lab.down()
        case "status":
            return 0 if lab.status() else 1
        case "inventory":
            lab.state()
            print(lab.directory / "inventory.yml")
        case "exec":
            lab.exec(arguments.host, arguments.words)
        case "run":
            lab.run(arguments.words)
        case "ssh":
            lab.ssh(arguments.host, arguments.words)
        case "reboot":
            lab.reboot(arguments.host, kill=arguments.kill)
        case "logs":
            lab.logs(arguments.host, arguments.lines)
        case "changes":
            lab.changes(arguments.host)
        case "failures":
            state = State.read(lab.directory)
            lab.failures(list(state.hosts) if state else [], arguments.lines)
        case "sink":
            lab.sink(reset=arguments.reset, details=arguments.details)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{shlex.join(error.cmd)}\nended with {error.returncode}: {error.stderr or 'see above'}")
