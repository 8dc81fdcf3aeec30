# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The steps of a vLLM unit before and after its start; standard library only, run by systemd as root.

``readiness.py devices SECONDS`` waits for the device nodes of the instance's GPUs, and until the memory is free that
vLLM will ask for.
``readiness.py caches`` removes compiled graphs that a killed process left half written; run as the service itself.
``readiness.py shut INSTANCE`` lets nobody but this host's root reach the instance's port, ``open INSTANCE`` everybody
whom the firewall lets in.
``readiness.py leave INSTANCE SECONDS`` shuts the port and waits until what was asked before is answered.
``readiness.py completion SECONDS RECORD`` waits for one real completion (of a model that has none, for an embedding or
what else it makes of a text), asks one request of every kind so that no user waits for a compilation, and writes
RECORD. It ends at once when the main process does: systemd 252 waits for an ExecStartPost= even when what it waits for
has died.

What to ask comes from the unit's environment file: ONPREM_VLLM_GENERATION, _URL, _MODEL, _GPUS, _GPU_COUNT,
_GPU_MEMORY_UTILIZATION, _TLS_CERTIFICATE and VLLM_API_KEY.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

ASKED_TOKENS = 8
COMPLETIONS = "/v1/completions"
# The ways to a first answer, with what it is called and where it stands. vLLM has those paths that its model can answer
# (entrypoints/openai/api_server.py, build_app): completions where it generates; embeddings where it embeds; pooling
# beside them, and alone where it only ranks, classifies or gives a vector for each token.
WAYS: dict[str, tuple[str, tuple[str, int, str]]] = {
    COMPLETIONS: ("completion", ("choices", 0, "text")),
    "/v1/embeddings": ("embedding", ("data", 0, "embedding")),
    "/pooling": ("pooling", ("data", 0, "data")),
}
NO_SUCH_PATH = 404  # and no such model
# A server that is up and refuses like this does so for ever; 503 is an engine that is not there yet.
FINAL_STATUS = range(400, 600)
PASSING_STATUS = frozenset({408, 425, 429, 503})
# Longer prompts are computed in pieces of at most vLLM's batched-token limit. Where nobody sets it, it is this on large
# GPUs and less on others; a model whose image or video takes more has more.
BATCHED_TOKENS = 8192
# vLLM reads sizes in thousands and in 1,024s (vllm/utils/argparse_utils.py).
SIZE = re.compile(r"([\d.]+)([kKmM]?)")
SIZES = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
# Beyond what CUDA graphs cover (512 tokens) the kernel of the experts is compiled anew for sizes that vLLM tells apart
# (vllm/model_executor/layers/fused_moe), and, as Triton does, for sizes that 16 divides and that it does not: the first
# prompt of 900 tokens took 0.86 s on an H200 and then 0.07, also after prompts of 512 and 1,024.
PROMPT_SIZES_TOKENS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
# From eight sequences in a step on, vLLM 0.25 samples with a kernel of its own, one each for top-k, top-p and both
# (apply_top_k_top_p): the first such burst took 10.2 s on an H200 and then 0.09. Twice as many, for not all are in a
# step together.
BURST = 16
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather now", "parameters": PLACE}}
LEAST_S = 1.0  # less is no time to answer in
AT_WORK = re.compile(r"^vllm:num_requests_(?:running|waiting)\b.* ([\d.eE+]+)$", re.MULTILINE)
IDLE_LOOKS = 4  # a request that just came is not counted yet
IMAGE_SIDE = 448  # pixels; a multiple of 14, 16, 28 and 32, the patches of the usual vision encoders

Ask = Callable[[float], str]  # a request, given until when its answer counts


class Stopped(Exception):
    """systemd stops the unit: it sends KillSignal= to this step as well, and only status 0 is no failure to it."""


class NotReady(Exception):
    """The instance will not become ready; the message says why and what to do."""


