# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Routes: one model name, every instance that serves it, and nothing that the proxy could not reach."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.routes import compose_routes, key_variable, route_keys, slug
from ansible_collections.onprem.vllm.tests.unit.test_inventory import PLAYBOOKS, ansible_playbook

KEY = "the-key-of-the-instances"


def variables(**more: Any) -> dict[str, Any]:
    return {
        "vllm_mirror_url": "http://mirror1",
        "vllm_instance_networks": ["10.0.0.9", "fd00::/64"],
        "vllm_client_networks": ["10.1.0.0/16"],
        "vllm_release": "0.28.0-cpu",
        "vllm_models": {"tiny": {"directory": "/srv/tiny"}},
        "vllm_instances": {"a": {"profile": "tiny-cpu", "model": "tiny", "port": 8000}},
        "vllm_host_overrides": {"served_model_name": "tiny"},
        "vllm_secrets": {"a": {"VLLM_API_KEY": KEY}},
        **more,
    }


def routed(
    hosts: dict[str, dict[str, Any]],
    addresses: dict[str, str] | None = None,
    proxies: dict[str, str] | None = None,
) -> dict[str, Any]:
    plans = {host: compose_plan(host, ["vllm"], given) for host, given in hosts.items()}
    return compose_routes(
        plans,
        {host: (addresses or {}).get(host, host) for host in hosts},
        {host: given["vllm_secrets"] for host, given in hosts.items()},
        {"proxy1": "10.0.0.9"} if proxies is None else proxies,
    )


def problems(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["where"], one["what"]) for one in found["problems"]]


def test_one_name_leads_to_all_instances_that_serve_it():
    other = {"a": {"profile": "tiny-cpu", "model": "tiny", "port": 8000, "served_model_name": "org/Other"}}
    six = {"a": {"profile": "tiny-cpu", "model": "tiny", "port": 8001, "host": "::"}}
    found = routed(
        {"gpu2": variables(), "gpu1": variables(vllm_instances=six), "gpu3": variables(vllm_instances=other)},
        {"gpu1": "fd00::21", "gpu2": "10.0.0.22"},
    )
    assert found["problems"] == []
    lone, tiny = sorted(found["models"], key=lambda model: model["name"])
    assert (tiny["name"], tiny["slug"], tiny["key"]) == ("tiny", "tiny", "BACKEND_KEY_TINY")
    assert tiny["servers"] == [
        {"name": "gpu1-a", "host": "gpu1", "address": "fd00::21", "port": 8001},
        {"name": "gpu2-a", "host": "gpu2", "address": "10.0.0.22", "port": 8000},
    ]
    assert (lone["name"], [one["host"] for one in lone["servers"]]) == ("org/Other", ["gpu3"])


def test_two_instances_of_one_name_in_the_routes_are_refused():
    def named(name: str) -> dict[str, Any]:
        return variables(
            vllm_instances={name: {"profile": "tiny-cpu", "model": "tiny", "port": 8000}},
            vllm_secrets={name: {"VLLM_API_KEY": KEY}},
        )

    found = routed({"gpu2": named("a-b"), "gpu2-a": named("b")})
    assert problems(found) == [
        (
            "gpu2-a: vllm_instances",
            "an instance is gpu2-a-b in the routes, and so is one of gpu2: drained, both would be",
        )
    ]
    assert routed({"gpu2": named("a-b"), "gpu2-a": named("c")})["problems"] == []


def test_no_key_is_in_the_routes_and_all_are_in_the_keys():
    given = {"gpu1": variables()}
    assert KEY not in json.dumps(routed(given))
    plans = {"gpu1": compose_plan("gpu1", ["vllm"], given["gpu1"])}
    assert route_keys(plans, {"gpu1": given["gpu1"]["vllm_secrets"]}) == {"BACKEND_KEY_TINY": KEY}
    assert routed({"gpu1": variables(vllm_secrets={})})["models"][0]["key"] is None


def test_names_of_different_models_never_meet():
    names = ["glm-5", "GLM-5", "glm 5", "org/glm-5", "org-glm-5", "glm-5.2", "glm-5-2"]
    assert len({slug(name) for name in names}) == len({key_variable(name) for name in names}) == len(names)
    assert slug("glm-5") == "glm-5"


@pytest.mark.parametrize(
    ("changes", "address", "where", "what"),
    [
        ({"vllm_instance_networks": None}, "gpu1", "vllm_instance_networks", "past the proxy"),
        ({"vllm_instance_networks": ["10.0.0.8"]}, "gpu1", "gpu1: vllm_instances.a.networks", "do not hold 10.0.0.9"),
        ({}, "fd00::21", "gpu1: vllm_instances.a.host", "is 0.0.0.0, and the proxy comes by IPv6"),
        ({"vllm_group_overrides": {"host": "127.0.0.1"}}, "gpu1", "gpu1: vllm_instances.a.host", "cannot reach it"),
        (
            {"vllm_group_overrides": {"serve": {"ssl-certfile": "/x.pem"}}},
            "gpu1",
            "gpu1: vllm_instances.a.serve",
            "TLS",
        ),
        ({"vllm_instances": {}, "vllm_secrets": {}}, "gpu1", "vllm_instances", "no host has any"),
    ],
)
def test_what_the_proxy_cannot_serve_is_named(changes, address, where, what):
    given = {name: value for name, value in variables(**changes).items() if value is not None}
    found = problems(routed({"gpu1": given}, {"gpu1": address}))
    assert len(found) == 1, found
    assert found[0][0].startswith(where)
    assert what in found[0][1]


