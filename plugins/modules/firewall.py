# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: firewall
short_description: The nftables table inet vllm, proven by a new connection before it stays
version_added: 0.1.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Replaces the table C(inet vllm) in one transaction and touches no other table.
  - Arms a timer on the host first, which puts the old table back after O(guard_s) seconds. Only a new connection
    from the control node, made the way Ansible itself comes (arguments, jump host and all), stops it. Where that
    connection fails, or the control node dies, the old table is back by itself.
  - Writes C(/etc/vllm/firewall.nft) and the unit that loads it at boot only after that.
  - Refuses before any change, all problems at once, where the rules would keep the running SSH connection from
    coming back, or would cut a listener (IPv4 or IPv6, TCP, UDP or raw) that the operator has not named.
  - Compares the table in force with the wanted one as the kernel reads it, in a scratch network namespace.
  - Where Ansible's connection is local there is no way in to prove; the change is then kept without, and the result
    says so.
options:
  state:
    description: V(absent) takes back the table, its unit and its files.
    type: str
    choices: [present, absent]
    default: present
  rules:
    description:
      - The table as nft text, C(table inet vllm { ... }). It may use C($ssh_port).
      - Required where O(state=present).
    type: str
  unit:
    description:
      - Text of the systemd unit C(onprem-vllm-firewall.service), which loads C(/etc/vllm/firewall.nft) at boot.
      - Required where O(state=present).
    type: str
  nftables_drop_in:
    description:
      - Text of a drop-in for C(nftables.service), which loads C(/etc/vllm/firewall.nft) again after that unit has
        flushed every table.
      - Required where O(state=present).
    type: str
  ssh_port:
    description: The port that C($ssh_port) stands for; left out, the port that the running connection came in on.
    type: int
  ssh_networks:
    description: Networks that the rules let in on the SSH port, for the check before anything changes.
    type: list
    elements: str
    default: [0.0.0.0/0, "::/0"]
  cut_listeners:
    description: Listeners, such as V(tcp/9100), that the operator agrees to cut. V(ip/112) is a raw socket for VRRP.
    type: list
    elements: str
    default: []
  guard_s:
    description: Seconds after which rules that no new connection has proven are taken back.
    type: int
    default: 30
  step:
    description: Set by the action plugin, which calls the module once if nothing changes and twice if something does.
    type: str
    choices: [stage, confirm, undo]
    default: stage
  staged_connection:
    description: Set by the action plugin. The connection that the rules were staged by.
    type: dict
attributes:
  check_mode:
    description: Predicts on a host without nft too; the rules are then not checked by nft, and a warning says so.
    support: full
  diff_mode:
    description: The table and the files before and after.
    support: full
requirements:
  - nft 1.0.6 or newer, systemd and unshare (util-linux) on the host
"""

EXAMPLES = r"""
- name: Let the proxy reach the instance
  onprem.vllm.firewall:
    rules: |
      table inet vllm {
        chain input {
          type filter hook input priority filter; policy drop;
          iif "lo" accept
          ct state established,related accept
          tcp dport $ssh_port accept
          tcp dport 8000 ip saddr 10.77.0.0/24 accept
        }
      }
    unit: "{{ lookup('ansible.builtin.file', 'onprem-vllm-firewall.service', rstrip=false) }}"
    nftables_drop_in: "{{ lookup('ansible.builtin.file', 'nftables.service.conf', rstrip=false) }}"
    cut_listeners: [tcp/111]

- name: Take it back
  onprem.vllm.firewall:
    state: absent
"""

RETURN = r"""
staged:
  description: Whether a new table was put in force; false where only files were written.
  returned: success
  type: bool
guard_s:
  description: The guard's time, as the module understood it.
  returned: success
  type: int
proven_by:
  description: How the rules were proven, or why they could not be.
  returned: when a new table was put in force
  type: str
connection:
  description: The SSH connection of the run as the host sees it; null where there is none.
  returned: success
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.firewall import FirewallError, Outcome, Wanted, confirm, remove, stage, undo
from ..module_utils.firewall_rules import SshConnection
from ..module_utils.host_lock import HostLocked


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "rules": {"type": "str"},
            "unit": {"type": "str"},
            "nftables_drop_in": {"type": "str"},
            "ssh_port": {"type": "int"},
            "ssh_networks": {"type": "list", "elements": "str", "default": ["0.0.0.0/0", "::/0"]},
            "cut_listeners": {"type": "list", "elements": "str", "default": []},
            "guard_s": {"type": "int", "default": 30},
            "step": {"type": "str", "choices": ["stage", "confirm", "undo"], "default": "stage"},
            "staged_connection": {"type": "dict"},
        },
        required_if=[("state", "present", ["rules", "unit", "nftables_drop_in"])],
        supports_check_mode=True,
    )
    # Under su a user's PATH has no sbin; and nft's words are read.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    os.environ["LC_ALL"] = "C.UTF-8"
    try:
        outcome = _do(module)
    except FirewallError as error:
        module.fail_json(msg=f"Firewall: {error}", problems=error.problems)
    except HostLocked as error:
        module.fail_json(msg=str(error))
    for warning in outcome.warnings:
        module.warn(warning)
    module.exit_json(
        changed=outcome.changed,
        staged=outcome.staged,
        guard_s=module.params["guard_s"],
        connection=outcome.connection.as_dict() if outcome.connection else None,
        diff=_diff(outcome),
    )


def _do(module: AnsibleModule) -> Outcome:
    given = module.params
    if given["state"] == "absent":
        return remove(check_mode=module.check_mode)
    if given["step"] == "undo":
        return undo()
    wanted = Wanted(
        rules=given["rules"],
        unit=given["unit"],
        nftables_drop_in=given["nftables_drop_in"],
        ssh_port=given["ssh_port"],
        ssh_networks=given["ssh_networks"],
        cut_listeners=given["cut_listeners"],
        guard_s=given["guard_s"],
    )
    if given["step"] == "confirm":
        staged_by = given["staged_connection"]
        return confirm(wanted, SshConnection(**staged_by) if staged_by else None)
    return stage(wanted, check_mode=module.check_mode)


def _diff(outcome: Outcome) -> list[dict[str, str]]:
    parts = [("table inet vllm", outcome.before, outcome.after), *outcome.files]
    return [
        {"before_header": name, "after_header": name, "before": before, "after": after}
        for name, before, after in parts
        if before != after
    ]


if __name__ == "__main__":
    main()
