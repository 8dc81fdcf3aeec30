"""Patches of installed files: exact or refused, never in place, whatever interrupts them."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.atomic import sha256_bytes
from ansible_collections.onprem.vllm.plugins.module_utils.source_patch import (
    PatchError,
    apply_diff,
    apply_edit,
    apply_patch,
    check_diff,
    expected_hashes,
)
from ansible_collections.onprem.vllm.tests.release_bundle import make_wheel
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
BEFORE = b"class Attention:\n    is_sparse = True\n\n    def run(self):\n        return 1\n"
AFTER = BEFORE.replace(b"True\n", b"True\n    dense = False\n")
FILE = "engine/attention.py"
PATCH = {
    "name": "dense",
    "package": "engine",
    "file": FILE,
    "before": sha256_bytes(BEFORE),
    "after": sha256_bytes(AFTER),
    "edit": [{"find": "    is_sparse = True\n", "replace": "    is_sparse = True\n    dense = False\n", "times": 1}],
}


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A release's site-packages with one file, which uv's cache and another release share by hard links."""
    place = tmp_path / "release" / "site-packages"
    for name in ("release/site-packages", "sibling/site-packages", "cache"):
        (tmp_path / name / "engine").mkdir(parents=True)
    (place / FILE).write_bytes(BEFORE)
    os.link(place / FILE, tmp_path / "sibling" / "site-packages" / FILE)
    os.link(place / FILE, tmp_path / "cache" / FILE)
    return place


def originals(site_packages: Path) -> Path:
    return site_packages.parent / "originals"


# --- on disk ---


def test_a_patch_is_applied_once_and_found_applied_later(site_packages):
    assert apply_patch(site_packages, PATCH, originals(site_packages)) == "applied"
    assert (site_packages / FILE).read_bytes() == AFTER
    inode = (site_packages / FILE).stat().st_ino
    assert apply_patch(site_packages, PATCH, originals(site_packages)) == "already applied"
    assert (site_packages / FILE).stat().st_ino == inode
    assert sorted(path.name for path in (site_packages / "engine").iterdir()) == ["attention.py"]


def test_the_sibling_release_and_the_cache_keep_their_file(site_packages, tmp_path):
    others = [tmp_path / "sibling" / "site-packages" / FILE, tmp_path / "cache" / FILE]
    inode = others[0].stat().st_ino
    apply_patch(site_packages, PATCH, originals(site_packages))
    for other in others:
        assert other.read_bytes() == BEFORE
        assert other.stat().st_ino == inode
        assert other.stat().st_nlink == 2


def test_what_uv_installs_afterwards_is_the_wheels_file(tmp_path):
    """With uv itself: the release that is patched, one installed before, and one installed from the cache after."""
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", "engine", "1.0", {FILE: BEFORE})

    def install(release: str) -> Path:
        target = tmp_path / release
        uv = [sys.executable, "-m", "uv", "--no-config", "--cache-dir", str(tmp_path / "cache"), "pip", "install"]
        options = ["--offline", "--no-index", "--find-links", str(tmp_path / "wheels"), "--link-mode", "hardlink"]
        subprocess.run([*uv, *options, "--target", str(target), "engine==1.0"], check=True, capture_output=True)
        return target

    sibling, patched_one = install("sibling"), install("patched")
    assert (sibling / FILE).samefile(patched_one / FILE), "nothing shared: this test would prove nothing"
    assert apply_patch(patched_one, PATCH, tmp_path / "originals") == "applied"
    assert (patched_one / FILE).read_bytes() == AFTER
    assert (sibling / FILE).read_bytes() == BEFORE
    assert (install("later") / FILE).read_bytes() == BEFORE


def test_the_original_is_kept_and_is_no_link_to_the_shared_file(site_packages):
    apply_patch(site_packages, PATCH, originals(site_packages))
    kept = originals(site_packages) / FILE
    assert kept.read_bytes() == BEFORE
    assert kept.stat().st_nlink == 1


def test_mode_and_owner_stay(site_packages):
    path = site_packages / FILE
    path.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(path, 12345, 54321)
    before = path.stat()
    apply_patch(site_packages, PATCH, originals(site_packages))
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize("position", range(len(BEFORE)))
def test_a_file_changed_by_one_byte_anywhere_is_refused(site_packages, position):
    changed = bytearray(BEFORE)
    changed[position] ^= 1
    (site_packages / FILE).write_bytes(changed)
    with pytest.raises(PatchError) as refused:
        apply_patch(site_packages, PATCH, originals(site_packages))
    message = str(refused.value)
    for part in (str(site_packages / FILE), sha256_bytes(bytes(changed)), PATCH["before"], "take the patch out"):
        assert part in message
    assert (site_packages / FILE).read_bytes() == changed
    assert not originals(site_packages).exists()


