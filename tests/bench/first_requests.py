# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the first request of a kind costs users: vLLM for CPU with compilation, cold and kept caches, with and without
the unit's readiness step. Figures and ratios, no verdict; every prompt is another one.

A request takes some hundredths of a second here, so that one process of the machine that wakes doubles it: what is
printed are medians over several starts. Run from the checkout's root, on a machine that does nothing else; takes about
10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

RELEASE = Path(".cache/vllm-0.28.0")
MODEL = Path(".cache/models/tiny-qwen3")
READINESS = Path("roles/vllm_service/files/readiness.py")
PORT = 18000
URL = f"http://127.0.0.1:{PORT}"
COMPILED = "JIT compilation during inference"
START_SECONDS = 600
LATER = 5  # requests of a kind after its first
number = count(1)


def ask(path: str, content: dict[str, object]) -> None:
    request = urllib.request.Request(
        URL + path, json.dumps({"model": "tiny-qwen3", **content}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def completion(tokens: int = 12, **more: object) -> None:
    """Of a prompt with so many tokens, which no other one begins like."""
    first = next(number)
    ask("/v1/completions", {"prompt": [2 + first % 500] * tokens, "max_tokens": 8, "ignore_eos": True, **more})


def chat(**more: object) -> None:
    message = {"role": "user", "content": f"{next(number)}: name three capitals."}
    ask("/v1/chat/completions", {"messages": [message], "max_tokens": 8, **more})


def burst(**more: object) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _number: completion(**more), range(8)))


KINDS: dict[str, Callable[[], None]] = {
    "short": completion,
    "top-k": lambda: completion(temperature=1, top_k=20),
    "seeded top-p": lambda: completion(temperature=1, top_p=0.9, seed=7),
    "log-probabilities": lambda: completion(temperature=0, logprobs=1),
    "penalties": lambda: completion(temperature=1, min_p=0.05, presence_penalty=0.5, repetition_penalty=1.1),
    "structured output": lambda: completion(response_format={"type": "json_object"}, ignore_eos=False),
    "chat": chat,
    "streamed chat": lambda: chat(stream=True),
    "900 tokens": lambda: completion(900),
    "eight at once": burst,
    "eight with top-k at once": lambda: burst(temperature=1, top_k=20, top_p=1),
    "eight with top-p at once": lambda: burst(temperature=1, top_k=0, top_p=0.9),
    "eight with both at once": lambda: burst(temperature=1, top_k=20, top_p=0.9),
    "eight structured at once": lambda: burst(response_format={"type": "json_object"}, ignore_eos=False),
}


class Server:
    """vLLM as a unit would run it, its caches below ``caches``."""

    def __init__(self, caches: Path, log: Path) -> None:
        self.log = log
        names = ("HOME", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME")
        self.environment = {
            **{name: str(caches / name.lower()) for name in names},
            "PATH": f"{RELEASE.resolve()}/bin:{os.environ['PATH']}",
            "ONPREM_VLLM_URL": URL,
            "ONPREM_VLLM_MODEL": "tiny-qwen3",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        limits = ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "1024"]
        served = ["--served-model-name", "tiny-qwen3", "--host", "127.0.0.1", "--port", str(PORT)]
        self.began = time.monotonic()
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [str(RELEASE / "bin/vllm"), "serve", str(MODEL), *limits, *served],
                env=self.environment,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def wait(self, *, warm: bool, record: Path) -> float:
        """Seconds until a user may ask: after the readiness step, or as soon as /health answers."""
        if warm:
            step = [sys.executable, "-I", str(READINESS), "completion", str(START_SECONDS), str(record)]
            environment = {**self.environment, "MAINPID": str(self.process.pid)}
            done = subprocess.run(step, env=environment, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"the readiness step failed: {done.stderr}\n{self.log.read_text()[-3000:]}")
            return time.monotonic() - self.began
        while time.monotonic() - self.began < START_SECONDS:
            try:
                with urllib.request.urlopen(f"{URL}/health", timeout=5):
                    return time.monotonic() - self.began
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None:
                    break
                time.sleep(0.2)
        sys.exit(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")

    def compilations(self) -> int:
        """How often its log says that a request waited for a compilation."""
        return self.log.read_text(errors="replace").count(COMPILED)

    def stop(self) -> None:
        if self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGINT)
        killer = threading.Timer(60, os.killpg, [self.process.pid, signal.SIGKILL])
        killer.start()
        self.process.wait()
        killer.cancel()


def measured(ask_one: Callable[[], None]) -> tuple[float, list[float]]:
    """Seconds of the first request, and of the later ones."""
    times = []
    for _unused in range(1 + LATER):
        began = time.monotonic()
        ask_one()
        times.append(time.monotonic() - began)
    return times[0], times[1:]


class Column:
    """What was measured at the starts of one kind."""

    def __init__(self) -> None:
        self.ready: list[float] = []
        self.first: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.later: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.compilations = 0

    def measure(self, caches: Path, *, warm: bool) -> None:
        """One start with these caches."""
        server = Server(caches, caches.with_suffix(".log"))
        try:
            self.ready.append(server.wait(warm=warm, record=caches.with_suffix(".record")))
            before = server.compilations()
            for kind, ask_one in KINDS.items():
                first, later = measured(ask_one)
                self.first[kind].append(first)
                self.later[kind] += later
            self.compilations += server.compilations() - before
        finally:
            server.stop()

    def rows(self) -> dict[str, str]:
        def of(kind: str) -> str:
            first, later = statistics.median(self.first[kind]), statistics.median(self.later[kind])
            return f"{first:.3f} / {later:.3f} = {first / later:.1f}"

        return {
            "ready after, s": f"{statistics.median(self.ready):.0f}",
            **{kind: of(kind) for kind in KINDS},
            "compilations while users asked": str(self.compilations),
        }


def main() -> None:
    """Cold caches and then the same ones again, without and with the readiness step, so often."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3, help="starts of each kind (default: %(default)s)")
    starts = parser.parse_args().starts
    columns = {(kept, warm): Column() for warm in (False, True) for kept in (False, True)}
    with tempfile.TemporaryDirectory() as folder:
        for start in range(starts):
            for (kept, warm), column in columns.items():
                print(f"start {start + 1} of {starts}: {named(kept=kept, warm=warm)}", file=sys.stderr)
                column.measure(Path(folder, f"{start}-{warm}"), warm=warm)
    print("first / median of the later, s | " + " | ".join(named(kept=kept, warm=warm) for kept, warm in columns))
    rows = [column.rows() for column in columns.values()]
    for row in rows[0]:
        print(" | ".join([row, *(column[row] for column in rows)]))


def named(*, kept: bool, warm: bool) -> str:
    return f"{'kept' if kept else 'cold'}, {'warm-up' if warm else 'none'}"


if __name__ == "__main__":
    main()
