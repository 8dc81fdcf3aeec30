# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Patches of installed files: exact or refused, never in place.

A patch is guarded from both sides: the file must have the sha256 ``before``, the result the sha256 ``after``. There is
no fuzz and no offset: patch(1) applies what does not fit "with offsets", and the result is silently wrong.

Installed files are hard links to uv's cache and to other releases (measured: an edit in place changed both, and a later
install with ``--require-hashes`` delivered the edited file). So the new content becomes a new file that is renamed over
the old name; the other names keep the old content.

A wheel's RECORD is left as the wheel brought it, so a patched file differs from it: the check of a release against
RECORD takes the hashes of ``expected_hashes`` for the patched paths and RECORD's own for all others.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from .atomic import sha256_bytes, write_file

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\"  # what follows it depends on the language of the machine that ran diff


class PatchError(RuntimeError):
    """A patch does not fit its file, or does not give what it promises; nothing was written. The message says why."""


def apply_patch(site_packages: Path, patch: Mapping[str, Any], originals: Path) -> str:
    """Patch one installed file, or find it patched.

    Stopped anywhere, the next call finishes: the original is kept and stale bytecode is gone before the file changes.

    Args:
        site_packages: the directory that the patch's ``file`` is relative to.
        patch: ``name``, ``file``, ``before``, ``after`` (hex sha256) and either ``edit`` (a list of ``find``,
            ``replace``, ``times``) or ``diff`` (a unified diff).
        originals: where the file as the wheel brought it is kept, under the same relative path. A file that the wheel
            brings patched already has no original there.

    Returns:
        ``applied`` or ``already applied``.

    Raises:
        PatchError: the file is missing, is not the one the patch was made for, or the result is not the promised one.
        OSError: the disk is full or the file cannot be replaced; the installed file is untouched then.
    """
    name, before, after = patch["name"], patch["before"], patch["after"]
    path = _installed_file(site_packages, patch)
    content = path.read_bytes()
    found = sha256_bytes(content)
    if found == after:
        _remove_bytecode(path)
        return "already applied"
    if found != before:
        raise PatchError(
            f"Patch {name} was not made for {path}: its sha256 is {found}, expected {before} (or {after}, patched). "
            "Nothing was written. Either the release installs another build than the patch names, or the file was "
            "edited: reinstall the release without the patch and compare; then add an entry with this file's hashes "
            "to the patch, or take the patch out of the release."
        )
    try:
        result = patched(content, patch)
    except PatchError as error:
        raise PatchError(f"Patch {name} does not fit {path}: {error}") from error
    outcome = sha256_bytes(result)
    if outcome != after:
        raise PatchError(
            f"Patch {name} gives {path} the sha256 {outcome}, promised was {after}. Nothing was written. "
            "Correct the edit of the patch, or its hash `after` if the edit is what you mean."
        )
    status = path.stat()
    original = originals / patch["file"]
    if not original.is_file() or original.read_bytes() != content:
        original.parent.mkdir(parents=True, exist_ok=True)
        write_file(original, content, 0o644)
    # Bytecode of a release is never compared with its source (unchecked hash): left there, it would run for ever.
    _remove_bytecode(path)
    write_file(path, result, stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid))
    return "applied"