def test_instances_of_a_model_have_one_key():
    found = routed({"gpu1": variables(), "gpu2": variables(vllm_secrets={"a": {"VLLM_API_KEY": "another-key"}})})
    [(where, what)] = problems(found)
    assert "gpu1: vllm_instances.a, gpu2: vllm_instances.a" in where
    assert "with different keys" in what
    assert "another-key" not in json.dumps(found)


def test_an_address_of_its_own_is_where_an_instance_is_reached():
    own = variables(vllm_group_overrides={"host": "10.0.7.7"})
    assert routed({"gpu1": own})["models"][0]["servers"][0]["address"] == "10.0.7.7"


def test_without_a_proxy_clients_reach_the_instances():
    given = {name: value for name, value in variables().items() if name != "vllm_instance_networks"}
    assert routed({"gpu1": given}, proxies={})["problems"] == []
    assert compose_plan("gpu1", ["vllm"], given)["firewall"]["ports"][0]["networks"] == ["10.1.0.0/16"]


def test_the_proxy_s_own_plan():
    plan = compose_plan("proxy1", ["proxy"], variables())
    assert plan["problems"] == []
    assert plan["roles"] == ["preflight", "host_base", "uv_venv", "nftables", "litellm_proxy"]
    assert [release["litellm"] for release in plan["releases"]] == ["1.108.7"]
    assert {"haproxy", "openssl", "nftables", "python3.12"} == {package["name"] for package in plan["packages"]}
    assert plan["firewall"]["ports"] == [{"port": 443, "protocol": "tcp", "networks": ["10.1.0.0/16"], "for": "proxy"}]
    wrong = compose_plan("proxy1", ["proxy"], variables(litellm_proxy_release="0.28.0-cpu", vllm_client_networks=[]))
    assert [(one["where"], one["what"]) for one in wrong["problems"]] == [
        ("litellm_proxy_release", "release 0.28.0-cpu is one of vllm"),
        ("vllm_client_networks", "is empty: nobody could reach the proxy through its firewall"),
    ]
    swapped = compose_plan("gpu1", ["vllm"], variables(vllm_release="litellm-1.108.7"))
    assert ("vllm_release", "release litellm-1.108.7 is one of litellm") in [
        (one["where"], one["what"]) for one in swapped["problems"]
    ]


@pytest.mark.parametrize("limit", ["all", "proxy1", "all:!gpu1"])
def test_a_host_that_fails_is_lost_or_left_out_stays_in_the_routes(tmp_path: Path, limit: str) -> None:
    """What the play of prepare.yml composes is what front.yml gives the proxy, whatever becomes of hosts meanwhile."""
    hosts = {
        "gpu1": {},
        "gpu2": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1},
        "gpu3": {"fails": True},
        "gpu4": {},
    }
    given = variables(ansible_connection="local", litellm_proxy_master_key="sk-0123456789-0123456789")
    groups = {"vllm": {"hosts": hosts}, "proxy": {"hosts": {"proxy1": {"vllm_address": "10.0.0.9"}}}}
    inventory = {"all": {"vars": given, "children": groups}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    [plan] = [
        play
        for play in yaml.safe_load((PLAYBOOKS / "prepare.yml").read_text(encoding="utf-8"))
        if play["name"] == "Plan every host, from the inventory alone"
    ]
    [front] = yaml.safe_load((PLAYBOOKS / "front.yml").read_text(encoding="utf-8"))
    [role] = [one for one in front["roles"] if one["role"] == "onprem.vllm.litellm_proxy"]
    meanwhile = [{"ping": {}}, {"fail": {}, "when": "fails | default(false)"}]
    show = {"copy": {"content": role["litellm_proxy_models"], "dest": str(tmp_path / "models.json")}}
    plays = [
        plan,
        {"hosts": "vllm", "gather_facts": False, "tasks": meanwhile},
        {"hosts": "proxy", "gather_facts": False, "tasks": [show]},
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays), encoding="utf-8")
    done = ansible_playbook("-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), "--limit", limit)
    recap = {name: (int(lost), int(failed)) for name, lost, failed in RECAP.findall(done.stdout)}
    if limit != "proxy1":
        assert (recap["gpu2"], recap["gpu3"]) == ((1, 0), (0, 1)), done.stdout
    [model] = json.loads((tmp_path / "models.json").read_text())
    assert [one["name"] for one in model["servers"]] == ["gpu1-a", "gpu2-a", "gpu3-a", "gpu4-a"]


RECAP = re.compile(r"^(\w+) +: .*unreachable=(\d+) +failed=(\d+)", re.MULTILINE)
