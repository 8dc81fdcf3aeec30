# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A question to plans, in JMESPath."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_proxy import with_routes
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_report import QueryError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_report import plan_query as ask


def plan_query(plans: Iterable[Mapping[str, Any]], query: str, routes: Mapping[str, Any] | None = None) -> Any:
    """What the JMESPath expression finds in the list of plans; ``routes`` are the proxy's."""
    try:
        # jmespath compares types by identity, and what Ansible hands over is tagged: plain JSON in between.
        return ask(json.loads(json.dumps(with_routes(plans, routes))), str(query))
    except QueryError as error:
        raise AnsibleFilterError(f"onprem.vllm.plan_query: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan_query": plan_query}
