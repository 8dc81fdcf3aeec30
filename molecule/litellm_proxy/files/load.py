# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Requests without a pause until a file appears, one line of JSON each: ``load.py URL CA KEY MODEL RECORD STOP``."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import threading
import time
import urllib.parse
from pathlib import Path

url, ca, key, model, record, stop = sys.argv[1:]
host = urllib.parse.urlsplit(url).hostname or ""
context = ssl.create_default_context(cafile=ca)
lock = threading.Lock()


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
    """One client; it keeps its connection as long as the proxy does, and opens another without counting that."""
    connection = None
    while not Path(stop).exists():
        began = time.time()
        try:
            if connection is None:
                connection = http.client.HTTPSConnection(host, timeout=60, context=context)
                connection.connect()
            status, error = ask(connection, stream)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as caught:
            # On a kept connection the server may close while the next request is on its way: every client sends it
            # again. On a new one that is a failure.
            kept = connection is not None and getattr(connection, "used", False)
            connection = None
            if kept:
                continue
            status, error = 0, repr(caught)
        except (OSError, http.client.HTTPException, ValueError) as caught:
            connection, status, error = None, 0, repr(caught)
        if connection is not None:
            connection.used = True  # type: ignore[attr-defined]
        line = {
            "began": began,
            "seconds": round(time.time() - began, 3),
            "stream": stream,
            "status": status,
            "error": error,
        }
        with lock, Path(record).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if error:
            time.sleep(0.2)


clients = [threading.Thread(target=client, args=(number % 2 == 0,)) for number in range(6)]
for one in clients:
    one.start()
for one in clients:
    one.join()
