# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The control node's end of the firewall's guard: a staged table stays only if a new connection comes through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase

# The first value of an ssh option wins: with these in front no open master is joined, whatever stands behind.
UNSHARED = "-o ControlMaster=no -o ControlPath=none"
MARGIN_S = 2  # between the guard's time and the moment its work can be relied on
RETRY_S = 1


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self._task_vars = task_vars or {}
        staged = self._step("stage")
        if staged.get("failed") or not staged.get("staged"):
            return staged
        guard_s = float(staged["guard_s"])
        deadline = time.monotonic() + guard_s
        kind = self._connection.transport
        if kind == "local" or (kind != "ssh" and staged["connection"] is None):
            staged["proven_by"] = f"nothing: the connection {kind} does not come over the network"
            self._display.warning(
                "The firewall's rules are kept without proof that SSH still comes in: "
                f"Ansible's connection to this host is {kind}."
            )
            confirmed = self._step("confirm")
            return confirmed if confirmed.get("failed") else staged
        try:
            with self._new_connection(guard_s):
                self._knock(deadline - guard_s * 0.4)
                confirmed = self._step("confirm", staged_connection=staged["connection"])
        except AnsibleError as error:
            return self._undone(str(error), deadline)
        if confirmed.get("failed"):
            return self._undone(confirmed["msg"], deadline)
        client = confirmed.get("connection") or {}
        staged["proven_by"] = f"a new {kind} connection from {client.get('client', 'the control node')}"
        return staged

    def _step(self, step: str, **more: object) -> dict[str, Any]:
        return self._execute_module(
            module_name=self._task.action,
            module_args={**self._task.args, "step": step, **more},
            task_vars=self._task_vars,
        )

    @contextmanager
    def _new_connection(self, guard_s: float) -> Iterator[None]:
        """While the block runs, each command goes over a connection of its own, by the plugin's own way."""
        connection = self._connection
        if connection.transport != "ssh":
            connection.reset()
            yield
            return
        kept = {name: connection.get_option(name) for name in ("ssh_args", "reconnection_retries", "timeout")}
        connection.set_option("ssh_args", f"{UNSHARED} {kept['ssh_args'] or ''}")
        connection.set_option("reconnection_retries", 0)
        connection.set_option("timeout", min(int(kept["timeout"]), max(int(guard_s / 3), 1)))
        try:
            yield
        finally:
            for name, value in kept.items():
                connection.set_option(name, value)

    def _knock(self, until: float) -> None:
        """Reach the host, more than once where time allows: a busy sshd drops new connections at random."""
        while True:
            try:
                self._low_level_execute_command("true", sudoable=False)
            except AnsibleConnectionFailure:
                if time.monotonic() >= until:
                    raise
                time.sleep(RETRY_S)
            else:
                return

    def _undone(self, reason: str, deadline: float) -> dict[str, Any]:
        """Have the old table put back now, by the connection from before, or wait until the host has done so."""
        host = self._task_vars.get("inventory_hostname", "the host")
        try:
            undone = self._step("undo")
        except AnsibleError:
            time.sleep(max(deadline + MARGIN_S - time.monotonic(), 0))
            try:
                undone = self._step("undo")
            except AnsibleError as error:
                undone = {"failed": True, "msg": str(error)}
        if undone.get("failed"):
            back = f"the host puts the old rules back by itself, but it cannot be asked whether it has: {undone['msg']}"
        else:
            back = "the old rules are back in force, and nothing was written"
        return {
            "failed": True,
            "changed": False,
            "msg": (
                f"Firewall: the new rules were in force on {host}, but no new connection confirmed them: "
                f"{reason.strip()} -- {back}. Look at nftables_ssh_port and nftables_ssh_networks: they must let in "
                "the control node as the host sees it, after any jump host or address translation."
            ),
        }
