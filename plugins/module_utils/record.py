# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the wheels of a release claim (their RECORD files), who wins where two claim one path, and whether it is so.

The format: https://packaging.python.org/specifications/recording-installed-packages/ (paths relative to
site-packages, hashes as ``<algorithm>=<urlsafe base64 without padding>``).
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

READ_BYTES = 1 << 18


class RecordError(RuntimeError):
    """A RECORD cannot be read, or the wheels contradict each other; the message names path, wheels and remedy."""


@dataclass(frozen=True)
class Claim:
    """One line of a RECORD: the content that one wheel gives one path."""

    algorithm: str
    digest: str  # hex


@dataclass(frozen=True)
class WheelRecord:
    """The files of one installed wheel: path relative to the release's root -> claim, None where RECORD has no hash."""

    name: str
    version: str
    claims: dict[str, Claim | None] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Overlap:
    """Where both wheels claim a path, the winner's content stands. Names are normalised (PEP 503)."""

    winner: str
    loser: str


def normalise(name: str) -> str:
    """A project's name as PEP 503 compares it.

    >>> normalise("Nvidia_cutlass.dsl")
    'nvidia-cutlass-dsl'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def read_records(root: Path, site_packages: Path) -> list[WheelRecord]:
    """Every installed wheel's RECORD below ``site_packages``, by name.

    Args:
        root: the release's directory; claimed paths are returned relative to it.

    Raises:
        RecordError: a wheel has no RECORD, or one that names a path outside ``root``.
    """
    return sorted(
        (_read_record(root, entry) for entry in site_packages.iterdir() if entry.name.endswith(".dist-info")),
        key=lambda record: record.name,
    )


def _read_record(root: Path, dist_info: Path) -> WheelRecord:
    name, _unused, version = dist_info.name.removesuffix(".dist-info").partition("-")
    prefix = os.path.relpath(dist_info.parent, root)
    claims: dict[str, Claim | None] = {}
    try:
        with (dist_info / "RECORD").open(encoding="utf-8", newline="") as stream:
            for row in csv.reader(stream):
                if not row:
                    continue
                path = os.path.normpath(os.path.join(prefix, row[0]))
                if path.startswith(("../", "/")) or path == "..":
                    raise RecordError(f"{dist_info.name}/RECORD names {row[0]}, which is outside of the release.")
                claims[path] = _claim(row[1], dist_info.name) if len(row) > 1 and row[1] else None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{dist_info.name}/RECORD cannot be read: {error}") from error
    return WheelRecord(normalise(name), version, claims)


def _claim(text: str, where: str) -> Claim:
    algorithm, _unused, encoded = text.partition("=")
    try:
        digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
        hashlib.new(algorithm)
    except (ValueError, binascii.Error) as error:
        raise RecordError(f"{where}/RECORD has a hash that cannot be read: {text!r}") from error
    return Claim(algorithm, digest)


def check_overlaps(overlaps: Iterable[Overlap]) -> list[str]:
    """What is wrong with the winners that a release names, before anything is installed.

    >>> check_overlaps([Overlap("a", "b"), Overlap("b", "a")])
    ['overlaps: a, b each win over the other in a circle; one of them must lose']
    """
    beats: dict[str, set[str]] = {}
    for overlap in overlaps:
        beats.setdefault(overlap.winner, set()).add(overlap.loser)
    left = dict(beats)
    while free := [name for name, losers in left.items() if not any(loser in left for loser in losers)]:
        for name in free:
            del left[name]
    if not left:
        return []
    return [f"overlaps: {', '.join(sorted(left))} each win over the other in a circle; one of them must lose"]


@dataclass(frozen=True)
class Settled:
    """What every claimed path must hold, and who contests it."""

    expected: dict[str, tuple[WheelRecord, Claim | None]]
    contested: dict[str, tuple[str, ...]]  # path -> names of the wheels that claim it with different content


def settle(records: Sequence[WheelRecord], overlaps: Iterable[Overlap]) -> Settled:
    """Decide for each path whose content stands.

    Wheels that claim one path with the same content agree, and nobody has to win.

    Raises:
        RecordError: wheels contradict each other and the release names no winner (all such paths, grouped by wheels).
    """
    beats = {(overlap.winner, overlap.loser) for overlap in overlaps}
    claimants: dict[str, list[WheelRecord]] = {}
    for record in records:
        for path in record.claims:
            claimants.setdefault(path, []).append(record)
    expected: dict[str, tuple[WheelRecord, Claim | None]] = {}
    contested: dict[str, tuple[str, ...]] = {}
    open_questions: dict[tuple[str, ...], list[str]] = {}
    for path, owners in claimants.items():
        if len(owners) == 1 or len({owner.claims[path] for owner in owners}) == 1:
            expected[path] = (owners[0], owners[0].claims[path])
            continue
        contested[path] = tuple(owner.name for owner in owners)
        winner = _winner(path, owners, beats)
        if winner is None:
            open_questions.setdefault(tuple(str(owner) for owner in owners), []).append(path)
        else:
            expected[path] = (winner, winner.claims[path])
    if open_questions:
        raise RecordError("\n".join(_open_question(wheels, paths) for wheels, paths in open_questions.items()))
    return Settled(expected, contested)


def _winner(path: str, owners: Sequence[WheelRecord], beats: set[tuple[str, str]]) -> WheelRecord | None:
    for candidate in owners:
        if all(
            other.claims[path] == candidate.claims[path] or (candidate.name, other.name) in beats
            for other in owners
            if other is not candidate
        ):
            return candidate
    return None


def _open_question(wheels: Sequence[str], paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    names = [wheel.split(" ")[0] for wheel in wheels]
    return (
        f"{' and '.join(wheels)} both bring {', '.join(paths[:3])}{more}, with different content, and an installer "
        "leaves whichever it unpacked last. Name the winner in the release: "
        f"overlaps: [{{winner: {names[0]}, loser: {names[1]}}}] or the other way round."
    )


def reinstall_order(wrong: Iterable[str], settled: Settled, overlaps: Iterable[Overlap]) -> list[str]:
    """Wheels to unpack again, in this order, so that every contested path ends with its winner's content.

    Unpacking a winner also writes the paths where it loses to another one, which then has to follow.

    Args:
        wrong: contested paths that hold a loser's content.
    """
    beats: dict[str, set[str]] = {}
    for overlap in overlaps:
        beats.setdefault(overlap.loser, set()).add(overlap.winner)
    needed = {settled.expected[path][0].name for path in wrong}
    queue = list(needed)
    while queue:
        for winner in beats.get(queue.pop(), ()):
            if winner not in needed:
                needed.add(winner)
                queue.append(winner)
    order: list[str] = []
    while len(order) < len(needed):
        ready = sorted(
            name
            for name in needed
            if name not in order
            and not any(name in beats.get(other, ()) for other in needed if other not in order and other != name)
        )
        if not ready:  # a circle: refused by check_overlaps before
            raise RecordError(f"overlaps: {', '.join(sorted(needed))} win over each other in a circle")
        order.extend(ready)
    return order


def hash_files(
    root: str | os.PathLike[str], paths: Sequence[str], algorithms: Mapping[str, str] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Read each file once, several at a time, and yield its hex digests by algorithm: always sha256, and its own.

    Args:
        paths: relative to ``root``.
        algorithms: another algorithm for the few paths whose RECORD uses one.

    Raises:
        OSError: a file cannot be read.
    """
    others = algorithms or {}

    def one(path: str) -> tuple[str, dict[str, str]]:
        names = {"sha256", others.get(path, "sha256")}
        return path, digests(os.path.join(root, path), names)

    # Python releases its lock while it hashes and reads: threads share the work as processes would. Small files in
    # lots, since a hand-over costs more than their hash.
    lots = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        for lot in pool.map(lambda lot: [one(path) for path in lot], lots):
            yield from lot


def digests(path: str, algorithms: Iterable[str]) -> dict[str, str]:
    """The hex digests of one file, read once."""
    hashes = {name: hashlib.new(name) for name in algorithms}
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as stream:
        while got := stream.readinto(buffer):
            for digest in hashes.values():
                digest.update(view[:got])
    return {name: digest.hexdigest() for name, digest in hashes.items()}
