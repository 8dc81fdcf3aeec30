"""The mirror's side of publishing, on real files: resumed, verified whole, published by one rename, repaired."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import publish
from ansible_collections.onprem.vllm.plugins.module_utils.atomic import sha256_bytes
from ansible_collections.onprem.vllm.plugins.module_utils.bundle_manifest import BundleFile, BundleManifest
from ansible_collections.onprem.vllm.plugins.module_utils.publish import Mirror, Missing, PublishError, as_missing, cut
from ansible_collections.onprem.vllm.tests.release_bundle import flip_byte
from hypothesis import given
from hypothesis import strategies as st


class Sender:
    """The control node's side, in one process: the same pieces, put beside the mirror instead of over a connection."""

    def __init__(self, tmp_path: Path, files: dict[str, bytes]) -> None:
        self.bundle = tmp_path / "bundle"
        self.landing = tmp_path / "landing"
        self.landing.mkdir(exist_ok=True)
        self.mirror = Mirror(tmp_path / "srv" / "mirror")
        self.set(files)

    def set(self, files: dict[str, bytes]) -> None:
        shutil.rmtree(self.bundle, ignore_errors=True)
        for path, content in files.items():
            (self.bundle / path).parent.mkdir(parents=True, exist_ok=True)
            (self.bundle / path).write_bytes(content)
        manifest = {path: BundleFile(sha256_bytes(content), len(content)) for path, content in files.items()}
        self.raw = BundleManifest(manifest).to_bytes()
        (self.bundle / "manifest.json").write_bytes(self.raw)
        self.digest = sha256_bytes(self.raw)
        self.name = self.digest[:12]

    def send(self, piece_bytes: int = 1000, stop_after: int | None = None, keep: int = 2) -> list[Missing]:
        standing = self.mirror.standing(self.digest)
        missing = as_missing([asdict(entry) for entry in self.mirror.begin(self.raw, standing.damaged)])
        for number, segments in enumerate(cut(missing, piece_bytes)):
            if number == stop_after:
                return missing
            piece = self.landing / f"piece-{number}"
            with piece.open("wb") as sink:
                for segment in segments:
                    content = (self.bundle / segment.path).read_bytes()
                    sink.write(content[segment.offset : segment.offset + segment.length])
            self.mirror.absorb(self.name, piece, segments)
        self.mirror.finish(self.name, keep)
        return missing


FILES = {
    "wheels/a-1-py3-none-any.whl": os.urandom(5000),
    "wheels/b-1-py3-none-any.whl": os.urandom(1),
    "simple/index.html": b"<html>",
    "releases/x/requirements.txt": b"",
    "models/m/deep/er/shard.bin": os.urandom(2500),
}


@pytest.fixture
def sender(tmp_path: Path) -> Sender:
    return Sender(tmp_path, FILES)


def served(sender: Sender) -> dict[str, bytes]:
    root = sender.mirror.current
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def test_a_bundle_is_published_whole(sender):
    previous = os.umask(0o077)
    try:
        sender.send()
    finally:
        os.umask(previous)
    assert served(sender) == FILES
    assert (sender.mirror.current / "manifest.json").read_bytes() == sender.raw
    assert os.readlink(sender.mirror.current) == f"bundles/{sender.name}"
    for path in (sender.mirror.root, *sender.mirror.bundle(sender.name).rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), "the web server must read it"
    standing = sender.mirror.standing(sender.digest)
    assert standing.published
    assert standing.damaged == []
    assert list(sender.landing.iterdir()) == []


def test_an_interrupted_run_carries_only_the_rest(sender):
    first = sender.send(stop_after=4)
    assert sum(entry.size - entry.have for entry in first) == sum(map(len, FILES.values()))
    assert not sender.mirror.current.exists()
    rest = sender.send()
    assert sum(entry.size - entry.have for entry in rest) == sum(map(len, FILES.values())) - 4000
    assert served(sender) == FILES


