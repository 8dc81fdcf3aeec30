"""Release definitions: what is shipped is right, what is wrong is named, and the id follows the content."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import shipped_profiles
from ansible_collections.onprem.vllm.plugins.plugin_utils.lock import LockError, parse_lock
from ansible_collections.onprem.vllm.plugins.plugin_utils.patch_catalogue import load_patches
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.profile import load_profiles
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import (
    CATALOGUE,
    Release,
    ReleaseError,
    load_release,
    load_uv,
    shipped_releases,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.wheels import target_tags, wheel_rank
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

RELEASES = shipped_releases()
LOCKED = [name for name in RELEASES if load_release(name).lock_sha256 is not None]
SM120 = "sm120-sparse-mla-dense-prefill"
GEMMA = "gemma-4-mtp-embeddings"

DEFINITION = {
    "vllm": "0.28.0",
    "variant": "cu130",
    "python": "3.12",
    "platform": "x86_64-manylinux_2_36",
    "requirements": ["vllm==0.28.0"],
}


LOCK = f"vllm==0.28.0 --hash=sha256:{'a' * 64}\n"


def site(tmp_path: Path, lock: str = LOCK, **changes: object) -> dict[str, object]:
    path = tmp_path / "lock.txt"
    path.write_text(lock)
    definition = {**DEFINITION, "lock": str(path), **changes}
    return {"site": {key: value for key, value in definition.items() if value is not None}}


def test_what_the_issue_asks_for_is_shipped_with_a_lock():
    assert set(LOCKED) == {
        *("0.25.0-cu130", "0.28.0-cu130", "0.31.0-cu130", "0.33.0-cu130"),
        *("0.25.0-cu130-gemma4", "0.25.0-cu130-sm120", "0.28.0-cu130-sm120"),
        *("0.28.0-cpu", "0.31.0-cpu"),
        *("litellm-1.108.7", "litellm-1.108.7-py311"),
    }
    assert {path.stem for path in (CATALOGUE / "releases").glob("*.txt")} == {
        load_release(one).lock_of for one in LOCKED
    }
    assert {"0.28.0-cu129", "0.28.0-cu130-cubin"} <= set(RELEASES)


@pytest.mark.parametrize("name", RELEASES)
def test_a_shipped_definition_loads(name):
    release = load_release(name)
    assert release.name == name
    assert release.description
    assert (release.lock_sha256 is not None) == (name in LOCKED)
    assert re.fullmatch(re.escape(name) + "-[0-9a-f]{8}", release.id)
    assert load_release(name).id == release.id


@pytest.mark.parametrize("name", LOCKED)
def test_a_shipped_lock_holds_names_versions_and_hashes_alone(name):
    release = load_release(name)
    text = release.lock_text()
    assert not re.search(r"://|/|\bfile:|@ ", re.sub(r"#.*", "", text)), "a lock says what, never from where"
    pins = {pin.name: pin for pin in parse_lock(text, name)}
    assert len(pins) > 100
    for requirement in release.requirements:
        wanted = Requirement(requirement)
        assert wanted.specifier.contains(pins[wanted.name].version, prereleases=True)
    for wheel in release.metadata_wheels:
        assert pins[wheel.name].version == wheel.version
    for overlap in release.overlaps:
        assert {overlap.winner, overlap.loser} <= set(pins)


def test_a_release_without_a_lock_says_how_to_get_one():
    release = load_release("0.28.0-cu129")
    assert release.lock_sha256 is None
    assert release.as_plan()["lock_sha256"] is None
    with pytest.raises(ReleaseError, match=r"make lock RELEASE=0\.28\.0-cu129"):
        release.lock_text()


def test_the_id_follows_what_is_installed_and_nothing_else(tmp_path):
    def release_id(**changes: object) -> str:
        return load_release("site", site(tmp_path, **changes)).id

    base = release_id()
    assert base == release_id(description="another text")
    assert base == release_id(indexes={"inner": "https://inner.example/simple"}, sources={"vllm": ["inner"]})
    assert base != release_id(overlaps=[{"winner": "a", "loser": "b"}])
    assert base != release_id(python="3.13")
    assert base != release_id(lock=str(tmp_path / "lock.txt"), requirements=["vllm==0.28.0", "ray==2.0"])
    assert base != load_release("site", site(tmp_path, lock=f"vllm==0.28.0 --hash=sha256:{'b' * 64}\n")).id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"litellm": "1.108.7"}, "names vllm and litellm: a release is made for one of them"),
        ({"vllm": None, "litellm": "1.82.7"}, "litellm 1.82.7 is refused: malicious"),
        ({"vllm": None, "litellm": "1.108.7"}, "variant: only a release of vLLM has that"),
        ({"vllm": 0.28}, "vllm is 0.28, expected a version in quotes"),
        ({"variant": "cuda"}, "variant is 'cuda'"),
        ({"python": 3.12}, "python is 3.12, expected a Python version in quotes"),
        ({"platform": "manylinux_2_36"}, "platform is 'manylinux_2_36'"),
        ({"requirements": []}, "requirements is empty"),
        ({"requirements": ["vllm = 0.28"]}, "'vllm = 0.28' is no requirement"),
        ({"requirements": ["vllm @ https://x.example/vllm.whl"]}, "names an address"),
        ({"wheels": []}, "wheels: there is no such key; known are description"),
        ({"overlaps": [{"winner": "a"}]}, "must have loser, winner"),
        ({"overlaps": [{"winner": "A_b", "loser": "a-b"}]}, "overlaps: a-b with itself"),
        ({"sources": {"torch": ["pytorch"]}}, "there is no index 'pytorch'"),
        ({"indexes": {"default": "https://x.example"}}, "cannot be named anew"),
        ({"indexes": {"x": "x.example"}}, "expected http"),
        ({"interpreter": {"file": "a/b", "sha256": "0" * 64}}, "interpreter must have exactly"),
        ({"lock": "locks/x.txt"}, "expected an absolute path"),
        ({"lock": "/nowhere/x.txt"}, "does not exist"),
        ({"lock": "0.28.0-cu131"}, "lock: There is no release '0.28.0-cu131'"),
        ({"lock": "site"}, "lock: release site has none of its own"),
        ({"lock": "0.28.0-cu130-sm120"}, "lock: release 0.28.0-cu130-sm120 has none of its own: name 0.28.0-cu130"),
        ({"lock": "0.31.0-cu130"}, "lock: release 0.31.0-cu130 is locked for other vllm, requirements"),
        ({"lock": "0.28.0-cu130", "overrides": ["x==1"]}, "locked for other requirements, overrides:"),
        ({"patches": SM120}, "expected a list of names"),
        ({"patches": ["sm120"]}, "there is no patch 'sm120'"),
        ({"vllm": "0.28.7", "patches": [SM120]}, f"patch {SM120} does not know vllm 0.28.7"),
        ({"flashinfer": {"overrides": {"flashinfer-python": "0.6.18"}}}, "flashinfer.reason: is missing"),
        ({"flashinfer": {"disable_version_check": True}}, "flashinfer.reason: is missing"),
        ({"flashinfer": {"versions": {}}}, "flashinfer.versions: there is no such key"),
        ({"for": ["sm120"]}, "for is ['sm120'], expected architectures and profiles"),
        ({"for": {"gpus": ["sm120"]}}, "expected architectures and profiles"),
        ({"for": {"architectures": ["SM120"]}}, "for.architectures is ['SM120']"),
        ({"for": {"profiles": "glm"}}, "for.profiles is 'glm'"),
    ],
)
def test_a_wrong_definition_is_named(tmp_path, changes, message):
    definitions = site(tmp_path)
    definitions["site"].update(changes)
    definitions["site"] = {key: value for key, value in definitions["site"].items() if value is not None}
    with pytest.raises(ReleaseError) as caught:
        load_release("site", definitions)
    assert message in str(caught.value)
    assert "release site (inventory)" in str(caught.value)


REFUSED = [
    (name, version)
    for name, found in yaml.safe_load((CATALOGUE / "refused.yml").read_text()).items()
    for version in found
]


def test_the_compromised_versions_are_known():
    assert {("litellm", "1.82.7"), ("litellm", "1.82.8"), ("litellm", "1.107.0")} <= {*REFUSED}


@pytest.mark.parametrize(("package", "version"), REFUSED)
def test_a_lock_with_a_refused_version_is_a_problem_whatever_it_is_for(tmp_path, package, version):
    lock = f"{LOCK}{package}=={version} --hash=sha256:{'b' * 64}\n"
    with pytest.raises(ReleaseError, match=rf"lock lock\.txt: {package} {re.escape(version)} is refused: "):
        load_release("site", site(tmp_path, lock))


def test_a_release_of_litellm_names_its_version_and_no_accelerator():
    release = load_release("litellm-1.108.7")
    assert (release.package, release.version, release.vllm) == ("litellm", "1.108.7", "")
    assert release.accelerator == release.variant == "none"
    assert {"litellm": "1.108.7", "variant": "none", "patches": []}.items() <= release.as_plan().items()
    assert "vllm" not in release.as_plan()
    assert release.locked()["litellm"] == "1.108.7"
    assert release.set_problems() == []


def test_ids_of_releases_that_hosts_have_installed():
    """Written out: what a release is may grow, what is installed stays what it is."""
    assert {name: load_release(name).id for name in ("0.28.0-cpu", "0.31.0-cu130", "0.25.0-cu130-sm120")} == {
        "0.28.0-cpu": "0.28.0-cpu-6234a278",
        "0.31.0-cu130": "0.31.0-cu130-c8565a69",
        "0.25.0-cu130-sm120": "0.25.0-cu130-sm120-6bf6dd0d",
    }


def test_all_problems_come_at_once(tmp_path):
    with pytest.raises(ReleaseError) as caught:
        load_release("site", site(tmp_path, vllm="x.y", variant="gpu", python="312", platform=None))
    for word in ("vllm", "variant", "python", "platform"):
        assert f"{word} is" in str(caught.value)


def test_an_unknown_release_names_the_known_ones(tmp_path):
    with pytest.raises(ReleaseError, match=r"no release '0\.27\.9-cpu'.*0\.28\.0-cpu.*site"):
        load_release("0.27.9-cpu", site(tmp_path))
    with pytest.raises(ReleaseError, match="is no release name"):
        load_release("../../etc/passwd")


def test_a_broken_catalogue_file_is_named(tmp_path):
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / "x.yml").write_text("a: [1\n")
    with pytest.raises(ReleaseError, match=r"x\.yml: not YAML"):
        load_release("x", catalogue=tmp_path)


def test_uv_is_pinned_for_both_machines():
    uv = load_uv()
    for machine, wheel in uv["wheels"].items():
        assert wheel["file"].startswith(f"uv-{uv['version']}-")
        assert re.fullmatch("[0-9a-f]{64}", wheel["sha256"])
        # Debian 12 is the oldest host.
        assert wheel_rank(wheel["file"], target_tags("3.11", machine, (2, 36))) is not None
    assert set(uv["wheels"]) == {"x86_64", "aarch64"}


def test_definitions_name_no_machine():
    for name in RELEASES:
        definition = yaml.safe_load((CATALOGUE / "releases" / f"{name}.yml").read_text())
        assert all(url.startswith("https://") for url in definition.get("indexes", {}).values())


H = "--hash=sha256:" + "c" * 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        (f"a==1 {H}\n--index-url https://x.example/simple\n", "option '--index-url'"),
        (f"-r other.txt\na==1 {H}\n", "option '-r'"),
        (f"a>=1 {H}\n", "a is not pinned"),
        (f"a==1.* {H}\n", "a is not pinned"),
        (f"a @ https://x.example/a.whl {H}\n", "a is not pinned"),
        ("a==1\n", "a needs sha256 hashes"),
        ("a==1 --hash=md5:" + "c" * 32 + "\n", "a needs sha256 hashes"),
        (f"a==1 {H}0\n", "a needs sha256 hashes"),
        (f"a==1 {H}\nA==2 {H}\n", "a stands there twice"),
        (f"a==1 {H} \\\n", "ends in the middle"),
        (f"a b c {H}\n", "is no requirement"),
    ],
)
def test_a_wrong_lock_is_refused(text, message):
    with pytest.raises(LockError) as caught:
        parse_lock(text, "x.txt")
    assert message in str(caught.value)


def test_a_lock_is_read_with_comments_continuations_and_markers():
    two = f"{H} \\\n    {H.replace('c', 'd')}"
    text = f"# made by hand\nB_c==1.0 ; python_version >= '3.11' \\\n    {two}\n    # via x\na==2 {H}\n"
    pins = parse_lock(text, "x")
    assert [(pin.name, pin.version, len(pin.hashes), pin.marker is not None) for pin in pins] == [
        ("a", "2", 1, False),
        ("b-c", "1.0", 2, True),
    ]


# --- patches, FlashInfer, shared locks ---


@pytest.mark.parametrize("name", [name for name in LOCKED if "-" not in name.partition("-c")[2]])
def test_releases_without_patches_keep_the_id_that_hosts_have_installed(name):
    """The form of before there were patches, written here apart: another id would install every release anew."""
    definition = yaml.safe_load((CATALOGUE / "releases" / f"{name}.yml").read_text())
    counts = {key: definition[key] for key in sorted({*definition} - {"description", "for", "indexes", "sources"})}
    content = json.dumps([counts, load_release(name).lock_sha256], sort_keys=True, separators=(",", ":"))
    release = load_release(name)
    assert release.id == f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    assert (release.as_plan()["patches"], release.as_plan()["environment"]) == ([], {})


def test_a_patch_makes_another_release_of_the_same_lock():
    plain, patched = load_release("0.28.0-cu130"), load_release("0.28.0-cu130-sm120")
    assert patched.lock_sha256 == plain.lock_sha256
    assert patched.lock_text() == plain.lock_text()
    assert [one["name"] for one in patched.as_plan()["patches"]] == [SM120]
    assert patched.carries(SM120)
    assert not plain.carries(SM120)


def test_the_id_follows_what_the_patches_do_and_not_what_is_said_of_them(tmp_path):
    def release_id(patches: list[str] | None, **site_s: object) -> str:
        return load_release("site", site(tmp_path, patches=patches), patches=load_patches(site_s)).id

    shipped = yaml.safe_load((CATALOGUE / "patches" / f"{SM120}.yml").read_text())
    plain, patched = release_id(None), release_id([SM120])
    assert plain == release_id([])
    assert patched != plain
    assert patched == release_id([SM120, SM120])
    assert patched == release_id([SM120], **{SM120: {**shipped, "why": "Another wording."}})
    other = {**shipped, "entries": [{**shipped["entries"][0], "after": "0" * 64}]}
    assert release_id([SM120], **{SM120: other}) not in {plain, patched}


def test_a_patch_that_is_not_needed_changes_nothing_and_is_told(tmp_path):
    release = load_release("site", site(tmp_path, patches=[GEMMA]))
    assert release.id == load_release("site", site(tmp_path)).id
    assert release.as_plan()["patches"] == []
    (left_out,) = release.patches.needless
    assert left_out.reason == "vllm 0.28.0 does not need it: it has the fix of pull request 47953"


def test_a_patch_of_another_package_goes_by_the_lock(tmp_path):
    own = {
        "package": "Flash_Attn",
        "file": "flash_attn/x.py",
        "why": "It breaks.",
        "upstream": "ticket 12",
        "edit": [{"find": "a", "replace": "b"}],
        "entries": [{"versions": "==2.8.0", "before": "1" * 64, "after": "2" * 64}],
    }
    patches = load_patches({"mine": own})
    lock = f"{LOCK}flash-attn==2.8.0 --hash=sha256:{'b' * 64}\n"
    (patch,) = load_release("site", site(tmp_path, lock, patches=["mine"]), patches=patches).as_plan()["patches"]
    assert patch["file"] == "flash_attn/x.py"
    with pytest.raises(ReleaseError, match="which the release does not lock"):
        load_release("site", site(tmp_path, patches=["mine"]), patches=patches)


def test_a_declaration_is_part_of_the_release_and_its_wording_is_not(tmp_path):
    def release(**declaration: object) -> Release:
        return load_release("site", site(tmp_path, flashinfer=declaration or None))

    mixed = {"overrides": {"flashinfer-python": "0.6.18"}, "disable_version_check": True}
    made = release(**mixed, reason="Measured.")
    assert made.as_plan()["environment"] == {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}
    assert made.as_plan()["flashinfer"] == {**mixed, "reason": "Measured."}
    assert made.id == release(**mixed, reason="Measured twice.").id
    assert made.id != release(**{**mixed, "disable_version_check": False}, reason="Measured.").id
    assert made.id != release().id
    assert release().as_plan()["flashinfer"] is None


def test_the_release_for_sm120_overrides_what_vllm_pins_and_says_so():
    release = load_release("0.25.0-cu130-sm120")
    assert release.locked()["flashinfer-python"] == "0.6.16.post3"
    assert "flashinfer-cubin" not in release.locked()
    assert release.set_problems() == []
    assert "kv_scale_format" in release.flashinfer.reason
    silent = {**yaml.safe_load((CATALOGUE / "releases" / "0.25.0-cu130-sm120.yml").read_text()), "flashinfer": None}
    problems = load_release("silent", {"silent": {**silent, "lock": str(release.lock_path)}}).set_problems()
    assert [one["what"] for one in problems] == [
        "has no flashinfer-cubin, vLLM 0.25.0 pins 0.6.13",
        "has flashinfer-python 0.6.16.post3, vLLM 0.25.0 pins 0.6.13",
    ]


@pytest.mark.parametrize("name", [name for name in RELEASES if load_release(name).vllm])
def test_a_shipped_release_works_with_every_profile_it_is_made_for(name):
    release = load_release(name)
    profiles = load_profiles({}, [])
    assert release.architectures
    assert release.profiles
    assert set(release.profiles) <= set(shipped_profiles())
    carried = [chosen.patch.name for chosen in release.patches.apply]
    assert release.patches.needless == ()
    for profile in release.profiles:
        assert profiles[profile].refusals(release.vllm, carried, release.locked()) == []
        if name in LOCKED:
            chain = [shipped_profiles()[one] for one in profiles[profile].chain]
            models = {one[key]: {"directory": "/m"} for one in chain for key in ("model", "draft_model") if key in one}
            instance = {"vllm_release": name, "vllm_instances": {"x": {"profile": profile, "port": 8000}}}
            plan = compose_plan("gpu1", ["vllm"], {**TINY, "vllm_models": models, **instance})
            assert plan["problems"] == []
            assert [note for note in plan["notes"] if "is made for" in note["what"]] == []


@pytest.mark.parametrize("name", RELEASES)
def test_a_shipped_release_says_why_it_is_there(name):
    release = load_release(name)
    assert release.version in release.description
    assert " for " in release.description.replace("For ", "for ").replace("\n", " "), "for which hosts, and why"
    assert len(release.description) > 80


@pytest.mark.parametrize("profile", sorted(shipped_profiles()))
def test_there_is_a_locked_release_for_every_shipped_profile(profile):
    assert any(profile in load_release(name).profiles for name in LOCKED)


def test_a_lock_of_another_release_may_be_a_site_s(tmp_path):
    definitions = site(tmp_path)
    definitions["patched"] = {**DEFINITION, "lock": "site", "patches": [SM120]}
    patched, plain = load_release("patched", definitions), load_release("site", definitions)
    assert patched.lock_path == plain.lock_path == tmp_path / "lock.txt"
    assert (patched.lock_of, plain.lock_of) == ("site", "site")


def test_a_release_that_takes_a_missing_lock_says_whose_to_make():
    shipped = yaml.safe_load((CATALOGUE / "releases" / "0.28.0-cu129.yml").read_text())
    release = load_release("site", {"site": {**shipped, "lock": "0.28.0-cu129"}})
    with pytest.raises(ReleaseError, match=r"make lock RELEASE=0\.28\.0-cu129$"):
        release.lock_text()
    assert (release.locked(), release.set_problems()) == ({}, [])


def test_a_lock_that_cannot_be_trusted_is_no_basis_for_patches(tmp_path):
    with pytest.raises(ReleaseError, match="vllm is not pinned"):
        load_release("site", site(tmp_path, lock=f"vllm>=0.28 {H}\n", patches=[SM120]))


def test_an_edited_lock_is_read_again(tmp_path):
    assert load_release("site", site(tmp_path)).locked() == {"vllm": "0.28.0"}
    assert load_release("site", site(tmp_path, lock=f"torch==2.13.0 {H}\n")).locked() == {"torch": "2.13.0"}


KEYS = st.sampled_from(
    ["overrides", "reason", "disable_version_check", "architectures", "profiles", "flashinfer-cubin"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["0.6.18", SM120, "sm120", "flashinfer-python", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["patches", "flashinfer", "for"]), VALUES))
def test_whatever_stands_in_the_new_keys_is_read_or_refused(content):
    plain = yaml.safe_load((CATALOGUE / "releases" / "0.28.0-cu130.yml").read_text())
    try:
        release = load_release("site", {"site": {**plain, "lock": "0.28.0-cu130", **content}})
    except ReleaseError:
        assert content, "the release as it is shipped loads"
        return
    json.dumps(release.as_plan())
    release.set_problems()
