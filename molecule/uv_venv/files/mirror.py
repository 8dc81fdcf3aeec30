# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A static server; on port 8081 it keeps whoever asks for a wheel waiting, so that a build can be met in its middle."""

import http.server
import threading
import time


class Slow(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            time.sleep(60)
        super().do_GET()


slow = http.server.ThreadingHTTPServer(("", 8081), Slow)
threading.Thread(target=slow.serve_forever, daemon=True).start()
http.server.ThreadingHTTPServer(("", 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
