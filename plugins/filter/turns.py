# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""In which turns the instances of one host restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain
from ansible_collections.onprem.vllm.plugins.plugin_utils.turns import turns as put_in_turns


def turns(
    interrupted: object, serving: object, instances: object, host: str, at_a_time: int, together: object
) -> list[list[str]]:
    """Names of instances, a list for each turn."""
    return put_in_turns(
        plain(interrupted), plain(serving), plain(instances), str(host), max(int(at_a_time), 1), plain(together)
    )


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"turns": turns}
