# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Staging with the real huggingface_hub against a Hub that misbehaves on request."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import download, model_source
from ansible_collections.onprem.vllm.plugins.module_utils.model_manifest import ModelError
from ansible_collections.onprem.vllm.tests.lab.make_tiny_model import checkpoint
from ansible_collections.onprem.vllm.tests.unit.hub_server import Hub

FILES = checkpoint(layers=1, shards=3)
OTHER = checkpoint(layers=1, shards=3, seed=1)
SHARD = "model-00002-of-00003.safetensors"
FROM_MAIN = {"repository": "acme/tiny"}


@pytest.fixture
def hub(monkeypatch):
    with Hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short pauses, and no flush: a busy disk makes each a tenth of a second, of thousands."""
    monkeypatch.setattr(os, "fsync", lambda _unused: None)
    real = time.sleep
    monkeypatch.setattr(download.time, "sleep", lambda seconds: real(min(seconds, 0.01)))


def stage(tmp_path, source, **options):
    return model_source.stage("tiny", source, tmp_path / "bundle", **options)


def staged_files(tmp_path):
    place = tmp_path / "bundle" / "models" / "tiny"
    return {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def manifest(tmp_path):
    return json.loads((tmp_path / "bundle/models/tiny/manifest.json").read_bytes())


class TestFromTheHub:
    def test_every_file_is_real_and_hashed(self, hub, tmp_path):
        commit = hub.commit(FILES)
        done = stage(tmp_path, {**FROM_MAIN, "revision": commit})
        assert staged_files(tmp_path) == FILES
        written = manifest(tmp_path)
        assert written["source"] == {"repository": "acme/tiny", "revision": commit, "commit": commit}
        assert {path: entry["sha256"] for path, entry in written["files"].items()} == {
            path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()
        }
        raw = (tmp_path / "bundle/models/tiny/manifest.json").read_bytes()
        assert done.manifest_sha256 == hashlib.sha256(raw).hexdigest()
        assert not list((tmp_path / "bundle/models/tiny").rglob(".*")), "nothing of the client's own stays"

    def test_a_second_time_at_a_commit_asks_nobody(self, hub, tmp_path):
        commit = hub.commit(FILES)
        stage(tmp_path, {**FROM_MAIN, "revision": commit})
        hub.requests.clear()
        done = stage(tmp_path, {**FROM_MAIN, "revision": commit})
        assert not done.changed
        assert hub.requests == []

    def test_the_token_goes_to_the_hub_alone_and_is_kept_nowhere(self, hub, tmp_path, monkeypatch):
        hub.needs_token = "hf_do_not_keep_me"
        monkeypatch.setenv("HF_TOKEN", hub.needs_token)
        hub.commit(FILES)
        told: list[str] = []
        done = stage(tmp_path, FROM_MAIN, progress=told.append)
        assert {request.token for request in hub.requests if request.server == "hub"} == {"Bearer hf_do_not_keep_me"}
        assert {request.token for request in hub.requests if request.server == "cdn"} == {None}
        kept = b"".join(path.read_bytes() for path in (tmp_path).rglob("*") if path.is_file())
        assert b"hf_do_not_keep_me" not in kept
        assert "hf_do_not_keep_me" not in f"{told}{done}"

    def test_a_token_stored_at_login_is_not_used(self, hub, tmp_path, monkeypatch):
        hub.commit(FILES)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        (tmp_path / "token").write_text("hf_of_somebody")
        stage(tmp_path, FROM_MAIN)
        assert {request.token for request in hub.requests} == {None}

    def test_an_answer_that_breaks_off_is_continued(self, hub, tmp_path):
        hub.commit(FILES)
        hub.faults[f"GET cdn {SHARD}"] = ["cut", "cut"]
        stage(tmp_path, FROM_MAIN)
        ranges = [request.range for request in hub.requests if request.path.endswith(SHARD) and request.server == "cdn"]
        half = len(FILES[SHARD]) // 2
        assert ranges == [None, f"bytes={half}-", f"bytes={half + (len(FILES[SHARD]) - half) // 2}-"]
        assert staged_files(tmp_path) == FILES

    @pytest.mark.parametrize(
        "busy", ["GET hub main", "HEAD hub config.json", "GET hub config.json", f"GET cdn {SHARD}"]
    )
    def test_too_many_requests_are_waited_out(self, hub, tmp_path, busy):
        hub.commit(FILES)
        hub.faults[busy] = ["429"]
        stage(tmp_path, FROM_MAIN)
        assert hub.faults[busy] == []
        assert staged_files(tmp_path) == FILES

    def test_a_branch_that_moves_between_two_files_gives_one_commit(self, hub, tmp_path):
        first = hub.commit(FILES)
        hub.before_each = lambda request: hub.commit(OTHER) if request.server == "cdn" else None
        stage(tmp_path, FROM_MAIN, parallel=1)
        assert hub.refs["main"] != first, "it did move"
        assert staged_files(tmp_path) == FILES
        assert manifest(tmp_path)["source"]["commit"] == first

    def test_a_branch_that_moved_since_stays_and_is_told(self, hub, tmp_path):
        first = hub.commit(FILES)
        assert f"is {first} now and stays so" in stage(tmp_path, FROM_MAIN).notes[0]
        second = hub.commit({**OTHER, "tokenizer.json": FILES["tokenizer.json"]})
        done = stage(tmp_path, FROM_MAIN)
        assert not done.changed
        assert f"set `revision: {second}`" in done.notes[0]
        hub.requests.clear()
        done = stage(tmp_path, FROM_MAIN, update=True)
        assert done.commit == second
        assert manifest(tmp_path)["source"]["commit"] == second
        assert sorted(hub.fetched()) == sorted(done.fetched) == sorted(p for p in FILES if FILES[p] != OTHER[p])

    def test_a_hub_out_of_reach_leaves_a_pinned_branch_usable(self, hub, tmp_path, monkeypatch):
        hub.commit(FILES)
        stage(tmp_path, FROM_MAIN)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        done = stage(tmp_path, FROM_MAIN)
        assert not done.changed
        assert "does not answer" in done.notes[0]

    def test_an_interrupted_staging_goes_on(self, hub, tmp_path):
        hub.commit(FILES)
        hub.faults[f"GET cdn {SHARD}"] = ["cut", *["404"] * 9]
        with pytest.raises(ModelError, match=f"{SHARD}.*HTTP 404.*run again to go on") as error:
            stage(tmp_path, FROM_MAIN)
        assert "Signature" not in str(error.value), "a signed address is a key"
        assert not (tmp_path / "bundle/models/tiny").exists()
        hub.faults.clear()
        hub.requests.clear()
        stage(tmp_path, FROM_MAIN)
        assert [
            (request.path.split("/")[-1], request.range) for request in hub.requests if request.server == "cdn"
        ] == [(SHARD, f"bytes={len(FILES[SHARD]) // 2}-")]
        assert staged_files(tmp_path) == FILES

    @pytest.mark.parametrize(("server", "path"), [("cdn", SHARD), ("hub", "tokenizer.json")])
    def test_content_that_the_hub_did_not_list_is_refused(self, hub, tmp_path, server, path):
        hub.commit(FILES)
        hub.faults[f"GET {server} {path}"] = ["flipped"] * 20
        with pytest.raises(ModelError, match=path):
            stage(tmp_path, FROM_MAIN)
        assert not (tmp_path / "bundle/models/tiny/manifest.json").exists()

    def test_a_shard_zeroed_in_the_bundle_is_fetched_alone(self, hub, tmp_path):
        hub.commit(FILES)
        before = stage(tmp_path, FROM_MAIN).manifest_sha256
        (tmp_path / "bundle/models/tiny" / SHARD).write_bytes(b"\0" * len(FILES[SHARD]))
        hub.requests.clear()
        done = stage(tmp_path, FROM_MAIN)
        assert hub.fetched() == done.fetched == [SHARD]
        assert done.manifest_sha256 == before
        assert staged_files(tmp_path) == FILES

    def test_a_lost_record_costs_hashing_but_no_fetch(self, hub, tmp_path):
        hub.commit(FILES)
        stage(tmp_path, FROM_MAIN)
        (tmp_path / "bundle/.work/models/tiny.json").unlink()
        hub.requests.clear()
        assert not stage(tmp_path, FROM_MAIN).changed
        assert hub.fetched() == []

    def test_patterns_choose_and_an_incomplete_choice_is_refused(self, hub, tmp_path):
        hub.commit({**FILES, "onnx/model.bin": b"not wanted", "README.md": b"hello"})
        stage(tmp_path, {**FROM_MAIN, "ignore_patterns": ["onnx/"], "allow_patterns": ["*.json", "*.safetensors"]})
        assert staged_files(tmp_path) == FILES
        with pytest.raises(ModelError, match=f"{SHARD} is missing .model.safetensors.index.json") as error:
            stage(tmp_path, {**FROM_MAIN, "ignore_patterns": [SHARD, "tokenizer.json"]})
        assert "no tokenizer" in str(error.value), "all that is missing is told at once"
        assert set(staged_files(tmp_path)) == set(FILES), "what was staged stays"

    def test_files_that_the_new_commit_lacks_go(self, hub, tmp_path):
        hub.commit({**FILES, "old/notes.txt": b"x"})
        stage(tmp_path, FROM_MAIN)
        commit = hub.commit(FILES)
        done = stage(tmp_path, {**FROM_MAIN, "revision": commit})
        assert (done.fetched, done.removed) == ([], ["old/notes.txt"])
        assert staged_files(tmp_path) == FILES

    def test_refusals_say_what_to_do(self, hub, tmp_path, monkeypatch):
        hub.commit(FILES)
        with pytest.raises(ModelError, match=r"no such revision. Name a branch, a tag or a full commit"):
            stage(tmp_path, {**FROM_MAIN, "revision": "v9"})
        with pytest.raises(ModelError, match=r"acme/none at .* does not exist. If it is private, set HF_TOKEN"):
            stage(tmp_path, {"repository": "acme/none"})
        hub.gated = True
        with pytest.raises(ModelError, match=r"gated: accept its terms .* HF_TOKEN"):
            stage(tmp_path, FROM_MAIN)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ModelError, match="does not answer"):
            stage(tmp_path, FROM_MAIN)

    @pytest.mark.parametrize("path", ["manifest.json", "../escape.txt", "a/../../b"])
    def test_a_path_that_would_do_harm_is_refused(self, hub, tmp_path, path):
        hub.commit({**FILES, path: b"x"})
        with pytest.raises(ModelError, match="cannot be staged"):
            stage(tmp_path, FROM_MAIN)

    def test_too_little_space_is_told_before_the_first_byte(self, hub, tmp_path, monkeypatch):
        hub.commit(FILES)
        usage = model_source.shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(model_source.shutil, "disk_usage", lambda _unused: usage)
        with pytest.raises(ModelError, match=r"KiB are to be fetched, .* has 1000 B free"):
            stage(tmp_path, FROM_MAIN)
        assert hub.fetched() == []


class TestFromADirectory:
    @pytest.fixture
    def origin(self, tmp_path):
        place = tmp_path / "origin" / "tiny-qwen3"
        place.mkdir(parents=True)
        for path, content in FILES.items():
            (place / path).write_bytes(content)
        return place

    @staticmethod
    def as_cache(place):
        """Turn the directory into what a Hub cache is: links to blobs that are named by their sha256."""
        blobs = place.parent / "blobs"
        blobs.mkdir()
        for path in list(place.iterdir()):
            blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(blob)
            path.symlink_to(os.path.relpath(blob, place))
        return blobs

    def test_the_same_model_from_two_places_is_the_same_bundle(self, origin, tmp_path):
        first = stage(tmp_path, {"directory": str(origin)})
        moved = origin.rename(tmp_path / "tiny-qwen3")
        second = stage(tmp_path / "elsewhere", {"directory": str(moved)})
        assert first.manifest_sha256 == second.manifest_sha256
        assert staged_files(tmp_path) == FILES

    def test_unchanged_is_told_and_reads_nothing(self, origin, tmp_path, monkeypatch):
        stage(tmp_path, {"directory": str(origin)})
        monkeypatch.setattr(model_source, "sha256_file", lambda path: pytest.fail(f"{path} was read"))
        assert not stage(tmp_path, {"directory": str(origin)}).changed

    def test_one_changed_file_is_copied_alone(self, origin, tmp_path):
        stage(tmp_path, {"directory": str(origin)})
        (origin / "generation_config.json").write_bytes(b"{}")
        assert stage(tmp_path, {"directory": str(origin)}).fetched == ["generation_config.json"]
        assert staged_files(tmp_path)["generation_config.json"] == b"{}"

    def test_links_into_a_cache_become_files(self, origin, tmp_path):
        self.as_cache(origin)
        stage(tmp_path, {"directory": str(origin)})
        assert not any(path.is_symlink() for path in (tmp_path / "bundle").rglob("*"))
        assert staged_files(tmp_path) == FILES

    def test_a_zero_filled_blob_is_found_by_its_name(self, origin, tmp_path):
        """Field case 30: the header is right and the size is right; only the Hub's own hash tells."""
        self.as_cache(origin)
        content = FILES[SHARD]
        (origin / SHARD).resolve().write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
        with pytest.raises(ModelError, match=rf"{SHARD} has sha256 .*, the Hub's file has .*copied incompletely"):
            stage(tmp_path, {"directory": str(origin)})

    def test_the_client_s_metadata_of_a_local_directory_counts_too(self, origin, tmp_path):
        metadata = origin / ".cache/huggingface/download" / f"{SHARD}.metadata"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"{'0' * 40}\n{'1' * 64}\n1700000000.0\n")
        with pytest.raises(ModelError, match=f"{SHARD} has sha256"):
            stage(tmp_path, {"directory": str(origin)})

    def test_a_cache_without_its_blobs_is_refused(self, origin, tmp_path):
        blobs = self.as_cache(origin)
        blobs.rename(tmp_path / "lost")
        with pytest.raises(ModelError, match=r"config\.json.* lead nowhere"):
            stage(tmp_path, {"directory": str(origin)})

    @pytest.mark.parametrize("keep", [0, 4, 100, -1])
    def test_a_truncated_shard_is_named(self, origin, tmp_path, keep):
        (origin / SHARD).write_bytes(FILES[SHARD][:keep])
        with pytest.raises(ModelError, match=SHARD):
            stage(tmp_path, {"directory": str(origin)})

    def test_a_failed_update_leaves_the_staged_model(self, origin, tmp_path):
        before = stage(tmp_path, {"directory": str(origin)}).manifest_sha256
        (origin / SHARD).unlink()
        with pytest.raises(ModelError, match=f"{SHARD} is missing"):
            stage(tmp_path, {"directory": str(origin)})
        assert staged_files(tmp_path) == FILES
        raw = (tmp_path / "bundle/models/tiny/manifest.json").read_bytes()
        assert hashlib.sha256(raw).hexdigest() == before

    def test_a_draft_model_needs_no_tokenizer(self, origin, tmp_path):
        (origin / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match="no tokenizer"):
            stage(tmp_path, {"directory": str(origin)})
        stage(tmp_path, {"directory": str(origin), "draft": True})

    def test_an_adapter_needs_neither_configuration_nor_tokenizer(self, tmp_path):
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        with pytest.raises(ModelError, match="no weights"):
            stage(tmp_path, {"directory": str(adapter)})
        (adapter / "adapter_model.safetensors").write_bytes(FILES[SHARD])
        stage(tmp_path, {"directory": str(adapter)})
        assert set(staged_files(tmp_path)) == {"adapter_config.json", "adapter_model.safetensors"}

    def test_code_of_a_model_must_be_here(self, origin, tmp_path):
        config = json.loads(FILES["config.json"])
        config["auto_map"] = {
            "AutoConfig": "configuration_tiny.TinyConfig",
            "AutoModel": "acme/code--modeling_tiny.TinyModel",
        }
        (origin / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=r"code from another repository, acme/code") as error:
            stage(tmp_path, {"directory": str(origin)})
        assert "configuration_tiny.py is missing (config.json needs it)" in str(error.value)
        config["auto_map"] = {"AutoConfig": "configuration_tiny.TinyConfig"}
        (origin / "config.json").write_text(json.dumps(config))
        (origin / "configuration_tiny.py").write_text("from .helpers_tiny import x\n")
        with pytest.raises(ModelError, match=r"helpers_tiny\.py is missing \(configuration_tiny\.py needs it\)"):
            stage(tmp_path, {"directory": str(origin)})
        (origin / "helpers_tiny.py").write_text("x = 1\n")
        stage(tmp_path, {"directory": str(origin)})

    def test_a_tail_of_zeros_is_told(self, origin, tmp_path):
        (origin / "extra.bin").write_bytes(b"\1" + bytes(2 << 20))
        assert "extra.bin ends in a MiB of zeros" in stage(tmp_path, {"directory": str(origin)}).notes[0]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "x" * 97, "modèle"])
def test_a_name_that_is_no_directory_name_is_refused(tmp_path, name):
    with pytest.raises(ModelError, match="Model name"):
        model_source.stage(name, {"directory": "/x"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source", [{}, {"directory": "/x", "repository": "a/b"}, {"directory": "/x", "revision": "m"}, {"repository": "x"}]
)
def test_a_source_that_is_none_is_refused(tmp_path, source):
    with pytest.raises(ModelError, match="Model tiny"):
        stage(tmp_path, source)


def test_without_huggingface_hub_the_message_says_how_to_get_it(tmp_path):
    program = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from ansible_collections.onprem.vllm.plugins.module_utils.model_source import stage\n"
        f"stage('tiny', {{'repository': 'a/b'}}, {str(tmp_path)!r})\n"
    )
    root = Path(model_source.__file__).parents[5]
    environment = {"PYTHONPATH": str(root), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "pip install 'huggingface_hub>=2.4'" in done.stderr
