# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""uv, the interpreter and the virtual environment of a release, from the mirror alone."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .download import MENDED_BY_PUBLISHING, DownloadError, download
from .record import hash_files, normalise
from .release_bytecode import compile_bytecode
from .release_manifest import (
    ManifestError,
    compare_by_hash,
    compare_by_stat,
    read_manifest,
    take_manifest,
    walk,
)
from .venv_process import LIBC, DiskFull, VenvError, clean_environment, flush_behind, run

# Modules that Debian and Ubuntu leave out of pythonX.Y-minimal and that vLLM's closure imports.
_STDLIB = ("asyncio", "bz2", "ctypes", "lzma", "multiprocessing", "sqlite3", "ssl", "sysconfig", "zlib")


class WheelDamaged(VenvError):
    """A wheel on the mirror is not the one that the release locked."""


@dataclass(frozen=True)
class Pinned:
    """A file of the mirror with the hash that it must have."""

    file: str
    sha256: str


def for_machine(spec: Mapping[str, Any], machine: str | None = None) -> Pinned:
    """This host's file out of ``{file, sha256}`` or, by processor, ``{wheels|archives: {<machine>: {file, sha256}}}``.

    Raises:
        VenvError: there is none for it.
    """
    wanted = machine or platform.machine()
    by_machine = spec.get("wheels") or spec.get("archives")
    chosen = by_machine.get(wanted) if by_machine else spec
    if not chosen or not chosen.get("file") or not chosen.get("sha256"):
        have = ", ".join(sorted(by_machine)) if by_machine else "none"
        raise VenvError(f"no file for processor {wanted} is named (there are: {have}); name its file and sha256")
    if PurePosixPath(chosen["file"]).name != chosen["file"]:
        raise VenvError(f"{chosen['file']!r} is not a file name")
    return Pinned(chosen["file"], chosen["sha256"])


def tree_problems(root: Path, *, full: bool) -> list[str]:
    """What is wrong with a tree that carries its manifest; empty when it is whole."""
    try:
        manifest = read_manifest(root)
    except ManifestError as error:
        return [str(error)]
    return compare_by_hash(root, manifest) if full else compare_by_stat(root, manifest)


def install_uv(mirror_url: str, version: str, wheel: Pinned, directory: Path) -> None:
    """Put uv at ``directory``/uv, out of its wheel; whole or absent.

    Raises:
        VenvError: the wheel cannot be had, is another one, or holds no uv.
    """
    building = _fresh(directory)
    try:
        archive = building / wheel.file
        _fetch(f"{mirror_url}/wheels/{wheel.file}", archive, wheel.sha256)
        with zipfile.ZipFile(archive) as zipped:
            member = f"uv-{version}.data/scripts/uv"
            try:
                source = zipped.open(member)
            except KeyError:
                raise VenvError(f"{wheel.file} holds no {member}: is it the wheel of uv {version}?") from None
            with source, (building / "uv").open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                os.fchmod(target.fileno(), 0o755)
        archive.unlink()
        said = run([building / "uv", "--version"], clean_environment()).strip()
        if said.split(" ")[1:2] != [version]:
            raise VenvError(f"{wheel.file} holds {said!r}, not uv {version}")
        _seal(building, directory, {"uv": version, "wheel": {"file": wheel.file, "sha256": wheel.sha256}})
    finally:
        shutil.rmtree(building, ignore_errors=True)


def find_python(version: str) -> Path:
    """The host's Python of this version, with the whole standard library.

    Raises:
        VenvError: there is none; the message names the package.
    """
    tried = []
    for folder in ("/usr/bin", "/usr/local/bin"):
        candidate = Path(folder, f"python{version}")
        if candidate.exists():
            fault = python_fault(candidate, version)
            if fault is None:
                return candidate
            tried.append(f"{candidate}: {fault}")
    found = "; ".join(tried) or f"there is no /usr/bin/python{version}"
    raise VenvError(
        f"Python {version} is not on this host ({found}). Install the package python{version}, "
        "or give the release an interpreter archive."
    )


def python_fault(python: Path, version: str) -> str | None:
    """Why this is not a usable Python of that version; None when it is."""
    code = (
        "import importlib, json, sys\n"
        "missing = []\n"
        f"for name in {_STDLIB!r}:\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except ImportError:\n        missing.append(name)\n"
        "json.dump([sys.version_info[:2], sys.implementation.name, missing], sys.stdout)"
    )
    try:
        number, implementation, missing = json.loads(run([python, "-I", "-B", "-c", code], clean_environment()))
    except (VenvError, ValueError) as error:
        return f"does not run ({error})"
    if implementation != "cpython" or ".".join(map(str, number)) != version:
        return f"is {implementation} {'.'.join(map(str, number))}"
    if missing:
        return f"lacks {', '.join(missing)} of the standard library (a -minimal package?)"
    return None