def test_another_result_than_promised_is_refused(site_packages):
    wrong = {**PATCH, "after": "0" * 64}
    with pytest.raises(PatchError, match=f"{sha256_bytes(AFTER)}, promised was {'0' * 64}"):
        apply_patch(site_packages, wrong, originals(site_packages))
    assert (site_packages / FILE).read_bytes() == BEFORE
    assert not originals(site_packages).exists()


def test_a_missing_file_is_named(site_packages):
    (site_packages / FILE).unlink()
    with pytest.raises(PatchError, match=r"engine/attention\.py, which does not exist"):
        apply_patch(site_packages, PATCH, originals(site_packages))


def test_a_link_is_not_followed_out_of_the_release(site_packages, tmp_path):
    target = tmp_path / "cache" / FILE
    (site_packages / FILE).unlink()
    (site_packages / FILE).symlink_to(target)
    with pytest.raises(PatchError, match="a link"):
        apply_patch(site_packages, PATCH, originals(site_packages))
    (site_packages / FILE).unlink()
    (site_packages / "engine").rmdir()
    (site_packages / "engine").symlink_to(tmp_path / "cache" / "engine")
    with pytest.raises(PatchError, match="a link"):
        apply_patch(site_packages, PATCH, originals(site_packages))
    assert target.read_bytes() == BEFORE


@pytest.mark.parametrize(
    "file", ["../cache/engine/attention.py", "/etc/passwd", "engine/../x.py", "./x.py", "a//b.py", ""]
)
def test_a_path_out_of_site_packages_is_refused(site_packages, file):
    with pytest.raises(PatchError, match="no plain path below site-packages"):
        apply_patch(site_packages, {**PATCH, "file": file}, originals(site_packages))


@pytest.mark.parametrize("file", ["engine-1.dist-info/RECORD", "engine/__pycache__/attention.cpython-312.pyc"])
def test_what_no_wheel_brings_as_source_is_refused(site_packages, file):
    with pytest.raises(PatchError, match="not a source"):
        apply_patch(site_packages, {**PATCH, "file": file}, originals(site_packages))


def run_module(site_packages: Path) -> str:
    code = "import engine.attention as a; print(getattr(a.Attention, 'dense', 'unpatched'))"
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(site_packages)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def test_python_runs_the_patched_code_although_the_bytecode_is_never_compared(site_packages):
    def compile_module() -> None:
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        for level in (0, 1, 2):
            py_compile.compile(str(site_packages / FILE), doraise=True, invalidation_mode=mode, optimize=level)
            os.utime(site_packages / FILE)

    compile_module()
    neighbour = site_packages / "engine" / "__pycache__" / "attention_other.cpython-312.pyc"
    neighbour.write_bytes(b"")
    assert run_module(site_packages) == "unpatched"
    # The test of the test: without the removal the old code goes on.
    content = (site_packages / FILE).read_bytes()
    (site_packages / FILE).unlink()
    (site_packages / FILE).write_bytes(AFTER)
    assert run_module(site_packages) == "unpatched"
    # Found patched with the bytecode of the original, as an interrupted run of something else may leave it.
    assert apply_patch(site_packages, PATCH, originals(site_packages)) == "already applied"
    assert run_module(site_packages) == "False"
    (site_packages / FILE).unlink()
    (site_packages / FILE).write_bytes(content)
    compile_module()
    assert apply_patch(site_packages, PATCH, originals(site_packages)) == "applied"
    assert [path.name for path in neighbour.parent.iterdir()] == [neighbour.name]
    assert run_module(site_packages) == "False"


