"""One run at a time, and a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import host_lock as lock

HOLDER = """
    import sys, time
    from pathlib import Path
    from ansible_collections.onprem.vllm.plugins.module_utils.host_lock import host_lock
    with host_lock("release 0.28.0-cpu", path=Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    path = tmp_path / "lock"
    env = {**os.environ, "PYTHONPATH": ".collections", "SSH_CONNECTION": "10.0.0.7 50000 10.0.0.9 22"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(path)], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield path, process
        process.kill()


def test_the_second_run_is_told_who_holds_the_host(holder):
    path, process = holder
    expected = rf"release 0\.28\.0-cpu \(process {process.pid}, started from 10\.0\.0\.7 at"
    with pytest.raises(lock.HostLocked, match=expected), lock.host_lock("models", wait_s=0.3, path=path):
        pytest.fail("two holders at once")


def test_a_killed_run_holds_nothing(holder):
    path, process = holder
    process.send_signal(signal.SIGKILL)
    process.wait()
    with lock.host_lock("models", wait_s=0, path=path):
        pass


def test_it_is_free_again_after_the_block(tmp_path):
    for attempt in range(2):
        with lock.host_lock(f"run {attempt}", wait_s=0, path=tmp_path / "lock"):
            pass


def test_who_started_it_is_known_below_sudo_which_takes_the_variable_away():
    ask = "from ansible_collections.onprem.vllm.plugins.module_utils import host_lock; print(host_lock._started_from())"
    env = {**os.environ, "PYTHONPATH": ".collections", "SSH_CONNECTION": "10.0.0.7 50000 10.0.0.9 22"}
    below = ["sh", "-c", 'env --unset=SSH_CONNECTION "$0" -c "$1"; true', sys.executable, ask]
    assert subprocess.run(below, check=True, capture_output=True, text=True, env=env).stdout == "10.0.0.7\n"
