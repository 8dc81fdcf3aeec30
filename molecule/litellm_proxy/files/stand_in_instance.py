# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""An OpenAI-compatible server that answers with its own name, and breaks on demand: ``stand_in_instance.py PORT KEY``.

POST /mode takes ``ok``, ``mute`` (accepts and never answers), ``slow`` (streams for 45 s), and, healthy otherwise,
``broken`` (500 to completions), ``refusing`` (400), ``hanging`` (no answer) and ``rekeyed`` (401 to KEY).
"""

from __future__ import annotations

import http.server
import json
import socket
import sys
import time

PORT, KEY = int(sys.argv[1]), sys.argv[2]
WORDS = 10
mode = "ok"


class Instance(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *unused: object) -> None:
        """Say nothing."""

    def knows_key(self) -> bool:
        return mode != "rekeyed" and self.headers["Authorization"] == f"Bearer {KEY}"

    def do_GET(self) -> None:
        if mode == "mute":
            time.sleep(1000)
        self.answer(200 if self.path == "/health" or self.knows_key() else 401, {"path": self.path})

    def do_POST(self) -> None:
        global mode  # noqa: PLW0603 - one mode for all connections
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/mode":
            mode = content.decode()
            self.answer(200, {"mode": mode})
            return
        if mode in ("mute", "hanging"):
            time.sleep(1000)
        if mode == "broken":
            self.answer(500, {"error": {"message": "the engine is broken", "type": "InternalServerError", "code": 500}})
            return
        if mode == "refusing":
            self.answer(400, {"error": {"message": "no chat template", "type": "BadRequestError", "code": 400}})
            return
        if not self.knows_key():
            self.answer(401, {"error": {"message": "Unauthorized", "type": "unauthorized", "code": 401}})
            return
        asked = json.loads(content)
        told = {"id": "x", "created": 1, "model": asked["model"]}
        if asked.get("stream"):
            self.stream({**told, "object": "chat.completion.chunk"})
            return
        time.sleep(0.2)
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if self.path == "/v1/completions":
            choice: dict[str, object] = {"index": 0, "text": str(PORT), "finish_reason": "stop"}
            self.answer(200, {**told, "object": "text_completion", "choices": [choice], "usage": usage})
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": str(PORT)}, "finish_reason": "stop"}
            self.answer(200, {**told, "object": "chat.completion", "choices": [choice], "usage": usage})

    def stream(self, told: dict[str, object]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(WORDS):
            delta = {
                "index": 0,
                "delta": {"content": str(PORT)},
                "finish_reason": None if number + 1 < WORDS else "stop",
            }
            self.piece(json.dumps({**told, "choices": [delta]}))
            time.sleep(4.5 if mode == "slow" else 0.1)
        self.piece("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def piece(self, text: str) -> None:
        line = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def answer(self, status: int, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    request_queue_size = 128

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """Health checks end without a word."""


Server(("::", PORT), Instance).serve_forever()
