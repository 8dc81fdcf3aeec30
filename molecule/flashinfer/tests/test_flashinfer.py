# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the probes saw and left, compared with the unit that serves."""

from __future__ import annotations

import json

RECORD = "/var/lib/vllm/sound/probes.json"


def test_the_probes_ran_in_the_environment_and_sandbox_of_the_unit(host):
    (path,) = host.check_output("ls /var/cache/vllm/sound/*/seen.json").split()
    seen = json.loads(host.file(path).content_string)
    pid = host.check_output("systemctl show --property MainPID --value vllm-sound")
    status = dict(
        line.strip().split(":\t", 1)
        for line in host.file(f"/proc/{pid}/status").content_string.splitlines()
        if ":\t" in line
    )
    assert seen["status"] == {key: status[key] for key in seen["status"]}
    assert seen["status"]["Seccomp"] == "2"
    assert seen["status"]["CapBnd"] == "0" * 16
    mounts = host.file(f"/proc/{pid}/mounts").content_string.splitlines()
    assert seen["read-only"] == sorted({line.split()[1] for line in mounts if "ro" in line.split()[3].split(",")})
    assert "/opt" in seen["read-only"] or "/" in seen["read-only"]
    assert seen["tmp"] == []
    serves = json.loads(host.check_output("curl -sf http://127.0.0.1:8000/environment"))
    own = {name: value for name, value in serves.items() if name.startswith(("ONPREM_", "MEMORY_PRESSURE_"))}
    theirs = {"INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID"} | {"PWD", "OLDPWD", "_"}  # the shell of ExecStart
    for name in (serves.keys() | seen["environment"].keys()) - own.keys() - theirs:
        assert seen["environment"].get(name) == serves.get(name), name


def test_what_was_proven_is_recorded_by_root(host):
    record = host.file(RECORD)
    assert (record.user, record.mode) == ("root", 0o644)
    found = json.loads(record.content_string)
    assert found["findings"] == []
    assert len(found["probes"]) == 10
    assert not host.file("/var/lib/vllm/broken").exists


def test_nothing_of_the_probes_is_left(host):
    assert host.check_output("find /run -name 'onprem-vllm-probe-*'") == ""
    assert host.check_output("find /var/cache -name '.probe-*'") == ""
    assert host.check_output("systemctl list-units --all --plain --no-legend 'onprem-vllm-probe-*'") == ""


def test_the_releases_are_as_they_were_built(host):
    releases = host.check_output("ls -d /opt/vllm/releases/*").split()
    assert len(releases) == 2
    for release in releases:
        # Nothing new and nothing changed; only the release itself, when its manifest was renamed into it.
        assert host.check_output(f"find {release} -mindepth 1 -newer {release}/manifest.json") == ""
        assert host.check_output(f"find {release} -type l -name 'trtllmGen*'") == ""
