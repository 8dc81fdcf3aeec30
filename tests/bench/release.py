# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How long releases take, each beside the `cp -a` of the same files in the same pass. Prints; asserts nothing.

    sudo .venv/bin/python tests/bench/release.py [--bundle .cache/bundle] [--passes 5] [--pip]

A pass: cold install over HTTP, copy, nothing to do (what a second instance of the same release costs), another release
of the same wheels, as a patch makes one, and another version of vLLM, first with its own packages yet to come and then
with a warm cache. Each step runs in a process of its own, in the host's Python, as the module does.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

COLLECTIONS = Path(__file__).resolve().parents[2] / ".collections"
sys.path.insert(0, str(COLLECTIONS))

from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import load_release, load_uv  # noqa: E402
from packaging.version import Version  # noqa: E402

TWIN = "-of-the-same-wheels"

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

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.replace(TWIN, ""))


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
    """uv and the releases of vLLM without a GPU that a bundle holds, as a plan has them, in the order of versions."""
    found = [load_release(folder.name.rpartition("-")[0]) for folder in (bundle / "releases").iterdir()]
    releases = sorted((one for one in found if one.vllm and one.variant == "cpu"), key=lambda one: Version(one.version))
    if gone := [one.id for one in found if not (bundle / "releases" / one.id).is_dir()]:
        sys.exit(f"The bundle has other releases than the catalogue's {', '.join(gone)}: make bundle")
    if len(releases) < 2:
        sys.exit(
            f"The bundle has {len(releases)} release of vLLM without a GPU, and two are compared: make bundle-upgrade"
        )
    uv = load_uv()
    return {"version": uv["version"], **uv["wheels"]["x86_64"]}, [one.as_plan() for one in releases]


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
            twin = {**releases[0], "name": releases[0]["name"] + TWIN, "id": releases[0]["id"] + TWIN}
            row["second, same wheels"] = step({**call, "release": twin})["total"]
            first, both = mebibytes(root, releases[:1]), mebibytes(root, [releases[0], twin])
            row["MiB of the first release"], row["MiB that the same adds"] = first, both - first
            shutil.rmtree(root / "releases" / twin["id"])
            warm = step({**call, "release": releases[1]})
            row["second, another vLLM"] = warm["total"]
            row["... its new packages"] = warm["seconds"]["install"] + warm["seconds"]["bytecode"]
            row["... all the rest"] = row["second, another vLLM"] - row["... its new packages"]
            row["MiB that the other adds"] = mebibytes(root, releases[:2]) - first
            shutil.rmtree(root / "releases" / releases[1]["id"])
            again = step({**call, "release": releases[1]})
            row["second, cache warm"] = again["total"]
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
