"""Faults of instances on a real systemd, with the module's own code and a stand-in release."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
LAB = [sys.executable, str(CHECKOUT / "tests/lab/lab.py"), "--lab", os.environ["LAB"], "exec", "role1"]
LIMITS = {"start_s": 60, "stop_s": 8, "device_s": 5, "keep": 3}
SECRET = "sk-not-to-be-seen"
CHECK = (CHECKOUT / "roles/vllm_service/files/check_arguments.py").read_text()


def run(*words: str, given: str | bytes = "") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*LAB, *words], input=given.encode() if isinstance(given, str) else given, capture_output=True, check=False
    )


def shell(script: str) -> str:
    done = run("bash", "-euc", script)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def install_driver() -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(CHECKOUT / "plugins/module_utils", "module_utils", filter=lambda item: item)
        archive.add(Path(__file__).parents[1] / "files/drive.py", "drive.py")
    done = run(
        "bash", "-euc", "rm -rf /root/drive; mkdir /root/drive; tar -C /root/drive -xf -", given=content.getvalue()
    )
    assert done.returncode == 0, done.stderr.decode()
    for release in ("stand-in-1-11111111", "stand-in-2-22222222"):
        seal(f"/opt/vllm/releases/{release}")


def seal(release: str) -> None:
    """Give a stand-in release the manifest that a real one has."""
    about = {"release": {"vllm": "0.0.1", "variant": "none", "patches": [{"name": "mended"}]}, "packages": {}}
    done = run(
        "python3",
        "-",
        given=f"""
import os, sys
sys.path.insert(0, "/root/drive")
from pathlib import Path
from module_utils.record import hash_files
from module_utils.release_manifest import take_manifest, walk
root = Path("{release}")
(root / "manifest.json").unlink(missing_ok=True)
files = [path for _unused, path, entry in walk(root) if entry is not None and not entry.is_symlink()]
hashes = dict((path, found["sha256"]) for path, found in hash_files(root, files))
take_manifest(root, hashes, {about!r}).write(root)
""",
    )
    assert done.returncode == 0, done.stderr.decode()


def drive(
    entries: list[dict], kill_at: int = 0, killed_after_s: float = 120, call: str = "bring_about", **options: object
) -> dict:
    """One run of the module's code on the host; {} where it was killed."""
    asked = {"entries": entries, "call": call, "options": options, "limits": LIMITS, "kill_at": kill_at}
    done = run("timeout", "-s", "KILL", str(killed_after_s), "python3", "/root/drive/drive.py", given=json.dumps(asked))
    if done.returncode in (-9, 137):
        return {}
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@functools.cache
def unit_of_one() -> str:
    return shell("cat /etc/systemd/system/vllm-one.service")


def entry(name: str, port: int, release: str = "stand-in-1-11111111", **settings: object) -> dict:
    """An instance of the stand-in; ``settings`` are lines of its serve.yaml, underscores for dashes."""
    served = {"model": "/models/tiny", "served-model-name": "tiny", "host": "127.0.0.1", "port": port}
    served |= {key.replace("_", "-"): value for key, value in settings.items()}
    unit = unit_of_one()
    return {
        "name": name,
        "release_path": f"/opt/vllm/releases/{release}",
        "serve": "".join(f"{key}: {value}\n" for key, value in served.items()),
        "unit": unit.replace("vllm/one/", f"vllm/{name}/")
        .replace("vllm-one", f"vllm-{name}")
        .replace("instance one", f"instance {name}"),
        "environment": {"PATH": f"/opt/vllm/releases/{release}/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"},
        "secrets": {"VLLM_API_KEY": SECRET},
        "served_model_name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "gpus": [],
    }


def shown(name: str, what: str) -> str:
    return shell(f"systemctl show --property {what} --value vllm-{name}")


def served_generation(name: str) -> str:
    """What the running process says of itself, asked over its own port."""
    port = shell(f"sed -n 's/^port: //p' /etc/vllm/{name}/current/serve.yaml")
    address = "127.0.0.1"
    return json.loads(shell(f"curl -sf http://{address}:{port}/environment"))["ONPREM_VLLM_GENERATION"]


def linked(name: str, link: str = "current") -> str:
    return shell(f"basename $(readlink /etc/vllm/{name}/{link})")


