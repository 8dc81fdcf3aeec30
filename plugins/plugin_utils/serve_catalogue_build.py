# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""catalogue/serve/<version>.json from a real wheel: ``make catalogue VERSION=0.33.0``.

The parser of ``vllm serve`` is Python. So the Python of any wheel, one for CUDA too, runs in an environment that has
the closure of a CPU release: the wheel's code lies in front of it. The result is the same as from an environment of
that very version (a test compares for one).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .catalogue import COLLECTION

FOLDER = COLLECTION / "catalogue" / "serve"


class CatalogueBuildError(RuntimeError):
    """vLLM's parser could not be asked; the message ends with what it said."""


def dump_serve(python: Path, code: Sequence[Path] = ()) -> dict[str, Any]:
    """What the vLLM of a Python accepts.

    Args:
        python: interpreter of an environment with vLLM's closure.
        code: directories in front of its packages, such as an unpacked wheel.

    Raises:
        CatalogueBuildError: vLLM or something that it imports is missing or broken there.
    """
    # -P: the dump's own directory must not be searched, its neighbours are named like standard modules.
    command = [str(python.absolute()), "-P", str(Path(__file__).with_name("serve_dump.py"))]
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": "/usr/bin:/bin", "HOME": home, "PYTHONPATH": ":".join(str(one) for one in code)}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=home)
    if ended.returncode:
        raise CatalogueBuildError(f"{python}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout)


def unpack_code(wheel: Path, folder: Path) -> None:
    """A wheel's Python files and metadata, without its compiled parts."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [name for name in opened.namelist() if not name.endswith(".so")])


def catalogue_text(version: str, dumped: Mapping[str, Any]) -> str:
    """The file's text: sorted, a flag or a name table a line, so that a diff of two versions is readable."""

    def compact(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    lines = [f'{{\n"vllm": {compact(version)},\n"flags": {{']
    flags = sorted(dumped["flags"].items())
    lines += [f"{compact(name)}: {compact(flag)}{',' * (name != flags[-1][0])}" for name, flag in flags]
    lines.append("},")
    rest = sorted(key for key in dumped if key != "flags")
    lines += [f"{compact(key)}: {compact(dumped[key])}{',' * (key != rest[-1])}" for key in rest]
    return "\n".join([*lines, "}\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file of one version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("wheel", type=Path, help="the wheel of that version")
    parser.add_argument("--python", type=Path, required=True, help="of an environment with a CPU release's closure")
    parser.add_argument("--also", type=Path, help="directory with packages that the version imports besides")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        unpack_code(given.wheel, Path(folder))
        dumped = dump_serve(given.python, [Path(folder), *([given.also.absolute()] if given.also else [])])
    FOLDER.mkdir(exist_ok=True)
    target = FOLDER / f"{given.version}.json"
    target.write_text(catalogue_text(given.version, dumped), encoding="utf-8")
    sys.stdout.write(f"{target.relative_to(COLLECTION)}: {len(dumped['flags'])} flags\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
