# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""HTTP connections that are used again, and names that are resolved once.

Measured with 149 index pages: a connection each and 16 threads took 11 s, because a name server dropped simultaneous
queries and the resolver waits 5 s before it asks again; kept connections took 0.6 s.
"""

from __future__ import annotations

import email.message
import http.client
import io
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SECRET_HEADERS = frozenset({"authorization", "cookie"})


def origin_of(url: str) -> str:
    """Scheme, host and port of an address, without credentials."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class PooledResponse(io.RawIOBase):
    """An answer; its connection goes back to the pool when it was read to the end."""

    def __init__(
        self, pool: HttpPool, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, url: str
    ) -> None:
        super().__init__()
        self._pool, self._connection, self._response = pool, connection, response
        self.url = url
        self.status: int = response.status
        self.headers: email.message.Message = response.headers

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes, all where negative.

        Raises:
            http.client.IncompleteRead: the answer ended early.
        """
        return self._response.read(None if size < 0 else size)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._response.isclosed() and not self._response.will_close:
                self._pool.give_back(origin_of(self.url), self._connection)
            else:
                self._connection.close()


class HttpPool:
    """Opens addresses over kept connections; safe to use from several threads.

    Redirects are followed; credentials do not follow to another host. Where a proxy is set, urllib does the work.
    """

    def __init__(self, context: ssl.SSLContext, proxy: str | None = None) -> None:
        self._context = context
        self._proxies = {"http": proxy, "https": proxy} if proxy else urllib.request.getproxies()
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({k: v for k, v in self._proxies.items() if v}),
            urllib.request.HTTPSHandler(context=context),
        )
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._addresses: dict[tuple[str, int], list[Any]] = {}
        self._mutex = threading.Lock()
        self._resolving = threading.Lock()

    def open(self, request: urllib.request.Request, timeout: float = 60.0) -> Any:
        """The answer to a GET: ``status``, ``headers``, ``url``, ``read``, usable in ``with``.

        Raises:
            urllib.error.HTTPError: status 400 or more.
            OSError: nobody there, or the connection broke.
            http.client.HTTPException: the answer is not HTTP.
        """
        url = request.full_url
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in self._proxies and not urllib.request.proxy_bypass(parts.hostname or ""):
            return self._opener.open(request, timeout=timeout)
        headers = {**request.headers, **request.unredirected_hdrs}
        for _unused in range(8):
            connection, response = self._send(url, headers, timeout)
            answer = PooledResponse(self, connection, response, url)
            if response.status in _REDIRECTS and (location := response.headers.get("Location")):
                answer.read()
                answer.close()
                target = urllib.parse.urljoin(url, location)
                if origin_of(target) != origin_of(url):
                    headers = {k: v for k, v in headers.items() if k.lower() not in _SECRET_HEADERS}
                url = target
                continue
            if response.status >= 400:
                answer.read()
                answer.close()
                raise urllib.error.HTTPError(url, response.status, response.reason, response.headers, None)
            return answer
        raise urllib.error.HTTPError(url, 310, "more than 8 redirects", http.client.HTTPMessage(), None)

    def close(self) -> None:
        """Close what is kept."""
        with self._mutex:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _send(
        self, url: str, headers: dict[str, str], timeout: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        origin = origin_of(url)
        parts = urllib.parse.urlsplit(url)
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        while True:
            with self._mutex:
                idle = self._idle.get(origin)
                kept = idle.pop() if idle else None
            connection = kept or self._connect(parts, timeout)
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(timeout)
                connection.request("GET", path, headers=headers)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException):
                connection.close()
                if kept is None:
                    raise
                # The server had closed a kept connection meanwhile: not a failure, take the next.

    def _connect(self, parts: urllib.parse.SplitResult, timeout: float) -> http.client.HTTPConnection:
        secure = parts.scheme == "https"
        host = parts.hostname or ""
        port = parts.port or (443 if secure else 80)
        with self._resolving:
            if (host, port) not in self._addresses:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._addresses[host, port] = [entry[4] for entry in found]
        failure: OSError | None = None
        for address in self._addresses[host, port]:
            try:
                plain = socket.create_connection(address[:2], timeout=timeout)
                break
            except OSError as error:
                failure = error
        else:
            raise failure or OSError(f"{host} has no address")
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not secure:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
            connection.sock = plain
            return connection
        try:
            tls = self._context.wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._context)
        connection.sock = tls
        return connection

    def give_back(self, origin: str, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose answer was read to the end."""
        with self._mutex:
            self._idle.setdefault(origin, []).append(connection)
