# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""What a whole directory tree holds: written last, into the tree itself, and compared with it on every run.

A tree is a release, an unpacked interpreter or uv. Files are grouped by directory: 50,000 of them are 6 MB of JSON
that reads in 0.1 s, and one pass of scandir compares them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .record import hash_files

FORMAT = 1
NAME = "manifest.json"

Folder = tuple[int, dict[str, str]]  # mode, and per file "<size> <mtime in ns> <mode> <sha256>"


class Entry(NamedTuple):
    """One regular file of a tree."""

    size: int  # bytes
    mtime_ns: int
    mode: int
    sha256: str

    @classmethod
    def read(cls, text: str) -> Entry:
        """Out of the manifest's short form, which is compared as a text: reading it for each file takes longer."""
        size, mtime_ns, mode, sha256 = text.split(" ")
        return cls(int(size), int(mtime_ns), int(mode, 8), sha256)


class ManifestError(RuntimeError):
    """There is no manifest that can be read: the tree never was whole, or somebody changed it."""


@dataclass
class Manifest:
    """Everything in a tree but the manifest itself."""

    about: dict[str, Any]
    owner: tuple[int, int]
    folders: dict[str, Folder] = field(repr=False)  # "" is the root; mode, then the files by name
    links: dict[str, str] = field(repr=False)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Path and entry of each regular file."""
        for folder, (_unused, files) in self.folders.items():
            for name, text in files.items():
                yield (f"{folder}/{name}" if folder else name), Entry.read(text)

    def entry(self, path: str) -> Entry | None:
        """The entry of one regular file, None where the tree has none of that path."""
        folder, _unused, name = path.rpartition("/")
        found = self.folders.get(folder)
        text = found[1].get(name) if found else None
        return Entry.read(text) if text else None

    @property
    def size(self) -> int:
        """Bytes of all regular files; those shared with another release by hard links count as well."""
        return sum(entry.size for _unused, entry in self.entries())

    def write(self, root: Path) -> None:
        """Put the manifest into the tree: the last step that makes it whole.

        Raises:
            OSError: the disk is full.
        """
        document = {
            "format": FORMAT,
            **self.about,
            "owner": list(self.owner),
            "links": self.links,
            "folders": self.folders,
        }
        # Not flushed here: that waits for gigabytes of the tree to reach the disk, measured 9.5 s. A manifest or a file
        # that a power cut swallowed is found by the next comparison.
        with (root / NAME).open("xb") as stream:
            os.fchmod(stream.fileno(), 0o444)
            stream.write(json.dumps(document, separators=(",", ":")).encode() + b"\n")


def read_manifest(root: Path) -> Manifest:
    """The manifest of a tree.

    Raises:
        ManifestError: missing, unreadable or of another format.
    """
    try:
        document = json.loads((root / NAME).read_bytes())
        if document.pop("format") != FORMAT:
            raise ManifestError(f"{root / NAME} has a format that this version of the collection does not know")
        return Manifest(
            owner=(document["owner"][0], document["owner"][1]),
            links=document.pop("links"),
            folders=document.pop("folders"),
            about={key: value for key, value in document.items() if key != "owner"},
        )
    except FileNotFoundError:
        raise ManifestError(f"{root / NAME} is missing") from None
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ManifestError(f"{root / NAME} cannot be read ({error})") from error


def take_manifest(root: Path, hashes: Mapping[str, str], about: dict[str, Any]) -> Manifest:
    """Describe the tree as it is now.

    Args:
        hashes: hex sha256 by path relative to ``root``; a file without one is refused rather than left unchecked.

    Raises:
        ManifestError: a file has no hash, or is neither file, folder nor link.
    """
    folders: dict[str, Folder] = {}
    links: dict[str, str] = {}
    info = root.stat()
    for folder, path, entry in walk(root):
        if folder not in folders:
            mode = stat.S_IMODE(os.stat(root / folder).st_mode)
            folders[folder] = (mode, {})
        if entry is None:
            continue
        if entry.is_symlink():
            links[path] = os.readlink(entry.path)
        elif entry.is_file(follow_symlinks=False):
            if path == NAME:
                continue
            if path not in hashes:
                raise ManifestError(f"{path} appeared while the tree was built")
            found = entry.stat(follow_symlinks=False)
            folders[folder][1][entry.name] = f"{_state(found)} {hashes[path]}"
        else:
            raise ManifestError(f"{path} is neither file, folder nor link")
    return Manifest(about, (info.st_uid, info.st_gid), folders, links)


def walk(root: Path) -> Iterator[tuple[str, str, os.DirEntry[str] | None]]:
    """Folder, path and entry of everything below ``root`` but folders; an entry None announces the folder itself."""
    waiting = [""]
    base = os.fspath(root)
    while waiting:
        folder = waiting.pop()
        yield folder, folder, None
        with os.scandir(f"{base}/{folder}" if folder else base) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    yield folder, path, entry


def compare_by_stat(root: Path, manifest: Manifest) -> list[str]:
    """What differs from the manifest by size, time, mode, owner or presence; nothing is read. Empty when whole."""
    folders = list(manifest.folders)
    wrong = _in_processes(lambda share, of: _compare_folders(root, manifest, folders[share::of]), len(folders) // 500)
    wrong.extend(f"{path}: missing" for path in manifest.links if not os.path.lexists(root / path))
    return sorted(wrong)


def _compare_folders(root: Path, manifest: Manifest, folders: Sequence[str]) -> list[str]:
    wrong: list[str] = []
    uid, gid = manifest.owner
    for folder in folders:
        mode, files = manifest.folders[folder]
        prefix = f"{folder}/" if folder else ""
        try:
            # Through a descriptor: the kernel then finds 50,000 files by their names alone, in two thirds of the time.
            descriptor = os.open(root / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            wrong.append(f"{prefix or './'}: missing")
            continue
        try:
            found = os.fstat(descriptor)
            if stat.S_IMODE(found.st_mode) != mode or found.st_uid != uid or found.st_gid != gid:
                wrong.append(f"{prefix or './'}: {_permissions(found)}, not {_wanted(mode, manifest.owner)}")
            seen = set()
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    name = entry.name
                    known = files.get(name)
                    if known is None:
                        if fault := _unlisted(manifest, prefix + name, entry, descriptor):
                            wrong.append(f"{prefix}{name}{fault}")
                        continue
                    seen.add(name)
                    found = entry.stat(follow_symlinks=False)
                    if not known.startswith(f"{_state(found)} ") or found.st_uid != uid or found.st_gid != gid:
                        wrong.append(f"{prefix}{name}: {_difference(found, Entry.read(known), manifest.owner)}")
            if len(seen) != len(files):
                wrong.extend(f"{prefix}{name}: missing" for name in files if name not in seen)
        finally:
            os.close(descriptor)
    return wrong


def _unlisted(manifest: Manifest, path: str, entry: os.DirEntry[str], folder: int) -> str | None:
    """What is wrong with something that is no listed file: nothing, if it is a listed folder or link."""
    if entry.is_symlink():
        target = manifest.links.get(path)
        actual = os.readlink(entry.name, dir_fd=folder)
        if target is None:
            return ": not in the manifest"
        return None if actual == target else f": a link to {actual}, not to {target}"
    if entry.is_dir(follow_symlinks=False):
        return None if path in manifest.folders else "/: not in the manifest"
    return None if path == NAME else ": not in the manifest"


def _in_processes(work: Callable[[int, int], list[str]], most: int) -> list[str]:
    """``work(share, of)`` for every share at once, in forked processes; their lines.

    Threads would take turns: most of the time goes into Python's own work for each file.

    Raises:
        ManifestError: a process died.
    """
    count = max(1, min(most, os.cpu_count() or 1, 8))
    readers: list[tuple[int, int]] = []
    for share in range(1, count):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                with os.fdopen(writer, "wb") as out:
                    out.write(json.dumps(work(share, count)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        readers.append((pid, reader))
    lines: list[str] = []
    failed = False
    try:
        lines.extend(work(0, count))
    finally:
        for pid, reader in readers:
            with os.fdopen(reader, "rb") as answer:
                text = answer.read()
            failed |= os.waitpid(pid, 0)[1] != 0
            lines.extend(json.loads(text) if text and not failed else [])
    if failed:
        raise ManifestError("a process that compared files with the manifest died")
    return lines


def compare_by_hash(root: Path, manifest: Manifest) -> list[str]:
    """What differs from the manifest when every file is read as well."""
    wrong = compare_by_stat(root, manifest)
    entries = {path: entry.sha256 for path, entry in manifest.entries() if (root / path).is_file()}
    wrong.extend(
        f"{path}: sha256 is {found['sha256']}, not {entries[path]}"
        for path, found in hash_files(root, list(entries))
        if found["sha256"] != entries[path]
    )
    return sorted(wrong)


def _state(found: os.stat_result) -> str:
    # A file that became something else has another mode: the kind is part of st_mode, and S_IFREG is taken off here.
    return f"{found.st_size} {found.st_mtime_ns} {found.st_mode ^ stat.S_IFREG:o}"


def _difference(found: os.stat_result, known: Entry, owner: tuple[int, int]) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "not a file any more"
    if found.st_size != known.size:
        return f"{found.st_size} bytes, not {known.size}"
    if found.st_mtime_ns != known.mtime_ns:
        return "written to since it was installed"
    return f"{_permissions(found)}, not {_wanted(known.mode, owner)}"


def _permissions(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o} of {found.st_uid}:{found.st_gid}"


def _wanted(mode: int, owner: tuple[int, int]) -> str:
    return f"mode {mode:04o} of {owner[0]}:{owner[1]}"
