"""Environment files against systemd itself: a unit that says what it got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ansible_collections.onprem.vllm.plugins.module_utils.systemd_environment import environment_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHECKOUT = Path(__file__).resolve().parents[3]
SCRIPT = """
cat > /run/environment.txt; rm -f /run/environment.json
printf '[Service]\\nType=oneshot\\nEnvironmentFile=/run/environment.txt\\nExecStart=/usr/bin/python3 -c \
"import json,os; open(\\\\"/run/environment.json\\\\",\\\\"w\\\\").write(json.dumps(dict(os.environ)))"\\n' \
  > /run/systemd/system/environment-probe.service
systemctl daemon-reload; systemctl start environment-probe; cat /run/environment.json
"""


def got(text: str) -> dict[str, str]:
    command = [sys.executable, str(CHECKOUT / "tests/lab/lab.py"), "--lab", os.environ["LAB"], "exec", "role1"]
    done = subprocess.run([*command, "bash", "-euc", SCRIPT], input=text.encode(), capture_output=True, check=True)
    return json.loads(done.stdout)


def passed_on(character: str) -> bool:
    code = ord(character)
    return (
        (code >= 0x20 or character in "\t\n")
        and code != 0x7F
        and not 0xFDD0 <= code <= 0xFDEF
        and code & 0xFFFE != 0xFFFE
    )


VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]).filter(passed_on), max_size=20),
    st.text(st.sampled_from("\"'\\$`%#; =\n\tab"), max_size=12),
)


@settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(VALUES, min_size=60, max_size=60))
def test_systemd_passes_every_value_on_as_it_was_given(values):
    variables = {f"GIVEN_{number}": value for number, value in enumerate(values)}
    seen = got(environment_text(variables))
    assert {name: seen.get(name) for name in variables} == variables
