# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Arguments of ``vllm serve`` as the YAML file for its ``--config``, such that vLLM reads each back as meant.

vLLM (FlexibleArgumentParser.load_config_file, the same in 0.25 to 0.33) turns the file into words of a command
line: ``key: value`` into ``--key value``, true into ``--key``, a list into ``--key a b``, a mapping into JSON.
Four things get lost on that way, and each has its form here that does not:

* false is dropped: the negative flag is written (0.33 prints ``--disable-x`` in its help, and takes ``--no-enable-x``);
* a value that starts with ``-`` reads as an option, one with a dot as a dotted option that eats the next word:
  ``key=value: true`` becomes the single word ``--key=value``;
* a flag that is given several times (an append action) takes no list: it is written once per item in that form;
* mappings in a list come out as Python's repr: they are written as JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from .plain import plain

# Flags without a negative form (argparse's store_true); false is what vLLM has without them. 0.25.0 to 0.33.0.
SWITCHES = frozenset(
    {"aggregate-engine-logging", "data-parallel-multi-port-external-lb", "disable-log-stats", "grpc", "headless"}
)
# Flags that read one word of JSON where a list is meant. 0.25.0 to 0.33.0.
JSON_LISTS = frozenset({"allowed-origins", "allowed-methods", "allowed-headers"})
# Flags given once per item. 0.25.0 to 0.33.0.
REPEATED = frozenset({"middleware"})
# What must not stand in a file that everybody on the host may read, and the environment variable for it.
SECRETS = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
OUT_OF_PLACE = frozenset({"config", "help"})

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")


class ServeArgumentRefused(ValueError):
    """An argument that vLLM would drop or read as another; the message names the argument and the remedy."""


def serve_config(arguments: Any) -> str:
    """The YAML text for ``vllm serve --config`` from a mapping of flags (without ``--``) to values.

    ``null`` leaves an argument out. Underscores in a flag become dashes.

    Raises:
        ServeArgumentRefused: a value with no form that vLLM reads back as meant, a flag twice, a secret.
    """
    if not isinstance(arguments, Mapping):
        raise ServeArgumentRefused(
            f"The serve arguments must be a mapping of flags to values, not {type(arguments).__name__}."
        )
    lines: dict[str, Any] = {}
    seen: set[str] = set()
    for name, value in plain(arguments).items():
        flag = _flag(name)
        positive = flag.removeprefix("no-")
        if positive in seen:
            raise ServeArgumentRefused(f"{name}: --{positive} is given twice; keep one spelling of it.")
        seen.add(positive)
        if value is not None:
            lines.update(_lines(flag, value))
    # By flag alone: the items of a repeated flag keep their order.
    end = "\n"
    return "".join(
        f"{_key(key, end)}: {_yaml(lines[key])}\n" for key in sorted(lines, key=lambda key: key.partition("=")[0])
    )


def command_words(flag: str, value: Any) -> list[tuple[str, list[str]]]:
    """The options, each with its words, that vLLM makes of one argument of the file.

    Raises:
        ServeArgumentRefused: the value has no form that vLLM reads back as meant.
    """
    spoken: list[tuple[str, list[str]]] = []
    for key, read in _lines(flag, plain(value)).items():
        option, mark, word = key.partition("=")
        if read is True:
            words = [word] if mark else []
        elif isinstance(read, dict):
            words = [json.dumps(read)]
        else:
            words = [str(item) for item in read] if isinstance(read, list) else [str(read)]
        spoken.append((option, words))
    return spoken


# Words that YAML 1.1 reads as text, whatever stands around them.
_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*\Z")
_NOT_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
# PyYAML looks no further than 1024 characters for the colon after a key.
_LONGEST_KEY = 1000


