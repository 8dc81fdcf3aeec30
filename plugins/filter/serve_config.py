# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Edge of the filter serve_config; the logic is in plugin_utils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from ..plugin_utils.serve_config import ServeArgumentRefused
from ..plugin_utils.serve_config import serve_config as text


def serve_config(value: Any) -> str:
    try:
        return text(value)
    except ServeArgumentRefused as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"serve_config": serve_config}