def main(words: list[str]) -> int:
    """Run one step; its exit status is the unit's verdict, its message goes to the journal."""
    try:
        if len(words) == 2 and words[0] == "devices":
            signal.signal(signal.SIGINT, _stop)
            seconds = float(words[1])
            until = time.monotonic() + seconds
            gpus = [gpu for gpu in os.environ.get("ONPREM_VLLM_GPUS", "").split(",") if gpu]
            wait_for_devices(gpus, seconds)
            if share := os.environ.get("ONPREM_VLLM_GPU_MEMORY_UTILIZATION"):  # on the CPU nobody asks for any
                wait_for_memory(gpus, int(os.environ["ONPREM_VLLM_GPU_COUNT"]), float(share), until)
        elif words == ["caches"]:
            if root := os.environ.get("VLLM_CACHE_ROOT"):  # the plan's; without one it lies where nobody said
                clear_half_written(Path(root))
        elif len(words) == 2 and words[0] == "shut":
            if said := shut_port(words[1]):
                print(f"readiness: others reach the port while the instance warms up: {said}", file=sys.stderr)
        elif len(words) == 2 and words[0] == "open":
            open_port(words[1])
        elif len(words) == 3 and words[0] == "leave":
            leave(words[1], float(words[2]))
        elif len(words) == 3 and words[0] == "completion":
            wait_for_completion(float(words[1]), Path(words[2]))
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except NotReady as reason:
        print(f"readiness: {reason}", file=sys.stderr)
        return 1
    except Stopped:
        print("readiness: the unit was stopped before it was ready", file=sys.stderr)
    return 0


def wait_for_devices(gpus: list[str], seconds: float, nodes: Path = Path("/dev"), pause_s: float = 1.0) -> None:
    """Return once nvidia-smi lists every wanted GPU and the unified-memory node exists; at once where none is wanted.

    At boot the unit may come before the driver has made its nodes; as root, nvidia-modprobe makes the missing one.

    Raises:
        NotReady: not within ``seconds``.
    """
    until = time.monotonic() + seconds
    while gpus:
        listed, said = _listed_gpus(max(1.0, min(20.0, until - time.monotonic())))
        missing = [gpu for gpu in gpus if gpu not in listed]
        if not missing and (nodes / "nvidia-uvm").exists():
            return
        if not missing:
            said = f"{nodes}/nvidia-uvm is missing"
            _quiet(["nvidia-modprobe", "-c", "0", "-u"])
        elif listed:
            said = f"nvidia-smi -L lists {', '.join(sorted(listed))}, without {', '.join(missing)}"
        if time.monotonic() >= until:
            raise NotReady(
                f"the GPUs {', '.join(gpus)} were not there after {seconds:.0f} s: {said}. Look at nvidia-smi and at"
                " nvidia-persistenced.service."
            )
        time.sleep(pause_s)


def wait_for_memory(gpus: list[str], count: int, share: float, until: float, pause_s: float = 1.0) -> None:
    """Return once a share of the memory of these GPUs is free, of the host's first ``count`` where none is named.

    The driver gives back a dead process's memory a while later, and vLLM refuses to start with less than its share
    (request_memory in 0.28.0). When time is up it is started all the same: its own error is a cause that doctor knows.
    """
    if any(gpu.startswith("MIG-") for gpu in gpus):
        return  # nvidia-smi tells what of a whole GPU is in use
    while True:
        found, said = _gpu_memory(max(1.0, min(20.0, until - time.monotonic())))
        wanted = (gpus or [index for index, *_unused in found])[:count]
        ours = [(index, int(used), int(total)) for index, name, used, total in found if {index, name} & {*wanted}]
        if not ours:
            print(f"readiness: how much GPU memory is free cannot be told, vLLM is started: {said}", flush=True)
            return
        lacking = [
            f"GPU {index} lacks {share * total - (total - used):.0f} MiB ({total - used} of {total} are free)"
            for index, used, total in ours
            if total - used < share * total
        ]
        if not lacking or time.monotonic() >= until:
            break
        time.sleep(pause_s)
    if lacking:
        asked = f"vLLM, which asks for {share:g} of each, is started all the same"
        print(f"readiness: GPU memory is not free: {'; '.join(lacking)}; {asked}", flush=True)
    else:
        free = ", ".join(f"{total - used} of {total} MiB on GPU {index}" for index, used, total in ours)
        print(f"readiness: GPU memory is free: {free}", flush=True)


