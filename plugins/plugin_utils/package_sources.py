# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ask indexes and directories for wheels (PEP 691 and 503, as pip is configured), and no source but the named ones."""

from __future__ import annotations

import base64
import gzip
import html.parser
import http.client
import importlib.util
import json
import netrc
import os
import re
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..module_utils.atomic import sha256_file
from .http_pool import HttpPool, origin_of
from .release_definition import DEFAULT_SOURCE, Release
from .wheels import canonical_version, split_wheel_name

try:
    from packaging.utils import canonicalize_name
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PAGE_LIMIT_BYTES = 256 << 20

# Run by an interpreter that has pip: what pip would use there, its built-in default index included.
_ASK_PIP = """
import json, sys
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
c = Configuration(isolated=False)
c.load()
d = {}
for key, value in c.items():
    if isinstance(value, dict):  # pip 25 and later nest by file
        d.update(value)
    else:
        d[key] = value
o = {}
for scope in ("global", "download", "install", ":env:"):
    for key, value in d.items():
        if key.startswith(scope + "."):
            o[key[len(scope) + 1:].replace("_", "-")] = value
print(json.dumps({"default": PyPI.simple_url, "options": o}))
"""


class SourceError(RuntimeError):
    """A source that cannot be asked, or answers what no index answers."""


@dataclass(frozen=True)
class PipConfiguration:
    """Where pip looks on this machine; together this is the source ``default``."""

    index_url: str | None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    proxy: str | None = None


@dataclass(frozen=True)
class IndexFile:
    """One wheel that a source offers.

    Attributes:
        url: ``http(s)://`` or ``file://``, without credentials.
        sha256: None where the source does not say.
        yanked: the reason (may be empty), None where it is not yanked.
    """

    filename: str
    url: str
    source: str
    sha256: str | None = None
    size: int | None = None
    requires_python: str | None = None
    yanked: str | None = None
    core_metadata: bool = False


@dataclass(frozen=True)
class _Wanted:
    """What is picked from a page before anything costly is done with it: pages list thousands of files."""

    name: str
    version: str | None

    def fits(self, filename: str) -> bool:
        own = split_wheel_name(filename)
        return own is not None and own[0] == self.name and self.version in {None, own[1]}


@dataclass
class Answer:
    """What the allowed sources say about a package: files in the order of the sources, and what could not be asked."""

    files: list[IndexFile] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def pip_configuration() -> PipConfiguration:
    """Ask pip how it is configured (files and ``PIP_*``), so that its rules need not be written again.

    Raises:
        SourceError: no interpreter on this machine has pip.
    """
    script = ["-c", _ASK_PIP]
    tried: list[str] = []
    candidates: list[tuple[str, dict[str, str]]] = [
        (python, {}) for python in dict.fromkeys([sys.executable, getattr(sys, "_base_executable", sys.executable)])
    ]
    candidates += [
        (python, {})
        for folder in os.environ.get("PATH", "").split(os.pathsep)
        if os.access(python := os.path.join(folder, "python3"), os.X_OK)
    ]
    bundled = importlib.util.find_spec("ensurepip")
    if bundled is not None and bundled.origin is not None:
        wheels = sorted((Path(bundled.origin).parent / "_bundled").glob("pip-*.whl"))
        candidates += [(sys.executable, {"PYTHONPATH": str(wheel)}) for wheel in wheels]
    for python, extra in candidates:
        answer = subprocess.run(
            [python, *script], env={**os.environ, **extra}, capture_output=True, text=True, check=False
        )
        if answer.returncode == 0:
            return _from_pip(json.loads(answer.stdout))
        tried.append(python)
    raise SourceError(
        f"No pip was found to say which index this machine uses (asked {', '.join(tried)}). Install pip for one of them"
    )


def _from_pip(answer: Mapping[str, Any]) -> PipConfiguration:
    options = answer["options"]

    def words(key: str) -> tuple[str, ...]:
        return tuple(str(options.get(key, "")).split())

    no_index = str(options.get("no-index", "")).lower() in {"1", "true", "yes", "on"}
    return PipConfiguration(
        index_url=None if no_index else options.get("index-url") or answer["default"],
        extra_index_urls=() if no_index else words("extra-index-url"),
        find_links=words("find-links"),
        cert=options.get("cert"),
        trusted_hosts=words("trusted-host"),
        proxy=options.get("proxy"),
    )


def as_url(location: str) -> str:
    """A directory's path as ``file://``, an address unchanged."""
    return location if "://" in location else Path(location).resolve().as_uri()


