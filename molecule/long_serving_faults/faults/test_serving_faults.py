# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What goes wrong while instances serve is named and touches none of them; then the next run repairs. In this order."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import operators_inventory as operator
from operators_inventory import GOOD, MUTE, OLD, TORN, site

RELEASES = "/opt/vllm/releases"
SHARD = "/models/tiny-qwen3/model.safetensors"
GLM = ("--limit", "mirror,glm_8gpu")
NO_MIRROR = ("--limit", "vllm")
MOVED, SECOND = 8010, 8001


def play(name, *arguments):
    """Status and output of a playbook as the operator runs it, in one line whatever the width of the terminal was."""
    done = site.site("-i", str(operator.DIRECTORY), *arguments, playbook=f"playbooks/{name}.yml")
    return done.returncode, done.stdout + done.stderr


def done(name, *arguments):
    """What a playbook that must not fail said."""
    code, said = play(name, *arguments)
    assert code == 0, said
    return said


def refused(name, *arguments):
    """Which hosts failed in a playbook that must, and what was said, without line breaks."""
    code, said = play(name, *arguments)
    assert code != 0, said
    return set(re.findall(r"^fatal: \[(\w+)\]", said, re.MULTILINE)), " ".join(said.split())


def settled(*arguments):
    """A rollout that repairs, and one that then has nothing to do."""
    done("site", *arguments)
    said = done("site", *arguments)
    assert site.changed(said) == 0, said


def status(*arguments):
    return site.status("-i", str(operator.DIRECTORY), *arguments)


def completions(lab):
    """One from every instance of the inventory, asked from outside."""
    return site.ask_every_group(lab, "-i", str(operator.DIRECTORY))


def processes(lab):
    return {host: site.process(host, lab)["MainPID"] for host in site.INSTANCES}


@contextmanager
def untouched(lab):
    """The same processes before and after, and they answer."""
    before = processes(lab)
    yield
    assert processes(lab) == before
    completions(lab)


def on(lab, host, script):
    return lab("exec", host, "bash", "-c", f"set -e\n{script}")


def python(lab, host, code):
    return lab("exec", host, "python3", "-c", code)


def rot(lab, host, path):
    """Flip one byte as a disk does that goes bad: size and times stay."""
    flip = f"""
import glob, os
(path,) = glob.glob({path!r})
times = os.stat(path)
with open(path, "r+b") as file:
    file.seek(times.st_size // 2)
    byte = file.read(1)[0]
    file.seek(-1, 1)
    file.write(bytes([byte ^ 1]))
os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
"""
    python(lab, host, flip)


def release(lab, host, name):
    """The id of a release on a host."""
    (found,) = re.findall(rf"^{re.escape(name)}-[0-9a-f]{{8}}$", on(lab, host, f"ls {RELEASES}"), re.MULTILINE)
    return found


def installed(lab, host, identifier):
    """Every file of a release by name, inode, size, time and mode."""
    return on(lab, host, f"cd {RELEASES}/{identifier} && find . -printf '%P %i %s %T@ %m\\n' | sort")


def owner(lab, address, *, inside=""):
    """Whom an instance calls the owner of its model, empty where nobody answers; asked from outside, or on a host."""
    _code, answer = site.get(lab, f"{address}/v1/models", inside=inside)
    return json.loads(answer)["data"][0]["owned_by"] if answer else ""


def open_from_outside(lab, port):
    """Whether glm1's firewall lets others reach a port on which something listens: a stray where nothing else does."""
    listens = on(lab, "glm1", f"ss --tcp --listening --numeric --no-header 'sport = :{port}'")
    if not listens:
        on(lab, "glm1", f"systemd-run --quiet --unit=stray python3 -m http.server {port}")
        site.wait("stray", lambda: on(lab, "glm1", f"ss -tlnH 'sport = :{port}'"), 20)
    try:
        return site.get(lab, f"glm1:{port}/")[0] != 0
    finally:
        if not listens:
            on(lab, "glm1", "systemctl stop stray")


