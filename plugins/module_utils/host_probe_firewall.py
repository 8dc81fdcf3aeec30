# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Firewalls that others put on a host, and which of the plan's ports they would cut.

Every base chain of the kernel's input hook must let a packet through, whichever table it is in. ufw and firewalld end
up there as well (ufw through iptables-nft), so the kernel's own rules answer for all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .host_probe_command import run, text_of

Facts = dict[str, Any]

# The firewall's, and those that keep an instance's port to itself while it warms up (readiness.py of vllm_service).
OWN_TABLE = re.compile(r"vllm(_warming_.+)?")
ACCEPT, CUT, NEXT = "accept", "cut", "next"
# Matches of iptables whose inside nft does not show. With these alone, nobody accepts new connections to a service.
_NOT_FOR_NEW = {"conntrack", "state", "addrtype", "pkttype", "rt"}
_DEEPEST = 16


def firewalls(ports: Iterable[int]) -> Facts:
    """Other people's firewalls.

    Returns:
        ``tables`` by name as ``inet vllm`` (None where nft is missing or may not look), ``programs`` that manage them
        and run (ufw, firewalld), and ``cut``: each of the ports that a ``chain`` would drop.
    """
    status, text, _unused = run("nft", "-j", "list", "ruleset")
    ruleset = parse_ruleset(text) if status == 0 else None
    return {
        "tables": None if ruleset is None else ruleset["tables"],
        "programs": _running_programs(),
        "cut": [
            {"port": port, "chain": chain} for port, chain in (cut_ports(ruleset, ports) if ruleset else {}).items()
        ],
    }


def parse_ruleset(text: str) -> Facts:
    """``nft -j list ruleset`` as tables, base chains of the input hook, rules by chain, and elements of named sets.

    Raises:
        ValueError: the text is no JSON.
    """
    tables: list[str] = []
    hooks: list[Facts] = []
    rules: dict[tuple[str, str, str], list[Facts]] = {}
    sets: dict[tuple[str, str, str], Any] = {}
    for entry in json.loads(text)["nftables"]:
        for kind, item in entry.items():
            if kind == "table":
                tables.append(f"{item['family']} {item['name']}")
            elif kind == "chain" and item.get("hook") == "input" and item.get("type") == "filter":
                hooks.append(item)
            elif kind == "rule":
                rules.setdefault((item["family"], item["table"], item["chain"]), []).append(item)
            elif kind == "set":
                sets[item["family"], item["table"], item["name"]] = item.get("elem")
    return {"tables": tables, "hooks": hooks, "rules": rules, "sets": sets}


def cut_ports(ruleset: Facts, ports: Iterable[int]) -> dict[int, str]:
    """The ports that a new TCP connection from elsewhere over IPv4 cannot reach, each with the chain that drops it.

    Only what is certain counts: a rule that might accept it (by source address, interface, or a match of iptables
    that nft cannot show) opens the port here.
    """
    found: dict[int, str] = {}
    for port in ports:
        for chain in ruleset["hooks"]:
            family, table, name = chain["family"], chain["table"], chain["name"]
            if family not in ("ip", "inet") or (family == "inet" and OWN_TABLE.fullmatch(table)):
                continue
            verdict = _walk(ruleset, (family, table, name), port, 0)
            if verdict == CUT or (verdict == NEXT and chain.get("policy") == "drop"):
                found[port] = f"{family} {table} {name}"
                break
    return found


def _walk(ruleset: Facts, chain: tuple[str, str, str], port: int, depth: int) -> str:
    if depth > _DEEPEST:
        return ACCEPT
    sure_to_come_here = True
    for rule in ruleset["rules"].get(chain, []):
        expressions = rule.get("expr") or []
        matches = list(_matches(ruleset, chain, expressions, port))
        if False in matches:
            continue
        certain = None not in matches and sure_to_come_here
        for expression in expressions:
            if {"accept", "vmap", "queue", "dnat", "redirect", "tproxy"} & expression.keys():
                return ACCEPT
            if {"drop", "reject"} & expression.keys() and certain:
                return CUT
            if "return" in expression:
                if certain:
                    return NEXT
                sure_to_come_here = False
            for jump in {"jump", "goto"} & expression.keys():
                verdict = _walk(ruleset, (*chain[:2], expression[jump]["target"]), port, depth + 1)
                if verdict == ACCEPT or (verdict == CUT and certain):
                    return verdict
                if jump == "goto" and certain:
                    return NEXT
    return NEXT


def _matches(
    ruleset: Facts, chain: tuple[str, str, str], expressions: Sequence[Mapping[str, Any]], port: int
) -> Iterator[bool | None]:
    """For each condition of a rule whether a new TCP packet to the port meets it; None where that is not known."""
    names = {(expression["xt"] or {}).get("name") for expression in expressions if "xt" in expression}
    accepts = any("accept" in expression for expression in expressions)
    for expression in expressions:
        if "match" in expression:
            yield _match(ruleset, chain, expression["match"], port)
        elif "xt" in expression and (expression["xt"] or {}).get("type") != "target":
            yield False if accepts and names <= _NOT_FOR_NEW else None
        elif {"limit", "ct count", "xt"} & expression.keys():
            yield None


def _match(ruleset: Facts, chain: tuple[str, str, str], match: Mapping[str, Any], port: int) -> bool | None:
    left, right = match["left"], match["right"]
    if not isinstance(left, dict) or len(left) != 1:
        return None
    [(kind, detail)] = left.items()
    key = detail.get("key") or (detail.get("protocol"), detail.get("field")) if isinstance(detail, dict) else None
    answers: dict[tuple[str, Any], int | str] = {
        ("payload", ("tcp", "dport")): port,
        ("payload", ("th", "dport")): port,
        ("payload", ("ip", "protocol")): "tcp",
        ("meta", "l4proto"): "tcp",
        ("meta", "nfproto"): "ipv4",
        ("meta", "protocol"): "ip",
        ("ct", "state"): "new",
    }
    if (kind, key) not in answers:
        if kind == "payload" and isinstance(key, tuple) and key[0] in ("udp", "icmp", "icmpv6", "ip6", "sctp", "dccp"):
            return False
        if (kind, key) == ("ct", "status") or ((kind, key) == ("meta", "iifname") and right == "lo"):
            return match.get("op") == "!="
        return None
    if isinstance(right, str) and right.startswith("@"):
        right = ruleset["sets"].get((*chain[:2], right[1:]))
        right = None if right is None else {"set": right}
    contained = _contains(right, answers[kind, key])
    if contained is None or match.get("op") not in ("==", "!=", "in"):
        return None
    return contained != (match["op"] == "!=")


def _contains(right: Any, value: Any) -> bool | None:
    if isinstance(right, dict) and "set" in right:
        members = right["set"] if isinstance(right["set"], list) else [right["set"]]
        answers = [_contains(member, value) for member in members]
        return True if True in answers else None if None in answers else False
    if isinstance(right, list):
        return _contains({"set": right}, value)
    if isinstance(right, dict) and "elem" in right:
        return _contains(right["elem"].get("val"), value)
    if isinstance(right, dict) and "range" in right:
        low, high = right["range"]
        return low <= value <= high if isinstance(low, int) and isinstance(value, int) else None
    return right == value if isinstance(right, (str, int)) else None


def _running_programs() -> list[str]:
    found = ["ufw"] if "ENABLED=yes" in (text_of(Path("/etc/ufw/ufw.conf")) or "").splitlines() else []
    if run("systemctl", "is-active", "--quiet", "firewalld.service")[0] == 0:
        found.append("firewalld")
    return found
