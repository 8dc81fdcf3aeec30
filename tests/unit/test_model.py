# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Models on a host, from a mirror over HTTP and from a share."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import model
from ansible_collections.onprem.vllm.plugins.module_utils.model_manifest import (
    FileEntry,
    Manifest,
    ModelError,
    parse_manifest,
)
from hypothesis import given
from hypothesis import strategies as st

ME = (os.getuid(), os.getgid())
FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": bytes(range(256)) * 400,
    "model-00002-of-00002.safetensors": bytes(range(255, -1, -1)) * 300,
    "empty": b"",
    "sub folder/täg.txt": b"nested",
}
SHARD = "model-00002-of-00002.safetensors"


def write_bundle(place: Path, files: dict[str, bytes]) -> str:
    """A staged model; the sha256 of its manifest."""
    shutil.rmtree(place, ignore_errors=True)
    for path, content in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)
    entries = {path: FileEntry(hashlib.sha256(content).hexdigest(), len(content)) for path, content in files.items()}
    raw = Manifest(entries, {"directory": "x"}).to_bytes()
    (place / "manifest.json").write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


class Handler(http.server.SimpleHTTPRequestHandler):
    """A directory over HTTP, with ranges as nginx has them, and files that break off on request."""

    requests: list[tuple[str, str | None]]
    cut: set[str]

    def do_GET(self):
        self.requests.append((Path(self.path).name, self.headers["Range"]))
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content, status = path.read_bytes(), 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            content, status = content[int(match[1]) :], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if path.name in self.cut else content)

    def log_message(self, *_unused):
        pass


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """A busy disk makes each flush a tenth of a second, of thousands."""
    monkeypatch.setattr(os, "fsync", lambda _unused: None)


class Host:
    """One model on one host: `run()` is what the module does."""

    def __init__(self, tmp_path, source):
        self.root, self.bundle, self.source = tmp_path / "models", tmp_path / "bundle" / "models" / "tiny", source
        self.wanted = model.Wanted("tiny", self.root / "tiny")
        self.sha256 = write_bundle(self.bundle, FILES)

    def assess(self, **options):
        return model.assess(self.wanted, self.source, owner=ME, **options)

    def run(self, **options):
        found = self.assess(**options)
        model.check_space([found])
        model.apply(found, self.source, owner=ME)
        return found

    @property
    def files(self):
        return {
            path.relative_to(self.wanted.path).as_posix(): path.read_bytes()
            for path in self.wanted.path.rglob("*")
            if path.is_file() and path.name != ".manifest.json"
        }

    @property
    def beside(self):
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _unused: None)
    handler = type("Fresh", (Handler,), {"requests": [], "cut": set()})
    (tmp_path / "bundle").mkdir()
    bound = functools.partial(handler, directory=str(tmp_path / "bundle"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), bound) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield handler, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(params=["mirror", "share"])
def host(request, tmp_path, served):
    if request.param == "mirror":
        return Host(tmp_path, model.Mirror(served[1]))
    return Host(tmp_path, model.Share(tmp_path / "bundle" / "models"))


@pytest.fixture
def mirrored(tmp_path, served):
    host = Host(tmp_path, model.Mirror(served[1]))
    host.requests, host.cut = served[0].requests, served[0].cut
    return host


def test_a_bare_host_gets_the_model_whole_and_read_only(host):
    assert host.run().action == "staged"
    assert host.files == FILES
    assert host.beside == ["tiny"]
    modes = {oct(path.stat().st_mode & 0o7777) for path in host.wanted.path.rglob("*") if path.is_file()}
    assert modes == {"0o644"}


def test_a_second_run_changes_nothing_and_reads_no_file(host, monkeypatch):
    host.run()
    monkeypatch.setattr(model, "sha256_file", lambda path: pytest.fail(f"{path} was read"))
    found = host.run()
    assert (found.changed, found.action) == (False, "unchanged")


def test_a_truncated_shard_is_fetched_alone_and_said(host):
    host.run()
    os.truncate(host.wanted.path / SHARD, 100)
    untouched = (host.wanted.path / "config.json").stat().st_ino
    found = host.run()
    assert found.faults == {SHARD: f"is truncated: has 100 bytes instead of {len(FILES[SHARD])}"}
    assert found.action == "repaired"
    assert host.files == FILES
    assert (host.wanted.path / "config.json").stat().st_ino == untouched, "good files are linked, not copied"
    assert not host.run().changed


def test_one_flipped_byte_is_found_by_a_full_check_alone(host):
    host.run()
    shard = host.wanted.path / SHARD
    status = shard.stat()
    with shard.open("r+b") as stream:
        stream.write(bytes([FILES[SHARD][0] ^ 1]))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not host.assess().changed, "size and time are the same"
    assert host.run(full=True).faults == {SHARD: "differs from the manifest (sha256)"}
    assert host.files == FILES


