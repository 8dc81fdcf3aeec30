# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every number, size, path and account of the inventory has a range, and the plan refuses what lies outside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.cache_dirs import KINDS
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import inventory_spec, role_spec
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_conflicts import CACHES
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_ranges import number_range, ranges, size_bytes
from ansible_collections.onprem.vllm.plugins.plugin_utils.role_variables import (
    checked,
    default_of,
    known_variables,
)
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import MIRROR, TINY, instance, plan
from hypothesis import given
from hypothesis import strategies as st

SPEC = ranges()
SYSTEM = SPEC["system"]
RULED = {**SPEC["numbers"], **SPEC["sizes"], **SPEC["texts"], **SPEC["paths"], **{key: {} for key in SPEC["accounts"]}}


def scalars(named: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every scalar that the inventory can hold, as the ranges name it, with its type."""
    for key, option in named.items():
        path = f"{prefix}{key}"
        kind = option.get("type", "str")
        if kind == "list":
            path, kind = f"{path}.*", option.get("elements", "raw")
        if option.get("options"):
            yield from scalars(option["options"], f"{path}.")
        elif option.get("each"):
            yield from scalars({"*": option["each"]}, f"{path}.")
        else:
            yield path, kind


SCALARS = dict(scalars({**role_spec(), **inventory_spec()}))


def test_every_number_and_path_has_a_range_and_no_range_is_for_nothing() -> None:
    assert set(SPEC["numbers"]) == {path for path, kind in SCALARS.items() if kind in ("int", "float")}
    paths = {path for path, kind in SCALARS.items() if kind == "path"}
    assert set(SPEC["paths"]) == paths | {"hf_cache_share", "hf_cache_models.*.path", "wheel_mirror_bundle"}
    assert set(SPEC["sizes"]) == {path for path in SCALARS if path.endswith(("memory_max", "memory_high"))}
    # What ends like an account is one, or a list of packages' names and keys.
    assert set(SPEC["accounts"]) == {path for path in SCALARS if path.endswith(("_user", "_group", "_owner"))}
    assert len(RULED) >= 65


def test_the_range_of_a_unit_s_variable_says_that_unit() -> None:
    units = {"_s": "s", "_mib": "MiB", "_gib": "GiB", "_days": "days"}
    for name, rule in SPEC["numbers"].items():
        for ending, unit in units.items():
            assert not name.endswith(ending) or rule["unit"] == unit, name


@pytest.mark.parametrize("name", sorted(name for name in RULED if "." not in name))
def test_defaults_lie_within_their_ranges(name: str) -> None:
    problems: list[dict[str, str]] = []
    checked(default_of(name), known_variables()[name], name, problems)
    assert problems == []


def kind_of(name: str) -> str:
    return known_variables()[name]["type"]


def nested(path: str, value: Any) -> tuple[dict[str, Any], str]:
    """A variable with the value at a dotted path, and where a message says that it stands."""
    name, *keys = path.split(".")
    where = name
    for position, key in reversed(list(enumerate(keys))):
        above = keys[position - 1] if position else name
        listed = key == "*" and (above == "servers" or (not position and kind_of(name) == "list"))
        value = [value] if listed else {"x" if key == "*" else key: value}
    for position, key in enumerate(keys):
        above = keys[position - 1] if position else name
        listed = key == "*" and (above == "servers" or (not position and kind_of(name) == "list"))
        where += "[0]" if listed else f".{'x' if key == '*' else key}"
    return {name: value}, where


def found(path: str, value: Any) -> list[dict[str, str]]:
    """The problems at that very place."""
    changes, where = nested(path, value)
    problems: list[dict[str, str]] = []
    for name, changed in changes.items():
        checked(changed, known_variables()[name], name, problems)
    return [one for one in problems if one["where"] == where]


@pytest.mark.parametrize("path", sorted(RULED))
def test_the_plan_itself_refuses_it(path: str) -> None:
    changes, where = nested(path, "/" if path in SPEC["paths"] else -(10**9) if path in SPEC["numbers"] else "0")
    if SPEC["paths"].get(path, {"own": True}).keys().isdisjoint({"own", "parent"}):
        changes, where = nested(path, "\n/")
    problems = plan({**TINY, **MIRROR}, ("vllm", "mirror"), **changes)["problems"]
    assert where in {one["where"] for one in problems}


def bounds(rule: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    if "least" in rule:
        yield from ((rule["least"] - 1, False), (rule["least"], True))
    if "above" in rule:
        yield from ((rule["above"], False), (rule["above"] + 1e-6, True))
    yield from ((rule["most"], True), (rule["most"] + 1, False), (10**30, False))


@pytest.mark.parametrize("path", sorted(SPEC["numbers"]))
def test_a_number_is_taken_to_its_bounds_and_refused_beyond_them(path: str) -> None:
    rule = SPEC["numbers"][path]
    for value, right in bounds(rule):
        wrong = [one for one in found(path, value) if "out of range" in one["what"]]
        assert bool(wrong) != right, (value, wrong)
        for one in wrong:
            assert str(value) in one["what"]
            assert str(rule.get("least", rule.get("above"))) in one["remedy"]
            assert str(rule["most"]) in one["remedy"]
            assert rule["unit"] in one["remedy"]


@pytest.mark.parametrize("path", sorted(SPEC["numbers"]))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "1e999", "--5", "1_0", "9" * 5000])
def test_no_number_is_refused_by_its_type(path: str, value: Any) -> None:
    assert len(found(path, value)) == 1


@pytest.mark.parametrize("path", sorted(SPEC["paths"]))
def test_a_directory_of_the_system_is_none_of_the_collection_s(path: str) -> None:
    rule = SPEC["paths"][path]
    guarded = rule.get("own") or "parent" in rule
    for directory in {*SYSTEM["alone"], *SYSTEM["within"]} - {*rule.get("parent", [])}:
        for written in (directory, f"{directory.rstrip('/')}/", f"/{directory}", f"{directory.rstrip('/')}//."):
            refused = [one for one in found(path, written) if "system's own" in one["what"]]
            assert bool(refused) == bool(guarded), written
    for directory in SYSTEM["within"]:
        if guarded and not rule.get("here") and directory != "/usr":
            assert found(path, f"{directory}/below"), directory


@pytest.mark.parametrize("path", sorted(path for path, rule in SPEC["paths"].items() if not rule.get("here")))
@pytest.mark.parametrize(
    "value", ["models", "./x", "/data/a b", "/data/%i", "/data/a:b", "/data/../etc", "/data/\n", "/data/$x", "/data/é"]
)
def test_a_path_on_a_host_is_absolute_and_plain(path: str, value: str) -> None:
    assert len(found(path, value)) == 1


@pytest.mark.parametrize("path", sorted(SPEC["paths"]))
@pytest.mark.parametrize("value", ["/data/vllm-5.2/x", "/usr/local/vllm", "/srv/x", "/opt/site/vllm", "/var/opt/vllm"])
def test_a_directory_of_the_site_s_is_right(path: str, value: str) -> None:
    assert found(path, value) == []


def test_a_home_is_hidden_from_services_and_good_for_the_mirror() -> None:
    assert "ProtectHome" in found("hf_cache_root", "/home/models")[0]["what"]
    assert found("wheel_mirror_root", "/home/mirror") == []


@pytest.mark.parametrize("name", ["uv_venv_root", "cache_dirs_root", "hf_cache_root", "wheel_mirror_root"])
def test_an_empty_root_is_no_root(name: str) -> None:
    assert "empty" in found(name, "")[0]["what"]


@pytest.mark.parametrize("name", ["uv_venv_root", "wheel_mirror_keep", "vllm_service_oom_score_adjust"])
def test_null_is_no_way_to_say_the_default(name: str) -> None:
    assert "null" in plan(**{name: None})["problems"][0]["what"]
    assert plan(nftables_ssh_port=None, vllm_generation=None)["problems"] == []


@pytest.mark.parametrize("name", SPEC["accounts"])
@pytest.mark.parametrize(
    "value", ["root", "nobody", "www-data", "systemd-network", "Vllm", "v llm", "", "0vllm", "x" * 40]
)
def test_an_account_of_the_system_is_none_of_the_collection_s(name: str, value: str) -> None:
    assert len(found(name, value)) == 1


@pytest.mark.parametrize("name", sorted(SPEC["sizes"]))
@pytest.mark.parametrize(
    ("value", "right"),
    [
        *((text, True) for text in ("infinity", "90%", "100%", "200G", "1.5T", "1G", "1073741824")),
        *((text, False) for text in ("0", "-1", "0%", "101%", "1", "200GB", "lots", "", "1g", "10 G", "nan")),
    ],
)
def test_memory_is_a_size_that_systemd_reads(name: str, value: str, right: bool) -> None:
    assert bool(found(name, value)) != right


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/key/generate",
        "/v1",
        "/v1/",
        "/v1/../key/generate",
        "/v1//x",
        "/v1/models /metrics",
        "v1/models",
        "",
    ],
)
def test_a_path_that_is_not_below_v1_is_not_published(path: str) -> None:
    [one] = found("litellm_proxy_paths.*", path)
    assert "a path below /v1/" in one["remedy"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/audio/transcriptions", "/v1/vector_stores", "/v1/rerank"])
def test_a_path_below_v1_is_right(path: str) -> None:
    assert found("litellm_proxy_paths.*", path) == []


def test_sizes_in_bytes() -> None:
    assert [size_bytes(text) for text in ("5", "2K", "1.5M", "1E")] == [5, 2048, 1.5 * 2**20, 2**60]
    assert size_bytes("5k") is None


NUMBERS = st.integers(-50, 50) | st.floats(-50, 50)


@given(st.sampled_from(["least", "above"]), NUMBERS, st.sampled_from(["most", "below"]), NUMBERS, NUMBERS)
def test_bounds_are_inclusive_and_exclusive_as_named(
    low: str, least: float, high: str, most: float, value: float
) -> None:
    rule = number_range(**{low: least, high: most})
    right = (value >= least if low == "least" else value > least) and (
        value <= most if high == "most" else value < most
    )
    assert (rule.wrong(value) is None) == right
    assert rule.wrong(math.nan) is not None


def test_the_cache_folders_are_those_of_the_module() -> None:
    assert set(CACHES) == {"vllm", *KINDS}


# -- what two parts may not both have ----------------------------------------------------------------------------------

EVERYTHING = ("vllm", "mirror", "proxy")
PROXY: dict[str, Any] = {
    **TINY,
    **MIRROR,
    "vllm_instance_networks": ["10.77.0.9/32"],
    "litellm_proxy_process_port": 4001,
}


def whole(**changes: Any) -> list[dict[str, str]]:
    return plan(PROXY, EVERYTHING, **changes)["problems"]


def test_one_host_can_be_everything() -> None:
    assert whole() == []


@pytest.mark.parametrize(
    ("changes", "where", "who"),
    [
        (instance(port=4001), "vllm_instances.glm.port", "process 1 of LiteLLM"),
        (instance(port=4002), "vllm_instances.glm.port", "process 2 of LiteLLM"),
        (instance(port=4100), "vllm_instances.glm.port", "HAProxy for LiteLLM"),
        (instance(port=4101), "vllm_instances.glm.port", "counts over a reload"),
        (instance(port=8443) | {"litellm_proxy_port": 8443}, "vllm_instances.glm.port", "the proxy's clients"),
        (instance(port=8081) | {"wheel_mirror_port": 8081}, "vllm_instances.glm.port", "the mirror"),
        (instance(port=2222) | {"nftables_ssh_port": 2222}, "vllm_instances.glm.port", "SSH"),
        ({"wheel_mirror_port": 443}, "litellm_proxy_port", "the mirror"),
        ({"wheel_mirror_port": 22}, "wheel_mirror_port", "SSH"),
        ({"litellm_proxy_port": 22}, "litellm_proxy_port", "SSH"),
        ({"litellm_proxy_port": 4100}, "litellm_proxy_internal_port", "the proxy's clients"),
        ({"litellm_proxy_processes": 64, "litellm_proxy_process_port": 4050}, "litellm_proxy_process_port", "HAProxy"),
        ({"litellm_proxy_process_port": 65530, "litellm_proxy_processes": 8}, "litellm_proxy_process_port", "65535"),
        (instance(serve={"master-port": 8000}), "vllm_instances.glm.serve.master-port", "instance glm"),
        (instance(serve={"master-port": 4001}), "vllm_instances.glm.serve.master-port", "process 1 of LiteLLM"),
    ],
)
def test_one_port_for_two_is_told_with_both(changes: dict[str, Any], where: str, who: str) -> None:
    [found_] = [one for one in whole(**changes) if one["where"] == where]
    assert who in found_["what"]


def test_preflight_looks_at_every_port_with_its_unit_and_address() -> None:
    needs = plan(PROXY, EVERYTHING)["needs"]["ports"]
    assert [(one["port"], one["unit"], one["address"]) for one in needs] == [
        (8000, "vllm-glm.service", "0.0.0.0"),
        (80, "nginx.service", "0.0.0.0"),
        (443, "onprem-vllm-haproxy.service", "0.0.0.0"),
        (4100, "onprem-vllm-haproxy.service", "127.0.0.1"),
        (4101, "onprem-vllm-haproxy.service", "127.0.0.1"),
        (4001, "onprem-vllm-litellm@4001.service", "127.0.0.1"),
        (4002, "onprem-vllm-litellm@4002.service", "127.0.0.1"),
    ]
    assert plan(**instance(host="127.0.0.1"))["needs"]["ports"][0]["address"] == "127.0.0.1"


def test_a_port_of_a_role_that_the_host_has_not_is_free() -> None:
    assert plan(PROXY, ("vllm",), **instance(port=4001))["problems"] == []


def test_a_port_of_the_monitoring_is_a_warning() -> None:
    made = plan(**instance(port=9400))
    assert made["problems"] == []
    [found_] = made["warnings"]
    assert "dcgm-exporter" in found_["what"]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"cache_dirs_root": "/opt"}, "cache_dirs_root"),  # its folder vllm is the releases' root
        ({"uv_venv_root": "/var/cache/vllm"}, "cache_dirs_root"),
        ({"hf_cache_root": "/opt/vllm/releases"}, "hf_cache_root"),
        ({"hf_cache_root": "/var/cache/vllm"}, "hf_cache_root"),
        ({"wheel_mirror_root": "/opt/vllm/releases"}, "wheel_mirror_root"),
        ({"wheel_mirror_root": "/models/tiny-qwen3"}, "wheel_mirror_root"),
        ({"uv_venv_root": "/opt/vllm/libexec"}, "uv_venv_root"),
        ({"litellm_proxy_user": "vllm"}, "litellm_proxy_user"),
    ],
)
def test_what_a_teardown_of_one_would_take_from_another(changes: dict[str, Any], where: str) -> None:
    assert where in {one["where"] for one in whole(**changes)}


@pytest.mark.parametrize(
    "changes",
    [
        {"hf_cache_root": "/opt/vllm/models"},
        {"hf_cache_root": "/data", "cache_dirs_root": "/data", "uv_venv_root": "/data/releases"},
        {"cache_dirs_root": "/data/cache", "hf_cache_root": "/data/models", "uv_venv_root": "/data/opt"},
        {"cache_dirs_root": "/srv", "wheel_mirror_root": "/srv/mirror"},
    ],
)
def test_directories_side_by_side_are_right(changes: dict[str, Any]) -> None:
    assert whole(**changes) == []
