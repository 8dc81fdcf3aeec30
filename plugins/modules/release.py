# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Releases on a host: each locked software set whole, in its own directory, from the mirror alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Install locked vLLM releases whole, from the mirror alone
version_added: 0.1.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Builds each release beside its final place and moves it there by one rename. A killed run never leaves a directory
    that passes for whole; the next run clears it and builds again, out of the cache.
  - uv installs the lock with hashes and without resolving anything; the mirror is its only index, and it sees nothing
    of the host's pip or uv configuration, environment or proxies.
  - Where wheels claim one path with different content, the winner that the release names stands. A contradiction
    that the release does not settle is refused.
  - Patches that a release names are applied to copies of its files; other releases and the cache keep theirs.
  - Every file is compared with its wheel's RECORD, also what came out of uv's cache. Files that are hard links to those
    of another release on the host, unchanged since that was checked, are taken by size and time unless O(verify=full).
  - Releases share unchanged files, bytecode included, by hard links.
  - A release that differs from its manifest is built anew beside and exchanged, unless a process runs from it.
options:
  releases:
    description: The releases, as C(plan.releases) has them.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: The release's name in the catalogue.
        type: str
        required: true
      id:
        description: Name and first 8 hex digits of the sha256 over definition and lock; the name of its directory.
        type: str
        required: true
      vllm:
        description: vLLM's version. Exactly one of this and O(releases[].litellm) is given.
        type: str
      litellm:
        description: LiteLLM's version, where it is a release of the proxy.
        type: str
      variant:
        description: Kind of accelerator, for example V(cu130) or V(cpu), V(none) for LiteLLM.
        type: str
        required: true
      python:
        description: Version of Python, for example V(3.12).
        type: str
        required: true
      lock_sha256:
        description: sha256 of the lock, which the mirror serves as C(releases/<id>/requirements.txt).
        type: str
        required: true
      interpreter:
        description:
          - An interpreter archive (python-build-standalone, C(install_only)) on the mirror under C(python/), as
            C({file, sha256}) or C({archives{:} {x86_64{:} {file, sha256}}}).
          - Without it the host's own Python is used.
        type: dict
      overlaps:
        description: Who wins where two wheels claim one path with different content.
        type: list
        elements: dict
        default: []
        suboptions:
          winner:
            description: The package whose content stands.
            type: str
            required: true
          loser:
            description: The package whose content goes.
            type: str
            required: true
      patches:
        description:
          - Patches of its files, each guarded by the file's sha256 before and after; see docs/patches.md.
          - Applied once every file is what its wheel says, before the release is moved into place. The files as their
            wheels brought them are kept in C(originals/).
        type: list
        elements: dict
        default: []
        suboptions:
          name:
            description: The patch's name in the catalogue.
            type: str
            required: true
          package:
            description: The package that brings the file.
            type: str
          file:
            description: The file's path in site-packages.
            type: str
            required: true
          before:
            description: sha256 of the file as the wheel brings it.
            type: str
            required: true
          after:
            description: sha256 of the patched file.
            type: str
            required: true
          edit:
            description: Steps of exact text, C({find, replace, times}). Either this or O(releases[].patches[].diff).
            type: list
            elements: dict
          diff:
            description: A unified diff that fits line for line.
            type: str
      flashinfer:
        description: What the release decides about FlashInfer on its own account, and why; kept in its manifest.
        type: dict
      flashinfer_set:
        description: FlashInfer's packages that it locks, with their versions. Not read here; a plan's entry has it.
        type: dict
        default: {}
      environment:
        description: What every instance of the release needs in its environment; kept in its manifest.
        type: dict
        default: {}
  mirror_url:
    description: Where the mirror serves the bundle. Needed unless releases are removed.
    type: str
  uv:
    description:
      - uv, as C({version, file, sha256}) or C({version, wheels{:} {x86_64{:} {file, sha256}}}); the wheel lies in the
        mirror's C(wheels/). Needed unless releases are removed.
    type: dict
  root:
    description: Directory of releases, uv, interpreters and cache. All of it on one file system.
    type: path
    default: /opt/vllm
  verify:
    description:
      - V(stat) compares every file's size, time, mode and owner with the manifest.
      - V(full) reads and hashes every file as well, and takes nothing on trust when it builds.
    type: str
    choices: [stat, full]
    default: stat
  rebuild:
    description: Exchange a release that differs from its manifest even while processes run from it.
    type: bool
    default: false
  proxy:
    description: A proxy to reach the mirror through. The host's own proxy settings are not used.
    type: str
  state:
    description:
      - V(absent) removes the named releases.
      - V(pruned) removes the oldest releases that nothing needs, until O(keep) are left. The O(releases) stay, and what
        a process runs from or a generation of an instance links to.
      - V(purged) removes every release, uv, the interpreters and the cache.
      - Neither touches a release that a process runs from. In check mode V(purged) tells it as removed, for a teardown
        has stopped by then what runs now.
    type: str
    choices: [present, absent, pruned, purged]
    default: present
  keep:
    description: Number of releases that stay with O(state=pruned), those that something needs among them.
    type: int
    default: 3
  needed:
    description:
      - Directories of releases that instances need, for O(state=pruned) in check mode, where their generations are not
        yet as they will be. M(onprem.vllm.instance) returns them.
    type: list
    elements: path
