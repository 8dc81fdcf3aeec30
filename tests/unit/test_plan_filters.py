# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The edge between Ansible's lazy, tagged variables and plain data, with Ansible's own inventory and templating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from ansible_collections.onprem.vllm.plugins.filter import (
    findings,
    findings_report,
    grouped,
    plan,
    plan_query,
    plan_table,
    plans,
    routes,
)
from ansible_collections.onprem.vllm.plugins.filter import problem_report as problems
from jinja2 import Environment

INVENTORY = """
all:
  vars:
    vllm_mirror_url: http://{{ hostvars[groups['mirror'][0]].ansible_host | default('lost') }}
    vllm_client_networks: ["10.0.0.0/{{ 4 + 4 }}"]
    vllm_release: 0.28.0-cpu
    base_port: 8000
    vllm_models: {tiny-qwen3: {directory: "{{ inventory_dir }}/tiny"}}
    vllm_instances:
      glm: {profile: tiny-cpu, port: "{{ base_port + 1 }}", serve: {seed: "{{ lookup('file', 'seed.txt') | int }}"}}
  children:
    mirror: {hosts: {m1: {ansible_host: 192.0.2.7, wheel_mirror_bundle: /b, vllm_mirror_networks: [10.0.0.0/8]}}}
    vllm:
      hosts:
        h1:
        h2: {vllm_release: "{{ nowhere.release }}", my_broken_one: "{{ neither }}"}
"""


@pytest.fixture(name="hostvars")
def _hostvars(tmp_path: Path) -> HostVars:
    (tmp_path / "hosts.yml").write_text(INVENTORY, encoding="utf-8")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "seed.txt").write_text("7", encoding="utf-8")
    loader = DataLoader()
    loader.set_basedir(str(tmp_path))
    inventory = InventoryManager(loader=loader, sources=[str(tmp_path / "hosts.yml")])
    return HostVars(inventory, VariableManager(loader=loader, inventory=inventory), loader)


# What a rollout needs and a plan does not, in a vault of which nobody has the password.
VAULT = """!vault |
          $ANSIBLE_VAULT;1.1;AES256
          61616161616161616161616161616161616161616161616161616161616161616161616161616161
          61616161"""
SECRETS = f"""
all:
  vars:
    vllm_mirror_url: http://mirror1
    vllm_client_networks: [10.0.0.0/8]
    vllm_instance_networks: [10.0.0.9]
    vllm_release: 0.28.0-cpu
    vllm_models: {{tiny-qwen3: {{directory: /tiny}}}}
    key_of_all: {VAULT}
    keys_of_instances: {{VLLM_API_KEY: "{{{{ key_of_all }}}}"}}
  children:
    vllm:
      vars:
        vllm_instances: {{glm: {{profile: tiny-cpu, port: 8001}}}}
        vllm_secrets: {{glm: "{{{{ keys_of_instances }}}}"}}
      hosts:
        h1: {{ansible_host: 10.0.0.1}}
        h2: {{ansible_host: 10.0.0.2}}
    proxy:
      vars:
        litellm_proxy_master_key: {VAULT}
        litellm_proxy_names: [models.site]
        litellm_proxy_keys: {{a: {{key: "{{{{ key_of_all }}}}"}}, b: {{key: "{{{{ key_of_all }}}}"}}}}
      hosts:
        p1: {{ansible_host: 10.0.0.9}}
"""


def inventory_of(text: str, folder: Path) -> HostVars:
    (folder / "hosts.yml").write_text(text, encoding="utf-8")
    loader = DataLoader()
    inventory = InventoryManager(loader=loader, sources=[str(folder / "hosts.yml")])
    return HostVars(inventory, VariableManager(loader=loader, inventory=inventory), loader)


def places(made: dict[str, Any]) -> dict[str, list[str]]:
    return {host: sorted(one["where"] for one in found["problems"]) for host, found in made.items()}


def test_a_plan_needs_no_vault_and_a_rollout_does(tmp_path: Path) -> None:
    hostvars = inventory_of(SECRETS, tmp_path)
    made = plans.plans(hostvars, ["h1", "h2", "p1"])
    assert [found["problems"] for found in made.values()] == [[], [], []]
    assert made["h1"]["instances"][0]["secrets"] == ["VLLM_API_KEY"]
    routed = routes.routes(hostvars, ["h1", "h2"], ["p1"])
    assert routed["problems"] == []
    assert routed["models"][0]["key"]
    assert is_plain(made)
    assert is_plain(routed)
    needed = plans.plans(hostvars, ["h1", "p1"], with_secrets=True)
    assert places(needed) == {
        "h1": ["vllm_secrets.glm.VLLM_API_KEY"],
        "p1": ["litellm_proxy_keys.a.key", "litellm_proxy_keys.b.key", "litellm_proxy_master_key"],
    }
    assert all("ask-vault-pass" in one["remedy"] for found in needed.values() for one in found["problems"])


