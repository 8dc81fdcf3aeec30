# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The way of an ordinary ssh into a lab: ``connect.py NAMESPACE ADDRESS PORT``, as ProxyCommand with ProxyUseFdpass.

The TCP connection is opened inside the lab's controller namespace and its file descriptor is handed to ssh, so
no process stays in between and no byte is copied. Started for every connection: nothing but these imports.
"""

import os
import socket
import sys

CONNECT_SECONDS = 10


def main() -> None:
    namespace, address, port = sys.argv[1:]
    try:
        with open(f"/run/netns/{namespace}", "rb") as entry:
            os.setns(entry.fileno(), os.CLONE_NEWNET)
        connection = socket.create_connection((address, int(port)), timeout=CONNECT_SECONDS)
    except OSError as error:
        lab = namespace.split(".")[1]
        sys.exit(
            f"lab {lab}: no connection to {address} port {port}: {error}. See: tests/lab/lab.py --lab {lab} status"
        )
    connection.setblocking(True)
    with socket.socket(fileno=os.dup(sys.stdout.fileno())) as ssh:
        socket.send_fds(ssh, [b"\0"], [connection.fileno()])


main()
