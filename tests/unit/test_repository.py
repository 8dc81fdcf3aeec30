"""What holds for the repository as a whole."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.parent.parent for path in ROOT.glob("roles/*/tasks/main.yml"))
FILTERS = sorted(ROOT.glob("plugins/filter/*.py"))

# Written in parts, so that this file does not hold what it looks for.
REGISTRIES = re.compile(rb"\b(?:pypi\.|python" + rb"hosted\.|npm" + rb"js\.|deb\.deb" + rb"ian\.)(?:org|com)")


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file() and not path.is_symlink()]


def test_no_registry_is_named():
    named = [str(path.relative_to(ROOT)) for path in tracked() if REGISTRIES.search(path.read_bytes())]
    assert named == [], "an index is the machine's own configuration, never the project's"


def test_no_lock_format_that_holds_addresses():
    assert [path for path in tracked() if path.name in {"uv.lock", "pylock.toml"}] == []


def test_there_are_roles_and_filters():
    assert {"wheel_mirror", "uv_venv", "cache_dirs", "hf_cache", "nftables", "vllm_service", "host_base"} <= {
        role.name for role in ROLES
    }
    assert FILTERS


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_is_whole(role):
    for name in ("README.md", "meta/main.yml", "meta/argument_specs.yml", "tasks/teardown.yml"):
        assert (role / name).is_file(), f"roles/{role.name}/{name} is missing"
    assert (ROOT / "molecule" / role.name / "molecule.yml").is_file(), f"no molecule scenario for {role.name}"


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_names_no_inventory_group(role):
    groups = re.compile(r"groups\[|groups\.|group_names")
    for path in role.rglob("*"):
        if path.is_file() and path.suffix in {".yml", ".j2"}:
            assert not groups.search(path.read_text(encoding="utf-8")), f"{path.relative_to(ROOT)} names a group"


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_the_first_page_of_a_role_fits_one_screen(role):
    assert len((role / "tasks" / "main.yml").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("path", FILTERS, ids=lambda path: path.stem)
def test_a_filter_is_documented_under_its_own_name(path):
    # ansible-test passes filters with the wrong name, antsibull-docs those with none.
    module = importlib.import_module(f"ansible_collections.onprem.vllm.plugins.filter.{path.stem}")
    assert set(module.FilterModule().filters()) == {path.stem}, "one filter per file, named like the file"
    documentation = yaml.safe_load(path.with_suffix(".yml").read_text(encoding="utf-8"))
    assert documentation["DOCUMENTATION"]["name"] == path.stem


def test_the_archive_holds_the_collection_alone_and_works_where_it_is_installed(tmp_path):
    """Playbooks by their full names, on a machine that has no checkout: the plan of the example, and all are read."""
    empty = tmp_path / "ansible.cfg"
    empty.write_text("")
    surroundings = {**os.environ, "ANSIBLE_CONFIG": str(empty), "ANSIBLE_COLLECTIONS_PATH": str(tmp_path)}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=surroundings, check=True, capture_output=True, text=True)
        return done.stdout + done.stderr

    run("ansible-galaxy", "collection", "build", "--output-path", str(tmp_path), str(ROOT))
    (archive,) = tmp_path.glob("*.tar.gz")
    run("ansible-galaxy", "collection", "install", "--offline", "--collections-path", str(tmp_path), str(archive))
    installed = tmp_path / "ansible_collections" / "onprem" / "vllm"
    assert {path.name for path in installed.iterdir()} == {
        *("CHANGELOG.rst", "COPYING", "FILES.json", "MANIFEST.json", "README.md", "catalogue", "changelogs", "docs"),
        *("inventory", "meta", "playbooks", "plugins", "requirements.in", "requirements.txt", "roles", "site.yml"),
    }
    assert [path.name for path in (installed / "inventory").iterdir()] == ["example"]
    shown = run("ansible-playbook", "--inventory", str(installed / "inventory" / "example"), "onprem.vllm.plan")
    assert "max-model-len" in shown
    assert "failed=0" in shown
    playbooks = [f"onprem.vllm.{path.stem}" for path in sorted((ROOT / "playbooks").glob("*.yml"))]
    assert {f"onprem.vllm.{name}" for name in ("site", "upgrade", "rollback", "bundle", "teardown")} <= set(playbooks)
    checked = run("ansible-playbook", "--inventory", str(installed / "inventory/example"), "--syntax-check", *playbooks)
    assert re.findall(r"^playbook: .*/playbooks/(\w+)\.yml$", checked, re.MULTILINE) == [
        name.rpartition(".")[2] for name in playbooks
    ]
    assert "WARNING" not in checked, "Ansible's loader has a word on a file"
    # Modules, and what they import, are found by a run alone; this machine has no instance.
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "here.yml").write_text(yaml.safe_dump({"vllm": {"hosts": {"here": here}}}))
    assert "no instance" in run("ansible-playbook", "--inventory", str(tmp_path / "here.yml"), "onprem.vllm.status")
