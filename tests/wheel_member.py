# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Single members of real wheels, read by HTTP range requests: 2 MB of a wheel of 300 MB instead of all of it.

As a program it prints one: ``python tests/wheel_member.py vllm 0.28.0 vllm/version.py``; a member with ``*`` in it
prints the hash and name of each that fits.
"""

from __future__ import annotations

import fnmatch
import http.client
import io
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ansible_collections.onprem.vllm.plugins.module_utils.atomic import sha256_bytes, write_file
from ansible_collections.onprem.vllm.plugins.plugin_utils.package_sources import (
    IndexFile,
    PackageSources,
    SourceError,
    pip_configuration,
    redacted,
)

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "wheel-members"
BLOCK_BYTES = 1 << 18
# The directory of a wheel stands at its end: 0.7 MB in vLLM's, fetched at once instead of in blocks.
TAIL_BYTES = 1 << 20


class WheelMemberError(RuntimeError):
    """A member cannot be had; the message says which wheel, from where, and what to look at."""


def wheel_member(package: str, version: str, member: str) -> bytes:
    """The content of one file in the x86-64 wheel of a release of a package, kept under .cache for the next time.

    ``METADATA`` and ``RECORD`` stand for those in the wheel's dist-info directory.

    Raises:
        WheelMemberError: the index cannot be reached, or has no such wheel or member.
    """
    kept = CACHE / f"{package}-{version}" / member
    if kept.is_file():
        return kept.read_bytes()
    with _opened(package, version) as wheel:
        name = f"{package.replace('-', '_')}-{version}.dist-info/{member}" if "/" not in member else member
        try:
            content = wheel.read(name)  # checked against the CRC in the wheel's directory
        except KeyError:
            raise WheelMemberError(f"{package} {version} has no file {name}") from None
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_file(kept, content)
    return content


def wheel_members(package: str, version: str) -> list[str]:
    """The names of all files in that wheel.

    Raises:
        WheelMemberError: the index cannot be reached, or has no such wheel.
    """
    with _opened(package, version) as wheel:
        return wheel.namelist()


@contextmanager
def _opened(package: str, version: str) -> Iterator[zipfile.ZipFile]:
    wheel = _find(package, version)
    where = redacted(wheel.url)
    local = urllib.parse.urlsplit(wheel.url)
    try:
        with (
            (
                open(urllib.request.url2pathname(local.path), "rb")
                if local.scheme == "file"
                else io.BufferedReader(_RemoteFile(_sources(), wheel.url), BLOCK_BYTES)
            ) as stream,
            zipfile.ZipFile(stream) as opened,
        ):
            yield opened
    except urllib.error.HTTPError as error:
        raise WheelMemberError(f"{where}: HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise WheelMemberError(
            f"{where} cannot be read ({error}). These tests compare with real wheels and need the index that pip uses"
        ) from error
    except zipfile.BadZipFile as error:
        raise WheelMemberError(f"{where} is no wheel: {error}") from error


@cache
def _sources() -> PackageSources:
    return PackageSources({}, {}, pip_configuration(), timeout_s=60)


@cache
def _find(package: str, version: str) -> IndexFile:
    try:
        answer = _sources().ask(package, version)
    except SourceError as error:
        raise WheelMemberError(f"The index cannot be asked for {package} {version}: {error}") from error
    fitting = [file for file in answer.files if file.filename.endswith(("x86_64.whl", "-any.whl"))]
    if not fitting:
        said = "; ".join(answer.failures) or f"it offers {', '.join(f.filename for f in answer.files) or 'nothing'}"
        raise WheelMemberError(
            f"No x86-64 wheel of {package} {version} where pip looks on this machine: {said}. "
            "These tests compare with real wheels: check the network and `pip config list`"
        )
    return fitting[0]


class _RemoteFile(io.RawIOBase):
    """A file behind a server that answers range requests; the end of it is fetched once and kept."""

    def __init__(self, sources: PackageSources, url: str) -> None:
        self._sources, self._url = sources, url
        self._position = 0
        content, self._size = self._fetch(f"bytes=-{TAIL_BYTES}")
        self._tail_start = self._size - len(content)
        self._tail = content

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        start, end = self._position, min(self._position + len(buffer), self._size)
        if start >= end:
            return 0
        if start >= self._tail_start:
            content = self._tail[start - self._tail_start : end - self._tail_start]
        else:
            content = self._fetch(f"bytes={start}-{end - 1}")[0]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _fetch(self, span: str) -> tuple[bytes, int]:
        """The bytes of a range, and the size of the whole file."""
        request = urllib.request.Request(
            self._url, headers={"Range": span, "User-Agent": "onprem.vllm", **self._sources.authorization(self._url)}
        )
        with self._sources.pool.open(request, timeout=60) as answer:
            total = str(answer.headers.get("Content-Range", "")).rpartition("/")[2]
            if answer.status != 206 or not total.isdigit():
                raise WheelMemberError(
                    f"{redacted(self._url)} answers no range requests (status {answer.status}): the whole wheel would "
                    "have to be fetched. Let pip use an index that does"
                )
            return answer.read(), int(total)


def main(package: str, version: str, member: str) -> None:
    """Print a member, or the hashes of those that fit a pattern."""
    if "*" not in member:
        sys.stdout.buffer.write(wheel_member(package, version, member))
        return
    for name in fnmatch.filter(wheel_members(package, version), member):
        print(f"{sha256_bytes(wheel_member(package, version, name))}  {name}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:4])
    except WheelMemberError as failure:
        sys.exit(str(failure))
