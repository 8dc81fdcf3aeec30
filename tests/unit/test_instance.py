# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Generations on disk and what is refused; what needs systemd is in molecule/vllm_service."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import instance as instance_module
from ansible_collections.onprem.vllm.plugins.module_utils.argument_check import remedy
from ansible_collections.onprem.vllm.plugins.module_utils.generation import (
    Content,
    Generations,
    changed_names,
    differences,
)
from ansible_collections.onprem.vllm.plugins.module_utils.instance import (
    MARK,
    Host,
    InstancesRefused,
    Limits,
    build,
    check,
    check_releases,
    variable_problems,
    without_secrets,
)
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_environment import hidden
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_unit import lines_that_matter
from ansible_collections.onprem.vllm.plugins.plugin_utils.serve_config import serve_config

SECRET = "sk-0123456789"


def content(**changed: Any) -> Content:
    wanted = {
        "serve": "model: /models/x\n",
        "unit": f"{MARK}\n[Service]\n",
        "release": "/opt/vllm/releases/a",
        "environment": {"HOME": "/var/cache/vllm"},
        "secrets": {"VLLM_API_KEY": SECRET},
        "port": 8000,
    }
    return Content(**(wanted | changed))


@pytest.fixture
def generations(tmp_path: Path) -> Generations:
    return Generations(tmp_path / "glm")


def test_a_generation_holds_what_was_asked_with_the_secret_for_root_alone(generations: Generations) -> None:
    number = generations.write(content())
    path = generations.path(number)
    modes = {entry.name: oct(entry.stat().st_mode & 0o777) for entry in path.iterdir() if not entry.is_symlink()}
    assert modes == {"environment": "0o400", "manifest.json": "0o600", "serve.yaml": "0o644", "unit": "0o644"}
    assert os.readlink(path / "release") == "/opt/vllm/releases/a"
    assert 'ONPREM_VLLM_GENERATION="1"' in (path / "environment").read_text()
    assert SECRET not in (path / "manifest.json").read_text()
    assert json.loads((path / "manifest.json").read_text())["secrets"] == ["VLLM_API_KEY"]


def test_the_same_content_does_not_differ_and_any_edit_does(generations: Generations) -> None:
    number = generations.write(content())
    assert generations.differs(number, content()) == []
    for name in ("serve.yaml", "environment", "unit", "manifest.json"):
        path = generations.path(number) / name
        before = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(before + b"#")
        assert generations.differs(number, content()) == [name]
        path.unlink()
        assert generations.differs(number, content()) == [name]
        path.write_bytes(before)
    assert generations.differs(number, content(release="/opt/vllm/releases/b")) == ["manifest.json", "release"]


SERVE = {"model": "/models/x", "seed": 1, "enforce-eager": False, "middleware": ["a.b", "k" * 1500], "watermark": -0.5}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, ""),
        ({"serve": serve_config({**SERVE, "seed": 2})}, "serve seed"),
        (
            {"serve": serve_config({**SERVE, "enforce-eager": True, "max-num-seqs": 4})},
            "serve enforce-eager, max-num-seqs",
        ),
        ({"serve": serve_config({**SERVE, "middleware": ["a.b", "k" * 1501]})}, "serve middleware"),
        ({"serve": serve_config({**SERVE, "watermark": -0.25})}, "serve watermark"),
        ({"secrets": {"VLLM_API_KEY": f"{SECRET}-new"}}, "environment VLLM_API_KEY"),
        ({"secrets": {}}, "environment VLLM_API_KEY"),
        ({"environment": {"HOME": "/a/0.28.0-cpu-1f3a9c2e", "OMP_NUM_THREADS": "2"}}, "environment OMP_NUM_THREADS"),
        (
            {"environment": {"HOME": "/a/0.31.0-cpu-0badcafe"}, "release": "/opt/vllm/releases/0.31.0-cpu-0badcafe"},
            "release 0.28.0-cpu-1f3a9c2e -> 0.31.0-cpu-0badcafe",
        ),
        ({"unit": f"{MARK}\n[Service]\nLimitNOFILE=5\n"}, "unit LimitNOFILE"),
        ({"unit": f"{MARK}\n[Service]\n# other words\n"}, ""),
    ],
)
def test_what_differs_is_named_and_no_value_shown(
    generations: Generations, changed: dict[str, Any], names: str
) -> None:
    release = "0.28.0-cpu-1f3a9c2e"
    base = {
        "serve": serve_config(SERVE),
        "environment": {"HOME": f"/a/{release}"},
        "release": f"/opt/vllm/releases/{release}",
    }
    number = generations.write(content(**base))
    found = changed_names(generations.read(number), content(**{**base, **changed}))
    assert found == names
    assert SECRET not in found


