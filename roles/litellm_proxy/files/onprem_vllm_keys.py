# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""LiteLLM's custom authentication without a database of its own: keys by their sha256, read anew as files change.

The files that ONPREM_VLLM_KEYS names, with colons between, hold
``{"<sha256 of a key>": {"team": …, "models": […], "expires": <Unix time>}}``; no models are all models, and no expiry
is none. Of a key in two files the first one counts, and a file that is not there holds none. How many requests a key
may send is counted in front, by HAProxy.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from fastapi import Request
from litellm.proxy._types import LitellmUserRoles, ProxyException, UserAPIKeyAuth

# Ways to name another model, address or key in the body than the one that was checked.
REFUSED_FIELDS = ("fallbacks", "context_window_fallbacks", "api_base", "base_url", "api_key", "custom_llm_provider")


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Who asks with a key.

    Raises:
        ProxyException: 401 for no, an unknown or an expired key, 403 for a model that it has no right to, 400 for a
            body that is no JSON object.
    """
    digest = hashlib.sha256((api_key or "").removeprefix("Bearer ").encode()).hexdigest()
    known = next((keys[digest] for keys in _keys() if digest in keys), None)
    if known is None:
        raise _refusal(401, "invalid_api_key", "this key is not known here")
    expires = known["expires"]
    if isinstance(expires, int | float) and time.time() >= expires:
        raise _refusal(401, "expired_api_key", f"the key of {known['team']} has expired")
    models = known["models"]
    names = [str(name) for name in models] if isinstance(models, list) else []
    if request.method == "POST":
        body = await _body(request)
        if used := sorted({*REFUSED_FIELDS} & {*body}):
            raise _refusal(400, "invalid_request_error", f"the body may not hold {', '.join(used)}")
        if names and body.get("model") not in names:
            raise _refusal(403, "model_not_allowed", f"the key of {known['team']} may use {', '.join(names)}")
    return UserAPIKeyAuth(
        api_key=digest,
        key_alias=str(known["team"]),
        team_alias=str(known["team"]),
        models=names,
        user_role=LitellmUserRoles.INTERNAL_USER,
    )


def _keys() -> Iterator[dict[str, dict[str, object]]]:
    """The keys of each file as it is now."""
    for path in map(Path, os.environ["ONPREM_VLLM_KEYS"].split(":")):
        try:
            state = path.stat()
        except FileNotFoundError:
            continue
        yield _read(path, state.st_ino, state.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, _inode: int, _changed_ns: int) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(path.read_bytes())
    return found


async def _body(request: Request) -> dict[str, object]:
    try:
        body = json.loads(await request.body())
    except ValueError:
        raise _refusal(400, "invalid_request_error", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise _refusal(400, "invalid_request_error", "the body is no JSON object")
    return body


def _refusal(code: int, kind: str, message: str) -> ProxyException:
    return ProxyException(message=message, type=kind, param=None, code=code)
