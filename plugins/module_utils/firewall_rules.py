# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a rule set means for those who are there already: the running SSH connection and the host's listeners."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path

from .listeners import PROC, Listener

# Without netbase nft prints and reads numbers; with it, names. These are the ones that raw sockets have in the field.
IP_PROTOCOLS = {"icmp": 1, "igmp": 2, "gre": 47, "esp": 50, "ah": 51, "icmpv6": 58, "ipv6-icmp": 58, "ospf": 89}
IP_PROTOCOLS |= {"pim": 103, "vrrp": 112, "l2tp": 115, "sctp": 132}
OWN_INSTANCE = re.compile(r"vllm-.+\.service")
CUT_ENTRY = re.compile(r"(tcp|udp|ip)/[0-9]+")


@dataclass(frozen=True)
class SshConnection:
    """Both ends of the connection that this run came by, as sshd on this host sees them."""

    client: str
    client_port: int
    server: str
    server_port: int

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)


def running_ssh_connection(pid: int | None = None, proc: Path = PROC) -> SshConnection | None:
    """The SSH connection that process ``pid`` (default: this one) runs in, or None.

    Read from the nearest ancestor's environment, for sudo and its like drop SSH_CONNECTION from their child's.
    """
    current = os.getpid() if pid is None else pid
    while current > 1:
        try:
            environment = (proc / str(current) / "environ").read_bytes()
            status = (proc / str(current) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        for variable in environment.split(b"\0"):
            name, _unused, value = variable.partition(b"=")
            if name == b"SSH_CONNECTION":
                return parse_ssh_connection(value.decode("ascii", errors="replace"))
        current = int(status.rpartition(")")[2].split()[1])
    return None


def parse_ssh_connection(text: str) -> SshConnection | None:
    """The four words of SSH_CONNECTION (an address without its zone), or None where they are something else."""
    words = text.split()
    if len(words) != 4 or not (words[1].isdigit() and words[3].isdigit()):
        return None
    return SshConnection(words[0].partition("%")[0], int(words[1]), words[2].partition("%")[0], int(words[3]))


def lockout_problems(connection: SshConnection | None, ssh_port: int, ssh_networks: Sequence[str]) -> list[str]:
    """Why the SSH rule would not let the running connection in again."""
    if connection is None:
        return []
    problems = []
    if connection.server_port != ssh_port:
        problems.append(
            f"SSH would be open on port {ssh_port} only, but this run came in on port {connection.server_port}: "
            f"set nftables_ssh_port to {connection.server_port} or leave it out"
        )
    client = ip_address(connection.client)
    networks = [ip_network(network) for network in ssh_networks]
    if not any(client.version == network.version and client in network for network in networks):
        allowed = ", ".join(ssh_networks) or "nowhere"
        problems.append(
            f"SSH would be open from {allowed} only, but this run comes from {client}: "
            f"add {client} or its network to nftables_ssh_networks"
        )
    return problems


def accepted(rules: str) -> set[tuple[str, int]]:
    """The (protocol, port) pairs that some accept rule of an nft text names; ``("ip", number)`` for a whole protocol.

    From where they are accepted does not matter: limiting a port is what a plan is for, forgetting it is not.
    """
    found: set[tuple[str, int]] = set()
    for line in rules.splitlines():
        rule = re.sub(r'"[^"]*"', '""', line).partition("#")[0]
        if not re.search(r"\baccept\b", rule):
            continue
        named = False
        for protocol, values in re.findall(r"\b(tcp|udp|th)\s+dport\s+(?:vmap\s+)?(\{[^}]*\}|[\w-]+)", rule):
            named = True
            kinds = ("tcp", "udp") if protocol == "th" else (protocol,)
            found |= {(kind, port) for port in _numbers(values) for kind in kinds}
        if named:
            continue
        for values in re.findall(r"\b(?:l4proto|ip protocol|ip6 nexthdr)\s+(\{[^}]*\}|[\w-]+)", rule):
            words = re.findall(r"[\w-]+", values)
            found |= {("ip", IP_PROTOCOLS.get(word, int(word) if word.isdigit() else -1)) for word in words}
        found |= {("ip", IP_PROTOCOLS[name]) for name in re.findall(r"\b(icmp|icmpv6)\s+type\b", rule)}
    return found


def _numbers(values: str) -> Iterable[int]:
    for first, last in re.findall(r"\b(\d+)(?:-(\d+))?\b", values):
        yield from range(int(first), int(last or first) + 1)


def drops_by_default(rules: str | None) -> bool:
    """Whether the text of a table (None: there is none) holds an input chain that drops what it does not name."""
    return rules is not None and re.search(r"hook input priority [^;]+; policy drop;", rules) is not None


def cut_listeners(found: Iterable[Listener], rules: str, live: str | None) -> tuple[list[Listener], list[Listener]]:
    """Listeners that ``rules`` leave without an accept rule: (cut by the change, cut by the ``live`` table already).

    Instances of vLLM are no part of it: the plan says which of their ports are open.
    """
    wanted = accepted(rules)
    before = accepted(live) if live is not None and drops_by_default(live) else None
    newly: list[Listener] = []
    already: list[Listener] = []
    for listener in found:
        key = (listener.protocol, listener.port)
        own = bool(listener.units) and all(OWN_INSTANCE.fullmatch(unit) for unit in listener.units)
        if key in wanted or own:
            continue
        (newly if before is None or key in before else already).append(listener)
    return newly, already


def cut_problem(listener: Listener) -> str:
    """Names a listener that would fall silent, and the two ways out."""
    match = (
        f"meta l4proto {listener.port}" if listener.protocol == "ip" else f"{listener.protocol} dport {listener.port}"
    )
    return (
        f"{listener} would be cut by the default drop: keep it with a rule in nftables_extra_rules "
        f"(such as '{match} accept') or agree by adding {listener.label} to nftables_cut_listeners"
    )
