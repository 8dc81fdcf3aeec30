# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The findings of several hosts, each with its host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import diagnose
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain


def diagnosis(plans: Mapping[str, Mapping[str, Any]], hostvars: Mapping[str, Any]) -> list[dict[str, str]]:
    """What is wrong with each host: its inventory, its connection, and its facts against its plan."""
    now = time.time()
    found: list[dict[str, str]] = []
    for host, plan in plans.items():
        variables = hostvars[host]
        probe = plain(variables.get("preflight_probe") or {})
        waived = plain(variables.get("preflight_waived") or [])
        try:
            found += [{"host": str(host), **finding} for finding in diagnose(plain(plan), probe, waived, now)]
        except (KeyError, TypeError) as error:
            raise AnsibleFilterError(
                "onprem.vllm.diagnosis takes plans by host (filter onprem.vllm.plans) and hostvars, in which "
                f"preflight_probe is what the role preflight registered; of {host} one lacks {error}"
            ) from error
    return found


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"diagnosis": diagnosis}
