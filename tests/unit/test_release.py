"""The builder against real wheels, a real mirror on the loopback and the real uv."""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import release as builder
from ansible_collections.onprem.vllm.plugins.module_utils.instance_status import describe_release
from ansible_collections.onprem.vllm.plugins.module_utils.publish import Mirror, cut
from ansible_collections.onprem.vllm.plugins.module_utils.release import Release, ReleaseError, Site, apply, preview
from ansible_collections.onprem.vllm.plugins.module_utils.release_manifest import read_manifest
from ansible_collections.onprem.vllm.plugins.module_utils.venv import Pinned, install_uv
from ansible_collections.onprem.vllm.tests.release_bundle import (
    flip_byte,
    make_wheel,
    sha256,
    small_bundle,
    write_index,
    write_lock,
)

UV = Path(sys.executable).with_name("uv")
pytestmark = pytest.mark.skipif(not Path("/usr/bin/python3.11").exists(), reason="needs a Python 3.11 of the system")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def log_message(self, *_unused: Any) -> None:
        self.asked.append(self.path)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    bundle = tmp_path_factory.mktemp("pristine") / "bundle"
    return bundle, small_bundle(bundle, UV)


@dataclass
class World:
    bundle: Path
    site: Site
    plan: dict[str, Any]
    asked: list[str]

    def release(self, name: str, **changes: Any) -> Release:
        return replace(Release.from_plan(self.plan["releases"][name]), **changes)

    def path(self, name: str) -> Path:
        return self.site.path(self.plan["releases"][name]["id"])

    def inside(self, name: str, path: str) -> Path:
        return self.path(name) / "lib/python3.11/site-packages" / path

    def add(self, name: str, *wheels: Path, **more: Any) -> Release:
        """A release of these wheels, made after the bundle was."""
        self.plan["releases"][name] = write_lock(self.bundle, name, wheels, **more)
        write_index(self.bundle)
        return self.release(name)


@pytest.fixture(scope="session")
def unpacked_uv(pristine: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv as the builder installs it, once: 60 MB for each test would be most of its time."""
    bundle, plan = pristine
    directory = tmp_path_factory.mktemp("uv") / plan["uv"]["version"]
    wheel = Pinned(plan["uv"]["file"], plan["uv"]["sha256"])
    with served(bundle) as (url, _unused):
        install_uv(url, plan["uv"]["version"], wheel, directory)
    return directory


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """A mirror on the loopback; its address and the paths that it was asked for."""
    asked: list[str] = []
    handler = type("Handler", (_Quiet,), {"asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(directory)))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def _copy(source: str, target: str) -> None:
    """Tests may damage what they got; only uv's 60 MB stay a link."""
    (os.link if Path(source).name.startswith("uv-") else shutil.copy2)(source, target)


@pytest.fixture
def virgin(pristine: tuple[Path, dict[str, Any]], tmp_path: Path) -> Iterator[World]:
    source, plan = pristine
    bundle = tmp_path / "bundle"
    shutil.copytree(source, bundle, copy_function=_copy)
    with served(bundle) as (url, asked):
        site = Site(tmp_path / "vllm", url, plan["uv"])
        yield World(bundle, site, {"uv": plan["uv"], "releases": dict(plan["releases"])}, asked)


@pytest.fixture
def world(virgin: World, unpacked_uv: Path) -> World:
    """A host that has uv already."""
    shutil.copytree(unpacked_uv, virgin.site.uv_directory, copy_function=os.link)
    return virgin


def everything(root: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path): (info.st_ino, info.st_mtime_ns, info.st_mode)
        for path in sorted(root.rglob("*"))
        if (info := path.lstat())
    }


def test_a_release_works_in_its_place(virgin: World) -> None:
    report = apply(virgin.site, [virgin.release("small")])
    (outcome,) = report.outcomes
    assert (outcome.state, outcome.changed, report.changed) == ("installed", True, True)
    assert report.tools == ["uv 0.13.9"]
    assert list(outcome.seconds) == ["uv", "interpreter", *(name for name, _unused in builder.STEPS)]
    said = subprocess.run([virgin.path("small") / "bin/engine"], capture_output=True, text=True, check=True).stdout
    assert said == "engine cu13\n"
    manifest = read_manifest(virgin.path("small"))
    assert manifest.about["packages"] == {"engine": "1.0", "libs-base": "1.0", "libs-cu13": "1.0"}
    assert manifest.about["release"]["lock_sha256"] == virgin.release("small").lock_sha256
    assert outcome.size == manifest.size > 0
    assert not list(virgin.site.releases.glob(".*"))


def test_nothing_in_a_release_names_the_place_where_it_was_built(world: World) -> None:
    apply(world.site, [world.release("small")])
    for path in world.path("small").rglob("*"):
        if path.is_file():
            assert b".building-" not in path.read_bytes(), path


def test_the_second_run_changes_nothing_and_asks_the_mirror_nothing(world: World) -> None:
    apply(world.site, [world.release("small")])
    before = everything(world.site.root)
    world.asked.clear()
    report = apply(world.site, [world.release("small")])
    assert not report.changed
    assert report.outcomes[0].state == "present"
    assert world.asked == []
    assert everything(world.site.root) == before


