# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Facts of a host that a plan is compared with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_probe
short_description: All facts of a host that a plan is compared with, in one call
description:
  - Looks at the system, memory, file systems, packages, interpreters, listeners and GPUs of a host. Changes nothing.
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
    description: TCP ports whose listeners to name.
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
        - For each path its file system, V(total) and V(free) in bytes, V(device), V(read_only), V(noexec), and whether
          the path V(exists) already.
      type: dict
    listeners:
      description: For each listener V(port), V(pid), V(program) and V(unit).
      type: list
      elements: dict
    time:
      description: The host's clock, seconds since 1970.
      type: float
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
      description: V(driver), V(cuda), V(devices) and V(error), from nvidia-smi.
      type: dict
    packages:
      description: For each package the version V(installed), and for a missing one the V(candidate) that apt knows.
      type: dict
    systemd:
      description: Whether systemd is V(running) the host, its V(version) and V(state).
      type: dict
    firewall_tables:
      description: Existing nftables tables; null where nft is missing.
      type: list
      elements: str
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
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, host=probe(**module.params))


if __name__ == "__main__":
    main()
