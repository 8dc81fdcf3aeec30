# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Make a release's lock: uv resolves, and sees of the world only what the release's sources offer for its target.

uv has no setting that ties every package, transitive ones too, to its source: an extra index that offers any name
would be asked first for all of them. So uv gets one index on the loopback address, and that index asks the sources.

Called by ``make lock RELEASE=<name>``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..module_utils.atomic import sha256_bytes, write_file
from .flashinfer_set import known_pins, pins_of_metadata, set_problems
from .lock import Pin, parse_lock
from .package_sources import IndexFile, PackageSources, PipConfiguration, SourceError, pip_configuration
from .refused_versions import refusals
from .release_definition import Release, ReleaseError, load_release
from .wheels import (
    build_metadata_wheel,
    canonical_version,
    read_metadata,
    split_wheel_name,
    target_tags,
    wheel_rank,
)

try:
    from packaging.utils import canonicalize_name
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

_JSON = "application/vnd.pypi.simple.v1+json"


class LockBuildError(RuntimeError):
    """No lock could be made; the message says what uv or a source said."""


def offered(release: Release, sources: PackageSources, package: str) -> tuple[list[IndexFile], list[str]]:
    """The wheels of ``package`` that the release may use: of each version the one that fits its target best.

    One wheel per version means one hash per line of the lock: what is installed is decided here and nowhere later.

    Returns:
        The files, and what could not be asked.
    """
    tags = target_tags(release.python, release.machine, release.glibc)
    best: dict[str, tuple[int, IndexFile]] = {}
    answer = sources.ask(package)
    for found in answer.files:
        rank = wheel_rank(found.filename, tags)
        parts = split_wheel_name(found.filename)
        if rank is None or parts is None:
            continue
        version = canonical_version(parts[1])
        if refusals({package: version}):
            continue
        if version not in best or rank < best[version][0]:
            best[version] = (rank, found)
    return [found for _unused, found in best.values()], answer.failures


class _Index(BaseHTTPRequestHandler):
    """The index that uv sees: what the sources offer, the wheels built here, and local files."""

    protocol_version = "HTTP/1.1"
    release: Release
    sources: PackageSources
    built: Mapping[str, Mapping[str, bytes]]  # package -> file name -> content
    local: dict[str, Path]
    failures: dict[str, list[str]]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Say nothing: uv says what it misses."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, _unused, name = urllib.parse.unquote(self.path).strip("/").partition("/")
        if kind == "simple" and name:
            self._answer(self._page(canonicalize_name(name)), _JSON)
        elif kind == "built" and (content := self._built(name)) is not None:
            self._answer(content, "application/octet-stream")
        elif kind == "local" and name in self.local:
            self._send_file(self.local[name])
        else:
            self.send_error(404)

    def _page(self, package: str) -> bytes:
        if package in self.built:
            files = [
                {"filename": name, "url": f"/built/{name}", "hashes": {"sha256": sha256_bytes(content)}}
                for name, content in self.built[package].items()
            ]
        else:
            found, failures = offered(self.release, self.sources, package)
            if failures:
                self.failures[package] = failures
            files = [self._entry(file) for file in found]
        return json.dumps({"meta": {"api-version": "1.0"}, "name": package, "files": files}).encode()

    def _entry(self, file: IndexFile) -> dict[str, Any]:
        url = file.url
        if url.startswith("file://"):
            path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
            self.local[path.name] = path
            url = f"/local/{urllib.parse.quote(path.name)}"
        entry: dict[str, Any] = {"filename": file.filename, "url": self.sources.with_credentials(url)}
        entry["hashes"] = {"sha256": file.sha256} if file.sha256 else {}
        if file.requires_python:
            entry["requires-python"] = file.requires_python
        if file.yanked is not None:
            entry["yanked"] = file.yanked or True
        if file.core_metadata:
            entry["core-metadata"] = True
        return entry

    def _built(self, name: str) -> bytes | None:
        return next((files[name] for files in self.built.values() if name in files), None)

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_file(self, path: Path) -> None:
        """A local wheel; ranges too, so that uv reads the metadata of 190 MB and not all of it."""
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes=") and "," not in asked:
            begin, _unused, end = asked.removeprefix("bytes=").partition("-")
            first = int(begin) if begin else max(size - int(end), 0)
            last = min(int(end), size - 1) if begin and end else size - 1
            status = 206
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        with path.open("rb") as stream:
            stream.seek(first)
            left = last - first + 1
            while left > 0 and (piece := stream.read(min(left, 1 << 20))):
                self.wfile.write(piece)
                left -= len(piece)