def install_interpreter(mirror_url: str, version: str, archive: Pinned, directory: Path) -> None:
    """Unpack an interpreter archive (python-build-standalone, ``install_only``) to ``directory``; whole or absent.

    Raises:
        VenvError: the archive cannot be had, is another one, is unsafe, or holds no Python of this version.
    """
    building = _fresh(directory)
    try:
        fetched = building / archive.file
        _fetch(f"{mirror_url}/python/{archive.file}", fetched, archive.sha256)
        unpack(fetched, building)
        fetched.unlink()
        python = building / "bin" / f"python{version}"
        fault = python_fault(python, version) if python.exists() else f"holds no bin/python{version}"
        if fault is not None:
            raise VenvError(f"{archive.file}: {fault}")
        # Compiled now: root's first use of it would write bytecode into a tree that nobody changes.
        library = building / "lib" / f"python{version}"
        compile_bytecode(python, library, [found[1] for found in walk(library) if found[1].endswith(".py")])
        _seal(building, directory, {"python": version, "archive": {"file": archive.file, "sha256": archive.sha256}})
    finally:
        shutil.rmtree(building, ignore_errors=True)


def unpack(archive: Path, directory: Path) -> None:
    """Unpack a tar file without its first folder; nothing lands outside ``directory``, nothing is setuid or a device.

    tarfile's own filter does this too, but only from Python 3.11.4, and Debian 12 has 3.11.2.

    Raises:
        VenvError: the archive is damaged or unsafe.
    """
    inside = directory.resolve()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts[1:]
                if not parts:
                    continue
                if ".." in parts:
                    raise VenvError(f"{archive.name} has an unsafe member {member.name!r}")
                target = directory.joinpath(*parts)
                if not _within(target.parent, inside):
                    raise VenvError(f"{archive.name} has an unsafe member {member.name!r}")
                target.parent.mkdir(parents=True, exist_ok=True)
                if member.isdir():
                    target.mkdir(exist_ok=True)
                elif member.issym():
                    if os.path.isabs(member.linkname) or not _within(target.parent / member.linkname, inside):
                        raise VenvError(f"{archive.name}: {member.name} is a link to {member.linkname!r}")
                    target.symlink_to(member.linkname)
                elif member.islnk():
                    origin = directory.joinpath(*PurePosixPath(member.linkname).parts[1:])
                    if ".." in PurePosixPath(member.linkname).parts or not _within(origin, inside):
                        raise VenvError(f"{archive.name}: {member.name} is a link to {member.linkname!r}")
                    os.link(origin, target, follow_symlinks=False)
                elif member.isreg():
                    stream = tar.extractfile(member)
                    if stream is None:
                        raise VenvError(f"{archive.name}: {member.name} has no content")
                    # "x": a member that names a path a second time could write through a link made by the first.
                    with stream, target.open("xb") as out:
                        shutil.copyfileobj(stream, out, 1 << 20)
                        os.fchmod(out.fileno(), 0o755 if member.mode & 0o111 else 0o644)
                else:
                    raise VenvError(f"{archive.name}: {member.name} is neither file, folder nor link")
    except (tarfile.TarError, EOFError, FileExistsError) as error:
        raise VenvError(f"{archive.name} cannot be unpacked: {error}") from error


def _within(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory)