A, B = "fault-a", "fault-b"
# Half a minute each: every one of them in `make test-all` (scenario long_faults), a few of each kind in `make test`.
ALL_FAULTS = bool(os.environ.get("ONPREM_VLLM_ALL_FAULTS"))
thorough = pytest.mark.skipif(not ALL_FAULTS, reason="make test-all runs it")


@pytest.fixture(scope="module", autouse=True)
def _driver():
    install_driver()
    clean()


@pytest.fixture(autouse=True)
def _clean():
    yield
    clean()


def clean() -> None:
    """Nothing of the two instances is left, nor of a run that was broken off."""
    for name in (A, B):
        shell(
            f"systemctl stop vllm-{name} 2>/dev/null || true; systemctl disable -q vllm-{name} 2>/dev/null || true;"
            f"rm -rf /etc/vllm/{name} /var/lib/vllm/{name} /etc/systemd/system/vllm-{name}.service;"
            "systemctl daemon-reload;"
            f"systemctl reset-failed vllm-{name} 2>/dev/null || true"
        )


def good(name: str = A, port: int = 8100, **settings: object) -> dict:
    return entry(name, port, **settings)


def begin(*entries: dict) -> None:
    answer = drive(list(entries) or [good()])
    assert "message" not in answer, answer["message"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", "ValueError: No available memory for the cache blocks"),
        pytest.param("crash-at-first-completion", "torch.OutOfMemoryError: CUDA out of memory", marks=thorough),
        ("arguments", "unrecognized arguments"),
        pytest.param("empty", "the first completion is empty", marks=thorough),
        pytest.param("foreign", "another server holds the port", marks=thorough),
    ],
)
def test_a_generation_that_fails_gives_way_to_the_one_before(fault, said):
    begin()
    answer = drive([{**good(), "serve": good()["serve"] + f"stand-in: {fault}\n"}])
    assert said in answer["message"]
    assert "Generation 1 was brought back and serves" in answer["message"]
    assert SECRET not in json.dumps(answer)
    assert answer["result"]["instances"][0]["rolled_back"] is True
    log = "/var/lib/vllm/fault-a/failed-2.log"
    # grep ends with 1 where it counts 0.
    assert f"All that generation 2 said is kept in {log}" in answer["message"]
    assert answer["result"]["instances"][0]["log"] == log
    assert (
        shell(f"stat -c %a%U {log}; grep -c 'as generation 2' {log}; grep -c {SECRET} {log} || true") == "600root\n1\n0"
    )
    assert (linked(A), linked(A, "ready"), served_generation(A)) == ("1", "1", "1")
    assert (shown(A, "ActiveState"), shown(A, "NRestarts")) == ("active", "0")


def rolled(**options: object) -> dict:
    return drive([], call="roll_back", instance=A, **options)


def state_of(name: str = A, **options: object) -> dict:
    """What status tells of one instance."""
    return next(one for one in drive([], call="status", **options)["result"] if one["name"] == name)


SECOND = "stand-in-2-22222222"


