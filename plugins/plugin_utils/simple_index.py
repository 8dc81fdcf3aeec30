# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A static package index: the pages of PEP 503 and 691 with hashes, and PEP 658 metadata beside the wheels."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from .wheels import split_wheel_name


@dataclass(frozen=True)
class IndexedWheel:
    """One wheel of the index; sizes in bytes, digests in hex."""

    filename: str
    sha256: str
    size: int
    metadata_sha256: str
    requires_python: str | None = None


def render_index(wheels: Iterable[IndexedWheel]) -> dict[str, bytes]:
    """Every page of the index by its path below the bundle: the same wheels give the same bytes."""
    projects: dict[str, list[IndexedWheel]] = {}
    for wheel in sorted(wheels, key=lambda wheel: wheel.filename):
        parts = split_wheel_name(wheel.filename)
        if parts is None:
            raise ValueError(f"{wheel.filename} is no wheel's name")
        projects.setdefault(parts[0], []).append(wheel)
    names = sorted(projects)
    links = "".join(f'<a href="{name}/">{name}</a><br>\n' for name in names)
    pages = {
        "simple/index.html": _html("Packages", links),
        "simple/index.json": _json({"projects": [{"name": name} for name in names]}),
    }
    for name in names:
        pages[f"simple/{name}/index.html"] = _html(name, "".join(map(_anchor, projects[name])))
        pages[f"simple/{name}/index.json"] = _json(
            {
                "name": name,
                "versions": sorted({wheel.filename.split("-")[1] for wheel in projects[name]}),
                "files": [_entry(wheel) for wheel in projects[name]],
            }
        )
    return pages


def _html(title: str, body: str) -> bytes:
    head = f'<meta name="pypi:repository-version" content="1.1">\n<title>{html.escape(title)}</title>'
    return f"<!DOCTYPE html>\n<html><head>\n{head}\n</head><body>\n{body}</body></html>\n".encode()


def _json(content: dict[str, object]) -> bytes:
    return (json.dumps({"meta": {"api-version": "1.1"}, **content}, indent=0, sort_keys=True) + "\n").encode()


def _address(wheel: IndexedWheel) -> str:
    return f"../../wheels/{quote(wheel.filename)}"


def _anchor(wheel: IndexedWheel) -> str:
    requires = f' data-requires-python="{html.escape(wheel.requires_python)}"' if wheel.requires_python else ""
    metadata = f"sha256={wheel.metadata_sha256}"
    # data-dist-info-metadata is the first name of data-core-metadata: pip before 23.3 knows only that one.
    return (
        f'<a href="{_address(wheel)}#sha256={wheel.sha256}"{requires} data-core-metadata="{metadata}"'
        f' data-dist-info-metadata="{metadata}">{html.escape(wheel.filename)}</a><br>\n'
    )


def _entry(wheel: IndexedWheel) -> dict[str, object]:
    metadata = {"sha256": wheel.metadata_sha256}
    entry: dict[str, object] = {
        "filename": wheel.filename,
        "url": _address(wheel),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        "core-metadata": metadata,
        "data-dist-info-metadata": metadata,
    }
    if wheel.requires_python:
        entry["requires-python"] = wheel.requires_python
    return entry
