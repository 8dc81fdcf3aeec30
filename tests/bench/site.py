# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How long an unchanged site.yml takes beside a bare ping play, in the same pass. Figures and ratios, no verdict.

Needs the demo's hosts, rolled out (`make demo`). Run from the checkout's root.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PING = """
- hosts: "{hosts}"
  gather_facts: false
  tasks:
    - ansible.builtin.ping:
"""


def play(playbook: str, hosts: str) -> float:
    """Seconds one run takes; ends the bench where it fails or changes something."""
    begin = time.monotonic()
    done = subprocess.run(
        ["ansible-playbook", "-i", "inventory/lab", playbook, "--limit", hosts],
        check=False,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - begin
    if done.returncode != 0 or re.search(r"changed=[1-9]", done.stdout):
        sys.exit(f"{playbook} on {hosts} failed or changed something; roll out first: make demo\n{done.stdout[-3000:]}")
    return seconds


def main() -> None:
    """Measure one serving host, then all of them with the mirror."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--passes", type=int, default=3)
    passes = arguments.parse_args().passes
    with tempfile.TemporaryDirectory() as folder:
        ping = Path(folder) / "ping.yml"
        medians: dict[tuple[str, str], float] = {}
        for hosts in ("glm1", "vllm", "all"):
            ping.write_text(PING.format(hosts=hosts), encoding="utf-8")
            times: dict[str, list[float]] = {"ping": [], "site.yml": []}
            for number in range(passes):
                print(f"{hosts}: pass {number + 1} of {passes}", file=sys.stderr)
                times["ping"].append(play(str(ping), hosts))
                times["site.yml"].append(play("site.yml", hosts))
            for what, seconds in times.items():
                medians[hosts, what] = statistics.median(seconds)
    print("hosts | ping, s | site.yml unchanged, s | ratio")
    for hosts in ("glm1", "vllm", "all"):
        bare, whole = medians[hosts, "ping"], medians[hosts, "site.yml"]
        print(f"{hosts} | {bare:.2f} | {whole:.2f} | {whole / bare:.1f}")
    print(f"two serving hosts against one: {medians['vllm', 'site.yml'] / medians['glm1', 'site.yml']:.2f}")


if __name__ == "__main__":
    main()
