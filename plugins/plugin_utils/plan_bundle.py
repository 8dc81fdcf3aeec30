# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What hosts need of a bundle and it lacks: found before the first host is changed, and not by the installation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..module_utils.bundle_manifest import MANIFEST, BundleManifestError, parse_bundle_manifest
from .patch_catalogue import problem

PARTS = ("mirror", "paths", "releases", "uv", "models")  # of a plan, that decide


def bundle_problems(plans: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Releases, models, interpreters and uv that hosts would look for on a mirror in vain.

    A bundle that is not on this machine, or is none, says nothing here: publishing it tells.

    Args:
        plans: of the hosts of this run, by host.

    Returns:
        A ``host`` with ``problems`` for each mirror whose ``wheel_mirror_bundle`` is at hand.
    """
    found = []
    for mirror, plan in plans.items():
        if not plan["mirror"].get("bundle") or (files := _files(Path(plan["mirror"]["bundle"]))) is None:
            continue
        parts = {"/".join(file.split("/")[:2]) for file in files}
        lacking: dict[str, list[str]] = {}
        for host, other in plans.items():
            for what, path in _needs(other) if other["mirror"]["url"] == plan["mirror"]["url"] else ():
                if path not in parts:
                    lacking.setdefault(what, []).append(host)
        problems = [
            problem(
                "wheel_mirror_bundle",
                f"{plan['mirror']['bundle']} lacks {what}, which {', '.join(hosts)} would look for on this mirror",
                "Make the bundle anew with playbooks/bundle.yml and this inventory.",
            )
            for what, hosts in lacking.items()
        ]
        found.append({"host": mirror, "problems": problems})
    return found


def _files(bundle: Path) -> Iterable[str] | None:
    try:
        return parse_bundle_manifest((bundle.expanduser() / MANIFEST).read_bytes(), str(bundle)).files
    except (OSError, BundleManifestError):
        return None


def _needs(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is needed, and the file or directory that it is in a bundle."""
    for release in plan["releases"]:
        yield f"release {release['id']}", f"releases/{release['id']}"
        if release["interpreter"]:
            yield f"interpreter {release['interpreter']['file']}", f"python/{release['interpreter']['file']}"
    if plan["releases"]:
        yield f"uv {plan['uv']['version']}", f"wheels/{plan['uv']['file']}"
    if not plan["paths"]["share"]:  # where a model may lie that no bundle has
        for model in plan["models"]:
            yield f"model {model['name']}", f"models/{model['name']}"
