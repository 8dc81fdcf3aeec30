# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The collection's own data files, each read once per process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

COLLECTION = Path(__file__).resolve().parents[2]

# libyaml reads the catalogue ten times faster than the pure Python loader; a PyYAML without it still works.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class CatalogueError(ValueError):
    """A file of the catalogue or of a role's specification is missing or is not YAML; the message names it."""


@cache
def read_yaml(path: Path) -> Any:
    """The content of a YAML file. The result is shared: do not change it.

    Raises:
        CatalogueError: the file is missing or is not YAML.
    """
    try:
        return yaml.load(path.read_bytes(), Loader=_Loader)  # noqa: S506 - both are safe loaders
    except (OSError, yaml.YAMLError) as error:
        raise CatalogueError(f"{path}: {error}") from error


def inventory_spec() -> dict[str, Any]:
    """The inventory variables ``vllm_*`` by name, each in argument-spec form (catalogue/inventory.yml)."""
    return read_yaml(COLLECTION / "catalogue" / "inventory.yml")["variables"]


@cache
def role_spec() -> dict[str, dict[str, Any]]:
    """Every public option of every role, by variable name, with the role's name added under ``role``."""
    options: dict[str, dict[str, Any]] = {}
    for path in sorted((COLLECTION / "roles").glob("*/meta/argument_specs.yml")):
        role = path.parent.parent.name
        for entry in read_yaml(path)["argument_specs"].values():
            for name, option in (entry.get("options") or {}).items():
                options.setdefault(name, {**option, "role": role})
    return options


@cache
def role_names() -> tuple[str, ...]:
    """Names of the collection's roles, sorted."""
    return tuple(sorted(path.parent.parent.name for path in (COLLECTION / "roles").glob("*/meta/argument_specs.yml")))


@cache
def shipped_profiles() -> dict[str, Any]:
    """The profiles of the catalogue by name."""
    return {path.stem: read_yaml(path) for path in sorted((COLLECTION / "catalogue" / "profiles").glob("*.yml"))}
