"""RECORD files, overlaps, the manifest's comparison and archives, each without a build."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.record import (
    Claim,
    Overlap,
    RecordError,
    WheelRecord,
    check_overlaps,
    hash_files,
    read_records,
    reinstall_order,
    settle,
)
from ansible_collections.onprem.vllm.plugins.module_utils.release import Site, locked_packages, space_problem
from ansible_collections.onprem.vllm.plugins.module_utils.release_manifest import (
    ManifestError,
    compare_by_stat,
    read_manifest,
    take_manifest,
)
from ansible_collections.onprem.vllm.plugins.module_utils.venv import _explained, for_machine, unpack
from ansible_collections.onprem.vllm.plugins.module_utils.venv_process import DiskFull, VenvError
from hypothesis import given
from hypothesis import strategies as st


def record(name: str, **claims: str) -> WheelRecord:
    return WheelRecord(name, "1.0", {path: Claim("sha256", content) for path, content in claims.items()})


def installed(root: Path, name: str, lines: str) -> Path:
    info = root / "lib/python3.11/site-packages" / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text(lines)
    return info.parent


def test_paths_with_commas_and_scripts_outside_of_site_packages(tmp_path: Path) -> None:
    site = installed(tmp_path, "x", '"a,b.py",sha256=AAAA,1\n../../../bin/x,sha256=AAAA,1\nx-1.0.dist-info/RECORD,,\n')
    (found,) = read_records(tmp_path, site)
    prefix = "lib/python3.11/site-packages/"
    assert found.claims == {
        f"{prefix}a,b.py": Claim("sha256", "000000"),
        "bin/x": Claim("sha256", "000000"),
        f"{prefix}x-1.0.dist-info/RECORD": None,
    }


@pytest.mark.parametrize("line", ["../../../../evil,sha256=AAAA,1", "/etc/passwd,sha256=AAAA,1", "a,md0=AAAA,1"])
def test_a_record_that_leads_out_or_has_no_hash_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(RecordError, match="RECORD"):
        read_records(tmp_path, installed(tmp_path, "x", line + "\n"))


def test_three_wheels_and_one_path_need_a_winner_over_both() -> None:
    wheels = [record("a", p="1"), record("b", p="2"), record("c", p="2")]
    with pytest.raises(RecordError, match=r"a 1\.0 and b 1\.0 and c 1\.0"):
        settle(wheels, [Overlap("a", "b")])
    settled = settle(wheels, [Overlap("a", "b"), Overlap("a", "c")])
    assert settled.expected["p"][0].name == "a"
    assert settle(wheels, [Overlap("b", "a"), Overlap("c", "a")]).expected["p"][1] == Claim("sha256", "2")


NAMES = "abcdef"


@given(st.permutations(NAMES), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10), st.randoms())
def test_unpacking_in_the_given_order_always_leaves_the_winners(order, pairs, random) -> None:
    """A model of the disk: whoever is unpacked last owns its paths. Any first state ends with every winner."""
    overlaps = [Overlap(order[low], order[high]) for low, high in pairs if low < high]  # no circles: a fixed ranking
    paths = {f"{pair.winner}{pair.loser}": (pair.winner, pair.loser) for pair in overlaps}
    wheels = [record(name, **{path: name for path, pair in paths.items() if name in pair}) for name in NAMES]
    assert check_overlaps(overlaps) == []
    settled = settle(wheels, overlaps)
    disk = {path: random.choice(pair) for path, pair in paths.items()}
    wrong = [path for path, owner in disk.items() if owner != paths[path][0]]
    steps = reinstall_order(wrong, settled, overlaps)
    for name in steps:
        disk.update({path: name for path, pair in paths.items() if name in pair})
    assert all(disk[path] == winner for path, (winner, _unused) in paths.items())
    assert len(steps) == len(set(steps))
    assert bool(steps) == bool(wrong)


@given(st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=12))
def test_circles_are_found_and_only_circles(pairs) -> None:
    overlaps = [Overlap(*pair) for pair in pairs]
    reach = {name: {loser for winner, loser in pairs if winner == name} for name in NAMES}
    for middle, start in itertools.product(NAMES, NAMES):
        if middle in reach[start]:
            reach[start] |= reach[middle]
    assert bool(check_overlaps(overlaps)) == any(name in reach[name] for name in NAMES)


def test_a_tree_of_every_kind_is_whole_and_its_manifest_reads_back(tmp_path: Path) -> None:
    for path in ("a.txt", "x/b c.txt", "x/y/ü.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "x/up").symlink_to("../x")
    paths = ["a.txt", "x/b c.txt", "x/y/ü.txt"]
    hashes = {path: found["sha256"] for path, found in hash_files(tmp_path, paths)}
    take_manifest(tmp_path, hashes, {"k": 1}).write(tmp_path)
    manifest = read_manifest(tmp_path)
    assert compare_by_stat(tmp_path, manifest) == []
    assert {path for path, _unused in manifest.entries()} == set(paths)
    entry = manifest.entry("x/y/ü.txt")
    assert entry is not None
    assert (entry.sha256, entry.mode) == (hashes["x/y/ü.txt"], 0o644)
    (tmp_path / "x/y/ü.txt").unlink()
    os.mkfifo(tmp_path / "x/y/ü.txt")
    (tmp_path / "empty").rmdir()
    (tmp_path / "x/up").unlink()
    (tmp_path / "x/up").symlink_to("/")
    assert compare_by_stat(tmp_path, manifest) == [
        "empty/: missing",
        "x/up: a link to /, not to ../x",
        "x/y/ü.txt: not a file any more",
    ]


def test_many_folders_are_compared_by_several_processes(tmp_path: Path) -> None:
    for number in range(1200):
        (tmp_path / f"d{number}").mkdir()
        (tmp_path / f"d{number}/f").write_text("x")
    paths = [f"d{number}/f" for number in range(1200)]
    manifest = take_manifest(tmp_path, dict.fromkeys(paths, "0"), {})
    manifest.write(tmp_path)
    assert compare_by_stat(tmp_path, manifest) == []
    for number in (0, 599, 600, 1199):
        (tmp_path / f"d{number}/f").write_text("yy")
    assert compare_by_stat(tmp_path, manifest) == [f"d{number}/f: 2 bytes, not 1" for number in (0, 1199, 599, 600)]


def test_a_file_that_was_not_hashed_is_not_let_into_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "late").write_text("x")
    with pytest.raises(ManifestError, match="late appeared"):
        take_manifest(tmp_path, {}, {})


def member(name: str, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(info, key, value)
    return info


UNSAFE = {
    "climbs": [member("python/../../evil")],
    "absolute link": [member("python/l", type=tarfile.SYMTYPE, linkname="/etc")],
    "link that climbs": [member("python/l", type=tarfile.SYMTYPE, linkname="../../x")],
    "through a link": [member("python/l", type=tarfile.SYMTYPE, linkname="."), member("python/l/../../evil")],
    "hard link out": [member("python/h", type=tarfile.LNKTYPE, linkname="python/../../x")],
    "device": [member("python/d", type=tarfile.CHRTYPE)],
    "twice": [member("python/f"), member("python/f")],
    "a file over a link": [member("python/l", type=tarfile.SYMTYPE, linkname="f"), member("python/l")],
}


@pytest.mark.parametrize("case", UNSAFE)
def test_an_unsafe_archive_is_refused(tmp_path: Path, case: str) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for info in UNSAFE[case]:
            tar.addfile(info, io.BytesIO(b""))
    target = tmp_path / "in/side"
    target.mkdir(parents=True)
    with pytest.raises(VenvError, match=r"a\.tar\.gz"):
        unpack(archive, target)
    assert [path for path in tmp_path.rglob("*") if path.name in {"evil", "x"}] == []


def test_an_archive_loses_setuid_and_keeps_links(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(member("python/bin/p3.12", mode=0o6777, size=1), io.BytesIO(b"x"))
        tar.addfile(member("python/bin/p", type=tarfile.SYMTYPE, linkname="p3.12"))
    target = tmp_path / "out"
    target.mkdir()
    unpack(archive, target)
    assert (target / "bin/p").read_bytes() == b"x"
    assert (target / "bin/p3.12").stat().st_mode & 0o7777 == 0o755


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b\x08 no")
    with pytest.raises(VenvError, match=r"a\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "a.tar.gz", tmp_path)


def test_the_file_for_another_processor() -> None:
    spec = {"version": "1", "wheels": {"x86_64": {"file": "x", "sha256": "1"}, "aarch64": {"file": "a", "sha256": "2"}}}
    assert for_machine(spec, "aarch64").file == "a"
    with pytest.raises(VenvError, match=r"processor riscv64 .* aarch64, x86_64"):
        for_machine(spec, "riscv64")
    with pytest.raises(VenvError, match="not a file name"):
        for_machine({"file": "../x", "sha256": "1"})


def test_uv_that_ran_out_of_space_is_told_apart() -> None:
    said = "error: Failed to download `torch==2.13.0+cpu`\n  cause: No space left on device (os error 28)"
    assert isinstance(_explained(said, "http://m"), DiskFull)


def test_the_space_for_unpacked_wheels_needs_a_manifest_to_be_known(tmp_path: Path) -> None:
    site = Site(tmp_path, "http://127.0.0.1:9", {"version": "1"})
    assert space_problem(site, {"x": b"a==1 --hash=sha256:" + b"0" * 64}) is None


def test_names_in_a_lock() -> None:
    lock = b"# via x\nA_b==1 \\\n    --hash=sha256:00\nc.d==2.0+cpu ; python_version > '3'\n    # via a\n"
    assert locked_packages(lock) == {"a-b": "1", "c-d": "2.0+cpu"}
