# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Fetch one file over HTTP: resumed where it stopped, checked by sha256, whole or absent at its place."""

from __future__ import annotations

import functools
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from .atomic import CHUNK_BYTES, sha256_file, sync_directory

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class Opener(Protocol):
    """What opens a request: ``urllib.request.OpenerDirector`` or one that keeps connections."""

    def open(self, request: urllib.request.Request, *, timeout: float) -> Any:
        """The answer, usable in ``with``: ``status``, ``headers``, ``read``."""


MENDED_BY_PUBLISHING = (
    "Publish the bundle again with wheel_mirror_verify=full, "
    "which reads every file on the mirror and mends what is damaged."
)


class DownloadError(RuntimeError):
    """The file could not be had, or is not the file that was promised; the message names url and reason.

    Attributes:
        local: the reason lies on this host: its disk, or a permission.
    """

    def __init__(self, message: str, *, local: bool = False) -> None:
        super().__init__(message)
        self.local = local

    @property
    def mirror_remedy(self) -> str:
        """What to do where the file was to come from the mirror."""
        if self.local:
            return "Look at the space and the permissions of its place on this host, and run again."
        return f"Check that the mirror is up and has this bundle. {MENDED_BY_PUBLISHING}"


def download(
    url: str,
    destination: str | os.PathLike[str],
    sha256: str | None,
    size: int | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    attempts: int = 4,
    timeout_s: float = 60.0,
    progress: Callable[[int], None] | None = None,
    mode: int = 0o644,
    use_proxy: bool = False,
    opener: Opener | None = None,
) -> None:
    """Put the file behind ``url`` at ``destination``; a part from an earlier try is continued by a range request.

    Args:
        sha256: hex digest the whole file must have; None only where nobody knows it yet (metadata).
        size: bytes the whole file must have, where known.
        headers: sent with every request (never logged).
        attempts: tries in all; a try that brought new bytes does not count.
        timeout_s: seconds without a byte after which a try ends.
        progress: called with the number of bytes each time some arrive.
        use_proxy: go through the proxies of the environment: right on the connected side, wrong towards the mirror.
        opener: opens requests instead of urllib, such as a pool of kept connections; proxies are its business then.

    Raises:
        DownloadError: refused, truncated or different content after the last try. A wrong part is removed.
    """
    # A proxy left in a host's environment would be asked for the mirror, and cannot know it.
    handlers = [] if use_proxy else [urllib.request.ProxyHandler({})]
    opener = opener or urllib.request.build_opener(_KeepsSecrets, *handlers)
    target = Path(destination)
    part = target.with_name(f"{target.name}.part")
    failure = "no attempt was made"
    left = attempts
    restarted = local = False
    while left > 0:
        before = part.stat().st_size if part.exists() else 0
        if size is not None and before > size:
            part.unlink()
            before = 0
        try:
            if size is None or before < size or not part.exists():
                _append(opener, url, part, before, headers or {}, timeout_s, progress)
            got = part.stat().st_size
            if size is not None and got < size:
                raise DownloadError(f"the answer ended after {got} of {size} bytes")
            if sha256 is not None and (actual := sha256_file(part)) != sha256:
                part.unlink()
                if before and not restarted:
                    # What an earlier run left may have been the wrong part: once more from the start, at no charge.
                    restarted = True
                    continue
                raise DownloadError(f"sha256 is {actual}, expected {sha256}")
            os.chmod(part, mode)
            with open(part, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(part, target)
            sync_directory(target.parent)
            return
        except urllib.error.HTTPError as error:
            failure = f"HTTP {error.code} {error.reason}"
            if error.code == 416:
                part.unlink(missing_ok=True)
            elif error.code not in RETRIED_STATUS:
                break
            pause = pause_s(error.headers.get("Retry-After"), attempts - left)
        except (OSError, http.client.HTTPException, DownloadError) as error:
            failure = str(error) or type(error).__name__
            local = isinstance(error, OSError) and error.errno in _LOCAL_ERRNO
            if local:
                break
            pause = pause_s(None, attempts - left)
        after = part.stat().st_size if part.exists() else 0
        if after <= before:
            left -= 1
        if left > 0:
            time.sleep(pause)
    raise DownloadError(f"{url}: {failure}", local=local)


_LOCAL_ERRNO = frozenset({13, 28, 30, 122})  # EACCES, ENOSPC, EROFS, EDQUOT: trying again changes nothing


class _KeepsSecrets(urllib.request.HTTPRedirectHandler):
    """urllib hands every header to whatever host a redirect names; a token is for the host that was asked alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            for name in [name for name in following.headers if name.lower() in _SECRET_HEADERS]:
                del following.headers[name]
        return following


class _LazyTls(urllib.request.HTTPSHandler):
    """One TLS context per process, made when needed: from Python 3.12 urllib makes one per opener, 65 ms each."""

    def __init__(self) -> None:
        # Not the parent's, which makes the context.
        urllib.request.AbstractHTTPHandler.__init__(self)  # pylint: disable=non-parent-init-called

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(http.client.HTTPSConnection, req, context=_tls())


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})


def _append(
    opener: Opener,
    url: str,
    part: Path,
    offset: int,
    headers: Mapping[str, str],
    timeout_s: float,
    progress: Callable[[int], None] | None,
) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "onprem.vllm", **headers})
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    with opener.open(request, timeout=timeout_s) as answer:
        resumed = offset > 0 and answer.status == 206
        with open(part, "ab" if resumed else "wb") as stream:
            while piece := answer.read(CHUNK_BYTES):
                stream.write(piece)
                if progress is not None:
                    progress(len(piece))


def pause_s(header: str | None, attempt: int) -> float:
    """Seconds to wait: what the server asks for (at most 60), else 0.5 s doubled with each failed try."""
    if header is not None and header.strip().isdigit():
        return min(float(header), 60.0)
    return min(0.5 * 2**attempt, 10.0)
