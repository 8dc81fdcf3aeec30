"""argparse with ``--config FILE``, as vLLM's."""

import argparse
from pathlib import Path


class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, words):
        lines = Path(words[words.index("--config") + 1]).read_text(encoding="utf-8").splitlines()
        pairs = [line.partition(": ")[::2] for line in lines]
        return super().parse_args(
            [words[0], *(word for key, value in pairs for word in (f"--{key}", value.strip("'\"")))]
        )