def test_what_differs_of_a_generation_that_lost_its_files_is_named_too() -> None:
    assert changed_names(({}, ""), content()) == "serve model; environment HOME, VLLM_API_KEY; release none -> a"


def test_activating_moves_one_link_and_survives_a_lost_directory(generations: Generations) -> None:
    first, second = generations.write(content()), generations.write(content(serve="a: 1\n"))
    assert generations.current() is None
    generations.activate(first)
    generations.mark_ready(first)
    generations.activate(second)
    assert (generations.current(), generations.ready()) == (second, first)
    generations.path(second).rename(generations.store / "elsewhere")
    assert generations.current() is None


def test_a_write_that_fails_leaves_nothing_and_a_half_one_is_swept(
    generations: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations.write(content())

    def full(_unused: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            generations.write(content())
    assert sorted(path.name for path in generations.store.iterdir()) == ["1"]
    (generations.store / ".new-half").mkdir()
    assert generations.write(content()) == 2
    assert sorted(path.name for path in generations.store.iterdir()) == ["1", "2"]


def test_pruning_keeps_the_newest_the_current_and_the_fallback(generations: Generations) -> None:
    for number in range(1, 8):
        assert generations.write(content(serve=f"a: {number}\n")) == number
    generations.activate(3)
    generations.mark_ready(2)
    assert generations.prune(2) == [1, 4, 5]
    assert generations.numbers() == [2, 3, 6, 7]
    assert generations.write(content()) == 8


def test_a_mode_that_was_opened_is_found_and_closed(generations: Generations) -> None:
    number = generations.write(content())
    (generations.path(number) / "environment").chmod(0o644)
    assert generations.loose(number) == ["environment"]
    generations.tighten(number)
    assert generations.loose(number) == []


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (content(secrets={"VLLM_API_KEY": "another-secret-value"}), "VLLM_API_KEY=(hidden, changed)"),
        (content(secrets={"VLLM_API_KEY": SECRET, "HF_TOKEN": "new-secret-value"}), "HF_TOKEN=(hidden)"),
        (content(secrets={}), ""),
        (content(environment={}, secrets={"HOME": "now-a-secret-value"}), "HOME=(hidden, changed)"),
        (content(environment={"HOME": "/elsewhere"}), "HOME=/elsewhere"),
    ],
)
def test_a_diff_tells_that_a_secret_changed_and_never_its_value(
    generations: Generations, after: Content, line: str
) -> None:
    number = generations.write(content())
    diffs = differences(generations.read(number), generations.manifest(number), after, number + 1)
    (environment,) = [diff for diff in diffs if diff["after_header"] == "environment"]
    assert line in environment["after"]
    assert "VLLM_API_KEY=(hidden)" in environment["before"]
    for value in (SECRET, "another-secret-value", "new-secret-value", "now-a-secret-value"):
        assert value not in json.dumps(diffs)


def test_variables_put_in_by_hand_are_not_shown(generations: Generations) -> None:
    number = generations.write(content())
    path = generations.path(number) / "environment"
    path.chmod(0o600)
    path.write_text(path.read_text() + 'OTHER_KEY="by-hand-secret"\n')
    diffs = differences(generations.read(number), generations.manifest(number), content(), number + 1)
    assert "by-hand-secret" not in json.dumps(diffs)
    assert "OTHER_KEY=(hidden)" in json.dumps(diffs)


def entry(**changed: Any) -> dict[str, Any]:
    wanted = {
        "name": "glm",
        "release_path": "/opt/vllm/releases/a",
        "serve": "model: /models/x\n",
        "unit": f"{MARK}\n[Service]\n",
        "environment": {"HOME": "/var/cache/vllm"},
        "secrets": {"VLLM_API_KEY": SECRET},
        "served_model_name": "tiny",
        "host": "0.0.0.0",
        "port": 8000,
        "gpus": [],
        "tls_certificate": None,
    }
    return wanted | changed


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
        ("fd77::11", "http://[fd77::11]:8000"),
    ],
)
def test_the_readiness_step_asks_where_the_instance_listens(host: str, url: str) -> None:
    assert build(entry(host=host)).content.environment["ONPREM_VLLM_URL"] == url