def test_back_to_what_served_before_with_unit_release_and_secret_and_there_again():
    begin()
    newer = {**entry(A, 8100, SECOND, max_model_len=9), "secrets": {"VLLM_API_KEY": "another-not-to-be-seen"}}
    newer["unit"] = newer["unit"].replace("LimitNOFILE=1048576", "LimitNOFILE=1000000")
    begin(newer)
    assert (shown(A, "LimitNOFILE"), state_of()["rollback"]) == ("1000000", 1)
    predicted = rolled(check_mode=True)["result"]
    assert (predicted["changed"], served_generation(A)) == (True, "2")
    answer = rolled()
    assert "message" not in answer, answer["message"]
    assert (linked(A), linked(A, "ready"), linked(A, "previous"), served_generation(A)) == ("1", "1", "2", "1")
    assert shown(A, "LimitNOFILE") == "1048576"
    assert "stand-in-1-11111111/bin/vllm" in shell(f"tr '\\0' ' ' < /proc/{shown(A, 'MainPID')}/cmdline")
    assert rolled(generation=1)["result"]["changed"] is False
    assert rolled()["result"]["instances"][0]["generation"] == 2
    assert "message" not in drive([newer])
    assert drive([newer])["result"]["changed"] is False


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(
            "mv /opt/vllm/releases/stand-in-1-11111111 /root/gone",
            "is gone. Install it again beside what serves",
            marks=thorough,
        ),
        pytest.param(
            "cp -a /opt/vllm/releases/stand-in-1-11111111 /root/gone; echo >> /opt/vllm/releases/*-1-*/bin/vllm",
            "bin/vllm",
            marks=thorough,
        ),
        (
            "echo '# x' >> /etc/vllm/fault-a/generations/1/serve.yaml",
            "changed by hand since it was written (serve.yaml)",
        ),
        pytest.param(
            "rm -r /etc/vllm/fault-a/generations/1", "no other generation of it was ever ready", marks=thorough
        ),
    ],
)
def test_a_rollback_to_what_is_not_whole_any_more_is_refused_before_anything_stops(harm, said):
    begin()
    begin(entry(A, 8100, SECOND))
    pid = shown(A, "MainPID")
    shell(harm)
    try:
        assert said in rolled()["message"]
        assert (shown(A, "MainPID"), linked(A), served_generation(A)) == (pid, "2", "2")
    finally:
        shell(
            "[ ! -e /root/gone ] || { rm -rf /opt/vllm/releases/*-1-*;"
            " mv /root/gone /opt/vllm/releases/stand-in-1-11111111; }"
        )


@thorough
def test_a_rollback_that_does_not_get_ready_comes_back_and_the_unknown_is_refused():
    begin()
    drive([good(stand_in="crash")])
    begin(good(max_model_len=3))
    answer = rolled(generation=2)
    assert "Generation 3 was brought back and serves" in answer["message"]
    assert SECRET not in json.dumps(answer)
    assert served_generation(A) == "3"
    assert "generation 9 is not on this host: the generations here are 1, 2, 3" in rolled(generation=9)["message"]
    assert "There is no instance 'nobody' here" in drive([], call="roll_back", instance="nobody")["message"]
    assert "say which one shall go to 1" in drive([], call="roll_back", generation=1)["message"]


@thorough
def test_a_rollback_killed_before_its_effects_is_finished_by_the_next():
    begin()
    begin(entry(A, 8100, SECOND))
    for kill_at in (1, 2, 4, 6):
        if drive([], call="roll_back", instance=A, kill_at=kill_at):
            break
        answer = rolled()
        assert "message" not in answer, (kill_at, answer["message"])
        assert served_generation(A) == linked(A) == linked(A, "ready") == "1", kill_at
        assert rolled()["result"]["instances"][0]["generation"] == 2


def test_status_tells_what_serves_and_each_thing_that_was_not_asked_for():
    begin(good(), good(B, 8101))
    found = state_of(wanted={A: "stand-in-1-11111111", "c": "x"})
    assert (found["generation"], found["serves"], found["ready"], found["restarts"]) == (1, 1, True, 0)
    assert (found["drift"], found["release"]["patches"], found["release"]["vllm"]) == ([], ["mended"], "0.0.1")
    everything = {one["name"]: one for one in drive([], call="status", wanted={A: "other-id", "c": "x"})["result"]}
    assert everything[A]["drift"] == ["the inventory asks for release other-id"]
    assert everything[B]["drift"] == ["the inventory does not know this instance"]
    assert everything["c"]["state"] == "missing"
    shell("sleep 0.2; echo '# x' >> /etc/vllm/fault-a/generations/1/serve.yaml")
    shell("chmod 644 /etc/vllm/fault-a/generations/1/environment")
    dropped = "/etc/systemd/system/vllm-fault-b.service.d"
    shell(f"mkdir {dropped}; echo '[Unit]' > {dropped}/o.conf")
    shell("echo '# x' >> /etc/systemd/system/vllm-fault-a.service")
    shell(
        "systemctl disable -q vllm-fault-b; systemctl daemon-reload; touch /opt/vllm/releases/stand-in-1-11111111/new"
    )
    try:
        told = "\n".join(state_of()["drift"] + state_of(B)["drift"])
    finally:
        shell("rm -r /etc/systemd/system/vllm-fault-b.service.d /opt/vllm/releases/stand-in-1-11111111/new")
    for line in (
        "serve.yaml of generation 1 was changed by hand",
        "environment of generation 1 has another mode or owner",
        "the process is older than serve.yaml of generation 1",
        "its unit is not that of generation 1",
        "/etc/systemd/system/vllm-fault-b.service.d/o.conf changes its unit",
        "it does not start at boot",
        "release stand-in-1-11111111: new: not in the manifest",
    ):
        assert line in told, told
    assert SECRET not in told


