# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Lets a release's own vLLM read a serve.yaml, before anything is stopped for it; run by that release's Python.

``check_arguments.py FILE`` does what ``vllm serve --config FILE`` does up to the point where a model is loaded.
Status 0: accepted. 2: refused, or the release's vLLM cannot be imported. 3: this vLLM has its parser elsewhere, so
nothing can be said. The last lines on stderr say why.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

REFUSED, UNKNOWN = 2, 3
# The parser's place, the same from 0.25.0 to 0.33.0.
PLACES = frozenset(
    {
        "vllm.entrypoints",
        "vllm.entrypoints.cli",
        "vllm.entrypoints.cli.serve",
        "vllm.utils",
        "vllm.utils.argparse_utils",
    }
)


def main(path: str) -> int:
    """The status, see above; argparse itself ends with 2."""
    try:
        import vllm.platforms  # noqa: PLC0415 - what fails here is an answer

        if not _has_gpu() and vllm.platforms.current_platform.is_unspecified():
            # A CUDA build cannot name a device where there is none, and its parser wants one for its defaults.
            from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

            vllm.platforms._current_platform = CpuPlatform()
        from vllm.entrypoints.cli.serve import cmd_init  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    except ImportError as error:
        return _said(error, UNKNOWN if error.name in PLACES else REFUSED)
    except Exception as error:  # noqa: BLE001 - whatever a broken release raises, it would raise at its start
        return _said(error, REFUSED)
    parser = FlexibleArgumentParser(prog="vllm")
    commands = parser.add_subparsers(dest="subparser")
    serve = {command.name: command for command in cmd_init()}["serve"]
    try:
        serve.subparser_init(commands)
        serve.validate(parser.parse_args(["serve", "--config", path]))
    except Exception as error:  # noqa: BLE001 - vLLM's checks across arguments raise what they like
        return _said(error, REFUSED)
    return 0


def _has_gpu(devices: Path = Path("/dev")) -> bool:
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def _said(error: BaseException, status: int) -> int:
    traceback.print_exception(error, limit=-1)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
