# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A start is told from what systemd shows step by step, here without a systemd and without time passing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import systemd_unit
from ansible_collections.onprem.vllm.plugins.module_utils.systemd_unit import StartFailed, UnitState, wait_started

OLD = UnitState(True, "active", "running", "success", 7, 0, "old", True, False, 0, 0)
STOPPING = dataclasses.replace(OLD, active="deactivating", sub="stop-sigterm")
STARTING = dataclasses.replace(OLD, active="activating", sub="start-post", invocation="new")
STARTED = dataclasses.replace(OLD, invocation="new", job=False)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[UnitState]:
    """What systemd shows, one state each second, the last one for ever."""
    states: list[UnitState] = []
    clock = itertools.count()

    def steps() -> Iterator[UnitState]:
        yield from states
        yield from itertools.repeat(states[-1])

    told = steps()
    monkeypatch.setattr(systemd_unit, "unit_state", lambda _unit: next(told))
    monkeypatch.setattr(systemd_unit, "stop", lambda _unit: None)
    monkeypatch.setattr(systemd_unit, "journal", lambda _invocations: [])
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    return states


def test_how_long_the_process_before_takes_to_end_is_no_part_of_the_start(shown: list[UnitState]) -> None:
    shown += [OLD, *[STOPPING] * 600, *[STARTING] * 20, STARTED]
    wait_started("a", 30, "old")


def test_a_start_that_takes_too_long_fails_whatever_the_end_before_took(shown: list[UnitState]) -> None:
    shown += [*[STOPPING] * 600, STARTING]
    with pytest.raises(StartFailed, match="it was not ready after 30 s"):
        wait_started("a", 30, "old")


def test_a_loop_of_the_process_before_is_not_the_end_of_the_one_that_is_asked_for(shown: list[UnitState]) -> None:
    looping = dataclasses.replace(OLD, active="activating", sub="auto-restart")
    shown += [looping, STARTING, STARTED]
    wait_started("a", 30, "old")
    shown[:] = [dataclasses.replace(looping, invocation="new", exit_code=1, exit_status=3)]
    with pytest.raises(StartFailed, match="status 3"):
        wait_started("a", 30, "old")
