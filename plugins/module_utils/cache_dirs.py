# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""Cache directories of a host's instances, described once for systemd-tmpfiles: now and after every boot.

The kernels and graphs that vLLM, Triton and FlashInfer build belong to one release; another must not read them.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .atomic import write_file

KINDS = ("flashinfer", "huggingface", "nv", "torchinductor", "triton")
TMPFILES = Path("/etc/tmpfiles.d/onprem-vllm.conf")
RECORDS = Path("/var/lib/vllm")
SERVICE_MODE, ROOT_MODE = 0o750, 0o755

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RELEASE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{8}")
# No character that tmpfiles.d(5) would read as a blank, a quote or a specifier.
_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")


class CacheDirsError(RuntimeError):
    """A directory cannot be had as it shall be; the message says which, why and what to do."""


@dataclass(frozen=True)
class Layout:
    """Which directories shall exist.

    Attributes:
        instances: (instance, release id).
        releases: where releases are built; a cache whose release is gone from there goes too.
        going: ids of releases that go in this run, so that check mode counts their caches too.
        configuration: where instances are configured; an instance that is gone from there loses its caches.
    """

    instances: tuple[tuple[str, str], ...]
    owner: str
    group: str
    root: Path = Path("/var/cache")
    releases: Path = Path("/opt/vllm/releases")
    configuration: Path = Path("/etc/vllm")
    records: Path = RECORDS
    file: Path = TMPFILES
    going: frozenset[str] = frozenset()

    @classmethod
    def from_plan(cls, instances: Iterable[Mapping[str, Any]], owner: str, group: str, **places: str) -> Layout:
        """Take name and release_id of each instance. Raises CacheDirsError for what makes no directory's name."""
        pairs, complaints = [], []
        for instance in instances:
            name, release_id = str(instance.get("name", "")), str(instance.get("release_id", ""))
            if _NAME.fullmatch(name) and _RELEASE_ID.fullmatch(release_id):
                pairs.append((name, release_id))
            else:
                complaints.append(f"instance {name!r} with release_id {release_id!r}")
        if complaints:
            raise CacheDirsError(
                f"These cannot name a cache directory: {', '.join(complaints)}. "
                "A name begins with a letter or digit; a release_id ends in '-' and 8 hex digits."
            )
        if bad := [path for path in places.values() if not _PLAIN_PATH.fullmatch(path)]:
            raise CacheDirsError(f"Not a plain absolute path: {', '.join(map(repr, bad))}.")
        elsewhere: dict[str, Any] = {key: Path(path) for key, path in places.items()}
        return cls(tuple(sorted(set(pairs))), owner, group, **elsewhere)

    def service_folders(self) -> list[Path]:
        """Those that the service writes to, at any depth."""
        releases = sorted({release_id for _unused, release_id in self.instances})
        return [
            *(self.root / "vllm" / name / release_id for name, release_id in self.instances),
            *(self.root / kind / release_id for kind in KINDS for release_id in releases),
        ]

    def root_folders(self) -> list[Path]:
        """Those above them: root's, or a service could put another directory in their place."""
        if not self.instances:
            return [self.records]
        names = sorted({name for name, _unused in self.instances})
        return [
            self.records,
            self.root / "vllm",
            *(self.root / "vllm" / name for name in names),
            *(self.root / kind for kind in KINDS),
        ]

    def text(self) -> str:
        """The tmpfiles.d file."""
        lines = [
            "# Written by the role cache_dirs of onprem.vllm; changes here are lost.",
            "# Z gives back what a run as root left inside; it costs a stat per file, 0.3 s for 35,000.",
            *(f"d {path} {ROOT_MODE:04o} root root -" for path in self.root_folders()),
        ]
        for path in self.service_folders():
            lines += [
                f"d {path} {SERVICE_MODE:04o} {self.owner} {self.group} -",
                f"Z {path} - {self.owner} {self.group} -",
            ]
        return "\n".join(lines) + "\n"

    def owner_ids(self) -> tuple[int, int] | None:
        """Numeric user and group, None where one does not exist (yet)."""
        try:
            return pwd.getpwnam(self.owner).pw_uid, grp.getgrnam(self.group).gr_gid
        except KeyError:
            return None


@dataclass
class Findings:
    """What a host lacks."""

    text_before: str
    wrong: dict[str, str] = field(default_factory=dict)  # path -> what is wrong
    stale: list[Path] = field(default_factory=list)

    def changed(self, layout: Layout) -> bool:
        return self.text_before != layout.text() or bool(self.wrong or self.stale)


