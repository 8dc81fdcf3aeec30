# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""In which turns the instances of one host restart, so that of no model more are out of the routes than may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def turns(
    interrupted: Sequence[str],
    serving: Sequence[str],
    instances: Sequence[Mapping[str, Any]],
    host: str,
    at_a_time: int,
    together: Sequence[str],
) -> list[list[str]]:
    """Names of the instances that go out together, a list for each turn; one empty list where none goes out.

    Those that get no requests go first, so that they are back before another of their model goes out.

    Args:
        interrupted: instances of the host that are restarted or removed.
        serving: those that get requests, as the routes call them, ``<host>-<instance>``.
        instances: those of the host's plan, each with ``name`` and ``served_model_name``.
        at_a_time: how many of a model may go out together.
        together: those for which no order of single ones works, for they hold a port or GPU that another one needs, or
            change the model. All go out together then.
    """
    if together:
        return [list(interrupted)]
    models = {str(one["name"]): str(one["served_model_name"]) for one in instances}
    found: list[list[str]] = [[]]
    for model in sorted({models[name] for name in interrupted if name in models}):
        names = [name for name in interrupted if models.get(name) == model]
        down = [name for name in names if f"{host}-{name}" not in serving]
        up = [name for name in names if name not in down]
        batches = [down] if down else []
        batches += [up[first : first + at_a_time] for first in range(0, len(up), at_a_time)]
        while len(found) < len(batches):
            found.append([])
        for turn, batch in zip(found, batches, strict=False):
            turn.extend(batch)
    removed = [name for name in interrupted if name not in models]
    # Last, as all that is no restart; and alone, for its model may be one of those before.
    return [turn for turn in [*found, removed] if turn] or [[]]
