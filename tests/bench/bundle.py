# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How long a bundle takes beside `pip download` of the same lock, first and again. Figures and ratios, no verdict.

Fetches the release twice from the index (`--release 0.28.0-cpu`: 0.9 GB each). Run from the checkout's root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.onprem.vllm.plugins.plugin_utils.bundle import BundleRequest, build_bundle  # noqa: E402
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import Release, load_release  # noqa: E402
from ansible_collections.onprem.vllm.plugins.plugin_utils.wheels import build_metadata_wheel  # noqa: E402


def pip_download(release: Release, target: Path, scratch: Path) -> list[str]:
    """The command that fetches the same files with pip."""
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip is None:
        sys.exit("pip is not on PATH")
    for wheel in release.metadata_wheels:  # pip cannot find it anywhere
        name, content = build_metadata_wheel(wheel.name, wheel.version, wheel.requires)
        (scratch / name).write_bytes(content)
    platforms = [f"manylinux_2_{minor}_{release.machine}" for minor in range(release.glibc[1], 4, -1)]
    platforms += [f"{name}_{release.machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    return [
        *(pip, "download", "--quiet", "--no-cache-dir", "--no-deps", "--require-hashes", "--only-binary", ":all:"),
        *("--python-version", release.python, "--implementation", "cp", "--find-links", str(scratch)),
        *(word for platform in platforms for word in ("--platform", platform)),
        *("--dest", str(target), "--requirement", str(release.lock_path)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", default="0.28.0-cpu")
    parser.add_argument("--jobs", type=int, default=8)
    options = parser.parse_args()
    release = load_release(options.release)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        work = Path(folder)
        request = BundleRequest(work / "bundle", [release], jobs=options.jobs)
        seconds: dict[str, float] = {}

        def told(name: str, began: float) -> None:
            seconds[name] = time.monotonic() - began
            print(f"{name:28} {seconds[name]:8.2f} s, load {os.getloadavg()[0]:.1f}", flush=True)

        began = time.monotonic()
        result = build_bundle(request)
        told("bundle, first time", began)
        began = time.monotonic()
        assert not build_bundle(request).changed
        told("bundle, second time", began)

        (work / "pip").mkdir()
        (work / "built").mkdir()
        command = pip_download(release, work / "pip", work / "built")
        for name in ("pip download, first time", "pip download, second time"):
            began = time.monotonic()
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            told(name, began)
        ours = {path.name for path in (work / "bundle" / "wheels").glob("*.whl")}
        theirs = {path.name for path in (work / "pip").glob("*.whl")}
        print(f"{release.name}: {len(ours)} wheels, {result.fetched_bytes / 1e6:.0f} MB")
        for time_ in ("first", "second"):
            ratio = seconds[f"pip download, {time_} time"] / seconds[f"bundle, {time_} time"]
            print(f"pip download / bundle, {time_} time: {ratio:.1f}")
        if ours != theirs:
            print(f"not the same files: {sorted(ours ^ theirs)}")


if __name__ == "__main__":
    main()
