# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this logic runs without an AnsibleModule and its run_command
"""What a release's own vLLM says to a serve.yaml, asked in the unit's sandbox while the instance serves on.

A mistyped flag found by the start itself costs the outage of two model loads: the failed one and the way back.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from .generation import Content
from .systemd_unit import SystemdError, lines_that_matter, sandbox

DIRECTORY = Path("/run/onprem-vllm")
REFUSED, UNKNOWN = 2, 3
_FLAG = re.compile(r"--([a-z0-9][a-z0-9_.-]*)")


def check_arguments(name: str, content: Content, number: int, program: str, bound_s: float) -> tuple[str, str]:
    """Let the generation's own vLLM read its serve.yaml, as the service user with the generation's environment.

    Args:
        program: text of the program that asks (roles/vllm_service/files/check_arguments.py).
        bound_s: seconds it may take; importing vLLM from a cold disk takes a minute.

    Returns:
        (refusal, doubt): why it cannot be started with these; why that is not known. Both empty where it is accepted.

    Raises:
        SystemdError: systemd did not run the check at all.
    """
    place = DIRECTORY / f"check-{name}"
    # Files of a killed run among them; /run is memory, so that no secret reaches a disk here.
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o755, parents=True)
    try:
        files = content.files(number)
        for file, text, mode in (
            ("environment", files["environment"], 0o400),
            ("serve.yaml", files["serve.yaml"], 0o444),
            ("check.py", program.encode(), 0o444),
        ):
            descriptor = os.open(place / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                os.fchmod(stream.fileno(), mode)
                stream.write(text)
        return _asked(name, content, place, bound_s)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _asked(name: str, content: Content, place: Path, bound_s: float) -> tuple[str, str]:
    unit = f"onprem-vllm-check-{name}.service"
    words = ["systemd-run", "--quiet", "--pipe", "--wait", "--collect", "--no-ask-password", f"--unit={unit}"]
    for setting in [
        *sandbox(content.unit),
        f"EnvironmentFile={place}/environment",
        f"RuntimeMaxSec={bound_s:.0f}",
    ]:
        words += ["--property", setting]
    words += [f"{content.release}/bin/python", "-I", f"{place}/check.py", f"{place}/serve.yaml"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=bound_s + 60,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        subprocess.run(["systemctl", "kill", "--signal=KILL", unit], capture_output=True, check=False, timeout=60)
        return "", f"no answer after {bound_s:.0f} s"
    except OSError as error:
        raise SystemdError(f"systemd-run cannot be run ({error.strerror})") from error
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("usage: ")]
    if done.returncode == 0:
        return "", ""
    quoted = "".join(f"\n  {line}" for line in lines_that_matter(said, 8)) or f"\n  (status {done.returncode})"
    return (quoted, "") if done.returncode == REFUSED else ("", quoted)


def remedy(refusal: str) -> str:
    """What to do about a refusal, naming the arguments that vLLM's last line names."""
    flags = sorted(set(_FLAG.findall(refusal.rpartition("error: ")[2])))
    which = f"`{'`, `'.join(flags)}`" if flags else "what it names"
    return (
        f"Correct {which} below `serve` (onprem.vllm.plan shows which variable it comes from), or use a release that"
        " knows it."
    )