def test_a_changed_time_alone_costs_a_hash_and_no_fetch(host):
    host.run()
    os.utime(host.wanted.path / SHARD)
    found = host.run()
    assert (found.action, found.faults) == ("recorded", {})
    assert not host.run().changed


def test_what_the_manifest_does_not_list_goes(host):
    host.run()
    (host.wanted.path / "notes.txt").write_text("x")
    (host.wanted.path / "link").symlink_to("/etc/passwd")
    found = host.run()
    assert found.extras == ["link", "notes.txt"]
    assert host.files == FILES
    assert Path("/etc/passwd").exists()


def test_a_link_in_place_of_a_file_is_replaced(host, tmp_path):
    host.run()
    shard = host.wanted.path / SHARD
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert host.run().faults == {SHARD: "is no regular file"}
    assert host.files == FILES


def test_wrong_modes_are_put_right(host):
    host.run()
    (host.wanted.path / SHARD).chmod(0o666)
    (host.wanted.path / "sub folder").chmod(0o777)
    found = host.run()
    assert (found.loose, found.faults) == ([SHARD, "sub folder"], {})
    assert not host.run().changed


def test_a_model_copied_by_hand_is_adopted(host):
    shutil.copytree(host.bundle, host.wanted.path)
    (host.wanted.path / "manifest.json").unlink()
    (host.wanted.path / SHARD).write_bytes(bytes(len(FILES[SHARD])))
    found = host.run()
    assert list(found.faults) == [SHARD]
    assert host.files == FILES


def test_an_update_moves_only_what_changed_and_the_old_stays_open(host):
    host.run()
    kept = (host.wanted.path / "config.json").stat().st_ino
    with (host.wanted.path / SHARD).open("rb") as served:
        write_bundle(host.bundle, {**FILES, SHARD: b"new weights", "added.json": b"[]"} | {"empty": b""})
        found = host.run()
        assert served.read() == FILES[SHARD], "what serves keeps its file"
    assert sorted(found.faults) == ["added.json", SHARD]
    assert found.action == "updated"
    assert host.files == {**FILES, SHARD: b"new weights", "added.json": b"[]"}
    assert (host.wanted.path / "config.json").stat().st_ino == kept
    assert host.beside == ["tiny"]


def test_a_failed_update_leaves_the_old_model_whole(host):
    host.run()
    write_bundle(host.bundle, {**FILES, SHARD: b"new weights", "config.json": b"[1]"})
    (host.bundle / SHARD).write_bytes(b"not weights")
    with pytest.raises(ModelError, match=SHARD):
        host.run()
    assert host.files == FILES
    write_bundle(host.bundle, {**FILES, SHARD: b"new weights", "config.json": b"[1]"})
    host.run()
    assert host.files == {**FILES, SHARD: b"new weights", "config.json": b"[1]"}


def test_every_bad_file_is_named(host):
    for path in (SHARD, "config.json"):
        (host.bundle / path).write_bytes(b"x" * len(FILES[path]))
    with pytest.raises(ModelError) as error:
        host.run()
    assert SHARD in str(error.value)
    assert "config.json" in str(error.value)
    assert not host.wanted.path.exists()


def test_a_damaged_file_that_cannot_be_had_anew_is_named_with_what_is_wrong_with_it(host):
    host.run()
    os.truncate(host.wanted.path / SHARD, 100)
    (host.bundle / SHARD).write_bytes(b"x" * len(FILES[SHARD]))
    with pytest.raises(ModelError, match=f"^Model tiny: {SHARD} is truncated: has 100 bytes .*, and cannot be had: "):
        host.run()


def test_a_mirror_that_breaks_off_is_gone_on_with(mirrored):
    mirrored.cut |= {SHARD}
    with pytest.raises(ModelError, match=f"{SHARD}.*the next run goes on from there"):
        mirrored.run()
    arrived = (mirrored.root / ".incoming-tiny" / f"{SHARD}.part").stat().st_size
    assert 0 < arrived < len(FILES[SHARD])
    mirrored.cut.clear()
    mirrored.requests.clear()
    mirrored.run()
    assert mirrored.requests == [("manifest.json", None), (SHARD, f"bytes={arrived}-")]
    assert mirrored.files == FILES


