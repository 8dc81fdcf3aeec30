# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Each role's variables: documented, with the defaults that are true, and none used that is not documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import inventory_spec
from ansible_collections.onprem.vllm.plugins.plugin_utils.role_variables import checked

COLLECTION = Path(__file__).resolve().parents[2]
ROLES = sorted(path.parent for path in (COLLECTION / "roles").glob("*/tasks"))
TYPES = {"str", "int", "float", "bool", "list", "dict", "path", "raw"}
NAMED = pytest.mark.parametrize("role", ROLES, ids=[role.name for role in ROLES])


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None


def specs(role: Path) -> dict[str, dict[str, Any]]:
    return read(role / "meta" / "argument_specs.yml")["argument_specs"]


def options(role: Path) -> dict[str, dict[str, Any]]:
    return {name: option for spec in specs(role).values() for name, option in (spec.get("options") or {}).items()}


def internal(role: Path) -> set[str]:
    """Names that the role's vars, tasks and handlers set for themselves."""
    names = set(read(role / "vars" / "main.yml") or {})
    for path in [*role.glob("tasks/*.yml"), *role.glob("handlers/*.yml")]:
        names |= set(re.findall(r"^\s+(?:register: )?(__\w+|register: \w+)(?::|$)", path.read_text(), re.MULTILINE))
        names |= set(re.findall(r"^\s+register: (\w+)$", path.read_text(), re.MULTILINE))
    return names


def test_there_are_roles() -> None:
    assert {"preflight", "vllm_service", "nftables"} <= {role.name for role in ROLES}


@NAMED
def test_defaults_and_specs_agree_names_and_values(role: Path) -> None:
    defaults = read(role / "defaults" / "main.yml") or {}
    documented = options(role)
    required = {name for name, option in documented.items() if option.get("required")}
    assert set(defaults) == set(documented) - required
    for name, value in defaults.items():
        assert "default" in documented[name], f"{name} has no default in the specification"
        expected = documented[name]["default"]
        assert value == expected, name
        assert type(value) is type(expected), name


@NAMED
def test_one_variable_has_one_default_in_all_entry_points(role: Path) -> None:
    seen: dict[str, Any] = {}
    for spec in specs(role).values():
        for name, option in (spec.get("options") or {}).items():
            assert seen.setdefault(name, option.get("default")) == option.get("default"), name


@NAMED
def test_every_option_has_a_type_a_description_and_its_role_s_prefix(role: Path) -> None:
    for name, option in walk(options(role)):
        assert option.get("type") in TYPES, name
        text = option.get("description")
        assert text, name
        assert all(isinstance(line, str) for line in (text if isinstance(text, list) else [text])), name
        if option["type"] == "list":
            assert option.get("elements") in TYPES, name
    for name in options(role):
        assert name.startswith(f"{role.name}_"), name
    assert {"main", "teardown"} <= set(specs(role))
    for entry in specs(role).values():
        assert entry.get("short_description")


@NAMED
def test_defaults_fit_their_own_types(role: Path) -> None:
    for name, option in options(role).items():
        problems: list[dict[str, str]] = []
        checked(option.get("default"), option, name, problems)
        assert problems == []


