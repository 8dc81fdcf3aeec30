# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The steps of the proxy's units, as they run on the host: without the collection."""

from __future__ import annotations

import importlib.util
import socket
import threading
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "roles" / "litellm_proxy" / "files" / "proxy.py"
_spec = importlib.util.spec_from_file_location("proxy_program", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)

# As HAProxy 2.6 writes it: name and port of a server are the 18th and 19th word.
HEAD = "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight\n"
LINE = "2 model-tiny {number} {server} {address} 0 8 1 1 4 8 2 0 6 0 0 0 {name} {port} - 0 0 - - 0\n"
CONFIG = """backend model-tiny
    default-server check
    server stays 10.0.0.1:8001
    server six [fd00:0::1]:8001
    server named gpu1.example:8001
    server moved 10.0.0.1:8002
    server another-host gpu9.example:8001
    server new 10.0.0.3:8001
"""


def line(number: int, server: str, address: str = "10.0.0.1", name: str = "-", port: int = 8001) -> str:
    return LINE.format(number=number, server=server, address=address, name=name, port=port)


def test_a_reload_keeps_the_state_of_servers_that_are_where_they_were(tmp_path: Path) -> None:
    kept = line(1, "stays") + line(2, "six", "fd00::1") + line(3, "named", "10.0.0.7", "gpu1.example")
    dropped = line(4, "moved") + line(5, "another-host", "10.0.0.7", "gpu1.example") + line(6, "gone")
    (tmp_path / "haproxy.cfg").write_text(CONFIG, encoding="utf-8")
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            connection, _address = listening.accept()
            with connection:
                assert connection.recv(1000) == b"show servers state\n"
                connection.sendall(f"{HEAD}{kept}{dropped}\n".encode())

        thread = threading.Thread(target=serve)
        thread.start()
        words = ["keep-state", str(path), str(tmp_path / "state"), str(tmp_path / "haproxy.cfg")]
        assert program.main(words) == 0
        thread.join()
    assert (tmp_path / "state").read_text(encoding="utf-8") == f"{HEAD}{kept}\n"


def test_a_step_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["keep-state", "a"]) == 2
    assert "keep-state SOCKET FILE CONFIG" in capsys.readouterr().err