def test_only_the_mirror_is_asked_whatever_the_host_is_configured_to(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_INDEX_URL", "HTTP_PROXY", "ALL_PROXY", "UV_INDEX"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/elsewhere")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_NO_BINARY", "1")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = tmp_path / "home/.config/uv/uv.toml"
    config.parent.mkdir(parents=True)
    config.write_text('no-index = true\n[pip]\nlink-mode = "copy"\n')
    apply(world.site, [world.release("small")])
    assert world.inside("small", "engine/__init__.py").stat().st_nlink == 2
    assert world.inside("small", "engine/__pycache__/__init__.cpython-311.pyc").is_file()
    assert not (tmp_path / "home/.local").exists()


def test_bytecode_is_used_and_never_written_again(world: World) -> None:
    apply(world.site, [world.release("small")])
    before = everything(world.path("small"))
    source = world.inside("small", "engine/__init__.py")
    os.utime(source, (1, 1))  # a restored backup: an ordinary .pyc would be stale now
    said = subprocess.run(
        [world.path("small") / "bin/python", "-v", "-c", "import engine, engine.part3; print(engine.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert "engine/__pycache__/__init__.cpython-311.pyc matches" in said.stderr
    assert "wrote" not in said.stderr
    assert said.stdout.strip() == str(source)
    after = everything(world.path("small"))
    after.pop(str(source))
    before.pop(str(source))
    assert after == before


def test_a_traceback_names_the_real_file(world: World) -> None:
    apply(world.site, [world.release("small")])
    code = "import engine; print(engine.main.__code__.co_filename)"
    said = subprocess.run(
        [world.path("small") / "bin/python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert said == str(world.inside("small", "engine/__init__.py"))


def test_a_second_release_shares_unchanged_files_and_their_bytecode(world: World) -> None:
    apply(world.site, [world.release("small")])
    before = everything(world.path("small"))
    world.asked.clear()
    apply(world.site, [world.release("next")])
    for path in ("libs_base-1.0.dist-info/METADATA", "base_only.py", "__pycache__/base_only.cpython-311.pyc"):
        assert os.path.samefile(world.inside("small", path), world.inside("next", path)), path
    assert os.path.samefile(
        world.inside("small", "shared/__pycache__/__init__.cpython-311.pyc"),
        world.inside("next", "shared/__pycache__/__init__.cpython-311.pyc"),
    )
    assert not [path for path in world.asked if "libs_" in path and path.endswith(".whl")]
    assert everything(world.path("small")) == before
    assert not apply(world.site, [world.release("small"), world.release("next")]).changed


def test_releases_share_where_their_sources_are_equal_only_in_content(world: World) -> None:
    apply(world.site, [world.release("small")])
    shutil.rmtree(world.site.cache)
    apply(world.site, [world.release("next")])
    assert not os.path.samefile(world.inside("small", "base_only.py"), world.inside("next", "base_only.py"))
    compiled = "__pycache__/base_only.cpython-311.pyc"
    assert os.path.samefile(world.inside("small", compiled), world.inside("next", compiled))


@pytest.mark.parametrize("attempt", range(4))
def test_the_named_winner_stands_every_time(world: World, attempt: int) -> None:
    winner, loser = ("libs-cu13", "libs-base") if attempt % 2 else ("libs-base", "libs-cu13")
    wheels = [world.bundle / f"wheels/{name}-1.0-py3-none-any.whl" for name in ("engine", "libs_base", "libs_cu13")]
    release = world.add(f"w{attempt}", *wheels, overlaps=[{"winner": winner, "loser": loser}])
    apply(world.site, [release])
    assert world.inside(f"w{attempt}", "shared/__init__.py").read_text() == f"value = '{winner[5:]}'\n"
    assert world.inside(f"w{attempt}", "cuda_only.py").exists()
    assert world.inside(f"w{attempt}", "base_only.py").exists()
    assert not apply(replace(world.site, verify="full"), [release]).changed


def test_winners_that_lose_elsewhere_are_unpacked_in_order(world: World) -> None:
    wheels = world.bundle / "wheels"
    a = make_wheel(wheels, "chain-a", "1.0", {"one.py": b"a = 1\n"})
    b = make_wheel(wheels, "chain-b", "1.0", {"one.py": b"b = 11\n", "two.py": b"b = 2\n"})
    c = make_wheel(wheels, "chain-c", "1.0", {"two.py": b"c = 22\n", "three.py": b"c = 3\n"})
    d = make_wheel(wheels, "chain-d", "1.0", {"three.py": b"d = 33\n"})
    names = ["chain-a", "chain-b", "chain-c", "chain-d"]
    pairs = [{"winner": win, "loser": lose} for win, lose in itertools.pairwise(names)]
    apply(world.site, [world.add("chain", a, b, c, d, overlaps=pairs)])
    found = [world.inside("chain", f"{name}.py").read_text()[0] for name in ("one", "two", "three")]
    assert found == ["a", "b", "c"]


def test_a_contradiction_that_no_winner_settles_is_refused_and_leaves_nothing(world: World) -> None:
    with pytest.raises(ReleaseError) as caught:
        apply(world.site, [world.release("unsettled")])
    message = str(caught.value)
    assert "shared/__init__.py" in message
    assert "libs-base 1.0 and libs-cu13 1.0" in message
    assert "overlaps: [{winner: libs-base, loser: libs-cu13}]" in message
    assert list(world.site.releases.iterdir()) == []


def test_scripts_of_one_name_are_a_contradiction_too(world: World) -> None:
    wheels = world.bundle / "wheels"
    one = make_wheel(wheels, "tool-one", "1.0", {"t1.py": b"def main(): print(1)\n"}, scripts={"tool": "t1:main"})
    two = make_wheel(wheels, "tool-two", "1.0", {"t2.py": b"def main(): print(2)\n"}, scripts={"tool": "t2:main"})
    with pytest.raises(ReleaseError, match="bin/tool"):
        apply(world.site, [world.add("tools", one, two)])
    apply(world.site, [world.add("tools", one, two, overlaps=[{"winner": "tool-one", "loser": "tool-two"}])])
    said = subprocess.run([world.path("tools") / "bin/tool"], capture_output=True, text=True, check=True).stdout
    assert said == "1\n"


def test_the_same_content_twice_is_no_contradiction(world: World) -> None:
    wheels = world.bundle / "wheels"
    one = make_wheel(wheels, "same-one", "1.0", {"ns/__init__.py": b"", "ns/one.py": b""})
    two = make_wheel(wheels, "same-two", "1.0", {"ns/__init__.py": b"", "ns/two.py": b""})
    apply(world.site, [world.add("same", one, two)])
    assert world.inside("same", "ns/two.py").exists()


def test_winners_in_a_circle_are_refused_before_anything(world: World) -> None:
    entry = world.plan["releases"]["small"]
    circle = [{"winner": "libs-base", "loser": "libs-cu13"}, {"winner": "Libs_cu13", "loser": "libs-base"}]
    with pytest.raises(ReleaseError, match="circle"):
        Release.from_plan({**entry, "overlaps": circle})


@pytest.mark.parametrize("offset", [60, -30], ids=["in a file", "in the directory"])
def test_a_flipped_byte_in_a_wheel_names_the_wheel(world: World, offset: int) -> None:
    flip_byte(world.bundle / "wheels/engine-1.0-py3-none-any.whl", offset)
    with pytest.raises(ReleaseError) as caught:
        apply(world.site, [world.release("small")])
    assert "The wheel of engine 1.0" in str(caught.value)
    assert "not the one that the release locked" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert list(world.site.releases.iterdir()) == []


def test_a_flipped_byte_in_the_lock_is_refused(world: World) -> None:
    flip_byte(world.bundle / "releases" / world.release("small").id / "requirements.txt")
    with pytest.raises(ReleaseError, match=r"lock of release small .* sha256 is"):
        apply(world.site, [world.release("small")])


def test_a_flipped_byte_in_the_wheel_of_uv_is_refused(virgin: World) -> None:
    wheel = next(virgin.bundle.glob("wheels/uv-*.whl"))
    content = wheel.read_bytes()
    wheel.unlink()
    wheel.write_bytes(content)
    flip_byte(wheel, 1_000_000)
    with pytest.raises(ReleaseError, match=r"uv 0\.13\.9: .*sha256 is"):
        apply(virgin.site, [virgin.release("small")])
    assert not virgin.site.uv_directory.exists()


def test_a_mirror_that_is_gone_is_one_message_and_harms_nothing(world: World) -> None:
    apply(world.site, [world.release("small")])
    before = everything(world.path("small"))
    gone = replace(world.site, mirror_url="http://127.0.0.1:9")
    assert not apply(gone, [world.release("small")]).changed
    with pytest.raises(ReleaseError, match=r"http://127\.0\.0\.1:9/releases/.*mirror is up"):
        apply(gone, [world.release("small"), world.release("next")])
    assert everything(world.path("small")) == before


def test_a_wheel_that_the_mirror_lacks_is_named(world: World) -> None:
    (world.bundle / "wheels/engine-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ReleaseError, match=r"does not give engine 1\.0.*404"):
        apply(world.site, [world.release("small")])


def test_requirements_that_the_lock_leaves_out_are_told_by_the_manifest(world: World) -> None:
    apply(world.site, [world.add("lacking", world.bundle / "wheels/engine-1.0-py3-none-any.whl")])
    (said,) = read_manifest(world.path("lacking")).about["unmet"]
    assert "engine" in said
    assert "libs-base" in said


def test_a_lock_whose_markers_leave_a_wheel_out_here_is_refused(world: World) -> None:
    release = world.release("small")
    lock = world.bundle / "releases" / release.id / "requirements.txt"
    lock.write_text(lock.read_text().replace("engine==1.0", 'engine==1.0 ; sys_platform == "win32"'))
    with pytest.raises(ReleaseError, match=r"uv left engine 1\.0 of the lock out"):
        apply(world.site, [replace(release, lock_sha256=sha256(lock.read_bytes()))])


def test_an_edited_file_in_the_cache_is_fetched_anew(world: World) -> None:
    apply(world.site, [world.release("small")])
    shared = world.inside("small", "base_only.py")
    shared.write_text(shared.read_text() + "# in place, as nobody should\n")
    (outcome,) = apply(world.site, [world.release("next")]).outcomes
    assert world.inside("next", "base_only.py").read_text() == "x = 1\n"
    assert any("libs-base" in note and "base_only.py" in note for note in outcome.notes)
    assert builder.inspect(world.site, world.release("small")).state == "rebuilt"


def test_a_file_slipped_into_the_cache_does_not_get_into_a_release(world: World) -> None:
    apply(world.site, [world.release("small")])
    cached = next(path for path in world.site.cache.glob("archive-v0/*/base_only.py"))
    cached.with_name("slipped.py").write_text("import os\n")
    apply(world.site, [world.release("next")])
    assert not world.inside("next", "slipped.py").exists()
    assert world.inside("next", "base_only.py").exists()


def test_a_wheel_that_contradicts_its_own_record_is_refused_by_name(world: World) -> None:
    wheel = make_wheel(world.bundle / "wheels", "liar", "1.0", {"liar.py": b"x = 1\n"}, wrong_record="liar.py")
    with pytest.raises(ReleaseError, match=r"liar: .*liar\.py has sha256"):
        apply(world.site, [world.add("lies", wheel)])
    assert list(world.site.releases.iterdir()) == []


def test_a_wheel_with_files_beyond_its_record_is_installed(world: World) -> None:
    wheel = make_wheel(
        world.bundle / "wheels", "sloppy", "1.0", {"sloppy/__init__.py": b""}, unlisted={"sloppy/x.txt": b"x"}
    )
    release = world.add("sloppy", wheel)
    apply(world.site, [release])
    assert world.inside("sloppy", "sloppy/x.txt").exists()
    assert not apply(world.site, [release]).changed


def test_sources_that_do_not_compile_are_left_without_bytecode(world: World) -> None:
    wheel = make_wheel(
        world.bundle / "wheels", "old", "1.0", {"old/two.py": b"print 'two'\n", "old/good.py": b"x = 1\n"}
    )
    apply(world.site, [world.add("old", wheel)])
    assert [path.name for path in world.inside("old", "old/__pycache__").iterdir()] == ["good.cpython-311.pyc"]


DAMAGE = {
    "content": lambda root: (root / "base_only.py").write_text("x = 2222\n"),
    "same size": lambda root: (root / "base_only.py").write_text("x = 7\n"),
    "missing": lambda root: (root / "base_only.py").unlink(),
    "extra": lambda root: (root / "extra.py").write_text(""),
    "extra bytecode": lambda root: (root / "engine/__pycache__/x.cpython-311.pyc").write_bytes(b""),
    "mode": lambda root: (root / "base_only.py").chmod(0o666),
    "folder mode": lambda root: (root / "engine").chmod(0o777),
    "link": lambda root: ((root / "base_only.py").unlink(), (root / "base_only.py").symlink_to("cuda_only.py")),
    "folder gone": lambda root: shutil.rmtree(root / "engine"),
    "extra folder": lambda root: (root / "new").mkdir(),
    "manifest gone": lambda root: (root.parents[2] / "manifest.json").unlink(),
    "manifest cut": lambda root: (
        (root.parents[2] / "manifest.json").chmod(0o644),
        (root.parents[2] / "manifest.json").write_text("{"),
    ),
    "python gone": lambda root: (root.parents[2] / "bin/python").unlink(),
}


@pytest.fixture(scope="module")
def finished(
    pristine: tuple[Path, dict[str, Any]], unpacked_uv: Path, tmp_path_factory: pytest.TempPathFactory
) -> World:
    """A host with one whole release, to be copied and damaged; its mirror is gone."""
    bundle, plan = pristine
    root = tmp_path_factory.mktemp("finished") / "vllm"
    shutil.copytree(unpacked_uv, root / "uv" / plan["uv"]["version"], copy_function=os.link)
    with served(bundle) as (url, _unused):
        site = Site(root, url, plan["uv"])
        apply(site, [Release.from_plan(plan["releases"]["small"])])
    return World(bundle, site, plan, [])


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_by_stat(finished: World, damage: str, tmp_path: Path) -> None:
    copy = replace(finished, site=replace(finished.site, root=tmp_path))
    shutil.copytree(finished.path("small"), copy.path("small"), symlinks=True)
    release = copy.release("small")
    assert builder.inspect(copy.site, release).state == "present"
    DAMAGE[damage](copy.inside("small", ""))
    outcome = builder.inspect(copy.site, release)
    assert outcome.state == "rebuilt"
    assert len(outcome.reasons) >= 1


@pytest.mark.parametrize("damage", ["content", "mode", "folder gone", "manifest cut"])
def test_a_damaged_release_is_built_anew_also_where_the_cache_shares_the_damage(world: World, damage: str) -> None:
    apply(world.site, [world.release("small")])
    DAMAGE[damage](world.inside("small", ""))
    predicted = preview(world.site, [world.release("small")])
    (outcome,) = apply(world.site, [world.release("small")]).outcomes
    assert outcome.state == "rebuilt"
    assert outcome.reasons == predicted.outcomes[0].reasons != []
    assert not apply(replace(world.site, verify="full"), [world.release("small")]).changed
    assert not list(world.site.releases.glob(".*"))


def test_full_verification_sees_what_stat_cannot(world: World) -> None:
    apply(world.site, [world.release("small")])
    victim = world.inside("small", "base_only.py")
    info = victim.stat()
    victim.write_text("x = 9\n")
    os.utime(victim, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert not apply(world.site, [world.release("small")]).changed
    full = replace(world.site, verify="full")
    (outcome,) = apply(full, [world.release("small")]).outcomes
    assert outcome.state == "rebuilt"
    assert any("base_only.py: sha256 is" in reason for reason in outcome.reasons)
    assert victim.read_text() == "x = 1\n"


def test_a_damaged_release_is_not_exchanged_under_a_process(world: World) -> None:
    apply(world.site, [world.release("small")])
    python = world.path("small") / "bin/python"
    running = subprocess.Popen([python, "-c", "import time; time.sleep(60)"])
    try:
        world.inside("small", "base_only.py").write_text("x = 2222\n")
        with pytest.raises(ReleaseError, match=rf"base_only\.py.*in use by .*process {running.pid}.*uv_venv_rebuild"):
            apply(world.site, [world.release("small")])
        (outcome,) = apply(world.site, [world.release("small")], rebuild_in_use=True).outcomes
        assert outcome.state == "rebuilt"
        assert running.poll() is None
    finally:
        running.kill()
        running.wait()


def test_a_plain_web_server_with_the_published_tree_at_a_path_of_its_own_is_mirror_enough(
    virgin: World, tmp_path: Path
) -> None:
    """No host in group mirror, ``vllm_mirror_url`` of a server that knows neither ranges nor the JSON index."""
    mirror = Mirror(tmp_path / "web" / "vllm")
    raw = (virgin.bundle / "manifest.json").read_bytes()
    for segments in cut(mirror.begin(raw), 1 << 40):
        piece = tmp_path / "piece"
        piece.write_bytes(b"".join((virgin.bundle / segment.path).read_bytes() for segment in segments))
        mirror.absorb(sha256(raw)[:12], piece, segments)
    mirror.finish(sha256(raw)[:12], 1)
    with served(tmp_path / "web") as (url, asked):
        site = replace(virgin.site, mirror_url=f"{url}/vllm/current")
        apply(site, [virgin.release("small")])
    assert said_by(virgin, "small") == "engine cu13\n"
    assert asked
    assert virgin.asked == []
    assert all(path.startswith("/vllm/current/") for path in asked), asked


def test_the_preview_of_a_virgin_host_writes_nothing_and_counts_packages(virgin: World) -> None:
    report = preview(virgin.site, [virgin.release("small")])
    assert report.changed
    assert report.outcomes[0].state == "installed"
    assert report.outcomes[0].packages == {"engine": "1.0", "libs-base": "1.0", "libs-cu13": "1.0"}
    assert not virgin.site.root.exists()
    blind = preview(replace(virgin.site, mirror_url="http://127.0.0.1:9"), [virgin.release("small")])
    assert blind.changed
    assert blind.outcomes[0].packages is None
    assert blind.outcomes[0].notes


def test_every_problem_is_told_at_once_and_nothing_is_built(world: World) -> None:
    flip_byte(world.bundle / "releases" / world.release("next").id / "requirements.txt")
    with pytest.raises(ReleaseError) as caught:
        apply(world.site, [world.release("small", python="3.99"), world.release("next")])
    assert "Python 3.99 is not on this host" in str(caught.value)
    assert "lock of release next" in str(caught.value)
    assert not world.site.releases.exists()


# --- patches ---

ENGINE = "engine/__init__.py"
PATCHED = b"from shared import value\n\n\ndef main():\n    print('patched', value)\n"


def patch_of(world: World, file: str = ENGINE, **changes: Any) -> dict[str, Any]:
    """A patch of the small bundle's engine, as a plan has it."""
    with zipfile.ZipFile(world.bundle / "wheels/engine-1.0-py3-none-any.whl") as wheel:
        before = wheel.read(file)
    patch = {"name": "speak", "package": "engine", "file": file, "before": sha256(before), "after": sha256(PATCHED)}
    return {**patch, "edit": [{"find": "'engine'", "replace": "'patched'", "times": 1}], **changes}


def patched_release(world: World, *patches: dict[str, Any], **more: Any) -> Release:
    """The small release with patches: same wheels, same lock."""
    names = ("engine", "libs_base", "libs_cu13")
    wheels = [world.bundle / f"wheels/{name}-1.0-py3-none-any.whl" for name in names]
    overlaps = [{"winner": "libs-cu13", "loser": "libs-base"}]
    return world.add("patched", *wheels, overlaps=overlaps, patches=list(patches), **more)


def said_by(world: World, name: str) -> str:
    return subprocess.run([world.path(name) / "bin/engine"], capture_output=True, text=True, check=True).stdout


def test_a_patched_release_runs_the_patch_and_its_sibling_and_the_cache_keep_their_bytes(world: World) -> None:
    plain, patched = world.release("small"), patched_release(world, patch_of(world))
    apply(world.site, [plain])
    before = everything(world.path("small"))
    shared = world.inside("small", ENGINE)
    original = shared.read_bytes()

    (outcome,) = apply(world.site, [patched]).outcomes
    assert outcome.state == "installed"
    assert said_by(world, "patched") == "patched cu13\n"
    assert said_by(world, "small") == "engine cu13\n"
    assert world.inside("patched", ENGINE).read_bytes() == PATCHED
    assert world.inside("patched", ENGINE).stat().st_nlink == 1
    assert (world.path("patched") / "originals" / ENGINE).read_bytes() == original
    assert shared.read_bytes() == original
    assert everything(world.path("small")) == before
    # What is not patched is shared as ever, bytecode included.
    for path in ("engine/part1.py", "engine/__pycache__/part1.cpython-311.pyc"):
        assert os.path.samefile(world.inside("small", path), world.inside("patched", path)), path
    assert [path.read_bytes() for path in world.site.cache.rglob(ENGINE)] == [original]

    full = replace(world.site, verify="full")
    assert [one.state for one in apply(world.site, [plain, patched]).outcomes] == ["present", "present"]
    assert [one.state for one in apply(full, [plain, patched]).outcomes] == ["present", "present"]
    manifest = read_manifest(world.path("patched"))
    assert manifest.entry(f"originals/{ENGINE}").sha256 == sha256(original)
    assert manifest.about["release"]["patches"] == [
        {key: patch_of(world)[key] for key in ("name", "package", "file", "before", "after")}
    ]

    # The next release out of the same cache gets what the wheel brings.
    later = world.add(
        "later", *(world.bundle / "wheels").glob("engine-1.0-*.whl"), *(world.bundle / "wheels").glob("libs_cu13-*.whl")
    )
    apply(full, [later])
    assert world.inside("later", ENGINE).read_bytes() == original
    assert said_by(world, "later") == "engine cu13\n"


def test_a_patched_release_is_built_first_and_its_sibling_gets_the_wheels_file(world: World) -> None:
    apply(world.site, [patched_release(world, patch_of(world))])
    apply(world.site, [world.release("small")])
    assert said_by(world, "small") == "engine cu13\n"
    assert not os.path.samefile(
        world.inside("small", "engine/__pycache__/__init__.cpython-311.pyc"),
        world.inside("patched", "engine/__pycache__/__init__.cpython-311.pyc"),
    )


def test_bytecode_that_the_wheel_brings_does_not_outlive_its_source(world: World) -> None:
    compiled = world.bundle.parent / "x.pyc"
    source = world.bundle.parent / "x.py"
    source.write_bytes(b"VALUE = 'wheel'\n")
    system = ["/usr/bin/python3.11", "-c", "import py_compile, sys; py_compile.compile(*sys.argv[1:], doraise=True, "]
    system[2] += "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    subprocess.run([*system, str(source), str(compiled)], check=True)
    files = {"frozen/__init__.py": source.read_bytes()}
    files["frozen/__pycache__/__init__.cpython-311.pyc"] = compiled.read_bytes()
    wheel = make_wheel(world.bundle / "wheels", "frozen", "1.0", files)
    after = b"VALUE = 'patch'\n"
    patch = {
        "name": "thaw",
        "file": "frozen/__init__.py",
        "before": sha256(source.read_bytes()),
        "after": sha256(after),
    }
    release = world.add("frozen", wheel, patches=[{**patch, "edit": [{"find": "wheel", "replace": "patch"}]}])
    apply(world.site, [release])
    code = "import frozen; print(frozen.VALUE, frozen.__cached__)"
    said = subprocess.run([world.path("frozen") / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == "patch"
    assert world.inside("frozen", "frozen/__pycache__/__init__.cpython-311.pyc").is_file()
    assert not apply(replace(world.site, verify="full"), [release]).changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"before": "0" * 64}, "Patch speak was not made for"),
        ({"after": "0" * 64}, "promised was " + "0" * 64),
        ({"edit": [{"find": "nowhere", "replace": "x"}]}, "occurs 0 times"),
        ({"file": "engine/gone.py"}, "does not exist"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_and_leaves_nothing(
    world: World, changes: dict[str, Any], message: str
) -> None:
    apply(world.site, [world.release("small")])
    before = everything(world.path("small"))
    with pytest.raises(ReleaseError, match=message) as refused:
        apply(world.site, [patched_release(world, patch_of(world) | changes)])
    assert "Release patched: " in str(refused.value)
    assert not world.path("patched").exists()
    assert not list(world.site.releases.glob(".*"))
    assert everything(world.path("small")) == before


def test_another_patch_set_under_the_same_id_is_noticed(world: World) -> None:
    """The id follows the patches; should two plans ever give one id to both, the manifest decides."""
    patched = patched_release(world, patch_of(world))
    apply(world.site, [patched])
    plain = replace(patched, patches=())
    outcome = builder.inspect(world.site, plain)
    assert (outcome.state, outcome.reasons) == ("rebuilt", ["its manifest describes another release"])
    apply(world.site, [plain])
    assert said_by(world, "patched") == "engine cu13\n"
    assert not (world.path("patched") / "originals").exists()
    apply(world.site, [patched])
    assert said_by(world, "patched") == "patched cu13\n"


@pytest.mark.parametrize("victim", [f"lib/python3.11/site-packages/{ENGINE}", f"originals/{ENGINE}"])
def test_damage_to_a_patched_file_or_its_original_is_repaired(world: World, victim: str) -> None:
    patched = patched_release(world, patch_of(world))
    apply(world.site, [patched])
    (world.path("patched") / victim).write_bytes(b"edited\n")
    (outcome,) = apply(world.site, [patched]).outcomes
    assert outcome.state == "rebuilt"
    assert said_by(world, "patched") == "patched cu13\n"


def test_what_a_release_decided_about_flashinfer_is_kept_in_its_manifest(world: World) -> None:
    declared = {"overrides": {"flashinfer-python": "0.6.18"}, "reason": "Measured.", "disable_version_check": True}
    switch = {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}
    release = patched_release(world, flashinfer=declared, environment=switch)
    apply(world.site, [release])
    about = read_manifest(world.path("patched")).about
    assert about["flashinfer"] == declared
    assert about["release"]["environment"] == switch
    described = describe_release(world.path("patched"), "full")
    assert (described["flashinfer_decision"], described["problems"]) == (declared, [])
    assert (described["id"], described["patches"], described["vllm"]) == (release.id, [], release.version)
    reworded = replace(release, flashinfer={**declared, "reason": "Measured twice."})
    assert builder.inspect(world.site, reworded).state == "present"
    assert builder.inspect(world.site, replace(release, environment={})).state == "rebuilt"


def test_a_release_of_before_there_were_patches_stays_whole(world: World) -> None:
    release = world.release("small")
    apply(world.site, [release])
    assert {"patches", "environment"}.isdisjoint(read_manifest(world.path("small")).about["release"])
    entry = {**world.plan["releases"]["small"], "patches": [], "flashinfer": None, "environment": {}}
    assert builder.inspect(world.site, Release.from_plan(entry)).state == "present"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "../engine.py"}, "no plain path"),
        ({"before": "0"}, "before is not a sha256"),
        ({"edit": None}, "must have either edit or diff"),
        ({"diff": "x"}, "must have either edit or diff"),
        ({"name": ...}, "'name' is missing"),
        ({"after": ...}, "'after' is missing"),
    ],
)
def test_an_entry_with_a_wrong_patch_is_refused(world: World, changes: dict[str, Any], message: str) -> None:
    patch = {key: value for key, value in (patch_of(world) | changes).items() if value is not ...}
    with pytest.raises(ReleaseError, match=message):
        Release.from_plan({**world.plan["releases"]["small"], "patches": [patch]})


def test_two_patches_of_one_file_are_refused(world: World) -> None:
    pair = [patch_of(world), patch_of(world, name="shout")]
    with pytest.raises(ReleaseError, match="patches speak and shout both change engine"):
        Release.from_plan({**world.plan["releases"]["small"], "patches": pair})


def test_too_little_space_is_refused_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(world.site.root.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _unused: usage._replace(free=1000))
    with pytest.raises(ReleaseError, match="0 MiB free, and small needs about 64 MiB"):
        apply(world.site, [world.release("small")])
    assert not world.site.releases.exists()


def test_a_release_on_the_host_counts_as_there_when_space_is_reckoned(world: World) -> None:
    lock = builder.read_lock(world.site, world.release("small"))
    apply(world.site, [world.release("small")])
    assert builder.space_problem(world.site, {"small": lock}) is None


def in_a_child(work: Callable[[], None]) -> int:
    """What a process ends with that does this and nothing more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the mirror's thread: the child does not need it
        pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def hurt(build: Any, step: str) -> None:
    """Give the two steps that only look, as long as all is well, something to mend."""
    damage = {"overlaps": ("shared/__init__.py", b"value = 'base'\n"), "record": ("engine/part1.py", b"NUMBER = 0\n")}
    if step in damage:
        path, content = damage[step]
        (build.site_packages / path).unlink()  # the cache has the same inode
        (build.site_packages / path).write_bytes(content)


class Watch:
    """Counts the operations on files in each step of a build; kills the process in ``step`` as it begins its
    ``moment``-th one, or, where that is 0, while a program works for it."""

    def __init__(self, log: Path, step: str = "", moment: int = -1) -> None:
        self.log, self.step, self.moment = log, step, moment
        self.now = ""
        self.seen: dict[str, int] = {}

    def event(self, event: str, _unused: tuple[object, ...]) -> None:
        if self.now and (event in {"open", "subprocess.Popen"} or event.startswith(("os.", "shutil."))):
            self.seen[self.now] += 1
            if self.now == self.step and self.seen[self.now] == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.now == self.step and self.moment == 0 and event == "subprocess.Popen":
                threading.Thread(target=lambda: (time.sleep(0.02), os.kill(os.getpid(), signal.SIGKILL))).start()

    def step_of(self, name: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(build: Any) -> None:
            hurt(build, name)
            self.seen[name] = 0
            self.now = name
            function(build)
            self.now = ""
            self.log.write_text(json.dumps(self.seen))

        return run

    def build(self, site: Site, release: Release) -> None:
        """Build the release; to be called in a process of its own."""
        sys.addaudithook(self.event)
        builder.STEPS[:] = [(name, self.step_of(name, function)) for name, function in builder.STEPS]
        apply(site, [release])


@pytest.fixture(scope="session")
def operations() -> dict[str, int]:
    """How many each step does, known from the first build that is watched."""
    return {}


MOMENTS = [
    *(pytest.param(name, 0.5) for name, _unused in builder.STEPS),
    *(pytest.param(name, share, marks=pytest.mark.slow) for name, _unused in builder.STEPS for share in (0.01, 0.99)),
    *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("venv", "install", "overlaps", "bytecode")),
]


@pytest.mark.parametrize(("step", "share"), MOMENTS)
def test_a_run_killed_in_the_middle_of_any_step_is_repaired_by_the_next(
    world: World, operations: dict[str, int], step: str, share: float | None, tmp_path: Path
) -> None:
    """SIGKILL when a share of a step's operations is done, or while uv or the compiler works for it."""
    apply(world.site, [world.release("next")])
    before = everything(world.path("next"))
    shutil.rmtree(world.site.cache)
    release = patched_release(world, patch_of(world))
    log = tmp_path / "operations"
    if not operations:
        assert os.WIFEXITED(in_a_child(lambda: Watch(log).build(world.site, release)))
        operations.update(json.loads(log.read_text()))
        builder.remove(world.site, [release], check=False)
        shutil.rmtree(world.site.cache)
        log.unlink()
    assert all(operations.values()), operations
    moment = 0 if share is None else max(round(operations[step] * share), 1)
    assert os.WIFSIGNALED(in_a_child(lambda: Watch(log, step, moment).build(world.site, release)))
    done = json.loads(log.read_text()) if log.exists() else {}
    assert moment == 0 or step not in done, "it was killed after the step"
    whole = replace(world.site, verify="full")
    there = builder.inspect(whole, release).state
    assert there == "installed" or (step == "place" and there == "present")
    apply(world.site, [release])
    assert not list(world.site.releases.glob(".*"))
    assert [builder.inspect(whole, one).state for one in (release, world.release("next"))] == ["present"] * 2
    assert said_by(world, "patched") == "patched cu13\n"
    assert everything(world.path("next")) == before


def test_absent_removes_one_and_purged_all(world: World) -> None:
    apply(world.site, [world.release("small"), world.release("next")])
    foreign = world.site.root / "notes.txt"
    foreign.write_text("mine")
    report = builder.remove(world.site, [world.release("small")], check=False)
    assert [outcome.state for outcome in report.outcomes] == ["removed"]
    assert not world.path("small").exists()
    assert not apply(replace(world.site, verify="full"), [world.release("next")]).changed
    assert not builder.remove(world.site, [world.release("small")], check=False).changed
    assert builder.remove_everything(world.site, check=True).changed
    assert world.path("next").exists()
    builder.remove_everything(world.site, check=False)
    assert list(world.site.root.iterdir()) == [foreign]
    foreign.unlink()
    builder.remove_everything(world.site, check=False)
    assert not world.site.root.exists()
    assert not builder.remove_everything(world.site, check=False).changed


def test_a_release_that_a_process_runs_from_is_not_removed(world: World) -> None:
    apply(world.site, [world.release("small")])
    running = subprocess.Popen([world.path("small") / "bin/python", "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(ReleaseError, match=rf"in use by .*{running.pid}"):
            builder.remove(world.site, [world.release("small")], check=False)
        with pytest.raises(ReleaseError, match="in use"):
            builder.remove_everything(world.site, check=False)
        # Teardown stops it first, which its check mode does not.
        assert [one.state for one in builder.remove_everything(world.site, check=True).outcomes] == ["removed"]
    finally:
        running.kill()
        running.wait()
    assert builder.inspect(world.site, world.release("small")).state == "present"


def test_damaged_uv_is_fetched_again(world: World) -> None:
    apply(world.site, [world.release("small")])
    program = world.site.uv_directory / "uv"
    program.unlink()
    program.write_bytes(b"#!/bin/sh\n")
    assert preview(world.site, [world.release("small")]).tools == ["uv 0.13.9"]
    report = apply(world.site, [world.release("small")])
    assert report.tools == ["uv 0.13.9"]
    assert report.outcomes[0].state == "present"
    assert sha256((world.site.uv_directory / "uv").read_bytes()) == sha256(UV.read_bytes())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("id", "../x", "directory's name"),
        ("python", "python3", "of the form"),
        ("lock_sha256", "abc", "not a sha256"),
    ],
)
def test_an_entry_that_is_no_release_is_refused(world: World, field: str, value: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        Release.from_plan({**world.plan["releases"]["small"], field: value})


@pytest.fixture(scope="module")
def interpreter_archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """This very Python, packed as python-build-standalone packs one, without what the tests do not import."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    left_out = {"test", "idlelib", "tkinter", "site-packages", "__pycache__", "ensurepip", "lib2to3", "pydoc_data"}
    left_out |= {"unittest", "turtledemo", "distutils", "xml", "email", "wsgiref", "xmlrpc", "curses", "dbm"}

    def keep(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(info.name).name
        return None if name in left_out or name.startswith("config-") or name.endswith(".a") else info

    target = tmp_path_factory.mktemp("python") / "archive.tar.gz"
    with tarfile.open(target, "w:gz", compresslevel=1) as tar:
        tar.add(prefix / "bin" / f"python{version}", f"python/bin/python{version}")
        tar.add(prefix / "lib" / f"python{version}", f"python/lib/python{version}", filter=keep)
        for library in prefix.glob("lib/libpython*.so*"):
            tar.add(library, f"python/lib/{library.name}")
    return version, target.read_bytes()


@pytest.mark.slow
def test_a_release_on_an_interpreter_archive(world: World, interpreter_archive: tuple[str, bytes]) -> None:
    version, content = interpreter_archive
    if subprocess.run([Path(sys.base_prefix) / f"bin/python{version}", "-I", "-c", ""], check=False).returncode:
        pytest.skip("this Python cannot be moved")
    (world.bundle / "python").mkdir()
    (world.bundle / "python/cpython.tar.gz").write_bytes(content)
    archive = {"file": "cpython.tar.gz", "sha256": sha256(content)}
    release = world.release("small", python=version, interpreter=archive)
    report = apply(world.site, [release])
    python = world.path("small") / "bin/python"
    assert report.tools == [f"Python {version} ({version}-{archive['sha256'][:8]})"]
    assert python.resolve().is_relative_to(world.site.root / "python")
    assert (
        subprocess.run([world.path("small") / "bin/engine"], capture_output=True, check=True).stdout == b"engine cu13\n"
    )
    assert not apply(replace(world.site, verify="full"), [release]).changed
    library = next((world.site.root / "python").glob("*/lib/python*/json/__init__.py"))
    library.write_text("")
    assert preview(world.site, [release]).tools == report.tools
    assert apply(world.site, [release]).tools == report.tools
    assert library.stat().st_size > 0
    flip_byte(world.bundle / "python/cpython.tar.gz", 5000)
    shutil.rmtree(world.site.root / "python")
    with pytest.raises(ReleaseError, match=r"cpython\.tar\.gz: sha256 is"):
        apply(world.site, [release])
