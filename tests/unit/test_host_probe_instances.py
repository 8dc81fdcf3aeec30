# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Why an instance does not serve: real logs of failed starts, texts in the programs' own source, and the journal."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.module_utils import host_probe_instances
from ansible_collections.onprem.vllm.plugins.module_utils.generation import Content, Generations
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe_instances import (
    Cause,
    compiled,
    hider,
    instance,
    journal,
    named_causes,
    recorded,
    secrets,
)
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_unit import SystemdError, UnitState
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import known_causes
from ansible_collections.onprem.vllm.tests.wheel_member import wheel_member
from hypothesis import given
from hypothesis import strategies as st

JOURNAL = Path(__file__).parent / "fixtures" / "journal"
VLLM = Path(__file__).parents[2] / ".cache/vllm-0.28.0/lib/python3.11/site-packages"
CAUSES = compiled(known_causes())
REPORTED = yaml.safe_load((JOURNAL / "reported.yml").read_text(encoding="utf-8"))
# vLLM 0.28.0 on a CPU, each started once with one thing wrong; the file's name says which cause must be named.
LOGS = sorted(JOURNAL.glob("*.log"))


def names(lines: list[str]) -> list[str]:
    return [found["id"] for found in named_causes(lines, CAUSES)]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_real_failed_start_names_its_cause_and_no_other(path: Path) -> None:
    assert names(path.read_text(encoding="utf-8").splitlines()) == [path.stem.partition(".")[0]]


def test_there_are_real_logs() -> None:
    assert {path.stem.partition(".")[0] for path in LOGS} == {
        *("start-model-missing", "start-unknown-argument", "start-model-incomplete", "start-port-taken"),
    }


