# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A planned restart of an instance under load; more of this kind is in scenario long_proxy_faults."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import proxy_under_test as proxy


def test_a_drained_instance_restarts_unnoticed_and_a_reload_keeps_it_out(lab, at):
    with proxy.load() as requests:
        done = proxy.drain("out", "role2-one")
        assert done.returncode == 0, done.stdout
        at("role1").check_output("systemctl reload onprem-vllm-haproxy")
        proxy.wait("reloaded", lambda: proxy.servers(lab)["role2-one"] == "DRAIN")
        refused = proxy.drain("out", "role2-two")
        assert "tiny would have no instance left that is ready" in refused.stdout + refused.stderr
        at("role2").check_output("systemctl restart instance@8001")
        done = proxy.drain("in", "role2-one")
        assert done.returncode == 0, done.stdout
    assert proxy.failed(requests) == []
    assert proxy.servers(lab)["role2-one"] == "UP"
