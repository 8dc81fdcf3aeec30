# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the filter environment_file; the logic is in plugin_utils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from ..plugin_utils.environment_file import EnvironmentRefused
from ..plugin_utils.environment_file import environment_file as text


def environment_file(value: Any) -> str:
    try:
        return text(value)
    except EnvironmentRefused as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"environment_file": environment_file}
