"""Run the test tiers, three at a time, each with its output in a file; show what failed, and count.

A tier is a shell command. The last line is "N passed, N failed", in tiers; the exit status is 1 if one failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LOGS = Path(".cache/test-logs")
# Tiers wait a lot (for systemd, time limits, vLLM): with two of them two cores were idle half of the time.
SIDE_BY_SIDE = int(os.environ.get("TIERS_AT_ONCE", "3"))
LINES_SHOWN = 120


def run(tier: str) -> bool:
    """Run one tier; True if it passed."""
    log = LOGS / f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', tier)}.log"
    print(f"      started  {tier}", flush=True)
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        status = subprocess.run(
            ["bash", "-c", tier], stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, check=False
        ).returncode
    seconds = time.monotonic() - begin
    counts = re.findall(r"\b(\d+) passed", log.read_text(encoding="utf-8", errors="replace"))
    tests = f", {sum(map(int, counts))} tests" if counts else ""
    print(f"{seconds:5.0f} s {'passed' if status == 0 else 'FAILED'}   {tier}{tests}", flush=True)
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(
            "\n".join(f"    | {line}" for line in lines[-LINES_SHOWN:]), f"    (all of it: {log})", sep="\n", flush=True
        )
    return status == 0


def main() -> int:
    """Run every tier named on the command line, in order, and say how many passed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        results = list(pool.map(run, sys.argv[1:]))
    print(f"{time.monotonic() - begin:5.0f} s in all")
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
