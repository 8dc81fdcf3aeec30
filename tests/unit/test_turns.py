# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""In which turns the instances of one host restart."""

from __future__ import annotations

from ansible_collections.onprem.vllm.plugins.plugin_utils.turns import turns
from hypothesis import given
from hypothesis import strategies as st

PLAN = [{"name": name, "served_model_name": name[0]} for name in ("a1", "a2", "a3", "b1", "b2", "c1")]


def serving(*names: str) -> list[str]:
    return [f"h-{name}" for name in names]


def test_instances_of_one_model_go_after_each_other_and_of_several_beside_each_other() -> None:
    everything = [one["name"] for one in PLAN]
    assert turns(everything, serving(*everything), PLAN, "h", 1, []) == [["a1", "b1", "c1"], ["a2", "b2"], ["a3"]]
    assert turns(everything, serving(*everything), PLAN, "h", 2, []) == [["a1", "a2", "b1", "b2", "c1"], ["a3"]]


def test_what_gets_no_requests_goes_at_once_before_what_gets_some() -> None:
    assert turns(["a1", "a2", "a3", "b1"], serving("a1", "b1"), PLAN, "h", 1, []) == [["a2", "a3", "b1"], ["a1"]]


def test_what_is_removed_goes_last_and_alone_and_what_has_no_turn_of_its_own_with_all() -> None:
    """The plan does not say whether it served the others' model."""
    assert turns(["old", "a1", "a2"], serving("a1", "a2", "old"), PLAN, "h", 1, []) == [["a1"], ["a2"], ["old"]]
    assert turns(["old"], serving("old"), PLAN, "h", 1, []) == [["old"]]
    assert turns(["old", "a1", "a2"], serving("a1", "a2", "old"), PLAN, "h", 1, ["old"]) == [["old", "a1", "a2"]]


def test_without_a_restart_there_is_one_turn_for_all_that_is_none() -> None:
    assert turns([], [], PLAN, "h", 1, []) == [[]]


NAMES = [str(one["name"]) for one in PLAN]


@given(st.lists(st.sampled_from([*NAMES, "old"]), unique=True), st.sets(st.sampled_from(NAMES)), st.integers(1, 4))
def test_each_goes_once_and_of_no_model_more_than_may_be(going: list[str], up: set[str], at_a_time: int) -> None:
    found = turns(going, serving(*up), PLAN, "h", at_a_time, [])
    assert sorted(name for turn in found for name in turn) == sorted(going)
    assert all(found) or found == [[]]
    for turn in found:
        for model in "abc":
            assert sum(name in up and name[0] == model for name in turn) <= at_a_time