def test_a_start_knows_how_much_memory_of_how_many_gpus_to_wait_for() -> None:
    found = build(entry(gpu_memory={"gpus": 8, "utilization": 0.95})).content.environment
    assert (found["ONPREM_VLLM_GPU_COUNT"], found["ONPREM_VLLM_GPU_MEMORY_UTILIZATION"]) == ("8", "0.95")
    assert not [name for name in build(entry(gpu_memory=None)).content.environment if "GPU_" in name], "on the CPU"


@pytest.mark.parametrize("name", ["", "a b", "../x", "-a", ".a", "a/b", "a@b", "a" * 65, "a\n", "ä"])
def test_a_name_that_is_no_unit_name_is_refused(name: str) -> None:
    with pytest.raises(InstancesRefused, match="becomes a systemd unit"):
        check([build(entry(name=name))])


def test_every_problem_is_told_at_once_and_no_secret() -> None:
    entries = [
        entry(),
        entry(
            unit="[Service]\n", environment={"NOTE": f"key {SECRET}", "ONPREM_VLLM_URL": "x", "B": True, "C": "\x1b"}
        ),
    ]
    found = [problem for one in entries for problem in variable_problems(one)]
    with pytest.raises(InstancesRefused) as refused:
        check([build(one) for one in entries], found)
    said = str(refused.value)
    for part in (
        "listed twice",
        "port 8000 is also",
        "at its top",
        "also stands in",
        "ONPREM_VLLM_URL",
        "of B",
        "U+001B",
    ):
        assert part in said
    assert SECRET not in said


