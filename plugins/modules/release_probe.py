# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/release_probe.py, the probes in module_utils/probe_program.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release_probe
short_description: Prove releases in their units' environment and sandbox, before they may serve
version_added: 0.2.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Runs the probes of each instance with the release's own Python as a transient unit, which has user, environment,
    sandbox and limits of the instance's unit, taken from the unit's text.
  - What was found comes back all at once. A probe that fails is a finding and no failure of the module.
  - What was proven is recorded in C(/var/lib/vllm/<instance>/probes.json). Probes run again where the release, the
    environment, the unit, the probes, the host's compilers or driver are others, or a new generation is due.
options:
  instances:
    description: The instances whose releases are to be proven.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the instance.
        type: str
        required: true
      release_path:
        description: Directory of the release.
        type: path
        required: true
      unit:
        description: Text of the instance's unit.
        type: str
        required: true
      environment:
        description: Environment of the process, without secrets.
        type: dict
        default: {}
      serve:
        description: Text of the file for C(vllm serve --config).
        type: str
        default: ""
      probes:
        description: Identifiers of the probes, in the order in which they run; see docs/probes.md.
        type: list
        elements: str
        default: []
  waived:
    description: Identifiers of errors that the operator takes on; they become warnings.
    type: list
    elements: str
    default: []
  timeout_s:
    description: Seconds that the probes of one instance may take.
    type: int
    default: 300
  state:
    description: V(absent) removes the records of what was proven.
    type: str
    choices: [proven, absent]
    default: proven
attributes:
  check_mode:
    description: Says which instances would be probed, and probes none.
    support: full
  diff_mode:
    description: Shows what changed.
    support: none
"""

EXAMPLES = r"""
- name: Prove a release
  onprem.vllm.release_probe:
    instances:
      - name: glm
        release_path: /opt/vllm/releases/0.31.0-cu130-1f3a9c2e
        unit: "{{ lookup('ansible.builtin.template', 'vllm.service.j2') }}"
        environment: {PATH: "/opt/vllm/releases/0.31.0-cu130-1f3a9c2e/bin:/usr/bin:/bin"}
        probes: [versions-agree, jit-tools, import]
  register: proof
"""

RETURN = r"""
findings:
  description: What was found, each with V(id), V(severity), V(found), V(needed) and V(remedy); errors first.
  returned: success
  type: list
  elements: dict
probed:
  description: Names of the instances whose probes ran, or would run in check mode. The others were proven already.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.release_probe import ProbesFailed, bring_about, forget

INSTANCE = {
    "name": {"type": "str", "required": True},
    "release_path": {"type": "path", "required": True},
    "unit": {"type": "str", "required": True},
    "environment": {"type": "dict", "default": {}},
    "serve": {"type": "str", "default": ""},
    "probes": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "dict", "default": [], "options": INSTANCE},
            "waived": {"type": "list", "elements": "str", "default": []},
            "timeout_s": {"type": "int", "default": 300},
            "state": {"type": "str", "choices": ["proven", "absent"], "default": "proven"},
        },
        supports_check_mode=True,
    )
    given = module.params
    if given["state"] == "absent":
        module.exit_json(changed=forget(check_mode=module.check_mode), findings=[], probed=[])
    try:
        result = bring_about(
            given["instances"], waived=given["waived"], timeout_s=given["timeout_s"], check_mode=module.check_mode
        )
    except ProbesFailed as failure:
        module.fail_json(msg=str(failure))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
