# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Versions that nobody may install, whoever asks for them: catalogue/refused.yml."""

from __future__ import annotations

from collections.abc import Mapping

from .catalogue import COLLECTION, read_yaml


def refusals(versions: Mapping[str, str]) -> list[str]:
    """Why some of these versions are refused, one text each.

    Args:
        versions: of packages, by normalised name.
    """
    refused = read_yaml(COLLECTION / "catalogue" / "refused.yml")
    return [
        f"{name} {versions[name]} is refused: {found[versions[name]]}"
        for name, found in refused.items()
        if versions.get(name) in found
    ]
