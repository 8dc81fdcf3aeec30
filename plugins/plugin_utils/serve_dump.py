# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What one vLLM version accepts, as JSON: run by a Python that has that vLLM; needs no GPU and no collection.

Flags and parser names come from vLLM's own parser and registries, so nothing is written down by hand. serve_catalogue
reads the result, serve_catalogue_build makes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
import types
import typing
from typing import Any

# Where the registries of parser names stand; the first that exists counts.
_REGISTRIES = {
    "tool_call_parsers": (
        ("vllm.tool_parsers", "ToolParserManager"),
        ("vllm.tool_parsers.abstract_tool_parser", "ToolParserManager"),
    ),
    "reasoning_parsers": (
        ("vllm.reasoning", "ReasoningParserManager"),
        ("vllm.reasoning.abs_reasoning_parsers", "ReasoningParserManager"),
    ),
}
# Arguments that the command line takes any text for, and where the names stand that the start knows, in any case.
_NAMES = {
    "quantization": (("vllm.model_executor.layers.quantization", "QUANTIZATION_METHODS"),),
    "load-format": (("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"),),
    "tokenizer-mode": (("vllm.tokenizers.registry", "_VLLM_TOKENIZERS"), ("vllm.config.model", "TokenizerMode")),
    "attention-backend": (("vllm.v1.attention.backends.registry", "AttentionBackendEnum"),),
}
# What stands beside those names: the version's own choice.
_AUTOMATIC = {"attention-backend": ["AUTO"]}
_ARCHITECTURES = {
    "text": ("_TEXT_GENERATION_MODELS",),
    "multimodal": ("_MULTIMODAL_MODELS",),
    "speculative": ("_SPECULATIVE_DECODING_MODELS",),
    "pooling": (
        *("_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS"),
        "_SEQUENCE_CLASSIFICATION_MODELS",
    ),
    "transformers": ("_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS"),
}


def dump() -> dict[str, Any]:
    """Flags, parser names, architectures, speculative methods and environment variables of the vLLM at hand."""
    platforms: Any = importlib.import_module("vllm.platforms")
    # A CUDA build on a machine without a GPU infers no device; the parser asks for one.
    platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    serve_command = importlib.import_module("vllm.entrypoints.cli.serve")
    utils = importlib.import_module("vllm.utils.argparse_utils")
    _name_sources(importlib.import_module("vllm.engine.arg_utils"))
    outer = utils.FlexibleArgumentParser(prog="vllm")
    commands = {command.name: command for command in serve_command.cmd_init()}
    parser = commands["serve"].subparser_init(outer.add_subparsers(dest="subparser"))
    deprecated = set(getattr(parser, "_deprecated", set()))
    words: dict[Any, list[str]] = {}
    for option, action in parser._option_string_actions.items():
        words.setdefault(action, []).append(option)
    flags = {}
    for action, options in words.items():
        if not isinstance(action, argparse._HelpAction):
            name = next(option for option in options if option.startswith("--"))[2:]
            flags[name] = _flag(action, options, action in deprecated or bool(getattr(action, "deprecated", False)))
    speculative = importlib.import_module("vllm.config.speculative").SpeculativeConfig
    return {
        "flags": flags,
        **{part: _registered(places) for part, places in _REGISTRIES.items()},
        "speculative": _fields(speculative),
        "architectures": _architectures(),
        "names": {flag: sorted({*_AUTOMATIC.get(flag, ()), *_names(places)}) for flag, places in _NAMES.items()},
        "environment": sorted(importlib.import_module("vllm.envs").environment_variables),
        "environment_numbers": environment_numbers(importlib.import_module("vllm.envs").environment_variables),
        "environment_choices": environment_choices(importlib.import_module("vllm.envs").environment_variables),
    }


def _name_sources(arg_utils: Any) -> None:
    """Let each flag's help name the configuration class and field that it is made from: its bounds stand there."""
    original = arg_utils.get_kwargs

    def named(config: Any) -> Any:
        made = original(config)
        for field, keywords in made.items():
            keywords["help"] = f"{config.__module__}:{config.__qualname__}:{field}"
        return made

    arg_utils.get_kwargs = named


