"""Runs the instance module's own code on a host, a tenth of a second a run, and can kill it before any of its effects.

Reads JSON: ``call`` (bring_about, roll_back or status) and its arguments, ``kill_at`` (the effect before which SIGKILL
comes, 0 for none). Answers JSON: ``result`` and, where it failed, ``message``; ``effects`` is how many there were.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from module_utils.instance import Host, InstancesFailed, Limits, bring_about
from module_utils.instance_status import status
from module_utils.rollback import roll_back

asked = json.load(sys.stdin)
effects = 0


def counted(function):
    def before(*arguments, **named):
        global effects  # noqa: PLW0603 - one counter for all functions
        reads = function is subprocess.run and arguments[0][0] != "systemctl"
        if not reads and not (function is subprocess.run and "show" in arguments[0]):
            effects += 1
            if effects == asked.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return before


for name in ("replace", "rename", "symlink", "mkdir", "unlink", "rmdir", "chmod", "fchmod"):
    setattr(os, name, counted(getattr(os, name)))
subprocess.run = counted(subprocess.run)

answer = {}
try:
    limits = Limits(**asked.get("limits", {}))
    host, options = Host(limits), asked.get("options", {})
    if asked["call"] == "roll_back":
        answer["result"] = roll_back(host, **options)
    elif asked["call"] == "status":
        answer["result"] = status(host, **options)
    else:
        answer["result"] = bring_about(asked["entries"], host, **options)
except InstancesFailed as failure:
    answer = {"result": failure.result, "message": str(failure)}
print(json.dumps({**answer, "effects": effects}))
