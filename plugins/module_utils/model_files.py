# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a model's own files say of it, read where they lie: nothing is executed, no tensor is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .model_check import CODE_OWNERS, auto_map_of, completeness_problems


def look(directory: Path, *, draft: bool = False) -> dict[str, Any] | None:
    """The model in a directory; None where there is no readable config.json.

    Args:
        draft: it may use its target's tokenizer.

    Returns:
        ``config`` as it stands in config.json, ``modelopt`` as in hf_quant_config.json, ``weight_bytes`` of all weight
        files, ``missing``: what would keep vLLM from loading it with no network, ``code``: files whose ``auto_map``
        takes classes from Python files of its own, with those classes, and the ``directory``.
    """
    config = json_of(directory / "config.json")
    if not config:
        return None
    files = {
        str(path.relative_to(directory)): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    weights = [path for name, path in files.items() if name.endswith((".safetensors", ".bin"))]
    return {
        "directory": str(directory),
        "config": config,
        "modelopt": json_of(directory / "hf_quant_config.json"),
        "weight_bytes": sum(path.stat().st_size for path in weights) or None,
        "missing": completeness_problems(files, draft=draft),
        "code": {owner: list(found) for owner in CODE_OWNERS if (found := auto_map_of(json_of(directory / owner)))},
    }


def first_of(directories: Iterable[str], *, draft: bool = False) -> dict[str, Any] | None:
    """The model in the first of the directories that has one."""
    found = (look(Path(one), draft=draft) for one in directories)
    return next((one for one in found if one is not None), None)


def json_of(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object; empty where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