def _yaml(value: Any) -> str:
    """``value`` on one line; PyYAML's own writer loses U+0085 where it folds lines, so texts are escaped here."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _yaml_float(value)
    if isinstance(value, str):
        return value if _BARE.match(value) and value.lower() not in _NOT_TEXT else _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_yaml(value[key])}" for key in sorted(value)) + "}"
    return "[" + ", ".join(_yaml(item) for item in value) + "]"


def _key(key: str, end: str = " ") -> str:
    """A key; a long one is marked as such, and ends its line where it stands in no braces: there a colon on the same
    line would make it a mapping that is a key."""
    text = _yaml(key)
    return text if len(text) <= _LONGEST_KEY else f"? {text}{end}"


def _quoted(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(one) or (one if one.isprintable() else _escape(ord(one))) for one in text) + '"'


def _escape(code: int) -> str:
    return f"\\U{code:08X}" if code > 0xFFFF else f"\\u{code:04X}"


def _yaml_float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    # YAML 1.1 wants a dot before an exponent: 1e-05 is text to it.
    mantissa, mark, exponent = repr(value).partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"


def _flag(name: Any) -> str:
    if not isinstance(name, str) or not _KEY.match(name):
        remedy = (
            "write a nested setting as a mapping" if isinstance(name, str) and "." in name else "write it without --"
        )
        raise ServeArgumentRefused(f"{name!r} is no flag of vllm serve: {remedy}.")
    flag = name.replace("_", "-")
    if flag in SECRETS:
        raise ServeArgumentRefused(
            f"{name}: a secret does not belong into serve.yaml, which every user of the host can read;"
            f" give it as {SECRETS[flag]} in the instance's secrets."
        )
    if flag in OUT_OF_PLACE:
        raise ServeArgumentRefused(f"{name}: cannot stand in the file that --config names; take it out.")
    return flag


def _lines(flag: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return _switch(flag, value)
    if isinstance(value, str | int | float):
        _check_word(flag, value)
        if not str(value).startswith("-"):
            return {flag: value}
        if flag == "model":
            raise ServeArgumentRefused(f"model: {value!r} starts with a dash; give the model's absolute path.")
        return {f"{flag}={value}": True}
    if isinstance(value, dict):
        _check_json(flag, value)
        return {flag: value}
    if isinstance(value, list):
        return _list(flag, value)
    raise ServeArgumentRefused(
        f"{flag}: a value of type {type(value).__name__} has no form on a command line; put it in quotes."
    )


def _switch(flag: str, value: bool) -> dict[str, Any]:
    if value:
        return {flag: True}
    if flag in SWITCHES:
        return {}
    return {flag.removeprefix("no-"): True} if flag.startswith("no-") else {f"no-{flag}": True}


def _list(flag: str, items: list[Any]) -> dict[str, Any]:
    if flag in JSON_LISTS:
        _check_json(flag, items)
        return {flag: json.dumps(items)}
    words: list[str | int | float] = []
    for item in items:
        if isinstance(item, dict):
            _check_json(flag, item)
            words.append(json.dumps(item))
            continue
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ServeArgumentRefused(
                f"{flag}: an item of type {type(item).__name__} has no form on a command line; put it in quotes."
            )
        _check_word(flag, item)
        words.append(item)
    if flag in REPEATED:
        if len(set(words)) < len(words):
            raise ServeArgumentRefused(f"{flag}: names the same item twice; keep one.")
        return {f"{flag}={word}": True for word in words}
    if not words:
        raise ServeArgumentRefused(f"{flag}: vLLM drops an empty list without a word; leave the flag out (null).")
    if len(words) == 1 and str(words[0]).startswith("-"):
        return {f"{flag}={words[0]}": True}
    for word in words:
        if str(word).startswith("-"):
            raise ServeArgumentRefused(f"{flag}: {word!r} starts with a dash and would be read as a flag.")
    return {flag: words}


def _check_json(flag: str, value: Any) -> None:
    """Refuse what JSON cannot carry, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ServeArgumentRefused(f"{flag}: the key {key!r} becomes text in JSON; put it in quotes.")
            _check_text(flag, key)
            _check_json(flag, inner)
    elif isinstance(value, list):
        for inner in value:
            _check_json(flag, inner)
    elif isinstance(value, str):
        _check_text(flag, value)
    elif value is not None and not isinstance(value, bool | int | float):
        raise ServeArgumentRefused(f"{flag}: {value!r} ({type(value).__name__}) has no form in JSON; put it in quotes.")


def _check_word(flag: str, value: str | float) -> None:
    _check_text(flag, value)
    if value == "--":
        # Python's argparse drops it, also in --flag=--.
        raise ServeArgumentRefused(f"{flag}: the value -- is an end mark on a command line and has no form there.")


def _check_text(flag: str, value: str | float) -> None:
    for character in str(value):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            raise ServeArgumentRefused(f"{flag}: holds U+{ord(character):04X}, which no command line carries.")
