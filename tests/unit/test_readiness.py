# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The readiness step against real servers and real processes."""

from __future__ import annotations

import base64
import http.server
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe_instances import compiled, named_causes
from ansible_collections.onprem.vllm.plugins.plugin_utils.findings import known_causes

READINESS = Path(__file__).resolve().parents[2] / "roles/vllm_service/files/readiness.py"
Answer = Callable[[str, dict[str, Any], dict[str, str]], tuple[int, dict[str, Any]]]
VLLM = Path(__file__).resolve().parents[2] / ".cache/vllm-0.28.0/bin/python"
READ = """
import sys, PIL.Image
image = PIL.Image.open(sys.stdin.buffer)
print(image.format, image.getcolors())
"""
WORKING = {"model": "tiny", "choices": [{"text": " Paris"}]}


@pytest.fixture
def main_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


class Server(http.server.ThreadingHTTPServer):
    """As many may wait to be accepted as a burst has; with five, each of the others waits for seconds."""

    request_queue_size = 64


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    servers = []

    def start(answer: Answer) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, content = answer(self.path, json.loads(body or b"{}"), dict(self.headers))
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do  # noqa: N815 - the names http.server looks for

            def log_message(self, *_unused: object) -> None:
                pass

        server = Server(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def step(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "ONPREM_VLLM_MODEL": "tiny", "ONPREM_VLLM_GENERATION": "7", **environment}
    return subprocess.run(
        [sys.executable, "-I", str(READINESS), *words],
        env=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def ready(url: str, process: subprocess.Popen[bytes], record: Path, seconds: str = "100", **more: str):
    return step("completion", seconds, str(record), ONPREM_VLLM_URL=url, MAINPID=str(process.pid), **more)


def test_a_completion_is_ready_and_recorded(serve, main_process, tmp_path: Path) -> None:
    asked = []

    def answer(path, content, headers):
        asked.append((path, content.get("model"), headers.get("Authorization")))
        return 200, WORKING

    done = ready(serve(answer), main_process, tmp_path / "r.json", VLLM_API_KEY="k", http_proxy="http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (0, "")
    assert asked[:2] == [("/health", None, "Bearer k"), ("/v1/completions", "tiny", "Bearer k")]
    assert {key for _unused, _unused, key in asked} == {"Bearer k"}
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["model"], record["generation"], record["pid"]) == ("tiny", "7", main_process.pid)
    assert 0 <= record["seconds"] < 60


@pytest.mark.parametrize(
    ("config", "words", "tokens"),
    [
        ("max-num-batched-tokens: 2048\n", (), 2048),
        ("max-num-batched-tokens: 2048\n", ("--max-num-batched-tokens", "4096"), 4096),
        ("max-num-batched-tokens: 16k\n", (), 16000),
        ("max-num-batched-tokens: '16K'\n", (), 16384),
        ("max-num-seqs: 8\n", (), 8192),
    ],
)
def test_how_much_a_batch_holds_is_read_from_vllms_own_arguments(
    tmp_path: Path, config: str, words: tuple[str, ...], tokens: int
) -> None:
    (tmp_path / "serve.yaml").write_text(config, encoding="utf-8")
    line = ("python", "vllm", "serve", "--config", str(tmp_path / "serve.yaml"), *words)
    (tmp_path / "cmdline").write_text("\0".join([*line, ""]), encoding="utf-8")
    program = runpy.run_path(str(READINESS))
    assert program["batched_tokens"](tmp_path) == tokens


def test_prompts_are_as_long_as_a_batch_may_be(serve, tmp_path: Path) -> None:
    """Longer ones would only be computed in pieces; shorter ones would leave the largest pieces to a user."""
    lengths: list[int] = []

    def answer(path: str, content: dict[str, Any], _headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if isinstance(content.get("prompt"), list):
            lengths.append(len(content["prompt"]))
        return 200, {"data": [{"id": "tiny", "max_model_len": 65536}]} if path == "/v1/models" else WORKING

    script = ["-c", "import time; time.sleep(60)", "--max-num-batched-tokens", "20000"]
    with subprocess.Popen([sys.executable, *script]) as process:
        done = ready(serve(answer), process, tmp_path / "record", seconds="100")
        process.kill()
    assert done.returncode == 0, done.stderr
    assert lengths[-4:] == [8192, 16383, 16384, 20000]


def test_every_kind_of_request_is_asked_before_users_come(serve, main_process, tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(path: str, content: dict[str, Any], _headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if content:
            asked.append((path, content))
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": 1024}]}
        if path == "/v1/chat/completions":
            return 400, {"error": "no chat template"}
        return 200, WORKING

    done = ready(serve(answer), main_process, tmp_path / "record", seconds="100")  # on a loaded machine
    assert done.returncode == 0, done.stderr
    warmed = json.loads((tmp_path / "record").read_text())["warm_up"]
    sampled = {"top-k", "seeded top-p", "log-probabilities", "penalties", "min-p", "structured output"}
    chats = {"chat", "streamed chat", "tool call", "image"}
    at_once = {f"burst with {what}" for what in ("top-k", "top-p", "both", "log-probabilities")}
    at_once |= {"burst", "burst of structured output", "mixed burst"}
    assert set(warmed) == sampled | chats | at_once | {"prompt sizes", "long prompt"}
    plain, streamed, tools, image = (content for path, content in asked if "chat" in path)
    assert ("stream" in plain, streamed["stream"], tools["tools"][0]["type"]) == (False, True, "function")
    (picture,) = (part["image_url"]["url"] for part in image["messages"][0]["content"] if part["type"] == "image_url")
    head, _unused, data = picture.partition(",")
    read = subprocess.run([VLLM, "-c", READ], input=base64.b64decode(data), capture_output=True, check=True)
    assert (head, read.stdout) == ("data:image/png;base64", b"PNG [(200704, (128, 128, 128))]\n")
    for kind in chats:
        assert warmed.pop(kind).startswith("skipped: /v1/chat/completions answers 400")
    assert all(isinstance(took, float) for took in warmed.values())
    (first, *rest) = (content for path, content in asked if path == "/v1/completions")
    assert first["temperature"] == 0, "readiness itself is one plain completion"
    prompts = [content["prompt"] for content in rest if isinstance(content["prompt"], list)]
    assert [len(prompt) for prompt in prompts] == [127, 128, 255, 256, 511, 512, 1016], "no longer than one may be"
    assert len({prompt[0] for prompt in prompts}) == len(prompts), "none is found in the prefix cache"
    plain = [content for content in rest if content.keys() == {"model", "prompt", "max_tokens", "ignore_eos"}]
    assert len(plain) == len(prompts) + 16 + 8, "a burst, and half of the mixed one"
    grammars = [content["ignore_eos"] for content in rest if "response_format" in content]
    assert grammars == [False] * (1 + 16 + 8)
    # A model's own generation_config.json may set both: what is not asked for must be off.
    both = [(content["top_k"], content["top_p"]) for content in rest if content.keys() >= {"top_k", "top_p"}]
    assert {pair: both.count(pair) for pair in both} == {(20, 1): 16, (0, 0.9): 16, (20, 0.9): 16}
    assert "chat skipped" in done.stdout, "the journal says what was left out"


def test_a_warm_up_that_runs_out_of_time_is_ready_with_requests_still_open(serve, main_process, tmp_path: Path) -> None:
    """Python 3.12 died of SIGSEGV at its open threads, after it had said ready (seen on an H200)."""
    over = threading.Event()

    def answer(_path: str, content: dict[str, Any], _headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if content.get("min_p"):
            over.wait(60)
        return 200, WORKING

    done = ready(serve(answer), main_process, tmp_path / "record", "30")
    over.set()
    assert (done.returncode, done.stderr) == (0, "")
    assert "ready after" in done.stdout
    warmed = json.loads((tmp_path / "record").read_text())["warm_up"]
    assert warmed["min-p"] == "skipped: it accepted a request and did not answer"
    assert isinstance(warmed["structured output"], float), "one kind that hangs leaves time to the next"


def test_what_no_time_is_left_for_is_not_asked_and_told_as_such(serve, main_process, tmp_path: Path) -> None:
    over = threading.Event()
    asked: list[dict[str, Any]] = []

    def answer(_path: str, content: dict[str, Any], _headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if content:
            asked.append(content)
        if len(asked) > 1:  # readiness itself is answered
            over.wait(60)
        return 200, WORKING

    done = ready(serve(answer), main_process, tmp_path / "record", "12")
    over.set()
    assert (done.returncode, done.stderr) == (0, "")
    warmed = json.loads((tmp_path / "record").read_text())["warm_up"]
    hung = [kind for kind, said in warmed.items() if said == "skipped: it accepted a request and did not answer"]
    assert 1 <= len(hung) <= 4, "each gets half of what the ones before left"
    assert {said for kind, said in warmed.items() if kind not in hung} == {"skipped: no time left"}
    assert len(asked) == 1 + len(hung), "no burst is sent for nobody to wait for"


def test_an_engine_that_a_warm_up_request_kills_is_not_ready(serve, main_process, tmp_path: Path) -> None:
    dead = threading.Event()

    def answer(_path: str, content: dict[str, Any], _headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if content.get("logprobs"):
            dead.set()
        return (500, {"error": "EngineDeadError"}) if dead.is_set() else (200, WORKING)

    done = ready(serve(answer), main_process, tmp_path / "record")
    assert done.returncode == 1
    assert "did not survive the warm-up: /health answers 500" in done.stderr
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, {**WORKING, "choices": [{"text": ""}]}, "empty"),
        (200, {**WORKING, "model": "another"}, "another server holds the port"),
        (200, {"choices": []}, "no completion"),
        (401, {"error": "Unauthorized"}, "VLLM_API_KEY"),
        (404, {"error": "no such model"}, "It serves right-one, not tiny"),
        (500, {"error": "EngineDeadError"}, 'answered 500: {"error": "EngineDeadError"}'),
    ],
)
def test_a_wrong_answer_ends_it_at_once_with_its_reason(serve, main_process, tmp_path, status, content, said) -> None:
    def answer(path, *_unused):
        if path == "/v1/models":
            return 200, {"data": [{"id": "right-one"}]}
        return (200, {}) if path == "/health" else (status, content)

    begun = time.monotonic()
    done = ready(serve(answer), main_process, tmp_path / "r.json")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.startswith("readiness: ")
    (cause,) = named_causes(done.stderr.splitlines(), compiled(known_causes()))
    assert cause["id"] == ("start-port-taken" if "port" in said else "start-no-completion")
    assert not (tmp_path / "r.json").exists()
    assert time.monotonic() - begun < 15


POOLED = {
    "/v1/embeddings": {"model": "tiny", "data": [{"embedding": [0.1, -0.2]}]},
    "/pooling": {"model": "tiny", "data": [{"data": [[0.1], [0.2]]}]},
}


@pytest.mark.parametrize("paths", [("/v1/embeddings", "/pooling"), ("/pooling",)])
def test_a_model_without_completions_is_ready_by_what_it_has(serve, main_process, tmp_path: Path, paths) -> None:
    """vLLM has the paths that its model can answer, and 404 for the others."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(path: str, content: dict[str, Any], _headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if content:
            asked.append((path, content))
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": 512}]}
        return (200, POOLED.get(path, {})) if path in (*paths, "/health") else (404, {"detail": "Not Found"})

    done = ready(serve(answer), main_process, tmp_path / "record", seconds="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"model tiny answered {paths[0]}" in done.stdout
    assert "completions and chats skipped: the model has none" in done.stdout
    record = json.loads((tmp_path / "record").read_text())
    assert record["path"] == paths[0]
    assert {*record["warm_up"]} == {"completions and chats", "prompt sizes", "long prompt", "burst"}
    warm = [content["input"] for path, content in asked if path == paths[0]][1:]
    assert [len(text) for text in warm if isinstance(text, list)] == [127, 128, 255, 256, 504]
    assert len([text for text in warm if isinstance(text, str)]) == 16
    assert all(content.keys() == {"model", "input"} for path, content in asked if path == paths[0])
    assert len([path for path, _unused in asked if path != paths[0]]) <= 2, "no completion is asked of it in vain"


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, {"model": "tiny", "data": [{"embedding": []}]}, "the first embedding is empty"),
        (200, {"model": "tiny", "data": []}, "the first embedding is no embedding"),
        (200, {**POOLED["/v1/embeddings"], "model": "another"}, "another server holds the port"),
        (400, {"error": "too long"}, "the first embedding was answered 400"),
    ],
)
def test_a_wrong_embedding_is_told_as_one(serve, main_process, tmp_path: Path, status, content, said) -> None:
    def answer(path: str, *_unused: object) -> tuple[int, dict[str, Any]]:
        return {"/health": (200, {}), "/v1/embeddings": (status, content)}.get(path, (404, {"detail": "Not Found"}))

    done = ready(serve(answer), main_process, tmp_path / "record")
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    (cause,) = named_causes(done.stderr.splitlines(), compiled(known_causes()))
    assert cause["id"] == ("start-port-taken" if "port" in said else "start-no-completion")


def test_it_waits_while_the_engine_is_not_there_yet(serve, main_process, tmp_path: Path) -> None:
    left = [503, 503, 200]

    def answer(path, *_unused):
        return (left.pop(0) if path == "/health" and len(left) > 1 else 200), WORKING

    assert ready(serve(answer), main_process, tmp_path / "r.json").returncode == 0
    assert left == [200]


@pytest.mark.parametrize("path_that_hangs", ["/health", "/v1/completions"])
def test_it_ends_when_the_main_process_does_even_while_an_answer_is_awaited(serve, tmp_path, path_that_hangs) -> None:
    hanging = threading.Event()

    def answer(path, *_unused):
        if path == path_that_hangs:
            hanging.wait(30)
        return 200, WORKING

    process = subprocess.Popen(["sleep", "2"])
    threading.Thread(target=process.wait, daemon=True).start()
    begun = time.monotonic()
    done = ready(serve(answer), process, tmp_path / "r.json", seconds="40")
    hanging.set()
    assert (done.returncode, "the main process ended" in done.stderr) == (1, True)
    assert time.monotonic() - begun < 20


def test_a_main_process_that_is_a_zombie_has_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    time.sleep(0.5)
    done = ready("http://127.0.0.1:9", process, tmp_path / "r.json")
    assert "the main process ended" in done.stderr
    process.wait()


@pytest.mark.parametrize("main_ends", [True, False])
def test_a_stop_is_no_failure_and_a_stray_interrupt_is_no_readiness(tmp_path: Path, main_ends: bool) -> None:
    process = subprocess.Popen(["sleep", "60"])
    given = {"PATH": os.environ["PATH"], "ONPREM_VLLM_URL": "http://127.0.0.1:9", "MAINPID": str(process.pid)}
    words = [sys.executable, "-I", str(READINESS), "completion", "6", str(tmp_path / "r.json")]
    waiting = subprocess.Popen(words, env=given, stderr=subprocess.PIPE, text=True)
    time.sleep(3)
    waiting.send_signal(2)
    if main_ends:
        process.kill()
        process.wait()
    _unused, said = waiting.communicate(timeout=60)
    process.kill()
    process.wait()
    assert waiting.returncode == (0 if main_ends else 1)
    assert ("was stopped before" if main_ends else "no completion after 6 s") in said


def test_nothing_that_listens_is_given_up_in_time(main_process, tmp_path: Path) -> None:
    done = ready("http://127.0.0.1:9", main_process, tmp_path / "r.json", seconds="1")
    assert "no completion after 1 s: http://127.0.0.1:9" in done.stderr


def nvidia_smi(directory: Path, text: str) -> str:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


LISTED = "GPU 0: NVIDIA H200 (UUID: GPU-aaaa)\nGPU 1: NVIDIA H200 (UUID: GPU-bbbb)"


def test_no_gpus_are_waited_for_where_none_are_wanted() -> None:
    assert step("devices", "1", ONPREM_VLLM_GPUS="", PATH="/nonexistent").returncode == 0


@pytest.mark.parametrize(
    ("wanted", "text", "said"),
    [
        ("0,2", LISTED, "without 2"),
        ("GPU-cccc", LISTED, "without GPU-cccc"),
        ("0,GPU-bbbb", LISTED, "nvidia-uvm is missing"),
        ("0", "No devices were found", "No devices were found"),
    ],
)
def test_gpus_that_do_not_come_are_told(tmp_path: Path, wanted: str, text: str, said: str) -> None:
    """This machine has no GPU, so the program is a stand-in and the missing node is real."""
    done = step("devices", "1", ONPREM_VLLM_GPUS=wanted, PATH=nvidia_smi(tmp_path, text))
    assert done.returncode == 1
    assert said in done.stderr


def test_a_driver_that_is_not_installed_is_told() -> None:
    done = step("devices", "1", ONPREM_VLLM_GPUS="0", PATH="/nonexistent")
    assert "nvidia-smi cannot be run" in done.stderr


MEMORY = """#!/bin/sh
case $1 in --query-gpu=index,uuid,memory.used,memory.total) ;; *) exit 9 ;; esac
[ "$2" = --format=csv,noheader,nounits ] || exit 9
rest=$(tail -n +2 {queue}); head -n 1 {queue} | tr ';' '\\n'
[ -z "$rest" ] || printf '%s\\n' "$rest" > {queue}
"""
IDLE, TAKEN = "4, 143771", "21007, 143771"


def memory_of(directory: Path, *looks: tuple[str, ...]) -> str:
    """A PATH with an nvidia-smi that tells used and whole memory of each GPU, look by look, the last one for ever."""
    queue, program = directory / "queue", directory / "nvidia-smi"
    lines = (";".join(f"{at}, GPU-{'abcd'[at] * 4}, {memory}" for at, memory in enumerate(look)) for look in looks)
    queue.write_text("\n".join(lines) + "\n")
    program.write_text(MEMORY.format(queue=queue))
    program.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


def devices(path: str, seconds: str = "30", share: str = "0.92", count: str = "1", **more: str):
    asked = {"ONPREM_VLLM_GPU_MEMORY_UTILIZATION": share, "ONPREM_VLLM_GPU_COUNT": count}
    return step("devices", seconds, PATH=path, **asked, **more)


def test_a_start_waits_until_the_memory_of_its_gpus_is_free_and_no_longer(tmp_path: Path) -> None:
    """The driver gives a dead engine's memory back after a while; vLLM refuses to start before."""
    path = memory_of(tmp_path, (TAKEN, IDLE), (TAKEN, TAKEN), (IDLE, IDLE), (TAKEN, TAKEN))
    done = devices(path, count="2", seconds="600")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout == "readiness: GPU memory is free: 143767 of 143771 MiB on GPU 0, 143767 of 143771 MiB on GPU 1\n"
    )
    assert (tmp_path / "queue").read_text() == f"0, GPU-aaaa, {TAKEN};1, GPU-bbbb, {TAKEN}\n", "three looks"


def test_memory_that_others_keep_is_told_and_stops_no_start(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = devices(memory_of(tmp_path, (IDLE, TAKEN)), seconds="2", count="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "GPU 1 lacks 9505 MiB (122764 of 143771 are free); vLLM, which asks for 0.92 of each, is" in done.stdout
    assert "GPU 0" not in done.stdout
    assert time.monotonic() - begun > 2
    assert named_causes(done.stdout.splitlines(), compiled(known_causes())) == [], "vLLM's own error tells"


@pytest.mark.parametrize(("share", "free"), [("0.85", True), ("0.86", False)])
def test_it_is_vllms_own_share_that_must_be_free(tmp_path: Path, share: str, free: bool) -> None:
    done = devices(memory_of(tmp_path, (TAKEN,)), seconds="0", share=share)
    assert ("GPU memory is free" in done.stdout) is free


def test_of_gpus_that_it_does_not_name_an_instance_takes_the_first(tmp_path: Path) -> None:
    assert "GPU memory is free" in devices(memory_of(tmp_path, (IDLE, TAKEN)), seconds="0").stdout


@pytest.mark.parametrize(
    ("gpus", "count", "said"),
    [
        (["1"], 1, "GPU 1 lacks"),
        (["GPU-bbbb"], 1, "GPU 1 lacks"),
        (["0"], 1, "is free: 143767 of 143771 MiB on GPU 0\n"),
        (["2", "1"], 1, "is free: 143767 of 143771 MiB on GPU 2\n"),
        (["2", "1"], 2, "GPU 1 lacks"),
        (["MIG-aaaa"], 1, ""),
    ],
)
def test_only_the_instances_own_gpus_count(tmp_path: Path, monkeypatch, capsys, gpus, count, said) -> None:
    """This machine has no device nodes of GPUs, so what follows on them is called by itself."""
    monkeypatch.setenv("PATH", memory_of(tmp_path, (IDLE, TAKEN, IDLE)))
    runpy.run_path(str(READINESS))["wait_for_memory"](gpus, count, 0.92, time.monotonic())
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(printed) is bool(said)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo NVIDIA-SMI has failed; exit 9", "NVIDIA-SMI has failed"),
        ("exec sleep 60", "did not answer in 1 s"),
        ("echo '0, GPU-aaaa, [N/A], [N/A]'", "[N/A]"),
    ],
)
def test_an_nvidia_smi_that_tells_nothing_stops_no_start(tmp_path: Path, program: str, said: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = devices(f"{tmp_path}:/usr/bin:/bin", seconds="1")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert done.stdout.startswith("readiness: how much GPU memory is free cannot be told")
    assert said in done.stdout


def test_an_instance_on_the_cpu_waits_for_no_gpu(tmp_path: Path) -> None:
    done = step("devices", "0", PATH=memory_of(tmp_path, (TAKEN,)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def leaving(tmp_path: Path, url: str, seconds: str = "30") -> float:
    """Seconds that ``leave`` took of a process which was started with ``url``, where nft does as it is told."""
    (tmp_path / "nft").write_text("#!/bin/sh\ncat >&2\n")
    (tmp_path / "nft").chmod(0o755)
    process = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "ONPREM_VLLM_URL": url})
    try:
        began = time.monotonic()
        path = f"{tmp_path}:{os.environ['PATH']}"
        new = "http://127.0.0.1:9"  # the current generation may be another one
        done = step("leave", "glm", seconds, PATH=path, MAINPID=str(process.pid), ONPREM_VLLM_URL=new)
        assert (done.returncode, done.stderr) == (0, "")
        return time.monotonic() - began
    finally:
        process.kill()
        process.wait()


def test_what_stops_answers_first_and_no_longer_than_it_may(serve, tmp_path: Path) -> None:
    """By the metrics of the generation that runs; of several engines, one at work is enough."""
    counts = iter([(1, 0), (0, 2), (0, 0), (3, 0)])
    asked = []

    def metrics(path, _content, _headers):
        asked.append(path)
        running, waiting = next(counts, (0, 0))
        lines = [
            f'vllm:num_requests_{name}{{engine="{engine}",model_name="a b"}} {float(count if engine else 0)}'
            for name, count in (("running", running), ("waiting", waiting))
            for engine in (0, 1)
        ]
        return 200, "\n".join(["# TYPE vllm:num_requests_running gauge", *lines, "process_x 9.0"]).encode()

    leaving(tmp_path, serve(metrics))
    assert asked == ["/metrics"] * 8, "four of them after the last one at work"
    assert 1.9 < leaving(tmp_path, serve(lambda *_unused: (200, b"vllm:num_requests_running 1.0\n")), "2") < 10
    assert leaving(tmp_path, serve(lambda *_unused: (404, {})), "30") < 10


def test_what_has_ended_has_nothing_to_answer() -> None:
    done = step("leave", "glm", "30", PATH="/nonexistent")
    assert (done.returncode, done.stderr) == (0, "")


TWO_HOSTS = """
unshare --net sleep 60 & far=$!
trap 'kill $far %%' EXIT
until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add near type veth peer name far netns $far
ip address add 192.0.2.1/24 dev near
ip link set near up
ip link set lo up
nsenter --net=/proc/$far/ns/net sh -c 'ip address add 192.0.2.2/24 dev far; ip link set far up'
python3 -m http.server 8000 --directory /var/empty >/dev/null 2>&1 &
ask() { "$@" curl --silent --output /dev/null --max-time 5 --write-out '%{http_code} ' http://192.0.2.1:8000/ || true; }
until ask | grep -q 404; do sleep 0.05; done
coproc talk { nsenter --net=/proc/$far/ns/net python3 -c '
import socket
connection = socket.create_connection(("192.0.2.1", 8000))
print("connected", flush=True)
input()
connection.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
print(connection.recv(12).decode().split()[1], flush=True)'; }
read -r said <&${talk[0]}
for word in shut shut moved open open; do
  # Meanwhile the instance's configuration may name another port: what was shut is opened all the same.
  if [ $word = moved ]; then ONPREM_VLLM_URL=http://127.0.0.1:9 python3 -I "$READINESS" open glm-5.2
  else python3 -I "$READINESS" $word glm-5.2; fi
  ask nsenter --net=/proc/$far/ns/net
  ask
  ask setpriv --reuid=65534
  # Who was connected before is answered.
  if [ -n "$said" ]; then echo >&${talk[1]}; read -r said <&${talk[0]}; echo $said; said=; fi
done
nft list tables
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_shut_port_refuses_others_and_other_users_answers_root_and_opens_again() -> None:
    done = subprocess.run(
        ["unshare", "--net", "bash", "-euc", TWO_HOSTS],
        env={"PATH": os.environ["PATH"], "READINESS": str(READINESS), "ONPREM_VLLM_URL": "http://127.0.0.1:8000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [*("000", "404", "000"), "404", *("000", "404", "000"), *["404"] * 9]


def test_a_port_that_cannot_be_shut_is_told_and_stops_no_start(tmp_path: Path) -> None:
    nft = tmp_path / "nft"
    nft.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    nft.chmod(0o755)
    done = step("shut", "glm", PATH=f"{tmp_path}:/bin", ONPREM_VLLM_URL="http://127.0.0.1:8000")
    assert (done.returncode, "others reach the port" in done.stderr, "not permitted" in done.stderr) == (0, True, True)
    without = step("shut", "glm", PATH="/nonexistent", ONPREM_VLLM_URL="http://127.0.0.1:8000")
    assert without.returncode == 0
    assert "others reach the port while the instance warms up: nft is not installed" in without.stderr
    assert step("open", "glm", PATH="/nonexistent").stderr == "", "nothing was shut"


def test_words_it_does_not_know_are_a_usage_error() -> None:
    assert step("nothing").returncode == 2


def test_a_half_written_graph_is_removed_and_a_whole_one_stays_warm(tmp_path: Path) -> None:
    """Cut off anywhere, vLLM's index is no Python literal; it would fail every later start."""
    whole = "{((1, 2), 0, 'inductor'): {'graph_handle': ('a', '/b')}}"
    kept, cut, empty = (tmp_path / f"torch_compile_cache/{name}/rank_0_0/backbone" for name in ("a", "b", "c"))
    for folder, text in ((kept, whole), (cut, whole[:-9]), (empty, "")):
        folder.mkdir(parents=True)
        (folder / "vllm_compile_cache.py").write_text(text)
        (folder / "computation_graph.py").write_text("x")
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-I", str(READINESS), "caches"], env=environment, capture_output=True, text=True, check=True
    )
    assert (kept.is_dir(), cut.exists(), empty.exists()) == (True, False, False)
    assert done.stdout.count("left half written") == 2


def test_caches_that_nobody_named_are_let_be() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CACHE_ROOT"}
    command = [sys.executable, "-I", str(READINESS), "caches"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
