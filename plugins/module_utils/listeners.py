# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What listens on this host, read from /proc: no ss, no lsof, no package needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

PROC = Path("/proc")
STATES = (("tcp", "0A"), ("udp", "07"), ("raw", "07"))  # listening; unconnected
SEND_ONLY = 255  # IPPROTO_RAW: such a socket cannot receive


@dataclass(frozen=True)
class Listener:
    """One protocol and port, whoever holds it.

    ``protocol`` is ``tcp``, ``udp`` or ``ip``; for ``ip`` (a raw socket, as VRRP has) ``port`` is the IP
    protocol's number. ``units`` are the systemd units of ``processes``; both are empty for the kernel's own.
    """

    protocol: str
    port: int
    addresses: tuple[str, ...]
    processes: tuple[str, ...]
    units: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.protocol}/{self.port}"

    def __str__(self) -> str:
        holder = ", ".join([*self.processes, *self.units]) or "the kernel or another namespace"
        return f"{self.label} ({holder}) on {', '.join(self.addresses)}"


@dataclass(frozen=True)
class PortHolder:
    """Who holds a TCP port; ``pid``, ``program`` and ``unit`` are None where that cannot be seen."""

    port: int
    addresses: tuple[str, ...]
    pid: int | None
    program: str | None
    unit: str | None


@dataclass(frozen=True)
class Socket:
    """One line of /proc/net/{tcp,udp,raw}{,6}."""

    protocol: str
    address: IPv4Address | IPv6Address
    port: int
    inode: int


def listeners(leave_out: AbstractSet[tuple[str, int]] = frozenset(), proc: Path = PROC) -> list[Listener]:
    """Everything that takes packets nobody here asked for, except on loopback addresses; sorted.

    ``leave_out`` has (protocol, port) pairs of no interest: without a socket to explain, no process is looked at.

    A UDP socket of a process on a port out of the ephemeral range is a client: what it asked for comes back as
    an established flow. One that the kernel holds (WireGuard chooses such ports) is a listener all the same.
    """
    low, high = _ephemeral_range(proc)
    sockets = [socket for socket in _open_sockets(proc) if (socket.protocol, socket.port) not in leave_out]
    holders = _holders({socket.inode for socket in sockets if socket.inode}, proc)
    found: dict[tuple[str, int], tuple[set[str], set[str], set[str]]] = {}
    for socket in sockets:
        held_by = holders.get(socket.inode, [])
        if socket.protocol == "udp" and low <= socket.port <= high and held_by:
            continue
        addresses, processes, units = found.setdefault((socket.protocol, socket.port), (set(), set(), set()))
        addresses.add(str(socket.address))
        processes |= {program for _pid, program, _unit in held_by}
        units |= {unit for _pid, _program, unit in held_by if unit}
    return [
        Listener(protocol, port, *(tuple(sorted(names)) for names in sets))
        for (protocol, port), sets in sorted(found.items())
    ]


def port_holders(ports: Iterable[int], proc: Path = PROC) -> list[PortHolder]:
    """Who listens on TCP ports, on loopback addresses too; of forked workers the parent. Sorted by port."""
    wanted = set(ports)
    sockets = [socket for socket in _open_sockets(proc, STATES[:1], loopback=True) if socket.port in wanted]
    holders = _holders({socket.inode for socket in sockets if socket.inode}, proc)
    found: dict[tuple[int, tuple[int | None, str | None, str | None]], set[str]] = {}
    for socket in sockets:
        holder = min(holders.get(socket.inode, []), default=(None, None, None))
        found.setdefault((socket.port, holder), set()).add(str(socket.address))
    entries = [
        PortHolder(port, tuple(sorted(addresses)), pid, program, unit or None)
        for (port, (pid, program, unit)), addresses in found.items()
    ]
    return sorted(entries, key=lambda entry: (entry.port, entry.pid or 0))


def _open_sockets(
    proc: Path, states: Iterable[tuple[str, str]] = STATES, *, loopback: bool = False
) -> Iterator[Socket]:
    for protocol, state in states:
        for family in ("", "6"):
            try:
                text = (proc / "net" / f"{protocol}{family}").read_text(encoding="ascii")
            except FileNotFoundError:
                continue  # a kernel without IPv6 has no tcp6
            yield from parse_sockets(text, "ip" if protocol == "raw" else protocol, state, loopback=loopback)


def parse_sockets(text: str, protocol: str, state: str, *, loopback: bool = False) -> Iterator[Socket]:
    """The sockets of one /proc/net table that are in ``state``; those bound to a loopback address only if asked."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != state:
            continue
        address_hex, _unused, port_hex = fields[1].partition(":")
        address, port = decode_address(address_hex), int(port_hex, 16)
        if (address.is_loopback and not loopback) or (protocol == "ip" and port == SEND_ONLY):
            continue
        yield Socket(protocol, address, port, int(fields[9]))


def decode_address(text: str) -> IPv4Address | IPv6Address:
    """An address as /proc/net prints it: 32-bit words in the machine's byte order; IPv4-mapped becomes IPv4."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    address = ip_address(raw)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def unit_of(cgroup: str) -> str:
    """The innermost systemd unit in the text of /proc/<pid>/cgroup, or an empty string."""
    units = re.findall(r"/([^/\n]+\.(?:service|scope|socket))(?=[/\n]|$)", cgroup)
    return units[-1] if units else ""


def process_unit(pid: int, proc: Path = PROC) -> str | None:
    """The systemd unit of a process; None where it has ended or has none."""
    try:
        return unit_of((proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")) or None
    except OSError:
        return None


def _holders(inodes: set[int], proc: Path) -> dict[int, list[tuple[int, str, str]]]:
    """Which (pid, process name, unit) hold the sockets; walks /proc/<pid>/fd, which needs root to be complete."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    if not inodes:
        return found
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for process in _processes(proc):
        held: set[int] = set()
        try:
            for descriptor in (process / "fd").iterdir():
                try:
                    inode = wanted.get(str(descriptor.readlink()))
                except OSError:
                    continue
                if inode is not None:
                    held.add(inode)
            if held:
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                unit = unit_of((process / "cgroup").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue  # it ended while we looked
        for inode in held:
            found.setdefault(inode, []).append((int(process.name), name, unit))
    return found


def _processes(proc: Path) -> Iterable[Path]:
    return (entry for entry in proc.iterdir() if entry.name.isdigit())


def _ephemeral_range(proc: Path) -> tuple[int, int]:
    low, high = (proc / "sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return int(low), int(high)
