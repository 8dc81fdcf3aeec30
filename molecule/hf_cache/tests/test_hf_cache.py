# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The models as the service finds them, checked by other means than ours."""

from __future__ import annotations

import json

import pytest

MODELS = ["tiny", "draft"]


@pytest.fixture
def host(at):
    """The host that gets what the mirror, role1, serves."""
    return at("role2")


@pytest.mark.parametrize("model", MODELS)
def test_every_file_is_what_the_manifest_says(host, model):
    manifest = json.loads(host.check_output(f"curl -sf http://role1:8080/models/{model}/manifest.json"))
    sums = "".join(f"{entry['sha256']}  /models/{model}/{path}\n" for path, entry in manifest["files"].items())
    assert host.run(f"sha256sum --check --strict - <<'EOF'\n{sums}EOF").rc == 0
    found = host.check_output(f"cd /models/{model} && find . -type f -printf '%P\\n'").split()
    assert sorted(found) == sorted([*manifest["files"], ".manifest.json"])


def test_nobody_but_root_can_write(host):
    assert host.check_output("find /models ! -user root -o ! -group root -o -perm /022 -o -type l") == ""
    assert host.run("runuser -u nobody -- cat /models/tiny/config.json").rc == 0


def test_nothing_lies_beside_the_models(host):
    assert host.check_output("ls -A /models").split() == sorted(MODELS)
