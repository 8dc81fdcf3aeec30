# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.role_variables import (
    checked,
    default_of,
    known_variables,
    misspelt,
    nearest,
)
from hypothesis import given
from hypothesis import strategies as st


def check(value: Any, **spec: Any) -> tuple[Any, list[dict[str, str]]]:
    problems: list[dict[str, str]] = []
    return checked(value, spec, "x", problems), problems


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("int", 8000, 8000),
        ("int", "8000", 8000),
        ("int", "-900", -900),
        ("float", "0.95", 0.95),
        ("float", 1, 1.0),
        ("bool", "yes", True),
        ("bool", "False", False),
        ("bool", False, False),
        ("str", "0.30", "0.30"),
        ("path", "/models", "/models"),
        ("raw", [1], [1]),
        ("int", None, None),
    ],
)
def test_accepted(kind: str, value: Any, expected: Any) -> None:
    result, problems = check(value, type=kind)
    assert problems == []
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", "8000.5"),
        ("int", 8000.5),
        ("int", True),
        ("int", "²"),
        ("int", []),
        ("float", "much"),
        ("float", True),
        ("bool", 1),
        ("bool", "maybe"),
        ("str", 0.3),
        ("str", 28),
        ("str", True),
        ("str", {"a": 1}),
        ("list", "a,b"),
        ("dict", ["a"]),
    ],
)
def test_refused(kind: str, value: Any) -> None:
    result, problems = check(value, type=kind)
    assert result is None
    assert len(problems) == 1
    assert problems[0]["where"] == "x"


def test_elements_options_and_choices_are_checked_with_their_place() -> None:
    spec = {
        "type": "dict",
        "options": {
            "ports": {"type": "list", "elements": "int"},
            "mode": {"type": "str", "choices": ["stat", "full"]},
            "inner": {
                "type": "dict",
                "each": {"type": "dict", "options": {"a": {"type": "bool", "required": True, "description": "A."}}},
            },
        },
    }
    value = {"ports": [1, "x"], "mode": "stats", "inner": {"one": {"a": "yes"}, "two": {}}, "port": 1}
    result, problems = check(value, **spec)
    assert result["inner"]["one"] == {"a": True}
    assert {found["where"] for found in problems} == {"x.ports[1]", "x.mode", "x.inner.two.a", "x.port"}
    assert any("stat" in found["remedy"] for found in problems if found["where"] == "x.mode")


def test_null_stays_so_that_it_can_remove_a_key() -> None:
    result, problems = check({"a": None, "b": 1}, type="dict", options={"a": {"type": "str"}, "b": {"type": "int"}})
    assert (result, problems) == ({"a": None, "b": 1}, [])


def test_a_secret_s_value_is_not_shown() -> None:
    _unused, problems = check(4711, type="str", no_log=True)
    assert "4711" not in str(problems)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vllm_mirror_ur", "vllm_mirror_url"),
        ("vllm_servce_nofile", "vllm_service_nofile"),
        ("nftables_port", "nftables_ports"),
        ("hf_cache_rot", "hf_cache_root"),
        ("vlm_instances", "vllm_instances"),
        ("vllm_group_override", "vllm_group_overrides"),
    ],
)
def test_a_misspelt_name_is_found_with_the_nearest(name: str, meant: str) -> None:
    [found] = misspelt([name])
    assert found["where"] == name
    assert meant in found["remedy"]


@pytest.mark.parametrize(
    "name", ["site_vllm_mirror_url", "ansible_host", "my_models", "gpu_count", "__vllm_x", "hugging_face_token", "port"]
)
def test_a_name_of_one_s_own_is_left_alone(name: str) -> None:
    assert list(misspelt([name])) == []


def test_no_known_name_is_misspelt() -> None:
    assert list(misspelt(known_variables())) == []


@given(st.text(max_size=20))
def test_any_name_can_be_looked_at(name: str) -> None:
    assert all(set(found) == {"where", "what", "remedy"} for found in misspelt([name]))


def test_defaults_come_from_the_specifications() -> None:
    assert default_of("vllm_service_stop_timeout_s") == 120
    assert default_of("vllm_instances") == {}
    with pytest.raises(KeyError):
        default_of("vllm_nothing")


def test_nearest_names_all_where_none_is_near() -> None:
    assert nearest("zzz", ["alpha", "beta"]) == "known are alpha, beta."
    assert nearest("alpa", ["alpha", "beta"]) == "did you mean alpha?"
    assert nearest("x", []) == "none is known."