def _bounds(config: Any, field: str) -> dict[str, float]:
    """What pydantic holds a field of a configuration to, as numbers."""
    found = {}
    for constraint in getattr(getattr(config, "__pydantic_fields__", {}).get(field), "metadata", ()):
        for key, name in (("ge", "least"), ("gt", "above"), ("le", "most"), ("lt", "below")):
            if (bound := getattr(constraint, key, None)) is not None:
                found[name] = bound
    return found


def _flag_bounds(source: str) -> dict[str, Any]:
    """Bounds of a flag by the source that its help names, and that source."""
    module, _mark, rest = source.partition(":")
    name, _mark, field = rest.partition(":")
    if not field.isidentifier() or not module.startswith("vllm."):
        return {}
    bounds = _bounds(getattr(importlib.import_module(module), name), field)
    return {"bounds": {**bounds, "of": f"{module}.{name}.{field}"}} if bounds else {}


def _flag(action: Any, options: list[str], deprecated: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    negative = set(getattr(action, "negative_option_strings", ())) or {
        option for option in options if isinstance(action, argparse.BooleanOptionalAction) and option[:5] == "--no-"
    }
    positive = [option for option in options if option not in negative]
    if positive[1:]:
        found["aliases"] = sorted(option for option in positive if option != f"--{positive[0].lstrip('-')}")
    if isinstance(action, argparse.BooleanOptionalAction):
        found["kind"] = "toggle"
        found["negative"] = sorted(negative)
    elif isinstance(action, argparse._StoreTrueAction):
        found["kind"] = "switch"
    elif isinstance(action, argparse._AppendAction):
        found["kind"] = "append"
    elif type(action).__name__ == "LoRAParserAction":
        found["kind"] = "lora"
        module = type(action).__call__.__globals__["LoRAModulePath"]
        found["fields"] = {field.name: {} for field in dataclasses.fields(module)}
    if action.nargs not in (None, 0):
        found["nargs"] = action.nargs
    if "kind" not in found:
        found |= _type(action.type)
    if action.choices:
        found["choices"] = [choice for choice in action.choices if choice not in (None, "None")]
        if None not in action.choices:
            found.pop("optional", None)  # 0.28 lists the text None, which the conversion never gives
    if _is_json(action.default) and action.default not in (None, argparse.SUPPRESS):
        found["default"] = action.default
    if deprecated:
        found["deprecated"] = True
    return found | _flag_bounds(action.help or "")


def _type(parse: Any) -> dict[str, Any]:
    """The type of one word, from vLLM's conversion function: what it closes over says what it converts to."""
    name = getattr(parse, "__name__", "str")
    inner = dict(zip(parse.__code__.co_freevars, parse.__closure__ or (), strict=True)) if _is_function(parse) else {}
    if name == "_optional_type":
        return _type(inner["return_type"].cell_contents) | {"optional": True}
    if name == "_parse_type":
        return _type(inner["return_type"].cell_contents)
    if name == "parse_dataclass":
        return {"type": "object", **_fields(parse.__defaults__[0])}
    if name == "<lambda>":
        # Two of them: names with underscores for dashes, and a list of device ids.
        return {"type": "name"} if "lower" in parse.__code__.co_names else {"type": "devices"}
    known = {"human_readable_int": "size", "human_readable_int_or_auto": "size-or-auto", "loads": "json"}
    known["union_dict_and_str"] = "json-or-text"
    if name in known:
        return {"type": known[name]}
    if name in ("int", "float"):
        return {"type": name}
    return {"type": "str"}


def _is_function(parse: Any) -> bool:
    return isinstance(parse, types.FunctionType)


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration class; simple types and choices where the annotation says them."""
    hints = typing.get_type_hints(config, include_extras=False)
    fields = {}
    for field in dataclasses.fields(config):
        if field.init:
            fields[field.name] = _annotation(hints[field.name])
            if bounds := _bounds(config, field.name):
                fields[field.name]["bounds"] = bounds
    extra = getattr(config, "__pydantic_config__", {}).get("extra")
    return {"fields": fields, **({} if extra == "forbid" else {"open": True})}


def _annotation(hint: Any) -> dict[str, Any]:
    options = [one for one in _union(hint) if one is not types.NoneType]
    found: dict[str, Any] = {"optional": True} if len(options) < len(_union(hint)) else {}
    literals = [one for one in options if typing.get_origin(one) is typing.Literal]
    if literals and len(literals) == len(options):
        found["choices"] = sorted({choice for one in literals for choice in _choices(one)}, key=str)
    elif len(options) == 1 and options[0] in (int, float, bool, str):
        found["type"] = options[0].__name__
    return found


def _union(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for one in typing.get_args(hint) for inner in _union(one)]
    return [hint]


def _choices(literal: Any) -> list[Any]:
    found = []
    for one in typing.get_args(literal):
        found += _choices(one) if typing.get_origin(one) is typing.Literal else [one]
    return found


def _registered(places: tuple[tuple[str, str], ...]) -> list[str]:
    for module, name in places:
        try:
            registry = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        names: set[str] = set()
        for attribute in ("tool_parsers", "reasoning_parsers", "lazy_parsers"):
            names |= set(getattr(registry, attribute, {}) or {})
        return sorted(names)
    raise SystemExit(f"none of {', '.join(module for module, _name in places)} has the registry; vLLM moved it")


def _names(places: tuple[tuple[str, str], ...]) -> set[str]:
    """The names of a list, a map, an enumeration or a choice of literals."""
    names: set[str] = set()
    for module, name in places:
        found = getattr(importlib.import_module(module), name)
        names |= {*typing.get_args(found)} or {*getattr(found, "__members__", found)}
    return names


def _architectures() -> dict[str, list[str]]:
    registry = importlib.import_module("vllm.model_executor.models.registry")
    return {
        kind: sorted({name for table in tables for name in getattr(registry, table, {})})
        for kind, tables in _ARCHITECTURES.items()
    }


_NO_NUMBERS = ("many", "{}", "1,2", "auto", "true", "none")


def environment_numbers(variables: dict[str, Any]) -> dict[str, list[str]]:
    """Variables that vLLM reads as numbers, by letting it read some: ``int`` those that may be no fraction."""
    found: dict[str, list[str]] = {"int": [], "float": []}
    for name in sorted(variables):
        if _takes(name, variables[name], "2") and not any(_takes(name, variables[name], word) for word in _NO_NUMBERS):
            found["float" if _takes(name, variables[name], "1.5") else "int"].append(name)
    return found


def environment_choices(variables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Variables that vLLM compares with a list of words, from what its reading functions close over.

    ``any_case`` where capitals do not count, ``several`` where more than one may stand there, with commas.
    """
    # vLLM hands this one to Python's logging, in capitals (vllm/logger.py).
    found: dict[str, dict[str, Any]] = {
        "VLLM_LOGGING_LEVEL": {"choices": sorted(logging.getLevelNamesMapping()), "any_case": True}
    }
    for name, read in variables.items():
        closed = read.__code__.co_freevars if _is_function(read) else ()
        if "choices" not in closed:
            continue
        inner = dict(zip(closed, (cell.cell_contents for cell in read.__closure__ or ()), strict=True))
        choices = inner["choices"]
        found[name] = {"choices": sorted(choices() if callable(choices) else choices)}
        if not inner["case_sensitive"]:
            found[name]["any_case"] = True
        if read.__name__ != "_get_validated_env":
            found[name]["several"] = True
    return found


def _takes(name: str, read: Any, word: str) -> bool:
    before = os.environ.get(name)
    os.environ[name] = word
    try:
        read()
    except Exception:  # noqa: BLE001 - a foreign function: every end is an answer
        return False
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
    return True


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


if __name__ == "__main__":
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints on the way is no answer
    json.dump(dump(), answer)
    answer.close()
    sys.exit(0)
