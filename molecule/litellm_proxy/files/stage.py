# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Pack what one release needs of the bundle, and say what a plan would: ``stage.py RELEASE BUNDLE ARCHIVE``."""

import json
import sys
import tarfile
from pathlib import Path

from ansible_collections.onprem.vllm.plugins.plugin_utils.lock import parse_lock
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import load_release, load_uv

release = load_release(sys.argv[1])
bundle = Path(sys.argv[2])
uv = load_uv()
wanted = {digest for pin in parse_lock(release.lock_text(), release.name) for digest in pin.hashes}
wanted |= {wheel["sha256"] for wheel in uv["wheels"].values()}
files = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["files"]
paths = [path for path, entry in files.items() if entry["sha256"] in wanted]
paths += [f"{path}.metadata" for path in paths if f"{path}.metadata" in files]
paths += [path for path in files if path.startswith(("simple/", f"releases/{release.id}/"))]
with tarfile.open(sys.argv[3], "w") as archive:
    for path in ["manifest.json", *paths]:
        archive.add(bundle / path, path)
print(json.dumps({"release": release.as_plan(), "uv": uv}))
