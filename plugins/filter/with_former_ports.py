# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which ports a firewall opens while instances change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.onprem.vllm.plugins.plugin_utils.firewall_ports import with_former_ports
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"with_former_ports": lambda planned, instances: with_former_ports(plain(planned), plain(instances))}