attributes:
  check_mode:
    description: Predicts on a virgin host as well.
    support: full
  diff_mode:
    description: Lists releases and their packages.
    support: full
extends_documentation_fragment: []
"""

EXAMPLES = r"""
- name: The releases of this host
  onprem.vllm.release:
    releases: "{{ plan.releases }}"
    mirror_url: "{{ plan.mirror.url }}"
    uv: "{{ plan.uv }}"

- name: Read every file once a month
  onprem.vllm.release:
    releases: "{{ plan.releases }}"
    mirror_url: "{{ plan.mirror.url }}"
    uv: "{{ plan.uv }}"
    verify: full
"""

RETURN = r"""
releases:
  description: One entry per release.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: The release's id.
      type: str
    path:
      description: Its directory.
      type: str
    state:
      description: One of V(present) (was whole), V(installed), V(rebuilt), V(absent), V(removed).
      type: str
    reasons:
      description: What differed from the manifest, where it was rebuilt.
      type: list
      elements: str
    steps:
      description: The steps that ran, in order.
      type: list
      elements: str
    seconds:
      description: Seconds by step.
      type: dict
    packages:
      description: Number of packages; null where check mode cannot know it yet.
      type: int
    bytes:
      description: Bytes of its files, those that are shared with other releases included.
      type: int
    notes:
      description: What a person should know, for example a cache that held edited files.
      type: list
      elements: str
tools:
  description: uv and interpreters that were installed or repaired; directories, where all was removed.
  returned: success
  type: list
  elements: str
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host_lock import HostLocked, host_lock
from ..module_utils.release import (
    PACKAGES,
    Release,
    ReleaseError,
    Report,
    Site,
    apply,
    preview,
    prune,
    referenced_releases,
    remove,
    remove_everything,
)


def main() -> None:
    pair = {"winner": {"type": "str", "required": True}, "loser": {"type": "str", "required": True}}
    patch = {
        "name": {"type": "str", "required": True},
        "package": {"type": "str"},
        "file": {"type": "str", "required": True},
        "before": {"type": "str", "required": True},
        "after": {"type": "str", "required": True},
        "edit": {"type": "list", "elements": "dict"},
        "diff": {"type": "str"},
    }
    entry = {
        "name": {"type": "str", "required": True},
        "id": {"type": "str", "required": True},
        "vllm": {"type": "str"},
        "litellm": {"type": "str"},
        "variant": {"type": "str", "required": True},
        "python": {"type": "str", "required": True},
        "lock_sha256": {"type": "str", "required": True},
        "interpreter": {"type": "dict"},
        "overlaps": {"type": "list", "elements": "dict", "default": [], "options": pair},
        "patches": {"type": "list", "elements": "dict", "default": [], "options": patch},
        "flashinfer": {"type": "dict"},
        "flashinfer_set": {"type": "dict", "default": {}},
        "environment": {"type": "dict", "default": {}},
    }
    module = AnsibleModule(
        argument_spec={
            "releases": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": entry,
                "required_one_of": [PACKAGES],
                "mutually_exclusive": [PACKAGES],
            },
            "mirror_url": {"type": "str"},
            "uv": {"type": "dict"},
            "root": {"type": "path", "default": "/opt/vllm"},
            "verify": {"type": "str", "choices": ["stat", "full"], "default": "stat"},
            "rebuild": {"type": "bool", "default": False},
            "proxy": {"type": "str"},
            "state": {"type": "str", "choices": ["present", "absent", "pruned", "purged"], "default": "present"},
            "keep": {"type": "int", "default": 3},
            "needed": {"type": "list", "elements": "path"},
        },
        required_if=[("state", state, ("mirror_url", "uv")) for state in ("present", "pruned")],
        supports_check_mode=True,
    )
    _only_the_told_proxy(module.params["proxy"])
    try:
        report, before = _run(module)
    except (ReleaseError, HostLocked) as error:
        module.fail_json(msg=str(error))
    for outcome in report.outcomes:
        for note in outcome.notes:
            if not module.check_mode:
                module.warn(f"Release {outcome.id}: {note}")
    module.exit_json(
        changed=report.changed,
        releases=[
            {
                "id": outcome.id,
                "path": outcome.path,
                "state": outcome.state,
                "reasons": outcome.reasons[:20],
                "steps": list(outcome.seconds),
                "seconds": outcome.seconds,
                "packages": None if outcome.packages is None else len(outcome.packages),
                "bytes": outcome.size,
                "notes": outcome.notes,
            }
            for outcome in report.outcomes
        ],
        tools=report.tools,
        diff={"before": before, "after": _after(before, report)},
    )


