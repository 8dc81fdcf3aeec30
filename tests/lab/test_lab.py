# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The lab itself, on real hosts (root, about 30 s): ``pytest tests/lab``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAB = Path(__file__).with_name("lab.py")
NAME = "selftest"
STATE = LAB.parents[2] / ".cache" / "lab" / NAME


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=check, capture_output=True, text=True)


def lab(*arguments: str, name: str = NAME, check: bool = True) -> str:
    return run(sys.executable, str(LAB), "--lab", name, *arguments, check=check).stdout


def ssh(host: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run("ssh", "-F", str(STATE / "ssh_config"), "-o", "ControlPath=none", host, *command, check=check)


def sink() -> int:
    return int(lab("sink"))


def traces() -> list[str]:
    """Whatever of the lab a machine can show: containers, namespaces, cgroups, files. The image is no lab's own."""
    found = run("podman", "ps", "--all", "--format", "{{.Names}}").stdout.split()
    found += [path.name for path in Path("/run/netns").iterdir()] if Path("/run/netns").is_dir() else []
    found += run("find", "/sys/fs/cgroup", "-name", f"onprem.{NAME}.*").stdout.split()
    return [name for name in found if name.startswith(f"{NAME}-") or f"onprem.{NAME}." in name] + [
        str(path) for path in [STATE, STATE.with_name(f".{NAME}.lock")] if path.exists()
    ]


@pytest.fixture(scope="module", autouse=True)
def hosts():
    lab("down")
    lab("up", "a", "b")
    yield
    lab("down")
    assert traces() == []


@pytest.fixture(autouse=True)
def counted_from_zero():
    lab("sink", "--reset")


def test_what_differs_from_the_image_is_told_and_what_was_made_anew_the_same_is_not():
    alter = """
    cp -p /etc/debian_version /root/a && mv /root/a /etc/debian_version
    touch /etc/issue
    ln -sfn "$(readlink /etc/localtime)" /etc/localtime
    chmod o-r /etc/issue.net
    echo more >> /etc/bash.bashrc
    echo new > /etc/new
    rm /etc/rmt
    mkdir /etc/came && rmdir /etc/came
    """
    lab("exec", "b", "sh", "-ec", alter)
    here = [line for line in lab("changes", "b").splitlines() if " /etc/" in line]
    assert {"C /etc/issue.net", "C /etc/bash.bashrc", "A /etc/new", "D /etc/rmt"} <= {*here}
    for same in ("/etc/debian_version", "/etc/issue", "/etc/localtime", "/etc/came"):
        assert not [line for line in here if line.endswith(f" {same}")]
    lab("exec", "b", "sh", "-c", "echo more >> /etc/nsswitch.conf")  # the image's own, after the look


def test_hosts_run_systemd_and_an_ordinary_ssh_reaches_them():
    lab("status")
    for host in ["a", "b"]:
        answer = ssh(host, "hostname; cat /proc/1/comm; sudo id -u; systemctl is-system-running").stdout.split()
        assert answer == [host, "systemd", "0", "running"]


def test_the_host_key_is_pinned():
    known = (STATE / "known_hosts").read_text()
    a, b = known.splitlines()
    try:
        (STATE / "known_hosts").write_text(a.rsplit(" ", 1)[0] + " " + b.rsplit(" ", 1)[1] + "\n")
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh("a", "true", check=False).stderr
    finally:
        (STATE / "known_hosts").write_text(known)


def test_no_process_stands_between_ssh_and_the_host():
    command = ["ssh", "-F", str(STATE / "ssh_config"), "-o", "ControlPath=none", "a", "sleep", "20"]
    with subprocess.Popen(command) as session:
        try:
            deadline = time.monotonic() + 10
            while "sleep 20" not in lab("exec", "a", "ps", "ax", "-o", "args") and time.monotonic() < deadline:
                time.sleep(0.1)
            assert run("ps", "-o", "args=", "--ppid", str(session.pid), check=False).stdout == ""
        finally:
            session.terminate()


def test_ssh_says_what_to_do_when_a_host_is_not_there():
    lab("exec", "b", "systemctl", "stop", "ssh.service", "ssh.socket")
    try:
        assert f"lab.py --lab {NAME} status" in ssh("b", "true", check=False).stderr
    finally:
        lab("exec", "b", "systemctl", "start", "ssh.service")


def test_hosts_talk_to_each_other_and_to_the_controller_without_a_packet_to_the_sink():
    for target in ["b", "10.77.{slot}.12", "fd77:0:0:{slot:x}::12", "controller"]:
        slot = json.loads((STATE / "state.json").read_text())["slot"]
        script = f"exec 3<>/dev/tcp/{target.format(slot=slot)}/{'22' if target != 'controller' else '9'}"
        answer = run(sys.executable, str(LAB), "--lab", NAME, "exec", "a", "bash", "-c", script, check=False)
        assert answer.returncode == 0 or "Connection refused" in answer.stderr
    assert lab("run", "bash", "-c", "exec 3<>/dev/tcp/a/22 && head -c 4 <&3") == "SSH-"
    assert sink() == 0


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_one_packet_that_wants_to_leave_is_counted_as_one(address):
    """The test of every air gap test: this is how a leak looks."""
    lab("exec", "a", "bash", "-c", f"echo leak > /dev/udp/{address}/9")
    count, leak = lab("sink", "--details").splitlines()
    assert count == "1"
    assert leak.endswith(f" -> {address} udp: 1")


def test_a_name_lookup_is_counted():
    lab("exec", "a", "getent", "hosts", "example.org", check=False)
    assert sink() > 0


def test_nothing_answers_beyond_the_lab():
    command = ["exec", "a", "curl", "--silent", "--max-time", "1", "--output", "/dev/null", "http://192.0.2.1/"]
    assert run(sys.executable, str(LAB), "--lab", NAME, *command, check=False).returncode == 28
    assert sink() > 0


@pytest.mark.parametrize("kill", [[], ["--kill"]], ids=["in order", "power cut"])
def test_a_reboot_keeps_files_address_and_key_and_loses_the_rest(kill):
    lab("exec", "a", "sh", "-c", "echo kept > /var/kept; touch /run/lost")
    lab("reboot", "a", *kill)
    assert ssh("a", "cat /var/kept; test -e /run/lost || echo gone").stdout.split() == ["kept", "gone"]


def test_a_standing_connection_does_not_outlive_its_host(tmp_path):
    control = str(tmp_path / "c")
    master = ["ssh", "-F", str(STATE / "ssh_config"), "-o", "ControlMaster=yes", "-o", f"ControlPath={control}"]
    run(*master, "-o", "ControlPersist=60", "-fN", "a")
    assert run("ssh", "-o", f"ControlPath={control}", "-O", "check", "a").returncode == 0
    lab("reboot", "a", "--kill")
    assert run("ssh", "-o", f"ControlPath={control}", "-O", "check", "a", check=False).returncode != 0


def test_up_brings_back_what_a_restart_of_the_machine_took():
    lab("exec", "a", "sh", "-c", "echo kept > /var/kept")
    run("podman", "kill", f"{NAME}-a", f"{NAME}-b")
    for name in ["a", "b", "controller", "sink"]:
        run("ip", "netns", "delete", f"onprem.{NAME}.{name}")
    Path(f"/run/netns/onprem.{NAME}.a").touch()  # what stays of a namespace where /run is on a disk
    assert "container exited" in lab("status", check=False)
    lab("up")
    assert ssh("a", "cat", "/var/kept").stdout == "kept\n"


def test_up_finishes_a_network_that_was_left_half_made():
    run("podman", "kill", f"{NAME}-b")
    for name in ["sink", "b"]:
        run("ip", "netns", "delete", f"onprem.{NAME}.{name}")
        run("ip", "netns", "add", f"onprem.{NAME}.{name}")
    lab("up")
    lab("exec", "b", "bash", "-c", "echo leak > /dev/udp/192.0.2.1/9")
    assert sink() == 1
    assert ssh("b", "hostname").stdout == "b\n"


def test_another_lab_is_out_of_reach():
    other = "selftest2"
    try:
        lab("up", "c", name=other)
        address = json.loads(run("podman", "exec", f"{other}-c", "ip", "-json", "-4", "addr", "show", "eth0").stdout)
        target = address[0]["addr_info"][0]["local"]
        probe = f"timeout 1 bash -c 'exec 3<>/dev/tcp/{target}/22'"
        assert run(sys.executable, str(LAB), "--lab", NAME, "exec", "a", "sh", "-c", probe, check=False).returncode != 0
    finally:
        lab("down", name=other)


def test_a_host_that_is_not_there_is_refused_by_name():
    answer = run(sys.executable, str(LAB), "--lab", NAME, "exec", "nobody", "true", check=False)
    assert answer.returncode == 1
    assert answer.stderr.strip() == f"lab {NAME} has no host 'nobody'; it has: a, b"


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_down_takes_a_lab_away_whose_state_is_lost(tmp_path):
    control = str(tmp_path / "c")
    master = ["ssh", "-F", str(STATE / "ssh_config"), "-o", "ControlMaster=yes", "-o", f"ControlPath={control}"]
    run(*master, "-o", "ControlPersist=60", "-fN", "a")
    background = ["run", "sh", "-c", "sleep 600 & echo $!"]
    command = [sys.executable, str(LAB), "--lab", NAME, *background]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        sleeper = int(started.stdout.readline())
        (STATE / "state.json").unlink()
        lab("down")
    assert traces() == []
    assert run("ssh", "-o", f"ControlPath={control}", "-O", "check", "a", check=False).returncode != 0
    deadline = time.monotonic() + 10
    while runs(sleeper):  # a killed process goes when its parent takes note
        assert time.monotonic() < deadline, f"process {sleeper} of the lab outlived it"
        time.sleep(0.1)
    lab("down")  # a second time: nothing to do, and no complaint
