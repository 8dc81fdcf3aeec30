# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keys that are issued and removed without a run: PostgreSQL on the proxy's host, and what it is away for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import proxy_under_test as proxy

PROGRAM = "python3 /opt/vllm/libexec/team_keys.py"
SECONDS = 10


@pytest.fixture
def issued(at):
    """A function that issues keys of teams, which are removed in the end."""
    teams = []

    def issue(team: str, *limits: str) -> str:
        teams.append(team)
        key: str = at("role1").check_output(f"{PROGRAM} add {team} {' '.join(limits)}")
        assert key.startswith("sk-")
        return key

    yield issue
    for team in teams:
        at("role1").run(f"{PROGRAM} remove {team}")


def answered(lab, key: str, status: int, model: str = "") -> str:
    """What a key is told, once its status is the one that is waited for."""
    found: list[tuple[int, str]] = []

    def so() -> bool:
        found.append(proxy.chat(lab, model, key=key))
        return found[-1][0] == status

    proxy.wait(f"status {status}", so, SECONDS)
    return found[-1][1]


def test_a_key_lets_in_until_it_is_removed_and_no_further_than_it_should(lab, at, issued):
    key = issued("fleet", "--model tiny", "--per-minute 4")
    answered(lab, key, 200)
    assert "the key of fleet may use tiny" in answered(lab, key, 403, "org/Lone")
    answered(lab, key, 429)
    assert proxy.chat(lab)[0] == 200
    [line] = [line for line in at("role1").check_output(f"{PROGRAM} list").splitlines() if " fleet " in line]
    assert "tiny; 4 a minute; no end" in line
    at("role1").check_output(f"{PROGRAM} remove {line.split()[0]}")
    answered(lab, key, 401)


def test_a_team_may_have_two_keys_and_one_that_has_ended(lab, issued):
    old, new = issued("twice"), issued("twice")
    for key in (old, new):
        answered(lab, key, 200)
    ended = issued("ended", "--expires 2026-01-31")
    proxy.wait("the key", lambda: "has expired" in proxy.chat(lab, key=ended)[1], SECONDS)


def test_what_is_no_team_no_model_or_no_limit_is_refused(at):
    for wrong in ("master", "'a team'", "team --model nobody", "team --per-minute 0", "team --expires soon"):
        assert at("role1").run(f"{PROGRAM} add {wrong}").rc != 0, wrong
    assert at("role1").run(f"{PROGRAM} remove nobody").rc == 1
    assert " team " not in at("role1").check_output(f"{PROGRAM} list")


def test_a_key_stays_over_a_reload_and_a_crash_of_haproxy(lab, at, issued):
    key = issued("stays")
    answered(lab, key, 200)
    for order in ("reload", "kill --signal=KILL"):
        at("role1").check_output(f"systemctl {order} onprem-vllm-haproxy")
        proxy.wait("HAProxy", lambda: proxy.healthy(lab))
        answered(lab, key, 200)


def test_while_the_database_is_down_known_keys_go_on_and_it_is_said(lab, at, issued):
    key = issued("before")
    answered(lab, key, 200)
    at("role1").check_output("systemctl stop postgresql@*")
    try:
        proxy.wait("it is said", lambda: bool(proxy.probe()["proxy"]["keys"]), 30)
        assert {proxy.chat(lab, key=one)[0] for one in (key, proxy.MASTER)} == {200}
        refused = at("role1").run(f"{PROGRAM} add during")
        assert (refused.rc, "failed" in refused.stderr, "Traceback" in refused.stderr) == (1, True, False)
        at("role1").check_output("systemctl restart onprem-vllm-keys onprem-vllm-haproxy")
        proxy.wait("HAProxy", lambda: proxy.healthy(lab))
        answered(lab, key, 200)
    finally:
        at("role1").check_output("systemctl start postgresql")
    answered(lab, issued("after"), 200)
    assert proxy.probe()["proxy"]["keys"] == ""


def test_keys_that_the_database_lost_go_on_until_someone_begins_anew(lab, at, issued):
    """A restart does not make the table anew; the one that is restored counts again."""
    key = issued("kept")
    answered(lab, key, 200)
    host = at("role1")

    def psql(order: str) -> str:
        return host.check_output(f'runuser -u postgres -- psql -qAtd onprem_vllm_keys -c "{order}"')

    was = psql("SELECT id FROM onprem_vllm.identity")
    psql("UPDATE onprem_vllm.identity SET id = gen_random_uuid()")
    host.check_output("systemctl restart onprem-vllm-keys")
    assert "team_key was made anew: restore it, or remove /var/lib" in proxy.probe()["proxy"]["keys"]
    assert proxy.chat(lab, key=key)[0] == 200
    psql(f"UPDATE onprem_vllm.identity SET id = '{was}'")
    psql("ALTER TABLE onprem_vllm.team_key RENAME TO elsewhere")
    try:
        host.check_output("systemctl restart onprem-vllm-keys")
        assert "team_key is gone: restore it, or remove /var/lib" in proxy.probe()["proxy"]["keys"]
        refused = host.run(f"{PROGRAM} add meanwhile")
        assert (refused.rc, "is gone" in refused.stderr) == (1, True)
        assert proxy.chat(lab, key=key)[0] == 200
        host.check_output("rm /var/lib/onprem-vllm-keys/followed.json")
        answered(lab, key, 401)
        psql("DROP TABLE onprem_vllm.team_key")
    finally:
        psql("ALTER TABLE onprem_vllm.elsewhere RENAME TO team_key")
        host.check_output("systemctl restart onprem-vllm-keys")
    answered(lab, key, 200)


def test_keys_lie_nowhere_and_only_root_reads_their_sha256(at, issued):
    key = issued("sought")
    host = at("role1")
    sought = f"{key[:-1]}[{key[-1]}]"  # grep itself must not be what it finds
    places = "/etc /run /tmp /var /opt/vllm/libexec /proc/[0-9]*/cmdline"
    assert host.run(f"grep -rslE '{sought}' {places}").stdout == ""
    readers = {"teams.map": ("root", 0o400), "limits.map": ("root", 0o400), "keys.json": ("vllm-proxy", 0o440)}
    for name, (group, mode) in readers.items():
        file = host.file(f"/var/lib/onprem-vllm-keys/{name}")
        assert (file.user, file.group, file.mode) == ("root", group, mode), name
    assert host.run("runuser -u vllm-proxy -- cat /etc/vllm-proxy/database.json").rc != 0