def expected_hashes(patches: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What the patched files must hold, as path in site-packages -> hex sha256: it stands above the wheel's RECORD."""
    return {patch["file"]: patch["after"] for patch in patches}


def patched(content: bytes, patch: Mapping[str, Any]) -> bytes:
    """The content with the patch's ``edit`` or ``diff`` applied; hashes are not looked at.

    Raises:
        PatchError: it does not fit exactly.
    """
    if patch.get("diff") is not None:
        return apply_diff(content, patch["diff"])
    return apply_edit(content, patch["edit"])


def apply_edit(content: bytes, edit: Sequence[Mapping[str, Any]]) -> bytes:
    """Replace exact text, step by step; each text must occur exactly as often as its ``times`` says (default once).

    >>> apply_edit(b"a = 1\\nb = 1\\n", [{"find": "a = 1", "replace": "a = 2"}])
    b'a = 2\\nb = 1\\n'

    Raises:
        PatchError: a text occurs more or less often.
    """
    for number, step in enumerate(edit, 1):
        find, times = step["find"].encode(), step.get("times", 1)
        count = _occurrences(content, find)
        if count != content.count(find):
            raise PatchError(
                f"step {number} of the edit looks for {_shown(step['find'])}, which overlaps itself in the file: which "
                "one is meant is open. Take in more of the text around it."
            )
        if count != times:
            raise PatchError(
                f"step {number} of the edit looks for {_shown(step['find'])}, which occurs {count} times, not {times}. "
                "Take in more of the text around it, so that it is found where it is meant and nowhere else."
            )
        content = content.replace(find, step["replace"].encode())
    return content


def _occurrences(content: bytes, find: bytes) -> int:
    count, start = 0, content.find(find)
    while start >= 0:
        count += 1
        start = content.find(find, start + 1)
    return count


def _shown(text: str) -> str:
    lines = text.strip().split("\n")
    return repr(lines[0][:60]) + (" ..." if len(lines) > 1 or len(lines[0]) > 60 else "")


def apply_diff(content: bytes, diff: str) -> bytes:
    """Apply a unified diff of one file as ``diff -u`` writes it: every line at its place, or not at all.

    Raises:
        PatchError: the text is no such diff, or a line differs from the file's.
    """
    source = content.split(b"\n")
    lines = [piece + b"\n" for piece in source[:-1]] + ([source[-1]] if source[-1] else [])
    result: list[bytes] = []
    taken = 0
    for header, old_start, new_start, hunk in _hunks(diff):
        if old_start < taken:
            raise PatchError(f"hunk {header} begins before the one above it ends.")
        result += lines[taken:old_start]
        if len(result) != new_start:
            raise PatchError(
                f"hunk {header} puts line {new_start + 1} of the result where line {len(result) + 1} is due."
            )
        taken = old_start
        for mark, text in hunk:
            if mark == "+":
                result.append(text)
                continue
            if taken >= len(lines) or lines[taken] != text:
                here = _line(lines[taken]) if taken < len(lines) else "the end of the file"
                raise PatchError(
                    f"hunk {header} expects {_line(text)} in line {taken + 1}, found {here}. No offset and no fuzz is "
                    "tried: make the diff anew against this very file."
                )
            if mark == " ":
                result.append(text)
            taken += 1
    result += lines[taken:]
    # A line without a newline can only be the last one; a diff that says otherwise would join two lines.
    if any(not line.endswith(b"\n") for line in result[:-1]):
        raise PatchError("the diff leaves a line without its newline in the middle of the file.")
    return b"".join(result)


def _line(text: bytes) -> str:
    shown = repr(text.decode("utf-8", "backslashreplace").rstrip("\n")[:80])
    return shown if text.endswith(b"\n") else f"{shown} without a newline"


def check_diff(diff: str) -> None:
    """Whether a text is a unified diff of one file.

    Raises:
        PatchError: it is not.
    """
    _hunks(diff)


def _hunks(diff: str) -> list[tuple[str, int, int, list[tuple[str, bytes]]]]:
    """Header, first line in the old and in the new file (from 0) and marked lines of each hunk."""
    lines = diff.split("\n")
    if lines[-1] == "":
        lines.pop()
    position = _after_file_header(lines)
    hunks = []
    while position < len(lines):
        line = lines[position]
        if not line.strip():
            position += 1
            continue
        match = _HUNK.match(line)
        if match is None:
            if line.startswith(("--- ", "diff ", "Index: ")):
                raise PatchError("the diff changes more than one file: write one patch per file.")
            raise PatchError(f"line {position + 1} of the diff, {line[:80]!r}, stands outside of a hunk.")
        old_count, new_count = (int(match[group] or 1) for group in (2, 4))
        # With a count of 0 the number names the line before, else the first line itself.
        old_start, new_start = (
            int(match[group]) - (1 if count else 0) for group, count in ((1, old_count), (3, new_count))
        )
        position, hunk = _hunk_body(lines, position + 1, match[0], old_count, new_count)
        hunks.append((match[0], old_start, new_start, hunk))
    if not hunks:
        raise PatchError("the text holds no hunk (a line such as @@ -1,3 +1,4 @@): it is no unified diff.")
    return hunks


def _after_file_header(lines: Sequence[str]) -> int:
    """The line after ``---``/``+++``: what stands before (a commit's message, git's lines) says nothing to us."""
    for position, line in enumerate(lines):
        if _HUNK.match(line):
            return position
        if line.startswith("--- ") and position + 1 < len(lines) and lines[position + 1].startswith("+++ "):
            return position + 2
    return 0


def _hunk_body(
    lines: Sequence[str], position: int, header: str, old_left: int, new_left: int
) -> tuple[int, list[tuple[str, bytes]]]:
    body: list[tuple[str, bytes]] = []
    while position < len(lines) and (old_left or new_left or lines[position].startswith(_NO_NEWLINE)):
        line = lines[position] or " "  # editors strip the blank that marks an empty line as unchanged
        position += 1
        if line.startswith(_NO_NEWLINE):
            if not body or not body[-1][1].endswith(b"\n"):
                raise PatchError(f"hunk {header}: {line!r} follows no line.")
            body[-1] = (body[-1][0], body[-1][1][:-1])
            continue
        mark = line[0]
        if mark not in " +-":
            raise PatchError(f"hunk {header} holds {line[:80]!r}, which begins with neither a blank nor + nor -.")
        old_left -= mark != "+"
        new_left -= mark != "-"
        body.append((mark, line[1:].encode() + b"\n"))
        if old_left < 0 or new_left < 0:
            break
    if old_left or new_left:
        raise PatchError(f"hunk {header} has not as many lines as its header says: the diff was cut or edited by hand.")
    return position, body


def check_path(file: str) -> str | None:
    """What is wrong with a patch's ``file``; None where it is a plain relative path."""
    parts = PurePosixPath(file).parts
    if not parts or file.startswith("/") or ".." in parts or os.fspath(PurePosixPath(file)) != file:
        return f"{file!r} is no plain path below site-packages, such as vllm/config.py"
    if any(part.endswith(".dist-info") or part == "__pycache__" for part in parts):
        return f"{file!r} is written by the installer or by Python itself, not a source"
    return None


def _installed_file(site_packages: Path, patch: Mapping[str, Any]) -> Path:
    file = patch["file"]
    if (problem := check_path(file)) is not None:
        raise PatchError(f"Patch {patch['name']}: {problem}.")
    path = site_packages / file
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise PatchError(
            f"Patch {patch['name']} is for {path}, which does not exist: the release does not hold "
            f"{patch.get('package') or 'the package'} as the patch knows it. Take the patch out of the release."
        ) from None
    # A link would lead the new file out of the release, or to a file that others share.
    if not stat.S_ISREG(mode) or path.parent.resolve() != site_packages.resolve().joinpath(*Path(file).parent.parts):
        raise PatchError(
            f"Patch {patch['name']}: {path} is a link, lies behind one, or is no file: no wheel installs so."
        )
    return path


def _remove_bytecode(path: Path) -> None:
    if path.suffix == ".py":
        for stale in (path.parent / "__pycache__").glob(f"{glob.escape(path.stem)}.*.pyc"):
            stale.unlink()
