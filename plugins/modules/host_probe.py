# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Facts of a host that a plan is compared with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_probe
short_description: All facts of a host that a plan is compared with, in one call
description:
  - Looks at the system, memory, file systems, packages, interpreters, compilers, listeners, firewalls and GPUs of a
    host, and at its instances. Changes nothing, and does not fail; what cannot be found out is null, with the reason in
    RV(host.unknown).
  - GPUs are read from C(nvidia-smi); without it there are none.
version_added: 0.1.0
author: onprem.vllm founders (@onprem-vllm)
options:
  paths:
    description:
      - Paths whose file systems to look at. For one that does not exist yet, its nearest existing parent counts.
    type: list
    elements: path
    default: []
  packages:
    description: Debian packages to look for.
    type: list
    elements: str
    default: []
  ports:
    description: TCP ports whose listeners to name, and to look for in other people's firewalls.
    type: list
    elements: int
    default: []
  pythons:
    description: Versions of Python to look for, such as V(3.12).
    type: list
    elements: str
    default: []
  user:
    description: Account to look for.
    type: str
  environments:
    description: Environment of each instance by name, to look for compilers and tools as its unit would.
    type: dict
    default: {}
  control_time:
    description: The control node's clock, seconds since 1970.
    type: float
  instances:
    description: Instances whose units to look at, and the journal of those that do not serve.
    type: list
    elements: str
    default: []
  causes:
    description:
      - What a failed start is known by, in the form of C(catalogue/causes.yml).
      - V(id), V(pattern) and V(symptom) are read.
    type: list
    elements: dict
    default: []
  models:
    description:
      - Models whose files to read, each with its V(name), the V(paths) of which the first with a model counts, and
        whether it is a V(draft), which may use another's tokenizer.
    type: list
    elements: dict
    default: []
  proxy:
    description: Whether to look at the host's proxy, too.
    type: bool
    default: false
    version_added: 0.2.0
attributes:
  check_mode:
    description: Can run in check mode and predict what it would change.
    support: full
  diff_mode:
    description: Shows what changed.
    support: none
"""

EXAMPLES = r"""
- name: Look at the host
  onprem.vllm.host_probe:
    paths: [/opt/vllm, /models, /var/cache]
    packages: [numactl]
    ports: [8000]
    pythons: ["3.12"]
    user: vllm
  register: probe
"""

RETURN = r"""
host:
  description: The facts.
  returned: always
  type: dict
  contains:
    os:
      description: V(id), V(version) and V(name) of the distribution.
      type: dict
    machine:
      description: Architecture as the kernel names it.
      type: str
      sample: x86_64
    kernel:
      description: Release of the kernel.
      type: str
    glibc:
      description: Major and minor version of the C library; null where it is another one.
      type: list
      elements: int
    cpus:
      description: Processors this process may use.
      type: int
    memory:
      description: V(total) and V(available) bytes.
      type: dict
    shm:
      description: The file system at /dev/shm, in the form of RV(host.disks).
      type: dict
    disks:
      description:
        - For each path its file system, V(total) and V(free) in bytes, V(files_free) (null where it has no limit),
          V(device), V(read_only), V(noexec), and whether the path V(exists) already.
      type: dict
    tmp:
      description: The file system at /tmp, in the form of RV(host.disks).
      type: dict
    numa:
      description: For each NUMA V(node) its V(cpus) and V(memory) in bytes.
      type: list
      elements: dict
    container:
      description: Kind of container that the host is; null where it is none.
      type: str
    programs:
      description:
        - For each instance C(cc), C(c++), C(nvcc), C(ninja) and C(numactl) as its unit would find them, with V(path),
          V(version), and whether it V(runs); null where missing.
      type: dict
    listeners:
      description: For each listener V(port), V(addresses), V(pid), V(program) and V(unit).
      type: list
      elements: dict
    firewall:
      description:
        - The nftables V(tables) (null where nft is missing), the V(programs) that manage a firewall of their own, and
          the ports that a foreign chain would V(cut), each with V(port) and V(chain).
      type: dict
    instances:
      description:
        - For each instance the V(active) and V(sub) state of its unit, V(result), V(restarts), the V(causes) that its
          journal names (V(id), V(line)), the journal's V(lines) that matter, and why it is V(unreadable); null where
          there is no unit. Secrets are hidden. V(probes) are the findings that M(onprem.vllm.release_probe) recorded.
      type: dict
    proxy:
      description:
        - The V(units) of the host's proxy, each with the V(active) and V(sub) state, V(result) and V(restarts); the
          V(instances) that HAProxy leads to, each with V(name), V(model), V(status), what its last V(check) found, and
          whether it is V(up); why HAProxy is V(silent), and why the database of the V(keys) is. Null where there is no
          proxy, or nobody asked for it.
      type: dict
    models:
      description:
        - For each model the V(directory) that was read, its V(config) (C(config.json)), V(modelopt)
          (C(hf_quant_config.json)), V(weight_bytes), what is V(missing), and the V(code) of its own that it names; null
          where none of its paths has one.
      type: dict
    current:
      description:
        - For each instance of O(environments) what its current generation has of the settings that facts may decide,
          V(gdn-prefill-backend), V(numa-bind-nodes), V(compilation-config) and V(VLLM_USE_FLASHINFER_SAMPLER); null
          where it has none.
      type: dict
    time:
      description: The V(host)'s clock and the one of V(control), seconds since 1970; whether it is V(synchronised).
      type: dict
    unknown:
      description: For each part that could not be looked at, the reason.
      type: dict
    user:
      description: V(uid), V(shell) and V(home) of the account; null where there is none.
      type: dict
    selinux:
      description: V(absent), V(permissive) or V(enforcing).
      type: str
    apparmor:
      description: Whether AppArmor is on.
      type: bool
    pythons:
      description: For each version V(path), V(version) and V(headers); null where it is missing.
      type: dict
    gpu:
      description:
        - V(driver), V(cuda), V(devices) (with the V(unit) of each process, and their V(mig_devices)), V(topology) as
          C(nvidia-smi topo -m) has it, V(fabric) (V(switches), V(service), V(version) of the fabric manager) and
          V(error).
      type: dict
    packages:
      description: For each package the version V(installed), and for a missing one the V(candidate) that apt knows.
      type: dict
    systemd:
      description: Whether systemd is V(running) the host, its V(version) and V(state).
      type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.onprem.vllm.plugins.module_utils.host_probe import probe


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "path", "default": []},
            "packages": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "pythons": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str"},
            "environments": {"type": "dict", "default": {}},
            "control_time": {"type": "float"},
            "instances": {"type": "list", "elements": "str", "default": []},
            "causes": {"type": "list", "elements": "dict", "default": []},
            "models": {"type": "list", "elements": "dict", "default": []},
            "proxy": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, host=probe(**module.params))


if __name__ == "__main__":
    main()
