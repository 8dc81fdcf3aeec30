# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether an inventory's hosts are in groups that the collection knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_groups import grouped as look


def grouped(groups: Mapping[str, Sequence[str]], needed: bool = True) -> dict[str, Any]:
    """Problems and warnings, in a plan's form."""
    if not isinstance(groups, Mapping):
        raise AnsibleFilterError(f"onprem.vllm.grouped takes groups, not {type(groups).__name__}")
    return look(plain(groups), needed=bool(needed))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"grouped": grouped}