def test_the_hosts_serve_one_from_a_small_file_system(lab):
    """The operator bundles the releases of his inventory without asking any index."""
    operator.make()
    lab_disk = """
    [ -e /dev/loop-control ] || mknod /dev/loop-control c 10 237
    loop=$(losetup --find)
    [ -e $loop ] || mknod $loop b 7 ${loop#/dev/loop}
    truncate --size=14G /var/lib/disk.img
    mkfs.ext4 -q -m 0 -N 400000 /var/lib/disk.img
    mkdir /opt/vllm
    mount -o loop /var/lib/disk.img /opt/vllm
    """
    on(lab, "glm1", lab_disk)
    said = done("bundle", "--diff")
    assert f"+ wheels/{operator.wheel()[0]}" in said
    settled()
    completions(lab)
    assert {host: (one["ready"], one["drift"]) for (host, _name), one in status().items()} == dict.fromkeys(
        site.INSTANCES, (True, [])
    )


def test_a_patched_release_that_cannot_be_imported_is_refused_by_its_probes(lab):
    operator.ask_for(TORN)
    with untouched(lab):
        hosts, said = refused("upgrade")
    assert hosts == set(site.INSTANCES)
    for host in hosts:
        assert f"error import [{host}] found: ModuleNotFoundError: No module named 'site_torn'" in said
    assert "vllm/entrypoints/openai/api_server.py" in said
    assert "Mend what the error names" in said
    for (host, _name), one in status().items():
        assert (one["generation"], one["serves"], one["generations"], one["ready"]) == (1, 1, [1], True)
        assert one["release"]["id"] == release(lab, host, OLD)
        assert one["drift"] == [f"the inventory asks for release {release(lab, host, TORN)}"]


def test_a_patched_release_that_dies_at_start_gives_way_on_the_first_host_and_never_reaches_the_second(lab):
    operator.ask_for(MUTE)
    before = processes(lab)
    hosts, said = refused("upgrade")
    assert hosts == {"glm1"}
    assert "instance 'glm', generation 2: vllm-glm.service" in said
    assert f"RuntimeError: {operator.LAST_WORDS}" in said
    assert "Generation 1 was brought back and serves. Correct the cause and run again." in said
    after = processes(lab)
    assert (after["glm1"] != before["glm1"], after["l40s1"]) == (True, before["l40s1"])
    completions(lab)
    found = status()
    first, second = found["glm1", "glm"], found["l40s1", "gemma"]
    assert (first["generation"], first["serves"], first["ready"]) == (1, 1, True)
    assert first["logs"] == ["/var/lib/vllm/glm/failed-2.log"]
    assert operator.LAST_WORDS in lab("exec", "glm1", "cat", first["logs"][0])
    assert (second["generation"], second["serves"], second["generations"], second["logs"]) == (1, 1, [1], [])
    assert second["drift"] == [f"the inventory asks for release {release(lab, 'l40s1', MUTE)}"]
    assert first["drift"] == [f"the inventory asks for release {release(lab, 'glm1', MUTE)}"]
    operator.ask_for(OLD)
    with untouched(lab):
        settled()


def test_a_model_cut_off_and_one_that_rotted_are_named_while_the_mirror_is_away(lab):
    lab("exec", "mirror1", "systemctl", "stop", "nginx")
    on(lab, "glm1", f"truncate --size=4096 {SHARD}")
    rot(lab, "l40s1", SHARD)
    with untouched(lab):
        hosts, said = refused("site", *NO_MIRROR, "-e", "hf_cache_verify=full")
    assert hosts == set(site.INSTANCES)
    assert "Model tiny-qwen3: model.safetensors is truncated: has 4096 bytes instead of" in said
    assert "Model tiny-qwen3: model.safetensors differs from the manifest (sha256)" in said
    assert said.count("Connection refused") >= 2
    assert "Check that the mirror is up" in said


def test_the_next_run_starts_the_mirror_and_stages_both_again(lab):
    with untouched(lab):
        said = done("site", "--diff", "-e", "hf_cache_verify=full")
        assert "model.safetensors: is truncated: has 4096 bytes" in said
        assert "model.safetensors: differs from the manifest (sha256)" in said
        assert site.changed(done("site", "-e", "hf_cache_verify=full")) == 0


def test_an_upgrade_without_the_mirror_is_refused_with_its_address(lab):
    operator.ask_for(OLD, glm_8gpu={"vllm_release": GOOD})
    lab("exec", "mirror1", "systemctl", "stop", "nginx")
    with untouched(lab):
        hosts, said = refused("upgrade", "--limit", "glm_8gpu")
    assert hosts == {"glm1"}
    assert f"The lock of release {GOOD} cannot be had from the mirror: http://" in said
    assert "Connection refused" in said
    assert "Check that the mirror is up" in said
    one = status("--limit", "glm1")["glm1", "glm"]
    assert (one["serves"], one["ready"]) == (1, True)
    assert re.fullmatch(rf"the inventory asks for release {GOOD}-[0-9a-f]{{8}}", *one["drift"])