def test_what_cannot_be_computed_is_named_by_host_and_entry_all_at_once(tmp_path: Path) -> None:
    text = SECRETS.replace("ansible_host: 10.0.0.2", 'ansible_host: "{{ h2_ip }}", vllm_address: "{{ h2_address }}"')
    text = text.replace("ansible_host: 10.0.0.9", 'ansible_host: "{{ p1_ip }}"')
    text = text.replace("port: 8001", 'port: "{{ nosuch }}"')
    text = text.replace('b: {key: "{{ key_of_all }}', 'b: {key: "{{ no }}')
    hostvars = inventory_of(text, tmp_path)
    made = plans.plans(hostvars, ["h1", "h2", "p1"])
    assert places(made) == {
        "h1": ["vllm_instances.glm.port"],
        "h2": ["vllm_address", "vllm_instances.glm.port"],
        "p1": ["litellm_proxy_keys.b.key"],
    }
    routed = routes.routes(hostvars, ["h1", "h2"], ["p1"])
    assert [one["where"] for one in routed["problems"]] == ["h2: ansible_host", "p1: ansible_host"]
    assert all(one["what"].startswith("cannot be computed: ") for one in routed["problems"])
    assert "h2_ip" in routed["problems"][0]["what"]


def is_plain(value: Any) -> bool:
    if value.__class__ is dict:
        return all(key.__class__ is str and is_plain(child) for key, child in value.items())
    if value.__class__ is list:
        return all(is_plain(child) for child in value)
    return value.__class__ in (str, int, float, bool, type(None))


def test_the_plans_of_all_hosts_with_templates_evaluated(hostvars: HostVars) -> None:
    made = plans.plans(hostvars, ["m1", "h1"])
    assert [found["problems"] for found in made.values()] == [[], []]
    found = made["h1"]
    assert found["host"] == "h1"
    # hostvars inside a variable: hostvars[h1] alone would have taken the default.
    assert found["mirror"]["url"] == "http://192.0.2.7"
    assert found["instances"][0]["port"] == 8001
    assert found["instances"][0]["serve"]["seed"] == 7
    assert found["firewall"]["ports"][0]["networks"] == ["10.0.0.0/8"]
    assert is_plain(made)


def composed(tmp_path: Path, inventory: str) -> dict[str, Any]:
    """The plans of an inventory's hosts in the groups mirror, vllm and proxy."""
    (tmp_path / "hosts.yml").write_text(inventory, encoding="utf-8")
    loader = DataLoader()
    manager = InventoryManager(loader=loader, sources=[str(tmp_path / "hosts.yml")])
    found = HostVars(manager, VariableManager(loader=loader, inventory=manager), loader)
    return plans.plans(found, [host.name for host in manager.get_hosts()])


TWO = """
all:
  vars:
    vllm_mirror_url: http://10.20.0.10
    vllm_client_networks: [10.1.0.0/16]
    vllm_release: 0.28.0-cpu
    vllm_models: {tiny-qwen3: {directory: /srv/tiny}}
    vllm_instances: {glm: {profile: tiny-cpu, port: 8000}}
  children:
    mirror: {hosts: {m1: {ansible_host: 10.20.0.10, wheel_mirror_bundle: /b, vllm_mirror_networks: [NETWORK]}}}
    vllm: {hosts: {h1: {ansible_host: 10.20.0.11}, h2: {ansible_host: SECOND}}}
"""


@pytest.mark.parametrize(
    ("second", "wrong"),
    [
        ("10.20.0.12", []),
        ("10.20.0.11", ["ansible_host of h2"]),
        ("10.20.0.11, ansible_port: 2222", []),
        ("10.20.0.11, ansible_ssh_common_args: -J other", []),
        ("10.20.0.10", ["ansible_host of h2"]),
        ("'{{ nowhere }}'", []),
    ],
)
def test_two_hosts_of_one_address_are_one_machine(tmp_path: Path, second: str, wrong: list[str]) -> None:
    made = composed(tmp_path, TWO.replace("NETWORK", "10.20.0.0/16").replace("SECOND", second))
    assert [one["where"] for plan_ in made.values() for one in plan_["problems"]] == wrong


@pytest.mark.parametrize(
    ("network", "kept_out"), [("10.20.0.0/16", []), ("10.20.0.11", ["h2"]), ("fd00::/64", ["h1", "h2"])]
)
def test_a_mirror_that_hosts_cannot_reach_is_worth_a_look(tmp_path: Path, network: str, kept_out: list[str]) -> None:
    made = composed(tmp_path, TWO.replace("NETWORK", f"'{network}'").replace("SECOND", "10.20.0.12"))
    said = {host: [one["where"] for one in plan_["warnings"]] for host, plan_ in made.items()}
    assert said == {"m1": [], **{host: ["vllm_mirror_networks"] * (host in kept_out) for host in ("h1", "h2")}}


