# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The builder of a release killed on its host: whatever has a release's name is whole, at every moment."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "default"))
import site_under_test as site

BUILDER = "l40s1"
RELEASES = "/opt/vllm/releases"
KILLS = 10
MOST_ROUNDS = 30
# Not the collection's own comparison: reads each manifest and every file, and prints what is not as it says.
COMPARE = """
import hashlib, json, os, sys
root = "/opt/vllm/releases"
for release in (name for name in os.listdir(root) if not name.startswith(".")):
    top = f"{root}/{release}"
    try:
        manifest = json.load(open(f"{top}/manifest.json"))
    except (OSError, ValueError) as error:
        print(release, error)
        continue
    listed = {f"{folder}/{name}".lstrip("/"): text for folder, (mode, files) in manifest["folders"].items()
              for name, text in files.items()}
    there = {os.path.relpath(f"{folder}/{name}", top) for folder, folders, files in os.walk(top) for name in files}
    there |= {path for path in manifest["links"] if os.path.islink(f"{top}/{path}")}
    for path in there ^ {"manifest.json", *listed, *manifest["links"]}:
        print(release, path, "is in one of manifest and directory alone")
    for path in there & listed.keys():
        with open(f"{top}/{path}", "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != listed[path].split()[3]:
                print(release, path, "has another content")
    print("compared", release, len(listed))
"""
# Both begin when the builder does. The second says whether it found one to kill.
MEASURE = f"""
until pgrep --full 'uv (venv|pip)' >/dev/null; do sleep 0.02; done
begin=$(date +%s)
until ls {RELEASES}/[!.]*/manifest.json >/dev/null 2>&1; do sleep 0.1; done
echo $(($(date +%s) - begin)) > /run/measured
"""
KILL = """
until pgrep --full 'uv (venv|pip)' >/dev/null; do sleep 0.02; done
sleep {seconds}
pkill --signal KILL --full 'uv (venv|pip)|^/usr/bin/python3$' && touch /run/killed
"""


def compare(lab):
    """What differs, and which releases were compared: those that have a name."""
    lines = lab("exec", BUILDER, "python3", "-c", COMPARE).splitlines()
    compared = [line.split()[1] for line in lines if line.startswith("compared ")]
    assert len(compared) == len(lines), lines
    return compared


def build(lab, beside):
    """A rollout of no more than the release, anew, and a script that runs on the host meanwhile."""
    lab("exec", BUILDER, "sh", "-c", f"rm -rf {RELEASES}/[!.]* /run/measured /run/killed")
    lab("exec", BUILDER, "systemd-run", "--quiet", "--collect", "--unit=beside", "bash", "-c", beside)
    done = site.site("--limit", f"mirror,{BUILDER}", "--tags", "host_base,wheel_mirror,nftables,uv_venv")
    lab("exec", BUILDER, "systemctl", "stop", "beside*.service")  # a pattern: it may have ended
    return done


def test_the_builder_killed_at_random_moments_of_a_whole_build(lab):
    """Named as failed each time; what has the release's name is whole, and what was left is no obstacle to the next."""
    for _what in ("fetching", "out of uv's cache, as the builds that are killed"):
        done = build(lab, MEASURE)
        assert done.returncode == 0, done.stdout + done.stderr
    (whole,) = compare(lab)
    seconds = float(lab("exec", BUILDER, "cat", "/run/measured"))
    kills = []
    for _round in range(MOST_ROUNDS):
        moment = random.uniform(0, seconds)
        done = build(lab, KILL.format(seconds=moment))
        hit = lab("exec", BUILDER, "find", "/run", "-maxdepth", "1", "-name", "killed")
        assert bool(done.returncode) == bool(hit), done.stdout + done.stderr
        named = compare(lab)
        assert named in ([], [whole])
        if hit:
            assert f"fatal: [{BUILDER}]" in done.stdout, done.stdout + done.stderr
            left = lab("exec", BUILDER, "find", RELEASES, "-path", f"*/.building-{whole}/*", "-prune").split()
            kills.append((round(moment, 1), named, left))
            print(kills[-1], "of", seconds, flush=True)
        if len(kills) == KILLS:
            break
    assert len(kills) == KILLS, kills
    assert any(left for _moment, _named, left in kills), kills
    done = build(lab, "true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert compare(lab) == [whole]
    assert lab("exec", BUILDER, "ls", "-A", RELEASES).split() == [whole]
    lab("exec", BUILDER, "rm", "-rf", "/opt/vllm")  # bare again, for what follows