def test_a_wheel_that_rotted_on_the_mirror_is_named_and_not_installed(lab):
    """The run itself has started the mirror's server again."""
    rot(lab, "mirror1", f"/srv/vllm-mirror/current/wheels/{operator.wheel()[0]}")
    with untouched(lab):
        hosts, said = refused("upgrade", *GLM)
    assert hosts == {"glm1"}
    assert f"The wheel of {' '.join(operator.PACKAGE)} on http://" in said
    assert "is not the one that the release locked" in said
    assert "wheel_mirror_verify=full" in said
    assert site.half_built(lab, "glm1") == ""


# Both end in an error, for want of space, which is what they are for.
FILL = f"""
until ls -d {RELEASES}/.building-*/bin >/dev/null 2>&1; do sleep 0.05; done
fallocate --length $(df --output=avail --block-size=1 /opt/vllm | tail -1) /opt/vllm/filler || true
dd if=/dev/zero of=/opt/vllm/filler2 bs=4k 2>/dev/null || true
"""


def test_a_disk_that_runs_full_meanwhile_leaves_nothing_half_built_and_its_successor_is_refused_before(lab):
    """The same run mends the mirror's wheel, as the message of the one before said."""
    lab("exec", "glm1", "systemd-run", "--quiet", "--unit=filler", "bash", "-c", FILL)
    with untouched(lab):
        hosts, said = refused("upgrade", *GLM, "-e", "wheel_mirror_verify=full")
        assert hosts == {"glm1"}
        assert f"The disk under /opt/vllm ran full while release {GOOD} was installed" in said
        assert "Free some space, or give releases a larger file system, and run again." in said
        assert site.half_built(lab, "glm1") == ""
        assert GOOD not in on(lab, "glm1", f"ls {RELEASES}")
        hosts, said = refused("upgrade", *GLM)
        assert hosts == {"glm1"}
        assert re.search(r"disk-full.*GiB free below /opt/vllm", said)
    on(lab, "glm1", "systemctl stop 'filler*.service'; rm /opt/vllm/filler*")  # a pattern: it may have ended
    one = status("--limit", "glm1", "-e", "status_verify=full")["glm1", "glm"]
    assert (one["serves"], one["ready"], len(one["drift"])) == (1, True, 1)


def test_a_serving_release_that_was_changed_is_left_alone_and_told(lab):
    """On one host the manifest is cut off, on the other a file has rotted, which is seen when every file is read."""
    operator.ask_for(OLD)
    identifier = release(lab, "glm1", OLD)
    on(lab, "glm1", f"truncate --size=4096 {RELEASES}/{identifier}/manifest.json")
    rot(lab, "l40s1", f"{RELEASES}/{identifier}/lib/python3.11/site-packages/vllm/envs.py")
    with untouched(lab):
        hosts, said = refused("site", "-e", "uv_venv_verify=full")
    assert hosts == set(site.INSTANCES)
    differs = f"Release {identifier} differs from its manifest"
    assert f"{differs} ({RELEASES}/{identifier}/manifest.json cannot be read" in said
    assert f"{differs} (lib/python3.11/site-packages/vllm/envs.py: sha256 is" in said
    assert said.count("is in use by") >= 2
    assert "uv_venv_rebuild: true" in said
    found = status("-e", "status_verify=full")
    assert all(one["ready"] for one in found.values())
    assert "manifest.json cannot be read" in " ".join(found["glm1", "glm"]["drift"])
    assert "vllm/envs.py: sha256 is" in " ".join(found["l40s1", "gemma"]["drift"])


def test_it_is_built_anew_under_what_serves(lab):
    rebuild = ("-e", '{"uv_venv_verify": "full", "uv_venv_rebuild": true}')
    with untouched(lab):
        done("site", *rebuild)
        assert site.changed(done("site", "-e", "uv_venv_verify=full")) == 0
    for one in status("-e", "status_verify=full").values():
        assert (one["ready"], one["drift"]) == (True, ["the process is older than its release"])


