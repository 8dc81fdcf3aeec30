"""Downloads against a server that behaves badly on purpose."""

from __future__ import annotations

import hashlib
import http.server
import re
import ssl
import subprocess
import threading

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import download as dl

CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str | None] = []
        self.tokens: list[str | None] = []
        self.redirect_to = ""
        self.script: list[str] = []
        self.content = CONTENT

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/shard"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append(self.headers["Range"])
        server.tokens.append(self.headers["Authorization"])
        if server.redirect_to:
            self.send_response(302)
            self.send_header("Location", server.redirect_to)
            self.end_headers()
            return
        act = server.script.pop(0) if server.script else "whole"
        body, status = server.content, 200
        if self.headers["Range"] and act != "no ranges":
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            body, status = body[start:], 206
        if act.isdigit():
            self.send_response(int(act))
            self.send_header("Retry-After", "0")
            self.end_headers()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if act == "truncate" else body)

    def log_message(self, *_unused):
        pass


@pytest.fixture
def server():
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(dl.time, "sleep", lambda _unused: None)


def test_a_truncated_answer_is_continued_where_it_stopped(server, tmp_path):
    server.script = ["truncate"]
    arrived: list[int] = []
    dl.download(server.url, tmp_path / "shard", SHA256, len(CONTENT), progress=arrived.append)
    assert (tmp_path / "shard").read_bytes() == CONTENT
    assert server.requests == [None, f"bytes={len(CONTENT) // 2}-"]
    assert sum(arrived) == len(CONTENT), "no byte came twice"


def test_a_part_of_an_earlier_run_is_continued(server, tmp_path):
    (tmp_path / "shard.part").write_bytes(CONTENT[:1000])
    dl.download(server.url, tmp_path / "shard", SHA256, len(CONTENT))
    assert server.requests == ["bytes=1000-"]
    assert not (tmp_path / "shard.part").exists()


def test_a_wrong_part_of_an_earlier_run_costs_one_more_fetch_and_no_failure(server, tmp_path):
    (tmp_path / "shard.part").write_bytes(b"\0" * 1000)
    dl.download(server.url, tmp_path / "shard", SHA256, len(CONTENT), attempts=1)
    assert (tmp_path / "shard").read_bytes() == CONTENT
    assert server.requests == ["bytes=1000-", None]


def test_a_complete_part_is_not_asked_for_again(server, tmp_path):
    (tmp_path / "shard.part").write_bytes(CONTENT)
    dl.download(server.url, tmp_path / "shard", SHA256, len(CONTENT))
    assert server.requests == []


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.script = ["no ranges"]
    (tmp_path / "shard.part").write_bytes(CONTENT[:1000])
    dl.download(server.url, tmp_path / "shard", SHA256, len(CONTENT))
    assert (tmp_path / "shard").read_bytes() == CONTENT


def test_too_many_requests_is_waited_out(server, tmp_path, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(dl.time, "sleep", waits.append)
    server.script = ["429", "503"]
    dl.download(server.url, tmp_path / "shard", SHA256)
    assert waits == [0.0, 0.0], "the server's Retry-After counts, not our own pause"


def test_not_found_is_final_and_names_the_url(server, tmp_path):
    server.script = ["404"] * 3
    with pytest.raises(dl.DownloadError, match=f"{server.url}: HTTP 404"):
        dl.download(server.url, tmp_path / "shard", SHA256)
    assert len(server.requests) == 1


def test_one_flipped_byte_is_refused_and_leaves_nothing(server, tmp_path):
    server.content = CONTENT[:-1] + b"\x01"
    actual = hashlib.sha256(server.content).hexdigest()
    with pytest.raises(dl.DownloadError, match=f"sha256 is {actual}, expected {SHA256}"):
        dl.download(server.url, tmp_path / "shard", SHA256, attempts=2)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_names_the_url(tmp_path):
    with pytest.raises(dl.DownloadError, match=r"http://127\.0\.0\.1:9/x: .*refused"):
        dl.download("http://127.0.0.1:9/x", tmp_path / "x", SHA256, attempts=2)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Check that the mirror is up .* wheel_mirror_verify=full"),
        (OSError(28, "No space left on device"), "Look at the space and the permissions"),
    ],
)
def test_the_remedy_is_where_the_cause_is(server, tmp_path, monkeypatch, error, remedy):
    """A full disk of this host is no reason to look at the mirror."""

    def fail(*_unused):
        raise error

    monkeypatch.setattr(dl, "_append", fail)
    with pytest.raises(dl.DownloadError) as caught:
        dl.download(server.url, tmp_path / "shard", SHA256, attempts=1)
    assert re.match(remedy, caught.value.mirror_remedy)


def test_an_old_file_stays_until_the_new_one_is_whole(server, tmp_path):
    (tmp_path / "shard").write_bytes(b"old")
    server.script = ["500"] * 9
    with pytest.raises(dl.DownloadError, match="HTTP 500"):
        dl.download(server.url, tmp_path / "shard", SHA256)
    assert (tmp_path / "shard").read_bytes() == b"old"


def test_a_proxy_in_the_environment_is_not_asked_for_the_mirror(server, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    dl.download(server.url, tmp_path / "shard", SHA256)
    with pytest.raises(dl.DownloadError, match="refused"):
        dl.download(server.url, tmp_path / "other", SHA256, attempts=1, use_proxy=True)


def test_an_empty_file_is_fetched_like_any_other(server, tmp_path):
    server.content = b""
    dl.download(server.url, tmp_path / "empty", hashlib.sha256(b"").hexdigest(), 0)
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_token_does_not_follow_a_redirect_to_another_server(server, tmp_path):
    with Server() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        hub.redirect_to = server.url
        dl.download(hub.url, tmp_path / "shard", SHA256, headers={"Authorization": "Bearer hf_secret"})
        hub.shutdown()
    assert hub.tokens == ["Bearer hf_secret"]
    assert server.tokens == [None]


def test_tls_is_verified_and_a_site_s_own_authority_works(server, tmp_path, monkeypatch):
    certificate = tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(tmp_path / "key.pem"), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", "-days", "2", *key, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    dl._tls.cache_clear()
    with pytest.raises(dl.DownloadError, match="certificate verify failed"):
        dl.download(url, tmp_path / "shard", SHA256, attempts=1)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    dl._tls.cache_clear()
    dl.download(url, tmp_path / "shard", SHA256)
    dl._tls.cache_clear()
    assert (tmp_path / "shard").read_bytes() == CONTENT
