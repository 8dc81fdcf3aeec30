# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Environment files by systemd's own rules, read here by a second reading of them; molecule asks systemd itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible.template import Templar, trust_as_template
from ansible_collections.onprem.vllm.plugins.filter.environment_file import FilterModule
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_environment import read_environment
from ansible_collections.onprem.vllm.plugins.plugin_utils.environment_file import EnvironmentRefused, environment_file
from hypothesis import given, settings
from hypothesis import strategies as st


def as_systemd(text: str) -> dict[str, str]:
    """parse_env_file() of systemd 252, state by state (src/basic/env-file.c), and the checks after it."""
    found: dict[str, str] = {}
    state, key, value, blanks = "before key", "", "", 0
    for one in text + "\n":
        if state == "before key":
            if one in "#;":
                state = "comment"
            elif one not in " \t\n\r":
                state, key = "key", one
        elif state == "key":
            if one in "\n\r":
                state = "before key"
            elif one == "=":
                state, value = "before value", ""
            else:
                key += one
        elif state == "before value":
            if one in "\n\r":
                state = "before key"
                found[key.strip()] = value
            elif one == "'":
                state = "single"
            elif one == '"':
                state = "double"
            elif one == "\\":
                state = "escape"
            elif one not in " \t":
                state, value, blanks = "value", value + one, 0
        elif state == "value":
            if one in "\n\r":
                state = "before key"
                found[key.strip()] = value[: len(value) - blanks]
            elif one == "\\":
                state, blanks = "escape", 0
            else:
                blanks = blanks + 1 if one in " \t" else 0
                value += one
        elif state == "escape":
            state = "value"
            value += "" if one in "\n\r" else one
        elif state == "single":
            if one == "'":
                state = "before value"
            else:
                value += one
        elif state == "double":
            if one == '"':
                state = "before value"
            elif one == "\\":
                state = "double escape"
            else:
                value += one
        elif state == "double escape":
            state = "double"
            value += one if one in '"\\`$' else "" if one == "\n" else f"\\{one}"
        elif state == "comment":
            state = "comment escape" if one == "\\" else "before key" if one in "\n\r" else state
        else:
            state = "comment"
    assert state == "before key", f"ended in {state}"
    return found


# All that systemd passes on: no control characters but tab and newline, no surrogates, no noncharacters.
PASSED = st.text(
    st.characters(exclude_categories=["Cs"]).filter(
        lambda one: (
            (ord(one) >= 0x20 or one in "\t\n")
            and ord(one) != 0x7F
            and not 0xFDD0 <= ord(one) <= 0xFDEF
            and ord(one) & 0xFFFE != 0xFFFE
        )
    ),
    max_size=30,
)
MARKS = st.text(st.sampled_from("\"'\\$`%#; =\n\tab"), max_size=12)
NAMES = st.from_regex(re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,20}\Z", re.ASCII), fullmatch=True)


@settings(max_examples=300)
@given(st.dictionaries(NAMES, st.one_of(PASSED, MARKS), max_size=6))
def test_every_value_is_read_as_it_was_given(variables: dict[str, str]) -> None:
    text = environment_file(variables)
    assert as_systemd(text) == variables
    assert read_environment(text) == variables


def read_back(value: str) -> dict[str, str] | str:
    """What a value is after both readings, or why it is refused."""
    try:
        return as_systemd(environment_file({"NAME": value}))
    except EnvironmentRefused as refused:
        return str(refused)


@settings(max_examples=200)
@given(st.text(st.characters(), max_size=12))
def test_a_value_is_passed_on_or_refused_and_never_told(value: str) -> None:
    came_out = read_back(value)
    assert came_out == {"NAME": value} or re.search(r"holds .*U\+[0-9A-F]{4}", str(came_out))


def test_a_reading_with_another_rule_would_be_noticed() -> None:
    assert as_systemd("A=\"x\\ny\" 'z'\nB=a\\\n b # c  \n# d\n") == {"A": "x\\nyz", "B": "a b # c"}


@pytest.mark.parametrize("value", ["a\0b", "a\rb", "\x1b[0m", "\x7f", "\ufdd0", "\U0001ffff", "\ud800", "x" * 131072])
def test_what_systemd_or_linux_would_drop_is_refused_by_name_without_its_value(value: str) -> None:
    with pytest.raises(EnvironmentRefused, match="The value of TOKEN") as refused:
        environment_file({"TOKEN": f"s3cr3t{value}"})
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "É", "A\n"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(EnvironmentRefused, match="no name of an environment variable"):
        environment_file({name: "x"})


def test_the_longest_value_that_linux_takes_is_written() -> None:
    assert len(as_systemd(environment_file({"A": "x" * 131069}))["A"]) == 131069


@pytest.mark.parametrize("value", [True, None, ["a"], {"a": 1}])
def test_values_that_programs_write_in_different_ways_are_refused(value: Any) -> None:
    with pytest.raises(EnvironmentRefused, match="write the very text"):
        environment_file({"A": value})


def test_numbers_are_text_and_names_come_in_order() -> None:
    assert environment_file({"B": 0.5, "A": 1}) == 'A="1"\nB="0.5"\n'


def test_the_filter_takes_what_templating_hands_over() -> None:
    templar = Templar(variables={"x": "a$b", "variables": {"A": trust_as_template("{{ x }}")}})
    lazy = templar.template(trust_as_template("{{ variables }}"))
    environment = FilterModule().filters()["environment_file"]
    assert environment(lazy) == 'A="a\\$b"\n'
    with pytest.raises(AnsibleFilterError, match="must be a mapping"):
        environment(["A=1"])
