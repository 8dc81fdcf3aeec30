# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ports with the networks that may reach them -> the elements of their nftables sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ansible.errors import AnsibleFilterError

from ..plugin_utils.networks import PortElements, port_elements


def nft_elements(ports: Sequence[Mapping[str, object]]) -> list[PortElements]:
    if isinstance(ports, str | Mapping) or not isinstance(ports, Sequence):
        raise AnsibleFilterError(f"nft_elements takes a list of ports, not {type(ports).__name__}")
    try:
        return port_elements(ports)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., object]]:
        return {"nft_elements": nft_elements}