def untouched(name: str, pid: str) -> None:
    """The same process serves the same generation, and nothing was left of the question."""
    assert (shown(name, "MainPID"), served_generation(name), linked(name)) == (pid, "1", "1")
    assert shell(f"ls /etc/vllm/{name}/generations; ls /run/onprem-vllm; systemctl list-units -q 'onprem-*'") == "1"


@pytest.mark.parametrize("check_mode", [False, True])
def test_arguments_that_vllm_refuses_stop_nothing(check_mode):
    begin()
    pid = shown(A, "MainPID")
    answer = drive([good(no_such_flag=3)], argument_check=CHECK, check_mode=check_mode)
    assert "unrecognized arguments: --no-such-flag" in answer["message"]
    assert "Correct `no-such-flag` below `serve`" in answer["message"]
    assert answer["result"]["changed"] is False
    untouched(A, pid)


@thorough
def test_arguments_refused_for_one_instance_stop_no_other_and_remove_none():
    begin()
    pid = shown(A, "MainPID")
    answer = drive([good(B, 8100, no_such_flag=3)], argument_check=CHECK, purge_others=True)
    assert "instance 'fault-b'" in answer["message"]
    untouched(A, pid)


def test_vllm_is_asked_as_the_service_in_its_sandbox_with_its_environment_and_no_secret_is_told():
    begin()
    pid = shown(A, "MainPID")
    said = drive([good(stand_in="tell")], argument_check=CHECK)["message"]
    assert "user vllm, no new privileges 1, /etc writable False, of generation 2, key (hidden)" in said
    untouched(A, pid)


@thorough
def test_a_release_whose_vllm_cannot_be_imported_is_refused_and_one_with_another_parser_is_tried():
    begin()
    pid = shown(A, "MainPID")
    package = "/opt/vllm/releases/stand-in-2-22222222/lib/python3.11/site-packages/vllm"
    shell(f"cp {package}/__init__.py /root/aside.py; echo 'import no_such_module' > {package}/__init__.py")
    try:
        answer = drive([entry(A, 8100, "stand-in-2-22222222")], argument_check=CHECK)
        assert "ModuleNotFoundError: No module named 'no_such_module'" in answer["message"]
        untouched(A, pid)
        shell(f"mv /root/aside.py {package}/__init__.py; mv {package}/utils /root/aside")
        answer = drive([entry(A, 8100, "stand-in-2-22222222")], argument_check=CHECK)
        assert served_generation(A) == "2"
        assert "could not be asked" in answer["result"]["doubts"][0]
    finally:
        # Each half may have been undone already.
        shell(f"mv -f /root/aside.py {package}/__init__.py || true; mv /root/aside {package}/utils || true")


@thorough
def test_after_one_that_fails_the_others_are_left_alone_where_asked():
    begin(good(A, 8100), good(B, 8101))
    answer = drive([good(A, 8101, stand_in="crash"), good(B, 8100)], stop_at_failure=True)
    first, second = answer["result"]["instances"]
    assert (first["rolled_back"], second["restarted"]) == (True, False)
    assert second["reason"] == "left alone: instance fault-a failed"
    assert (served_generation(A), served_generation(B), linked(B)) == ("1", "1", "1")


@thorough
def test_one_that_never_answers_is_given_up_in_time_with_the_reason():
    begin()
    silent = good(stand_in="no-answer")
    answer = drive([{**silent, "unit": re.sub(r"completion \d+ ", "completion 4 ", silent["unit"])}])
    assert "no completion after 4 s: it accepted a request and did not answer" in answer["message"]
    assert served_generation(A) == "1"


@thorough
def test_a_wrong_served_name_is_told_with_the_right_one():
    answer = drive([good(served_model_name="other")])
    assert "It serves other, not tiny" in answer["message"]


