# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/instance.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: instance
short_description: Run vLLM instances, each as a generation behind one unit, started when a completion was answered
version_added: 0.1.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Takes all instances of one host at once. What differs from the files on the host becomes a new generation under
    C(/etc/vllm/<instance>/generations/<n>), activated by one rename of the link C(current).
  - An instance is restarted where its process serves another generation than C(current), or does not run. The module
    waits until systemd calls the unit started, which takes a completion from the instance itself.
  - Where that fails, the last generation that was ready comes back by itself and the module fails with the cause. All
    that the failed one said is kept in C(/var/lib/vllm/<instance>/failed-<n>.log), without secrets.
  - Before anything is stopped, new arguments are read by their release's own vLLM in the unit's sandbox
    (O(argument_check)); a flag it does not know is refused while the instance serves on.
  - An interrupted run is repaired by the next one.
options:
  instances:
    description: All instances this host shall have.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the instance; its unit is C(vllm-<name>.service).
        type: str
        required: true
      release_path:
        description: Directory of the release it runs. It must hold C(manifest.json) and C(bin/vllm).
        type: path
        required: true
      serve:
        description: Text of the file for C(vllm serve --config).
        type: str
        required: true
      unit:
        description: Text of the unit. Its first lines must hold the mark by which the collection knows its own units.
        type: str
        required: true
      environment:
        description: Environment of the process, without secrets.
        type: dict
        default: {}
      served_model_name:
        description: Name the readiness completion asks for.
        type: str
        required: true
      host:
        description: Address it listens on.
        type: str
        default: 0.0.0.0
      port:
        description: Port it listens on, different for each instance.
        type: int
        required: true
      gpus:
        description: GPUs (index or UUID) whose device nodes a start waits for. Empty for none.
        type: list
        elements: str
        default: []
      gpu_memory:
        description:
          - What vLLM asks of its GPUs' memory. A start waits, within O(device_timeout_s), until that is free.
          - Not waited for without it.
        type: dict
        suboptions:
          gpus:
            description: How many GPUs it uses; of those in O(instances[].gpus), or of the host's, the first ones.
            type: int
            required: true
          utilization:
            description: The share of each that it asks for (C(gpu-memory-utilization)).
            type: float
            required: true
      tls_certificate:
        description: Certificate it serves with, where it speaks TLS itself. The readiness step accepts this one alone.
        type: path
  secrets:
    description:
      - Secret environment variables, a mapping of names to values for each instance's name. They are written to the
        root-only environment file alone.
      - They stand apart from O(instances), because Ansible logs nested parameters by their repr, in which a value
        with a backslash is not recognised as a secret.
    type: dict
    default: {}
  programs:
    description:
      - Texts of the files in C(/opt/vllm/libexec), by name, that the units and vLLM run. Installed where one differs.
    type: dict
    default: {}
  argument_check:
    description:
      - Text of the program that lets a release's vLLM read C(serve.yaml), also in check mode. Not asked without it.
      - Costs an import of vLLM for each instance whose arguments, environment or release change on a host that serves.
    type: str
  stop_at_failure:
    description: Whether the instances after one that failed are left as they are; otherwise each gets its turn.
    type: bool
    default: false
  purge_others:
    description:
      - Whether instances of this collection that are not listed are stopped and removed, before any other starts.
    type: bool
    default: false
  keep_caches:
    description: Whether the compiled graphs of removed instances stay under C(/var/cache/vllm).
    type: bool
    default: false
  start_timeout_s:
    description: Seconds the unit allows a start (C(TimeoutStartSec)).
    type: int
    default: 900
  stop_timeout_s:
    description: Seconds the unit allows a stop (C(TimeoutStopSec)).
    type: int
    default: 120
  device_timeout_s:
    description: Seconds the unit waits for device nodes, and for the GPUs' memory to be free.
    type: int
    default: 60
  keep:
    description: Generations kept per instance; the current one and its fallback are always kept.
    type: int
    default: 5
attributes:
  check_mode:
    description: Predicts what would be done, also on a host where nothing is installed yet.
    support: full
  diff_mode:
    description: Shows every changed file; of a secret only whether it changed.
    support: full
"""

EXAMPLES = r"""
- name: Run one instance
  onprem.vllm.instance:
    instances:
      - name: glm
        release_path: /opt/vllm/releases/0.28.0-cpu-1f3a9c2e
        serve: "{{ serve | onprem.vllm.serve_config }}"
        unit: "{{ lookup('ansible.builtin.template', 'vllm.service.j2') }}"
        environment: {HF_HUB_OFFLINE: "1"}
        served_model_name: tiny-qwen3
        port: 8000
    secrets: {glm: {VLLM_API_KEY: "{{ key }}"}}
    purge_others: true
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
      description: Whether its start failed and the generation before came back.
      type: bool
    reason:
      description: Why it was restarted, or left alone.
      type: str
    log:
      description: File that holds all that a failed generation said, empty where none failed.
      type: str
    releases:
      description: Directories of the releases that its generations need, the current one's among them.
      type: list
      elements: str
removed:
  description: Names of the instances that were removed.
  returned: always
  type: list
  elements: str
findings:
  description:
    - What the releases' own vLLM refuses of the arguments, in the form of preflight's findings, with V(id),
      V(severity), V(found), V(needed) and V(remedy). Empty where nothing is refused.
  returned: where it was asked
  type: list
  elements: dict
interrupted:
  description: Names of the instances that were removed, or ran and were restarted; in check mode, that would be.
  returned: always
  type: list
  elements: str
together:
  description:
    - Those of RV(interrupted) for which no order of single ones works, as they held a port or GPU that another one
      needed for its start, or served another model.
  returned: always
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.instance import Host, InstancesFailed, Limits, bring_about

INSTANCE = {
    "name": {"type": "str", "required": True},
    "release_path": {"type": "path", "required": True},
    "serve": {"type": "str", "required": True},
    "unit": {"type": "str", "required": True},
    "environment": {"type": "dict", "default": {}},
    "served_model_name": {"type": "str", "required": True},
    "host": {"type": "str", "default": "0.0.0.0"},  # noqa: S104 - the firewall decides who reaches it
    "port": {"type": "int", "required": True},
    "gpus": {"type": "list", "elements": "str", "default": []},
    "gpu_memory": {
        "type": "dict",
        "options": {
            "gpus": {"type": "int", "required": True},
            "utilization": {"type": "float", "required": True},
        },
    },
    "tls_certificate": {"type": "path"},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "dict", "required": True, "options": INSTANCE},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "programs": {"type": "dict", "default": {}},
            "argument_check": {"type": "str"},
            "stop_at_failure": {"type": "bool", "default": False},
            "purge_others": {"type": "bool", "default": False},
            "keep_caches": {"type": "bool", "default": False},
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
        result = bring_about(
            [{**entry, "secrets": given["secrets"].get(entry["name"], {})} for entry in given["instances"]],
            Host(limits),
            programs=given["programs"],
            purge_others=given["purge_others"],
            keep_caches=given["keep_caches"],
            check_mode=module.check_mode,
            argument_check=given["argument_check"],
            stop_at_failure=given["stop_at_failure"],
        )
    except InstancesFailed as failure:
        _warn(module, failure.result)
        module.fail_json(msg=str(failure), **failure.result)
    _warn(module, result)
    module.exit_json(**result)


def _warn(module: AnsibleModule, result: dict[str, Any]) -> None:
    for doubt in result.pop("doubts", []):
        module.warn(doubt)


if __name__ == "__main__":
    main()