def test_a_good_patched_release_is_upgraded_to_and_serves(lab):
    """What all runs before were refused for is put right by now."""
    operator.ask_for(OLD, glm_8gpu={"vllm_release": GOOD})
    old = release(lab, "glm1", OLD)
    before, files = processes(lab), installed(lab, "glm1", old)
    done("upgrade", *GLM)
    assert processes(lab)["l40s1"] == before["l40s1"]
    assert owner(lab, "glm1:8000") == operator.OWNER
    one = status("--limit", "glm1")["glm1", "glm"]
    assert (one["generation"], one["serves"], one["ready"], one["drift"]) == (3, 3, True, [])
    assert (one["release"]["patches"], one["logs"]) == ([GOOD], ["/var/lib/vllm/glm/failed-2.log"])
    assert installed(lab, "glm1", old) == files
    with untouched(lab):
        said = done("upgrade", *GLM)
    assert site.changed(said) == 0, said


def test_an_instance_that_moves_to_another_port_leaves_the_old_one_closed(lab):
    moved = {"glm": {"profile": "tiny-cpu", "port": MOVED}}
    operator.ask_for(OLD, glm_8gpu={"vllm_release": GOOD, "vllm_instances": moved})
    done("site", *GLM)
    assert owner(lab, f"glm1:{MOVED}") == operator.OWNER
    completions(lab)
    assert not open_from_outside(lab, site.PORT)
    one = status("--limit", "glm1")["glm1", "glm"]
    assert (one["generation"], one["rollback"], one["ready"], one["drift"]) == (4, 3, True, [])


def test_a_rollback_to_a_named_generation_of_the_unpatched_release(lab):
    """Neither the current one nor that before it; its port is shut until the inventory has it again."""
    good = release(lab, "glm1", GOOD)
    files = installed(lab, "glm1", good)
    said = " ".join(done("rollback", "--limit", "glm1", "-e", "vllm_generation=1").split())
    assert "glm: generation 1" in said
    assert "The inventory still asks for another state: the next rollout would restart glm" in said
    assert f"glm listens on {site.PORT} again, which the firewall does not open" in said
    assert owner(lab, f"127.0.0.1:{site.PORT}", inside="glm1") == "vllm"
    assert not open_from_outside(lab, site.PORT)
    one = status("--limit", "glm1", "-e", "status_verify=full")["glm1", "glm"]
    assert (one["generation"], one["serves"], one["ready"], one["release"]["patches"]) == (1, 1, True, [])
    assert one["drift"] == [f"the inventory asks for release {good}"]
    assert installed(lab, "glm1", good) == files
    operator.ask_for(OLD)
    before = processes(lab)
    done("site", *GLM, "--tags", "nftables")
    assert owner(lab, f"glm1:{site.PORT}") == "vllm"
    assert not open_from_outside(lab, MOVED)
    settled(*GLM)
    assert processes(lab) == before


TWO = {"glm": {"profile": "tiny-cpu", "port": site.PORT}, "second": {"profile": "tiny-cpu", "port": SECOND}}
OF_SECOND = "/etc/vllm/second /var/lib/vllm/second /var/cache/vllm/second /etc/systemd/system/vllm-second.service"


def test_a_second_instance_beside_the_first(lab):
    operator.ask_for(OLD, glm_8gpu={"vllm_instances": TWO})
    with untouched(lab):
        done("site", *GLM)
        assert completions(lab).count(" answered ") == 3
    assert open_from_outside(lab, SECOND)
    found = status("--limit", "glm1")
    assert {name: (one["ready"], one["drift"]) for (_host, name), one in found.items()} == dict.fromkeys(
        TWO, (True, [])
    )
    on(lab, "glm1", f"ls -d {OF_SECOND}")
    assert "second" in on(lab, "glm1", "cat /etc/tmpfiles.d/*")
    said = done("site", *GLM)
    assert site.changed(said) == 0, said


def test_an_instance_that_is_taken_out_of_the_inventory_leaves_nothing(lab):
    operator.ask_for(OLD)
    assert "the inventory does not know this instance" in str(status("--limit", "glm1")["glm1", "second"]["drift"])
    with untouched(lab):
        done("site", *GLM)
    assert on(lab, "glm1", f"for path in {OF_SECOND}; do [ ! -e $path ] || echo $path; done") == ""
    assert on(lab, "glm1", "systemctl list-units --all --plain --no-legend 'vllm-*'").split()[0] == "vllm-glm.service"
    assert "second" not in on(lab, "glm1", "cat /etc/tmpfiles.d/*; nft list ruleset")
    assert not open_from_outside(lab, SECOND)
    said = done("site", *GLM)
    assert site.changed(said) == 0, said
    assert {name for _host, name in status("--limit", "glm1")} == {"glm"}
