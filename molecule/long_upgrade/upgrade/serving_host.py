# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The one serving host of this scenario: playbooks on it, and what it answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "default"))
import site_under_test as site

HOST = "glm1"
LIMIT = ("--limit", "mirror,glm_8gpu")
NEWER = ("-e", "vllm_release=0.31.0-cpu")


def play(name, *arguments):
    done = site.site(*LIMIT, *arguments, playbook=f"playbooks/{name}.yml")
    return done.returncode, done.stdout + done.stderr


def get(lab, path):
    """What the instance answers; empty where it is away, which an upgrade makes it."""
    return site.get(lab, f"{HOST}:{site.PORT}{path}")[1]


def version(lab):
    return json.loads(get(lab, "/version"))["version"].partition("+")[0]


def status():
    return site.status(*LIMIT)[HOST, "glm"]
