# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kill ansible-playbook as a power cut of the control node would, at the first task where that was not done yet.

Run after run, every task of a playbook is hit: once as it starts, once a moment into it. The file of moments already
hit is the only memory, so a run that finds nothing new to hit goes to its end, and repairs what the others left.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: kill_at_task
type: aggregate
short_description: Kill the control node at every task in turn
description: For tests of what a run leaves behind, and whether the next one repairs it.
options:
  seen:
    description: File that holds the moments already hit, one a line.
    type: path
    required: true
    env: [{name: KILL_AT_TASK_SEEN}]
  only:
    description: Hit only tasks whose name contains this.
    type: str
    default: ""
    env: [{name: KILL_AT_TASK_ONLY}]
  into:
    description: How far into a task the second hit comes, in seconds.
    type: float
    default: 1.0
    env: [{name: KILL_AT_TASK_INTO}]
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "kill_at_task"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.timer: threading.Timer | None = None

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self.cancel()
        if self.get_option("only") not in task.get_name():
            return
        place = f"{task.get_path()} {task.get_name()}"
        if self.claim(f"start of {place}"):
            kill()
        if self.claim(f"middle of {place}"):
            self.timer = threading.Timer(self.get_option("into"), kill)
            self.timer.start()

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self.cancel()

    def cancel(self) -> None:
        """A task that ended sooner has no middle to hit."""
        if self.timer:
            self.timer.cancel()
            self.timer = None

    def claim(self, moment: str) -> bool:
        """Whether a moment is new; from now on it is not, whatever becomes of this process."""
        seen = Path(self.get_option("seen"))
        if seen.exists() and moment in seen.read_text().splitlines():
            return False
        with seen.open("a") as stream:
            stream.write(moment + "\n")
        self._display.display(f"KILL at the {moment}")
        return True


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``: workers lead sessions of their own, so the process group is not enough."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # ended meanwhile
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


def kill() -> None:
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)
