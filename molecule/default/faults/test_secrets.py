# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where a key goes: into one file that root alone reads, and to who asks with it. Nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import site_under_test as site

OTHER = "marked-secret-of-tomorrow"
CONTROL = "marked-control-8d21"


def test_the_search_finds_what_is_leaked_on_purpose(lab, files_with, said_on):
    lab("exec", "glm1", "sh", "-c", f"echo x={CONTROL} > /etc/leaked; echo {CONTROL} | systemd-cat; sleep 1")
    try:
        found = files_with(CONTROL, "glm1")
        assert "/etc/leaked" in found
        assert f"MESSAGE={CONTROL}" in said_on("glm1")
    finally:
        lab("exec", "glm1", "rm", "/etc/leaked")
    variables = ["-m", "ansible.builtin.debug", "-a", "var=vllm_secrets", "l40s1"]
    shown = subprocess.run(
        ["ansible", *site.INVENTORIES, *variables], check=True, capture_output=True, text=True, cwd=site.CHECKOUT
    )
    assert site.KEY in shown.stdout


@pytest.mark.parametrize("key", [site.KEY, OTHER])
def test_a_key_is_in_no_output_at_the_highest_verbosity(key):
    """Unchanged, and about to be changed: what would be done is shown, the value is not."""
    secrets = {"vllm_secrets": {"gemma": {"VLLM_API_KEY": key}}}
    done = site.site("-vvv", "--diff", "--check", "--limit", "l40s1", "-e", json.dumps(secrets))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert site.changed(done.stdout) == (key != site.KEY)
    assert ("VLLM_API_KEY=(hidden, changed)" in output) == (key != site.KEY)
    # The command line of this very run repeats what -e says; an inventory's secret is not on it.
    told = [line for line in output.splitlines() if key in line]
    assert not told, told


def test_a_key_lies_in_roots_file_alone_and_in_no_log(at, files_with, said_on):
    kept = files_with(site.KEY, "l40s1")
    assert kept
    for path in kept:
        assert path.startswith("/etc/vllm/gemma/generations/"), path
        environment = at("l40s1").file(path)
        assert (path.rpartition("/")[2], environment.user, environment.mode) == ("environment", "root", 0o400)
    assert files_with(OTHER, "l40s1") == []
    for host in (*site.INSTANCES, "mirror1"):
        said = said_on(host)
        assert site.KEY not in said
        assert OTHER not in said
        assert host == "l40s1" or files_with(site.KEY, host) == []


def test_a_key_is_wanted_from_who_asks(lab):
    get = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}"]
    address = f"http://l40s1:{site.PORT}/v1/models"
    assert lab("run", *get, address) == "401"
    assert lab("run", *get, "--header", f"Authorization: Bearer {OTHER}", address) == "401"
    assert lab("run", *get, "--header", f"Authorization: Bearer {site.KEY}", address) == "200"
