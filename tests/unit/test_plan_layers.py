# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_layers import (
    Layer,
    layer,
    leaves,
    merge,
    merge_all,
    resolve,
)
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import plan
from hypothesis import given, settings
from hypothesis import strategies as st

# Few keys and shallow trees, so that layers meet often: in the same key, a map over a scalar, a null over a map.
KEYS = st.sampled_from("abc")
SETTINGS = st.recursive(
    st.none() | st.integers(0, 3) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
MAPS = st.dictionaries(KEYS, SETTINGS, max_size=3)


def naive(lower: Any, upper: Any) -> Any:
    """The rule as design.md words it, for two layers of which the lower one is complete."""
    if not isinstance(upper, dict):
        return upper
    result = dict(lower) if isinstance(lower, dict) else {}
    for key, value in upper.items():
        merged = naive(result.get(key), value)
        if merged is None:
            result.pop(key, None)
        else:
            result[key] = merged
    return result


@given(MAPS, MAPS, MAPS)
def test_merge_is_associative(a: dict, b: dict, c: dict) -> None:
    x, y, z = layer(a, "a"), layer(b, "b"), layer(c, "c")
    assert resolve(merge(merge(x, y), z)) == resolve(merge(x, merge(y, z)))


@given(st.lists(MAPS, max_size=5))
def test_merge_applies_one_layer_after_the_other(layers: list[dict]) -> None:
    expected: dict = {}
    for one in layers:
        expected = naive(expected, one)
    value, _unused = resolve(merge_all(*(layer(one, str(index)) for index, one in enumerate(layers))))
    assert value == expected


def has(settings: Any, path: tuple[str, ...], value: Any) -> bool:
    for key in path:
        if not isinstance(settings, dict) or key not in settings:
            return False
        settings = settings[key]
    return settings == value and type(settings) is type(value)


@given(st.lists(MAPS, min_size=1, max_size=5))
def test_origin_names_the_last_layer_that_set_the_value(layers: list[dict]) -> None:
    value, origins = resolve(merge_all(*(layer(one, str(index)) for index, one in enumerate(layers))))
    assert set(origins) == {path for path, _unused in leaves(value) if path}
    for path, leaf in leaves(value):
        if not path or leaf == {}:
            continue
        index = int(origins[path])
        assert has(layers[index], path, leaf)
        # Every layer above leaves the path alone.
        for above in layers[index + 1 :]:
            node: Any = above
            for key in path:
                if not isinstance(node, dict) or key not in node:
                    node = {}
                    break
                node = node[key]
            assert node == {}


def bracketed(layers: list[Layer], cuts: list[int]) -> Layer:
    """The layers merged in an order that ``cuts`` decides: each picks where a group is split in two."""
    if len(layers) == 1:
        return layers[0]
    cut = 1 + (cuts[0] if cuts else 0) % (len(layers) - 1)
    return merge(bracketed(layers[:cut], cuts[1:]), bracketed(layers[cut:], cuts[2:]))


@given(st.lists(MAPS, min_size=1, max_size=7), st.lists(st.integers(0, 6), max_size=14))
def test_any_order_of_merging_gives_the_same_values_and_origins(layers: list[dict], cuts: list[int]) -> None:
    named = [layer(one, str(index)) for index, one in enumerate(layers)]
    assert resolve(bracketed(named, cuts)) == resolve(merge_all(*named))


@given(MAPS)
def test_a_layer_that_says_nothing_changes_nothing(some: dict) -> None:
    one, nothing = layer(some, "one"), layer({}, "nothing")
    assert resolve(merge(one, nothing)) == resolve(merge(nothing, one)) == resolve(one)


@given(MAPS)
def test_a_layer_twice_is_a_layer_once(some: dict) -> None:
    one = layer(some, "one")
    assert resolve(merge(one, one)) == resolve(one)


@given(st.lists(MAPS, min_size=1, max_size=4), st.data())
def test_null_removes_its_key_with_all_below_and_nothing_else(layers: list[dict], data: st.DataObject) -> None:
    lower = merge_all(*(layer(one, str(index)) for index, one in enumerate(layers)))
    value, origins = resolve(lower)
    paths = [path[:length] for path in origins for length in range(1, len(path) + 1)]
    if not paths:
        return
    gone = data.draw(st.sampled_from(paths))
    upper: Any = None
    for key in reversed(gone):
        upper = {key: upper}
    left, left_origins = resolve(merge(lower, layer(upper, "upper")))

    def pruned(tree: Any, path: tuple[str, ...]) -> Any:
        rest = {key: child for key, child in tree.items() if key != path[0]}
        return rest if len(path) == 1 else {**tree, path[0]: pruned(tree[path[0]], path[1:])}

    assert left == pruned(value, gone)
    kept = {path: origin for path, origin in origins.items() if path[: len(gone)] != gone}
    # A map of which nothing is left is a leaf of its own.
    assert {path: left_origins[path] for path in kept} == kept
    assert all(path in kept or path == gone[: len(path)] for path in left_origins)
    # What a higher layer writes there begins anew: nothing of what was removed comes back.
    again, again_origins = resolve(merge_all(lower, layer(upper, "upper"), layer(_at(gone, {"z": 9}), "again")))
    assert _get(again, gone) == {"z": 9}
    assert again_origins[(*gone, "z")] == "again"


def _at(path: tuple[str, ...], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


# The same through a whole plan: flags that any number suits, and null.
FLAGS = {flag: st.none() | st.integers(1, 9) for flag in ("seed", "stream-interval", "max-num-seqs", "max-loras")}
SERVE = st.fixed_dictionaries({}, optional=FLAGS)


@settings(max_examples=60)
@given(SERVE, SERVE, SERVE, SERVE)
def test_a_plan_has_the_highest_layer_s_value_and_says_whose_it_is(
    profile: dict, group: dict, host: dict, own: dict
) -> None:
    made = plan(
        vllm_profiles={"ours": {"accelerator": "cpu", "model": "tiny-qwen3", "serve": profile}},
        vllm_group_overrides={"serve": group},
        vllm_host_overrides={"serve": host},
        vllm_instances={"glm": {"profile": "ours", "port": 8000, "serve": own}},
    )
    assert made["problems"] == []
    serve = made["instances"][0]["serve"]
    named = [("vllm_profiles.ours", profile), ("vllm_group_overrides", group), ("vllm_host_overrides", host)]
    for flag in FLAGS:
        said = [(origin, layer_[flag]) for origin, layer_ in [*named, ("instance glm", own)] if flag in layer_]
        origin, value = said[-1] if said else ("", None)
        assert serve.get(flag) == value
        assert (flag in serve) == (value is not None)
        assert made["origins"].get(f"instances.glm.serve.{flag}") == (origin if value is not None else None)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([{"a": {"x": 1, "y": 1}}, {"a": {"y": 2}}], {"a": {"x": 1, "y": 2}}),
        ([{"a": [1, 2]}, {"a": [3]}], {"a": [3]}),
        ([{"a": {"x": 1}}, {"a": {"x": None}}], {"a": {}}),
        ([{"a": {"x": 1}}, {"a": None}], {}),
        ([{"a": {"x": 1}}, {"a": None}, {"a": {"y": 2}}], {"a": {"y": 2}}),
        ([{"a": 1}, {"a": {"y": 2}}], {"a": {"y": 2}}),
        ([{"a": False}, {"a": 0}], {"a": 0}),
    ],
)
def test_merge_by_example(layers: list[dict], expected: dict) -> None:
    assert resolve(merge_all(*(layer(settings, "x") for settings in layers)))[0] == expected
