# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the module; the logic is in module_utils/canary.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: canary
short_description: Give instances that changed a share of the requests, and compare them with the others of their model
version_added: 0.2.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Runs on a proxy host. The instances must be out of the routes (module M(onprem.vllm.drain)) and stay out of them.
    The share is all that they get.
  - Fails where one of them answers worse. That is decided by HAProxy's log, from answers to real requests.
  - Of several instances of one model the first gets the share. One without others of its model gets none.
options:
  servers:
    description: Instances, as C(servers[].name) of the routes has them, C(<host>-<instance>).
    type: list
    elements: str
    required: true
  ports:
    description: Ports that the instances listen on now, by the name in O(servers).
    type: dict
    default: {}
  share:
    description: Percent of a model's requests.
    type: int
    default: 10
  seconds:
    description: For how long. It ends earlier where one is found to be worse. What is under way then is waited for.
    type: int
    default: 600
  requests:
    description: With fewer requests than these nothing is decided, and the module passes with a warning.
    type: int
    default: 50
  errors_percent:
    description:
      - By how many percent of its requests more may fail than of the others'.
      - Requests that it refused (4xx), that clients gave up, or that have no end ten minutes after O(seconds), have
        failed as far as they are more than the others' share and chance explain.
    type: float
    default: 1
  slowdown:
    description: How many times longer than the others' the median of its good answers may take.
    type: float
    default: 1.5
attributes:
  check_mode:
    description: Does nothing.
    support: full
  diff_mode:
    description: Has nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: A tenth of the requests for a quarter of an hour
  onprem.vllm.canary:
    servers: [gpu1-glm]
    share: 10
    seconds: 900
  delegate_to: proxy1
"""

RETURN = r"""
answers:
  description: For each model a line of figures, or why there are none.
  returned: success
  type: list
  elements: str
worse:
  description: Those of O(servers) that were found to be worse; none where they could not be judged.
  returned: failure
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.backend_keys import asked_with
from ..module_utils.canary import CanaryUnseen, CanaryWorse, Thresholds, tried
from ..module_utils.haproxy_socket import SOCKET, SocketError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "servers": {"type": "list", "elements": "str", "required": True},
            "ports": {"type": "dict", "default": {}},
            "share": {"type": "int", "default": 10},
            "seconds": {"type": "int", "default": 600},
            "requests": {"type": "int", "default": 50},
            "errors_percent": {"type": "float", "default": 1},
            "slowdown": {"type": "float", "default": 1.5},
        },
        supports_check_mode=True,
    )
    given = module.params
    if module.check_mode or not SOCKET.exists():
        module.exit_json(changed=False, answers=[])
    thresholds = Thresholds(
        given["share"], given["seconds"], given["requests"], given["errors_percent"], given["slowdown"]
    )
    try:
        ports = {name: int(port) for name, port in given["ports"].items()}
        verdicts = tried(given["servers"], thresholds, ports=ports, asked=asked_with())
    except CanaryWorse as error:
        module.fail_json(msg=str(error), worse=error.names)
    except (CanaryUnseen, SocketError) as error:
        module.fail_json(msg=str(error), worse=[])
    for verdict in verdicts:
        if not verdict.decided:
            module.warn(verdict.text)
    module.exit_json(changed=False, answers=[verdict.text for verdict in verdicts])


if __name__ == "__main__":
    main()
