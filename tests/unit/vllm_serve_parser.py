"""Run by vLLM's own Python: reads paths of serve.yaml files, a line each, answers what vLLM's parser made of them.

A line that begins with { asks a configuration class instead: whether a field may have a value.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints on the way is no answer

import pydantic  # noqa: E402 - after the lines above, or what vLLM prints as it is imported would be an answer
from vllm.entrypoints.cli.serve import cmd_init  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


def readable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: readable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: readable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [readable(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def field_answer(of: str, value: object) -> dict[str, object]:
    """What pydantic says to one field of a class; what else the class lacks is no matter."""
    place, field = of.rsplit(".", 1)
    module, name = place.rsplit(".", 1)
    try:
        getattr(importlib.import_module(module), name)(**{field: value})
    except pydantic.ValidationError as error:
        wrong = [one["msg"] for one in error.errors() if one["loc"] == (field,)]
        return {"refused": "; ".join(wrong)} if wrong else {"read": {}}
    except Exception:  # noqa: BLE001 - the class is built of this one field, and may lack others
        return {"read": {}}
    return {"read": {}}


def speculative_answer(speculative: dict[str, object]) -> dict[str, object]:
    try:
        importlib.import_module("vllm.config.speculative").SpeculativeConfig(**speculative)
    except Exception as error:  # noqa: BLE001 - a foreign class: every end is an answer
        return {"refused": str(error)}
    return {"read": {}}


parser = FlexibleArgumentParser(prog="vllm")
{command.name: command for command in cmd_init()}["serve"].subparser_init(parser.add_subparsers(dest="subparser"))
print(json.dumps({"ready": True}), file=answers, flush=True)
for line in sys.stdin:
    if line.startswith("{"):
        asked = json.loads(line)
        said = speculative_answer(**asked) if "speculative" in asked else field_answer(**asked)
        print(json.dumps(said), file=answers, flush=True)
        continue
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            read = parser.parse_args(["serve", "--config", line.rstrip("\n")])
        answer = {"read": {name: readable(value) for name, value in vars(read).items()}}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the parser of a foreign program: every end is an answer
        answer = {"refused": errors.getvalue() or str(error)}
    print(json.dumps(answer), file=answers, flush=True)