def test_the_first_generation_that_fails_stays_stopped_and_the_next_run_mends_it():
    answer = drive([good(stand_in="crash")])
    assert "No other generation of it was ever ready" in answer["message"]
    assert shown(A, "ActiveState") in ("inactive", "failed")
    assert shell("test ! -e /etc/vllm/fault-a/ready && echo none") == "none"
    begin()
    assert (linked(A), served_generation(A)) == ("2", "2")


@thorough
def test_a_crash_loop_ends_and_the_next_run_starts_it_anew():
    begin(good(stand_in="dies-later"))
    shell("for i in $(seq 60); do systemctl is-failed -q vllm-fault-a && exit 0; sleep 0.5; done; exit 1")
    assert shown(A, "Result") == "exit-code" or shown(A, "Result") == "start-limit-hit"
    begin()
    assert (shown(A, "ActiveState"), served_generation(A)) == ("active", "2")


def test_stopping_while_it_loads_is_quick_and_no_failure():
    begin()
    shell("echo 'stand-in-load: 30' >> /etc/vllm/fault-a/current/serve.yaml")
    shell("systemctl restart --no-block vllm-fault-a")
    shell(
        "for i in $(seq 100); do [ $(systemctl show -P SubState vllm-fault-a) = start-post ] && break; sleep 0.2; done"
    )
    # The step's own process must be up to tell a stop from a failure.
    shell("sleep 1")
    shell("timeout 5 systemctl stop vllm-fault-a")
    assert (shown(A, "ActiveState"), shown(A, "Result")) == ("inactive", "success")


@thorough
def test_one_still_loading_for_a_run_that_died_is_waited_for_and_not_restarted():
    begin()
    slow = good(stand_in_load="12")
    assert drive([slow], killed_after_s=6) == {}
    pid = shown(A, "MainPID")
    assert shown(A, "ActiveState") == "activating"
    answer = drive([slow])
    assert answer["result"]["instances"][0]["restarted"] is False
    assert (shown(A, "MainPID"), served_generation(A), linked(A, "ready")) == (pid, "2", "2")


def test_only_what_changed_restarts():
    begin(good(A, 8100), good(B, 8101))
    before = shown(A, "MainPID"), shown(B, "MainPID")
    answer = drive([good(A, 8100), good(B, 8101, max_model_len=512)])
    assert [one["restarted"] for one in answer["result"]["instances"]] == [False, True]
    assert answer["result"]["together"] == []
    assert shown(A, "MainPID") == before[0]
    assert shown(B, "MainPID") != before[1]
    again = drive([good(A, 8100), good(B, 8101, max_model_len=512)])
    assert again["result"]["changed"] is False


@thorough
def test_ports_may_be_exchanged():
    begin(good(A, 8100), good(B, 8101))
    foreseen = drive([good(A, 8101), good(B, 8100)], check_mode=True)
    assert foreseen["result"]["together"] == [A, B]
    begin(good(A, 8101), good(B, 8100))
    assert (served_generation(A), served_generation(B)) == ("2", "2")


def test_one_renamed_leaves_nothing_and_its_port_is_free():
    begin(good(A, 8100))
    shell("mkdir -p /var/cache/vllm/fault-a")
    shell("mkdir /root/aside; mv /etc/systemd/system/vllm-{one,two.b}.service /etc/vllm/{one,two.b} /root/aside")
    try:
        answer = drive([good(B, 8100)], purge_others=True)
    finally:
        shell(
            "cd /root/aside; mv *.service /etc/systemd/system; mv * /etc/vllm; rmdir /root/aside;"
            "systemctl daemon-reload"
        )
    assert answer["result"]["removed"] == [A]
    assert answer["result"]["together"] == [A]
    found = "find /etc /var/lib/vllm /var/cache/vllm -name '*fault-a*'; systemctl list-units --all -q '*fault-a*'"
    assert shell(found) == ""
    assert served_generation(B) == "1"


@pytest.mark.parametrize(
    "edited", ["serve.yaml", *(pytest.param(name, marks=thorough) for name in ("environment", "unit"))]
)
def test_a_file_edited_by_hand_is_found_and_replaced(edited):
    begin()
    shell(f"echo '# by hand' >> /etc/vllm/fault-a/generations/1/{edited}")
    answer = drive([good()])
    assert answer["result"]["instances"][0]["restarted"] is True
    assert served_generation(A) == "2"


