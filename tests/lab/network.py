# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The network of a lab: namespaces joined by a bridge, and a sink that every way out leads to.

The controller's namespace holds the bridge. A host's default route, IPv4 and IPv6, leads to the sink's namespace,
which answers nothing, forwards nothing and counts. The machine's own namespace and its firewall are not touched.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = Path("/run/netns")
SLOTS = range(256)
HOST_NUMBERS = range(11, 200)
RESERVED = ("controller", "sink")

SINK_RULES = """
table inet sink {{
  counter arrived {{ }}
  set ipv4 {{ typeof ip saddr . ip daddr . meta l4proto; flags dynamic; size 4096; }}
  set ipv6 {{ typeof ip6 saddr . ip6 daddr . meta l4proto; flags dynamic; size 4096; }}
  chain arrive {{
    type filter hook prerouting priority raw; policy drop;
    iifname lo accept
    # Neighbours find the sink itself by these; everything else came to leave the lab.
    ip daddr {{ {ipv4}, 224.0.0.0/24 }} accept
    ip6 daddr {{ {ipv6}, fe80::/10, ff02::/16 }} accept
    counter name arrived
    meta nfproto ipv4 update @ipv4 {{ ip saddr . ip daddr . meta l4proto counter }}
    meta nfproto ipv6 update @ipv6 {{ ip6 saddr . ip6 daddr . meta l4proto counter }}
  }}
}}
"""


