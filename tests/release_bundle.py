# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A small real bundle for the tests of releases: wheels of a few files, an index, locks and the real uv, on disk.

Run as a program it writes the bundle of molecule/uv_venv, and beside it the plan's slice as JSON:
``python tests/release_bundle.py <directory>``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

UV_VERSION = "0.13.9"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(
    directory: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    scripts: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
    wrong_record: str | None = None,
    unlisted: Mapping[str, bytes] | None = None,
) -> Path:
    """A wheel as a build backend would make it.

    Args:
        scripts: console scripts, name -> ``module:function``.
        wrong_record: a path whose RECORD line shall be false.
        unlisted: files that the wheel holds without naming them in RECORD.
    """
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    content = dict(files)
    content[f"{info}/METADATA"] = "".join(
        [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", *(f"Requires-Dist: {one}\n" for one in requires)]
    ).encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if scripts:
        lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
        content[f"{info}/entry_points.txt"] = f"[console_scripts]\n{lines}".encode()
    record = ""
    for path, data in content.items():
        digest = hashlib.sha256(data + (b"!" if path == wrong_record else b"")).digest()
        record += f"{path},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(data)}\n"
    record += f"{info}/RECORD,,\n"
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path, data in {**content, f"{info}/RECORD": record.encode(), **(unlisted or {})}.items():
            member = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o100644 << 16
            zipped.writestr(member, data)
    return wheel


def make_uv_wheel(directory: Path, program: Path, version: str = UV_VERSION) -> Path:
    """A wheel around the uv that is installed here, as its own wheel has it."""
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"uv-{version}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as zipped:
        zipped.write(program, f"uv-{version}.data/scripts/uv")
    return wheel


def write_lock(bundle: Path, release: str, wheels: Sequence[Path], **more: Any) -> dict[str, Any]:
    """Put a lock of these wheels into the bundle; returns the release as a plan has it."""
    lines = []
    for wheel in sorted(wheels):
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{sha256(wheel.read_bytes())}\n")
    lock = "".join(lines).encode()
    release_id = f"{release}-{sha256(lock + json.dumps(more, sort_keys=True).encode())[:8]}"
    target = bundle / "releases" / release_id / "requirements.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lock)
    entry = {"name": release, "id": release_id, "vllm": "0.0.1", "variant": "cpu", "python": "3.11"}
    return {**entry, "lock_sha256": sha256(lock), "interpreter": None, "overlaps": [], **more}


def write_index(bundle: Path) -> None:
    """The simple index over the bundle's wheels, and its manifest."""
    shutil.rmtree(bundle / "simple", ignore_errors=True)
    projects: dict[str, list[Path]] = {}
    for wheel in sorted((bundle / "wheels").glob("*.whl")):
        projects.setdefault(re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower(), []).append(wheel)
    for project, wheels in projects.items():
        folder = bundle / "simple" / project
        folder.mkdir(parents=True)
        links = "".join(
            f'<a href="../../wheels/{wheel.name}#sha256={sha256(wheel.read_bytes())}">{wheel.name}</a>\n'
            for wheel in wheels
        )
        (folder / "index.html").write_text(f"<!DOCTYPE html>\n<html><body>\n{links}</body></html>\n")
    files = {
        str(path.relative_to(bundle)): {"sha256": sha256(path.read_bytes()), "size": path.stat().st_size}
        for path in sorted(bundle.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    (bundle / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


def flip_byte(path: Path, offset: int = -30) -> None:
    """Change one byte of a file, as a bad cable or disk does; its size stays."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def small_bundle(bundle: Path, uv_program: Path) -> dict[str, Any]:
    """Two releases: ``small`` (with two wheels claiming one path), and ``next``, where one of its wheels is newer.

    Returns uv and the releases, as a plan has them.
    """
    wheels = bundle / "wheels"
    uv = make_uv_wheel(wheels, uv_program)
    engine = {"engine/__init__.py": b"from shared import value\n\n\ndef main():\n    print('engine', value)\n"}
    engine |= {f"engine/part{number}.py": f"NUMBER = {number}\n".encode() * 50 for number in range(40)}
    one = make_wheel(wheels, "engine", "1.0", engine, scripts={"engine": "engine:main"}, requires=["libs-base"])
    two = make_wheel(
        wheels, "engine", "2.0", {**engine, "engine/new.py": b"NEW = 1\n"}, scripts={"engine": "engine:main"}
    )
    base = make_wheel(
        wheels, "libs-base", "1.0", {"shared/__init__.py": b"value = 'base'\n", "base_only.py": b"x = 1\n"}
    )
    cuda = make_wheel(
        wheels, "libs-cu13", "1.0", {"shared/__init__.py": b"value = 'cu13'\n", "cuda_only.py": b"x = 2\n"}
    )
    overlaps = [{"winner": "libs-cu13", "loser": "libs-base"}]
    releases = {
        "small": write_lock(bundle, "small", [one, base, cuda], overlaps=overlaps),
        "next": write_lock(bundle, "next", [two, base, cuda], overlaps=overlaps),
        "unsettled": write_lock(bundle, "unsettled", [one, base, cuda]),
    }
    write_index(bundle)
    pinned = {"version": UV_VERSION, "file": uv.name, "sha256": sha256(uv.read_bytes())}
    return {"uv": pinned, "releases": releases}


if __name__ == "__main__":
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        sys.exit("uv is not installed here: pip install -r tests/requirements.txt")
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.with_suffix(".json").write_text(json.dumps(small_bundle(target, Path(found))))
