# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Networks and addresses as people write them -> lists that an nftables interval set takes without complaint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import TypedDict

try:
    from netaddr import AddrFormatError, IPNetwork, cidr_merge
except ImportError as error:  # told when a network is read; listing plugins must work without it
    NETADDR_MISSING: ImportError | None = error
else:
    NETADDR_MISSING = None


def parse_network(entry: object) -> IPNetwork:
    """One network (``10.77.0.0/24``, ``2001:db8::/32``) or one address, which is a network of its own.

    Refused, with the right value named, is what a firewall would read otherwise than its writer: an address
    with host bits under a prefix, a netmask, an IPv4 address in IPv6 clothes (on the wire it is IPv4), a zone.

    Raises:
        ValueError: the entry is none of the above; the message names it and what to write instead.
    """
    if NETADDR_MISSING is not None:
        raise ValueError("netaddr is missing on the control node: install requirements.txt there") from NETADDR_MISSING
    if not isinstance(entry, str):
        raise ValueError(f"{entry!r} is no network: write a string such as 10.77.0.0/24 or 2001:db8::/32")
    _unused, slash, prefix = entry.partition("/")
    if slash and not (prefix.isascii() and prefix.isdigit()):
        raise ValueError(f"{entry!r} is no network: after the slash write the prefix length, as in 10.77.0.0/24")
    try:
        network = IPNetwork(str(entry))
    except AddrFormatError:
        raise ValueError(
            f"{entry!r} is no network: write an address or a network such as 10.77.0.0/24 or 2001:db8::/32"
        ) from None
    if network.version == 6 and network.prefixlen >= 96 and network.ip.is_ipv4_mapped():
        inner = f"{network.ip.ipv4()}/{network.prefixlen - 96}".removesuffix("/32")
        raise ValueError(f"{entry!r} reaches the host as IPv4: write {inner}")
    if network.ip != network.cidr.ip:
        raise ValueError(
            f"{entry!r} has host bits set: write {_text(network.cidr)} for the network or "
            f"{_text(IPNetwork(network.ip))} for the one address"
        )
    return network


def split_networks(networks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Merge networks and addresses into sorted lists without overlaps, IPv4 and IPv6 apart.

    Adjacent networks become one; a single address stands without ``/32`` or ``/128``.

    Raises:
        ValueError: one or more entries are no networks; the message names every one of them.
    """
    if isinstance(networks, str) or not isinstance(networks, Sequence):
        raise ValueError(f"{networks!r} is no list of networks: write [{networks}]")
    parsed: list[IPNetwork] = []
    wrong: list[str] = []
    for entry in networks:
        try:
            parsed.append(parse_network(entry))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    merged = sorted(cidr_merge(parsed))
    return (
        [_text(network) for network in merged if network.version == 4],
        [_text(network) for network in merged if network.version == 6],
    )


def _text(network: IPNetwork) -> str:
    """An element as nft prints it: a whole-width prefix is an address, and no ``::0.1.0.0`` as netaddr has it."""
    address = str(ip_address(str(network.ip)))
    full = 32 if network.version == 4 else 128
    return address if network.prefixlen == full else f"{address}/{network.prefixlen}"


class PortElements(TypedDict):
    """One open port for the template: ``name`` begins the names of its sets, ``comment`` says what it is for."""

    name: str
    protocol: str
    port: str
    v4: list[str]
    v6: list[str]
    comment: str


def port_elements(ports: Sequence[Mapping[str, object]]) -> list[PortElements]:
    """Ports with their networks -> one entry for each protocol and port, with the networks of all its entries merged.

    Args:
        ports: each ``{port, protocol, networks, for}``; a port may be a name that the rules define (``$ssh_port``).

    Raises:
        ValueError: a port, protocol or network is wrong; the message names every one of them.
    """
    merged: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    wrong: list[str] = []
    for entry in ports:
        port, protocol = str(entry.get("port")), str(entry.get("protocol", "tcp"))
        purpose = str(entry.get("for") or "port of nftables_ports")
        where = f"{protocol}/{port} ({purpose})"
        if not re.fullmatch(r"\$[a-z_]+", port) and not (re.fullmatch(r"[1-9][0-9]*", port) and int(port) <= 65535):
            wrong.append(f"{where}: write a port from 1 to 65535")
        if protocol not in {"tcp", "udp"}:
            wrong.append(f"{where}: write tcp or udp as its protocol")
        networks = entry.get("networks", [])
        try:
            split_networks(networks)  # type: ignore[arg-type]  # what it is, it tells
        except ValueError as error:
            wrong.append(f"{where}: {error}")
            continue
        known, purposes = merged.setdefault((protocol, port), ([], []))
        # No +=: Ansible's lazy list answers it with a new list, and this one would stay empty.
        known.extend(networks)  # type: ignore[arg-type]
        if purpose not in purposes:
            purposes.append(purpose)
    if wrong:
        raise ValueError("; ".join(wrong))
    result: list[PortElements] = []
    for (protocol, port), (networks, purposes) in merged.items():
        v4, v6 = split_networks(networks)
        name = f"{protocol}_{port.removeprefix('$')}"
        result.append(
            {"name": name, "protocol": protocol, "port": port, "v4": v4, "v6": v6, "comment": _comment(purposes)}
        )
    return result


def _comment(purposes: Sequence[str]) -> str:
    """Text for nft's quotes, which have no escapes and hold 128 bytes at most."""
    text = re.sub(r'["\\\x00-\x1f\x7f]', "'", ", ".join(purposes))
    return text.encode()[:120].decode(errors="ignore")