def test_a_release_must_be_whole(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch(0o755)
    instance = build(entry(release_path=str(tmp_path)))
    with pytest.raises(InstancesRefused, match="missing or not whole"):
        check_releases([instance])
    (tmp_path / "manifest.json").touch()
    check_releases([instance])


def test_of_a_long_journal_the_first_cause_and_the_end_are_kept() -> None:
    lines = [f"INFO {number}" for number in range(300)]
    lines[100] = "(EngineCore pid=7) ERROR ValueError: No available memory for the cache blocks"
    lines[250] = "RuntimeError: Engine core initialization failed. See root cause above."
    kept = lines_that_matter(lines, 10)
    assert kept[:2] == [lines[100], lines[250]]
    assert kept[-1] == "INFO 299"
    assert len(kept) <= 10


def test_a_secret_in_a_message_is_hidden_the_longer_one_first() -> None:
    instance = build(entry(secrets={"A": "abcdefgh", "B": "abcdefghij"}))
    assert without_secrets("x abcdefghij abcdefgh y", [instance]) == "x (hidden) (hidden) y"


def test_a_rollback_goes_to_what_was_ready_before_and_a_killed_one_goes_on(generations: Generations) -> None:
    for number in (1, 2, 3):
        assert generations.write(content(serve=f"a: {number}\n")) == number
    assert generations.rollback_target() is None
    generations.activate(1)
    generations.mark_ready(1)
    assert generations.rollback_target() is None
    generations.activate(2)  # killed here, it never answered
    assert generations.rollback_target() == 1
    generations.mark_ready(2)
    generations.activate(3)
    generations.activate(2)  # 3 failed, 2 came back
    assert generations.rollback_target() == 1
    generations.activate(1)  # a rollback, killed before its restart: the next one finishes it
    assert generations.rollback_target() == 1
    generations.mark_ready(1)
    assert (generations.current(), generations.rollback_target()) == (1, 2)


def test_what_a_rollback_needs_is_not_pruned_and_check_mode_knows_before(generations: Generations) -> None:
    for number in range(1, 6):
        generations.write(content(serve=f"a: {number}\n"))
    for number in (2, 3):
        generations.activate(number)
        generations.mark_ready(number)
    assert generations.superfluous(1) == [1, 4]
    # Once 6 is written and ready, 3 is what was ready before, and 2 is not needed any more.
    assert generations.superfluous(1, 6) == [1, 2, 4, 5]
    assert generations.superfluous(5, 6) == [1]
    assert generations.prune(1) == [1, 4]
    assert generations.numbers() == [2, 3, 5]


def test_what_was_altered_since_it_was_written_is_found(generations: Generations) -> None:
    number = generations.write(content())
    path = generations.path(number)
    assert generations.altered(number) == []
    (path / "unit").write_text("other")
    (path / "serve.yaml").unlink()
    (path / "release").unlink()
    (path / "release").symlink_to("/elsewhere")
    assert generations.altered(number) == ["serve.yaml", "unit", "release"]
    (path / "manifest.json").unlink()
    assert "manifest.json" in generations.altered(number)


def test_secrets_are_known_from_the_generation_itself_and_hidden_in_every_form(generations: Generations) -> None:
    tricky = 'k "quoted" \\ back\nslash'
    number = generations.write(content(secrets={"VLLM_API_KEY": tricky}))
    assert generations.secrets(number) == [tricky]
    for text in (tricky, repr({"k": tricky}), json.dumps({"k": tricky})):
        assert "quoted" not in hidden(f"before {text} after", [tricky])
    (generations.path(number) / "manifest.json").unlink()
    assert tricky in generations.secrets(number)


UNIT = Path(__file__).parents[2] / "roles/vllm_service/templates/vllm.service.j2"


def test_the_remedy_names_the_arguments_that_vllm_names() -> None:
    assert remedy("vllm: error: unrecognized arguments: --no-such-flag 1 --other").startswith(
        "Correct `no-such-flag`, `other` below `serve`"
    )
    assert remedy("ValueError: nothing of the kind").startswith("Correct what it names")


def test_refused_arguments_are_told_as_preflight_tells_its_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a secret that vLLM quotes: it is hidden in the message and in the findings."""
    said = f"\n  vllm serve: error: unrecognized arguments: --no-such {SECRET}"
    monkeypatch.setattr(instance_module, "check_arguments", lambda *_unused: (said, ""))
    step = SimpleNamespace(
        instance=SimpleNamespace(name="glm", content=content(release=str(tmp_path))),
        changed=["serve.yaml"],
        number=2,
        state=SimpleNamespace(main_pid=7),
    )
    result: dict[str, Any] = {}
    with pytest.raises(InstancesRefused) as refused:
        instance_module._ask_releases(Host(Limits()), [step], [], "program", result)
    text = str(refused.value)
    assert text.startswith("error arguments-refused\n    found:  instance 'glm': the vLLM of ")
    assert "    -> Correct `no-such` below `serve`" in text
    assert SECRET not in text
    [finding] = result["findings"]
    assert (finding["id"], finding["severity"]) == ("arguments-refused", "error")
    assert SECRET not in finding["found"]


def test_one_that_is_down_now_may_serve_again_when_it_is_restarted() -> None:
    """An hour may pass between the look at all hosts and the turn of one; what never answered interrupts nobody."""
    steps = [
        SimpleNamespace(
            instance=SimpleNamespace(name=name),
            restart=restart,
            state=SimpleNamespace(main_pid=main_pid),
            generations=SimpleNamespace(ready=lambda ready=ready: ready),
        )
        for name, restart, main_pid, ready in [
            ("down", "it was failed", 0, 1),
            ("serving", "new generation 2", 7, 1),
            ("unchanged", "", 7, 1),
            ("first", "new generation 1", 0, None),
        ]
    ]
    host = SimpleNamespace(together=lambda names, _steps: names[:1])
    told: dict[str, object] = {}
    instance_module._tell_interrupted(host, steps, ["removed"], told)
    assert told == {"interrupted": ["removed", "down", "serving"], "together": ["removed"]}


def test_what_has_another_model_by_now_restarts_together_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy asks all of them for the former one until its own turn comes."""
    steps = [
        SimpleNamespace(
            instance=SimpleNamespace(name=name, served_model_name="new"),
            state=SimpleNamespace(main_pid=pid),
            restart="x",
        )
        for name, pid in [("same", 1), ("renamed", 2), ("down", 0), ("as it was", 3)]
    ]
    models = {1: "new", 2: "former", 3: "former"}
    monkeypatch.setattr(instance_module, "process_environment", lambda pid, _name: models.get(pid))
    host = Host(Limits())
    monkeypatch.setattr(host, "in_the_way", lambda _going, _steps: ["removed"])
    assert host.together(["removed", "same", "renamed", "down"], steps) == ["removed", "renamed"]


CHECK = Path(__file__).parents[2] / "roles/vllm_service/files/check_arguments.py"
VLLM = Path(__file__).parents[2] / ".cache/vllm-0.28.0/bin/python"


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        pytest.param("max-model-len: 256K", 0, "", marks=pytest.mark.slow),
        # The value is taken for the model's name, so vLLM names the flag alone.
        ("no-such-flag: 1", 2, "vllm: error: unrecognized arguments: --no-such-flag"),
        pytest.param(
            "enable-auto-tool-choice: true",
            2,
            "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_real_vllm_says_what_it_thinks_of_arguments(tmp_path: Path, line: str, status: int, said: str) -> None:
    """vLLM 0.28.0 itself; `make unit` installs it."""
    serve = tmp_path / "serve.yaml"
    serve.write_text(f"model: /models/x\n{line}\n")
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [str(VLLM), "-I", str(CHECK), str(serve)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
