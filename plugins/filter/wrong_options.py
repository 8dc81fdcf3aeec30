# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is wrong with the options of a playbook, -e name=value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.utils.vars import load_extra_vars
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain
from ansible_collections.onprem.vllm.plugins.plugin_utils.playbook_options import wrong_options as wrong
from jinja2 import pass_context
from jinja2.runtime import Context


@pass_context
def wrong_options(context: Context, options: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Sentences; values are those of the task that asks, and what ``-e`` sets may be misspelt."""
    known = plain(dict(options))
    values = {name: plain(context[name]) for name in known if name in context}
    return list(wrong(known, values, [plain(name) for name in load_extra_vars(DataLoader())]))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"wrong_options": wrong_options}
