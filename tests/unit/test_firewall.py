# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The rule set: the role's own template, loaded by the real nft into a scratch network namespace."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.filter.nft_elements import FilterModule
from ansible_collections.onprem.vllm.plugins.module_utils import firewall
from ansible_collections.onprem.vllm.plugins.module_utils.firewall import FirewallError, Wanted
from ansible_collections.onprem.vllm.plugins.module_utils.firewall_rules import (
    SshConnection,
    accepted,
    cut_listeners,
    cut_problem,
    drops_by_default,
    lockout_problems,
    parse_ssh_connection,
    running_ssh_connection,
)
from ansible_collections.onprem.vllm.plugins.module_utils.listeners import Listener
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment, StrictUndefined

ROLE = Path(__file__).parents[2] / "roles" / "nftables"
root = pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
nft_elements = FilterModule().filters()["nft_elements"]


ENVIRONMENT = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
ENVIRONMENT.filters["onprem.vllm.nft_elements"] = nft_elements


def rendered(ports: list[dict[str, object]], ssh_networks: list[str], extra: list[str]) -> str:
    """What the role hands to the module: its own template and its own list of all ports."""
    variables = {"nftables_ports": ports, "nftables_ssh_networks": ssh_networks, "nftables_extra_rules": extra}
    role_vars = yaml.safe_load((ROLE / "vars" / "main.yml").read_text(encoding="utf-8"))
    every_port = ENVIRONMENT.compile_expression(role_vars["__nftables_all_ports"].strip().strip("{}"))(**variables)
    template = (ROLE / "templates" / "vllm.nft.j2").read_text(encoding="utf-8")
    return ENVIRONMENT.from_string(template).render(**variables, __nftables_all_ports=every_port)


def wanted(rules: str, ssh_port: int | None = 22) -> Wanted:
    return Wanted(rules, "unit", "drop-in", ssh_port, ["0.0.0.0/0"])


def network(version: int, bits: int) -> st.SearchStrategy[str]:
    kind = ipaddress.IPv4Network if version == 4 else ipaddress.IPv6Network
    return st.builds(
        lambda value, length: str(kind((value, length), strict=False)),
        st.integers(0, 2**bits - 1),
        st.integers(0, bits),
    ).filter(lambda text: ipaddress.ip_network(text).network_address not in MAPPED if ":" in text else True)


MAPPED = ipaddress.ip_network("::ffff:0:0/96")
NETWORKS = st.lists(network(4, 32) | network(6, 128), max_size=6)
PURPOSE = st.text(max_size=200)  # whatever an operator names an instance or a reason
PORTS = st.lists(
    st.fixed_dictionaries(
        {"port": st.integers(1, 65535), "protocol": st.sampled_from(["tcp", "udp"]), "networks": NETWORKS},
        optional={"for": PURPOSE},
    ),
    max_size=5,
)


@root
@settings(max_examples=40)
@given(PORTS, NETWORKS, st.integers(1, 65535))
def test_whatever_is_wanted_the_kernel_takes_it(
    ports: list[dict[str, object]], ssh_networks: list[str], ssh_port: int
) -> None:
    """The text loads, reads back with each network it had, and loads again as read back (that is what undo does)."""
    text = firewall._text(wanted(rendered(ports, ssh_networks, []), ssh_port), None)
    listing = firewall._canonical(text)
    assert firewall._canonical(f"{firewall.DROP_TABLE}{listing}") == listing
    assert drops_by_default(listing)
    open_ports = {(str(port["protocol"]), port["port"]) for port in ports if port["networks"]}
    open_ports |= {("tcp", ssh_port)} if ssh_networks else set()
    always = {("udp", 68), ("udp", 546), ("ip", 1), ("ip", 58)}
    assert accepted(listing) == open_ports | always