def test_a_copy_from_a_share_goes_on_from_its_part_and_drops_a_wrong_one(tmp_path):
    host = Host(tmp_path, model.Share(tmp_path / "bundle" / "models"))
    for part in (FILES[SHARD][:5000], b"\xff" * 5000, FILES[SHARD] + b"too long"):
        shutil.rmtree(host.root, ignore_errors=True)
        (host.root / ".incoming-tiny").mkdir(parents=True)
        (host.root / ".incoming-tiny" / f"{SHARD}.part").write_bytes(part)
        host.run()
        assert host.files == FILES


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("die_at", range(1, 12))
def test_killed_anywhere_the_next_run_repairs(tmp_path, monkeypatch, die_at, can_exchange):
    """Die at the n-th call that changes the directory; a model is in its place at every moment, old or new."""
    host = Host(tmp_path, model.Share(tmp_path / "bundle" / "models"))
    host.run()
    new = {**FILES, SHARD: b"new weights"}
    write_bundle(host.bundle, new)

    class KilledError(BaseException):
        pass

    calls = 0
    if not can_exchange:
        monkeypatch.setattr(model, "exchange", lambda *_unused: False)

    def dying(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == die_at:
                raise KilledError
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(model.os, "link", dying(os.link))
        patched.setattr(model.Path, "rename", dying(Path.rename))
        patched.setattr(model.shutil, "rmtree", dying(shutil.rmtree))
        patched.setattr(model, "write_file", dying(model.write_file))
        if can_exchange:
            patched.setattr(model, "exchange", dying(model.exchange))
        try:
            host.run()
        except KilledError:
            died = True
        else:
            died = False
    assert died or calls < die_at
    if can_exchange:
        assert host.files in (FILES, new)
    host.run()
    assert host.files == new
    assert host.beside == ["tiny"]
    assert not host.run().changed


def test_too_little_space_is_told_before_the_first_byte(mirrored, monkeypatch):
    real = os.statvfs(mirrored.bundle)
    small = os.statvfs_result((*real[:1], 4096, real[2], 0, 50_000, *real[5:]))
    monkeypatch.setattr(model.os, "statvfs", lambda _unused: small)
    with pytest.raises(ModelError, match=r"Not enough space on .* for tiny: 175\.0 KiB .* Free .*hf_cache_root"):
        mirrored.run()
    assert [name for name, _unused in mirrored.requests] == ["manifest.json"]
    assert not mirrored.root.exists()


def test_check_mode_on_a_bare_host_without_a_mirror_predicts(tmp_path):
    host = Host(tmp_path, model.Mirror("http://127.0.0.1:9"))
    found = host.assess(predict=True)
    assert (found.changed, found.action) == (True, "staged")
    assert "the mirror has no manifest" in found.note
    with pytest.raises(model.Unreachable):
        host.assess()
    assert not host.root.exists()


def test_a_mirror_that_is_down_leaves_what_is_here(mirrored):
    mirrored.run()
    mirrored.source = model.Mirror("http://127.0.0.1:9")
    found = mirrored.assess()
    assert not found.changed
    assert "kept as it is" in found.note


def test_a_pinned_manifest_needs_no_mirror_once_it_is_here(mirrored):
    mirrored.wanted = model.Wanted("tiny", mirrored.root / "tiny", mirrored.sha256)
    mirrored.run()
    mirrored.requests.clear()
    assert not mirrored.run().changed
    assert mirrored.requests == []


def test_another_manifest_than_the_pinned_one_is_refused(mirrored):
    mirrored.wanted = model.Wanted("tiny", mirrored.root / "tiny", "0" * 64)
    with pytest.raises(ModelError, match=f"the source has manifest {mirrored.sha256}, the plan wants 000"):
        mirrored.run()


def test_absent_removes_all_of_it(host):
    host.run()
    (host.root / ".incoming-tiny").mkdir()
    host.wanted = model.Wanted("tiny", host.root / "tiny", present=False)
    assert host.run().action == "removed"
    assert host.beside == []
    assert not host.run().changed


def test_a_leftover_of_a_killed_run_is_cleared(host):
    host.run()
    (host.root / ".incoming-tiny").mkdir()
    (host.root / ".incoming-tiny" / "x").write_text("x")
    assert host.run().changed
    assert host.beside == ["tiny"]


def test_something_in_the_way_is_refused(host, tmp_path):
    host.root.mkdir()
    host.wanted.path.symlink_to(tmp_path)
    with pytest.raises(ModelError, match="is in the way"):
        host.run()


@pytest.mark.parametrize("path", ["models/tiny", "/models/other", "/tiny", "/models/../tiny"])
def test_a_path_that_fits_no_model_is_refused(path):
    with pytest.raises(ModelError, match="Model tiny: its path must be"):
        model.Wanted.from_plan("tiny", path, "/models", None, "present")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../b", "a//b", "", ".", "a/", "manifest.json", ".manifest.json", "a\nb", "a\\b"]
)
def test_a_manifest_that_leaves_its_directory_is_refused(path):
    raw = json.dumps({"format": 1, "files": {path: {"sha256": "0" * 64, "size": 1}}}).encode()
    with pytest.raises(ModelError, match="no relative path"):
        parse_manifest(raw, "manifest")


@given(
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "files", "sha256", "size", "a"]), inner, max_size=4)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_a_manifest_holds_it_is_read_or_refused(raw):
    try:
        parsed = parse_manifest(raw, "manifest")
    except ModelError:
        return
    assert parse_manifest(parsed.to_bytes(), "manifest") == parsed
