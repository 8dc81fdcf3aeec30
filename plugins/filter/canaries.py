# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The first instances of each model that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.onprem.vllm.plugins.plugin_utils.canaries import canaries
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"canaries": lambda interrupted, plans, host: canaries(plain(interrupted), plain(plans), str(host))}