def redacted(url: str) -> str:
    """The address without user and password, for messages."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class PackageSources:
    """All sources of one release; safe to use from several threads.

    Attributes:
        default: what the source ``default`` stands for.
    """

    def __init__(
        self,
        indexes: Mapping[str, str],
        sources: Mapping[str, Sequence[str]],
        default: PipConfiguration,
        timeout_s: float = 20.0,
    ) -> None:
        self.default = default
        self._indexes = dict(indexes)
        self._sources = {canonicalize_name(name): tuple(value) for name, value in sources.items()}
        self._timeout_s = timeout_s
        self._dead: dict[str, str] = {}
        self._listed: dict[str, list[Path]] = {}
        self._credentials: dict[str, str] = {}
        self._mutex = threading.Lock()
        context = ssl.create_default_context(cafile=default.cert or os.environ.get("SSL_CERT_FILE"))
        self.pool = HttpPool(context, default.proxy)

    @classmethod
    def of(cls, release: Release, default: PipConfiguration) -> PackageSources:
        """The sources as a release names them."""
        return cls(release.indexes, release.sources, default)

    def allowed(self, package: str) -> tuple[str, ...]:
        """Names of the only sources a package may come from."""
        return self._sources.get(canonicalize_name(package), (DEFAULT_SOURCE,))

    def ask(self, package: str, version: str | None = None) -> Answer:
        """Every wheel of ``package`` that its allowed sources offer, and no other source's.

        Args:
            version: where given, only this version's files (a directory's files are hashed then, and only then).
        """
        answer = Answer()
        wanted = canonical_version(version) if version is not None else None
        seen: set[tuple[str, str | None]] = set()
        for source in self.allowed(package):
            for location, is_index in self._locations(source):
                label = source if source != DEFAULT_SOURCE else f"{source} ({redacted(location)})"
                try:
                    files = self._list(location, is_index, _Wanted(canonicalize_name(package), wanted), label)
                except SourceError as error:
                    answer.failures.append(f"{label}: {error}")
                    continue
                for found in files:
                    if (key := (found.filename, found.sha256)) not in seen:
                        seen.add(key)
                        answer.files.append(found)
        return answer

    def metadata(self, file: IndexFile) -> bytes | None:
        """METADATA of a wheel whose index serves it beside the file (PEP 658); None where it does not after all.

        Raises:
            SourceError: the index cannot be asked.
        """
        found = self._fetch(f"{file.url}.metadata")
        return None if found is None else found[0]

    def authorization(self, url: str) -> dict[str, str]:
        """Headers with the credentials that belong to this address's host; empty where there are none."""
        origin = origin_of(url)
        if origin in self._credentials:
            return {"Authorization": self._credentials[origin]}
        try:
            entry = netrc.netrc().authenticators(urllib.parse.urlsplit(url).hostname or "")
        except (OSError, netrc.NetrcParseError):
            entry = None
        return {"Authorization": _basic(entry[0], entry[2] or "")} if entry else {}

    def with_credentials(self, url: str) -> str:
        """The address with the user and password of its host in it, for a program that asks there itself."""
        header = self.authorization(url).get("Authorization")
        if header is None or "://" not in url:
            return url
        user, _unused, password = base64.b64decode(header.removeprefix("Basic ")).decode().partition(":")
        parts = urllib.parse.urlsplit(url)
        quoted = f"{urllib.parse.quote(user, safe='')}:{urllib.parse.quote(password, safe='')}@{parts.netloc}"
        return urllib.parse.urlunsplit(parts._replace(netloc=quoted))

    def _locations(self, source: str) -> list[tuple[str, bool]]:
        if source != DEFAULT_SOURCE:
            location = self._indexes[source]
            return [(location, not _is_flat_directory(location))]
        found = [(location, False) for location in self.default.find_links]
        if self.default.index_url:
            found.append((self.default.index_url, True))
        return found + [(location, True) for location in self.default.extra_index_urls]

    def _list(self, location: str, is_index: bool, wanted: _Wanted, label: str) -> list[IndexFile]:
        url = as_url(location)
        if url.startswith("file://"):
            folder = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
            return self._list_directory(folder, is_index, wanted, label)
        page = f"{url.rstrip('/')}/{wanted.name}/" if is_index else url
        fetched = self._fetch(page)
        if fetched is None:
            return []
        content, kind, final = fetched
        return _parse_page(content, kind, final, wanted, label)

    def _list_directory(self, folder: Path, is_index: bool, wanted: _Wanted, label: str) -> list[IndexFile]:
        if is_index:
            page = folder / wanted.name / "index.html"
            if page.is_file():
                return _parse_page(page.read_bytes(), "text/html", page.parent.as_uri() + "/", wanted, label)
            if not folder.is_dir():
                raise SourceError("the directory does not exist")
            return []
        with self._mutex:
            if str(folder) not in self._listed:
                if not folder.is_dir():
                    raise SourceError("the directory does not exist")
                self._listed[str(folder)] = sorted(folder.glob("*.whl"))
            files = self._listed[str(folder)]
        return [
            IndexFile(path.name, path.as_uri(), label, sha256=_digest(str(path)), size=path.stat().st_size)
            for path in files
            if wanted.fits(path.name)
        ]

    def _fetch(self, page: str) -> tuple[bytes, str, str] | None:
        """Content, media type and final address of a page; None where the server says that there is none."""
        page, credentials = _without_credentials(page)
        origin = origin_of(page)
        if credentials:
            self._credentials[origin] = credentials
        if origin in self._dead:
            raise SourceError(self._dead[origin])
        request = urllib.request.Request(
            page, headers={"Accept": _ACCEPT, "Accept-Encoding": "gzip", "User-Agent": "onprem.vllm"}
        )
        for key, value in self.authorization(page).items():
            request.add_unredirected_header(key, value)
        failure = ""
        for _unused in range(3):
            try:
                with self.pool.open(request, timeout=self._timeout_s) as answer:
                    content = answer.read(_PAGE_LIMIT_BYTES)
                    if answer.headers.get("Content-Encoding") == "gzip":
                        content = gzip.decompress(content)
                    return content, answer.headers.get_content_type(), answer.url
            except urllib.error.HTTPError as error:
                if error.code in {404, 410}:
                    return None
                failure = f"HTTP {error.code} {error.reason}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, EOFError, http.client.HTTPException) as error:
                failure = str(getattr(error, "reason", error)) or type(error).__name__
                if not isinstance(error, (ConnectionResetError, EOFError, http.client.HTTPException)):
                    # Nobody there: every further package would wait for the same timeout.
                    self._dead[origin] = f"{origin} cannot be reached: {failure}"
                    raise SourceError(self._dead[origin]) from None
        raise SourceError(f"{redacted(page)}: {failure}")