def _run(module: AnsibleModule) -> tuple[Report, str]:
    params = module.params
    problems: list[str] = []
    releases: list[Release] = []
    for entry in params["releases"]:
        try:
            releases.append(Release.from_plan(entry))
        except ReleaseError as error:
            problems.append(str(error))
    if params["state"] == "present" and releases and not params["uv"].get("version"):
        problems.append("uv: version is missing")
    if params["state"] == "present" and releases and not params["mirror_url"].startswith(("http://", "https://")):
        problems.append(f"mirror_url {params['mirror_url']!r} is no http or https address")
    if problems:
        raise ReleaseError("\n".join(problems))
    site = Site(
        root=Path(params["root"]),
        mirror_url=(params["mirror_url"] or "").rstrip("/"),
        uv=params["uv"] or {},
        verify=params["verify"],
        proxy=params["proxy"],
    )
    before = _listing(site)
    if params["state"] == "pruned":
        return _prune(module, site, [release.id for release in releases]), before
    if module.check_mode:
        if params["state"] == "present":
            return preview(site, releases), before
        if params["state"] == "absent":
            return remove(site, releases, check=True), before
        return remove_everything(site, check=True), before
    names = ", ".join(release.name for release in releases)
    with host_lock(f"release {names}" if names else "release (removing all)"):
        if params["state"] == "present":
            return apply(site, releases, rebuild_in_use=params["rebuild"]), before
        if params["state"] == "absent":
            return remove(site, releases, check=False), before
        return remove_everything(site, check=False), before


def _prune(module: AnsibleModule, site: Site, wanted: list[str]) -> Report:
    needed = {os.path.basename(path) for path in module.params["needed"] or ()}
    if module.check_mode:
        referenced = needed if module.params["needed"] is not None else referenced_releases()
        return prune(site, wanted, referenced, module.params["keep"], check=True)
    with host_lock("releases (pruning)"):
        return prune(site, wanted, needed | referenced_releases(), module.params["keep"], check=False)


def _only_the_told_proxy(proxy: str | None) -> None:
    """The mirror stands in the same network: a proxy in the host's environment would only lead away from it."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    if proxy:
        os.environ["http_proxy"] = os.environ["https_proxy"] = proxy


def _listing(site: Site) -> str:
    if not site.releases.is_dir():
        return ""
    names = sorted(entry.name for entry in site.releases.iterdir() if not entry.name.startswith("."))
    return "".join(f"release {name}\n" for name in names)


def _after(before: str, report: Report) -> str:
    blocks = {line.removeprefix("release "): [line] for line in before.splitlines()}
    for outcome in report.outcomes:
        if outcome.state == "removed":
            blocks.pop(outcome.id, None)
        elif outcome.changed:
            block = [f"release {outcome.id}"]
            block += [f"  repaired: {reason}" for reason in outcome.reasons[:20]]
            if outcome.packages is None:
                block.append("  packages: known once the mirror serves the lock")
            elif outcome.state == "installed":
                block += [f"  {name} {version}" for name, version in sorted(outcome.packages.items())]
            blocks[outcome.id] = block
    lines: list[Any] = [line for _unused, block in sorted(blocks.items()) for line in block]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