def publish_by_ansible(sender: Sender, log: Path, stop_before: int = -1) -> subprocess.CompletedProcess[str]:
    """The real action plugin and module, in a run of its own; the connection counts what it carries."""
    log.unlink(missing_ok=True)
    task = {"bundle": str(sender.bundle), "root": str(sender.mirror.root), "piece_mib": 1}
    root = Path(__file__).parents[2]
    return subprocess.run(
        [
            *(str(Path(sys.executable).with_name("ansible")), "-i", "mirror1,", "mirror1"),
            *("-m", "onprem.vllm.publish", "-c", "counted", "-a", json.dumps(task)),
        ],
        cwd=root,
        env={
            **os.environ,
            "ANSIBLE_CONNECTION_PLUGINS": str(root / "tests/unit/fixtures/connection"),
            "ANSIBLE_REMOTE_TEMP": str(sender.landing),
            "COUNTED_LOG": str(log),
            "COUNTED_STOP_BEFORE": str(stop_before),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_control_node_cut_off_in_the_middle_sends_only_what_is_missing_the_next_time(tmp_path):
    """Four pieces are taken in at once; those that landed after them are lost, and go."""
    mebibyte = 1 << 20
    files = {**FILES, "models/m/big.bin": os.urandom(6 * mebibyte + 5), "python/x.tar.gz": os.urandom(3 * mebibyte)}
    sender, log = Sender(tmp_path, files), tmp_path / "carried"
    total = sum(map(len, files.values()))

    def carried() -> list[tuple[int, int]]:
        return [(int(size), int(before)) for size, before in map(str.split, log.read_text().splitlines())]

    assert publish_by_ansible(sender, log, stop_before=6).returncode == -9
    assert carried() == [(mebibyte, number) for number in (0, 1, 2, 3, 0, 1)]
    assert not sender.mirror.current.exists()
    again = publish_by_ansible(sender, log)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sum(size for size, _before in carried()) == total - 4 * mebibyte
    assert carried()[0][1] == 0, "what the dead run left in the landing place went first"
    assert f"carried_bytes: {total - 4 * mebibyte}\n" in again.stdout
    assert served(sender) == files
    assert list((sender.landing / "onprem-vllm-publish").iterdir()) == []
    unchanged = publish_by_ansible(sender, log)
    assert unchanged.returncode == 0
    assert "changed: false" in unchanged.stdout
    assert not log.exists()


def test_what_the_mirror_has_is_linked_and_not_carried(sender):
    sender.send()
    changed = {**FILES, "wheels/c-1-py3-none-any.whl": b"new", "simple/index.html": b"<html2>"}
    old = sender.mirror.current.resolve()
    sender.set(changed)
    assert {entry.path for entry in sender.send()} == {"wheels/c-1-py3-none-any.whl", "simple/index.html"}
    assert served(sender) == changed
    wheel = "wheels/a-1-py3-none-any.whl"
    assert (old / wheel).stat().st_ino == (sender.mirror.current / wheel).stat().st_ino
    assert (old / "simple/index.html").read_bytes() == b"<html>", "the earlier bundle stays as it was"


def test_old_bundles_go(sender):
    names = []
    for number in range(4):
        sender.set({**FILES, "python/x": str(number).encode()})
        sender.send(keep=2)
        os.utime(sender.mirror.current.resolve(), ns=(number, number))
        names.append(sender.name)
    assert {path.name for path in (sender.mirror.root / "bundles").iterdir()} == set(names[-2:])
    assert {path.stem for path in (sender.mirror.root / "records").iterdir()} == set(names[-2:])


@pytest.mark.parametrize("full", [False, True])
def test_damage_on_the_mirror_is_named_and_repaired(sender, full):
    sender.send()
    root = sender.mirror.current
    wheel = root / "wheels/a-1-py3-none-any.whl"
    times = wheel.stat()
    flip_byte(wheel)
    if full:
        os.utime(wheel, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert sender.mirror.standing(sender.digest).published, "stat cannot see it"
    (root / "models/m/deep/er/shard.bin").unlink()
    (root / "wheels/stray.whl").write_bytes(b"x")
    standing = sender.mirror.standing(sender.digest, full=full)
    assert not standing.published
    assert standing.damaged == [
        "models/m/deep/er/shard.bin",
        "wheels/a-1-py3-none-any.whl",
        "wheels/stray.whl",
    ]
    missing = sender.mirror.begin(sender.raw, standing.damaged)
    assert {entry.path for entry in missing} == {"models/m/deep/er/shard.bin", "wheels/a-1-py3-none-any.whl"}
    for segments in cut(missing, 10_000):
        piece = sender.landing / "piece"
        piece.write_bytes(b"".join(FILES[segment.path] for segment in segments))
        sender.mirror.absorb(sender.name, piece, segments)
    sender.mirror.finish(sender.name, 2)
    assert served(sender) == FILES
    assert sender.mirror.standing(sender.digest, full=True).published


def test_a_byte_that_flipped_on_the_way_is_named_and_nothing_published(sender):
    sender.send()
    before = os.readlink(sender.mirror.current)
    sender.set({**FILES, "wheels/new.whl": os.urandom(3000)})
    flip_byte(sender.bundle / "wheels/new.whl")
    with pytest.raises(PublishError, match=r"wheels/new\.whl is wrong") as caught:
        sender.send()
    assert "Nothing is published" in str(caught.value)
    assert os.readlink(sender.mirror.current) == before
    assert served(sender) == FILES
    flip_byte(sender.bundle / "wheels/new.whl")
    assert [entry.path for entry in sender.send()] == ["wheels/new.whl"], "the next run carries it alone"
    assert sender.mirror.standing(sender.digest, full=True).published


def test_what_is_missing_and_what_is_unexpected_is_named(sender):
    sender.mirror.begin(sender.raw)
    stray = sender.mirror.incoming(sender.name) / "wheels" / "stray.whl"
    stray.write_bytes(b"x")
    with pytest.raises(PublishError) as caught:
        sender.mirror.finish(sender.name, 2)
    for path in FILES:
        assert f"{path} is missing" in str(caught.value)
    assert "wheels/stray.whl is unexpected" in str(caught.value)
    assert not sender.mirror.current.exists()


def test_a_link_in_place_of_a_file_is_not_followed(sender, tmp_path):
    sender.send(stop_after=0)
    place = sender.mirror.incoming(sender.name) / "wheels/b-1-py3-none-any.whl"
    (tmp_path / "target").write_bytes(FILES["wheels/b-1-py3-none-any.whl"])
    place.symlink_to(tmp_path / "target")
    with pytest.raises((PublishError, OSError)):
        sender.mirror.finish(sender.name, 2)
    assert not sender.mirror.current.exists()


def test_rot_in_an_earlier_bundle_does_not_spread(sender):
    """A file whose stat is unchanged is linked, found wrong by the verification, and carried by the next run."""
    sender.send()
    wheel = sender.mirror.current / "wheels/a-1-py3-none-any.whl"
    times = wheel.stat()
    flip_byte(wheel)
    os.utime(wheel, ns=(times.st_atime_ns, times.st_mtime_ns))
    sender.set({**FILES, "python/x": b"new"})
    with pytest.raises(PublishError, match=r"wheels/a-1-py3-none-any\.whl is wrong"):
        sender.send()
    assert "wheels/a-1-py3-none-any.whl" in {entry.path for entry in sender.send()}
    assert sender.mirror.standing(sender.digest, full=True).published


def test_a_disk_too_small_is_refused_before_anything_is_written(sender, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(publish.shutil, "disk_usage", lambda _unused: usage._replace(free=1000))
    with pytest.raises(PublishError, match=r"7\.3 KiB of the bundle are not on the mirror yet.*wheel_mirror_root"):
        sender.mirror.begin(sender.raw)
    assert not sender.mirror.root.exists()


def test_pieces_that_do_not_fit_together_are_refused(sender):
    missing = sender.mirror.begin(sender.raw)
    pieces = cut(missing, 1000)
    piece = sender.landing / "piece"
    piece.write_bytes(b"x" * 1000)
    far = next(segments for segments in pieces if segments[0].offset >= 1000)
    with pytest.raises(PublishError, match="were expected"):
        sender.mirror.absorb(sender.name, piece, far)
    piece.write_bytes(b"x")
    with pytest.raises(PublishError, match="arrived incomplete"):
        sender.mirror.absorb(sender.name, piece, pieces[0])
    link = sender.landing / "link"
    link.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="Too many levels"):
        sender.mirror.absorb(sender.name, link, pieces[0])


def test_what_a_run_killed_while_exchanging_left_goes(sender):
    sender.send()
    left = sender.mirror.bundle(f".{sender.name}.old")
    left.mkdir()
    sender.set({**FILES, "python/x": b"new"})
    sender.send()
    assert not left.exists()


def test_taking_everything_back(sender):
    sender.send()
    assert sender.mirror.remove()
    assert not sender.mirror.root.exists()
    assert not sender.mirror.remove()


def test_a_broken_record_costs_a_publish_and_no_damage(sender):
    sender.send()
    (sender.mirror.root / "records" / f"{sender.name}.json").write_text(json.dumps({}))
    standing = sender.mirror.standing(sender.digest)
    assert sorted(standing.damaged) == sorted(FILES)
    sender.send()
    assert sender.mirror.standing(sender.digest).published


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100)), max_size=8),
    st.integers(1, 400),
)
def test_pieces_cover_every_missing_byte_once_and_in_order(sizes, piece_bytes):
    missing = [
        Missing(f"wheels/{number}", size, "0" * 64, min(have, max(size - 1, 0)))
        for number, (size, have) in enumerate(sizes)
    ]
    pieces = cut(missing, piece_bytes)
    reached = {entry.path: entry.have for entry in missing}
    touched = set()
    for segments in pieces:
        assert segments
        assert sum(segment.length for segment in segments) <= piece_bytes
        for segment in segments:
            assert segment.offset == reached[segment.path]
            reached[segment.path] += segment.length
            touched.add(segment.path)
    assert reached == {entry.path: entry.size for entry in missing}
    assert touched == set(reached), "empty files are made, too"
