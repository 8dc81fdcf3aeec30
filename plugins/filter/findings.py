# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What keeps a host from being as its plan says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import compare


def findings(plan: Mapping[str, Any], facts: Mapping[str, Any], waived: Iterable[str] = ()) -> list[dict[str, str]]:
    """All findings, errors first."""
    try:
        return compare(plan, facts, waived, time.time())
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise AnsibleFilterError(
            "onprem.vllm.findings takes a plan (filter onprem.vllm.plan) and the facts of the module "
            f"onprem.vllm.host_probe; one of them lacks {error}"
        ) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"findings": findings}
