# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A package index on the loopback that speaks PEP 691 or PEP 503 and fails in the ways that real ones do."""

from __future__ import annotations

import hashlib
import html
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass
class Index:
    """What is offered, what goes wrong, and what was asked.

    Attributes:
        truncate: file name -> bytes after which the connection is cut, once for each.
        exchanged: file name -> bytes that are served in place of the ones whose hash the page states.
        ranges: whether range requests are answered.
    """

    style: str = "json"
    files: dict[str, bytes] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    hashes: bool = True
    truncate: dict[str, int] = field(default_factory=dict)
    exchanged: dict[str, bytes] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    password: str | None = None
    ranges: bool = True
    asked: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def add(self, wheel: Path) -> str:
        """Offer a wheel; returns its sha256."""
        self.files[wheel.name] = wheel.read_bytes()
        return hashlib.sha256(self.files[wheel.name]).hexdigest()

    def page(self, project: str) -> tuple[bytes, str]:
        own = {n: c for n, c in self.files.items() if normalise(n.split("-")[0]) == project}
        digest = {name: hashlib.sha256(content).hexdigest() if self.hashes else None for name, content in own.items()}
        if self.style == "json":
            entries: list[dict[str, Any]] = [
                {
                    "filename": name,
                    "url": f"../../files/{quote(name)}",
                    "hashes": {"sha256": digest[name]} if digest[name] else {},
                    "size": len(own[name]),
                    "yanked": self.yanked.get(name, False),
                }
                for name in own
            ]
            body = {"meta": {"api-version": "1.1"}, "name": project, "files": entries}
            return json.dumps(body).encode(), "application/vnd.pypi.simple.v1+json"
        links = "".join(
            f'<a href="../../files/{quote(name)}{f"#sha256={digest[name]}" if digest[name] else ""}"'
            + (f' data-yanked="{html.escape(self.yanked[name])}"' if name in self.yanked else "")
            + f">{name}</a>\n"
            for name in own
        )
        return f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: Index

    def log_message(self, *_unused: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        index = self.index
        path = unquote(self.path)
        index.asked[path] += 1
        if index.password is not None and self.headers.get("Authorization") != index.password:
            self._send(b"", "text/plain", 401)
            return
        kind, _unused, name = path.strip("/").partition("/")
        if kind == "simple":
            content, media = index.page(name)
            known = any(normalise(file.split("-")[0]) == name for file in index.files)
            self._send(content, media, 200 if known else 404)
        elif kind == "files" and name in index.files and name not in index.gone:
            self._file(name)
        else:
            self._send(b"", "text/plain", 404)

    def _file(self, name: str) -> None:
        index = self.index
        content = index.exchanged.get(name, index.files[name])
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")) if index.ranges else None
        status, first, last = 200, 0, len(content) - 1
        if asked:
            status = 206
            first = int(asked[1]) if asked[1] else len(content) - int(asked[2])
            last = int(asked[2]) if asked[1] and asked[2] else last
        part = content[first : last + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes" if index.ranges else "none")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = index.truncate.pop(name, None)
        sent = part if cut is None else part[:cut]
        self.wfile.write(sent)
        index.sent[name] += len(sent)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

    def _send(self, content: bytes, media: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def served(index: Index) -> Iterator[Index]:
    """The index at ``index.url`` (which ends in /simple) while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"index": index}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
