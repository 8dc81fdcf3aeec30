# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The problems of several plans as one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_report import problem_report as report


def problem_report(plans: Iterable[Mapping[str, Any]], part: str = "problems") -> str:
    """All problems, or warnings, of the plans as text; empty where there is none."""
    if isinstance(plans, (str, Mapping)):
        raise AnsibleFilterError("onprem.vllm.problem_report takes a list of plans")
    if part not in ("problems", "warnings"):
        raise AnsibleFilterError(f"onprem.vllm.problem_report reports problems or warnings, not {part!r}")
    return report(plans, part)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"problem_report": problem_report}