@contextmanager
def _served(release: Release, sources: PackageSources) -> Iterator[tuple[str, dict[str, list[str]]]]:
    built: dict[str, dict[str, bytes]] = {}
    for wheel in release.metadata_wheels:
        filename, content = build_metadata_wheel(wheel.name, wheel.version, wheel.requires)
        built.setdefault(canonicalize_name(wheel.name), {})[filename] = content
    failures: dict[str, list[str]] = {}
    handler = type(
        "_ReleaseIndex",
        (_Index,),
        {"release": release, "sources": sources, "built": built, "local": {}, "failures": failures},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/", failures
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def build_lock(release: Release, default: PipConfiguration, uv: str = "uv") -> tuple[str, list[str]]:
    """Resolve a release's requirements into a lock.

    Returns:
        The lock's text, and warnings about sources that could not be asked though others answered.

    Raises:
        LockBuildError: uv is missing or found no solution (what the sources said is part of the message), or what it
            found mixes FlashInfer's packages without saying so.
    """
    sources = PackageSources.of(release, default)
    with _served(release, sources) as (index, failures), tempfile.TemporaryDirectory() as scratch:
        overrides = Path(scratch, "overrides.txt")
        overrides.write_text("".join(f"{line}\n" for line in release.overrides), encoding="utf-8")
        command = [
            *(uv, "pip", "compile", "-", "--no-config", "--no-cache", "--quiet"),
            *("--default-index", index, "--only-binary", ":all:", "--override", str(overrides)),
            *("--python-version", release.python, "--python-platform", release.platform, "--no-python-downloads"),
            *("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
        ]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
        environment["NO_PROXY"] = ",".join(filter(None, ["127.0.0.1", os.environ.get("NO_PROXY", "")]))
        if default.cert:
            environment["SSL_CERT_FILE"] = default.cert
        try:
            answer = subprocess.run(
                command,
                input="".join(f"{line}\n" for line in release.requirements),
                cwd=scratch,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise LockBuildError(f"{uv} was not found; install uv on this machine, it makes the locks") from None
    said = sorted({line for lines in failures.values() for line in lines})
    if answer.returncode != 0:
        asked = "".join(f"\n  {line}" for line in said)
        raise LockBuildError(
            f"Release {release.name} was not locked: {answer.stderr.strip()}"
            + (f"\nSources that could not be asked:{asked}" if said else "")
        )
    head = (
        f"# {release.name}: CPython {release.python}, {release.platform}. Made by: make lock RELEASE={release.name}\n"
    )
    text = head + answer.stdout
    pins = {pin.name: pin for pin in parse_lock(text, f"what uv made of {release.name}")}
    for wheel in release.metadata_wheels:
        filename, content = build_metadata_wheel(wheel.name, wheel.version, wheel.requires)
        pin = pins.get(canonicalize_name(wheel.name))
        if pin is None or sha256_bytes(content) not in pin.hashes:
            raise LockBuildError(
                f"Release {release.name}: {filename} is built here, but nothing in the closure asks for it"
            )
    if not release.vllm:
        return text, said
    vllm_pins = _vllm_pins(release, sources, pins.get("vllm"))
    if vllm_pins is None:
        said.append(f"what vLLM {release.vllm} itself pins of FlashInfer, so the lock was not compared with that")
    versions = {name: pin.version for name, pin in pins.items()}
    where = f"release {release.name}"
    problems = set_problems(versions, release.vllm, vllm_pins, release.flashinfer, release.variant, where)
    if problems:
        raise LockBuildError("\n".join(f"{one['where']}: {one['what']}. {one['remedy']}" for one in problems))
    return text, said


def _vllm_pins(release: Release, sources: PackageSources, pin: Pin | None) -> dict[str, str] | None:
    """What vLLM pins of FlashInfer: by the locked wheel's own METADATA, else by the catalogue; None where neither can.

    The catalogue comes second: a wheel from another index may ask for something else under the same version.
    """
    if release.accelerator != "cuda" or pin is None:
        return {}
    for found in sources.ask("vllm", pin.version).files:
        if found.sha256 not in pin.hashes:
            continue
        if found.url.startswith("file://"):
            return pins_of_metadata(read_metadata(urllib.request.url2pathname(urllib.parse.urlsplit(found.url).path)))
        if found.core_metadata and (content := sources.metadata(found)) is not None:
            return pins_of_metadata(content)
    return known_pins(release.vllm)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the lock of each named release beside its definition."""
    parser = argparse.ArgumentParser(prog="make lock", description=main.__doc__)
    parser.add_argument("release", nargs="+")
    parser.add_argument("--uv", default="uv")
    options = parser.parse_args(arguments)
    try:
        default = pip_configuration()
        for name in options.release:
            release = load_release(name)
            if release.lock_of != name:
                raise LockBuildError(
                    f"Release {name} takes the lock of {release.lock_of}. Make that one: make lock "
                    f"RELEASE={release.lock_of}"
                )
            text, warnings = build_lock(release, default, options.uv)
            for warning in warnings:
                print(f"{name}: not asked: {warning}", file=sys.stderr)
            old = release.lock_path.read_text(encoding="utf-8") if release.lock_path.exists() else ""
            write_file(release.lock_path, text.encode())
            locked = load_release(name)
            change = "unchanged" if text == old else "written"
            print(f"{release.lock_path.name}: {change}, {len(parse_lock(text, name))} packages, id {locked.id}")
    except (ReleaseError, SourceError, LockBuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
