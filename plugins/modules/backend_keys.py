# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/backend_keys.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: backend_keys
short_description: See that every instance answers to what the proxy is about to ask it with
version_added: 0.2.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Runs on a proxy host. Asks each instance of the models whose key changes for its models, with the new key; without
    one where the key goes.
  - Fails where one does not accept it and all that answer accept the former one, for then nothing is lost as long as
    the proxy keeps that one. Else it warns.
  - Fails, too, where an instance that gets requests now would be asked at another address or port, or for another
    model, and does not serve it there yet.
options:
  models:
    description: C(models) of the routes.
    type: list
    elements: dict
    required: true
  keys:
    description: Keys as they shall be, by the variable that a model names as its C(key).
    type: dict
    required: true
attributes:
  check_mode:
    description: Asks nobody, for an instance knows its new key only after the run.
    support: full
  diff_mode:
    description: Has nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Before the proxy gets the new key
  onprem.vllm.backend_keys:
    models: "{{ vllm_routes.models }}"
    keys: "{{ hostvars | onprem.vllm.route_keys(groups['vllm']) }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.backend_keys import lagging, not_there
from ..module_utils.haproxy_socket import SOCKET, SocketError, servers


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "list", "elements": "dict", "required": True},
            "keys": {"type": "dict", "required": True, "no_log": True},
        },
        supports_check_mode=True,
    )
    found = [] if module.check_mode else lagging(module.params["models"], module.params["keys"])
    for one in found:
        if not one.may_wait:
            module.warn(f"The proxy changes to a key, or to none, that not every instance accepts: {one.said}.")
    if waiting := [one.said for one in found if one.may_wait]:
        module.fail_json(
            msg="The proxy keeps its keys of the instances, for not every instance accepts what the inventory says: "
            f"{'; '.join(waiting)}. Bring these hosts to that, or take them out of group vllm, and run site.yml again."
        )
    try:
        known = servers(SOCKET) if SOCKET.exists() and not module.check_mode else []
    except SocketError:  # nothing goes through it
        known = []
    if lost := not_there(module.params["models"], module.params["keys"], known):
        module.fail_json(
            msg="The proxy keeps its routes, for the inventory's would lead away from what serves: "
            f"{'; '.join(lost)}. Run site.yml for these hosts, too, or give the inventory what serves."
        )
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
