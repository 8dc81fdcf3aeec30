# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Arguments of ``vllm serve`` compared with what one vLLM version accepts, without that vLLM.

catalogue/serve/<version>.json holds what vLLM's own parser and registries say (serve_dump). Words are judged here as
argparse and vLLM's conversion functions judge them; a test compares the two over generated arguments. What vLLM finds
out only when it builds its configuration is left to the release itself, which parses the file before it may start.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any

from .catalogue import COLLECTION, CatalogueError
from .plan_ranges import number_range
from .role_variables import nearest, sentence
from .serve_config import JSON_LISTS, ServeArgumentRefused, command_words

try:
    from packaging.version import Version
except ImportError as error:  # ansible-core brings it; where only plugins are listed, it may be absent
    PACKAGING_MISSING = error

FOLDER = COLLECTION / "catalogue" / "serve"


@dataclass(frozen=True)
class Finding:
    """What is wrong with one argument, or worth a warning.

    Attributes:
        flag: the argument's name as the plan has it.
        stops: vLLM would refuse to start with it.
        source: where that is known from.
    """

    flag: str
    what: str
    remedy: str
    stops: bool = True
    source: str = ""


@cache
def catalogued_versions() -> tuple[str, ...]:
    """The vLLM versions whose arguments are known, oldest first."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.json")), key=Version))


@cache
def serve_catalogue(version: str) -> dict[str, Any] | None:
    """What a version accepts, or None where nobody has looked. The result is shared: do not change it.

    Raises:
        CatalogueError: the file is no JSON.
    """
    if version not in catalogued_versions():
        return None
    path = FOLDER / f"{version}.json"
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CatalogueError(f"{path}: {error}") from error


@cache
def _names(version: str) -> dict[str, str]:
    """Every long name that the parser of a version takes, to the flag it belongs to."""
    known = serve_catalogue(version) or {"flags": {}}
    names = {}
    for flag, spec in known["flags"].items():
        names[flag] = flag
        for option in (*spec.get("aliases", ()), *spec.get("negative", ())):
            if option.startswith("--"):
                names[option[2:]] = flag
    return names


def versions_with(flag: str) -> list[str]:
    """The catalogued versions that know a flag."""
    return [version for version in catalogued_versions() if flag in _names(version)]


def findings(version: str, serve: Mapping[str, Any], longest: int | None = None) -> list[Finding]:
    """What vLLM ``version`` would refuse of the arguments, and what it takes but would regret.

    Args:
        version: of one that is not catalogued only what holds for all is checked.
        serve: long names without dashes to values, as in a plan.
        longest: the model's own context in tokens, which vLLM takes where none is set; None where it is not known.
    """
    known = serve_catalogue(version)
    found = misread(version, serve)
    if known is not None:
        what = f"is deprecated in vLLM {version}, and goes in a later one"
        remedy = "See its description in `vllm serve --help=all`."
        old = (flag for flag in serve if known["flags"].get(_names(version).get(flag, ""), {}).get("deprecated"))
        found += [Finding(flag, what, remedy, False, _source(version)) for flag in old]
    right = {flag: value for flag, value in serve.items() if flag not in {one.flag for one in found if one.stops}}
    if known is not None:
        found += [*_parser_names(version, known, right), *_other_names(version, known, right)]
    found += [*_speculative(version, known, right), *_out_of_bounds(_bounds(version), right)]
    for check in (_lists, _sizes, _batch, _one_host):
        found += check(right)
    return [*found, *_utilisation(right, longest)]


def misread(version: str, serve: Mapping[str, Any]) -> list[Finding]:
    """Of all arguments together, what the parser of ``version`` does not take, or would read as something else."""
    found: list[Finding] = []
    first: dict[str, str] = {}
    for flag, value in serve.items():
        if value is None:
            continue
        if (reason := refused(version, flag, value)) is not None:
            found.append(reason)
        # A negative form, an alias: the last one on the command line would win.
        if (other := first.setdefault(_names(version).get(flag, flag.removeprefix("no-")), flag)) != flag:
            found.append(Finding(flag, f"is {other} once more", "Keep one of the two.", source="serve_config"))
    return found


def plainly(version: str, serve: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in the one form that whatever compares them reads; vLLM reads the same from the others.

    A list of one is its item where the flag takes one value, text that is a number or a map to its flag is that.
    """
    return {flag: _plainly(flag, _spec(version, flag), value) for flag, value in serve.items()}


