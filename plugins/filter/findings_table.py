# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The findings of several hosts as a table for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import table


def findings_table(findings: Iterable[Mapping[str, str]], hosts: int) -> str:
    """Each finding once, with the hosts that have it."""
    if isinstance(findings, (str, Mapping)):
        raise AnsibleFilterError("onprem.vllm.findings_table takes the list that onprem.vllm.diagnosis returns")
    return table([dict(finding) for finding in findings], hosts)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"findings_table": findings_table}