def assess(layout: Layout) -> Findings:
    """Compare the host with the layout; nothing is changed.

    Raises:
        CacheDirsError: something that is no directory is in the way.
    """
    found = Findings(layout.file.read_text(encoding="utf-8") if layout.file.is_file() else "")
    ids = layout.owner_ids()
    in_the_way = []
    for path, mode, owner in [
        *((path, ROOT_MODE, (0, 0)) for path in layout.root_folders()),
        *((path, SERVICE_MODE, ids) for path in layout.service_folders()),
    ]:
        try:
            status = path.lstat()
        except OSError:
            found.wrong[str(path)] = "is missing"
            continue
        if not stat.S_ISDIR(status.st_mode):
            in_the_way.append(str(path))
            continue
        if (status.st_uid, status.st_gid) != owner:
            found.wrong[str(path)] = f"belongs to {status.st_uid}:{status.st_gid}"
        elif stat.S_IMODE(status.st_mode) != mode:
            found.wrong[str(path)] = f"has mode {stat.S_IMODE(status.st_mode):04o} instead of {mode:04o}"
        if owner == ids and ids is not None and (strangers := _strangers(path, ids)):
            found.wrong[f"{path}/"] = f"{len(strangers)} entries belong to others, the first is {strangers[0]}"
    if in_the_way:
        raise CacheDirsError(
            f"In the way of cache directories: {', '.join(in_the_way)} (a link or a file). "
            "Move it away; to have the caches on another file system set cache_dirs_root."
        )
    found.stale = _stale(layout)
    return found


def _strangers(folder: Path, ids: tuple[int, int]) -> list[str]:
    """Entries at any depth that do not belong to the service: the next start could not write there."""
    wrong = []
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if (status.st_uid, status.st_gid) != ids:
                    wrong.append(entry.path)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(entry.path)
    return wrong


def _stale(layout: Layout) -> list[Path]:
    """Caches of releases and instances that are gone; what does not look like ours is left alone."""

    def folders(place: Path) -> list[Path]:
        return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []

    wanted = set(layout.service_folders())
    names = {name for name, _unused in layout.instances}

    def is_gone(path: Path) -> bool:
        return (
            path not in wanted
            and _RELEASE_ID.fullmatch(path.name) is not None
            and (path.name in layout.going or not (layout.releases / path.name).is_dir())
        )

    stale = [path for kind in KINDS for path in folders(layout.root / kind) if is_gone(path)]
    for instance in folders(layout.root / "vllm"):
        ours = [path for path in folders(instance) if _RELEASE_ID.fullmatch(path.name)]
        known = instance.name in names or (layout.configuration / instance.name).exists()
        if not known and len(ours) == len(list(instance.iterdir())):
            stale.append(instance)
        else:
            stale += [path for path in ours if is_gone(path)]
    return stale


def apply(layout: Layout, found: Findings) -> None:
    """Write the file, let systemd-tmpfiles do as at boot, look again, remove what is stale.

    Raises:
        CacheDirsError: the service's user does not exist, or a directory is still not right.
    """
    if layout.owner_ids() is None:
        raise CacheDirsError(
            f"User {layout.owner} or group {layout.group} does not exist on this host. The role host_base makes them."
        )
    text = layout.text()
    if found.text_before != text:
        _validate(text)
        layout.file.parent.mkdir(parents=True, exist_ok=True)
        write_file(layout.file, text.encode())
    said = _tmpfiles("--create", str(layout.file))
    if still := assess(layout).wrong:
        lines = "; ".join(f"{path} {what}" for path, what in still.items())
        raise CacheDirsError(f"Cache directories are still wrong: {lines}. systemd-tmpfiles said: {said or 'nothing'}")
    for path in found.stale:
        shutil.rmtree(path)


def remove(layout: Layout, *, purge: bool) -> None:
    """Take the file back; the caches only if asked."""
    layout.file.unlink(missing_ok=True)
    for path in removable(layout) if purge else []:
        shutil.rmtree(path)


def removable(layout: Layout) -> list[Path]:
    """Every cache that this collection made: those of the layout and those named after a release."""
    everything = Layout((), layout.owner, layout.group, layout.root, Path("/nonexistent"), Path("/nonexistent"))
    own = {layout.root / "vllm" / name for name, _unused in layout.instances}
    own |= {path for path in layout.service_folders() if path.parent not in own}
    return sorted({path for path in own if path.is_dir()} | set(_stale(everything)))


def _validate(text: str) -> None:
    """Let systemd-tmpfiles read the file before it counts: with a prefix that nothing has, it does nothing else."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if said := _tmpfiles("--create", "--prefix=/nonexistent/onprem-vllm", file.name):
            raise CacheDirsError(f"systemd-tmpfiles refuses the file of cache directories: {said}")


def _tmpfiles(*arguments: str) -> str:
    """Run systemd-tmpfiles; its complaints, empty where it has none."""
    try:
        done = subprocess.run(
            ["systemd-tmpfiles", *arguments], capture_output=True, text=True, check=False, timeout=600
        )
    except FileNotFoundError:
        raise CacheDirsError("systemd-tmpfiles is not on this host: it must run systemd.") from None
    return done.stderr.strip() if done.returncode else ""
