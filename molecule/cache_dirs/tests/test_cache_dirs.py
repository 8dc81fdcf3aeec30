# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Seen from the service's side: what it must write to, and what it must not."""

from __future__ import annotations

INSTANCES = {"glm": "0.28.0-cpu-1f3a9c2e", "gemma": "0.31.0-cpu-0badcafe"}
CACHES = [f"/var/cache/vllm/{name}/{release}" for name, release in INSTANCES.items()] + [
    f"/var/cache/{kind}/{release}"
    for kind in ("flashinfer", "huggingface", "nv", "torchinductor", "triton")
    for release in INSTANCES.values()
]
ABOVE = sorted({path.rpartition("/")[0] for path in CACHES} | {"/var/lib/vllm"})


def owners(host, paths):
    """Owner, group and mode of each path, in one command: a command costs a connection."""
    return host.check_output(f"stat --format='%n %U %G %a' {' '.join(paths)}").splitlines()


def test_the_service_owns_its_caches(host):
    assert owners(host, CACHES) == [f"{path} vllm vllm 750" for path in CACHES]
    deep = " ".join(f"{path}/deep/inside" for path in CACHES)
    assert host.run(f"runuser -u vllm -- mkdir -p {deep}").rc == 0


def test_the_service_cannot_replace_what_is_above(host):
    assert owners(host, ABOVE) == [f"{path} root root 755" for path in ABOVE]
    refused = host.run("runuser -u vllm -- mkdir /var/cache/vllm/glm/other")
    assert "Permission denied" in refused.stderr


def test_no_file_inside_belongs_to_root(host):
    assert host.check_output(f"find {' '.join(CACHES)} ! -user vllm") == ""


def test_caches_of_a_gone_release_and_instance_are_gone(host):
    gone = ("triton/0.25.0-cpu-11111111", "vllm/glm/0.25.0-cpu-11111111", "vllm/former")
    assert host.check_output(f"find {' '.join(f'/var/cache/{path}' for path in gone)} 2>/dev/null | cat") == ""
