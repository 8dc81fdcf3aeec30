# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Documentation of the action plugin of the same name; nothing runs on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle
short_description: Build a bundle, what crosses the air gap
version_added: 0.1.0
author: onprem.vllm founders (@onprem-vllm)
description:
  - Turns releases and models into a directory that a mirror can serve. It holds the locked wheels, a static package
    index (HTML and JSON, with hashes and metadata files), the locks, uv, interpreter archives and models, and a
    manifest of hashes that is written last.
  - Runs on the control node, whatever host the task names.
  - Each package comes from the sources that its release names for it and from no other. The source V(default) is what
    pip on this machine is configured to use, C(PIP_*) included.
  - Chooses files for the release's Python and platform, not for this machine's.
  - An interrupted run goes on where it stopped. A file that is there and verifies is not fetched again.
  - What the bundle holds and nobody asks for any more is removed, models are set aside in C(.work/unused-models).
options:
  path:
    description: Directory of the bundle.
    type: path
    required: true
  releases:
    description: Names of the releases.
    type: list
    elements: str
    default: []
  definitions:
    description: Releases of the site by name, C(vllm_releases).
    type: dict
    default: {}
  patches:
    description: Patches of the site by name, C(vllm_patches). They are part of a release's id, not of the bundle.
    type: dict
    default: {}
  models:
    description: Models to stage.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the model.
        type: str
        required: true
      source:
        description:
          - C(directory), or C(repository) with C(revision).
          - Both may have C(allow_patterns), C(ignore_patterns) and C(draft).
        type: dict
        required: true
  uv:
    description: Whether uv is part of the bundle, in the version of C(catalogue/uv.yml).
    type: bool
    default: true
  interpreters:
    description: Archives of Python for hosts that lack the wanted version.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: The archive on this machine.
        type: path
        required: true
      sha256:
        description: Its hex sha256.
        type: str
        required: true
  allow_yanked:
    description: Packages as C(name==version) that are used though their index has withdrawn them.
    type: list
    elements: str
    default: []
  jobs:
    description: Files fetched at a time.
    type: int
    default: 8
  verify:
    description: V(full) hashes every file instead of believing size and time stamp.
    type: str
    choices: [stat, full]
    default: stat
  update_models:
    description: Let models from a branch move to the commit that it has now.
    type: bool
    default: false
attributes:
  check_mode:
    description: Asks the sources and says what would be fetched and written.
    support: full
  diff_mode:
    description: Lists the files that come and go.
    support: full
"""

EXAMPLES = r"""
- name: Bundle
  onprem.vllm.bundle:
    path: /srv/bundle
    releases: [0.28.0-cpu]
    models:
      - name: tiny-qwen3
        source: {directory: /srv/models/tiny-qwen3}
"""

RETURN = r"""
fetched:
  description: Files that came from a source, or would.
  type: list
  elements: str
  returned: success
fetched_bytes:
  description: Bytes of the wheels among them.
  type: int
  returned: success
written:
  description: Files that were written here, or would be.
  type: list
  elements: str
  returned: success
removed:
  description: Files that nobody asks for any more.
  type: list
  elements: str
  returned: success
notes:
  description: What a person should know.
  type: list
  elements: str
  returned: success
manifest_sha256:
  description: Hex sha256 of the bundle's manifest. None in check mode.
  type: str
  returned: success
bundle_id:
  description: Name of the bundle on a mirror.
  type: str
  returned: success
size:
  description: Bytes of the whole bundle.
  type: int
  returned: success
"""
