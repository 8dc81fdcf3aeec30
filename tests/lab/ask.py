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


def endpoints(inventory: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Group and address of each instance of the groups below ``vllm``."""
    variables = inventory["_meta"]["hostvars"]
    for group in inventory["vllm"]["children"]:
        for host in inventory[group]["hosts"]:
            for instance in variables[host]["vllm_instances"].values():
                yield group, f"http://{host}:{instance['port']}"


def ask(address: str) -> str:
    """The answer of the first model that ``address`` serves.

    Raises:
        OSError: no answer, or an error instead of one.
        ValueError: an answer without text.
    """
    with urllib.request.urlopen(f"{address}/v1/models", timeout=SECONDS) as response:
        model = json.load(response)["data"][0]["id"]
    question = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        text = str(json.load(response)["choices"][0]["message"]["content"] or "").strip()
    if not text:
        raise ValueError("an empty completion")
    return text


def main() -> int:
    asked, failed = 0, 0
    for group, address in endpoints(json.loads(Path(sys.argv[1]).read_text())):
        asked += 1
        begin = time.monotonic()
        try:
            print(f"      {group}: {address} answered {ask(address)!r} in {time.monotonic() - begin:.2f} s", flush=True)
        except (OSError, ValueError, LookupError) as error:
            failed += 1
            print(f"      {group}: {address} did not answer: {error}", file=sys.stderr, flush=True)
    if not asked:
        print("the inventory names no instance below the group vllm", file=sys.stderr)
    return 1 if failed or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