def _plainly(flag: str, spec: Mapping[str, Any], value: Any) -> Any:
    kind = spec.get("type", "str")
    if flag in JSON_LISTS or "nargs" in spec or spec.get("kind", "store") != "store":
        return value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str) or kind not in ("int", "float", "json"):
        return value
    try:
        read = _CONVERSIONS[kind](value)
    except ValueError:
        return value
    return read if isinstance(read, dict if kind == "json" else (int, float)) else value


@cache
def _spec(version: str, flag: str) -> Mapping[str, Any]:
    """What is known of a flag; of a version that is not catalogued, where all that are say the same."""
    if (known := serve_catalogue(version)) is not None:
        return known["flags"].get(_names(version).get(flag, ""), {})
    specs = [_spec(one, flag) for one in catalogued_versions()]
    first, *rest = ({key: spec[key] for key in ("kind", "nargs", "type") if key in spec} for spec in specs)
    return first if all(other == first for other in rest) else {}


def _source(version: str) -> str:
    return f"the parser of vLLM {version}, catalogue/serve/{version}.json"


# -- what the parser itself judges -----------------------------------------------------------------------------------


def refused(version: str, flag: str, value: Any) -> Finding | None:
    """Why the parser of ``version`` does not take this argument, or None where it does, or nobody has asked it."""
    known = serve_catalogue(version)
    if known is not None and flag not in _names(version):
        return _unknown(version, flag)
    try:
        spoken = command_words(flag, value)
    except ServeArgumentRefused as error:
        return Finding(flag, "has no form that vLLM reads back as meant", str(error))
    if known is None:
        return None
    for option, words in spoken:
        owner = _names(version).get(option)
        if owner is None:
            # argparse takes a beginning for the whole where only one name begins so: another argument would change.
            whole = [name for name in _names(version) if name.startswith(option)]
            other = f": it would be read as short for {whole[0]}" if len(whole) == 1 else ""
            return Finding(
                flag,
                f"is {_shown(value)}, and has no negative form in vLLM {version}{other}",
                "Remove it (null): it is off without it.",
                source=_source(version),
            )
        spec = known["flags"][owner] | ({"type": "json-list"} if owner in JSON_LISTS else {})
        if (reason := _refused_words(spec, words)) is not None:
            what, remedy = reason
            return Finding(flag, f"is {_shown(value)}: {what} in vLLM {version}", remedy, source=_source(version))
    return None


def _unknown(version: str, flag: str) -> Finding:
    names = _names(version)
    short = {
        alias.lstrip("-"): one
        for one, spec in (serve_catalogue(version) or {"flags": {}})["flags"].items()
        for alias in spec.get("aliases", ())
    }
    elsewhere = versions_with(flag)
    what = f"vLLM {version} has no argument of this name"
    if elsewhere:
        what += f"; {', '.join(elsewhere)} ha{'s' if len(elsewhere) == 1 else 've'} it"
    whole = [name for name in names if name.startswith(flag)]
    if flag in short:
        remedy = f"Write {short[flag]}."
    elif len(whole) == 1:
        remedy = f"Write {whole[0]} in full."
    else:
        near = nearest(flag, names)
        remedy = sentence(near) if near.startswith("did") else "Remove it."
        remedy = remedy if not elsewhere else f"{remedy} Or choose a release of a version that has it."
    return Finding(flag, what, remedy, source=_source(version))


def _refused_words(spec: Mapping[str, Any], words: Sequence[str] | None) -> tuple[str, str] | None:
    kind, nargs = spec.get("kind", "store"), spec.get("nargs")
    if kind in ("toggle", "switch"):
        return (
            None
            if not words
            else ("it takes no value, and vLLM would serve a model of that name", "Write true or false.")
        )
    given = list(words or ())
    if not given and nargs != "?":
        return "it wants a value", _wanted(spec)
    if len(given) > 1 and nargs != "+":
        return "it takes one value, and vLLM would serve a model named like the next", _wanted(spec)
    judge = _lora_problem if kind == "lora" else _word_problem
    return next((problem for word in given if (problem := judge(spec, word)) is not None), None)