@dataclass(frozen=True)
class Subnet:
    """The addresses of one lab. Two labs never share any: ssh tells its standing connections apart by address."""

    slot: int

    @property
    def ipv4(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.77.{self.slot}.0/24")

    @property
    def ipv6(self) -> ipaddress.IPv6Network:
        return ipaddress.IPv6Network(f"fd77::{self.slot:x}:0:0:0:0/64" if self.slot else "fd77::/64")

    def addresses(self, number: int) -> tuple[str, str]:
        """The IPv4 and IPv6 address of a number, which reads the same in both: 10.77.0.11 and fd77::11."""
        if number not in range(1, 255):
            raise ValueError(f"{number} is no host number of {self.ipv4}")
        return str(self.ipv4[number]), str(self.ipv6[int(str(number), 16)])


CONTROLLER_NUMBER = 1
SINK_NUMBER = 254


def namespace(lab: str, host: str) -> str:
    """The name of a network namespace; a lab's name has no dot and no hyphen, so no two labs share a prefix."""
    return f"onprem.{lab}.{host}"


def namespaces(lab: str) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{namespace(lab, '*')}"))


def is_alive(name: str) -> bool:
    """Whether a namespace of this name exists: a restart of the machine can leave its plain file behind."""
    try:
        return (NAMESPACES / name).stat().st_dev == os.stat("/proc/self/ns/net").st_dev
    except FileNotFoundError:
        return False


def create(lab: str, subnet: Subnet) -> None:
    """Make the controller's and the sink's namespace, unless they are there."""
    controller, sink = namespace(lab, "controller"), namespace(lab, "sink")
    ipv4, ipv6 = subnet.addresses(CONTROLLER_NUMBER)
    if _add(controller):
        _ip(
            controller,
            "link add br0 type bridge",
            f"addr add {ipv4}/24 dev br0",
            f"addr add {ipv6}/64 dev br0 nodad",
            "link set br0 up",
            "link set lo up",
        )
    if _add(sink):
        _join(lab, "sink", subnet, SINK_NUMBER)
        rules = SINK_RULES.format(ipv4=subnet.ipv4, ipv6=subnet.ipv6)
        subprocess.run(["ip", "netns", "exec", sink, "nft", "-f", "-"], input=rules, text=True, check=True)
        _ip(sink, "link set lo up")


def create_host(lab: str, host: str, subnet: Subnet, number: int) -> None:
    """Make a host's namespace with its addresses and default routes, unless it is there."""
    if not _add(namespace(lab, host)):
        return
    _join(lab, host, subnet, number)
    ipv4, ipv6 = subnet.addresses(SINK_NUMBER)
    _ip(namespace(lab, host), f"route add 0.0.0.0/0 via {ipv4}", f"route add ::/0 via {ipv6}", "link set lo up")


def delete(name: str) -> None:
    """Take a namespace away with every process that runs in it."""
    if is_alive(name):
        for pid in processes(name):
            _kill(pid)
        subprocess.run(["ip", "netns", "delete", name], check=True)
    (NAMESPACES / name).unlink(missing_ok=True)


def processes(name: str) -> list[int]:
    return [int(pid) for pid in _output("ip", "netns", "pids", name).split()]


def connected_ssh(lab: str, address: str | None = None) -> list[int]:
    """The ssh processes with a connection into the lab (to ``address``): standing ones outlive a host, and answer
    for the next host of that address.

    They run in the machine's namespace with a socket of the lab's, so they are found by the socket.
    """
    controller = namespace(lab, "controller")
    if not is_alive(controller):
        return []
    table = _output("nsenter", f"--net={NAMESPACES / controller}", "cat", "/proc/net/tcp", "/proc/net/tcp6")
    wanted = None if address is None else _hex_address(address)
    inodes = set()
    for line in table.splitlines():
        fields = line.split()
        if fields[0].rstrip(":").isdigit() and (wanted is None or fields[2].split(":")[0] == wanted):
            inodes.add(f"socket:[{fields[9]}]")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() != "ssh":
                continue
            if any(os.readlink(entry) in inodes for entry in (process / "fd").iterdir()):
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile
    return found


def close_ssh(lab: str, address: str | None = None) -> None:
    for pid in connected_ssh(lab, address):
        _kill(pid)


@dataclass(frozen=True)
class Leak:
    source: str
    destination: str
    protocol: str
    packets: int


def sink(lab: str) -> tuple[int, list[Leak]]:
    """How many packets came to the sink since the last reset, and from where to where."""
    listing = json.loads(_nft(lab, "-j", "list", "table", "inet", "sink"))["nftables"]
    packets, leaks = 0, []
    for entry in listing:
        if "counter" in entry:
            packets = entry["counter"]["packets"]
        for element in entry.get("set", {}).get("elem", []):
            source, destination, protocol = element["elem"]["val"]["concat"]
            leaks.append(Leak(source, destination, str(protocol), element["elem"]["counter"]["packets"]))
    return packets, leaks


def reset_sink(lab: str) -> None:
    _nft(lab, "reset", "counters", "table", "inet", "sink")
    for name in ("ipv4", "ipv6"):
        _nft(lab, "flush", "set", "inet", "sink", name)


def _nft(lab: str, *arguments: str) -> str:
    return _output("ip", "netns", "exec", namespace(lab, "sink"), "nft", *arguments)


def _add(name: str) -> bool:
    """Make a namespace and return True, unless a whole one is there: its loopback comes up last of all."""
    if is_alive(name):
        loopback = json.loads(_output("ip", "-n", name, "-json", "link", "show", "lo"))
        if "UP" in loopback[0]["flags"]:
            return False
    delete(name)
    subprocess.run(["ip", "netns", "add", name], check=True)
    # A new namespace takes these over from the machine, where a container engine may have switched them on.
    off = "echo 0 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv6/conf/all/forwarding"
    subprocess.run(["ip", "netns", "exec", name, "sh", "-c", off], check=True)
    return True


def _join(lab: str, host: str, subnet: Subnet, number: int) -> None:
    controller, own = namespace(lab, "controller"), namespace(lab, host)
    ipv4, ipv6 = subnet.addresses(number)
    _ip(controller, f"link add v{number} type veth peer name eth0 netns {own}", f"link set v{number} master br0 up")
    _ip(
        own,
        f"addr add {ipv4}/24 dev eth0",
        f"addr add {ipv6}/64 dev eth0 nodad",
        "link set eth0 up",
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _ip(name: str, *lines: str) -> None:
    subprocess.run(["ip", "-n", name, "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _hex_address(address: str) -> str:
    """An address as /proc/net/tcp and tcp6 write it: 32-bit words in the machine's byte order."""
    packed = ipaddress.ip_address(address).packed
    words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]
    return b"".join(words).hex().upper()