# What the parts of vLLM say when one thing is wrong, without the minute that a whole start takes.
MISHAPS = {
    "start-port-taken": """
        import socket
        other = socket.create_server(("127.0.0.1", 0))
        socket.create_server(other.getsockname())
    """,
    "start-model-incomplete": """
        import safetensors.torch, torch
        safetensors.torch.save_file({"w": torch.ones(100)}, "x.safetensors")
        open("x.safetensors", "r+b").truncate(200)
        safetensors.torch.load_file("x.safetensors")
    """,
    "start-no-space": """
        with open("/dev/full", "w") as cache:
            cache.write("x" * 100_000)
    """,
    "start-remote-code": """
        import json
        config = {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Ours"}}
        json.dump(config, open("config.json", "w"))
        open("ours.py", "w").write("from transformers import PretrainedConfig\\nclass Ours(PretrainedConfig): ...")
        from transformers import AutoConfig
        AutoConfig.from_pretrained(".", trust_remote_code=False)
    """,
    "start-read-only": """
        import errno, os
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/usr/share/cache")
    """,
    "start-network": """
        import requests
        requests.get("http://127.0.0.1:9/api/models/org/model")
    """,
    "start-headers-missing": """
        import subprocess, sys
        open("main.c", "w").write("#include <Python.h>")
        sys.exit(subprocess.run(["gcc", "-nostdinc", "-I.", "-c", "main.c"]).returncode)
    """,
    "start-permission": """
        import os
        os.setuid(65534)
        open("/root/cache", "w")
    """,
}


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user needs root")
@pytest.mark.parametrize(("cause", "program"), MISHAPS.items(), ids=MISHAPS)
def test_a_mishap_names_its_cause(cause: str, program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(VLLM.parents[2] / "bin" / "python"), "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert names(done.stderr.splitlines()) == [cause], done.stderr


@pytest.mark.parametrize(
    ("cause", "line"), [(cause, entry["line"]) for cause, entries in REPORTED.items() for entry in entries]
)
def test_a_reported_line_names_its_cause(cause: str, line: str) -> None:
    lines = ["INFO 11-29 16:20:00 [api_server.py:1] vLLM API server version 0.28.0", line]
    found = names([*lines, "RuntimeError: Engine core initialization failed. See root cause above."])
    # What is itself a symptom only stands before that of the engine.
    assert [one for one in found if one != "start-engine-failed"] == [cause] * (cause != "start-engine-failed")
    assert found[0] == cause


@cache
def texts(source: str) -> list[str]:
    """The strings of a Python file, those with values in them with ``x`` in the values' place."""

    def flat(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        return "".join(flat(part) for part in node.values) if isinstance(node, ast.JoinedStr) else "x"

    return [flat(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant | ast.JoinedStr)]


def sources() -> Iterator[tuple[str, str]]:
    for cause in known_causes():
        if found := re.match(r"((?:vllm|flashinfer)/[\w/.]+\.py), (\d[\d.]+)", cause["source"]):
            yield cause["id"], found[1]


@pytest.mark.parametrize(("cause", "path"), list(sources()))
def test_a_pattern_is_found_in_the_source_that_it_names(cause: str, path: str) -> None:
    if path.startswith("vllm/"):
        text = (VLLM / path).read_text(encoding="utf-8")
    else:
        text = wheel_member("flashinfer-python", "0.6.16.post3", path).decode()
    (pattern,) = [known.pattern for known in CAUSES if known.identifier == cause]
    assert [found for found in texts(text) if pattern.search(found)], f"{path} says nothing like it"


def test_every_cause_is_known_from_a_log_a_report_or_a_source() -> None:
    """A pattern that nothing shows is one more that can be wrong."""
    shown = (
        {path.stem.partition(".")[0] for path in LOGS} | {*REPORTED, *MISHAPS} | {cause for cause, _path in sources()}
    )
    # What the readiness step itself says, test_readiness.py lets it say.
    assert {cause.identifier for cause in CAUSES} == {*shown, "start-no-completion"}


def test_a_symptom_counts_where_nothing_else_is_found() -> None:
    symptom = "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above."
    assert names([symptom]) == ["start-engine-failed"]
    assert names([symptom, "OSError: [Errno 98] Address already in use"]) == ["start-port-taken"]


def test_the_line_is_shown_without_what_stands_before_it() -> None:
    line = "(EngineCore pid=12) ERROR 11-29 16:20:00 [core.py:868] OSError: [Errno 28] No space left on device"
    assert named_causes([line], CAUSES) == [
        {"id": "start-no-space", "line": "OSError: [Errno 28] No space left on device"}
    ]


def test_a_healthy_log_names_nothing() -> None:
    lines = [
        "(EngineCore pid=9) INFO 11-29 16:20:00 [kv_cache_utils.py:1] GPU KV cache size: 1,024 tokens",
        "(APIServer pid=7) INFO:     Started server process [7]",
        "(APIServer pid=7) INFO:     Application startup complete.",
        "(APIServer pid=7) WARNING 11-29 16:20:00 [config.py:1] No CUDA toolkit",
    ]
    assert names(lines) == []


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="cause x is no regular expression"):
        compiled([{"id": "x", "pattern": "("}])


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_of_every_generation_are_hidden(tmp_path: Path) -> None:
    generations = Generations(tmp_path)
    for key in ("the-first-key", 'a "quoted" $key'):
        generations.directory.mkdir(exist_ok=True)
        generations.write(Content("model: x\n", "unit", "/opt/x", {"PATH": "/usr/bin"}, {"VLLM_API_KEY": key}))
    assert secrets(tmp_path) == {"the-first-key", 'a "quoted" $key'}
    hide = hider(secrets(tmp_path))
    assert hide('key=the-first-key and a "quoted" $key in /usr/bin') == "key=(hidden) and (hidden) in /usr/bin"
    (generations.path(2) / "manifest.json").unlink()  # then nothing says what is public
    assert "/usr/bin" in secrets(tmp_path)
    assert secrets(tmp_path / "none") == set()


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer SECRET123456",
        "api_key='SECRET123456'",
        'HF_TOKEN="SECRET123456" was refused',
        "{'VLLM_API_KEY': 'SECRET123456', 'port': 8000}",
        "token hf_SECRET123456 is not valid",
        "the key sk-SECRET123456",
        "password=SECRET123456",
    ],
)
def test_what_looks_like_a_secret_is_hidden(line: str) -> None:
    assert "SECRET123456" not in hider([])(line)


@given(st.text(min_size=1), st.text(), st.text())
def test_a_secret_never_comes_through(secret: str, before: str, after: str) -> None:
    hidden = hider([secret])(f"{before}{secret}{after}")
    assert secret not in hidden.replace("(hidden)", "")


