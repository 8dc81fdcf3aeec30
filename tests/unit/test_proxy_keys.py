# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keys of teams: known by their hash alone, and every mistake named without the key."""

from __future__ import annotations

import datetime as dt
import hashlib
import json

import pytest
from ansible_collections.onprem.vllm.plugins.plugin_utils.proxy_keys import KeysRefused, proxy_keys

MASTER = "sk-master-0123456789"
TEAM = "sk-team-01234567890"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_what_the_proxy_knows_of_a_key():
    found = proxy_keys(
        {"search": {"key": f"{TEAM}1", "models": ["tiny"], "requests_per_minute": "60", "expires": "2027-01-31"}},
        MASTER,
        ["tiny"],
    )
    assert found == {
        sha256(MASTER): {"team": "master", "models": [], "requests_per_minute": 0, "expires": None},
        sha256(f"{TEAM}1"): {
            "team": "search",
            "models": ["tiny"],
            "requests_per_minute": 60,
            "expires": dt.datetime(2027, 1, 31, tzinfo=dt.UTC).timestamp(),
        },
    }
    assert TEAM not in json.dumps(found)


@pytest.mark.parametrize(
    ("expires", "seconds"),
    [
        (dt.date(1970, 1, 2), 86400),
        ("1970-01-02T00:00:00+01:00", 82800),
        (dt.datetime(1970, 1, 2), 86400),  # noqa: DTZ001 - as YAML reads a time without a zone
        (None, None),
    ],
)
def test_when_a_key_ends(expires, seconds):
    entry = proxy_keys({"a": {"key": f"{TEAM}1", "expires": expires}}, MASTER, [])[sha256(f"{TEAM}1")]
    assert entry["expires"] == seconds


@pytest.mark.parametrize(
    ("teams", "master", "message"),
    [
        ({}, "", "litellm_proxy_master_key: must have at least 20 printable ASCII characters"),
        ({"a": {"key": "short"}}, MASTER, "litellm_proxy_keys.a: must have at least 20"),
        ({"a": {}}, MASTER, "litellm_proxy_keys.a: must have at least 20"),
        ({"a": {"key": f"{TEAM} with blanks"}}, MASTER, "litellm_proxy_keys.a: must have at least 20"),
        ({"a": {"key": MASTER}}, MASTER, "is also the key of master"),
        ({"a": {"key": f"{TEAM}1"}, "b": {"key": f"{TEAM}1"}}, MASTER, "is also the key of a"),
        ({"a": {"key": f"{TEAM}1", "models": ["tyni"]}}, MASTER, "tyni is served by no instance (served: tiny)"),
        ({"a": {"key": f"{TEAM}1", "expires": "soon"}}, MASTER, "litellm_proxy_keys.a.expires: 'soon' is no date"),
        ({"a": {"key": f"{TEAM}1", "requests_per_minute": "many"}}, MASTER, "requests_per_minute: is no whole number"),
        ({"a": {"key": f"{TEAM}1", "requests_per_minute": True}}, MASTER, "requests_per_minute: is no whole number"),
        ({"a": {"key": f"{TEAM}1", "requests_per_minute": 0}}, MASTER, "requests_per_minute: is no whole number"),
        ({"a": {"key": f"{TEAM}1", "requests_per_minute": 10**30}}, MASTER, "requests_per_minute: is no whole number"),
        ({"a": {"key": f"{TEAM}1", "models": []}}, MASTER, "litellm_proxy_keys.a.models: is no list of names"),
        ({"a": {"key": f"{TEAM}1", "models": "tiny"}}, MASTER, "litellm_proxy_keys.a.models: is no list of names"),
        ({"a": {"key": f"{TEAM}1", "models": 5}}, MASTER, "litellm_proxy_keys.a.models: is no list of names"),
        ({"a": {"key": f"{TEAM}1", "model": ["tiny"]}}, MASTER, "litellm_proxy_keys.a.model: is no setting of a key"),
        ({"a": {"key": f"{TEAM}1", "expire": "2027-01-01"}}, MASTER, "a.expire: is no setting of a key"),
        ({"a": {"key": f"{TEAM}1", "expires": "2026-13-40"}}, MASTER, "a.expires: '2026-13-40' is no date"),
        ({"a": {"key": f"{TEAM}1", "expires": "2026-02-29"}}, MASTER, "a.expires: '2026-02-29' is no date"),
        ({"a": {"key": f"{TEAM}1", "expires": float("nan")}}, MASTER, "a.expires: 'a number' is no date"),
        ({"a": {"key": f"{TEAM}1", "expires": ["2027-01-01"]}}, MASTER, "is no date"),
        ({"a b": {"key": f"{TEAM}1"}}, MASTER, "litellm_proxy_keys.a b: is no name of a team"),
        ({f"a\n{'0' * 64} b": {"key": f"{TEAM}1"}}, MASTER, "is no name of a team"),
        (
            {"a": {"key": f"{TEAM}1", "expires": 20270630}},
            MASTER,
            "litellm_proxy_keys.a.expires: 'a number' is no date",
        ),
        ({"a": {"key": f"{TEAM}1ü"}}, MASTER, "litellm_proxy_keys.a: must have at least 20 printable ASCII"),
        ({"a": {"key": 10**30}}, MASTER, "litellm_proxy_keys.a: must have at least 20"),
        ({"master": {"key": f"{TEAM}1"}}, MASTER, "litellm_proxy_keys.master: has the name"),
        ({"a": None}, MASTER, "litellm_proxy_keys.a: is no map"),
        ({"a": TEAM}, MASTER, "litellm_proxy_keys.a: is no map"),
        (None, MASTER, "litellm_proxy_keys: is no map of teams"),
        ({}, None, "litellm_proxy_master_key: must have at least 20"),
    ],
)
def test_a_wrong_key_is_refused_by_name_and_never_shown(teams, master, message):
    with pytest.raises(KeysRefused) as caught:
        proxy_keys(teams, master, ["tiny"])
    assert message in str(caught.value)
    assert TEAM not in str(caught.value)
    assert MASTER not in str(caught.value)
