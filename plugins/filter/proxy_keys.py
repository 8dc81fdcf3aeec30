# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The keys of teams by their sha256."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.onprem.vllm.plugins.plugin_utils.plain import plain
from ansible_collections.onprem.vllm.plugins.plugin_utils.proxy_keys import KeysRefused
from ansible_collections.onprem.vllm.plugins.plugin_utils.proxy_keys import proxy_keys as compose


def proxy_keys(teams: Mapping[str, Any], master_key: str, models: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the proxy needs to know a key by."""
    try:
        return compose(plain(teams), plain(master_key), plain(list(models)))
    except KeysRefused as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"proxy_keys": proxy_keys}
