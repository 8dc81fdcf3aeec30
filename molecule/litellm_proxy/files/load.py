# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Requests until a file appears, one line of JSON each: ``load.py URL CA KEY MODEL RECORD STOP PAUSE_S PATIENCE_S``.

Each client pauses between an answer and its next request, and gives a request up where nothing came for its patience.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import threading
import time
import urllib.parse
from pathlib import Path

url, ca, key, model, record, stop, pause, patience = sys.argv[1:]
host = urllib.parse.urlsplit(url).hostname or ""
context = ssl.create_default_context(cafile=ca)
lock = threading.Lock()
# How long a request may have been under way on a connection that the proxy was just closing.
RACE_S = 0.05
CLOSED = (
    *(http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError),
    *(ssl.SSLEOFError, ssl.SSLZeroReturnError),
)


def ask(connection: http.client.HTTPSConnection, stream: bool) -> tuple[int, str]:
    """Status, and what was missing of a whole answer."""
    asked = {"model": model, "stream": stream, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    if answer.status != 200:
        return answer.status, body[:200]
    if stream:
        return 200, "" if body.rstrip().endswith(
            "data: [DONE]"
        ) and '"error"' not in body else f"cut off: {body[-200:]}"
    return 200, "" if json.loads(body)["choices"][0]["message"]["content"] else "empty"


def client(stream: bool) -> None:
    """One client; it keeps its connection as long as the proxy does.

    On a kept connection the proxy may close while the next request is on its way: every client sends it again. That is
    over at once, and ``raced`` says so; the attempt and the one after it are both written down. One that had been under
    way for longer was lost.
    """
    connection, kept, raced = None, False, False
    while raced or not Path(stop).exists():
        began = time.time()
        again, raced = raced, False
        try:
            if connection is None:
                connection = http.client.HTTPSConnection(host, timeout=float(patience), context=context)
                connection.connect()
            began = time.time()
            status, error = ask(connection, stream)
            kept = True
        except (OSError, http.client.HTTPException, ValueError) as caught:
            raced = kept and isinstance(caught, CLOSED) and time.time() - began < RACE_S
            connection, kept, status, error = None, False, 0, repr(caught)
        line = {
            "began": began,
            "seconds": round(time.time() - began, 3),
            "stream": stream,
            "status": status,
            "error": error,
            "raced": raced,
            "again": again,
        }
        with lock, Path(record).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if not raced:
            time.sleep(max(float(pause), 0.2 if error else 0))


clients = [threading.Thread(target=client, args=(number % 2 == 0,)) for number in range(6)]
for one in clients:
    one.start()
for one in clients:
    one.join()