@pytest.mark.parametrize(
    ("proxy", "second", "said"),
    [
        ("proxy", "model: other", ["vllm_instances.glm.served_model_name"]),
        ("proxy", "model: other, served_model_name: another", []),
        ("proxy", "serve: {max-num-seqs: 2}", []),
        ("ungrouped", "model: other", []),
    ],
)
def test_two_models_of_one_name_behind_a_proxy_are_worth_a_look(
    tmp_path: Path, proxy: str, second: str, said: list[str]
) -> None:
    inventory = TWO.replace("NETWORK", "10.20.0.0/16").replace(
        "SECOND", f"10.20.0.12, vllm_instances: {{glm: {{profile: tiny-cpu, port: 8000, {second}}}}}"
    )
    inventory = inventory.replace("directory: /srv/tiny}", "directory: /srv/tiny}, other: {directory: /srv/other}")
    made = composed(tmp_path, f"{inventory}    {proxy}: {{hosts: {{p1: {{ansible_host: 10.20.0.13}}}}}}\n")
    found = [one for one in made["h2"]["warnings"] if "served_model_name" in one["where"]]
    assert [one["where"] for one in found] == said
    assert all("is tiny-qwen3, as which h1 serves tiny-qwen3, and this is other" in one["what"] for one in found)
    assert made["h1"]["warnings"] == []


@pytest.mark.parametrize(
    ("file", "certificate", "said"),
    [
        ("/srv/ca.pem", "''", ["litellm_proxy_ca_file"]),
        ("'/srv/{{ inventory_hostname }}.pem'", "''", []),
        ("/srv/ca.pem", "of the site", []),
        ("''", "''", []),
    ],
)
def test_proxies_with_a_ca_each_do_not_write_one_file(
    tmp_path: Path, file: str, certificate: str, said: list[str]
) -> None:
    own = f"{{litellm_proxy_ca_file: {file}, litellm_proxy_certificate: {certificate}}}"
    inventory = TWO.replace("NETWORK", "10.20.0.0/16").replace("SECOND", "10.20.0.12")
    hosts = "{p1: {ansible_host: 10.20.0.13}, p2: {ansible_host: 10.20.0.14}}"
    made = composed(tmp_path, f"{inventory}    proxy: {{hosts: {hosts}, vars: {own}}}\n")
    assert [one["where"] for one in made["p2"]["problems"]] == said
    assert made["p1"]["problems"] == []


def test_what_cannot_be_evaluated_is_a_problem_and_others_variables_are_not_touched(hostvars: HostVars) -> None:
    [found] = plans.plans(hostvars, ["h2"])["h2"]["problems"]
    assert found["where"] == "vllm_release"
    assert "nowhere" in found["what"]


def test_the_host_at_work_is_read_from_the_task_and_another_from_hostvars(hostvars: HostVars) -> None:
    """The task knows hostvars, hostvars[h1] does not: there the mirror's address takes its default."""
    templar = Templar(loader=DataLoader(), variables={**hostvars.raw_get("h1"), "hostvars": hostvars})
    address = templar.template(hostvars.raw_get("h1")["vllm_mirror_url"])
    task = {"inventory_hostname": "h1", "group_names": ["vllm"], "vllm_mirror_url": address}
    environment = Environment(autoescape=True).from_string("")
    variables = {**task, "vllm_mirror_url": "http://lost"}
    assert plan.plan(environment.new_context(task), variables)["mirror"]["url"] == "http://192.0.2.7"
    other = environment.new_context({**task, "inventory_hostname": "m1"})
    assert plan.plan(other, variables)["mirror"]["url"] == "http://lost"
    assert hostvars["h1"]["vllm_mirror_url"] == "http://lost"  # Ansible's own reading, the reason for all this


def test_a_plan_computed_before_is_no_variable_of_the_inventory(hostvars: HostVars) -> None:
    variables = dict(hostvars["h1"]) | {"vllm_plan": {"stale": True}, "vllm_plans": {"h1": {}}}
    context = Environment(autoescape=True).from_string("").new_context({})
    found = plan.plan(context, variables)
    assert [entry["where"] for entry in found["problems"]] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: plans.plans({"h1": {}}, ["h1"]),
        lambda: plan.plan(Environment(autoescape=True).from_string("").new_context({}), "h1"),
        lambda: plan_table.plan_table({"host": "h1"}),
        lambda: problems.problem_report("h1"),
        lambda: plan_query.plan_query([], "[?"),
        lambda: findings.findings({}, {}),
        lambda: findings_report.findings_report("x", "h1"),
        lambda: grouped.grouped(["vllm"]),
    ],
)
def test_wrong_input_is_refused_with_the_filter_s_name(call: Any) -> None:
    with pytest.raises(AnsibleFilterError, match=r"onprem\.vllm\.\w+"):
        call()


def test_a_question_to_plans() -> None:
    assert plan_query.plan_query([{"host": "a", "n": [1, 2]}, {"host": "b", "n": []}], "[?n].host") == ["a"]


def test_each_filter_is_found_under_its_own_name() -> None:
    for module in (plan, plans, plan_table, plan_query, problems, findings, findings_report, grouped):
        name = Path(module.__file__).stem
        assert list(module.FilterModule().filters()) == [name]
        assert Path(module.__file__).with_suffix(".yml").is_file()
