# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Models of one host, from the mirror or a mounted share."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model
short_description: Bring a host's models to what their manifests say
version_added: 0.1.0
description:
  - Fetches models from the mirror or a mounted share, verified by sha256, resumed after an interruption.
  - A model is assembled beside its place and exchanged whole, unchanged files as hard links. What serves keeps its
    files until it is restarted.
  - An unchanged model is recognised by the size and time stamp of each file. A file that is missing, truncated or
    different is fetched alone. A file that the manifest does not list is removed, since the directory belongs to it.
  - Free space is checked for all models before the first byte is fetched.
  - All files belong to root and are read-only to the service.
options:
  models:
    description: The models that shall be on the host, C(plan.models).
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the model and of its directory.
        type: str
        required: true
      path:
        description: Its directory. Its last part is O(models[].name).
        type: str
      manifest_sha256:
        description: sha256 of the manifest that it must have. Without it the source's manifest counts.
        type: str
      state:
        description: V(absent) removes the model.
        type: str
        choices: [present, absent]
        default: present
  root:
    description: Directory of models that name no O(models[].path).
    type: path
    default: /models
  mirror_url:
    description: URL of the mirror. Models are below C(<url>/models/).
    type: str
  share:
    description: Mounted directory laid out like C(models/) of a bundle. Used instead of O(mirror_url).
    type: path
  verify:
    description: V(full) hashes every file instead of believing size and time stamp.
    type: str
    choices: [stat, full]
    default: stat
  parallel:
    description: Files fetched or hashed at a time.
    type: int
    default: 4
  lock_wait:
    description: Seconds to wait for another run that changes this host.
    type: int
    default: 30
attributes:
  check_mode:
    description: Predicts without changing. A mirror that does not exist yet is no error then.
    support: full
  diff_mode:
    description: Lists each file that is fetched or removed, with the reason.
    support: full
author:
  - onprem.vllm founders (@onprem-vllm)
"""

EXAMPLES = r"""
- name: Models of the plan
  onprem.vllm.model:
    models: "{{ plan.models }}"
    mirror_url: http://mirror1

- name: One model from a mounted share, every file hashed
  onprem.vllm.model:
    models:
      - name: gemma-4-26b
    share: /mnt/bundle/models
    verify: full
"""

RETURN = r"""
models:
  description: What was found and done, per model.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Name of the model.
      type: str
      returned: always
    path:
      description: Its directory.
      type: str
      returned: always
    action:
      description: V(unchanged), V(staged), V(updated), V(repaired), V(recorded) or V(removed).
      type: str
      returned: always
    manifest_sha256:
      description: sha256 of the manifest that the model now follows. Empty where none could be seen.
      type: str
      returned: always
    fetched:
      description: Files that were fetched, each with the reason.
      type: dict
      returned: always
    removed:
      description: Files that the manifest does not list.
      type: list
      elements: str
      returned: always
    bytes:
      description: Bytes of the fetched files.
      type: int
      returned: always
    note:
      description: What could not be seen or done, for a person. Empty where all is well.
      type: str
      returned: always
  sample:
    - name: tiny-qwen3
      path: /models/tiny-qwen3
      action: repaired
      manifest_sha256: 3b8e...
      fetched: {model.safetensors: "is truncated: has 4096 bytes instead of 858664"}
      removed: []
      bytes: 858664
      note: ""
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host_lock import HostLocked, host_lock
from ..module_utils.model import Assessment, Mirror, Share, Source, Wanted, apply, assess, check_space
from ..module_utils.model_manifest import ModelError

ARGUMENTS: dict[str, Any] = {
    "models": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {
            "name": {"type": "str", "required": True},
            "path": {"type": "str"},
            "manifest_sha256": {"type": "str"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
    },
    "root": {"type": "path", "default": "/models"},
    "mirror_url": {"type": "str"},
    "share": {"type": "path"},
    "verify": {"type": "str", "choices": ["stat", "full"], "default": "stat"},
    "parallel": {"type": "int", "default": 4},
    "lock_wait": {"type": "int", "default": 30},
}


def wanted_models(params: dict[str, Any]) -> list[Wanted]:
    """The models asked for; every wrong entry is named in one ModelError."""
    wanted, complaints = [], []
    for model in params["models"]:
        try:
            wanted.append(
                Wanted.from_plan(model["name"], model["path"], params["root"], model["manifest_sha256"], model["state"])
            )
        except ModelError as error:
            complaints.append(str(error))
    names = [model.name for model in wanted]
    complaints += [f"Model {name} is listed twice." for name in sorted({n for n in names if names.count(n) > 1})]
    if complaints:
        raise ModelError(" ".join(complaints))
    return wanted


def report(found: Assessment) -> dict[str, Any]:
    return {
        "name": found.wanted.name,
        "path": str(found.wanted.path),
        "action": found.action,
        "manifest_sha256": found.manifest_sha256,
        "fetched": found.faults,
        "removed": found.extras,
        "bytes": found.fetch_bytes,
        "note": found.note,
    }


def diff(found: Assessment) -> dict[str, str]:
    """Only what differs, a line per file, so that a model of 200 shards stays readable."""
    before = [f"{path}: {reason}" for path, reason in found.faults.items()]
    before += [f"{path}: not in the manifest" for path in found.extras]
    before += [f"{path}: wrong owner or mode" for path in found.loose]
    before += [f"{left.name}: left by an interrupted run" for left in found.leftovers]
    after = [f"{path}: as in the manifest" for path in [*found.faults, *found.loose]]
    if not found.existed and found.wanted.present:
        before = [f"{left.name}: left by an interrupted run" for left in found.leftovers]
        after = list(found.manifest.files) if found.manifest else ["what the source will have"]
    if not found.wanted.present and found.existed:
        before = ["a model", *before]
    if found.action == "recorded" and not before:
        before, after = ["files that are right, without a record"], ["recorded"]
    return {
        "before_header": f"{found.wanted.path} (on the host)",
        "after_header": f"{found.wanted.path} ({found.action})",
        "before": "".join(f"{line}\n" for line in before),
        "after": "".join(f"{line}\n" for line in after),
    }


@contextmanager
def changing(names: Sequence[str], wait_s: float, *, check_mode: bool) -> Iterator[None]:
    """The host's lock, unless nothing will be changed."""
    if check_mode:
        yield
        return
    with host_lock(f"models {', '.join(names)}", wait_s):
        yield


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    workers = max(1, params["parallel"])
    source: Source | None = None
    if params["share"]:
        source = Share(Path(params["share"]))
    elif params["mirror_url"]:
        source = Mirror(params["mirror_url"])
    try:
        wanted = wanted_models(params)
        with changing([model.name for model in wanted], params["lock_wait"], check_mode=module.check_mode):
            found, complaints = [], []
            for model in wanted:
                try:
                    found.append(
                        assess(
                            model,
                            source,
                            full=params["verify"] == "full",
                            predict=module.check_mode,
                            workers=workers,
                        )
                    )
                except ModelError as error:
                    complaints.append(str(error))
            try:
                check_space(found)
            except ModelError as error:
                complaints.append(str(error))
            if complaints:
                raise ModelError(" ".join(complaints))
            if not module.check_mode:
                for each in found:
                    apply(each, source, workers=workers)
    except (ModelError, HostLocked) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        module.fail_json(msg=f"The models could not be brought into place: {error.strerror}{where}.")
    for each in found:
        if each.note:
            module.warn(each.note)
    module.exit_json(
        changed=any(each.changed for each in found),
        models=[report(each) for each in found],
        diff=[diff(each) for each in found if each.changed],
    )


if __name__ == "__main__":
    main()
