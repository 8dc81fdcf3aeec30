# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The mirror's side of publishing a bundle; the control node's is the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: publish
short_description: Carry a bundle to a mirror and publish it
version_added: 0.1.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Carries what the mirror does not have yet through Ansible's own connection, jump hosts and become included, in
    pieces. An interrupted run goes on where it stopped.
  - Checks free space first. Takes files that an earlier bundle holds as hard links.
  - Verifies every file against the manifest. A wrong, missing or unexpected file is named and nothing is published.
  - Publishes by one rename of the link C(current) and keeps O(keep) bundles.
  - An unchanged mirror is recognised in one call, by the size and time stamp of each file.
options:
  bundle:
    description: Directory of the bundle on the control node. Required where O(state=present).
    type: path
  root:
    description: Directory on the mirror. O(root)C(/current) is to be served.
    type: path
    default: /srv/vllm-mirror
  keep:
    description: Bundles that are kept, the served one included.
    type: int
    default: 2
  verify:
    description: V(full) hashes every file of a published bundle instead of believing size and time stamp.
    type: str
    choices: [stat, full]
    default: stat
  state:
    description: V(absent) removes everything that was published.
    type: str
    choices: [present, absent]
    default: present
  piece_mib:
    description: Size of the pieces in which files are carried, in MiB. A run that dies loses four of them at most.
    type: int
    default: 64
  lock_wait:
    description: Seconds to wait for another run that changes this host.
    type: int
    default: 30
  step:
    description: Set by the action plugin.
    type: str
    choices: [look, begin, absorb, finish]
    default: look
  manifest_sha256:
    description: Set by the action plugin.
    type: str
  manifest:
    description: Set by the action plugin.
    type: str
  damaged:
    description: Set by the action plugin.
    type: list
    elements: str
    default: []
  pieces:
    description: Set by the action plugin.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: The piece on the mirror.
        type: path
        required: true
      segments:
        description: Parts of files in it, each with C(path), C(offset) and C(length).
        type: list
        elements: dict
        required: true
attributes:
  check_mode:
    description: Says what would be carried.
    support: full
  diff_mode:
    description: Lists the files that would be carried and the bundle that would be served.
    support: full
"""

EXAMPLES = r"""
- name: Publish
  onprem.vllm.publish:
    bundle: /srv/bundle
"""

RETURN = r"""
bundle_id:
  description: Name of the bundle that is served.
  type: str
  returned: success
carried:
  description: Files that were carried, or would be.
  type: list
  elements: str
  returned: success
carried_bytes:
  description: Their bytes, without what had arrived in an earlier run.
  type: int
  returned: success
repaired:
  description: Files of the served bundle that were not what its manifest says.
  type: list
  elements: str
  returned: success
removed:
  description: Bundles beyond O(keep) that were removed.
  type: list
  elements: str
  returned: success
"""

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.bundle_manifest import BundleManifestError, manifest_id, parse_bundle_manifest
from ..module_utils.host_lock import HostLocked, host_lock
from ..module_utils.publish import Mirror, PublishError, Segment


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "bundle": {"type": "path"},
            "root": {"type": "path", "default": "/srv/vllm-mirror"},
            "keep": {"type": "int", "default": 2},
            "verify": {"type": "str", "choices": ["stat", "full"], "default": "stat"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "piece_mib": {"type": "int", "default": 64},
            "lock_wait": {"type": "int", "default": 30},
            "step": {"type": "str", "choices": ["look", "begin", "absorb", "finish"], "default": "look"},
            "manifest_sha256": {"type": "str"},
            "manifest": {"type": "str"},
            "damaged": {"type": "list", "elements": "str", "default": []},
            "pieces": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path", "required": True},
                    "segments": {"type": "list", "elements": "dict", "required": True},
                },
            },
        },
        required_if=[("state", "present", ["bundle"])],
        supports_check_mode=True,
    )
    mirror = Mirror(Path(module.params["root"]))
    try:
        result = _step(module, mirror)
    except (PublishError, BundleManifestError, HostLocked) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error}. The bundle that was served before still is; run again when this is solved.")
    module.exit_json(**result)


def _step(module: AnsibleModule, mirror: Mirror) -> dict[str, object]:
    parameters = module.params
    name = (parameters["manifest_sha256"] or "")[:12]
    lock = f"publish bundle {name}"
    if parameters["state"] == "absent":
        there = mirror.served() is not None or (mirror.root / "bundles").exists()
        if there and not module.check_mode:
            with host_lock("remove the mirror's bundles", parameters["lock_wait"]):
                mirror.remove()
        return {"changed": there}
    if parameters["step"] == "look":
        standing = mirror.standing(parameters["manifest_sha256"], full=parameters["verify"] == "full")
        return {"changed": False, **asdict(standing), "served": mirror.served()}
    if parameters["step"] == "begin":
        raw = parameters["manifest"].encode()
        if module.check_mode:
            manifest = parse_bundle_manifest(raw, "the bundle's manifest")
            missing = mirror.missing(manifest, manifest_id(raw), parameters["damaged"])
            mirror.check_space(missing)
        else:
            with host_lock(lock, parameters["lock_wait"]):
                missing = mirror.begin(raw, parameters["damaged"])
        return {"changed": False, "missing": [asdict(entry) for entry in missing]}
    with host_lock(lock, parameters["lock_wait"]):
        if parameters["step"] == "absorb":
            for piece in parameters["pieces"]:
                mirror.absorb(name, Path(piece["path"]), [Segment(**segment) for segment in piece["segments"]])
            return {"changed": True}
        return {"changed": True, "removed": mirror.finish(name, parameters["keep"])}


if __name__ == "__main__":
    main()
