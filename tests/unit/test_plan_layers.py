# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_layers import layer, leaves, merge, merge_all, resolve
from hypothesis import given
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
    for settings in layers:
        expected = naive(expected, settings)
    value, _unused = resolve(merge_all(*(layer(settings, str(index)) for index, settings in enumerate(layers))))
    assert value == expected


def has(settings: Any, path: tuple[str, ...], value: Any) -> bool:
    for key in path:
        if not isinstance(settings, dict) or key not in settings:
            return False
        settings = settings[key]
    return settings == value and type(settings) is type(value)


@given(st.lists(MAPS, min_size=1, max_size=5))
def test_origin_names_the_last_layer_that_set_the_value(layers: list[dict]) -> None:
    value, origins = resolve(merge_all(*(layer(settings, str(index)) for index, settings in enumerate(layers))))
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
