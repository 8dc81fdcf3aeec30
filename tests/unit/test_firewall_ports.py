# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""While an instance moves, its former port stays open: a change that fails goes back there."""

from __future__ import annotations

from ansible_collections.onprem.vllm.plugins.plugin_utils.firewall_ports import with_former_ports

GLM = {"port": 8001, "protocol": "tcp", "networks": ["10.0.0.0/24"], "for": "instance glm"}
GEMMA = {"port": 8002, "protocol": "tcp", "networks": ["10.1.0.0/24"], "for": "instance gemma"}
MIRROR = {"port": 8081, "protocol": "tcp", "networks": ["10.2.0.0/24"], "for": "mirror"}


def test_a_port_that_is_left_is_open_to_whom_the_instance_is() -> None:
    former = {**GEMMA, "port": 8000}
    assert with_former_ports([GLM, GEMMA], [{"name": "gemma", "port": 8000}]) == [GLM, GEMMA, former]


def test_one_that_is_about_to_be_removed_is_open_to_whom_the_first_is() -> None:
    former = {**GLM, "port": 8000, "for": "instance gone"}
    assert with_former_ports([MIRROR, GLM], [{"name": "gone", "port": 8000}]) == [MIRROR, GLM, former]


def test_nothing_more_is_open_where_nothing_moves_or_nobody_may_ask() -> None:
    here = [{"name": "glm", "port": 8001}, {"name": "gemma", "port": None}]
    assert with_former_ports([GLM], here) == [GLM]
    assert with_former_ports([GLM, GEMMA], [{"name": "glm", "port": 8002}, {"name": "gemma", "port": 8001}]) == [
        GLM,
        GEMMA,
    ]
    assert with_former_ports([MIRROR], [{"name": "gone", "port": 8000}]) == [MIRROR]
