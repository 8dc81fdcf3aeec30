# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import pytest


@pytest.mark.parametrize("path", ["/opt/vllm", "/models", "/etc/vllm", "/var/lib/vllm"])
def test_nothing_was_made(host, path):
    assert not host.file(path).exists


def test_the_probe_sees_who_holds_a_port(host):
    """What the findings of converge rest on, looked at by another program."""
    assert host.socket("tcp://0.0.0.0:22").is_listening
    assert not host.user("vllm").exists
    assert host.package("openssh-server").is_installed