@lru_cache(maxsize=1024)
def _digest(path: str) -> str:
    return sha256_file(path)


def _is_flat_directory(location: str) -> bool:
    """Whether an index is a plain directory of wheels (no ``index.html`` of its own, wheels in it)."""
    url = as_url(location)
    if not url.startswith("file://"):
        return False
    folder = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
    return any(folder.glob("*.whl"))


def _without_credentials(url: str) -> tuple[str, str | None]:
    parts = urllib.parse.urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _unused, password = userinfo.partition(":")
    bare = urllib.parse.urlunsplit(parts._replace(netloc=host))
    return bare, _basic(urllib.parse.unquote(user), urllib.parse.unquote(password))


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _parse_page(content: bytes, kind: str, base: str, wanted: _Wanted, source: str) -> list[IndexFile]:
    if kind.endswith("+json"):
        return _parse_json(content, base, wanted, source)
    if kind in {"text/html", "application/vnd.pypi.simple.v1+html", "application/xhtml+xml"}:
        return _parse_html(content, base, wanted, source)
    raise SourceError(f"{redacted(base)}: answered {kind}, which is no index page")


def _parse_json(content: bytes, base: str, wanted: _Wanted, source: str) -> list[IndexFile]:
    try:
        page = json.loads(content)
        if not str(page["meta"]["api-version"]).startswith("1."):
            raise SourceError(f"{redacted(base)}: index API {page['meta']['api-version']} is not understood, only 1.x")
        return [
            IndexFile(
                filename=entry["filename"],
                url=urllib.parse.urljoin(base, entry["url"]),
                source=source,
                sha256=entry.get("hashes", {}).get("sha256"),
                size=entry.get("size"),
                requires_python=entry.get("requires-python"),
                yanked=(str(entry["yanked"]) if entry["yanked"] is not True else "") if entry.get("yanked") else None,
                core_metadata=bool(entry.get("core-metadata") or entry.get("dist-info-metadata")),
            )
            for entry in page["files"]
            if wanted.fits(entry["filename"])
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{redacted(base)}: not an index page: {error}") from None


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: list[dict[str, str | None]] = []
        self.base: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.anchors.append(dict(attrs))
        elif tag == "base":
            self.base = dict(attrs).get("href")


def _parse_html(content: bytes, base: str, wanted: _Wanted, source: str) -> list[IndexFile]:
    parser = _Anchors()
    parser.feed(content.decode("utf-8", errors="replace"))
    base = urllib.parse.urljoin(base, parser.base) if parser.base else base
    found = []
    for anchor in parser.anchors:
        href = anchor.get("href") or ""
        filename = urllib.parse.unquote(href.partition("#")[0].partition("?")[0].rpartition("/")[2])
        if not wanted.fits(filename):
            continue
        url, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(base, href))
        digest = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        found.append(
            IndexFile(
                filename=filename,
                url=url,
                source=source,
                sha256=digest.group(1) if digest else None,
                requires_python=anchor.get("data-requires-python"),
                yanked=(anchor["data-yanked"] or "") if "data-yanked" in anchor else None,
                core_metadata="data-core-metadata" in anchor or "data-dist-info-metadata" in anchor,
            )
        )
    return found