@root
def test_networks_arrive_in_the_kernel() -> None:
    ports: list[dict[str, object]] = [
        {"port": 8000, "networks": ["10.0.0.0/25", "10.0.0.128/25", "192.0.2.7", "2001:db8::/32"], "for": "instance a"},
        {"port": 8000, "networks": ["10.0.1.0/24"], "for": 'instance "b"'},
    ]
    listing = firewall._canonical(firewall._text(wanted(rendered(ports, ["0.0.0.0/0", "::/0"], [])), None))
    elements = re.search(r"set tcp_8000_ipv4 \{.*?elements = \{(.*?)\}", listing, re.DOTALL)
    assert elements is not None
    assert elements[1].replace(",", " ").split() == ["10.0.0.0/23", "192.0.2.7"]
    assert """tcp dport 8000 ip saddr @tcp_8000_ipv4 accept comment "instance a, instance 'b'\"""" in listing
    assert "elements = { 0.0.0.0/0 }" in listing
    assert "elements = { ::/0 }" in listing


@root
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("table inet vllm { }\nflush ruleset\ntable inet vllm { }", "beyond the table inet vllm"),
        ("table inet vllm { }\ntable ip other { }", "beyond the table inet vllm"),
        ("table inet vllm { chain input { tcp dport nonsense accept } }", "nft refuses"),
        ("table inet vllm { chain input { accept }", "nft refuses"),
        ("", "nft refuses|beyond"),
    ],
)
def test_what_reaches_beyond_or_does_not_load_is_refused(rules: str, message: str) -> None:
    with pytest.raises(FirewallError, match=message):
        firewall._canonical(firewall._text(wanted(rules), None) if rules else "")


@root
def test_extra_rules_are_understood() -> None:
    listing = firewall._canonical(
        firewall._text(
            wanted(
                rendered(
                    [],
                    [],
                    [
                        "tcp dport { 9100, 9400-9402 } ip saddr 10.0.0.0/8 accept",
                        "meta l4proto 112 accept",
                        "meta l4proto { tcp, udp } th dport 53 accept",
                        "tcp dport 7000 drop",
                        'ip saddr 10.9.9.9 accept comment "tcp dport 7001 accept"',
                    ],
                )
            ),
            None,
        )
    )
    found = accepted(listing)
    assert {("tcp", port) for port in (9100, 9400, 9401, 9402, 53)} | {("udp", 53), ("ip", 112)} <= found
    assert not {("tcp", 7000), ("tcp", 7001), ("ip", 6), ("ip", 17)} & found


EXPORTER = Listener("tcp", 9100, ("::",), ("node_exporter",), ("node-exporter.service",))
INSTANCE = Listener("tcp", 8001, ("0.0.0.0",), ("vllm",), ("vllm-glm.service",))
SSH = Listener("tcp", 22, ("0.0.0.0", "::"), ("sshd",), ("ssh.service",))
RULES = "chain input { type filter hook input priority filter; policy drop;\n tcp dport 22 accept\n}"


def test_a_listener_is_cut_by_the_change_or_was_before() -> None:
    everyone = [EXPORTER, INSTANCE, SSH]
    assert cut_listeners(everyone, RULES, None) == ([EXPORTER], []), "an own instance's ports are the plan's business"
    assert cut_listeners(everyone, RULES, RULES) == ([], [EXPORTER])
    before = RULES.replace("22", "{ 22, 9100 }")
    assert cut_listeners(everyone, RULES, before) == ([EXPORTER], [])
    open_before = RULES.replace("policy drop", "policy accept")
    assert cut_listeners(everyone, RULES, open_before) == ([EXPORTER], [])
    both = Listener("tcp", 8001, ("0.0.0.0",), ("vllm", "x"), ("vllm-glm.service", "x.service"))
    assert cut_listeners([both], RULES, None) == ([both], []), "a port shared with somebody else is theirs too"


def test_a_cut_is_told_with_both_ways_out() -> None:
    text = cut_problem(EXPORTER)
    for part in ("tcp/9100 (node_exporter, node-exporter.service)", "'tcp dport 9100 accept'", "adding tcp/9100 to"):
        assert part in text
    assert "'meta l4proto 112 accept'" in cut_problem(Listener("ip", 112, ("0.0.0.0",), ("keepalived",), ()))