def test_a_disk_that_is_full_leaves_the_file_and_no_remains(site_packages):
    # The kernel refuses to write more than 16 bytes into a file: the same path as a full disk.
    code = textwrap.dedent(
        """
        import json, resource, signal, sys
        from pathlib import Path
        from ansible_collections.onprem.vllm.plugins.module_utils.source_patch import apply_patch
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
        place = Path(sys.argv[1])
        try:
            apply_patch(place, json.loads(sys.argv[2]), place.parent / "originals")
        except OSError as error:
            sys.exit(f"errno {error.errno}")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site_packages), json.dumps(PATCH)],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".collections")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "errno 27" in done.stderr
    assert (site_packages / FILE).read_bytes() == BEFORE
    left = [path for path in site_packages.parent.rglob("*") if path.is_file()]
    assert left == [site_packages / FILE]
    assert apply_patch(site_packages, PATCH, originals(site_packages)) == "applied"


def killed_at(step: int, site_packages: Path) -> bool:
    """Apply in a child that is killed before its ``step``-th operation on files; False where it came to its end."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _arguments: tuple[object, ...]) -> None:
            nonlocal seen
            seen += event == "open" or event.startswith("os.")
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            apply_patch(site_packages, PATCH, originals(site_packages))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_anywhere_the_file_is_old_or_new_and_the_next_run_finishes(site_packages):
    path = site_packages / FILE
    bytecode = path.parent / "__pycache__" / "attention.cpython-312.pyc"
    bytecode.parent.mkdir()
    seen = []
    for step in range(1, 100):
        path.unlink()
        path.write_bytes(BEFORE)
        bytecode.write_bytes(b"old")
        shutil.rmtree(originals(site_packages), ignore_errors=True)
        if not killed_at(step, site_packages):
            break
        seen.append(path.read_bytes())
        assert seen[-1] in {BEFORE, AFTER}, f"step {step}"
        if seen[-1] == AFTER:
            assert (originals(site_packages) / FILE).read_bytes() == BEFORE, f"step {step}"
            assert not bytecode.exists(), f"step {step}"
        apply_patch(site_packages, PATCH, originals(site_packages))
        assert path.read_bytes() == AFTER, f"step {step}"
        assert (originals(site_packages) / FILE).read_bytes() == BEFORE, f"step {step}"
        assert not bytecode.exists(), f"step {step}"
    assert seen.count(BEFORE) >= 8
    assert seen.count(AFTER) >= 1, "killed between the rename and the end too"


def test_the_check_against_record_gets_the_hash_after():
    other = {**PATCH, "file": "engine/other.py", "after": "1" * 64}
    assert expected_hashes([PATCH, other]) == {FILE: PATCH["after"], "engine/other.py": "1" * 64}


# --- edits ---


@pytest.mark.parametrize(
    ("content", "find", "times", "says"),
    [
        (b"a\nb\n", "c", 1, "occurs 0 times, not 1"),
        (b"a\na\n", "a", 1, "occurs 2 times, not 1"),
        (b"a\n", "a", 2, "occurs 1 times, not 2"),
        (b"aaa", "aa", 2, "overlaps itself"),
        (b"aaa", "aa", 1, "overlaps itself"),
        (b"a\r\n", "a\n", 1, "occurs 0 times, not 1"),
    ],
)
def test_text_that_occurs_another_number_of_times_is_refused(content, find, times, says):
    with pytest.raises(PatchError, match=says):
        apply_edit(content, [{"find": find, "replace": "x", "times": times}])


def test_steps_of_an_edit_see_what_the_ones_before_made():
    steps = [{"find": "a", "replace": "bb", "times": 1}, {"find": "bb", "replace": "ü", "times": 1}]
    assert apply_edit(b"1a2", steps) == "1ü2".encode()


@given(before=st.text(), find=st.text(min_size=1), after=st.text(), replace=st.text())
def test_an_edit_changes_nothing_but_what_it_names(before, find, after, replace):
    content = (before + find + after).encode("utf-8", "surrogatepass")
    try:
        result = apply_edit(content, [{"find": find, "replace": replace, "times": 1}])
    except (PatchError, UnicodeEncodeError):
        encoded = find.encode("utf-8", "surrogatepass")
        assert (
            content.count(encoded) != 1
            or content.find(encoded) != content.rfind(encoded)
            or not _encodable(find, replace)
        )
    else:
        assert result == (before + replace + after).encode("utf-8", "surrogatepass")


def _encodable(*texts: str) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


# --- unified diffs ---

# Few different lines, so that a hunk's text occurs in many places; line ends that only Python takes for line ends.
LINES = st.sampled_from(
    ["", "a", "b", " a", "-a", "+a", "--- a", "+++ b", "@@ -1 +1 @@", "\\ No", "ü", "a\r", "\x0c", "\u2028", "\x85"]
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    text = "".join(f"{line}\n" for line in draw(st.lists(LINES, max_size=25)))
    return (text + draw(st.sampled_from(["", "", "end", "a"]))).encode()


def make_diff(first: bytes, second: bytes, context: int, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder, "old"), Path(folder, "new")
        one.write_bytes(first)
        other.write_bytes(second)
        done = subprocess.run(
            ["diff", "--text", f"-U{context}", *options, str(one), str(other)], capture_output=True, check=False
        )
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout.decode()


@settings(max_examples=150)
@given(old=files(), new=files(), context=st.integers(0, 4), blank=st.booleans())
def test_a_diff_turns_the_one_file_into_the_other(old, new, context, blank):
    diff = make_diff(old, new, context, *(["--suppress-blank-empty"] if blank else []))
    if old == new:
        assert diff == ""
        with pytest.raises(PatchError, match="no hunk"):
            apply_diff(old, diff)
    else:
        check_diff(diff)
        assert apply_diff(old, diff) == new


@settings(max_examples=100)
@given(old=files(), new=files(), other=files(), context=st.integers(1, 3))
def test_a_diff_gives_another_file_what_patch_would_or_refuses(old, new, other, context):
    """On a file it was not made for: refused, or every hunk really stood there; never an offset, never fuzz."""
    if old == new:
        return
    diff = make_diff(old, new, context)
    try:
        result = apply_diff(other, diff)
    except PatchError:
        return
    # It fitted: then the change made here, taken back, gives the file again, and it is the change of the diff.
    backwards = make_diff(new, old, context)
    assert apply_diff(result, backwards) == other


@settings(max_examples=50)
@given(data=st.data(), count=st.integers(8, 30))
def test_a_shifted_file_is_refused(data, count):
    lines = [f"line {number}\n" for number in range(count)]
    at = data.draw(st.integers(0, count - 1))
    new = [*lines[:at], "changed\n", *lines[at + 1 :]]
    diff = make_diff("".join(lines).encode(), "".join(new).encode(), 3)
    shifted = "".join(["inserted\n", *lines]).encode()
    with pytest.raises(PatchError, match="No offset and no fuzz"):
        apply_diff(shifted, diff)


GOOD = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"


def test_what_git_writes_before_the_diff_is_passed_over():
    message = "From 0123 Mon Sep 17 00:00:00 2001\nSubject: x\n\n---\n x.py | 2 +-\n\ndiff --git a/x.py b/x.py\n"
    assert apply_diff(b"a\nb\n", message + GOOD) == b"a\nc\n"


@pytest.mark.parametrize(
    ("diff", "says"),
    [
        ("", "no hunk"),
        ("just text\n", "outside of a hunk"),
        ("--- a/x.py\n+++ b/x.py\n", "no hunk"),
        (GOOD + GOOD, "more than one file"),
        (GOOD + "diff --git a/y b/y\n", "more than one file"),
        (GOOD + "-- \n2.40.1\n", "outside of a hunk"),
        (GOOD.replace("@@ -1,2 +1,2 @@", "@@ -1,3 +1,3 @@"), "not as many lines"),
        (GOOD.replace("@@ -1,2 +1,2 @@", "@@ -1,1 +1,2 @@"), "not as many lines|outside of a hunk"),
        (GOOD.replace("@@ -1,2 +1,2 @@", "@@ -2,2 +2,2 @@"), "expects 'a' in line 2|puts line"),
        (GOOD.replace("@@ -1,2 +1,2 @@", "@@ -1,2 +2,2 @@"), "puts line 2 of the result where line 1"),
        (GOOD.replace(" a\n", "*a\n"), "neither a blank nor"),
        (GOOD.replace(" a\n", " x\n"), "expects 'x' in line 1, found 'a'"),
        (GOOD + "\\ No newline at end of file\n" * 2, "follows no line"),
    ],
)
def test_a_text_that_is_no_exact_diff_is_refused(diff, says):
    with pytest.raises(PatchError, match=says):
        apply_diff(b"a\nb\n", diff)


def test_a_diff_works_on_disk_too(site_packages):
    patch = {key: value for key, value in PATCH.items() if key != "edit"}
    patch["diff"] = make_diff(BEFORE, AFTER, 3)
    assert apply_patch(site_packages, patch, originals(site_packages)) == "applied"
    assert (site_packages / FILE).read_bytes() == AFTER
