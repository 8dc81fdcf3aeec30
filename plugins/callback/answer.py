# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A playbook's answer alone on standard output, for programs that read it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: answer
type: stdout
author: onprem.vllm founders (@onprem-vllm)
version_added: 0.2.0
short_description: The answer of a playbook alone on standard output
description:
  - Prints what the tasks say that have a variable C(__answer), and nothing else, so that a program can read it.
  - What other tasks say, such as problems of an inventory, and failures go to standard error.
requirements:
  - Chosen for one run with the environment variable E(ANSIBLE_STDOUT_CALLBACK), V(onprem.vllm.answer).
"""

EXAMPLES = r"""
# Before a command, for that one run:
#   ANSIBLE_STDOUT_CALLBACK=onprem.vllm.answer ansible-playbook onprem.vllm.plan -e plan_query='[].host' | jq
#   ANSIBLE_STDOUT_CALLBACK=onprem.vllm.answer ansible-playbook onprem.vllm.status -e status_format=json | jq
# In ansible.cfg of a checkout that is only asked:
- name: Answers alone
  community.general.ini_file: {path: ansible.cfg, section: defaults, option: stdout_callback, value: onprem.vllm.answer}
"""

import sys
from typing import TYPE_CHECKING, Any

from ansible.plugins.callback import CallbackBase

if TYPE_CHECKING:
    from ansible.executor.task_result import CallbackTaskResult


class CallbackModule(CallbackBase):
    """See DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "onprem.vllm.answer"

    def v2_runner_on_ok(self, result: CallbackTaskResult) -> None:
        """Print the message of a debug task, where it belongs."""
        task: Any = result.task if hasattr(result, "task") else result._task  # ansible-core 2.19 and later, and before
        found = result.result if hasattr(result, "result") else result._result
        if task.action in ("debug", "ansible.builtin.debug") and "msg" in found:
            stream = sys.stdout if "__answer" in (task.vars or {}) else sys.stderr
            stream.write(f"{found['msg']}\n")
            stream.flush()

    def v2_runner_on_failed(self, result: CallbackTaskResult, ignore_errors: bool = False) -> None:
        """Say why a task failed."""
        found = result.result if hasattr(result, "result") else result._result
        if not ignore_errors:
            sys.stderr.write(f"{found.get('msg', 'failed')}\n")

    def v2_runner_on_unreachable(self, result: CallbackTaskResult) -> None:
        """Say which host cannot be reached."""
        self.v2_runner_on_failed(result)