def _fresh(directory: Path) -> Path:
    """An empty folder beside ``directory``, which an earlier run may have left half filled."""
    building = directory.with_name(f".building-{directory.name}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    return building


def _seal(building: Path, directory: Path, about: dict[str, Any]) -> None:
    """Write the manifest of a finished tree and put it into its place."""
    paths = [path for _unused, path, entry in walk(building) if entry is not None and not entry.is_symlink()]
    manifest = take_manifest(building, {path: found["sha256"] for path, found in hash_files(building, paths)}, about)
    manifest.write(building)
    put_in_place(building, directory)


def put_in_place(building: Path, directory: Path) -> None:
    """Give a finished tree its name by one rename; what had that name before is removed after.

    Raises:
        OSError: the rename failed; both trees are as they were.
    """
    if directory.exists():
        exchange(building, directory)
        remove_tree(building)
    else:
        os.rename(building, directory)
    flush_behind(directory)


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two directories at once, so that at every moment one of them stands at each.

    Raises:
        OSError: the file system cannot.
    """
    at_fdcwd, rename_exchange = -100, 2
    if LIBC.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))


def remove_tree(directory: Path) -> None:
    """Remove a tree; its name goes first, so that a half removed one never passes for whole.

    Raises:
        OSError: something in it cannot be removed.
    """
    if not directory.name.startswith("."):
        doomed = directory.with_name(f".removing-{directory.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(directory, doomed)
        directory = doomed
    shutil.rmtree(directory)


def _fetch(url: str, destination: Path, sha256: str) -> None:
    try:
        download(url, destination, sha256)
    except DownloadError as error:
        if "No space left" in str(error) or "Disk quota" in str(error):
            raise DiskFull(str(error)) from error
        raise VenvError(f"{error}. {error.mirror_remedy}") from error


@dataclass(frozen=True)
class Uv:
    """uv with everything that it may use: the mirror, its cache, one environment."""

    program: Path
    mirror_url: str
    cache: Path
    proxy: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        more = {
            "HOME": os.fspath(self.cache / ".home"),  # uv makes folders there, unasked
            "UV_CACHE_DIR": os.fspath(self.cache),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_CONFIG": "1",
            "UV_NO_PROGRESS": "1",
            "UV_LINK_MODE": "hardlink",
            "UV_SYSTEM_CERTS": "1",  # a mirror behind the site's own certificate authority
            "UV_HTTP_TIMEOUT": "60",
        }
        if self.proxy:
            more |= {"HTTP_PROXY": self.proxy, "HTTPS_PROXY": self.proxy}
        return clean_environment(**more)

    def make_venv(self, directory: Path, python: Path, prompt: str) -> None:
        """An empty environment that survives being renamed.

        Raises:
            VenvError: uv refused.
        """
        self._run("venv", "--relocatable", "--prompt", prompt, "--python", python, directory)

    def install(self, venv: Path, requirements: Path) -> None:
        """Install what is missing of a lock: nothing is resolved, nothing is built, every wheel has its hash.

        Raises:
            WheelDamaged: a wheel is not the locked one.
            DiskFull: no room.
            VenvError: anything else, the mirror's absence included.
        """
        words: list[str | os.PathLike[str]] = ["--python", venv / "bin" / "python", "--require-hashes", "--no-deps"]
        words += ["--no-build", "--default-index", f"{self.mirror_url}/simple/", "--requirements", requirements]
        self._run("pip", "install", *words)
        (venv / ".lock").unlink(missing_ok=True)  # uv's, 0666, of use only while uv runs

    def unpack_again(self, venv: Path, requirements: Path, packages: Sequence[str]) -> None:
        """Write packages anew, over what other wheels left in their paths.

        Not by ``--reinstall-package``: that fetches the wheel again as well, and its files are then no links to those
        of other releases any more.

        Raises:
            VenvError: as ``install``.
        """
        self._run("pip", "uninstall", "--python", venv / "bin" / "python", *packages)
        self.install(venv, requirements)

    def unmet(self, venv: Path) -> list[str]:
        """What installed packages require and do not find, in uv's words.

        No failure: a lock may leave requirements out on purpose (the overrides of a release: 0.28.0-cpu has no
        torchvision), and it was resolved where the indexes are.
        """
        words = ["pip", "check", "--python", os.fspath(venv / "bin" / "python")]
        try:
            run([self.program, *words], self.environment, cwd=Path("/"))
        except VenvError as error:
            return [line for line in str(error).splitlines() if line.startswith("The package ")]
        return []

    def forget(self, packages: Sequence[str]) -> None:
        """Drop packages from the cache, so that the next install fetches them anew."""
        if packages:
            self._run("cache", "clean", *packages)

    def prune(self) -> None:
        """Drop from the cache what belongs to nothing: archives unpacked when no room was left to note whose."""
        self._run("cache", "prune")

    def _run(self, *words: str | os.PathLike[str]) -> None:
        try:
            run([self.program, *words], self.environment, cwd=Path("/"))
        except VenvError as error:
            raise _explained(str(error), self.mirror_url) from error


_DOWNLOAD_FAILED = re.compile(r"Failed to (?:download|prepare distributions|fetch|extract)[^`]*`([^`=\s]+)==([^`\s]+)`")


def _explained(said: str, mirror_url: str) -> VenvError:
    """uv's message as one that names the wheel or the mirror and the remedy."""
    causes = " ".join(said.removeprefix("error:").split())
    if "No space left on device" in said or f"os error {errno.EDQUOT}" in said:
        return DiskFull(causes)
    wheel = _DOWNLOAD_FAILED.search(said)
    named = f"{normalise(wheel[1])} {wheel[2]}" if wheel else None
    if named and ("Hash mismatch" in said or "extract" in said or "CRC" in said or "unzip" in said):
        expected, computed = (re.search(rf"{word}:\s+sha256:(\w+)", said) for word in ("Expected", "Computed"))
        hashes = f" (sha256 {computed[1]}, expected {expected[1]})" if expected and computed else f" ({causes})"
        return WheelDamaged(
            f"The wheel of {named} on {mirror_url} is not the one that the release locked{hashes}. "
            + MENDED_BY_PUBLISHING
        )
    if "error sending request" in said or "tcp connect" in said or "timed out" in said or "dns error" in said:
        return VenvError(f"The mirror {mirror_url} does not answer: {causes}. Start it and run again.")
    if named or "not found in the package registry" in said:
        return VenvError(f"The mirror {mirror_url} does not give {named or 'a package'}: {causes}")
    return VenvError(causes)


def writable_by_others(root: Path) -> list[str]:
    """Paths that more than their owner may write; a release must have none."""
    return [
        path
        for _unused, path, entry in walk(root)
        if not (entry is not None and entry.is_symlink())
        and os.lstat(root / path).st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ]
