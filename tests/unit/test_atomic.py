"""Files that are whole or absent."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import atomic


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    target = tmp_path / "serve.yaml"
    target.write_bytes(b"old")

    def no_space(*_unused):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_file(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target], "what was written beside is gone"


def test_the_mode_stands_before_the_name(tmp_path):
    target = tmp_path / "environment"
    atomic.write_file(target, b"SECRET=1", mode=0o400)
    assert stat.S_IMODE(target.stat().st_mode) == 0o400
    assert target.read_bytes() == b"SECRET=1"


def test_a_hard_linked_sibling_keeps_its_content(tmp_path):
    target, sibling = tmp_path / "module.py", tmp_path / "cached.py"
    target.write_bytes(b"as installed")
    os.link(target, sibling)
    atomic.write_file(target, b"patched")
    assert sibling.read_bytes() == b"as installed"


def test_a_link_moves_by_one_rename_and_repairs_a_leftover(tmp_path):
    link = tmp_path / "current"
    (tmp_path / f".current.{os.getpid()}").symlink_to("left by a killed run")
    atomic.replace_link(link, "generations/1")
    atomic.replace_link(link, "generations/2")
    assert os.readlink(link) == "generations/2"
    assert list(tmp_path.iterdir()) == [link]


def test_sha256_of_a_file_longer_than_one_piece(tmp_path):
    content = b"x" * (atomic.CHUNK_BYTES + 7)
    (tmp_path / "shard").write_bytes(content)
    assert atomic.sha256_file(tmp_path / "shard") == hashlib.sha256(content).hexdigest()
    assert atomic.sha256_bytes(content) == hashlib.sha256(content).hexdigest()
