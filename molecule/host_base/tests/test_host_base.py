# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Packages from the site's mirror alone, and a service user that owns nothing and cannot log in."""

from __future__ import annotations


def test_packages_come_without_recommended_ones(host):
    assert host.package("site-toolchain").is_installed
    assert not host.package("site-extra").is_installed


def test_a_daemon_that_a_package_brings_is_not_started(host):
    daemon = host.service("site-daemon")
    assert (daemon.is_enabled, daemon.is_running) == (True, False)


def test_other_sources_stay_but_were_not_asked(host, lab):
    assert host.file("/etc/apt/sources.list.d/unreachable.list").exists
    assert "http://role" in host.file("/etc/apt/sources.list.d/onprem-vllm.sources").content_string
    assert lab("sink").split()[0] == "0"


def test_service_user(host):
    user = host.user("vllm")
    assert (user.group, user.home, user.shell) == ("vllm", "/var/lib/vllm", "/usr/sbin/nologin")
    assert user.uid < 1000
    device_groups = {name for name in ("video", "render") if host.group(name).exists}
    assert set(user.groups) == {"vllm"} | device_groups
    assert device_groups, "without one of them this proves nothing"
    assert host.run("su vllm -c true").rc != 0
