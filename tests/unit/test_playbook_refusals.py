# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Playbooks on the example inventory, whose hosts do not answer: what is said before any is asked."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.module_utils.bundle_manifest import MANIFEST, BundleFile, BundleManifest
from ansible_collections.onprem.vllm.plugins.module_utils.proxy_certificate import Certificate, CertificateRefused
from ansible_collections.onprem.vllm.plugins.modules import proxy as proxy_module
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_ranges import ranges
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import MIRROR, RELEASE_ID, TINY
from ansible_collections.onprem.vllm.tests.unit.test_inventory import PLAYBOOKS, ansible_playbook


def test_teardown_removes_nothing_that_is_the_system_s() -> None:
    wrong = {"uv_venv_root": "/", "vllm_service_user": "root", "vllm_release": "no-such"}
    done = ansible_playbook("-i", "inventory/example", "playbooks/teardown.yml", "-e", json.dumps(wrong))
    assert done.returncode != 0
    for part in ("uv_venv_root", "the system's own", "vllm_service_user", "[gpu1]"):
        assert part in done.stdout + done.stderr, part
    assert "UNREACHABLE" not in done.stdout
    assert "no-such" not in done.stdout, "what else is wrong is no reason to keep a host as it is"


@pytest.mark.parametrize(("limit", "looked"), [("all", False), ("vllm", True)])
def test_teardown_asks_the_proxies_that_stay(limit: str, looked: bool, tmp_path: Path) -> None:
    """On this machine, which has nothing of the collection's, with --check."""
    folder = inventory(tmp_path, vllm="gpu1", proxy="proxy1")
    here = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    done = ansible_playbook(
        *("-i", folder, "playbooks/teardown.yml", "--check", "--limit", limit, "-e", json.dumps(here)),
        ANSIBLE_DISPLAY_SKIPPED_HOSTS="false",
    )
    assert done.returncode == 0, done.stdout
    assert ("[Look what the host runs]" in done.stdout) == looked


@pytest.mark.parametrize(
    ("playbook", "options", "said"),
    [
        ("plan", ["plan_compared=true"], "There is no plan_compared: write plan_compare."),
        ("status", ["status_fial=true", "status_format=jsn"], "status_format is jsn: write table or json."),
        ("doctor", ["doctor_fail_on=warn"], "write error or warning or never"),
    ],
)
def test_an_option_that_is_none_is_refused(playbook: str, options: list[str], said: str) -> None:
    given = [word for option in options for word in ("-e", option)]
    done = ansible_playbook("-i", "inventory/example", f"playbooks/{playbook}.yml", *given)
    assert done.returncode != 0
    assert said in " ".join((done.stdout + done.stderr).split())
    assert "UNREACHABLE" not in done.stdout


