# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ask every group of serving hosts for a chat completion: ``ask.py INVENTORY.json`` (ansible-inventory --list)."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTION = "Are you there?"
SECONDS = 300  # the first sampled answer of a fresh process compiles kernels: 15 s on two idle cores


def endpoints(inventory: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Group, address and key (empty for none) of each instance of the groups below ``vllm``."""
    for group in inventory["vllm"]["children"]:
        for host in inventory[group]["hosts"]:
            variables = inventory["_meta"]["hostvars"][host]
            for name, instance in variables["vllm_instances"].items():
                key = variables.get("vllm_secrets", {}).get(name, {}).get("VLLM_API_KEY", "")
                yield group, f"http://{host}:{instance['port']}", key


def ask(address: str, key: str) -> str:
    """The answer of the first model that ``address`` serves to who has ``key``.

    Raises:
        OSError: no answer, or an error instead of one.
        ValueError: an answer without text.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/v1/models", headers=headers), timeout=SECONDS
    ) as response:
        model = json.load(response)["data"][0]["id"]
    question = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        text = str(json.load(response)["choices"][0]["message"]["content"] or "").strip()
    if not text:
        raise ValueError("an empty completion")
    return text


def main() -> int:
    asked, failed = 0, 0
    for group, address, key in endpoints(json.loads(Path(sys.argv[1]).read_text())):
        asked += 1
        begin = time.monotonic()
        try:
            print(
                f"      {group}: {address} answered {ask(address, key)!r} in {time.monotonic() - begin:.2f} s",
                flush=True,
            )
        except (OSError, ValueError, LookupError) as error:
            failed += 1
            print(f"      {group}: {address} did not answer: {error}", file=sys.stderr, flush=True)
    if not asked:
        print("the inventory names no instance below the group vllm", file=sys.stderr)
    return 1 if failed or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
