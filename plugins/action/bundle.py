# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Build a bundle on the control node; see plugins/plugin_utils/bundle.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from ..module_utils.host_lock import HostLocked, host_lock
from ..plugin_utils.bundle import BundleError, BundleRequest, BundleResult, build_bundle
from ..plugin_utils.patch_catalogue import PatchCatalogueError, load_patches
from ..plugin_utils.plain import plain
from ..plugin_utils.release_definition import Release, ReleaseError, load_release, load_uv

ARGUMENTS = {
    "path": {"type": "path", "required": True},
    "releases": {"type": "list", "elements": "str", "default": []},
    "definitions": {"type": "dict", "default": {}},
    "patches": {"type": "dict", "default": {}},
    "models": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {"name": {"type": "str", "required": True}, "source": {"type": "dict", "required": True}},
    },
    "uv": {"type": "bool", "default": True},
    "interpreters": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {"path": {"type": "path", "required": True}, "sha256": {"type": "str", "required": True}},
    },
    "allow_yanked": {"type": "list", "elements": "str", "default": []},
    "jobs": {"type": "int", "default": 8},
    "verify": {"type": "str", "choices": ["stat", "full"], "default": "stat"},
    "update_models": {"type": "bool", "default": False},
}


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_diff = True
    _requires_connection = False

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _unused, given = self.validate_argument_spec(argument_spec=ARGUMENTS)
        arguments = plain(given)
        root = Path(arguments["path"])
        try:
            releases = _releases(arguments)
            request = BundleRequest(
                path=root,
                releases=releases,
                uv=_uv_wheels(releases) if arguments["uv"] else (),
                interpreters=arguments["interpreters"],
                models=arguments["models"],
                allow_yanked=frozenset(arguments["allow_yanked"]),
                jobs=arguments["jobs"],
                full=arguments["verify"] == "full",
                update_models=arguments["update_models"],
            )
            if self._task.check_mode:
                return self._told(build_bundle(request, self._say, check=True))
            with host_lock(f"bundle {root}", wait_s=5, path=root / ".work" / "lock"):
                return self._told(build_bundle(request, self._say))
        except (ReleaseError, BundleError, HostLocked) as error:
            # Returned and not raised: failed_when sees no result of a plugin that raised.
            return {"failed": True, "msg": str(error)}
        except OSError as error:
            told = f"The bundle in {root} cannot be written: {error}. Is it a directory of this user, with space?"
            return {"failed": True, "msg": told}

    def _say(self, line: str) -> None:
        self._display.display(f"  {line}")

    def _told(self, result: BundleResult) -> dict[str, Any]:
        for note in result.notes:
            self._display.display(f"  {note}")
        lines = [f"+ {path}" for path in (*result.fetched, *result.written)] + [f"- {path}" for path in result.removed]
        return {
            "changed": result.changed,
            "fetched": result.fetched,
            "fetched_bytes": result.fetched_bytes,
            "written": result.written,
            "removed": result.removed,
            "notes": result.notes,
            "manifest_sha256": result.manifest_sha256,
            "bundle_id": result.bundle_id,
            "size": result.size,
            "diff": {"prepared": "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line[2:]))},
        }


def _releases(arguments: dict[str, Any]) -> list[Release]:
    """Every release once; what is wrong with any of them is told for all."""
    releases, problems = [], []
    try:
        patches = load_patches(arguments["patches"])
    except PatchCatalogueError as error:
        raise ReleaseError(str(error)) from error
    for name in dict.fromkeys(arguments["releases"]):
        try:
            releases.append(load_release(name, arguments["definitions"], patches=patches))
        except ReleaseError as error:
            problems.append(str(error))
    if problems:
        raise ReleaseError("\n".join(problems))
    return releases


def _uv_wheels(releases: list[Release]) -> list[dict[str, str]]:
    uv = load_uv()
    machines = sorted({release.machine for release in releases}) or ["x86_64"]
    return [{**uv["wheels"][machine], "version": str(uv["version"])} for machine in machines]
