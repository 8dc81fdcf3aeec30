# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Generations of an instance on disk: each written beside and renamed into place whole, never changed afterwards.

``<instance>/current`` links to the one that shall run, ``<instance>/ready`` to the last that answered a completion:
that one is what a failed start falls back to. ``<instance>/previous`` links to the one that was ready before that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .atomic import replace_link, sha256_bytes, sync_directory
from .systemd_environment import environment_text, read_environment

GENERATION_VARIABLE = "ONPREM_VLLM_GENERATION"
MODES = {"serve.yaml": 0o644, "environment": 0o400, "unit": 0o644, "manifest.json": 0o600}
HIDDEN = "(hidden)"


@dataclass(frozen=True)
class Content:
    """What a generation shall hold; its number alone is decided on the host."""

    serve: str
    unit: str
    release: str
    environment: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    port: int = 0
    gpus: tuple[str, ...] = ()

    def files(self, number: int) -> dict[str, bytes]:
        """The files of generation ``number``, without the link to the release.

        Raises:
            EnvironmentRefused: a variable that systemd would not pass on.
        """
        variables = {**self.environment, **self.secrets, GENERATION_VARIABLE: str(number)}
        files = {
            "serve.yaml": self.serve.encode(),
            "environment": environment_text(variables).encode(),
            "unit": self.unit.encode(),
        }
        manifest = {
            "format": 1,
            "generation": number,
            "release": self.release,
            "port": self.port,
            "gpus": list(self.gpus),
            "environment": sorted({*self.environment, GENERATION_VARIABLE}),
            "secrets": sorted(self.secrets),
            "sha256": {name: sha256_bytes(content) for name, content in files.items()},
        }
        files["manifest.json"] = (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()
        return files


class Generations:
    """The generations of one instance below ``/etc/vllm/<instance>``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "generations"

    def path(self, number: int) -> Path:
        """Where generation ``number`` lies."""
        return self.store / str(number)

    def numbers(self) -> list[int]:
        """All whole generations, in order."""
        try:
            names = os.listdir(self.store)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdigit())

    def current(self) -> int | None:
        """The generation that shall run, or None where none was activated or its directory is gone."""
        return self._linked("current")

    def ready(self) -> int | None:
        """The last generation that answered a completion."""
        return self._linked("ready")

    def rollback_target(self) -> int | None:
        """The last generation that was ready before the current one; the current one where a run died going there."""
        current, ready, previous = self.current(), self.ready(), self._linked("previous")
        if current == previous:
            return current
        return previous if ready == current else ready

    def _linked(self, name: str) -> int | None:
        try:
            target = os.readlink(self.directory / name)
        except OSError:
            return None
        parent, _unused, number = target.rpartition("/")
        return int(number) if parent == "generations" and number.isdigit() and self.path(int(number)).is_dir() else None

    def read(self, number: int) -> tuple[dict[str, bytes], str]:
        """The files a generation holds now and the release it links to; what cannot be read is left out."""
        files = {}
        for name in MODES:
            path = self.path(number) / name
            if path.is_file() and not path.is_symlink():
                files[name] = path.read_bytes()
        try:
            release = os.readlink(self.path(number) / "release")
        except OSError:
            release = ""
        return files, release

    def differs(self, number: int, content: Content) -> list[str]:
        """Names of what in generation ``number`` is not as ``content`` says, by the files themselves."""
        files, release = self.read(number)
        wanted = content.files(number)
        found = [name for name in wanted if files.get(name) != wanted[name]]
        return found if release == content.release else [*found, "release"]

    def altered(self, number: int) -> list[str]:
        """Names of what in generation ``number`` is not as its own manifest says: lost or changed by hand."""
        files, release = self.read(number)
        manifest = self.manifest(number)
        recorded = manifest.get("sha256")
        sums = recorded if isinstance(recorded, dict) else {}
        found = [name for name in MODES if name != "manifest.json" and _sha256(files.get(name)) != sums.get(name)]
        return [
            *(["manifest.json"] if not sums else found),
            *(["release"] if release != manifest.get("release") else []),
        ]

    def secrets(self, number: int) -> list[str]:
        """Values of its environment that its manifest does not call plain; for taking them out of texts."""
        recorded = self.manifest(number).get("environment")
        plain = {str(name) for name in recorded} if isinstance(recorded, list) else set()
        text = self.read(number)[0].get("environment", b"").decode(errors="replace")
        return [value for name, value in read_environment(text).items() if name not in plain and value]

    def loose(self, number: int) -> list[str]:
        """Names of files whose mode or owner is not as it was written."""
        found = []
        for name, mode in MODES.items():
            try:
                stat = (self.path(number) / name).lstat()
            except OSError:
                continue
            if stat.st_mode & 0o7777 != mode or stat.st_uid != os.geteuid() or stat.st_gid != os.getegid():
                found.append(name)
        return found

    def tighten(self, number: int) -> None:
        """Give the files their modes and owner back."""
        for name in self.loose(number):
            os.chown(self.path(number) / name, os.geteuid(), os.getegid())
            os.chmod(self.path(number) / name, MODES[name])

    def manifest(self, number: int | None) -> dict[str, object]:
        """What a generation recorded of itself, empty where it cannot be read."""
        try:
            found = json.loads((self.path(number or 0) / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, content: Content) -> int:
        """Write ``content`` as the next generation and return its number; nothing links to it yet.

        Raises:
            OSError: no space or no permission; no generation is there then.
        """
        self.store.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.sweep()
        number = max(self.numbers(), default=0) + 1
        beside = Path(tempfile.mkdtemp(prefix=".new-", dir=self.store))
        try:
            for name, text in content.files(number).items():
                descriptor = os.open(beside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as stream:
                    os.fchmod(stream.fileno(), MODES[name])
                    stream.write(text)
                    stream.flush()
                    os.fsync(stream.fileno())
            (beside / "release").symlink_to(content.release)
            beside.chmod(0o755)
            sync_directory(beside)
            beside.rename(self.path(number))
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync_directory(self.store)
        return number

    def activate(self, number: int) -> None:
        """Make ``number`` the generation that shall run, by one rename."""
        replace_link(self.directory / "current", f"generations/{number}")

    def mark_ready(self, number: int) -> None:
        """Record that ``number`` answered a completion, and which one did before it."""
        before = self.ready()
        if before == number:
            return
        # A run that dies between the two leaves both links at the same generation, and the next one goes on.
        if before is not None:
            replace_link(self.directory / "previous", f"generations/{before}")
        replace_link(self.directory / "ready", f"generations/{number}")

    def sweep(self) -> None:
        """Remove what a killed run left half written."""
        if self.store.is_dir():
            for path in self.store.glob(".new-*"):
                shutil.rmtree(path)
        if self.directory.is_dir():
            for pattern in (".current.*", ".ready.*", ".previous.*"):
                for path in self.directory.glob(pattern):
                    path.unlink()

    def superfluous(self, keep: int, new: int | None = None) -> list[int]:
        """What prune() would remove, also once ``new`` was written, activated and ready."""
        numbers = [*self.numbers(), *([] if new is None or new in self.numbers() else [new])]
        kept = {self.current(), self.ready(), self._linked("previous"), *numbers[-keep:]}
        if new is not None and new != self.ready():
            kept = {new, self.ready(), *numbers[-keep:]}
        return [number for number in numbers if number not in kept]

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest ``keep`` generations, the current one and the last two that were ready."""
        gone = self.superfluous(keep)
        for number in gone:
            # Renamed first: a number that exists is always whole.
            beside = self.store / f".new-gone-{number}"
            self.path(number).rename(beside)
            shutil.rmtree(beside)
        return gone


def _sha256(content: bytes | None) -> str:
    return "" if content is None else sha256_bytes(content)


def described(
    files: Mapping[str, bytes], release: str, shown: frozenset[str], hidden_as: Mapping[str, str]
) -> dict[str, str]:
    """Files as a person may see them: every variable's value is hidden unless its name is in ``shown``.

    Args:
        hidden_as: what to write for a hidden name, HIDDEN where it is not in it.
    """
    texts = {"release": f"{release}\n" if release else ""}
    for name in ("serve.yaml", "unit"):
        texts[name] = files.get(name, b"").decode(errors="replace")
    variables = read_environment(files.get("environment", b"").decode(errors="replace"))
    texts["environment"] = "".join(
        f"{name}={variables[name] if name in shown else hidden_as.get(name, HIDDEN)}\n" for name in sorted(variables)
    )
    return texts


def differences(
    before: tuple[Mapping[str, bytes], str], manifest: Mapping[str, object], content: Content, number: int
) -> list[dict[str, str]]:
    """Ansible diffs between a generation on the host and the next one, with no secret in them.

    A value of the old file is shown only where its manifest says it was no secret and it is none now.
    """
    recorded = manifest.get("environment")
    plain = {name for name in recorded if isinstance(name, str)} if isinstance(recorded, list) else set()
    old = described(before[0], before[1], frozenset(plain - set(content.secrets)), {})
    was = read_environment(before[0].get("environment", b"").decode(errors="replace"))
    changed = {
        name: "(hidden, changed)" for name, value in content.secrets.items() if name in was and was[name] != value
    }
    new = described(
        content.files(number), content.release, frozenset({*content.environment, GENERATION_VARIABLE}), changed
    )
    return [
        {"before_header": name, "after_header": name, "before": old[name], "after": new[name]}
        for name in ("serve.yaml", "environment", "release", "unit")
        if old[name] != new[name]
    ]


def changed_names(before: tuple[Mapping[str, bytes], str], content: Content) -> str:
    """What a generation on the host and the next one differ in, by names: never a value, which may be a secret.

    Names of arguments, of environment variables and of the unit's settings, and the releases' ids; for a reason in one
    line, such as ``serve max-num-seqs; release 0.28.0-cpu-1f3a9c2e -> 0.31.0-cpu-0badcafe``.
    """
    ids = [release.rstrip("/").rpartition("/")[2] for release in (before[1], content.release)]
    files = [
        {name: one.get(name, b"").decode(errors="replace") for name in MODES} for one in (before[0], content.files(0))
    ]
    parts = []
    for title, name, read in (
        ("serve", "serve.yaml", _argument_lines),
        ("environment", "environment", read_environment),
        ("unit", "unit", _setting_lines),
    ):
        was, will = (read(one[name]) for one in files)
        if ids[0]:  # paths that hold the release's id follow from it
            was = {key: value.replace(ids[0], ids[1]) for key, value in was.items()}
        changed = sorted(key for key in {*was, *will} - {GENERATION_VARIABLE} if was.get(key) != will.get(key))
        if changed:
            parts.append(f"{title} {', '.join(changed)}")
    if before[1] != content.release:
        parts.append(f"release {ids[0] or 'none'} -> {ids[1]}")
    return "; ".join(parts)


def _argument_lines(text: str) -> dict[str, str]:
    """Each argument of a serve.yaml as serve_config writes it, one a line, with its lines."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if not line.startswith(": "):  # the value of a long key stands on a line of its own
            key = line.removeprefix("? ").lstrip('"')
            name = re.split('[=":]', key, maxsplit=1)[0].removeprefix("no-")
        found[name] = found.get(name, "") + line + "\n"
    return found


def _setting_lines(text: str) -> dict[str, str]:
    """Each setting of a unit with its lines; comments are none."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, mark, _value = line.partition("=")
        if mark and not line.startswith("#"):
            found[name] = found.get(name, "") + line + "\n"
    return found
