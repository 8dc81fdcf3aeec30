# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Status as a table, and which releases pruning leaves; what is read from a host is in molecule/vllm_service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.filter.status_table import FilterModule
from ansible_collections.onprem.vllm.plugins.module_utils.cache_dirs import Layout, assess
from ansible_collections.onprem.vllm.plugins.module_utils.release import Site, prune, referenced_releases

table = FilterModule().filters()["status_table"]


def instance(**changed: Any) -> dict[str, Any]:
    release = {"id": "0.25.0-cu130-11111111", "vllm": "0.25.0", "patches": [], "version_check_disabled": False}
    release |= {"flashinfer": {"flashinfer-python": "0.6.16.post3"}, "flashinfer_decision": None}
    return {
        "name": "glm",
        "generation": 3,
        "rollback": None,
        "release": release,
        "since": "2026-11-29T10:00:00+0000",
        "state": "active/running",
        "ready": True,
        "restarts": 0,
        "logs": [],
        "drift": [],
    } | changed


def test_an_instance_that_is_as_it_shall_be_is_one_line() -> None:
    lines = table({"gpu1": {"instances": [instance()]}}).splitlines()
    assert len(lines) == 2
    assert lines[1].split() == [
        *(
            "gpu1",
            "glm",
            "3",
            "0.25.0-cu130-11111111",
            "0.25.0",
            "2026-11-29T10:00:00+0000",
            "active/running",
            "yes",
            "0",
        )
    ]


def test_whom_a_proxy_sends_no_requests_is_told() -> None:
    away = [{"name": "gpu1-glm", "model": "glm", "status": "DRAIN"}]
    found = {"proxy1": {"away": away}, "proxy2": {"away": []}, "proxy3": {"msg": "no route"}, "gpu1": {"instances": []}}
    lines = table(found).splitlines()
    assert lines[1].split() == ["proxy1", "gpu1-glm", *"----", "DRAIN", "in", "routes", "NO", "-"]
    assert lines[2].split() == ["proxy2", "-", *"----", "all", "up", "-", "-"]
    assert lines[3].split()[6:9] == ["no", "answer", "NO"]
    both = table({"gpu1": {"away": [], "instances": [instance()]}}).splitlines()
    assert [line.split()[1] for line in both] == ["instance", "-", "glm"]


def test_what_is_to_be_known_stands_below() -> None:
    decided = instance()["release"] | {
        "patches": ["mended"],
        "version_check_disabled": True,
        "flashinfer_decision": {"reason": "SM120 needs 0.6.14"},
    }
    text = table(
        {
            "gpu1": {
                "instances": [instance(release=decided, drift=["serve.yaml was changed"], ready=False, rollback=2)]
            },
            "gpu2": {"unreachable": True, "msg": "no route to host"},
            "gpu3": {"instances": []},
        }
    )
    for part in (
        "drift: serve.yaml was changed",
        "patches: mended",
        "FlashInfer's version check is off (flashinfer-python 0.6.16.post3): SM120 needs 0.6.14",
        "a rollback goes to generation 2",
        "no answer",
        "no route to host",
        "no instance",
    ):
        assert part in text
    assert " NO " in text.splitlines()[1]


def test_what_a_host_takes_on_stands_below_it() -> None:
    waived = {"preflight": ["gpu-busy", "memory-small"], "flashinfer": ["read-only"]}
    nothing = {"preflight": [], "flashinfer": []}
    hosts = {
        "gpu1": {"instances": [instance(name="a"), instance(name="b")], "waived": waived},
        "gpu2": {"unreachable": True, "msg": "no route to host", "waived": waived},
        "gpu3": {"instances": [], "waived": waived},
        "gpu4": {"instances": [instance()], "waived": nothing},
    }
    lines = table(hosts).splitlines()
    said = "    waived: gpu-busy (preflight_waived), memory-small (preflight_waived), read-only (flashinfer_waived)"
    assert [number for number, line in enumerate(lines) if line == said] == [3, 6, 8]
    assert len(lines) == 10


@pytest.fixture
def site(tmp_path: Path) -> Site:
    for age, name in enumerate(("a-00000001", "b-00000002", "c-00000003", "d-00000004", "e-00000005")):
        folder = tmp_path / "releases" / name / "bin"
        folder.mkdir(parents=True)
        os.utime(folder.parent, (1000 + age, 1000 + age))
    (tmp_path / "releases" / ".building-x").mkdir()
    return Site(tmp_path, "", {"version": "1"})


def pruned(site: Site, wanted: list[str], referenced: list[str], keep: int, check: bool = False) -> list[str]:
    return sorted(outcome.id for outcome in prune(site, wanted, referenced, keep, check=check).outcomes)


def test_the_oldest_releases_go_and_those_that_something_needs_stay_and_count(site: Site) -> None:
    assert pruned(site, ["a-00000001"], ["b-00000002"], 3, check=True) == ["c-00000003", "d-00000004"]
    assert len(list(site.releases.iterdir())) == 6
    assert pruned(site, ["a-00000001"], ["b-00000002"], 3) == ["c-00000003", "d-00000004"]
    left = sorted(folder.name for folder in site.releases.iterdir())
    assert left == [".building-x", "a-00000001", "b-00000002", "e-00000005"]
    assert pruned(site, ["a-00000001"], ["b-00000002"], 3) == []
    assert pruned(site, [], ["b-00000002"], 0) == ["a-00000001", "e-00000005"]


def test_a_release_that_a_process_runs_from_stays(site: Site) -> None:
    word = site.releases / "a-00000001" / "bin" / "x"
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", str(word)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert "a-00000001" not in pruned(site, [], [], 1)
        assert process.stdin is not None
        process.stdin.close()
    assert pruned(site, [], [], 0) == ["a-00000001"]


def test_every_generation_of_every_instance_holds_its_release(tmp_path: Path) -> None:
    for name, number, release in (("glm", 1, "a-00000001"), ("glm", 2, "b-00000002"), ("gemma", 1, "a-00000001")):
        generation = tmp_path / name / "generations" / str(number)
        generation.mkdir(parents=True)
        (generation / "release").symlink_to(f"/opt/vllm/releases/{release}")
    assert referenced_releases(tmp_path) == {"a-00000001", "b-00000002"}


def test_caches_of_a_release_that_is_going_are_stale_already(tmp_path: Path) -> None:
    for place in ("releases/a-00000001", "cache/triton/a-00000001", "cache/vllm/glm/a-00000001"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "etc/glm").mkdir(parents=True)
    places = {"root": tmp_path / "cache", "releases": tmp_path / "releases", "configuration": tmp_path / "etc"}
    known = Layout((), "root", "root", records=tmp_path, file=tmp_path / "x", **places)
    going = Layout((), "root", "root", records=tmp_path, file=tmp_path / "x", going=frozenset({"a-00000001"}), **places)
    assert assess(known).stale == []
    assert [path.name for path in assess(going).stale] == ["a-00000001", "a-00000001"]
