# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""Programs that a look at a host asks: none hangs it, none fails it, and each answers in the same language."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

# A driver that hangs (a GPU that fell off the bus) must not hold the play: it is a finding.
COMMAND_TIMEOUT_S = 20.0
ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
# Whatever a host's own files and programs may answer with: the part that was looked at is then unknown, with a reason.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, ArithmeticError)


def run(*command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Status, output and errors of a command; 127 where the program is missing, 124 where it did not end in time.

    Args:
        environment: laid over the plain one that every command gets.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            env={**ENVIRONMENT, **(environment or {})},
            check=False,
        )
    except FileNotFoundError:
        return 127, "", f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as error:
        return 126, "", str(error)
    return done.returncode, done.stdout, done.stderr.strip()


def text_of(path: Path) -> str | None:
    """The content of a small file without the blanks around it; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
