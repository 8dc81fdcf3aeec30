# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

from pathlib import Path

import pytest
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from ansible_collections.onprem.vllm.plugins.filter.plans import plans
from ansible_collections.onprem.vllm.plugins.filter.routes import routes
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_groups import (
    grouped,
    impossible_dates,
    inventory_files,
    known_groups,
)


@pytest.mark.parametrize("name", ["proxies", "Proxys", "prox", "poxy", "mirrors", "mirrror", "vlms", "vllmm"])
def test_a_name_that_is_nearly_a_known_one_is_misspelt(name: str) -> None:
    assert grouped({"all": ["a"], name: ["a"]})["problems"][0]["what"].startswith("looks like ")


@pytest.mark.parametrize(
    "name", ["haproxy", "proxmox", "proxysql", "web", "gpu", "llm", "reverse_proxy", "mirage", "s"]
)
def test_a_site_s_own_groups_are_no_misspelt_ones(name: str) -> None:
    assert grouped({"all": ["a", "b"], name: ["a"], "vllm": ["b"]})["problems"] == []


def test_the_groups_are_those_of_the_roles() -> None:
    assert set(known_groups()) == {"mirror", "vllm", "proxy"}


@pytest.mark.parametrize(
    ("groups", "problem", "warning"),
    [
        ({"all": ["a"], "vllm": ["a"]}, "", ""),
        ({"all": []}, "", ""),
        ({"all": ["localhost"]}, "", ""),
        ({"all": ["a", "b"], "web": ["a"], "ungrouped": ["b"]}, "has 2 hosts, and none", ""),
        ({"all": ["a"], "vlm": ["a"]}, "looks like vllm misspelt", ""),
        ({"all": ["a", "b"], "proxies": ["b"], "vllm": ["a"]}, "looks like proxy misspelt", ""),
        ({"all": ["a", "b"], "VLLM": ["b"], "vllm": []}, "looks like vllm misspelt", ""),
        ({"all": ["a", "b"], "vllm": ["a"], "web": ["b"]}, "", "b: in no group"),
        ({"all": ["a"], "vllm": ["a"], "vllms": ["a"]}, "", ""),  # a child of the site's own name
        ({"all": list("abcdefg"), "vllm": ["a"]}, "", "and others"),
    ],
)
def test_hosts_that_no_play_would_reach(groups: dict[str, list[str]], problem: str, warning: str) -> None:
    found = grouped(groups)
    for part, wanted in (("problems", problem), ("warnings", warning)):
        assert [one["what"] for one in found[part] if wanted in one["what"]] == [one["what"] for one in found[part]]
        assert bool(found[part]) == bool(wanted)


def test_where_hosts_are_not_needed_none_of_them_in_a_group_is_a_warning() -> None:
    found = grouped({"all": ["a"], "web": ["a"]}, needed=False)
    assert (found["problems"], [one["what"][:14] for one in found["warnings"]]) == ([], ["a: in no group"])
    assert grouped({"all": ["a"], "vlm": ["a"]}, needed=False)["problems"]


DATES = """
litellm_proxy_keys:
  right: {expires: 2027-06-30}
  quoted: {expires: "2026-13-40"}
  wrong: {expires: 2026-13-40}
  list: [2027-01-01, 2027-02-30]
anchored: &x 2027-00-01
again: *x
"""


def test_a_date_of_no_calendar_is_found_with_its_line(tmp_path: Path) -> None:
    good, bad, vault = (tmp_path / name for name in ("good.yml", "bad.yml", "vault.yml"))
    bad.write_text(DATES, encoding="utf-8")
    good.write_text("a: 2027-01-01\n", encoding="utf-8")
    vault.write_text("$ANSIBLE_VAULT;1.1;AES256\n6162\n", encoding="utf-8")
    found = impossible_dates([good, bad, vault, tmp_path / "none.yml"])
    assert [one.removeprefix(f"{bad}, ") for one in found] == [
        "line 5: 2026-13-40",
        "line 6: 2027-02-30",
        "line 7: 2027-00-01",
    ]


def test_the_plan_of_a_host_whose_variables_cannot_be_read_says_so_and_the_others_are_planned(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yml"
    hosts.write_text("all: {children: {vllm: {hosts: {h1: {}}}, proxy: {hosts: {p1: {}}}}}", encoding="utf-8")
    folder = tmp_path / "group_vars" / "proxy"
    folder.mkdir(parents=True)
    (folder / "keys.yml").write_text("litellm_proxy_keys: {a: {expires: 2026-13-40}}\n", encoding="utf-8")
    assert list(inventory_files([str(hosts)])) == [hosts, folder / "keys.yml"]
    loader = DataLoader()
    inventory = InventoryManager(loader=loader, sources=[str(hosts)])
    hostvars = HostVars(inventory, VariableManager(loader=loader, inventory=inventory), loader)
    made = plans(hostvars, ["p1", "h1"])
    [found] = made["p1"]["problems"]
    assert f"{folder}/keys.yml, line 1: 2026-13-40" in found["what"]
    assert "variables of p1" not in str(made["h1"]["problems"])
    assert routes(hostvars, ["h1"], ["p1"])["models"] == []
