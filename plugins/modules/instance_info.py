# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/instance_status.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: instance_info
short_description: What the vLLM instances of a host are, and where that is not what their files say
version_added: 0.2.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Of every instance that this collection made on the host its generation, release, process, readiness and drift.
  - Drift is whatever the host has that nobody asked for. A process that is older than its files or serves another
    generation, a file of a generation or release that is not as its manifest says, a unit changed by hand.
  - Changes nothing, and returns no secret.
options:
  wanted:
    description: Id of the release of each instance that the host shall have, by name. Not compared without it.
    type: dict
  verify:
    description: Whether releases are compared with their manifest by size and time, every file hashed, or not at all.
    type: str
    choices: [none, stat, full]
    default: stat
attributes:
  check_mode:
    description: Reads alone.
    support: full
  diff_mode:
    description: Reads alone.
    support: none
"""

EXAMPLES = r"""
- name: Look at what serves
  onprem.vllm.instance_info:
  register: found
"""

RETURN = r"""
instances:
  description: One entry for each instance.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Its name.
      type: str
    unit:
      description: Its unit.
      type: str
    generation:
      description: The generation that shall run.
      type: int
    serves:
      description: The generation that its process was started from, null where none runs.
      type: int
    rollback:
      description: The generation that a rollback would go to, null where there is none.
      type: int
    generations:
      description: The generations on the host.
      type: list
      elements: int
    release:
      description:
        - The release of its generation, as C({id, path, vllm, variant, patches, flashinfer, flashinfer_decision,
          version_check_disabled}).
      type: dict
    port:
      description: The port of its generation, null where that has none.
      type: int
    activated:
      description: When the generation was activated.
      type: str
    since:
      description: When its process was started.
      type: str
    state:
      description: systemd's states, such as V(active/running); V(missing) where only the inventory knows it.
      type: str
    ready:
      description: Whether it answered a completion when it started and says to be healthy now.
      type: bool
    restarts:
      description: How often systemd has restarted it since it was started.
      type: int
    logs:
      description: Files that hold what failed generations said.
      type: list
      elements: str
    drift:
      description: What is not as it was written, a line each.
      type: list
      elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.instance import Host, Limits
from ..module_utils.instance_status import status
from ..module_utils.systemd_unit import SystemdError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict"},
            "verify": {"type": "str", "choices": ["none", "stat", "full"], "default": "stat"},
        },
        supports_check_mode=True,
    )
    try:
        found = status(Host(Limits()), module.params["wanted"], module.params["verify"])
    except SystemdError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, instances=found)


if __name__ == "__main__":
    main()
