# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Locks: exact versions with sha256 hashes, and nothing that says where a file lies."""

from __future__ import annotations

import re
from dataclasses import dataclass

try:
    from packaging.markers import Marker
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error


_HASH = re.compile(r"\s--hash=(\S+)")
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")


class LockError(ValueError):
    """A lock that cannot be trusted; the message lists every line that is wrong."""


@dataclass(frozen=True)
class Pin:
    """One locked distribution: normalised name, exact version, the sha256 digests that its file may have."""

    name: str
    version: str
    hashes: frozenset[str]
    marker: Marker | None = None


def parse_lock(text: str, where: str) -> list[Pin]:
    """Read a lock.

    Args:
        where: told in messages.

    Raises:
        LockError: a line that is not ``name==version`` with sha256 hashes, an address, an option, or a name twice.
    """
    pins: dict[str, Pin] = {}
    problems: list[str] = []
    number = 0
    pending = ""
    for raw in text.splitlines():
        number += 1
        line = raw.split(" #", 1)[0].rstrip() if not raw.lstrip().startswith("#") else ""
        pending += line.removesuffix("\\") + " "
        if line.endswith("\\"):
            continue
        entry, pending = pending.strip(), ""
        if not entry:
            continue
        pin = _parse_entry(entry, f"line {number}", problems)
        if pin is None:
            continue
        if pin.name in pins:
            problems.append(f"line {number}: {pin.name} stands there twice")
        pins[pin.name] = pin
    if pending.strip():
        problems.append(f"line {number}: the file ends in the middle of an entry")
    if not pins and not problems:
        problems.append("it is empty")
    if problems:
        raise LockError(f"{where} is no lock: " + "; ".join(problems) + ". Make it anew: make lock RELEASE=<release>")
    return sorted(pins.values(), key=lambda pin: pin.name)


def _parse_entry(entry: str, where: str, problems: list[str]) -> Pin | None:
    if entry.startswith("-"):
        problems.append(f"{where}: option {entry.split(maxsplit=1)[0]!r}; a lock has names, versions and hashes only")
        return None
    hashes = _HASH.findall(entry)
    requirement_text = _HASH.sub("", entry).strip()
    try:
        requirement = Requirement(requirement_text)
    except InvalidRequirement:
        problems.append(f"{where}: {requirement_text[:60]!r} is no requirement")
        return None
    specifiers = list(requirement.specifier)
    if requirement.url or len(specifiers) != 1 or specifiers[0].operator != "==" or "*" in specifiers[0].version:
        problems.append(f"{where}: {requirement.name} is not pinned by ==")
        return None
    digests = [match.group(1) for value in hashes if (match := _SHA256.fullmatch(value))]
    if not digests or len(digests) != len(hashes):
        problems.append(f"{where}: {requirement.name} needs sha256 hashes of 64 hex digits and no others")
        return None
    return Pin(canonicalize_name(requirement.name), specifiers[0].version, frozenset(digests), requirement.marker)
