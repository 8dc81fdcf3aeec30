# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""vLLM's own parser, to compare with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class Parser:
    """vLLM's own parser in a process of its own: importing it takes 20 s, once."""

    def __init__(self, directory: Path, python: Path) -> None:
        assert python.exists(), f"{python} is missing: make unit puts vLLM there, whose own parser is asked."
        self.file = directory / "serve.yaml"
        self.process = subprocess.Popen(
            [python, Path(__file__).with_name("vllm_serve_parser.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.answer() == {"ready": True}

    def answer(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())

    def ask(self, text: str) -> dict[str, Any]:
        """What the parser made of a file: ``read`` with all values, or ``refused`` with its message."""
        self.file.write_text(text, encoding="utf-8")
        self.process.stdin.write(f"{self.file}\n")
        self.process.stdin.flush()
        return self.answer()

    def field(self, of: str, value: float) -> dict[str, Any]:
        """Whether a field of a configuration class (``vllm.config.cache.CacheConfig.block_size``) may be a value."""
        self.process.stdin.write(json.dumps({"of": of, "value": value}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def speculative(self, value: dict[str, Any]) -> dict[str, Any]:
        """Whether SpeculativeConfig, without a model to speculate for, may be built of a map."""
        self.process.stdin.write(json.dumps({"speculative": value}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def read(self, text: str) -> dict[str, Any]:
        answer = self.ask(text)
        assert "refused" not in answer, (answer["refused"][-500:], text)
        return answer["read"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