# -- the journal -----------------------------------------------------------------------------------------------------

STATE = UnitState(True, "failed", "failed", "exit-code", 0, 0, "b" * 32, False, False, 1, 1)


def entry(message: Any, invocation: str, *, of_systemd: bool = False) -> str:
    return json.dumps({"MESSAGE": message, "INVOCATION_ID" if of_systemd else "_SYSTEMD_INVOCATION_ID": invocation})


def answers(*entries: str, status: int = 0) -> Callable[..., tuple[int, str, str]]:
    return lambda *_words: (status, "\n".join(entries), "no journal files were found" if status else "")


def test_the_last_start_is_read_and_of_a_loop_the_one_before_too() -> None:
    text = answers(
        entry("Starting", "a", of_systemd=True),
        entry("old cause", "a"),
        entry("Starting", "b", of_systemd=True),
        entry([98, 121, 116, 101, 115, 255], "b"),
        entry("Failed", "b", of_systemd=True),
    )
    assert journal("u", STATE, text) == (["Starting", "bytes\ufffd", "Failed"], None)
    restarting = UnitState(**{**STATE.__dict__, "active": "activating", "restarts": 3})
    assert journal("u", restarting, text)[0] == ["Starting", "old cause", "Starting", "bytes\ufffd", "Failed"]
    assert journal("u", STATE, answers()) == ([], "the journal holds nothing of it")
    assert journal("u", STATE, answers(status=1)) == ([], "the journal cannot be read: no journal files were found")


def test_an_instance_that_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generations = Generations(tmp_path / "glm")
    generations.directory.mkdir()
    generations.write(Content("model: x\n", "unit", "/opt/x", {"PATH": "/usr/bin"}, {"VLLM_API_KEY": "the-key"}))
    monkeypatch.setattr(host_probe_instances, "unit_state", lambda _unit: STATE)
    said = answers(entry("started with the-key", "b"), entry("OSError: [Errno 98] in use by the-key", "b"))
    found = instance("glm", CAUSES, tmp_path, said)
    assert found == {
        "active": "failed",
        "sub": "failed",
        "result": "exit-code",
        "restarts": 0,
        "causes": [{"id": "start-port-taken", "line": "OSError: [Errno 98] in use by (hidden)"}],
        "lines": ["started with (hidden)", "OSError: [Errno 98] in use by (hidden)"],
        "unreadable": None,
        "probes": [],
    }


def test_an_instance_that_serves_or_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(*_words: str) -> tuple[int, str, str]:
        raise AssertionError("the journal of an instance that serves is nobody's business")

    monkeypatch.setattr(
        host_probe_instances, "unit_state", lambda _unit: UnitState(**{**STATE.__dict__, "active": "active"})
    )
    found = instance("glm", [Cause("x", re.compile("."))], query=unread)
    assert found is not None
    assert (found["active"], found["causes"], found["lines"]) == ("active", [], [])
    monkeypatch.setattr(
        host_probe_instances, "unit_state", lambda _unit: UnitState(**{**STATE.__dict__, "loaded": False})
    )
    assert instance("glm", [], query=unread) is None

    def broken(_unit: str) -> UnitState:
        raise SystemdError("System has not been booted with systemd")

    monkeypatch.setattr(host_probe_instances, "unit_state", broken)
    found = instance("glm", [], query=unread)
    assert found is not None
    assert found["unreadable"] == "System has not been booted with systemd"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            '{"findings": [{"id": "import", "severity": "error", "found": "a", "needed": "b", "remedy": "c"}]}',
            ["import"],
        ),
        ('{"findings": [{"id": "import"}, 7, null]}', []),
        ('{"findings": {}}', []),
        ("[]", []),
        ("", []),
    ],
)
def test_what_the_probes_let_pass_is_read_from_their_record(tmp_path: Path, text: str, found: list[str]) -> None:
    (tmp_path / "glm").mkdir()
    (tmp_path / "glm" / "probes.json").write_text(text, encoding="utf-8")
    assert [one["id"] for one in recorded("glm", tmp_path)] == found
    assert recorded("other", tmp_path) == []