def test_a_variable_of_an_inventory_that_looks_like_an_option_is_its_own(tmp_path: Path) -> None:
    host = {"ansible_connection": "local", "plan_quer": "mine", "wheel_mirror_bundle": "/srv/b"}
    groups = {"mirror": {"hosts": {"m1": {**host, "vllm_mirror_networks": ["10.0.0.0/8"]}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}), encoding="utf-8")
    done = ansible_playbook("-i", str(tmp_path), "playbooks/plan.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def inventory(folder: Path, **groups: str) -> str:
    """An inventory with one host for each group."""
    children = {group: {"hosts": {host: {}}} for group, host in groups.items()}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": children}}), encoding="utf-8")
    return str(folder)


# What operators start: the others are parts of site.yml.
STARTED = sorted(path.stem for path in PLAYBOOKS.glob("*.yml") if path.stem not in {"prepare", "serve", "front"})


NOTHING = ["none of them is in group mirror, vllm, or proxy: nothing would be done"]
PROXIES = ({"vllm": "gpu1", "proxies": "p1"}, "gpu1", ["group proxies", "looks like proxy misspelt"])


@pytest.mark.parametrize(
    ("playbook", "groups", "limit", "said"),
    [
        # The host asked for is in its right place; what the run is limited to would leave the proxy out all the same.
        *((playbook, *PROXIES) for playbook in STARTED),
        ("site", {"vlm": "gpu1"}, "all", ["group vlm", "looks like vllm misspelt"]),
        ("teardown", {"web": "web1"}, "all", NOTHING),
        ("bundle", {"web": "web1"}, "all", NOTHING),
    ],
)
def test_an_inventory_whose_hosts_no_play_would_reach_is_a_failure(
    playbook: str, groups: dict[str, str], limit: str, said: list[str], tmp_path: Path
) -> None:
    done = ansible_playbook("-i", inventory(tmp_path, **groups), f"playbooks/{playbook}.yml", "--limit", limit)
    assert done.returncode != 0
    for part in said:
        assert part in " ".join(done.stdout.split())
    assert done.stdout.count("PLAY [") == 1, "nothing else is looked at"


@pytest.mark.parametrize("playbook", ["bundle", "status"])
def test_groups_that_a_site_has_no_hosts_for_are_no_fault(playbook: str, tmp_path: Path) -> None:
    """Neither mirror nor proxy; what follows here is that gpu1 can be neither planned nor reached."""
    folder = inventory(tmp_path, vllm="gpu1", web="web1")
    done = ansible_playbook("-i", folder, f"playbooks/{playbook}.yml", "-e", "ansible_host=127.0.0.1 ansible_port=1")
    assert "The inventory's groups are wrong" not in done.stdout
    assert "web1: in no group mirror, vllm, or proxy" in " ".join(done.stdout.split())
    assert done.stdout.count("PLAY [") > 1


def test_a_bundle_of_what_variables_name_needs_no_host(tmp_path: Path) -> None:
    """On an inventory of the site's other hosts; refused here for what it lacks besides, before anything is fetched."""
    given = json.dumps({"wheel_mirror_releases": ["0.28.0-cpu"]})
    done = ansible_playbook("-i", inventory(tmp_path, web="web1"), "playbooks/bundle.yml", "-e", given)
    assert "The inventory's groups are wrong" not in done.stdout
    assert "wheel_mirror_bundle is not set" in done.stdout


def test_an_upgrade_of_a_mirror_alone_is_one_without_batches(tmp_path: Path) -> None:
    """Group vllm, whose first host has the batches, is missing."""
    host = {"ansible_connection": "local", "wheel_mirror_bundle": "/srv/b", "vllm_mirror_networks": ["10.0.0.0/8"]}
    folder = inventory(tmp_path, mirror="mirror1")
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "mirror1.yml").write_text(yaml.safe_dump(host), encoding="utf-8")
    done = ansible_playbook("-i", folder, "playbooks/upgrade.yml", "--check", "--tags", "none-but-the-plan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("PLAY [Serve]") < done.stdout.index("PLAY RECAP")


def test_a_bundle_without_what_a_host_needs_stops_a_rollout_before_any_host_is_asked(tmp_path: Path) -> None:
    """Of a host that nobody could reach."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / MANIFEST).write_bytes(BundleManifest({"wheels/x.whl": BundleFile("0" * 64, 1)}).to_bytes())
    folder = inventory(tmp_path, mirror="m1", vllm="gpu1")
    (tmp_path / "group_vars").mkdir()
    variables = {**TINY, **MIRROR, "wheel_mirror_bundle": str(bundle), "ansible_host": "192.0.2.1"}
    (tmp_path / "group_vars" / "all.yml").write_text(yaml.safe_dump(variables), encoding="utf-8")
    done = ansible_playbook("-i", folder, "playbooks/site.yml")
    assert done.returncode != 0
    for lacking in (f"lacks release {RELEASE_ID}, which gpu1 would", "lacks model tiny-qwen3", "playbooks/bundle.yml"):
        assert lacking in done.stdout
    assert "unreachable=1" not in done.stdout


@pytest.mark.parametrize("playbook", ["site", "upgrade"])
def test_a_proxy_without_its_master_key_stops_every_host_before_any_is_asked(playbook: str) -> None:
    """Not the proxy alone: instances would restart, and nothing would lead to them."""
    done = ansible_playbook("-i", "inventory/example", f"playbooks/{playbook}.yml", LITELLM_MASTER_KEY="")
    assert done.returncode != 0
    assert "proxy1: litellm_proxy_master_key has less than 20 characters" in " ".join(done.stdout.split())
    assert "PLAY [Look at every host before any is changed]" not in done.stdout
    assert "UNREACHABLE" not in done.stdout


def test_an_answer_is_json_alone_and_what_is_wrong_goes_elsewhere() -> None:
    query = json.dumps({"plan_query": "[].{host: host, to: proxy.routes}"})
    arguments = ("-i", "inventory/example", "playbooks/plan.yml", "-e", query)
    done = ansible_playbook(*arguments, ANSIBLE_STDOUT_CALLBACK="onprem.vllm.answer", LITELLM_MASTER_KEY="x" * 24)
    assert done.returncode == 0, done.stderr
    answer = {found["host"]: found["to"] for found in json.loads(done.stdout)}
    assert [route["name"] for route in answer["proxy1"]] == ["gemma-4-26b", "glm-5.2"]
    assert answer["gpu1"] is None
    arguments = (*arguments, "-e", "vllm_release=no-such")
    done = ansible_playbook(*arguments, ANSIBLE_STDOUT_CALLBACK="onprem.vllm.answer", LITELLM_MASTER_KEY="x" * 24)
    assert done.returncode != 0
    json.loads(done.stdout)
    assert "there is no release 'no-such'" in done.stderr


def test_status_is_json_alone_of_a_host_that_answers_and_of_one_that_does_not(tmp_path: Path) -> None:
    """This machine stands for the first; the second refuses connections."""
    hosts = {"here": {"ansible_connection": "local"}, "away": {"ansible_host": "127.0.0.1", "ansible_port": 1}}
    fronts = {f"{name}-proxy": host for name, host in hosts.items()}
    groups = {"vllm": {"hosts": hosts}, "proxy": {"hosts": fronts}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups), encoding="utf-8")
    arguments = ("-i", str(tmp_path), "playbooks/status.yml", "--limit", "vllm")
    done = ansible_playbook(*arguments, "-e", "status_format=json", ANSIBLE_STDOUT_CALLBACK="onprem.vllm.answer")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["here"]["instances"] == []
    assert found["away"]["unreachable"] is True
    assert found["here-proxy"]["away"] == []
    assert found["away-proxy"]["unreachable"] is True
    assert "Connection refused" in done.stderr
    table = ansible_playbook(*arguments, ANSIBLE_STDOUT_CALLBACK="onprem.vllm.answer").stdout.splitlines()
    assert [line.split()[0] for line in table if not line.startswith(" ")] == [
        *("host", "away", "here", "away-proxy", "here-proxy")
    ]


def test_a_bundle_without_a_place_is_refused_and_a_site_s_own_web_server_needs_no_mirror_host(tmp_path: Path) -> None:
    """Without group mirror its variables are nobody's."""
    (tmp_path / "hosts.yml").write_text("vllm: {hosts: {gpu1: {}}}\n", encoding="utf-8")
    variables = {
        "vllm_mirror_url": "http://files.site/vllm",
        "vllm_client_networks": ["10.0.0.0/8"],
        "vllm_release": "0.28.0-cpu",
        "vllm_models": {"tiny-qwen3": {"directory": "/staging/tiny-qwen3"}},
        "vllm_instances": {"glm": {"profile": "tiny-cpu", "port": 8000}},
    }
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(yaml.safe_dump(variables), encoding="utf-8")
    planned = ansible_playbook("-i", str(tmp_path), "playbooks/plan.yml", "-e", "plan_query=[].mirror.url")
    assert planned.returncode == 0, planned.stdout
    assert "http://files.site/vllm" in planned.stdout
    done = ansible_playbook("-i", str(tmp_path), "playbooks/bundle.yml")
    assert done.returncode != 0
    assert "wheel_mirror_bundle is not set" in done.stdout


def test_teardown_knows_every_directory_and_account_that_it_removes() -> None:
    text = Path(PLAYBOOKS / "teardown.yml").read_text(encoding="utf-8")
    tasks = [task for play in yaml.safe_load(text) for task in play["tasks"]]
    [wrong] = [task["vars"]["wrong"] for task in tasks if "wrong" in task.get("vars", {})]
    named = set(re.findall(r"'(\w+_\w+)'", wrong))
    roots = {name for name in ranges()["paths"] if re.fullmatch(r"(?!.*release_root)\w+_root", name)}
    # Owner and group of the caches come from the plan.
    assert named == roots | {name for name in ranges()["accounts"] if not name.startswith("cache_dirs_")}


def test_a_host_without_openssl_is_not_refused_for_it_before_a_rollout_has_brought_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same certificate is refused where it is there."""
    own = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "pem"), "-subj", "/CN=other"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *own], check=True, capture_output=True)
    made = Certificate((tmp_path / "pem").read_text(encoding="utf-8"), (tmp_path / "key").read_text(encoding="utf-8"))
    given = {"names": ["proxy1"], "renew_days": 30, "handed_out": "", "handed_out_file": ""}
    with pytest.raises(CertificateRefused, match="is not for proxy1"):
        proxy_module._look(given, made)
    monkeypatch.setenv("PATH", str(tmp_path))
    proxy_module._look(given, made)


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        ("", "A root was handed out before ("),
        ("no PEM", "The certificate and its key do not belong together"),  # what was handed out does not matter then
    ],
)
def test_a_proxy_is_left_alone_where_clients_would_not_accept_its_certificate(
    certificate: str, said: str, tmp_path: Path
) -> None:
    """On this machine, which has none of the collection's; with --check, so that it stays so if this fails."""
    file = tmp_path / "ca.pem"
    body = base64.b64encode(b"a root").decode()
    file.write_text(f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n", encoding="utf-8")
    variables = {
        "litellm_proxy_ca_file": str(file),
        "litellm_proxy_certificate": certificate,
        "litellm_proxy_certificate_key": certificate,
        "litellm_proxy_release_path": "/nowhere",
        "litellm_proxy_master_key": "x" * 24,
    }
    play = {"hosts": "localhost", "gather_facts": False, "vars": variables, "roles": ["onprem.vllm.litellm_proxy"]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = ansible_playbook("-i", "localhost,", "-c", "local", str(tmp_path / "play.yml"), "--check")
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert said in told
    assert "TASK [onprem.vllm.litellm_proxy : Group of LiteLLM]" not in told, "nothing was changed"
