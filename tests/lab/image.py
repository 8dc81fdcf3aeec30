# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The image of a lab host: Debian 12 with systemd and sshd, built once for each content of ``image/``."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

SUITE = "bookworm"
REPOSITORY = "localhost/onprem-vllm-lab"
RECIPE = Path(__file__).resolve().parent / "image"


def recipe_digest(recipe: Path = RECIPE) -> str:
    """The first 12 hex digits of the sha256 over the names, modes and content of the recipe's files."""
    digest = hashlib.sha256(SUITE.encode())
    for path in sorted(recipe.rglob("*")):
        if path.is_file():
            digest.update(f"\0{path.relative_to(recipe)}\0{path.stat().st_mode & 0o111:o}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def tag() -> str:
    return f"{REPOSITORY}:{recipe_digest()}"


def apt_sources(targets: str, suite: str = SUITE) -> list[str]:
    """One-line package sources for ``suite`` from ``apt-get indextargets`` lines ``uri|suite|component|trusted``.

    Empty where this machine runs another release: mmdebstrap then takes its own default mirror.
    """
    lines = []
    for target in targets.splitlines():
        uri, target_suite, component, trusted = target.split("|")
        if target_suite in {suite, f"{suite}-updates", f"{suite}-security"} and component == "main":
            option = "[trusted=yes] " if trusted == "yes" else ""
            lines.append(f"deb {option}{uri} {target_suite} {component}")
    return lines if any(f" {suite} " in line for line in lines) else []


def build(scratch: Path) -> None:
    """Build the image and import it into podman under :func:`tag`.

    Raises:
        subprocess.CalledProcessError: mmdebstrap or podman failed; its messages are on stderr already.
    """
    form = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(TRUSTED)"
    targets = _output("apt-get", "indextargets", "--format", form, "Created-By: Packages")
    settings = [
        line.rstrip(";")
        for line in _output("apt-config", "dump").splitlines()
        if line.startswith(("Acquire::http", "Acquire::https", "Acquire::Check"))
    ]
    sources = apt_sources(targets)
    packages = (RECIPE / "packages.txt").read_text().split()
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        archive = f"{directory}/root.tar"
        subprocess.run(
            [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={','.join(packages)}",
                *[f"--aptopt={setting}" for setting in settings],
                f"--dpkgopt={RECIPE}/dpkg.cfg",
                f"--customize-hook=sync-in '{RECIPE}/files' /",
                f"--customize-hook=sh '{RECIPE}/setup.sh' \"$1\"",
                SUITE,
                archive,
                *(["-"] if sources else []),
            ],
            input="\n".join(sources) + "\n",
            text=True,
            check=True,
        )
        subprocess.run(["podman", "import", "--quiet", archive, tag()], check=True, stdout=subprocess.DEVNULL)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
