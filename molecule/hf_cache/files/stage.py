# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""stage.py BUNDLE NAME SEED: a tiny model in three shards, staged as a bundle has it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".collections"))
from ansible_collections.onprem.vllm.plugins.module_utils.model_source import stage
from ansible_collections.onprem.vllm.tests.lab.make_tiny_model import make_tiny_model

bundle, name, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
origin = bundle.parent / "origin" / name
make_tiny_model(origin, layers=1, seed=seed, shards=3)
print(stage(name, {"directory": str(origin)}, bundle))
