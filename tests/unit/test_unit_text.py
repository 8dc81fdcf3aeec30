# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The text of the instances' unit: what a service may write and waits for, where the roots are other ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.onprem.vllm.plugins.module_utils.cache_dirs import KINDS

ROLE = Path(__file__).parents[2] / "roles" / "vllm_service"


def settings(**variables: Any) -> dict[str, str]:
    """The settings of the unit, rendered as the role does it."""
    loader = DataLoader()
    known = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text(encoding="utf-8"))
    known |= {"__vllm_service_start_limit_interval_s": 1, "__vllm_service_completion_timeout_s": 1}
    templar = Templar(loader=loader, variables={**known, **variables, "instance": {"name": "glm"}})
    text = templar.template(trust_as_template((ROLE / "templates" / "vllm.service.j2").read_text(encoding="utf-8")))
    lines = [line.partition("=") for line in str(text).splitlines() if not line.startswith("#")]
    return {name: value for name, _mark, value in lines}


def test_the_text_begins_with_what_tells_whose_it_is_and_has_no_gap() -> None:
    text = (ROLE / "templates" / "vllm.service.j2").read_text(encoding="utf-8")
    assert "\n\n\n" not in text
    assert settings()["Description"] == "vLLM instance glm"


@pytest.mark.parametrize("root", ["/fast/cache", "/fast/cache/", "/srv"])
def test_an_instance_may_write_its_caches_where_they_are(root: str) -> None:
    """ProtectSystem=strict makes all else read-only."""
    plain = root.rstrip("/")
    found = settings(cache_dirs_root=root)
    assert set(found["ReadWritePaths"].split()) == {f"-{plain}/{kind}" for kind in ("vllm", *KINDS)}
    assert plain in found["RequiresMountsFor"].split()
    assert "/var/cache" not in found["ReadWritePaths"]


def test_the_defaults_give_the_text_that_hosts_have_already() -> None:
    found = settings()
    assert found["RequiresMountsFor"] == "/opt/vllm /etc/vllm /models /var/cache"
    assert found["ReadWritePaths"] == (
        "-/var/cache/vllm -/var/cache/flashinfer -/var/cache/triton -/var/cache/torchinductor -/var/cache/nv "
        "-/var/cache/huggingface"
    )


def test_a_start_waits_for_the_file_systems_of_models_and_releases() -> None:
    found = settings(hf_cache_root="/data/models", uv_venv_root="/data/vllm/")
    assert found["RequiresMountsFor"] == "/opt/vllm /data/vllm /etc/vllm /data/models /var/cache"
