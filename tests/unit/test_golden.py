# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The example inventory's plans, whole. After a change that is meant: RENEW=1 pytest tests/unit/test_golden.py"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from ansible_collections.onprem.vllm.plugins.filter.plans import plans

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden") / "example.json"

# The commands of the reference nodes, as they were given.
REFERENCE = {
    "gpu1": "--served-model-name glm-5.2 --host 0.0.0.0 --port 8000 --tensor-parallel-size 8 --enable-expert-parallel "
    "--kv-cache-dtype fp8 --max-model-len 262144 --gpu-memory-utilization 0.95 --enable-auto-tool-choice "
    "--tool-call-parser glm47 --reasoning-parser glm45",
    "gpu2": "--served-model-name gemma-4-26b --host 0.0.0.0 --port 8000 --quantization fp8 --max-model-len 32768 "
    '--gpu-memory-utilization 0.93 --speculative-config \'{"method": "mtp", "model": '
    '"/models/gemma-4-26b-a4b-it-assistant", "num_speculative_tokens": 4}\' --enable-auto-tool-choice '
    "--tool-call-parser gemma4 --reasoning-parser gemma4",
}
MODELS = {"gpu1": "/models/glm-5.2-nvfp4", "gpu2": "/models/gemma-4-26b-a4b-it"}


@pytest.fixture(scope="module", name="example")
def _example() -> dict[str, Any]:
    loader = DataLoader()
    inventory = InventoryManager(loader=loader, sources=[str(ROOT / "inventory/example/hosts.yml")])
    # The example takes it from the environment, by a lookup that this process has not loaded.
    inventory.get_host("proxy1").set_variable("litellm_proxy_master_key", "a key of more than 20 characters")
    variables = VariableManager(loader=loader, inventory=inventory)
    return plans(HostVars(inventory, variables, loader), ["mirror1", "gpu1", "gpu2", "proxy1"])


def test_the_example_s_plans_are_the_golden_ones(example: dict[str, Any]) -> None:
    text = json.dumps(example, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    text = text.replace(str(ROOT), "<checkout>")  # the proxy's own certificate lies beside the inventory
    if os.environ.get("RENEW"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert json.loads(text) == json.loads(GOLDEN.read_text(encoding="utf-8")), "see git diff after RENEW=1"


def words(command: str) -> dict[str, Any]:
    """Flags of a command to their values; a flag alone is true."""
    found: dict[str, Any] = {}
    for word in shlex.split(command):
        if word.startswith("--"):
            flag = word[2:]
            found[flag] = True
        else:
            found[flag] = json.loads(word) if word[0] in "{0123456789" and word != "0.0.0.0" else word
    return found


@pytest.mark.parametrize("host", sorted(REFERENCE))
def test_the_reference_command_argument_by_argument(example: dict[str, Any], host: str) -> None:
    serve = example[host]["instances"][0]["serve"]
    # What the plan adds, so that a restart answers what is in flight.
    assert serve == {"model": MODELS[host], "shutdown-timeout": 60, **words(REFERENCE[host])}


def test_the_example_has_no_problem_and_no_warning(example: dict[str, Any]) -> None:
    for found in example.values():
        assert (found["problems"], found["warnings"]) == ([], [])
