# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who gets in is asked from outside, from two places and over both protocols."""

from __future__ import annotations

import json
import re

NEIGHBOUR = {"role1": "role2", "role2": "role1"}
# Who gets in where, of: the controller, the neighbouring host. Port 8002 is open to no network, 9100 to nobody's word.
WANTED = {22: (True, False), 443: (True, False), 8000: (True, False), 8001: (True, True)}
WANTED |= {8002: (False, False), 9100: (False, False)}

# All at once, for a dropped connection answers nothing and each would be waited for.
PROBE = """
import json, selectors, socket, sys, time
addresses, ports = json.loads(sys.argv[1])
waiting, reached = selectors.DefaultSelector(), []
for address in addresses:
    for port in ports:
        probe = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        probe.setblocking(False)
        probe.connect_ex((address, port))
        waiting.register(probe, selectors.EVENT_WRITE, (address, port))
until = time.monotonic() + 2.5
while waiting.get_map() and time.monotonic() < until:
    for key, _ in waiting.select(until - time.monotonic()):
        if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            reached.append(key.data)
        waiting.unregister(key.fileobj)
print(json.dumps(reached))
"""

# The ICMP and neighbour discovery that a default drop forgets first; the answer to an echo request is type 0 or 129.
PING = """
import socket, struct, sys
for address in sys.argv[1:]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind, protocol, answer, header = (128, 58, 129, 0) if family == socket.AF_INET6 else (8, 1, 0, 20)
    with socket.socket(family, socket.SOCK_RAW, protocol) as probe:
        probe.settimeout(3)
        # The checksum is the one's complement of the sum of all words; for ICMPv6 the kernel writes it.
        probe.sendto(struct.pack("!BBHHH", kind, 0, 0xFFFF - (kind << 8) - 1, 0, 1), (address, 0))
        while probe.recv(2048)[header] != answer:
            pass
"""


def own_addresses(host):
    """IPv4 and IPv6 address of the host under test."""
    name = host.check_output("hostname")
    both = re.findall(rf"^(\S+) {name}$", host.file("/etc/hosts").content_string, re.MULTILINE)
    assert len(both) == 2
    return name, both


def test_who_reaches_what(host, lab):
    name, both = own_addresses(host)
    asked = json.dumps([both, list(WANTED)])
    listening = json.loads(
        host.check_output("python3 -c %s %s", PROBE, json.dumps([["127.0.0.1", "::1"], list(WANTED)]))
    )
    assert len(listening) == 2 * len(WANTED), "what is closed must be closed by the firewall"
    for number, where in enumerate((["run"], ["exec", NEIGHBOUR[name]])):
        reached = {tuple(pair) for pair in json.loads(lab(*where, "python3", "-c", PROBE, asked))}
        assert reached == {(address, port) for address in both for port, allowed in WANTED.items() if allowed[number]}


def test_ping_over_both_protocols(host, lab):
    name, both = own_addresses(host)
    lab("exec", NEIGHBOUR[name], "python3", "-c", PING, *both)


def test_somebody_elses_table_is_untouched(host):
    assert "not ours" in host.check_output("nft list table ip foreign")
    tables = set(host.check_output("nft list tables").splitlines())
    assert tables == {"table ip foreign", "table inet vllm"}


def test_it_outlives_a_reboot_by_its_own_unit(host):
    unit = host.service("onprem-vllm-firewall")
    assert unit.is_enabled
    assert unit.is_running
    host.run_test("nft -c -f /etc/vllm/firewall.nft")
    assert "flush ruleset" not in host.file("/etc/vllm/firewall.nft").content_string


def test_no_guard_is_left(host):
    assert host.check_output("systemctl list-units --all --plain --no-legend 'onprem-vllm-firewall-guard*'") == ""
    assert not host.file("/run/onprem-vllm-firewall").exists
