# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The steps of the proxy's units; standard library only.

``proxy.py ready PORT SECONDS`` waits until LiteLLM on PORT lists every model of ONPREM_VLLM_MODELS to the master key.
``proxy.py keep-state SOCKET FILE CONFIG`` writes down which servers HAProxy calls up, down or drained, for its next
process, as far as CONFIG leads to them where they are.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def main(words: list[str]) -> int:
    """Run one step; its exit status is systemd's verdict."""
    if len(words) == 3 and words[0] == "ready":
        return ready(int(words[1]), float(words[2]))
    if len(words) == 4 and words[0] == "keep-state":
        return keep_state(words[1], Path(words[2]), Path(words[3]))
    print(__doc__, file=sys.stderr)
    return 2


def ready(port: int, seconds: float) -> int:
    """0 once the models are listed, 1 where the main process ended or time is up."""
    wanted = set(json.loads(os.environ["ONPREM_VLLM_MODELS"]))
    key = os.environ["LITELLM_MASTER_KEY"]
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + seconds
    said = "nothing"
    while time.monotonic() < until:
        # systemd 252 waits for this step even when the main process has died.
        if not Path(f"/proc/{os.environ.get('MAINPID', 'self')}").exists():
            print("proxy: LiteLLM ended before it answered; the lines above say why", file=sys.stderr)
            return 1
        try:
            with opener.open(asked, timeout=10) as answer:
                missing = wanted - {entry["id"] for entry in json.load(answer)["data"]}
            if not missing:
                warm_up(opener, port, key, sorted(wanted))
                return 0
            said = f"its list of models lacks {', '.join(sorted(missing))}"
        except (OSError, ValueError, LookupError, TypeError) as error:
            said = str(error)
        time.sleep(0.25)
    print(f"proxy: LiteLLM was not ready after {seconds:.0f} s: {said}", file=sys.stderr)
    return 1


def warm_up(opener: urllib.request.OpenerDirector, port: int, key: str, models: list[str]) -> None:
    """One request before clients send any: LiteLLM loads half of its code with the first one, which took 4 to 9 s.

    Whatever is answered, also that no instance is there.
    """
    for model in models[:1]:
        body = json.dumps(
            {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
        ).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
        try:
            with opener.open(asked, timeout=30) as answer:
                answer.read()
        except OSError as error:
            print(f"proxy: warm-up: {error}")


def keep_state(path: str, file: Path, config: Path) -> int:
    """Without it a reload calls every server up, dead and drained ones as well, until it has asked them.

    HAProxy takes a server's port from here and not from its configuration, so one that has moved is left out.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(b"show servers state\n")
        state = b""
        while piece := connection.recv(1 << 16):
            state += piece
    wanted = places(config.read_text(encoding="utf-8"))
    lines = [line for line in state.decode().splitlines(keepends=True) if not has_moved(line.split(), wanted)]
    beside = file.with_suffix(".new")
    beside.write_text("".join(lines), encoding="utf-8")
    beside.replace(file)
    return 0


def has_moved(fields: list[str], wanted: dict[tuple[str, str], tuple[str, str]]) -> bool:
    """Whether a line of the state is of a server that is elsewhere now. ``show servers state``, version 1."""
    if len(fields) < 19 or fields[0] == "#":
        return False
    backend, server, address, name, port = (fields[index] for index in (1, 3, 4, 17, 18))
    return wanted.get((backend, server)) != (address if name == "-" else name, port)


def places(config: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Where the servers of a configuration are, by backend and name."""
    found = {}
    backend = ""
    for words in (line.split() for line in config.splitlines()):
        if words[:1] == ["backend"]:
            backend = words[1]
        elif words[:1] == ["server"]:
            address, _colon, port = words[2].rpartition(":")
            with contextlib.suppress(ValueError):  # where it is a name
                address = str(ipaddress.ip_address(address.strip("[]")))  # as HAProxy writes it
            found[backend, words[1]] = (address, port)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
