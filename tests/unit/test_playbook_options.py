# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options of playbooks: right ones pass, whatever other variables an inventory has."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.playbook_options import wrong_options

OPTIONS = {"status_format": ["table", "json"], "status_fail": "switch", "status_report": "text"}


@pytest.mark.parametrize(
    ("values", "names", "said"),
    [
        ({"status_format": "json", "status_fail": True, "status_report": 3}, ["status_page", "plan_format"], []),
        ({"status_fail": "No"}, ["status_format_of_mine"], []),
        ({"status_fail": "maybe"}, [], ["status_fail is maybe: write true or false."]),
        ({"status_format": ["json"]}, [], ["status_format is ['json']: write table or json."]),
        ({}, ["status_fial"], ["There is no status_fial: write status_fail."]),
    ],
)
def test_wrong_options(values: dict[str, Any], names: list[str], said: list[str]) -> None:
    assert list(wrong_options(OPTIONS, values, [*names, *values])) == said


def test_every_misspelling_is_told() -> None:
    assert len(list(wrong_options(OPTIONS, {}, ["status_fial", "statusformat", "staus_file", "ansible_host"]))) == 3
