# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a bundle lacks is told before a host is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.bundle_manifest import MANIFEST, BundleFile, BundleManifest
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_bundle import bundle_problems
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import MIRROR, RELEASE_ID, TINY, plan

UV = plan()["uv"]["file"]
FILES = [f"releases/{RELEASE_ID}/requirements.txt", f"wheels/{UV}", "models/tiny-qwen3/config.json"]


def lacks(bundle: Path, files: list[str], hosts: dict[str, dict[str, Any]]) -> list[str]:
    manifest = BundleManifest({file: BundleFile("0" * 64, 1) for file in files})
    (bundle / MANIFEST).write_bytes(manifest.to_bytes())
    mirror = plan({**TINY, **MIRROR, "wheel_mirror_bundle": str(bundle)}, groups=("mirror",))
    (found,) = bundle_problems({"mirror1": mirror, **hosts})
    assert found["host"] == "mirror1"
    assert {problem["where"] for problem in found["problems"]} <= {"wheel_mirror_bundle"}
    return [problem["what"].removeprefix(f"{bundle} lacks ") for problem in found["problems"]]


def test_a_bundle_that_has_everything(tmp_path: Path) -> None:
    assert lacks(tmp_path, FILES, {"glm1": plan(), "glm2": plan()}) == []


@pytest.mark.parametrize(
    ("file", "what"), list(zip(FILES, [f"release {RELEASE_ID}", "uv 0.13.9", "model tiny-qwen3"], strict=True))
)
def test_each_part_that_is_missing_is_named_once_with_its_hosts(tmp_path: Path, file: str, what: str) -> None:
    """A neighbour with a longer name does not pass for it."""
    others = [other for other in FILES if other != file]
    found = lacks(
        tmp_path, [*others, f"{Path(file).parts[0]}/{Path(file).parts[1]}-x"], {"glm1": plan(), "glm2": plan()}
    )
    assert found == [f"{what}, which glm1, glm2 would look for on this mirror"]


def test_what_a_host_has_from_elsewhere_need_not_be_in_the_bundle(tmp_path: Path) -> None:
    elsewhere = plan(vllm_mirror_url="http://another")
    shared = plan(hf_cache_share="/mnt/models")
    assert lacks(tmp_path, ["wheels/x.whl"], {"glm1": elsewhere}) == []
    assert lacks(tmp_path, FILES[:2], {"glm1": shared}) == []


def test_an_interpreter_is_looked_for(tmp_path: Path) -> None:
    made = plan()
    made["releases"][0]["interpreter"] = {"file": "cpython.tar.gz", "sha256": "0" * 64}
    (found,) = lacks(tmp_path, FILES, {"glm1": made})
    assert found.startswith("interpreter cpython.tar.gz")
    assert lacks(tmp_path, [*FILES, "python/cpython.tar.gz"], {"glm1": made}) == []


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_bundle_that_is_not_there_or_is_none_is_left_to_publishing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    mirror = plan({**TINY, **MIRROR, "wheel_mirror_bundle": str(tmp_path)}, groups=("mirror",))
    assert bundle_problems({"mirror1": mirror, "glm1": plan()}) == []