def _wanted(spec: Mapping[str, Any]) -> str:
    if "choices" in spec:
        return f"Give one of {', '.join(str(choice) for choice in spec['choices'])}."
    named = {
        "int": "a whole number",
        "float": "a number",
        "size": "a whole number, or text such as 8K",
        "size-or-auto": "a whole number, text such as 256K, or auto",
        "json": "a map",
        "json-list": "a list",
        "object": "a map",
        "json-or-text": "text or a map",
    }.get(spec.get("type", "str"), "text")
    return f"Give {named}{', or a list of such' if spec.get('nargs') == '+' else ''}."


def _word_problem(spec: Mapping[str, Any], word: str) -> tuple[str, str] | None:
    if spec.get("optional") and word in ("", "None"):
        return None
    kind = spec.get("type", "str")
    if kind == "object":
        return _object_problem(spec, word)
    try:
        value = _CONVERSIONS[kind](word)
    except ValueError:
        return "it is no " + {"int": "whole number", "float": "number"}.get(kind, "value of its kind"), _wanted(spec)
    choices = spec.get("choices")
    if choices is not None and value not in choices:
        near = nearest(str(value), [str(choice) for choice in choices])
        return "it is none of the choices", sentence(near)
    return None


def _size(word: str) -> int:
    """A size as vLLM reads it (vllm/utils/argparse_utils.py, human_readable_int): 1k is 1000, 1K is 1024.

    Raises:
        ValueError: it is none.
    """
    word = word.strip()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", word):
        number, suffix = match.groups()
        power = "kmgt".index(suffix.lower()) + 1
        return int(float(number) * 1000**power) if suffix.islower() else int(number) * 1024**power
    return int(word)


def size(value: Any) -> int | None:
    """Tokens or bytes of a size argument's value, or None where it is no size."""
    try:
        return _size(str(value)) if not isinstance(value, bool) else None
    except ValueError:
        return None


def _size_or_auto(word: str) -> int:
    return -1 if word.strip() == "-1" or word.strip().lower() == "auto" else _size(word)


def _json_or_text(word: str) -> Any:
    return json.loads(word) if re.match(r"(?s)^\s*{.*}\s*$", word) and word not in ("", "None") else word


_CONVERSIONS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "size": _size,
    "size-or-auto": _size_or_auto,
    "json": json.loads,
    "json-list": json.loads,
    "json-or-text": _json_or_text,
    "name": lambda word: word.lower().replace("-", "_"),
    "devices": str,
}


def _lora_problem(spec: Mapping[str, Any], word: str) -> tuple[str, str] | None:
    remedy = "Give maps with name and path."
    if word == "":
        return None
    if "=" in word and "," not in word:
        return None if word.count("=") == 1 else ("it holds more than one =", remedy)
    try:
        module = json.loads(word)
    except ValueError:
        return "it is neither name=path nor a map", remedy
    if not isinstance(module, dict) or not {"name", "path"} <= module.keys():
        return "it lacks name or path", remedy
    return _fields_problem(spec, module)


def _written_out(word: str) -> str:
    """JSON with sizes such as 80m outside of its texts as numbers (vllm/engine/arg_utils.py, 0.25.0 to 0.33.0).

    Raises:
        ValueError: one of them is no size, such as 1.5K.
    """
    parts = re.split(r'("(?:[^"\\]|\\.)*")', word)
    size_word = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
    parts[::2] = [size_word.sub(lambda found: str(_size(found.group())), part) for part in parts[::2]]
    return "".join(parts)


def _object_problem(spec: Mapping[str, Any], word: str) -> tuple[str, str] | None:
    try:
        value = json.loads(_written_out(word))
    except ValueError:
        return "it is no map", _wanted(spec)
    if not isinstance(value, dict):
        return "it is no map", _wanted(spec)
    return _fields_problem(spec, value)