@pytest.mark.parametrize(
    ("client", "server_port", "networks", "told"),
    [
        ("10.77.0.1", 22, ["10.77.0.0/24"], []),
        ("2001:db8::5", 22, ["10.77.0.0/24", "2001:db8::/64"], []),
        ("10.77.1.1", 22, ["10.77.0.0/24"], ["10.77.1.1 or its network"]),
        ("2001:db8::5", 22, ["0.0.0.0/0"], ["2001:db8::5 or its network"]),
        ("10.77.0.1", 2222, ["10.77.0.0/24"], ["set nftables_ssh_port to 2222"]),
        ("10.77.1.1", 2222, [], ["set nftables_ssh_port to 2222", "from nowhere only"]),
    ],
)
def test_the_running_connection_must_fit(client: str, server_port: int, networks: list[str], told: list[str]) -> None:
    problems = lockout_problems(SshConnection(client, 50000, "10.77.0.11", server_port), 22, networks)
    assert len(problems) == len(told)
    for problem, part in zip(problems, told, strict=True):
        assert part in problem


def test_no_ssh_no_lockout() -> None:
    assert lockout_problems(None, 22, []) == []


def test_the_connection_is_found_where_sudo_dropped_it() -> None:
    """An ancestor has SSH_CONNECTION, the process itself has not, as under sudo."""
    look = (
        "from ansible_collections.onprem.vllm.plugins.module_utils.firewall_rules import running_ssh_connection;"
        "print(running_ssh_connection())"
    )
    script = f'env -u SSH_CONNECTION PYTHONPATH=.collections python -c "{look}"; true'
    found = subprocess.run(
        ["sh", "-c", script],
        env={**os.environ, "SSH_CONNECTION": "fe80::1%eth0 50022 fe80::2%eth0 2222"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(SshConnection("fe80::1", 50022, "fe80::2", 2222))


@pytest.mark.parametrize("text", ["", "10.0.0.1 1 10.0.0.2", "a b c d"])
def test_no_connection_in_other_words(text: str) -> None:
    assert parse_ssh_connection(text) is None


def test_a_process_without_ssh_has_no_connection(tmp_path: Path) -> None:
    for pid, parent in ((40, 30), (30, 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(b"HOME=/root\0")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (odd) name) S {parent} 1 1")
    assert running_ssh_connection(40, tmp_path) is None
    (tmp_path / "30" / "environ").write_bytes(b"A=1\0SSH_CONNECTION=10.0.0.1 5 10.0.0.2 22\0")
    assert running_ssh_connection(40, tmp_path) == SshConnection("10.0.0.1", 5, "10.0.0.2", 22)


def test_every_wrong_port_is_named_at_once() -> None:
    with pytest.raises(AnsibleFilterError) as refusal:
        nft_elements(
            [
                {"port": 0, "networks": [], "for": "instance zero"},
                {"port": "http", "networks": []},
                {"port": 80, "protocol": "icmp", "networks": []},
                {"port": 81, "networks": ["10.0.0.5/24"], "for": "instance bits"},
                {"port": 82, "networks": "10.0.0.0/24", "for": "instance text"},
            ]
        )
    for part in (
        "instance zero",
        "tcp/http",
        "icmp/80",
        "tcp/81 (instance bits): '10.0.0.5/24' has host",
        "instance text",
    ):
        assert part in str(refusal.value)


def test_what_ansible_hands_over_keeps_its_networks() -> None:
    """Its lazy lists answer ``+=`` with a new list: SSH once ended up open to nobody."""
    variables = {"nets": ["10.0.1.0/24"], "ports": [{"port": 80, "networks": "{{ nets + ['10.0.0.0/24'] }}"}] * 2}
    shown = subprocess.run(
        [
            *("ansible", "localhost", "-i", "localhost,", "-c", "local", "-e", json.dumps(variables)),
            *("-m", "ansible.builtin.debug", "-a", "msg={{ ports | onprem.vllm.nft_elements }}"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "10.0.0.0/23" in shown.stdout
