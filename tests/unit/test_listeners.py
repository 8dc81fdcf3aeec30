# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Listeners are found as the kernel shows them: real sockets in a scratch network namespace, and /proc's own text."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.listeners import (
    Listener,
    decode_address,
    parse_sockets,
    port_holders,
    process_unit,
    unit_of,
)
from hypothesis import given
from hypothesis import strategies as st

# Sockets that one would meet, and what they are; then the module's own view of them.
OPEN_AND_LOOK = """
import json, socket, sys
from ansible_collections.onprem.vllm.plugins.module_utils.listeners import listeners
kept = []
def listen(family, kind, address, port, v6only=False):
    s = socket.socket(family, kind)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6only))
    s.bind((address, port))
    if kind == socket.SOCK_STREAM:
        s.listen()
    kept.append(s)
V4, V6, TCP, UDP = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
listen(V4, TCP, "0.0.0.0", 9100)
listen(V6, TCP, "::", 9100, v6only=True)
listen(V6, TCP, "::", 8080)
listen(V4, TCP, "127.0.0.1", 5432)
listen(V6, TCP, "::1", 5432)
listen(V6, TCP, "::ffff:127.0.0.1", 5433)
listen(V4, TCP, "0.0.0.0", 40000)
listen(V4, UDP, "0.0.0.0", 5353)
listen(V4, UDP, "0.0.0.0", 40001)
listen(V4, TCP, "0.0.0.0", 22)
kept.append(socket.socket(V4, socket.SOCK_RAW, 112))
kept.append(socket.socket(V4, socket.SOCK_RAW, socket.IPPROTO_RAW))
asked = socket.socket(V4, UDP); asked.bind(("0.0.0.0", 5354)); asked.connect(("127.0.0.1", 9)); kept.append(asked)
found = listeners({("tcp", 22)})
print(json.dumps([[x.label, x.addresses, x.processes] for x in found]))
"""


IN_NAMESPACE = 'ip link set lo up && exec "$0" -c "$1"'


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_real_sockets() -> None:
    looked = subprocess.run(
        [
            "unshare",
            "--net",
            "--mount-proc",
            "--fork",
            "--pid",
            "sh",
            "-c",
            IN_NAMESPACE,
            sys.executable,
            OPEN_AND_LOOK,
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ".collections"},
    )
    found = {label: (addresses, processes) for label, addresses, processes in json.loads(looked.stdout)}
    own = found["tcp/9100"][1]
    assert len(own) == 1
    assert own[0].startswith("python")
    assert found == {
        "ip/112": (["0.0.0.0"], own),
        "tcp/8080": (["::"], own),
        "tcp/9100": (["0.0.0.0", "::"], own),
        "tcp/40000": (["0.0.0.0"], own),
        "udp/5353": (["0.0.0.0"], own),
    }


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6))
def test_addresses_as_proc_prints_them(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    words = [address.packed[start : start + 4] for start in range(0, len(address.packed), 4)]
    printed = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    mapped = getattr(address, "ipv4_mapped", None)
    assert decode_address(printed) == (mapped or address)


PROC_NET_TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11111 1 0000 100 0 0 10 0
   1: 0100007F:1538 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 22222 1 0000 100 0 0 10 0
   2: 0B024D0A:0016 01024D0A:B2B6 01 00000000:00000000 02:00000A4C 00000000     0        0 33333 2 0000 20 4 30 10 -1
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="a text of a little-endian machine")
def test_only_what_listens_beyond_loopback() -> None:
    (found,) = parse_sockets(PROC_NET_TCP, "tcp", "0A")
    assert (found.protocol, str(found.address), found.port, found.inode) == ("tcp", "0.0.0.0", 22, 11111)


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/prometheus-node-exporter.service\n", "prometheus-node-exporter.service"),
        ("0::/system.slice/system-listen.slice/listen@9100.service\n", "listen@9100.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/vscode.service\n", "vscode.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "session-3.scope"),
        ("0::/system.slice/docker-4a5b.scope/init\n", "docker-4a5b.scope"),
        ("0::/machine.slice/libpod-1.scope/system.slice/nginx.service\n", "nginx.service"),
        ("1:name=systemd:/system.slice/vllm-glm.service/inner\n0::/\n", "vllm-glm.service"),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_unit_of_a_process(cgroup: str, unit: str) -> None:
    assert unit_of(cgroup) == unit


def test_who_holds_a_port_loopback_included() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        ports = [four.getsockname()[1], six.getsockname()[1]]
        with socket.create_server(("127.0.0.1", 0)) as other:
            found = port_holders(ports)
            assert other.getsockname()[1] not in {entry.port for entry in found}
    assert {entry.port: entry.addresses for entry in found} == {ports[0]: ("127.0.0.1",), ports[1]: ("::1",)}
    assert {entry.pid for entry in found} == {os.getpid()}
    assert all(entry.program for entry in found)
    assert port_holders(ports) == []


def test_the_unit_of_a_process_that_has_ended() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert process_unit(child.pid) is None


def test_a_listener_names_itself() -> None:
    exporter = Listener("tcp", 9100, ("0.0.0.0", "::"), ("node_exporter",), ("node-exporter.service",))
    assert str(exporter) == "tcp/9100 (node_exporter, node-exporter.service) on 0.0.0.0, ::"
    wireguard = Listener("udp", 51820, ("0.0.0.0",), (), ())
    assert "the kernel" in str(wireguard)
