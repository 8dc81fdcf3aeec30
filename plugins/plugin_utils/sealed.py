# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Secrets whose values are not at hand: a plan needs their names alone."""

from __future__ import annotations

from collections.abc import Sequence

# Why a variable cannot be computed where the vault is in the way.
LOCKED = "it lies in a vault that no given password opens"


class Sealed(str):
    """Stands for the value of a secret that cannot be read: compare it with nothing."""

    __slots__ = ()


def is_secret(path: Sequence[object]) -> bool:
    """Whether a path, from the variable's name on, leads to a secret of which the plan needs no value."""
    name, *below = path
    if name == "vllm_secrets":
        return len(below) == 2
    return (name == "litellm_proxy_keys" and len(below) == 2 and below[1] == "key") or (
        name in ("litellm_proxy_master_key", "litellm_proxy_database_password") and not below
    )
