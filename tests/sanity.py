"""Run `ansible-test sanity` on the files git knows, in the directory layout that it demands.

ansible-test wants `ansible_collections/<namespace>/<name>`, a home directory it may write to, and get-pip from a web
address. The copy and the home lie under .cache/sanity; where get-pip is not there, a stand-in that asks ensurepip
(the same pip, from the interpreter itself) is put where ansible-test looks first.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ansible_test

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".cache" / "sanity"
COPY = WORK / "ansible_collections" / "onprem" / "vllm"
SKIPPED_FOLDERS = (".collections", ".ci")

GET_PIP = """\
import ensurepip, os, runpy, sys
ensurepip.bootstrap()
del os.environ["PIP_CONFIG_FILE"]  # ensurepip points it at nothing
sys.argv = ["pip", "install", *(a for a in sys.argv[1:] if a not in ("--no-setuptools", "--no-wheel"))]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def copy_known_files() -> None:
    """Lay out what git tracks, and what it would if added, as a collection."""
    shutil.rmtree(COPY, ignore_errors=True)
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        source = ROOT / name
        if name.startswith(SKIPPED_FOLDERS) or not source.exists():
            continue
        target = COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    # ansible-test asks git for the files, and git would answer that .cache/ is ignored.
    subprocess.run(["git", "init", "--quiet"], cwd=COPY, check=True)
    subprocess.run(["git", "add", "--all"], cwd=COPY, check=True)


def prepare_pip(home: Path) -> None:
    """Put the stand-in for get-pip in ansible-test's cache."""
    requirements = Path(ansible_test.__path__[0]) / "_internal" / "python_requirements.py"
    found = re.search(r"pip='([0-9.]+)'", requirements.read_text(encoding="utf-8"))
    if found is None:
        sys.exit(f"{requirements}: no pip version found; ansible-test changed: adapt {Path(__file__).name}")
    cache = home / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"get_pip_{found[1].replace('.', '_')}.py").write_text(GET_PIP, encoding="utf-8")


def carry_pip_settings(home: Path) -> None:
    """Keep how this user reaches the package index: ansible-test drops the environment, and the home is another."""
    settings = configparser.RawConfigParser()
    settings.read([Path.home() / ".config" / "pip" / "pip.conf", Path.home() / ".pip" / "pip.conf"])
    if not settings.has_section("global"):
        settings.add_section("global")
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            settings.set("global", name.removeprefix("PIP_").lower().replace("_", "-"), value)
    target = home / ".config" / "pip" / "pip.conf"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as stream:
        settings.write(stream)


def main() -> int:
    """Run every sanity test, or those named on the command line."""
    copy_known_files()
    home = WORK / "home"
    prepare_pip(home)
    carry_pip_settings(home)
    environment = {**os.environ, "HOME": str(home)}
    for name in ("ANSIBLE_CONFIG", "ANSIBLE_COLLECTIONS_PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    command = ["ansible-test", "sanity", "--python", f"{sys.version_info[0]}.{sys.version_info[1]}", "--color", "no"]
    return subprocess.run([*command, *sys.argv[1:]], cwd=COPY, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
