# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The release as the service finds it, checked by other means than ours."""

from __future__ import annotations

import json

import pytest

RELEASES = "/opt/vllm/releases"


@pytest.fixture
def host(at):
    """The host that gets what the mirror, role1, serves."""
    return at("role2")


@pytest.fixture
def release(host):
    (name,) = host.check_output(f"ls -A {RELEASES}").split()
    assert name.startswith("small-")
    return f"{RELEASES}/{name}"


@pytest.fixture
def manifest(host, release):
    return json.loads(host.file(f"{release}/manifest.json").content_string)


def test_the_service_runs_it_and_writes_nothing(host, release):
    before = host.check_output(f"find {release} -printf '%p %i %T@ %C@\\n' | sort | sha256sum")
    assert host.check_output(f"runuser -u nobody -- {release}/bin/engine") == "engine cu13"
    said = host.run(f"{release}/bin/python -v -c 'import engine, engine.part7'")
    assert "engine/__pycache__/part7.cpython-311.pyc matches" in said.stderr
    assert host.check_output(f"find {release} -printf '%p %i %T@ %C@\\n' | sort | sha256sum") == before


def test_nobody_but_root_can_write(host):
    assert host.file("/opt/vllm/uv-cache").mode == 0o700
    assert (
        host.check_output("find /opt/vllm/releases /opt/vllm/uv ! -user root -o ! -group root -o -perm /022 ! -type l")
        == ""
    )


def test_every_file_is_what_the_manifest_says(host, release, manifest):
    files = {
        f"{folder}/{name}".lstrip("/"): text.split()[-1]
        for folder, (_unused, entries) in manifest["folders"].items()
        for name, text in entries.items()
    }
    sums = "".join(f"{digest}  {release}/{path}\n" for path, digest in files.items())
    assert host.run(f"sha256sum --check --strict --quiet - <<'EOF'\n{sums}EOF").rc == 0
    found = host.check_output(f"cd {release} && find . -type f -printf '%P\\n'").splitlines()
    assert sorted(found) == sorted([*files, "manifest.json"])


def test_every_file_of_the_lock_s_wheels_is_there(host, release, manifest):
    """RECORD by pip's own reader, which shares no line with ours: only the loser of the named overlap differs."""
    code = (
        "import hashlib, base64, importlib.metadata as m\n"
        "for d in m.distributions():\n"
        "    for f in d.files:\n"
        "        if f.hash:\n"
        "            digest = hashlib.sha256(f.locate().read_bytes()).digest()\n"
        "            if base64.urlsafe_b64encode(digest).rstrip(b'=').decode() != f.hash.value: print(d.name, f)\n"
    )
    said = host.check_output("%s -c %s", f"{release}/bin/python", code)
    assert said == "libs-base shared/__init__.py"
    assert manifest["packages"] == {"engine": "1.0", "libs-base": "1.0", "libs-cu13": "1.0"}


def test_uv_is_the_locked_one(host):
    assert host.check_output("/opt/vllm/uv/0.13.9/uv --version").startswith("uv 0.13.9 ")


def test_nothing_half_made_is_left(host):
    assert host.check_output("find /opt/vllm -name '.building-*' -o -name '.removing-*' -o -name '.tmp*'") == ""


def test_nothing_lies_outside_of_the_root(host):
    assert host.check_output("find /root /home /nonexistent -path '*share/uv*' 2>/dev/null; true") == ""