def clear_half_written(root: Path) -> None:
    """Remove compiled graphs whose index was cut off; what is whole stays warm.

    vLLM writes ``vllm_compile_cache.py`` in place and reads it as a Python literal, so that a process killed while it
    writes leaves every later start failing (read in 0.28.0). Its other caches are renamed into place or rebuilt.
    """
    for index in root.glob("torch_compile_cache/**/vllm_compile_cache.py"):
        try:
            ast.literal_eval(index.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            print(f"readiness: {index.parent} was left half written; it is removed and compiled anew", flush=True)
            shutil.rmtree(index.parent)


def shut_port(instance: str) -> str:
    """Refuse new connections to the instance's port but these steps' own, in a table of its own, until ``open_port``.

    vLLM's /health is 200 before the warm-up, so whoever goes by it, HAProxy's checks too, on this host as well, would
    send requests that wait for compilations. What went wrong is returned, and the port is open then.
    """
    port = urllib.parse.urlsplit(os.environ.get("ONPREM_VLLM_URL", "")).port
    if not port:
        return "ONPREM_VLLM_URL names no port"
    table = _warming_table(instance)
    refused = f'tcp dport {port} tcp flags & (syn | ack) == syn reject with tcp reset comment "not ready"'
    chains = "".join(
        f"chain {hook} {{\ntype filter hook {hook} priority -10; policy accept;\n{whose} {refused}\n}}\n"
        for hook, whose in (("input", 'iif != "lo"'), ("output", 'oif "lo" meta skuid != 0'))
    )
    return _nft(f"{_gone(table)}table inet {table} {{\n{chains}}}\n")


def open_port(instance: str) -> None:
    """Take back what ``shut_port`` did, whatever port it was; nothing happens where it did nothing."""
    table = _warming_table(instance)
    if shutil.which("nft") and (said := _nft(_gone(table))):
        print(f"readiness: others reach the port after `nft delete table inet {table}` alone: {said}", file=sys.stderr)


def leave(instance: str, seconds: float) -> None:
    """Before vLLM is told to stop: take no more connections, and return once it has answered, or when time is up.

    What comes while it stops vLLM answers with 500 ("cannot schedule new futures after shutdown", 0.28.0), and no proxy
    asks that of another instance; a refused connection every one does. The old process has the port of its own
    generation, which is not always the current one.
    """
    try:
        started_with = Path(f"/proc/{int(os.environ['MAINPID'])}/environ").read_text(encoding="utf-8", errors="replace")
    except (KeyError, ValueError, OSError):
        return  # it has ended by itself
    os.environ.update(entry.split("=", 1) for entry in started_with.split("\0") if entry.startswith("ONPREM_VLLM_"))
    if said := shut_port(instance):
        print(f"readiness: what is asked while vLLM stops is refused with 500: {said}", file=sys.stderr)
        return
    until = time.monotonic() + seconds
    idle = 0
    while idle < IDLE_LOOKS and time.monotonic() < until:
        idle = 0 if _busy() else idle + 1
        time.sleep(0.25)


def _busy() -> bool:
    """Whether vLLM's metrics tell of requests that it works on; one that tells nothing has none."""
    try:
        status, text = _request("/metrics", None, time.monotonic())
    except (StillStarting, NotReady):
        return False
    return status == 200 and any(float(found) > 0 for found in AT_WORK.findall(text))


def _warming_table(instance: str) -> str:
    return f"vllm_warming_{instance.replace('-', '/')}"  # nft's names have no hyphens, and the instances' no slashes


def _gone(table: str) -> str:
    return f"add table inet {table}\ndelete table inet {table}\n"  # nft 1.0.6 has no `destroy`


def _nft(text: str) -> str:
    """Load a rule set; what went wrong, or nothing."""
    if not shutil.which("nft"):
        return "nft is not installed"
    try:
        done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nft failed: {error}"
    return "" if done.returncode == 0 else f"nft failed: {_short(done.stderr)}"


def _stop(*_unused: object) -> None:
    raise Stopped


def _listed_gpus(timeout_s: float) -> tuple[set[str], str]:
    """Indexes and UUIDs of ``nvidia-smi -L``, and what is wrong where it lists none."""
    listed, said = _nvidia_smi(timeout_s, "-L")
    found = set()
    for index, identity in re.findall(r"^GPU (\d+):.*\(UUID: ([^)]+)\)", listed, re.MULTILINE):
        found |= {index, identity}
    return found, said


def _gpu_memory(timeout_s: float) -> tuple[list[tuple[str, str, str, str]], str]:
    """Index, UUID, used and whole memory in MiB of each GPU, and what is wrong where none tells them."""
    asked = ("--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits")
    told, said = _nvidia_smi(timeout_s, *asked)
    return re.findall(r"^(\d+), (\S+), (\d+), (\d+)$", told, re.MULTILINE), said


def _nvidia_smi(timeout_s: float, *words: str) -> tuple[str, str]:
    """What it prints, and what to say where that is not what was asked for."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi {words[0]} did not answer in {timeout_s:.0f} s"
    except OSError as error:
        return "", f"nvidia-smi cannot be run ({error.strerror})"
    return done.stdout, _short(done.stderr or done.stdout) or f"nvidia-smi {words[0]} lists no GPU"


def _quiet(words: list[str]) -> None:
    try:
        subprocess.run(words, capture_output=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return


def wait_for_completion(seconds: float, record: Path) -> None:
    """Ask the instance for a completion, or what its model has instead, until it answers, and write down how long.

    Raises:
        NotReady: the main process ended, the answer was wrong, or none came within ``seconds``.
    """
    process = MainProcess(int(os.environ.get("MAINPID", "0") or 0))
    until = time.monotonic() + seconds
    last = "it does not listen yet"
    while True:
        process.check()
        if time.monotonic() >= until:
            raise NotReady(f"no completion after {seconds:.0f} s: {last}. The lines above are what vLLM said.")
        try:
            _in_time(_healthy, process, until)
            asked = time.monotonic()
            way = _in_time(_first_answer, process, until)
            break
        except StillStarting as reason:
            last = str(reason)
            time.sleep(0.25)
    completion_seconds = round(time.monotonic() - asked, 3)
    print(f"readiness: model {os.environ.get('ONPREM_VLLM_MODEL', '')} answered {way}", flush=True)
    warmed = warm_up(way, process, until)
    found = {
        "generation": os.environ.get("ONPREM_VLLM_GENERATION", ""),
        "model": os.environ.get("ONPREM_VLLM_MODEL", ""),
        "seconds": round(process.age_s(), 2),
        "path": way,
        "completion_seconds": completion_seconds,
        "warm_up": warmed,
        "answered": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "invocation": os.environ.get("INVOCATION_ID", ""),
        "pid": process.pid,
    }
    _write(record, json.dumps(found, indent=2, sort_keys=True) + "\n")
    print(f"readiness: ready after {found['seconds']} s, of which {completion_seconds} s for the first answer")


def warm_up(way: str, process: MainProcess, until: float) -> dict[str, object]:
    """Ask one request of each kind; seconds each took, or why it was skipped. None of them decides about readiness.

    The first request of a kind compiles: on the CPU top-k sampling took 14.5 s and then 0.02, on an H200 a burst 1.26 s
    and then 0.08. So each may take half of the time that is left, and none all of it.

    Raises:
        NotReady: the main process ended, or the engine did not survive a request that users may send too.
    """
    warmed: dict[str, object] = {} if way == COMPLETIONS else {"completions and chats": "skipped: the model has none"}
    for kind, ask in _kinds(way, batched_tokens(Path(f"/proc/{process.pid}"))).items():
        began = time.monotonic()
        try:
            if until - began < LEAST_S:
                raise StillStarting("no time left")
            _in_time(ask, process, began + (until - began) / 2)
            warmed[kind] = round(time.monotonic() - began, 3)
        except (StillStarting, NotReady) as reason:
            process.check()
            warmed[kind] = f"skipped: {reason}"
    taken = ", ".join(f"{kind} {took if isinstance(took, str) else f'{took:.2f} s'}" for kind, took in warmed.items())
    print(f"readiness: warm-up: {taken}", flush=True)
    try:
        _in_time(_healthy, process, until)
    except StillStarting as reason:
        if time.monotonic() < until:
            raise NotReady(
                f"the engine did not survive the warm-up: {reason}. The lines above are what vLLM said."
            ) from None
    return warmed


def batched_tokens(process: Path) -> int:
    """How many tokens a vLLM computes at a time, from its command line and the configuration that this names."""
    flag = "max-num-batched-tokens"
    found = None
    with contextlib.suppress(OSError):  # it has just ended, which is found out elsewhere
        words = (process / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        for word, value in itertools.pairwise(words):
            if word == "--config" and found is None:  # what stands on the command line itself counts more
                lines = Path(value).read_text(encoding="utf-8").splitlines()
                found = next((line.partition(": ")[2] for line in lines if line.startswith(f"{flag}: ")), None)
            elif word == f"--{flag}":
                found = value
    size = SIZE.fullmatch((found or "").strip("'\""))
    return int(float(size[1]) * SIZES[size[2]]) if size else BATCHED_TOKENS


def _kinds(way: str, batched: int) -> dict[str, Ask]:
    """A request of each kind that compiles something of its own, by the kind's name."""
    model = os.environ.get("ONPREM_VLLM_MODEL", "")
    question = "Name the capitals of three countries."

    def post(path: str, content: dict[str, object], until: float) -> str:
        if time.monotonic() >= until:  # nobody waits any more for the next one of several
            raise StillStarting("no time left")
        status, body = _request(path, content, until)
        if status != 200:
            raise StillStarting(f"{path} answers {status}: {_short(body)}")
        return body

    def request(**more: object) -> Ask:
        return lambda until: post(way, {**_question(way, question), **more}, until)

    def chat(**more: object) -> Ask:
        asked = [{"role": "user", "content": question}]
        content = {"model": model, "max_tokens": ASKED_TOKENS, "messages": asked, **more}
        return lambda until: post("/v1/chat/completions", content, until)

    def room(until: float) -> int:
        _unused, body = _request("/v1/models", None, until)
        try:
            return min(int(entry["max_model_len"]) for entry in json.loads(body)["data"]) - ASKED_TOKENS
        except (ValueError, LookupError, TypeError):
            raise StillStarting("/v1/models does not say how long a prompt may be") from None

    def prompt(token: int, length: int, until: float) -> str:
        # The smallest tokens exist in every vocabulary; as numbers the prompt has exactly this length.
        return post(way, _question(way, [token] * length), until)

    def prompt_sizes(until: float) -> str:
        longest = min(room(until), batched)
        sizes = [*PROMPT_SIZES_TOKENS]
        while sizes[-1] < longest:
            sizes.append(2 * sizes[-1])
        lengths = [length for size in sizes for length in (size - 1, size) if length <= longest]
        # A token of its own for each: what begins like an earlier prompt is found in the prefix cache.
        for token, length in enumerate(lengths, start=2):
            prompt(token, length, until)
        return ""

    def at_once(*asks: Ask) -> Ask:
        """A burst of BURST requests, of these kinds in turn."""

        def burst(until: float) -> str:
            problems: list[str] = []

            def one(ask: Ask) -> None:
                try:
                    ask(until)
                except (StillStarting, NotReady) as reason:
                    problems.append(str(reason))

            threads = [
                threading.Thread(target=one, args=(asks[number % len(asks)],), name=f"burst {number}", daemon=True)
                for number in range(BURST)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if problems:
                raise StillStarting(problems[0])
            return ""

        return burst

    of_any_model: dict[str, Ask] = {
        "prompt sizes": prompt_sizes,
        "long prompt": lambda until: prompt(1, min(room(until), batched), until),
        "burst": at_once(request()),
    }
    if way != COMPLETIONS:
        return of_any_model
    # With ignore_eos vLLM goes on behind the end of the JSON and answers 500: the grammar allows nothing there.
    structured = request(response_format={"type": "json_object"}, ignore_eos=False)
    return {
        "top-k": request(temperature=1, top_k=20),
        "seeded top-p": request(temperature=1, top_p=0.9, seed=1),
        "log-probabilities": request(temperature=0, logprobs=1),
        "penalties": request(temperature=1, presence_penalty=0.5, repetition_penalty=1.1),
        # By itself: with speculative decoding vLLM refuses it.
        "min-p": request(temperature=1, min_p=0.05),
        "structured output": structured,
        "chat": chat(),
        "streamed chat": chat(stream=True),
        # Without a parser, and with a model of text alone, vLLM refuses these two with the reason.
        "tool call": chat(tools=[TOOL]),
        "image": chat(messages=[_with_image()]),
        **of_any_model,
        "burst with top-k": at_once(request(temperature=1, top_k=20, top_p=1)),
        "burst with top-p": at_once(request(temperature=1, top_k=0, top_p=0.9)),
        "burst with both": at_once(request(temperature=1, top_k=20, top_p=0.9)),
        "burst with log-probabilities": at_once(request(temperature=0, logprobs=1)),
        # All of a step in one grammar, and some of it, are two kernels.
        "burst of structured output": at_once(structured),
        "mixed burst": at_once(structured, request()),
    }


def _with_image() -> dict[str, object]:
    """A chat message with a grey PNG image in it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", IMAGE_SIDE, IMAGE_SIDE, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    rows = (b"\0" + b"\x80" * 3 * IMAGE_SIDE) * IMAGE_SIDE
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": parts}


class StillStarting(Exception):
    """Not an error yet: the server is not up."""


class MainProcess:
    """The unit's main process, known by its start time too, so that a reused number does not pass for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.interrupted = False
        signal.signal(signal.SIGINT, self._interrupt)
        self.started = self._started()
        if not self.started:
            self._gone()

    def _started(self) -> int:
        """Clock ticks from boot to its start; 0 where it is gone or a zombie."""
        try:
            fields = (
                Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            return 0
        return 0 if fields[0] in "ZX" else int(fields[19])

    def check(self) -> None:
        """Raise NotReady where it has ended."""
        if self._started() != self.started:
            self._gone()

    def _interrupt(self, *_unused: object) -> None:
        """Note it and go on: a stop reaches the main process too, and that it ends is what counts."""
        self.interrupted = True

    def _gone(self) -> None:
        if self.interrupted:
            raise Stopped
        raise NotReady("the main process ended before it answered a completion; the lines above say why.")

    def age_s(self) -> float:
        """Seconds since it was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / os.sysconf("SC_CLK_TCK")


def _in_time(ask: Ask, process: MainProcess, until: float) -> str:
    """The result of ``ask``, abandoned when the main process ends or time is up: a first answer may take minutes."""
    results: list[str] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(ask(until))
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        process.check()
        if time.monotonic() >= until:
            raise StillStarting("it accepted a request and did not answer")
        thread.join(0.2)
    if errors:
        raise errors[0]
    return results[0]


def _healthy(until: float) -> str:
    status, _unused = _request("/health", None, until)
    if status != 200:
        raise StillStarting(f"/health answers {status}")
    return ""


def _question(way: str, text: str | list[int]) -> dict[str, object]:
    """What is asked of a text, or of the tokens of one."""
    model = os.environ.get("ONPREM_VLLM_MODEL", "")
    if way != COMPLETIONS:
        return {"model": model, "input": text}
    # Random or instruction-tuned weights may end at once; the point is that tokens are produced.
    return {"model": model, "prompt": text, "max_tokens": ASKED_TOKENS, "ignore_eos": True}


def _first_answer(until: float) -> str:
    """The first of the ways that there is, once it was answered.

    Raises:
        NotReady: refused, from another model, or empty.
    """
    model = os.environ.get("ONPREM_VLLM_MODEL", "")
    said = []
    for way in WAYS:
        asked = _question(way, "The capital of France is")
        status, body = _request(way, {**asked, "temperature": 0} if way == COMPLETIONS else asked, until)
        if status in PASSING_STATUS:
            raise StillStarting(f"{way} answers {status}")
        said.append((way, status, body))
        if status != NO_SUCH_PATH:
            break
    else:  # none of them: the first answer names the model where it is that which is not there
        way, status, body = said[0]
    name, place = WAYS[way]
    if status in FINAL_STATUS:
        raise NotReady(f"the first {name} was answered {status}: {_short(body)}.{_remedy(status, model, until)}")
    try:
        answer = json.loads(body)
        answered_by = answer["model"]
        found = answer[place[0]][place[1]][place[2]]
    except (ValueError, LookupError, TypeError):
        raise NotReady(f"the first {name} is no {name}: {_short(body)}.") from None
    if answered_by != model:
        raise NotReady(f"model {answered_by!r} answered where {model!r} was expected: another server holds the port.")
    if not isinstance(found, str if way == COMPLETIONS else list) or not found:
        raise NotReady(f"the first {name} is empty: {_short(body)}.")
    return way


def _remedy(status: int, model: str, until: float) -> str:
    if status == 401:
        return " VLLM_API_KEY in its secrets is not the key it was started with."
    if status == 404:
        _unused, body = _request("/v1/models", None, until)
        try:
            served = ", ".join(entry["id"] for entry in json.loads(body)["data"])
        except (ValueError, LookupError, TypeError):
            return ""
        return f" It serves {served}, not {model}: compare served-model-name with the plan."
    return ""


def _request(path: str, content: dict[str, object] | None, until: float) -> tuple[int, str]:
    url = os.environ.get("ONPREM_VLLM_URL", "") + path
    request = urllib.request.Request(url, None if content is None else json.dumps(content).encode())
    request.add_header("Content-Type", "application/json")
    if key := os.environ.get("VLLM_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy of the environment: the instance is on this host.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certificate := os.environ.get("ONPREM_VLLM_TLS_CERTIFICATE"):
        # The instance's own certificate is the one trusted; it carries the host's name, not the loopback's.
        trust = ssl.create_default_context(cafile=certificate)
        trust.check_hostname = False
        handlers.append(urllib.request.HTTPSHandler(context=trust))
    # Longer than the waiting thread waits: it can say more than that a socket timed out.
    timeout_s = max(1.0, until - time.monotonic()) + 5
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except ssl.SSLError as error:
        raise NotReady(f"TLS with {url} failed: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        raise StillStarting(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}") from None


def _short(body: str) -> str:
    text = " ".join(body.split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _write(path: Path, text: str) -> None:
    """Whole or not at all; a record that cannot be written is told and does not stop an instance that answers."""
    try:
        descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), 0o644)
            stream.write(text)
        Path(beside).replace(path)
    except OSError as error:
        print(f"readiness: {path} cannot be written: {error}", file=sys.stderr)


if __name__ == "__main__":
    verdict = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads still wait for answers where the time ran out, and Python 3.12 died of SIGSEGV at them on
    # its way out, after it had said ready; systemd takes that for a failed start.
    os._exit(verdict)