@thorough
def test_a_unit_edited_where_it_is_installed_is_replaced_and_restarted():
    begin()
    shell("sed -i s/LimitNOFILE=.*/LimitNOFILE=100/ /etc/systemd/system/vllm-fault-a.service")
    answer = drive([good()])
    assert answer["result"]["instances"][0]["restarted"] is True
    assert shown(A, "LimitNOFILE") == "1048576"
    assert shown(A, "NeedDaemonReload") == "no"
    assert drive([good()])["result"]["changed"] is False


def test_a_secret_readable_by_others_is_closed_without_a_restart():
    begin()
    shell("chmod 644 /etc/vllm/fault-a/generations/1/environment")
    answer = drive([good()])
    assert (answer["result"]["changed"], answer["result"]["instances"][0]["restarted"]) == (True, False)
    assert shell("stat -c %a%U /etc/vllm/fault-a/current/environment") == "400root"


def test_a_changed_secret_restarts_and_shows_as_changed_alone():
    begin()
    answer = drive([{**good(), "secrets": {"VLLM_API_KEY": "another-not-to-be-seen"}}])
    (diff,) = answer["result"]["diff"]
    assert "VLLM_API_KEY=(hidden, changed)" in diff["after"]
    assert SECRET not in json.dumps(answer)
    assert "another-not-to-be-seen" not in json.dumps(answer)


def test_a_missing_release_is_refused_before_anything_changes():
    begin()
    answer = drive([good(B, 8101), entry(A, 8100, "not-there")])
    assert "/opt/vllm/releases/not-there is missing or not whole" in answer["message"]
    assert answer["result"]["changed"] is False
    assert shell("test ! -e /etc/vllm/fault-b && echo none") == "none"


def test_another_release_is_one_new_generation_run_by_its_real_path():
    begin()
    begin(entry(A, 8100, "stand-in-2-22222222"))
    line = shell(f"tr '\\0' ' ' < /proc/{shown(A, 'MainPID')}/cmdline")
    assert (
        "/opt/vllm/releases/stand-in-2-22222222/bin/vllm serve --config /etc/vllm/fault-a/generations/2/serve.yaml"
        in line
    )


@thorough
def test_old_generations_go_and_the_fallback_stays():
    for length in range(5):
        begin(good(max_model_len=length))
    assert shell("ls /etc/vllm/fault-a/generations").split() == ["3", "4", "5"]
    for length in range(6, 9):
        drive([good(max_model_len=length, stand_in="crash")])
    assert (linked(A), linked(A, "ready")) == ("5", "5")
    assert shell("test -e /etc/vllm/fault-a/generations/5/serve.yaml && echo there") == "there"


def killed_and_repaired(kill_at: int) -> bool:
    """One change, killed before its ``kill_at``-th effect, then the next run; False where there are fewer effects."""
    changed = good(max_model_len=kill_at)
    if drive([changed], kill_at=kill_at):
        return False
    whole = "for n in /etc/vllm/fault-a/generations/[0-9]*; do ls $n | tr '\\n' ' '; echo; done | sort -u"
    assert shell(whole) in ("", "environment manifest.json release serve.yaml unit")
    answer = drive([changed])
    assert "message" not in answer, (kill_at, answer["message"])
    assert served_generation(A) == linked(A) == linked(A, "ready"), kill_at
    assert f"max-model-len: {kill_at}" in shell("cat /etc/vllm/fault-a/current/serve.yaml")
    assert shown(A, "NeedDaemonReload") == "no"
    left = shell("ls -A /etc/vllm/fault-a; ls -A /etc/vllm/fault-a/generations | grep -v '^[0-9]' || true").split()
    assert left == ["current", "generations", "previous", "ready"]
    assert drive([changed])["result"]["changed"] is False, kill_at
    return True


def test_a_run_killed_before_any_of_its_effects_is_repaired_by_the_next():
    """Every eighth one, and all of them in `make test-all`: there are more than twenty."""
    begin()
    step = 1 if ALL_FAULTS else 8
    reached = 2
    while killed_and_repaired(reached):
        reached += step
    assert reached > 18
