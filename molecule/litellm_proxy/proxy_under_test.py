# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ask the proxy from outside, once or as a constant load whose every request is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testinfra.host import Host

CHECKOUT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
LOAD = Path(__file__).resolve().parent / "files" / "load.py"
# Where another scenario asks.
FRONT = "role1"
MODEL = "tiny"
PAUSE_S, PATIENCE_S = 0.0, 60.0
MASTER = "sk-master-sought-by-tests"
LIMITED = "sk-limited-sought-by-tests"
SECRETS = (
    MASTER,
    LIMITED,
    "sk-over-sought-by-tests",
    "sk-tomorrow-sought-by-tests",
    "key-of-the-instances-sought-by-tests",
)

Lab = Callable[..., str]


def ask(lab: Lab, path: str, *more: str, key: str = MASTER, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and body of one request, over TLS that trusts the proxy's own root alone; 0 where no answer came."""
    command = ["curl", "-sS", "--max-time", "30", "--cacert", str(WORK / "ca.pem"), "-w", "\n%{http_code}", *more]
    command += ["-H", f"Authorization: Bearer {key}"] if key else []
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body is not None else []
    text, _unused, status = lab("run", *command, f"https://{FRONT}{path}").rpartition("\n")
    return int(status), text


def chat(lab: Lab, model: str = "", key: str = MASTER, **more: object) -> tuple[int, str]:
    """One chat completion."""
    asked = {"model": model or MODEL, "messages": [{"role": "user", "content": "hello"}], **more}
    return ask(lab, "/v1/chat/completions", key=key, body=asked)


def mode(lab: Lab, port: int, name: str) -> None:
    """Break an instance, or mend it."""
    lab("run", "curl", "-sS", "--max-time", "10", "-d", name, f"http://role2:{port}/mode")


def servers(lab: Lab) -> dict[str, str]:
    """What HAProxy says of the instances, by name."""
    read = "import sys; sys.path.insert(0, '/tmp'); import haproxy_socket as h; from pathlib import Path;"
    read += "print({s.name: s.status for s in h.servers(Path('/run/onprem-vllm-haproxy/admin.sock'))})"
    module = CHECKOUT / "plugins/module_utils/haproxy_socket.py"
    lab("exec", FRONT, "sh", "-c", f"cat > /tmp/haproxy_socket.py <<'END'\n{module.read_text()}\nEND")
    found: dict[str, str] = json.loads(lab("exec", FRONT, "python3", "-c", read).replace("'", '"'))
    return found


def wait(what: str, done: Callable[[], bool], seconds: float = 20) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)
    return time.monotonic() - began


@contextmanager
def load() -> Iterator[list[dict[str, Any]]]:
    """Streams and single answers one after the other, while the block runs; afterwards every request is in the list.

    The log of each load stays, numbered.
    """
    record, stop = WORK / f"load-{len([*WORK.glob('load-*.jsonl')]) + 1}.jsonl", WORK / "load.stop"
    stop.unlink(missing_ok=True)
    tool = [sys.executable, str(CHECKOUT / "tests/lab/lab.py"), "--lab", os.environ["LAB"], "run"]
    asked = [sys.executable, str(LOAD), f"https://{FRONT}", str(WORK / "ca.pem"), MASTER, MODEL, str(record), str(stop)]
    asked += [str(PAUSE_S), str(PATIENCE_S)]
    requests: list[dict[str, Any]] = []
    process = subprocess.Popen([*tool, *asked])
    try:
        wait("the load", lambda: record.exists() and len(record.read_text().splitlines()) > 10, 60)
        yield requests
        time.sleep(3)
    finally:
        stop.touch()
        process.wait(PATIENCE_S + 10)
    requests += [json.loads(line) for line in record.read_text().splitlines()]
    assert {bool(one["stream"]) for one in requests} == {True, False}


def failed(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were not answered whole, but for attempts that ``load.py`` sends again as every client does."""
    return [one for one in requests if (one["status"] != 200 or one["error"]) and not one["raced"]]


def kill(host: Host, unit: str) -> tuple[float, float]:
    """SIGKILL to all of a unit's processes: the times between which they died, for a command takes its time."""
    before = time.time()
    host.check_output(f"systemctl kill --signal=KILL {unit}")
    return before, time.time()


def under_way(request: dict[str, Any], death: tuple[float, float]) -> bool:
    """Whether a request of ``load`` was sent before a process died and had not ended by then."""
    return bool(request["began"] < death[1] and request["began"] + request["seconds"] > death[0])


def roll(*variables: str) -> subprocess.CompletedProcess[str]:
    """The scenario's converge once more, as a person would change a variable."""
    inventory = CHECKOUT / ".cache/lab" / os.environ["LAB"] / "inventory.yml"
    command = ["ansible-playbook", "-i", str(inventory), str(Path(__file__).parent / "converge.yml"), *variables]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=CHECKOUT)


def drain(state: str, *names: str) -> subprocess.CompletedProcess[str]:
    """Instances out of the routes, or in them again."""
    return module("drain", servers=list(names), state=state, wait_s=60)


def canary(name: str, **thresholds: int) -> subprocess.CompletedProcess[str]:
    """An instance tried on a share of the requests."""
    return module("canary", servers=[name], **thresholds)


def module(name: str, **arguments: object) -> subprocess.CompletedProcess[str]:
    """A module of the collection, run on the proxy's host; its result as JSON behind the host's name."""
    inventory = CHECKOUT / ".cache/lab" / os.environ["LAB"] / "inventory.yml"
    called = ["--become", "-m", f"onprem.vllm.{name}", "-a", json.dumps(arguments)]
    command = ["ansible", "-i", str(inventory), FRONT, *called]
    plain = {"ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    whole = {**os.environ, **plain}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=CHECKOUT, env=whole)


def probe() -> dict[str, Any]:
    """What the module host_probe says of the proxy's host."""
    done = module("host_probe", proxy=True)
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout.partition("=>")[2])["host"]
    return found


def healthy(lab: Lab) -> bool:
    """Whether the proxy says so; one that is away says nothing."""
    ask = f"curl -s -o /dev/null -w '%{{http_code}}' --cacert {WORK}/ca.pem https://{FRONT}/health; true"
    return lab("run", "sh", "-c", ask) == "200"