def _fields_problem(spec: Mapping[str, Any], value: Mapping[str, Any]) -> tuple[str, str] | None:
    """Keys that the configuration class does not have, and values that its annotation excludes."""
    fields = spec["fields"]
    for key, inner in value.items():
        if key not in fields:
            if spec.get("open"):
                continue
            near = nearest(key, fields)
            return f"it has no key {key}", sentence(near)
        field = fields[key]
        if inner is None and field.get("optional"):
            continue
        if "choices" in field and isinstance(inner, (str, list, dict)) and inner not in field["choices"]:
            near = nearest(str(inner), [str(choice) for choice in field["choices"]])
            shown = repr(inner) if isinstance(inner, str) else _shown(inner)
            return f"{key} {shown} is none of the choices", sentence(near)
        if (kind := field.get("type")) is not None and not _is_of(kind, inner):
            return f"{key} is {_shown(inner)}", f"Give {_KINDS[kind]}."
        if "bounds" in field and (number := _finite(inner)) is not None:
            allowed = number_range(**field["bounds"])
            if allowed.wrong(number):
                return f"{key} is {_shown(inner)}, which is out of range", f"Give {allowed.allowed}."
    return None


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_WHOLE = re.compile(r"\s*[+-]?[0-9]+(_[0-9]+)*(\.0*)?\s*")
_TRUTHS = frozenset({"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"})


def _is_of(kind: str, value: Any) -> bool:
    """Whether pydantic takes a value for a field of a kind, as it does where nothing is strict."""
    if kind == "str" or isinstance(value, (dict, list)) or value is None:
        return isinstance(value, str)
    if kind == "bool":
        return value.lower() in _TRUTHS if isinstance(value, str) else value in (0, 1)
    if kind == "int":
        return bool(_WHOLE.fullmatch(value)) if isinstance(value, str) else value == value // 1
    return not isinstance(value, str) or _number(value)


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _finite(value: Any) -> float | None:
    """A number as pydantic reads one, None for what is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = value if isinstance(value, int) else float(value)
    except (ValueError, OverflowError):
        return None
    return number if isinstance(number, int) or math.isfinite(number) else None


# -- what vLLM's configuration holds the numbers to --------------------------------------------------------------------

# Besides the bounds of the fields themselves.
_BESIDES = {"max-model-len": "vllm/config/model.py, validate_model_config_after: a positive integer, or -1 for auto"}
_PORTS = {"least": 1, "most": 65535, "of": "a port of TCP"}


@cache
def _bounds(version: str) -> dict[str, dict[str, Any]]:
    """Each flag of a version with a number in it, with what the number is held to and where that is known from."""
    known = serve_catalogue(version)
    if known is None:
        return _common_bounds()
    found: dict[str, dict[str, Any]] = {}
    for flag, spec in known["flags"].items():
        if spec.get("type") not in ("int", "float", "size", "size-or-auto"):
            continue
        bounds = spec.get("bounds") or (_PORTS if flag.endswith("-port") else {"of": f"a number of vLLM {version}"})
        for name in [flag, *(alias[2:] for alias in spec.get("aliases", ()) if alias.startswith("--"))]:
            found[name] = {**bounds, "kind": spec["type"]}
    return found


@cache
def _common_bounds() -> dict[str, dict[str, Any]]:
    """Those on which all catalogued versions agree: a version between them has them, too."""
    first, *rest = (
        {flag: {**bounds, "of": "the configuration of every catalogued version"} for flag, bounds in one.items()}
        for one in map(_bounds, catalogued_versions())
    )
    return {flag: bounds for flag, bounds in first.items() if all(other.get(flag) == bounds for other in rest)}


def _out_of_bounds(known: Mapping[str, Mapping[str, Any]], serve: Mapping[str, Any]) -> Iterator[Finding]:
    """Numbers that the command line takes, and vLLM refuses as it builds its configuration, or that are none."""
    for flag, value in serve.items():
        if flag not in known:
            continue
        bounds = {key: bound for key, bound in known[flag].items() if key not in ("of", "kind")}
        allowed = number_range(**bounds)
        for one in value if isinstance(value, list) else [value]:
            try:
                number = _CONVERSIONS[known[flag]["kind"]](str(one))
            except ValueError:
                continue  # no number at all, or None where that is allowed: the parser's own matter
            source = known[flag]["of"]
            if flag in _BESIDES and number == 0:
                yield Finding(flag, "is 0", "Give a number from 1, or auto.", source=_BESIDES[flag])
            elif allowed.wrong(number):
                finite = isinstance(number, int) or math.isfinite(number)
                what = "out of range" if bounds and finite else "no finite number"
                yield Finding(
                    flag, f"is {_shown(one)}, {what}: vLLM refuses to start", f"Give {allowed.allowed}.", source=source
                )


# -- what it takes and the start refuses, or the operator regrets -----------------------------------------------------


def _parser_names(version: str, known: Mapping[str, Any], serve: Mapping[str, Any]) -> Iterator[Finding]:
    """vLLM looks parser names up when the server starts; the command line takes any text."""
    for flag, part, plugin in (
        ("tool-call-parser", "tool_call_parsers", "tool-parser-plugin"),
        ("reasoning-parser", "reasoning_parsers", "reasoning-parser-plugin"),
    ):
        name = serve.get(flag)
        if not isinstance(name, str) or not name or name in known[part] or serve.get(plugin):
            continue
        having = [one for one in catalogued_versions() if name in (serve_catalogue(one) or {part: []})[part]]
        what = f"vLLM {version} has no parser {name!r}" + (f"; {', '.join(having)} has" if having else "")
        near = nearest(name, known[part])
        yield Finding(flag, what, sentence(near), source=f"{part} in catalogue/serve/{version}.json")


def _other_names(version: str, known: Mapping[str, Any], serve: Mapping[str, Any]) -> Iterator[Finding]:
    """Arguments that name one of vLLM's own parts: the command line takes any text, the start ends without it."""
    for flag, names in known["names"].items():
        name = serve.get(flag)
        if not isinstance(name, str) or not name or _named(name, names):
            continue
        others = ((one, (serve_catalogue(one) or known)["names"][flag]) for one in catalogued_versions())
        having = [one for one, theirs in others if _named(name, theirs)]
        what = f"vLLM {version} has no {flag} {name!r}" + (f"; {', '.join(having)} has" if having else "")
        near = nearest(_in_case_of(names, name), names)
        yield Finding(flag, what, sentence(near), source=f"names in catalogue/serve/{version}.json")


