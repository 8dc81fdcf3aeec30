# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How long releases take, each beside the `cp -a` of the same files in the same pass. Prints; asserts nothing.

    sudo .venv/bin/python tests/bench/release.py [--bundle .cache/bundle] [--passes 5] [--pip]

A pass: cold install over HTTP, copy, nothing to do, second release with a warm cache. Each step runs in a process of
its own, in the host's Python, as the module does.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

COLLECTIONS = Path(__file__).resolve().parents[2] / ".collections"

STEP = """
import json, sys, time
began = time.monotonic()
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from ansible_collections.onprem.vllm.plugins.module_utils import release
call = json.load(sys.stdin)
site = release.Site(Path(call["root"]), call["mirror_url"], call["uv"])
(outcome,) = release.apply(site, [release.Release.from_plan(call["release"])]).outcomes
json.dump({"state": outcome.state, "seconds": outcome.seconds, "total": time.monotonic() - began}, sys.stdout)
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_unused: Any) -> None:
        pass


def step(call: dict[str, Any]) -> dict[str, Any]:
    """Run one apply; its outcome, with ``total`` in seconds, the start of Python included."""
    began = time.monotonic()
    done = subprocess.run(
        ["/usr/bin/python3", "-c", STEP, COLLECTIONS],
        input=json.dumps(call),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return {**json.loads(done.stdout), "total": time.monotonic() - began}


def read_bundle(bundle: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """uv and the releases for this host's Python that a bundle holds."""
    wheel = next(bundle.glob("wheels/uv-*x86_64*.whl"))
    uv = {"version": wheel.name.split("-")[1], "file": wheel.name}
    uv["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    releases = []
    for folder in sorted((bundle / "releases").iterdir()):
        name = folder.name.rpartition("-")[0]
        lock = hashlib.sha256((folder / "requirements.txt").read_bytes()).hexdigest()
        if name.endswith("-cpu"):
            parts = {"vllm": name.split("-")[0], "variant": "cpu", "python": "3.11"}
            releases.append({"name": name, "id": folder.name, "lock_sha256": lock, **parts})
    return uv, releases


def mebibytes(root: Path, releases: list[dict[str, Any]]) -> float:
    """What releases take on the disk, files that they share counted once."""
    folders = [root / "releases" / release["id"] for release in releases]
    listing = subprocess.run(["du", "-sck", *folders], check=True, capture_output=True, text=True).stdout
    return int(listing.splitlines()[-1].split()[0]) / 1024


def timed(*command: str | Path) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path(".cache/bundle"))
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--pip", action="store_true", help="one pip install of the same lock beside it (minutes)")
    parser.add_argument("--work", type=Path, default=None, help="a folder on the disk to measure")
    options = parser.parse_args()
    uv, releases = read_bundle(options.bundle)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(options.bundle.resolve()))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    rows: list[dict[str, float]] = []
    for number in range(options.passes):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.work) as work:
            root = Path(work, "vllm")
            call = {"root": str(root), "mirror_url": url, "uv": uv, "release": releases[0]}
            cold = step(call)
            install = cold["total"] - cold["seconds"]["bytecode"]
            row = {"cold": install, "bytecode": cold["seconds"]["bytecode"], "record": cold["seconds"]["record"]}
            row["uv alone"] = cold["seconds"]["install"]
            row["cp -a"] = timed("cp", "-a", root / "releases" / releases[0]["id"], Path(work, "copy"))
            row["cold / cp -a"] = row["cold"] / row["cp -a"]
            shutil.rmtree(Path(work, "copy"))
            row["nothing to do"] = step(call)["total"]
            if len(releases) > 1:
                warm = step({**call, "release": releases[1]})
                row["second release"] = warm["total"]
                row["... its new packages"] = warm["seconds"]["install"] + warm["seconds"]["bytecode"]
                row["... all the rest"] = row["second release"] - row["... its new packages"]
                first, both = mebibytes(root, releases[:1]), mebibytes(root, releases[:2])
                row["MiB of the first release"], row["MiB that the second adds"] = first, both - first
                shutil.rmtree(root / "releases" / releases[1]["id"])
                again = step({**call, "release": releases[1]})
                row["second release, cache warm"] = again["total"]
                row["... its bytecode"] = again["seconds"]["bytecode"]
            if options.pip and number == 0:
                subprocess.run(["/usr/bin/python3", "-m", "venv", Path(work, "pip")], check=True)
                lock = options.bundle / "releases" / releases[0]["id"] / "requirements.txt"
                words = ["install", "--isolated", "--no-deps", "--require-hashes", "--no-compile", "--no-cache-dir"]
                row["pip"] = timed(Path(work, "pip/bin/pip"), *words, "--index-url", f"{url}/simple/", "-r", lock)
            rows.append(row)
            load = os.getloadavg()[0]
            print(
                f"pass {number + 1} (load {load:.1f}): " + ", ".join(f"{k} {v:.2f}" for k, v in row.items()), flush=True
            )
    print(f"\nmedians of {len(rows)}: seconds, MiB, and a ratio (with a stroke); target: cold / cp -a at most 1.5")
    for name in dict.fromkeys(key for row in rows for key in row):
        print(f"{name:28} {statistics.median(row[name] for row in rows if name in row):8.2f}")


if __name__ == "__main__":
    main()
