# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Networks: merging keeps the membership of every address, and what would be misread is refused by name."""

from __future__ import annotations

import ipaddress
from itertools import pairwise

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.networks import split_networks
from hypothesis import given
from hypothesis import strategies as st

# Few distinct leading bits, so that overlaps and neighbours are common rather than a rare accident.
V4 = st.builds(
    lambda head, tail, length: ipaddress.ip_network(((10 << 24) | (head << 22) | tail, length), strict=False),
    st.integers(0, 3),
    st.integers(0, 2**22 - 1) | st.integers(0, 40),
    st.integers(0, 32) | st.integers(24, 32),
)
V6 = st.builds(
    lambda head, tail, length: ipaddress.ip_network(((0x20010DB8 << 96) | (head << 94) | tail, length), strict=False),
    st.integers(0, 3),
    st.integers(0, 2**94 - 1) | st.integers(0, 40),
    st.integers(0, 128) | st.integers(120, 128),
)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def written(network: Network, short: bool) -> str:
    """As a person writes it: a single address with or without its prefix."""
    return str(network.network_address) if short and network.prefixlen == network.max_prefixlen else str(network)


def edges(networks: list[Network]) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses on and beside every border: there a wrong merge shows."""
    found = set()
    for network in networks:
        kind = type(network.network_address)
        for value in (int(network.network_address), int(network.broadcast_address)):
            for near in (value - 1, value, value + 1):
                if 0 <= near < 2**network.max_prefixlen:
                    found.add(kind(near))
    return found


@given(st.lists(V4 | V6, max_size=12), st.booleans())
def test_merging_keeps_membership(networks: list[Network], short: bool) -> None:
    v4, v6 = split_networks([written(network, short) for network in networks])
    merged = [ipaddress.ip_network(text) for text in v4 + v6]
    assert all(network.version == 4 for network in merged[: len(v4)])
    assert all(network.version == 6 for network in merged[len(v4) :])
    for address in edges(networks) | edges(merged):
        assert any(address in network for network in networks) == any(address in network for network in merged), address


@given(st.lists(V4, max_size=12) | st.lists(V6, max_size=12))
def test_result_is_sorted_apart_and_stable(networks: list[Network]) -> None:
    v4, v6 = split_networks([str(network) for network in networks])
    merged = [ipaddress.ip_network(text) for text in v4 or v6]
    for before, after in pairwise(merged):
        assert before.broadcast_address < after.network_address
        assert len(list(ipaddress.collapse_addresses([before, after]))) == 2, "neighbours are one network"
    assert split_networks(v4 + v6) == (v4, v6)
    assert split_networks(list(reversed(v4 + v6))) == (v4, v6)


@given(V4 | V6, st.integers(1, 2**32 - 1))
def test_host_bits_are_refused_with_both_readings(network: Network, bits: int) -> None:
    host = bits % network.num_addresses
    entry = f"{network.network_address + host}/{network.prefixlen}"
    if host == 0:
        assert split_networks([entry]) == split_networks([str(network)])
        return
    with pytest.raises(ValueError, match="host bits") as refusal:
        split_networks([entry])
    assert f"write {network} for the network or {network.network_address + host} for" in str(refusal.value)


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ("::ffff:10.0.0.1", "write 10.0.0.1"),
        ("::ffff:10.0.0.0/120", "write 10.0.0.0/24"),
        ("10.0.0.0/255.0.0.0", "prefix length"),
        ("10.0.0.0/33", "write an address or a network"),
        ("10.1/16", "write an address or a network"),
        ("010.0.0.1", "write an address or a network"),
        ("fe80::1%eth0", "write an address or a network"),
        ("0x0a000001", "write an address or a network"),
        ("10.0.0.0/", "prefix length"),
        ("", "write an address or a network"),
        ("gpu1.example", "write an address or a network"),
        (10, "write a string"),
        (None, "write a string"),
    ],
)
def test_what_would_be_misread_is_refused(entry: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        split_networks([entry])  # type: ignore[list-item]
    assert repr(entry) in str(refusal.value)
    assert remedy in str(refusal.value)


def test_every_wrong_entry_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        split_networks(["10.0.0.0/8", "bad", "2001:db8::1/64", "10.0.0.9"])
    assert "'bad'" in str(refusal.value)
    assert "'2001:db8::1/64'" in str(refusal.value)
    assert "10.0.0.0/8'" not in str(refusal.value)


def test_a_string_is_no_list() -> None:
    with pytest.raises(ValueError, match=r"write \[10\.0\.0\.0/8\]"):
        split_networks("10.0.0.0/8")


def test_everything_swallows_the_rest() -> None:
    assert split_networks(["10.0.0.1", "0.0.0.0/0", "::/0", "::1"]) == (["0.0.0.0/0"], ["::/0"])