def _named(name: str, names: Collection[str]) -> bool:
    return name.lower() in {one.lower() for one in names}


def _in_case_of(names: Sequence[str], name: str) -> str:
    return name.upper() if names[0].isupper() else name.lower()


def _lists(serve: Mapping[str, Any]) -> Iterator[Finding]:
    """The command line takes any JSON for them, and the server looks for items in it."""
    for flag in sorted(JSON_LISTS & serve.keys()):
        value = serve[flag]
        try:
            read = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            read = value
        if not isinstance(read, (list, NoneType)):
            yield Finding(flag, f"is {_shown(value)}: it is no list", "Give a list.", source="serve_config")


def _sizes(serve: Mapping[str, Any]) -> Iterator[Finding]:
    for flag in ("max-model-len", "max-num-batched-tokens"):
        value = serve.get(flag)
        if not isinstance(value, str) or not re.fullmatch(r"\s*\d+[kmgt]\s*", value):
            continue
        meant = value.strip()[:-1] + value.strip()[-1].upper()
        yield Finding(
            flag,
            f"{value} is {_size(value):,} to vLLM, and {meant} is {_size(meant):,}",
            "Write the number itself.",
            # A context that is 2.4 % shorter than the model's is never meant; a batch of 8,000 may be.
            stops=flag == "max-model-len",
            source="vllm/utils/argparse_utils.py, human_readable_int",
        )


# Methods whose draft is part of the model itself, or that draft without one.
_WITHOUT_DRAFT = frozenset({"mtp", "dspark", "ngram", "ngram_gpu", "suffix", "extract_hidden_states"})
# Those whose draft's configuration may say how many tokens it guesses.
_COUNTED_BY_DRAFT = frozenset({"mtp", "dspark", "dflash", "medusa", "mlp_speculator"})


