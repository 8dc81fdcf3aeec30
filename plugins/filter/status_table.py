# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The state of all instances as a table for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.status_report import status_table as table


def status_table(hosts: Mapping[str, Mapping[str, Any] | None]) -> str:
    """One line for each instance, and below it what is to be known about it."""
    if not isinstance(hosts, Mapping):
        raise AnsibleFilterError("onprem.vllm.status_table takes what instance_info returned, by host")
    return table(hosts)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"status_table": status_table}
