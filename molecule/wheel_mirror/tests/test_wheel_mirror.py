# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a host finds on the mirror, asked from outside."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

JSON = "application/vnd.pypi.simple.v1+json"
UV = Path(sys.executable).with_name("uv")


def curl(lab, path: str, *more: str) -> str:
    return lab("run", "curl", "-sS", "--max-time", "10", *more, f"http://role1{path}")


def status(lab, path: str, *more: str) -> str:
    return curl(lab, path, "-o", "/dev/null", "-w", "%{http_code} %{content_type}", *more)


def test_the_server_is_up_and_comes_back_after_a_reboot(host):
    assert host.service("nginx").is_running
    assert host.service("nginx").is_enabled
    assert host.run("nginx -t").rc == 0


def test_the_index_speaks_html_and_json(lab):
    assert status(lab, "/simple/") == "200 text/html"
    assert status(lab, "/simple/engine/", "-H", f"Accept: {JSON}, text/html;q=0.1") == f"200 {JSON}"
    page = json.loads(curl(lab, "/simple/engine/", "-H", f"Accept: {JSON}"))
    assert [file["filename"] for file in page["files"]] == ["engine-1.0-py3-none-any.whl"]
    assert page["files"][0]["hashes"]["sha256"] in curl(lab, "/simple/engine/")
    assert status(lab, "/simple/engine", "-L") == "200 text/html"


def test_every_file_of_the_manifest_is_served_with_its_hash(lab):
    manifest = json.loads(curl(lab, "/manifest.json"))
    assert len(manifest["files"]) > 10
    for path, entry in manifest["files"].items():
        if path.endswith(".metadata") or path.startswith("releases/"):
            content = curl(lab, f"/{path}")
            assert hashlib.sha256(content.encode()).hexdigest() == entry["sha256"], path
        else:
            assert status(lab, f"/{path}").startswith("200 "), path


def test_ranges_work(lab):
    wheel = "/wheels/engine-1.0-py3-none-any.whl"
    assert status(lab, wheel, "-r", "0-3").startswith("206 application/octet-stream")
    assert curl(lab, wheel, "-r", "0-1") == "PK"


def test_nothing_else_is_shown(lab):
    for path in (
        "/",
        "/wheels/",
        "/releases/",
        "/models/",
        "/.work/state.json",
        "/index.nginx-debian.html",
        "/bundles/",
    ):
        assert status(lab, path)[:3] in {"403", "404"}, path


def test_uv_installs_from_it_with_hashes(lab, tmp_path):
    manifest = json.loads(curl(lab, "/manifest.json"))
    (lock,) = [path for path in manifest["files"] if path.endswith("requirements.txt")]
    (tmp_path / "lock.txt").write_text(curl(lab, f"/{lock}"))
    venv = tmp_path / "venv"
    subprocess.run([UV, "venv", "-q", "--no-config", "--python", sys.executable, venv], check=True)
    lab(
        *("run", str(UV), "pip", "install", "-q", "--no-config", "--no-cache", "--require-hashes"),
        *("--python", str(venv), "--default-index", "http://role1/simple/", "-r", str(tmp_path / "lock.txt")),
    )
    shown = subprocess.run([UV, "pip", "freeze", "-q", "--python", venv], check=True, capture_output=True, text=True)
    assert shown.stdout.split() == ["engine==1.0", "libs-base==1.0", "libs-cu13==1.0"]


def test_debians_own_page_is_untouched_and_no_longer_asked(host, lab):
    assert host.file("/etc/nginx/sites-enabled/default").is_symlink
    # The image itself leaves out documentation, which dpkg then misses.
    assert "/etc/" not in host.run("dpkg --verify nginx-common").stdout
    assert "Welcome to nginx" not in curl(lab, "/", "-H", "Host: any.name.example")


def test_the_published_tree_belongs_to_root_alone(host):
    found = host.check_output("find /srv/vllm-mirror -not -type l -perm /022 -o -not -user root")
    assert found == ""