def speculative_method(value: Any) -> str | None:
    """The method of a speculative_config by its one name: each family's own MTP is mtp to vLLM."""
    method = value.get("method") if isinstance(value, Mapping) else None
    if not isinstance(method, str):
        return None
    return "mtp" if method.endswith("_mtp") else method


def drafts_alone(value: Any) -> bool:
    """Whether a speculative_config's method has no use for a draft model."""
    return speculative_method(value) in _WITHOUT_DRAFT - {"mtp", "dspark"}


def _speculative(version: str, known: Mapping[str, Any] | None, serve: Mapping[str, Any]) -> Iterator[Finding]:
    value, flag = serve.get("speculative-config"), "speculative-config"
    if value is None:
        return
    source = f"SpeculativeConfig of vLLM {version}"
    if not isinstance(value, Mapping):
        yield Finding(flag, f"is {_shown(value)}: it is no map", "Give a map.", source=source)
    elif not isinstance(method := value.get("method"), (str, NoneType)):
        yield Finding(flag, f"method is {_shown(method)}, no text", "Name a method, such as mtp.", source=source)
    elif known is not None and (reason := _fields_problem(known["speculative"], value)) is not None:
        yield Finding(flag, f"{reason[0]} in vLLM {version}", reason[1], source=source)
    else:
        for what, remedy in _undrafted(value, serve):
            yield Finding(flag, what, remedy, source="vllm/config/speculative.py, SpeculativeConfig.__post_init__")