@NAMED
def test_every_variable_that_is_used_is_documented_or_internal(role: Path) -> None:
    known = set(options(role)) | internal(role) | module_parameters()
    files = [path for part in ("tasks", "templates", "handlers", "vars") for path in (role / part).rglob("*")]
    for path in files:
        if not path.is_file():
            continue
        # Names only where they are values: a tag, a module or a file of the same beginning is no variable.
        text = re.sub(r"^\s*tags: \[.*\]$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        used = set(re.findall(rf"(?<![\w./-])(?:__)?{role.name}_\w+(?![\w./-]*\.(?:yml|j2|py|service))", text))
        assert used <= known, f"{path.relative_to(COLLECTION)} uses {sorted(used - known)}"


@NAMED
def test_what_is_reckoned_with_or_decided_by_may_be_text(role: Path) -> None:
    """-e name=90 is text, which argument specs accept and do not turn into a number: a template has to."""
    reckoned = r"(?:[-+*/%]|[<>]=?) *(?:{0})\b(?! *\| *(?:int|float)\b)|\b(?:{0}) *(?:[-+*/%]|[<>]=?)(?!\w)"
    decided = r"(?:\bif|\bnot|\band|\bor|when:|- ) *(?:{0})\b(?! *\| *bool\b)(?! is | in |:)"
    kinds = {name: option.get("type") for name, option in options(role).items()}
    found = []
    for kind, pattern in (("int", reckoned), ("float", reckoned), ("bool", decided)):
        names = "|".join(name for name, one in kinds.items() if one == kind)
        for part in ("tasks", "templates", "vars") if names else ():
            for path in filter(Path.is_file, (role / part).rglob("*")):
                lines = path.read_text(encoding="utf-8").splitlines()
                found += [line for line in lines if re.search(pattern.format(names), line)]
    assert found == []


def module_parameters() -> set[str]:
    """Parameters of the collection's modules: one may begin like a role's variable (nftables_drop_in)."""
    names: set[str] = set()
    for path in (COLLECTION / "plugins" / "modules").glob("*.py"):
        found = re.search(r'^DOCUMENTATION = r?"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        assert found is not None, path
        names |= set(yaml.safe_load(found[1]).get("options") or {})
    return names


@NAMED
def test_every_documented_variable_is_used(role: Path) -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for part in ("tasks", "templates", "handlers", "vars")
        for path in (role / part).rglob("*")
        if path.is_file()
    )
    text += "\n".join(path.read_text(encoding="utf-8") for path in (COLLECTION / "playbooks").glob("*.yml"))
    unused = [name for name in options(role) if not re.search(rf"\b{name}\b", text)]
    assert unused == [] or set(unused) <= read_by_the_plan(), unused


def read_by_the_plan() -> set[str]:
    """Variables that the plan turns into something else; the role documents them, for they are about its matter."""
    text = (COLLECTION / "plugins" / "plugin_utils" / "plan.py").read_text(encoding="utf-8")
    return set(re.findall(r'self\.value\("(\w+)"\)', text))


@NAMED
def test_a_role_can_be_taken_back_and_says_what_it_is(role: Path) -> None:
    assert (role / "tasks" / "teardown.yml").is_file()
    assert (role / "README.md").is_file()
    galaxy = read(role / "meta" / "main.yml")
    assert galaxy["galaxy_info"]["license"] == "GPL-3.0-or-later"
    assert not galaxy.get("dependencies")


def set_by_playbooks() -> set[str]:
    """Variables that playbooks hand to roles and that come from the plan, or from what an earlier role told."""

    def handed(node: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(node, list):
            for child in node:
                yield from handed(child)
        elif isinstance(node, dict):
            if any(key.endswith(("import_role", "include_role")) for key in node):
                yield from (node.get("vars") or {}).items()
            if "role" in node:
                yield from node.items()
            for child in node.values():
                yield from handed(child)

    playbooks = (COLLECTION / "playbooks").glob("**/*.yml")
    pairs = [pair for path in playbooks for pair in handed(yaml.safe_load(path.read_text(encoding="utf-8")))]
    told = re.compile(r"vllm_plan|vllm_routes|vllm_secrets|__backend_keys|__turn|hostvars|_pruned|_result")
    return {name for name, value in pairs if told.search(str(value)) and not name.startswith("__")}


def test_what_the_playbooks_set_themselves_is_known_to_the_plan() -> None:
    planned = yaml.safe_load((COLLECTION / "catalogue/inventory.yml").read_text(encoding="utf-8"))["planned"]
    assert set(planned) == set_by_playbooks()


def test_inventory_variables_have_types_and_descriptions() -> None:
    for name, option in walk(inventory_spec()):
        assert option.get("type") in TYPES, name
        assert option.get("description"), name
    for name, option in inventory_spec().items():
        assert name.startswith("vllm_")
        if option["type"] in ("list", "dict"):
            assert "default" in option, name
        problems: list[dict[str, str]] = []
        checked(option.get("default"), option, name, problems)
        assert problems == []


def walk(named: dict[str, dict[str, Any]], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, option in named.items():
        yield f"{prefix}{name}", option
        yield from walk(option.get("options") or {}, f"{prefix}{name}.")
        yield from walk((option.get("each") or {}).get("options") or {}, f"{prefix}{name}.<name>.")
