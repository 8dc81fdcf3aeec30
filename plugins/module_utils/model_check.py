# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Is a model directory complete, so that vLLM loads it with no network? Read from the files, nothing is executed."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[a-z]+)")
_LOCAL_IMPORT = re.compile(r"^\s*from\s+\.(?P<module>\w+)[\w.]*\s+import\b", re.MULTILINE)
# Files that may ask for Python code of the model's own.
CODE_OWNERS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_ZERO_TAIL_BYTES = 1 << 20


def safetensors_problem(path: Path) -> str | None:
    """What is wrong with a safetensors file, or None: its header must account for every byte of it.

    Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, tensors without gaps).
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            return f"{size} bytes are too few for a safetensors file"
        (length,) = struct.unpack("<Q", start)
        if length == 0:
            return "begins with zeros: it was copied incompletely"
        if length > _MAX_HEADER_BYTES or 8 + length > size:
            return "is no safetensors file, or only the beginning of one"
        try:
            header = json.loads(stream.read(length))
            tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
            end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return "has an unreadable safetensors header"
    if 8 + length + end != size:
        return f"has {size} bytes, its header promises {8 + length + end}"
    return None


def ends_in_zeros(path: Path) -> bool:
    """True if the last MiB is all zeros: what a copy leaves that reserved the space and then stopped."""
    size = path.stat().st_size
    if size < _ZERO_TAIL_BYTES:
        return False
    with path.open("rb") as stream:
        stream.seek(size - _ZERO_TAIL_BYTES)
        return not any(stream.read(_ZERO_TAIL_BYTES))


def completeness_problems(files: Mapping[str, Path], *, draft: bool = False) -> list[str]:
    """Everything that would keep vLLM from loading a model offline, each with the file's name.

    Args:
        files: path in the model's directory -> where the file lies now.
        draft: a speculative draft model, which may use its target's tokenizer. A LoRA adapter is known by its files.
    """
    present = set(files)
    problems = []
    configured = bool(present & {"config.json", "params.json"})
    # A LoRA adapter is laid over a model that has these.
    adapter = not configured and "adapter_config.json" in present
    if not configured and not adapter:
        problems.append("config.json is missing")
    has_tokenizer = bool(present & set(_TOKENIZERS)) or any(
        path.endswith(".tiktoken") or path.startswith("tokenizer.model") for path in files
    )
    if not draft and not adapter and not has_tokenizer:
        problems.append(f"no tokenizer: one of {', '.join(_TOKENIZERS)} is needed (a draft model: set `draft: true`)")
    weights = sorted(path for path in files if path.endswith(_WEIGHTS))
    if not weights:
        problems.append("no weights: no file ends in " + ", ".join(_WEIGHTS))
    problems += _missing_shards(files)
    for path in weights:
        if path.endswith(".safetensors") and (problem := safetensors_problem(files[path])):
            problems.append(f"{path} {problem}")
    problems += _missing_code(files)
    return problems


def _missing_shards(files: Mapping[str, Path]) -> list[str]:
    wanted: dict[str, str] = {}
    problems = []
    for index in sorted(path for path in files if path.endswith(".index.json")):
        document = _json(files[index])
        shards = document.get("weight_map") if document else None
        if not isinstance(shards, dict):
            problems.append(f"{index} is no weight index")
            continue
        folder = index.rpartition("/")[0]
        wanted |= {f"{folder}/{shard}".lstrip("/"): index for shard in map(str, shards.values())}
    for path in files:
        if match := _SHARD.fullmatch(path):
            for number in range(1, int(match["count"]) + 1):
                wanted.setdefault(f"{match['stem']}-{number:05}-of-{match['count']}{match['suffix']}", path)
    problems += [
        f"{shard} is missing ({why} tells of it)" for shard, why in sorted(wanted.items()) if shard not in files
    ]
    return problems


def _missing_code(files: Mapping[str, Path]) -> list[str]:
    """Python files that `auto_map` names, and what they import from beside them (the Hub would be asked for them)."""
    problems = []
    pending: list[tuple[str, str]] = []
    for owner in CODE_OWNERS:
        for reference in auto_map_of(_json(files[owner]) if owner in files else None):
            repository, separator, local = reference.rpartition("--")
            if separator:
                problems.append(
                    f"{owner} takes code from another repository, {repository}: offline it cannot be had. "
                    f"Put its files beside config.json, drop '{repository}--' from auto_map and stage the directory"
                )
                continue
            pending.append((local.partition(".")[0] + ".py", owner))
    seen: set[str] = set()
    while pending:
        module, owner = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        if module not in files:
            problems.append(f"{module} is missing ({owner} needs it)")
            continue
        text = files[module].read_text(encoding="utf-8", errors="replace")
        pending += [(f"{match['module']}.py", module) for match in _LOCAL_IMPORT.finditer(text)]
    return problems


def auto_map_of(document: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The classes, as ``module.Class``, that a model's file takes from Python files beside it."""
    return tuple(dict.fromkeys(_texts((document or {}).get("auto_map"))))


def _json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _texts(value: Any) -> list[str]:
    """Every text in nested maps and lists: auto_map holds 'module.Class' or, for tokenizers, a list of two."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else []