def _undrafted(value: Mapping[str, Any], serve: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What speculative decoding lacks, or has too much of, whatever the models."""
    method, model = speculative_method(value), value.get("model")
    if method is None and model is None:
        yield "names neither a method nor a draft model", "Set draft_model of the instance, or method: ngram."
        return
    if model is None and method not in _WITHOUT_DRAFT:
        yield (
            f"asks for method {method}, which needs a model",
            ("Set model to the proposer's class." if method == "custom_class" else "Set draft_model of the instance."),
        )
    counted = method == "suffix" or (model is not None and method in {None, *_COUNTED_BY_DRAFT})
    if value.get("num_speculative_tokens") is None and not counted:
        yield "does not say how many tokens to guess", "Set num_speculative_tokens."
    if value.get("tensor_parallel_size") is not None:
        yield "has tensor_parallel_size, which vLLM refuses there", "Write draft_tensor_parallel_size."
    wide, tensor = value.get("draft_tensor_parallel_size"), serve.get("tensor-parallel-size", 1)
    if wide is not None and wide not in (1, tensor):
        yield f"splits the draft over {wide} GPUs, the model over {tensor}", f"Set it to 1 or {tensor}."
    shortest, longest = value.get("prompt_lookup_min"), value.get("prompt_lookup_max")
    if isinstance(shortest, int) and isinstance(longest, int) and shortest > longest:
        yield f"has prompt_lookup_min {shortest} above prompt_lookup_max {longest}", "Raise prompt_lookup_max."


def _batch(serve: Mapping[str, Any]) -> Iterator[Finding]:
    source = "vllm/config/scheduler.py, verify_max_model_len"
    batched = size(serve.get("max-num-batched-tokens"))
    sequences, length = size(serve.get("max-num-seqs")), size(serve.get("max-model-len"))
    if batched is None:
        return
    if sequences is not None and batched < sequences:
        yield Finding(
            "max-num-batched-tokens",
            f"is {batched:,}, below max-num-seqs {sequences:,}: vLLM refuses to start",
            "Raise it, or lower max-num-seqs.",
            source=source,
        )
    whole = serve.get("enable-chunked-prefill") is False or serve.get("no-enable-chunked-prefill") is True
    if whole and length is not None and batched < length:
        yield Finding(
            "max-num-batched-tokens",
            f"is {batched:,}, below the context of {length:,}, and prefill is not chunked: vLLM refuses to start",
            "Raise it to max-model-len, or leave enable-chunked-prefill on.",
            source=source,
        )


# What splits one server over several processes or hosts, with the value that does not.
_OF_ONE = {
    "nnodes": 1,
    "node-rank": 0,
    "headless": False,
    "data-parallel-rank": None,
    "data-parallel-start-rank": None,
    "data-parallel-hybrid-lb": False,
    "data-parallel-external-lb": False,
    "data-parallel-multi-port-external-lb": False,
}


def _one_host(serve: Mapping[str, Any]) -> Iterator[Finding]:
    """Arguments of a server of which one process is a part: its start would wait for parts that nothing starts."""
    source = "vllm/entrypoints/cli/serve.py"
    size_local = serve.get("data-parallel-size-local")
    split = {flag for flag, single in _OF_ONE.items() if serve.get(flag, single) != single}
    if size_local is not None and size_local != serve.get("data-parallel-size", 1):
        split.add("data-parallel-size-local")
    for flag in sorted(split):
        what = f"is {_shown(serve[flag])}, for a server of several hosts or processes, and an instance is one on one"
        yield Finding(flag, what, "Remove it; serve a model from several hosts through the proxy.", source=source)
    servers = serve.get("api-server-count")
    if isinstance(servers, int) and servers < 1:
        what = f"is {servers}, with which vLLM starts no API server, and an instance would never become ready"
        yield Finding("api-server-count", what, "Remove it, or give a number from 1.", source=source)
    if serve.get("uds"):
        what = "makes vLLM listen on a socket of the file system in place of its port, which nothing here asks"
        yield Finding("uds", what, "Remove it.", source="vllm/entrypoints/openai/api_server.py, setup_server")
    if serve.get("grpc") is True:
        what = "serves gRPC alone, which neither the readiness completion nor the proxy speaks"
        yield Finding("grpc", what, "Remove it.", source=source)


def _utilisation(serve: Mapping[str, Any], longest: int | None) -> Iterator[Finding]:
    value = serve.get("gpu-memory-utilization")
    try:
        share = float(value) if value is not None and not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        return
    if share is None or share > 1:
        return
    length = size(serve.get("max-model-len"))
    # Unset, -1 and auto: as long as the model's own, or as the memory holds.
    context = length if length is not None and length > 0 else longest or 0
    if share > _STABLE_SHARE and context >= _LONG_CONTEXT:
        yield Finding(
            "gpu-memory-utilization",
            f"is {share:g} with a context of {context:,}: CUDA graphs are captured after the KV "
            "cache is laid out, and 0.98 ran out of memory there at 256K on the reference node",
            f"Use {_STABLE_SHARE}, the stable point.",
            stops=False,
            source="measured on the reference 8-GPU node; https://github.com/vllm-project/vllm/issues/57475",
        )


# The stable point of the reference node, and from which context on it was needed (it ran out at 256K).
_STABLE_SHARE = 0.95
_LONG_CONTEXT = 131072


def unknown_flags(version: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that are no argument of this version."""
    return [name for name in names if name not in _names(version)] if serve_catalogue(version) is not None else []


def unknown_environment(version: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that begin like vLLM's own environment variables and are none of this version's."""
    known = serve_catalogue(version)
    if known is None:
        return []
    return [name for name in names if name.startswith("VLLM_") and name not in known["environment"]]


def wrong_environment(version: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variables that vLLM would end over as it reads them, each with what it wants and a remedy."""
    known = serve_catalogue(version) or {"environment_numbers": {}, "environment_choices": {}}
    for kind, names in known["environment_numbers"].items():
        for name in names:
            if (word := environment.get(name)) is not None:
                try:
                    _CONVERSIONS[kind](word)
                except ValueError:
                    yield name, _KINDS[kind], f"Give {_KINDS[kind]}."
    for name, spec in known["environment_choices"].items():
        if (word := environment.get(name)) is None:
            continue
        given = [one.strip() for one in word.split(",") if one.strip()] if spec.get("several") else [word]
        for one in given:
            choices, any_case = spec["choices"], spec.get("any_case", False)
            if not (_named(one, choices) if any_case else one in choices):
                near = nearest(_in_case_of(choices, one) if any_case else one, choices)
                yield name, f"one of {', '.join(choices)}", sentence(near)
                break


def nearest_environment(version: str, name: str) -> str:
    """The names that a variable was probably meant to be."""
    near = nearest(name, (serve_catalogue(version) or {"environment": []})["environment"], beginning="VLLM_")
    return sentence(near) if near.startswith("did") else "Remove it, if no plugin of yours reads it."


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
