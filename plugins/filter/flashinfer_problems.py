# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the FlashInfer packages of releases belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.flashinfer_set import planned_problems


def flashinfer_problems(releases: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each thing that is wrong."""
    if isinstance(releases, (str, Mapping)):
        raise AnsibleFilterError("onprem.vllm.flashinfer_problems takes the list plan.releases")
    try:
        found = [problem for release in releases for problem in planned_problems(release)]
    except (KeyError, TypeError) as error:
        raise AnsibleFilterError(
            f"onprem.vllm.flashinfer_problems takes plan.releases; a release lacks {error}"
        ) from error
    return [f"{one['where']}: {one['what']}. {one['remedy']}" for one in found]


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"flashinfer_problems": flashinfer_problems}
