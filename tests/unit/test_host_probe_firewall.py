# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which ports other people's firewalls cut: captures, and rules of every kind as nft itself lists them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import host_probe_firewall
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe_firewall import cut_ports, parse_ruleset
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent / "fixtures" / "nft"


def cut(name: str, ports: list[int]) -> dict[int, str]:
    return cut_ports(parse_ruleset((FIXTURES / name).read_text(encoding="utf-8")), ports)


def test_rules_that_iptables_nft_wrote() -> None:
    """Captured from nft 1.0.6 after iptables 1.8.9 had set up what ufw does: drop, with a few ports let in.

    22 is accepted, 9000 is open to some. Any may be in the list (multiport) whose inside nft does not show; without
    that rule 80 and 8000 are dropped, for what is accepted by connection state and kind of address is not new.
    """
    ports = [22, 80, 9000, 8000]
    ruleset = parse_ruleset((FIXTURES / "iptables-nft-1.8.9.json").read_text(encoding="utf-8"))
    assert cut_ports(ruleset, ports) == {}
    user = ruleset["rules"]["ip", "filter", "ufw-user-input"]
    user[:] = [rule for rule in user if "multiport" not in str(rule)]
    assert cut_ports(ruleset, ports) == {80: "ip filter INPUT", 8000: "ip filter INPUT"}


def test_rules_in_the_form_of_firewalld() -> None:
    """Captured from nft 1.0.6; the rules have firewalld's form: zones by interface, a reject at the end of each."""
    assert cut("firewalld-form.json", [22, 8000, 8010, 8011, 9100]) == {8011: "inet firewalld filter_INPUT"}


RULES = {
    "policy accept": ("policy accept;", "", False),
    "policy drop": ("policy drop;", "", True),
    "accepted port": ("policy drop;", "tcp dport 8000 accept", False),
    "other port": ("policy drop;", "tcp dport { 22, 443 } accept", True),
    "a range": ("policy drop;", "tcp dport 7000-9000 accept", False),
    "a range beside": ("policy drop;", "tcp dport 9000-9100 accept", True),
    "all but": ("policy drop;", "tcp dport != 22 accept", False),
    "udp": ("policy drop;", "udp dport 8000 accept", True),
    "established": ("policy drop;", "ct state established,related accept", True),
    "new": ("policy drop;", "ct state new tcp dport 8000 accept", False),
    "loopback": ("policy drop;", 'iifname "lo" accept', True),
    "not loopback": ("policy accept;", 'iifname != "lo" tcp dport 8000 drop', True),
    "icmp": ("policy drop;", "meta l4proto icmp accept", True),
    "tcp": ("policy drop;", "meta l4proto tcp accept", False),
    "reject": ("policy accept;", "tcp dport 8000 reject with tcp reset", True),
    "dropped after accepted": ("policy accept;", "tcp dport 8000 accept; drop", False),
    "dropped with a counter": ("policy accept;", "counter drop", True),
    "a set with a name": ("policy drop;", "tcp dport @open accept", False),
    "a set of others": ("policy drop;", "tcp dport @others accept", True),
    "a chain": ("policy drop;", "jump let_in", False),
    "a chain that returns": ("policy drop;", "jump back", True),
    "verdicts by port": ("policy drop;", "tcp dport vmap { 8000 : accept }", False),
    # What decides by who asks is not certain to cut.
    "by address": ("policy drop;", "ip saddr 10.0.0.0/8 accept", False),
    "by rate": ("policy accept;", "tcp dport 8000 limit rate over 10/second drop", False),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
@pytest.mark.parametrize(("policy", "rule", "dropped"), RULES.values(), ids=RULES)
def test_real_rules(policy: str, rule: str, dropped: bool) -> None:
    """The rule is loaded into a scratch namespace, and nft's own listing of it is read."""
    text = f"""
table inet own {{
    set open {{ type inet_service; elements = {{ 8000, 8001 }} }}
    set others {{ type inet_service; flags interval; elements = {{ 22, 9000-9100 }} }}
    chain let_in {{ tcp dport 8000 accept; }}
    chain back {{ return; }}
    chain input {{
        type filter hook input priority 0
        {policy}
        {rule}
    }}
}}
table inet vllm {{
    chain input {{ type filter hook input priority 0; policy drop; }}
}}
table inet vllm_warming_glm/5.2 {{
    chain input {{ type filter hook input priority -10; policy accept; tcp dport 8000 reject with tcp reset; }}
}}
"""
    script = "nft -f - && nft -j list ruleset"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert cut_ports(parse_ruleset(done.stdout), [8000]) == ({8000: "inet own input"} if dropped else {})


def test_a_host_without_nft_and_one_that_answers_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe_firewall, "run", lambda *_words: (127, "", "nft is not installed"))
    assert host_probe_firewall.firewalls([8000]) == {"tables": None, "programs": [], "cut": []}
    with pytest.raises(ValueError, match="Expecting value"):
        parse_ruleset("no JSON")


SIMPLE = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
SIDE = (
    SIMPLE | st.lists(SIMPLE, max_size=2) | st.dictionaries(st.sampled_from(["meta", "payload", "ct", "set"]), SIMPLE)
)


@given(
    st.lists(
        st.builds(lambda left, right: {"match": {"op": "==", "left": left, "right": right}}, SIDE, SIDE), max_size=3
    )
)
def test_a_rule_that_is_not_understood_never_makes_a_port_look_cut(matches: list[dict[str, Any]]) -> None:
    unknown = {"match": {"op": "==", "left": {"x": 1}, "right": 1}}
    ruleset = {
        "hooks": [{"family": "inet", "table": "t", "name": "c", "policy": "accept"}],
        "rules": {("inet", "t", "c"): [{"expr": [*matches, unknown, {"drop": None}]}]},
        "sets": {},
    }
    assert cut_ports(ruleset, [8000]) == {}
