# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A Hub to talk to without a network: the routes that huggingface_hub uses for models, and a CDN on a second port.

It misbehaves on request: `faults` maps a path to what its next requests get, in turn.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".bin")
PAGE = 3  # entries per page of a tree: the real one has 1000


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Request:
    server: str  # "hub" or "cdn"
    method: str
    path: str
    range: str | None
    token: str | None


class Hub:
    """`with Hub() as hub:` then `hub.commit({...})`; `hub.url` is the endpoint."""

    def __init__(self) -> None:
        self.repository = "acme/tiny"
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.requests: list[Request] = []
        self.faults: dict[str, list[str]] = {}
        self.gated = False
        self.needs_token: str | None = None
        self.before_each: Callable[[Request], None] = lambda _unused: None
        self._servers = {name: _Server(self, name) for name in ("hub", "cdn")}

    def __enter__(self) -> Self:
        for server in self._servers.values():
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_unused: object) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers['hub'].server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://127.0.0.1:{self._servers['cdn'].server_port}"

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Put a state of the repository on a branch; its commit."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.refs[branch] = name
        return name

    def fetched(self) -> list[str]:
        """Paths whose content was asked for, in order."""
        return [
            request.path.split("/")[-1]
            for request in self.requests
            if request.method == "GET" and (request.server == "cdn" or "/resolve/" in request.path)
        ]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.name = hub, name


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_unused: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        request = Request(self.server.name, self.command, path, self.headers["Range"], self.headers["Authorization"])
        hub.before_each(request)
        hub.requests.append(request)
        key = f"{self.command} {self.server.name} {path.split('/')[-1]}"
        fault = hub.faults[key].pop(0) if hub.faults.get(key) else ""
        if fault.isdigit():
            self._send(int(fault), b"", {"Retry-After": "0"})
        elif self.server.name == "cdn":
            self._content(hub.commits[path.split("/")[1]][path.split("/", 2)[2]], {}, fault)
        elif hub.needs_token and request.token != f"Bearer {hub.needs_token}":
            self._refuse(401, "RepoNotFound", "Invalid username or password.")
        elif hub.gated:
            self._refuse(403, "GatedRepo", "Access to model is restricted.")
        elif path.startswith(f"/api/models/{hub.repository}/"):
            self._api(*path.removeprefix(f"/api/models/{hub.repository}/").split("/", 1))
        elif match := re.fullmatch(f"/{hub.repository}/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], fault)
        else:
            self._refuse(404, "RepoNotFound", "Repository not found")

    def _api(self, what: str, revision: str) -> None:
        hub = self.server.hub
        commit = hub.refs.get(revision, revision)
        if commit not in hub.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif what == "revision":
            self._send(200, json.dumps({"id": hub.repository, "sha": commit, "siblings": []}).encode(), {})
        elif what == "tree":
            entries = [_entry(path, content) for path, content in hub.commits[commit].items()]
            folders = {path.rpartition("/")[0] for path in hub.commits[commit] if "/" in path}
            entries += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
            start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
            headers = {}
            if start + PAGE < len(entries):
                following = f"{hub.url}{urlsplit(self.path).path}?recursive=True&cursor={start + PAGE}"
                headers["Link"] = f'<{following}>; rel="next"'
            self._send(200, json.dumps(entries[start : start + PAGE]).encode(), headers)

    def _resolve(self, revision: str, path: str, fault: str) -> None:
        hub = self.server.hub
        commit = hub.refs.get(revision, revision)
        content = hub.commits.get(commit, {}).get(path)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit}
        if path.endswith(LFS):
            headers |= {
                "X-Linked-Size": str(len(content)),
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "Location": f"{hub.cdn_url}/{commit}/{path}?Signature=secret-of-the-address",
            }
            self._send(302, b"", headers)
        else:
            self._content(content, headers | {"ETag": f'"{git_oid(content)}"'}, fault)

    def _content(self, content: bytes, headers: dict[str, str], fault: str) -> None:
        if fault == "flipped":
            content = content[:-1] + bytes([content[-1] ^ 1])
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            headers = headers | {"Content-Range": f"bytes {match[1]}-{len(content) - 1}/{len(content)}"}
            content, status = content[int(match[1]) :], 206
        self._send(status, content, headers, cut=fault == "cut")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


def _entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
    if path.endswith(LFS):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
