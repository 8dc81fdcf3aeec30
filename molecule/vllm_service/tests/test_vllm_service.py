"""What the role leaves on a host, seen from systemd and from the instances themselves."""

from __future__ import annotations

import json

KEY = 'k "quoted" $HOME %n \\ back `tick` # end'
NOTE = 'two\nlines, 100%, $HOME, "quoted", it\'s \\ ; # und üñí 🙂 '


def shown(host, instance, *names):
    text = host.check_output("systemctl show --property %s vllm-%s", ",".join(names), instance)
    return dict(line.split("=", 1) for line in text.splitlines())


def test_both_instances_run_and_start_at_boot(host):
    for instance in ("one", "two.b"):
        assert host.service(f"vllm-{instance}").is_running
        assert host.service(f"vllm-{instance}").is_enabled


def test_the_reference_directives_hold(host):
    wanted = {
        "Restart": "on-failure",
        "RestartUSec": "1s",
        "TimeoutStartUSec": "1min",
        "TimeoutStopUSec": "8s",
        "KillSignal": "2",
        "KillMode": "mixed",
        "LimitNOFILE": "1048576",
        "LimitMEMLOCK": "infinity",
        "NRestarts": "0",
        "User": "vllm",
        "PrivateDevices": "no",
        "MemoryDenyWriteExecute": "no",
        "StartLimitBurst": "3",
    }
    assert shown(host, "one", *wanted) == wanted


def test_the_process_gets_the_environment_as_meant(host):
    environment = json.loads(host.check_output("curl -sf http://127.0.0.1:8000/environment"))
    assert (environment["VLLM_API_KEY"], environment["NOTE"]) == (KEY, NOTE)
    assert environment["ONPREM_VLLM_GENERATION"] == "1"


def test_the_secret_is_in_one_file_that_root_alone_reads(host):
    environment = host.file("/etc/vllm/one/current/environment")
    assert (environment.mode, environment.user) == (0o400, "root")
    found = host.run("grep -rl 'back .*tick' /etc/vllm /etc/systemd /var/lib/vllm /run/log /var/log 2>/dev/null")
    found = [path for path in found.stdout.splitlines() if "/journal/" not in path]
    assert found == ["/etc/vllm/one/generations/1/environment"]
    # sudo logs the command lines of this test itself.
    journal = [line for line in host.check_output("journalctl --no-pager -o cat -b").splitlines() if "sudo" not in line]
    assert len(journal) > 10
    for line in [*journal, *host.check_output("ps -eo args").splitlines()]:
        assert "`tick" not in line


def test_readiness_was_recorded_by_root(host):
    record = host.file("/var/lib/vllm/two.b/readiness.json")
    found = json.loads(record.content_string)
    assert (found["model"], found["generation"], record.user) == ("tiny-b", "1", "root")
    assert 0 < found["seconds"] < 60


SANDBOXED = """
numactl --membind=0 true
cp /bin/true /tmp/program; /tmp/program
ip link > /dev/null
touch /var/cache/vllm/one/written
for place in /etc/vllm /opt/vllm /usr /var/lib/vllm; do touch $place/written 2>/dev/null && exit 9; done
exit 0
"""


def test_the_units_sandbox_leaves_numa_jit_and_caches_alone_and_closes_the_rest(host):
    """Run by systemd with the installed unit's own sandbox, its commands alone replaced."""
    unit = host.file("/etc/systemd/system/vllm-one.service").content_string
    kept = [line for line in unit.splitlines() if not line.startswith(("Exec", "Restart", "Type", "EnvironmentFile"))]
    kept.insert(kept.index("[Service]") + 1, "Type=oneshot\nExecStart=/bin/sh -ex /run/sandboxed")
    host.check_output("install -d -o vllm /var/cache/vllm/one")
    for path, text in (("/run/systemd/system/sandboxed.service", "\n".join(kept)), ("/run/sandboxed", SANDBOXED)):
        host.check_output("mkdir -p /run/systemd/system; printf %%s %s > %s", text, path)
    probe = host.run("systemctl daemon-reload; systemctl start sandboxed")
    said = host.check_output("journalctl --no-pager -o cat SYSLOG_IDENTIFIER=vllm-one -n 20")
    host.run("systemctl reset-failed sandboxed; rm /run/systemd/system/sandboxed.service; systemctl daemon-reload")
    assert probe.rc == 0, said
