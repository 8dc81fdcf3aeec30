# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A mapping as a systemd environment file; the quoting itself is shared with the hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..module_utils.systemd_environment import EnvironmentRefused, environment_text
from .plain import plain

__all__ = ["EnvironmentRefused", "environment_file"]


def environment_file(variables: Any) -> str:
    """The text of a systemd ``EnvironmentFile=`` for a mapping of names to strings or numbers.

    Raises:
        EnvironmentRefused: no mapping, a value that is neither string nor number, or one that systemd would drop.
    """
    if not isinstance(variables, Mapping):
        raise EnvironmentRefused(
            f"The environment must be a mapping of names to values, not {type(variables).__name__}."
        )
    return environment_text({str.__str__(name): environment_value(name, variables[name]) for name in variables})


def environment_value(name: str, value: Any) -> str:
    """A value as the process shall see it. Truth values are refused: programs disagree on 1, true and True."""
    value = plain(value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EnvironmentRefused(
            f"The value of {name} is {'a truth value' if isinstance(value, bool) else type(value).__name__}:"
            ' write the very text the program expects, in quotes ("1", "true").'
        )
    return str(value)
