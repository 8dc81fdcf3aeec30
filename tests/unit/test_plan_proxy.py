# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the plan shows of the proxy: all but the keys."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.filter.plan_query import plan_query
from ansible_collections.onprem.vllm.plugins.filter.plan_table import plan_table
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import role_spec
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_proxy import OF_THE_SITE, OWN_CA, SETTINGS
from ansible_collections.onprem.vllm.plugins.plugin_utils.proxy_keys import OPTIONS
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import TINY, plan

SECRET = "sk-a-secret-sought-by-this-test"
PROXY: dict[str, Any] = {
    **TINY,
    "vllm_instance_networks": ["10.77.0.9/32"],
    "litellm_proxy_master_key": SECRET,
    "litellm_proxy_certificate_key": SECRET,
    "litellm_proxy_backend_keys": {"BACKEND_KEY_TINY": SECRET},
    "litellm_proxy_names": ["llm.example"],
    "litellm_proxy_keys": {
        "search": {"key": SECRET, "models": ["tiny-qwen3"], "requests_per_minute": "60", "expires": "2027-06-30"},
        "everyone": {"key": SECRET},
    },
}
ROUTES = {
    "addresses": {"glm1": "10.77.0.9"},
    "models": [
        {
            "name": "tiny-qwen3",
            "slug": "tiny-qwen3",
            "key": "BACKEND_KEY_TINY_QWEN3",
            "servers": [
                {"name": "a-glm", "host": "a", "address": "10.77.0.5", "port": 8000},
                {"name": "b-glm", "host": "b", "address": "fd77::5", "port": 8001},
            ],
        }
    ],
}


def proxy(**changes: Any) -> dict[str, Any]:
    return plan(PROXY, ("proxy",), **changes)


def test_a_plan_shows_the_proxy_and_none_of_its_keys() -> None:
    made = proxy()
    assert made["problems"] == []
    assert made["proxy"]["port"] == 443
    assert made["proxy"]["names"] == ["llm.example"]
    assert made["proxy"]["limits"]["body_limit_mib"] == 32
    assert made["proxy"]["tls"] == {"source": OWN_CA, "renew_days": 30, "ca_file": ""}
    assert made["proxy"]["teams"] == [
        {"name": "search", "models": ["tiny-qwen3"], "requests_per_minute": 60, "expires": "2027-06-30"},
        {"name": "everyone", "models": [], "requests_per_minute": None, "expires": None},
    ]
    shown = json.dumps(made) + plan_table([made], ROUTES) + json.dumps(plan_query([made], "[]", ROUTES))
    assert SECRET not in shown


def test_each_value_says_where_it_comes_from() -> None:
    origins = proxy(litellm_proxy_port=8443, litellm_proxy_body_limit_mib=64)["origins"]
    assert origins["proxy.port"] == "litellm_proxy_port"
    assert origins["proxy.limits.body_limit_mib"] == "litellm_proxy_body_limit_mib"
    assert origins["proxy.limits.max_connections"] == "default"
    assert origins["proxy.teams"] == "litellm_proxy_keys"
    assert origins["proxy.tls.source"] == "default"


def test_the_site_s_certificate_is_named_as_the_source_and_not_shown() -> None:
    made = proxy(litellm_proxy_certificate="-----BEGIN CERTIFICATE-----\nMIIB\n")
    assert made["proxy"]["tls"] == {"source": OF_THE_SITE}
    assert made["origins"]["proxy.tls.source"] == "litellm_proxy_certificate"
    assert "MIIB" not in json.dumps(made)


def test_routes_are_in_the_table_and_the_answers() -> None:
    table = plan_table([proxy()], ROUTES).splitlines()
    row = next(line for line in table if "proxy.routes.tiny-qwen3.servers" in line)
    assert row.endswith("a-glm 10.77.0.5:8000, b-glm [fd77::5]:8001")
    assert any("proxy.address" in line and line.endswith("10.77.0.9") for line in table)
    row = next(line for line in table if "proxy.teams.search.requests_per_minute" in line)
    assert row.split() == ["proxy.teams.search.requests_per_minute", "litellm_proxy_keys", "60"]
    assert plan_query([proxy()], "[].proxy.routes[].servers[]", ROUTES)[0] == "a-glm 10.77.0.5:8000"


def test_a_host_that_is_no_proxy_shows_none() -> None:
    made = plan()
    assert made["proxy"] == {}
    assert "proxy" not in plan_table([made], ROUTES)


@pytest.mark.parametrize(
    "keys",
    [{"a": None}, {"a": {"models": "x", "expires": 5, "requests_per_minute": "many"}}, {"a": [1]}, {}, "x", None, [1]],
)
def test_keys_of_any_form_are_the_routes_matter(keys: Any) -> None:
    json.dumps(proxy(litellm_proxy_keys=keys))


def test_a_date_is_shown_as_it_is_written() -> None:
    made = proxy(litellm_proxy_keys={"a": {"key": SECRET, "expires": dt.date(2027, 6, 30)}})
    assert made["proxy"]["teams"][0]["expires"] == "2027-06-30"


def test_every_variable_of_the_proxy_is_shown_or_known_not_to_be() -> None:
    shown = {f"litellm_proxy_{name}" for names in SETTINGS.values() for name in names}
    of_tls = {"litellm_proxy_certificate", "litellm_proxy_renew_days", "litellm_proxy_ca_file", "litellm_proxy_keys"}
    elsewhere = {"litellm_proxy_database", "litellm_proxy_teardown_keys"}
    given_by_playbooks = {f"litellm_proxy_{name}" for name in ("release_path", "models", "backend_keys")}
    secret = {f"litellm_proxy_{name}" for name in ("master_key", "certificate_key", "database_password")}
    known = {name for name, option in role_spec().items() if option["role"] == "litellm_proxy"}
    assert shown | of_tls | elsewhere | given_by_playbooks | secret == known
    assert set(proxy()["proxy"]["teams"][0]) == {"name", *OPTIONS} - {"key"}


@pytest.mark.parametrize(
    ("database", "packages"),
    [
        ("", set()),
        ("local", {"postgresql", "python3-psycopg2"}),
        ("postgresql://proxy@db1.example.internal:5432/keys?sslmode=verify-full", {"python3-psycopg2"}),
        ("postgres:///keys?host=/run/postgresql", {"python3-psycopg2"}),
    ],
)
def test_a_database_is_shown_and_brings_its_packages(database: str, packages: set[str]) -> None:
    made = proxy(litellm_proxy_database=database, litellm_proxy_database_password=SECRET)
    assert made["problems"] == []
    assert made["proxy"]["database"] == database
    assert {one["name"] for one in made["packages"]} & {"postgresql", "python3-psycopg2"} == packages
    assert SECRET not in json.dumps(made)


@pytest.mark.parametrize(
    ("database", "what"),
    [
        ("yes", "is neither local nor an address"),
        ("db1.example.internal", "is neither local nor an address"),
        (f"postgresql://proxy:{SECRET}@db1/keys", "has a password in it"),
        (f"postgresql://db1/keys?user=proxy&password={SECRET}", "has a password in it"),
        (f"postgresql://db1/keys?sslkey=/etc/key.pem&sslpassword={SECRET}", "has the password of a client's TLS key"),
    ],
)
def test_a_database_that_cannot_be_asked_is_refused_and_its_password_not_told(database: str, what: str) -> None:
    made = proxy(litellm_proxy_database=database)
    [problem] = made["problems"]
    assert problem["where"] == "litellm_proxy_database"
    assert what in problem["what"]
    assert SECRET not in json.dumps(made)
