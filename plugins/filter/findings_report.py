# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Findings of a host as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import report


def findings_report(findings: Iterable[Mapping[str, str]], host: str) -> str:
    """Each finding with what was found, what is needed and the remedy."""
    if isinstance(findings, (str, Mapping)):
        raise AnsibleFilterError("onprem.vllm.findings_report takes the list that onprem.vllm.findings returns")
    return report(host, (dict(finding) for finding in findings))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"findings_report": findings_report}
