# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Cache directories of one host's instances."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cache_dirs
short_description: Cache directories of instances, one per release, through systemd-tmpfiles
version_added: 0.1.0
description:
  - Writes one C(tmpfiles.d) file and applies it, so that the directories are there now and after every boot.
  - Directories are compared by what they are, not by the file. A wrong owner or mode is repaired, also of files inside.
  - Removes the caches of releases that are no longer built on the host, and of instances that are gone.
options:
  instances:
    description: The instances of the host, C(plan.instances). Of each, C(name) and C(release_id) are used.
    type: list
    elements: dict
    required: true
  owner:
    description: User that the service runs as.
    type: str
    default: vllm
  group:
    description: Group that the service runs as.
    type: str
    default: vllm
  root:
    description: Directory of the caches.
    type: path
    default: /var/cache
  release_root:
    description: Directory of the releases.
    type: path
    default: /opt/vllm/releases
  going:
    description:
      - Ids of releases that go in this run, so that check mode counts their caches too.
    type: list
    elements: str
    default: []
  state:
    description: V(absent) takes the C(tmpfiles.d) file back, and the caches if O(purge) is set.
    type: str
    choices: [present, absent]
    default: present
  purge:
    description: Whether V(absent) removes the caches.
    type: bool
    default: false
attributes:
  check_mode:
    description: Predicts without changing, also where the service's user does not exist yet.
    support: full
  diff_mode:
    description: The file, and each directory that is wrong.
    support: full
author:
  - onprem.vllm founders (@onprem-vllm)
"""

EXAMPLES = r"""
- name: Caches of the plan's instances
  onprem.vllm.cache_dirs:
    instances: "{{ plan.instances }}"
"""

RETURN = r"""
wrong:
  description: What was wrong before, per path.
  returned: success
  type: dict
  sample: {/var/cache/triton/0.28.0-cpu-1f3a9c2e: is missing}
removed:
  description: Caches that were removed.
  returned: success
  type: list
  elements: str
  sample: [/var/cache/triton/0.25.0-cpu-a37d2201]
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cache_dirs import CacheDirsError, Findings, Layout, apply, assess, removable, remove
from ..module_utils.host_lock import HostLocked, host_lock

ARGUMENTS: dict[str, Any] = {
    "instances": {"type": "list", "elements": "dict", "required": True},
    "owner": {"type": "str", "default": "vllm"},
    "group": {"type": "str", "default": "vllm"},
    "root": {"type": "path", "default": "/var/cache"},
    "release_root": {"type": "path", "default": "/opt/vllm/releases"},
    "going": {"type": "list", "elements": "str", "default": []},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "purge": {"type": "bool", "default": False},
}


def difference(layout: Layout, found: Findings) -> list[dict[str, str]]:
    """The file as text, and a line per directory that is wrong or goes."""
    diffs = []
    if found.text_before != layout.text():
        diffs.append(
            {
                "before_header": str(layout.file),
                "after_header": str(layout.file),
                "before": found.text_before,
                "after": layout.text(),
            }
        )
    lines = [f"{path} {what}" for path, what in found.wrong.items()]
    lines += [f"{path} belongs to no release or instance" for path in found.stale]
    if lines:
        after = [f"{path} is right" for path in found.wrong]
        diffs.append({"before": "\n".join(lines) + "\n", "after": "".join(f"{line}\n" for line in after)})
    return diffs


def present(module: AnsibleModule, layout: Layout) -> dict[str, Any]:
    found = assess(layout)
    changed = found.changed(layout)
    if changed and not module.check_mode:
        with host_lock("cache directories"):
            apply(layout, found)
    return {
        "changed": changed,
        "wrong": found.wrong,
        "removed": [str(path) for path in found.stale],
        "diff": difference(layout, found),
    }


def absent(module: AnsibleModule, layout: Layout) -> dict[str, Any]:
    purge = bool(module.params["purge"])
    going: list[Path] = removable(layout) if purge else []
    changed = bool(going) or layout.file.exists()
    if changed and not module.check_mode:
        with host_lock("cache directories"):
            remove(layout, purge=purge)
    return {"changed": changed, "wrong": {}, "removed": [str(path) for path in going]}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    try:
        layout = Layout.from_plan(
            params["instances"],
            params["owner"],
            params["group"],
            root=params["root"].rstrip("/"),
            releases=params["release_root"].rstrip("/"),
        )
        layout = replace(layout, going=frozenset(params["going"]))
        act = present if params["state"] == "present" else absent
        result = act(module, layout)
    except (CacheDirsError, HostLocked) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"Cache directories: {error.strerror} ({error.filename}).")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
