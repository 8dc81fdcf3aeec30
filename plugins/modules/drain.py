# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/drain.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: drain
short_description: Take instances out of the proxy's routes, and put them back
version_added: 0.2.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Runs on a proxy host. An instance that is taken out gets no new requests; the module waits until those under way
    have ended, streams included.
    Requests that an older worker has since before a reload are waited for, too.
  - Where no HAProxy of the proxy runs, there is nothing to take out.
  - Refused where too few instances of a model would be left. A reload of the proxy keeps what is out.
options:
  servers:
    description: Instances, as C(servers[].name) of the routes has them, C(<host>-<instance>).
    type: list
    elements: str
    required: true
  state:
    description: V(out) or V(in) the routes.
    type: str
    choices: [out, in]
    required: true
  ports:
    description:
      - Ports that the instances listen on now, by the name in O(servers). One that answers there is asked there from
        now on.
    type: dict
    default: {}
  proxy_follows:
    description:
      - Whether the proxy gets the inventory's configuration later in this run. V(false) means that an instance that is
        put back is first asked with the key and for the model that the proxy asks it with, and that it stays out and
        the module fails where it answers 401 or 403 or serves another one. V(true) leaves out the key, and what waits
        for that configuration is a warning.
    type: bool
    default: false
  taken:
    description: Those of O(servers) that had requests before, RV(taken). Where one of them does not come back it fails.
    type: list
    elements: str
    default: []
  max_unavailable:
    description: Instances of one model that may be out at a time, those that are down among them.
    type: int
    default: 1
  accept_outage:
    description: Whether a model's last ready instance may be taken out.
    type: bool
    default: false
  wait_s:
    description: Seconds for requests under way to end, or for instances to be up again.
    type: int
    default: 600
attributes:
  check_mode:
    description: Looks at what is in and out, and changes nothing.
    support: full
  diff_mode:
    description: Has nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: No new requests for one host's instance
  onprem.vllm.drain:
    servers: [gpu1-glm]
    state: out
  delegate_to: proxy1
"""

RETURN = r"""
busy:
  description: Instances that still had requests when the time was up.
  returned: success
  type: list
  elements: str
taken:
  description: Those of O(servers) that had requests until now and were taken out.
  returned: success
  type: list
  elements: str
serving:
  description: Those of O(servers) that get requests as far as HAProxy knows, with those that are not in its routes.
  returned: success
  type: list
  elements: str
away:
  description: All instances of the routes that get no requests now, taken out or not answering, with model and status.
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.backend_keys import asked_with
from ..module_utils.drain import DrainRefused, Limits, Taken, away, put_back, take_out
from ..module_utils.haproxy_socket import SOCKET, SocketError
from ..module_utils.host_lock import HostLocked


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "servers": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["out", "in"], "required": True},
            "ports": {"type": "dict", "default": {}},
            "proxy_follows": {"type": "bool", "default": False},
            "taken": {"type": "list", "elements": "str", "default": []},
            "max_unavailable": {"type": "int", "default": 1},
            "accept_outage": {"type": "bool", "default": False},
            "wait_s": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    given = module.params
    if not SOCKET.exists():
        said = "HAProxy does not run here, so nothing leads to the instances"
        module.exit_json(changed=False, busy=[], taken=[], serving=given["servers"], away=[], msg=said)
    limits = Limits(given["max_unavailable"], given["accept_outage"], given["wait_s"])
    taken = Taken(changed=False, serving=[], busy=[])
    try:
        if given["state"] == "out":
            taken = take_out(given["servers"], limits, check=module.check_mode)
            changed = taken.changed
        else:
            changed, waiting = put_back(
                given["servers"],
                limits,
                check=module.check_mode,
                ports={name: int(port) for name, port in given["ports"].items()},
                asked=asked_with(),
                proxy_follows=given["proxy_follows"],
                taken=given["taken"],
            )
            for said in waiting:
                module.warn(f"{said} The proxy's part of this run comes later.")
        out = away()
    except (DrainRefused, HostLocked, SocketError) as error:
        module.fail_json(msg=str(error))
    if taken.busy:
        module.warn(f"{', '.join(taken.busy)} still had requests after {given['wait_s']} s; they may be cut off.")
    serving = [name for name in given["servers"] if name not in {one["name"] for one in out}]
    module.exit_json(changed=changed, busy=taken.busy, taken=taken.serving, serving=serving, away=out)


if __name__ == "__main__":
    main()
