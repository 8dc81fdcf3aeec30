# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""teardown.yml gives hosts back as they were: what is left is told apart from what every host changes by itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "default"))
import site_under_test as site

HOSTS = [*site.INSTANCES, "mirror1"]
# Kept unless asked: models, caches and bundles.
KEPT = r"/(models|srv/vllm-mirror|var/cache/(vllm|flashinfer|triton|torchinductor|nv|huggingface))"
# The identity that the lab gives to a host, and what systemd, sshd, sudo, nginx, apt and Ansible leave by running.
BY_ITSELF = (
    r"/etc/(ssh(/.*)?|hosts|machine-id|\.pwd\.lock|\.updated|(passwd|group|shadow|gshadow|subuid|subgid)-?)"
    r"|/var/(log|tmp|lib/(systemd|dbus|nginx|apt|dpkg|sudo|private))(/.*)?|/(tmp|run|root|home/ops)(/.*)?|/var/cache/apt(/.*)?"
)


@pytest.fixture(scope="module", autouse=True)
def _torn_down():
    """What serves goes on while it is only asked what would go."""
    ahead = site.site("--check", playbook="playbooks/teardown.yml")
    assert ahead.returncode == 0, ahead.stdout + ahead.stderr
    assert site.changed(ahead.stdout) > 0
    again = site.site("--check")
    assert (again.returncode, site.changed(again.stdout)) == (0, 0), again.stdout + again.stderr
    done = site.site(playbook="playbooks/teardown.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def changes(host, lab):
    """Paths that differ from the host's image."""
    return [line.split(" ", 1)[1] for line in lab("changes", host).splitlines()]


def left(host, lab):
    """Paths that no host changes by itself."""
    return [path for path in changes(host, lab) if not re.fullmatch(f"{KEPT}(/.*)?|{BY_ITSELF}", path)]


@pytest.mark.parametrize("host", HOSTS)
def test_no_file_is_left_but_models_caches_and_bundles(lab, host):
    assert left(host, lab) == []


@pytest.mark.parametrize("host", HOSTS)
def test_no_account_unit_table_or_listener_is_left(lab, host):
    asked = [
        "getent passwd; getent group",
        "systemctl list-units --all --no-legend --plain; systemctl list-unit-files --no-legend",
        "nft list tables",
        "ss -Hltn 'sport != 22'",
    ]
    for command in asked[:3]:
        assert not re.search("vllm", lab("exec", host, "sh", "-c", command)), command
    assert lab("exec", host, "sh", "-c", asked[3]) == ""


def test_models_and_caches_are_kept(lab):
    for host in site.INSTANCES:
        assert "config.json" in lab("exec", host, "ls", "/models/tiny-qwen3")
        assert lab("exec", host, "sh", "-c", "find /var/cache/vllm -type f | head -1") != ""
    assert "manifest.json" in lab("exec", "mirror1", "sh", "-c", "find /srv/vllm-mirror -name manifest.json")


def test_a_second_time_there_is_nothing_to_take_back():
    done = site.site(playbook="playbooks/teardown.yml")
    assert (done.returncode, site.changed(done.stdout)) == (0, 0), done.stdout + done.stderr


def test_what_is_kept_goes_as_well_where_asked(lab):
    asked = ("hf_cache_teardown_models", "cache_dirs_teardown_caches", "wheel_mirror_teardown_bundles")
    done = site.site(*(word for name in asked for word in ("-e", f"{name}=true")), playbook="playbooks/teardown.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    for host in HOSTS:
        assert [path for path in changes(host, lab) if re.match(f"{KEPT}/", path)] == []
