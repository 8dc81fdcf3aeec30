# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What stops a first rollout, on a host that nothing was done to yet."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import site_under_test as site

HOST = "glm1"


def test_a_listener_that_the_firewall_would_cut_is_named_before_anything_changes(lab):
    lab("exec", HOST, "systemd-run", "--unit=exporter", "python3", "-m", "http.server", "9100")
    try:
        done = site.site("--limit", HOST)
    finally:
        lab("exec", HOST, "systemctl", "stop", "exporter")
    assert done.returncode != 0
    assert "tcp/9100" in done.stdout, done.stdout
    assert "exporter.service" in done.stdout, done.stdout
    assert "nftables_extra_rules (such as 'tcp dport 9100 accept')" in " ".join(done.stdout.split()), done.stdout
    assert not [line for line in lab("changes", HOST).splitlines() if "vllm" in line]
