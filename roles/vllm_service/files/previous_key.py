# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""While a key is changed, an instance takes the one before too: ``vllm serve --middleware previous_key.PreviousKey``.

vLLM's environment names one key, and its ``--api-key`` stands in a file that all may read, and in the journal.
Instances restart one after the other and the proxy asks with one key, so for that time both must be right everywhere.
Imported by vLLM; the plan puts it in where PREVIOUS_VLLM_API_KEY is among an instance's secrets.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Channel = Callable[..., Awaitable[Any]]


class PreviousKey:
    """ASGI middleware before vLLM's own authentication: who sends the previous key has sent the current one."""

    def __init__(self, app: Callable[[Scope, Channel, Channel], Awaitable[None]]) -> None:
        self.app = app
        self.current = b"Bearer " + os.environ["VLLM_API_KEY"].encode()
        self.previous = hashlib.sha256(os.environ["PREVIOUS_VLLM_API_KEY"].encode()).digest()

    async def __call__(self, scope: Scope, receive: Channel, send: Channel) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = [
                (name, self._read(value) if name == b"authorization" else value) for name, value in scope["headers"]
            ]
            scope = {**scope, "headers": headers}
        await self.app(scope, receive, send)

    def _read(self, value: bytes) -> bytes:
        scheme, _blank, key = value.partition(b" ")
        # Both are hashed: how long the comparison takes tells nothing about the key.
        is_previous = secrets.compare_digest(hashlib.sha256(key).digest(), self.previous)
        return self.current if is_previous and scheme.lower() == b"bearer" else value
