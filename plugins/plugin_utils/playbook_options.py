# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options of a playbook: a misspelt one would do nothing, and a wrong value mean the default, without a word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# status_fial and plan_compared lie above this likeness, status_page and plan_table below.
_LIKE = 0.85
_SWITCH = ("true", "false", "yes", "no", "on", "off", "1", "0")  # what Ansible's bool reads


def wrong_options(
    options: Mapping[str, str | Sequence[str]], values: Mapping[str, Any], names: Iterable[str]
) -> Iterator[str]:
    """What is wrong, a sentence each.

    Args:
        options: each option's choices, or ``switch`` or ``text``.
        values: of those that are set.
        names: of what the command line sets.

    >>> list(wrong_options({"status_fail": "switch"}, {}, ["status_fial", "ansible_host"]))
    ['There is no status_fial: write status_fail.']
    >>> list(wrong_options({"form": ["json", "table"]}, {"form": "jsn"}, ["form"]))
    ['form is jsn: write json or table.']
    """
    for name in names:
        if name not in options and (near := difflib.get_close_matches(name, list(options), 1, _LIKE)):
            yield f"There is no {name}: write {near[0]}."
    for name, value in values.items():
        choices = options[name]
        if choices == "switch":
            choices = _SWITCH[:2] if str(value).lower() not in _SWITCH else ()
        if not isinstance(choices, str) and choices and value not in choices:
            yield f"{name} is {value}: write {' or '.join(choices)}."
