# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What holds on every host after every scenario."""

from __future__ import annotations


def test_no_unit_has_failed(host):
    assert host.check_output("systemctl --failed --no-legend --plain") == ""


def test_nothing_left_the_lab(lab):
    """Not one packet to anywhere but the lab's own hosts, name lookups included."""
    count, *leaks = lab("sink", "--details").splitlines()
    assert (count, leaks) == ("0", [])
