"""Release definitions: what is shipped is right, what is wrong is named, and the id follows the content."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.lock import LockError, parse_lock
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import (
    CATALOGUE,
    ReleaseError,
    load_release,
    load_uv,
    shipped_releases,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.wheels import target_tags, wheel_rank
from packaging.requirements import Requirement

RELEASES = shipped_releases()
LOCKED = [name for name in RELEASES if (CATALOGUE / "releases" / f"{name}.txt").exists()]

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
        *("0.28.0-cpu", "0.31.0-cpu"),
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
        ({"vllm": 0.28}, "vllm is 0.28, expected a version in quotes"),
        ({"variant": "cuda"}, "variant is 'cuda'"),
        ({"python": 3.12}, "python is 3.12, expected a Python version in quotes"),
        ({"platform": "manylinux_2_36"}, "platform is 'manylinux_2_36'"),
        ({"requirements": []}, "requirements is empty"),
        ({"requirements": ["vllm = 0.28"]}, "'vllm = 0.28' is no requirement"),
        ({"requirements": ["vllm @ https://x.example/vllm.whl"]}, "names an address"),
        ({"wheels": []}, "unknown keys wheels"),
        ({"overlaps": [{"winner": "a"}]}, "must have loser, winner"),
        ({"overlaps": [{"winner": "A_b", "loser": "a-b"}]}, "overlap of a-b with itself"),
        ({"sources": {"torch": ["pytorch"]}}, "there is no index 'pytorch'"),
        ({"indexes": {"default": "https://x.example"}}, "cannot be named anew"),
        ({"indexes": {"x": "x.example"}}, "expected http"),
        ({"interpreter": {"file": "a/b", "sha256": "0" * 64}}, "interpreter must have exactly"),
        ({"lock": "locks/x.txt"}, "expected an absolute path"),
        ({"lock": "/nowhere/x.txt"}, "does not exist"),
    ],
)
def test_a_wrong_definition_is_named(tmp_path, changes, message):
    definitions = site(tmp_path)
    definitions["site"].update(changes)
    with pytest.raises(ReleaseError) as caught:
        load_release("site", definitions)
    assert message in str(caught.value)
    assert "release site (inventory)" in str(caught.value)


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
