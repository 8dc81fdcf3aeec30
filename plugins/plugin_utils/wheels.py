# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Wheels: which files fit a target's Python and C library, and wheels without files that are built here."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

try:
    from packaging.tags import compatible_tags, cpython_tags
    from packaging.utils import canonicalize_name, canonicalize_version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error


_SUMMARY = "Metadata only, built by onprem.vllm: requires what provides it under another name"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold: the same bytes on every machine


class WheelError(ValueError):
    """A file that is no wheel, or a wheel without what every wheel has."""


@lru_cache(maxsize=16)
def target_tags(python: str, machine: str, glibc: tuple[int, int]) -> dict[str, int]:
    """Every tag that fits CPython ``python`` on a host with at least this C library, with its rank (0 is best).

    Computed from the target alone: the machine that builds a bundle may have another Python and another C library.
    """
    version = tuple(int(part) for part in python.split("."))
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc[1], 4, -1)]
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    for minor, alias in legacy.items():
        if minor <= glibc[1] and (machine == "x86_64" or alias == "manylinux2014"):
            platforms.insert(platforms.index(f"manylinux_2_{minor}_{machine}") + 1, f"{alias}_{machine}")
    platforms.insert(0, f"linux_{machine}")
    abi = f"cp{version[0]}{version[1]}"
    ranked: dict[str, int] = {}
    for tag in (
        *cpython_tags(version, abis=[abi], platforms=platforms),
        *compatible_tags(version, interpreter=abi, platforms=platforms),
    ):
        ranked.setdefault(str(tag), len(ranked))
    return ranked


def wheel_rank(filename: str, tags: dict[str, int]) -> int | None:
    """How well a wheel fits (lower is better), None where it does not, or is no wheel."""
    if split_wheel_name(filename) is None:
        return None
    parts = filename.removesuffix(".whl").lower().split("-")
    own = ("-".join(tag) for tag in product(*(part.split(".") for part in parts[-3:])))
    best = min((tags[tag] for tag in own if tag in tags), default=None)
    build = re.match(r"\d+", parts[2]) if len(parts) == 6 else None
    return None if best is None else best * 1000 - min(int(build.group()) if build else 0, 999)


def split_wheel_name(filename: str) -> tuple[str, str] | None:
    """Normalised name and canonical version of a wheel's file name, None where it is none.

    The cheap way, for index pages with thousands of files: parsing every name in full took 12 s for 149 packages.
    """
    parts = filename.removesuffix(".whl").split("-")
    if not filename.endswith(".whl") or len(parts) not in {5, 6}:
        return None
    return _canonical_name(parts[0]), canonical_version(parts[1])


@lru_cache(maxsize=4096)
def canonical_version(version: str) -> str:
    """One spelling per version: ``1.0`` and ``1.0.0`` are the same one."""
    return canonicalize_version(version)


@lru_cache(maxsize=4096)
def _canonical_name(name: str) -> str:
    return canonicalize_name(name)


def read_metadata(source: str | io.BufferedIOBase) -> bytes:
    """METADATA of a wheel, as PEP 658 serves it beside the file.

    Raises:
        WheelError: the file is no zip or has no METADATA.
    """
    try:
        with zipfile.ZipFile(source) as wheel:
            members = [n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
            if len(members) != 1:
                raise WheelError(f"{len(members)} METADATA files where every wheel has one")
            return wheel.read(members[0])
    except (zipfile.BadZipFile, OSError) as error:
        raise WheelError(f"not a readable wheel: {error}") from None


def build_metadata_wheel(name: str, version: str, requires: Sequence[str]) -> tuple[str, bytes]:
    """File name and bytes of a wheel that has only metadata; the same bytes for the same arguments, everywhere.

    Stored, not deflated: zlib's output differs between its versions, and the hash stands in a lock.
    """
    distribution = canonicalize_name(name).replace("-", "_")
    info = f"{distribution}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {_SUMMARY}\n"]
    metadata += [f"Requires-Dist: {requirement}\n" for requirement in requires]
    files = {
        f"{info}/METADATA": "".join(metadata).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: onprem.vllm\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_record_hash(content)},{len(content)}\n" for path, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, content in files.items():
            member = zipfile.ZipInfo(path, _EPOCH)
            member.external_attr = 0o100644 << 16
            member.create_system = 3
            archive.writestr(member, content)
    return f"{distribution}-{version}-py3-none-any.whl", buffer.getvalue()


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
