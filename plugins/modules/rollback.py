# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/rollback.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rollback
short_description: Bring an earlier generation of vLLM instances back, all of it, from the host alone
version_added: 0.2.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Activates a generation that lies under C(/etc/vllm/<instance>/generations), with its unit, arguments, environment
    (secrets included), release and patches, restarts the instance and waits for a completion from it.
  - Needs neither mirror nor bundle. A generation or release that is gone, or not as it was written, is refused before
    anything stops.
  - Where the earlier generation does not become ready, the one that served comes back by itself.
options:
  instance:
    description: Name of the instance; every instance of the host without it.
    type: str
  generation:
    description: Number of the generation; the last one that was ready before the current one without it.
    type: int
  verify:
    description: Whether the release is compared with its manifest by size and time, or every file read and hashed.
    type: str
    choices: [stat, full]
    default: stat
  start_timeout_s:
    description: Seconds the unit allows a start.
    type: int
    default: 900
  stop_timeout_s:
    description: Seconds the unit allows a stop.
    type: int
    default: 120
  device_timeout_s:
    description: Seconds the unit waits for device nodes.
    type: int
    default: 60
  keep:
    description: Generations kept per instance; the current one and the last two that were ready are always kept.
    type: int
    default: 5
attributes:
  check_mode:
    description: Says where it would go, and refuses what it would refuse.
    support: full
  diff_mode:
    description: Shows the generation before and after.
    support: full
"""

EXAMPLES = r"""
- name: To the last generation that was ready before
  onprem.vllm.rollback:

- name: To one by its number
  onprem.vllm.rollback:
    instance: glm
    generation: 3
"""

RETURN = r"""
instances:
  description: What was done with each instance, or would be done in check mode.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Name of the instance.
      type: str
    generation:
      description: The generation that is current.
      type: int
    before:
      description: The generation that was current before.
      type: int
    port:
      description: Port of the generation it goes to, 0 where that is not known.
      type: int
    changed:
      description: Whether anything of it changed.
      type: bool
    restarted:
      description: Whether it was restarted.
      type: bool
    ready_seconds:
      description: Seconds from the start of its process to the first completion, where known.
      type: float
    rolled_back:
      description: Whether the start failed and the generation that served came back.
      type: bool
    reason:
      description: Why it was restarted, or left alone.
      type: str
    log:
      description: File that holds all that a failed generation said, empty where none failed.
      type: str
    releases:
      description: Directories of the releases that its generations need.
      type: list
      elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.instance import Host, InstancesFailed, Limits
from ..module_utils.rollback import roll_back


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str"},
            "generation": {"type": "int"},
            "verify": {"type": "str", "choices": ["stat", "full"], "default": "stat"},
            "start_timeout_s": {"type": "int", "default": 900},
            "stop_timeout_s": {"type": "int", "default": 120},
            "device_timeout_s": {"type": "int", "default": 60},
            "keep": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    given = module.params
    limits = Limits(given["start_timeout_s"], given["stop_timeout_s"], given["device_timeout_s"], max(1, given["keep"]))
    try:
        result = roll_back(
            Host(limits),
            given["instance"],
            given["generation"],
            full=given["verify"] == "full",
            check_mode=module.check_mode,
        )
    except InstancesFailed as failure:
        module.fail_json(msg=str(failure), **failure.result)
    instances: Any = result["instances"]
    lines = {
        key: "".join(f"{entry['name']}: generation {entry[key]}\n" for entry in instances)
        for key in ("before", "generation")
    }
    module.exit_json(**result, diff={"before": lines["before"], "after": lines["generation"]})


if __name__ == "__main__":
    main()
