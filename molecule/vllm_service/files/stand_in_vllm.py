"""A stand-in for a release's ``bin/vllm``: a real HTTP server with vLLM's command line and none of its weight.

It reads ``serve --config FILE`` as this scenario writes it (one ``key: value`` a line) and answers /health,
/v1/models and /v1/completions. What real vLLM is too slow or too healthy to show is asked for by the key
``stand-in`` in serve.yaml; real vLLM is what the scenario ``default`` runs.
"""

import http.server
import json
import os
import signal
import sys
import threading
import time

settings = {}
with open(sys.argv[sys.argv.index("--config") + 1], encoding="utf-8") as stream:
    for line in stream:
        key, _unused, value = line.strip().partition(": ")
        settings[key] = value.strip("'\"")
fault = settings.get("stand-in", "")
model = settings["served-model-name"]


def interrupted(*_unused):
    print("stand-in: interrupted", flush=True)
    os._exit(130 if loading else 0)


loading = True
signal.signal(signal.SIGINT, interrupted)
# Real vLLM does not end on SIGTERM while it loads.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"stand-in: loading {settings.get('model')} as generation {os.environ.get('ONPREM_VLLM_GENERATION')}", flush=True)
if fault == "arguments":
    print("vllm serve: error: unrecognized arguments: --stand-in", file=sys.stderr)
    sys.exit(2)
if fault == "crash":
    print(f"stand-in: the environment is {dict(os.environ)}", flush=True)
    print("ValueError: No available memory for the cache blocks", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(1)
time.sleep(float(settings.get("stand-in-load", "0.2")))
if fault == "never-ready":
    time.sleep(3600)


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            self.answer({})
        elif self.path == "/environment":
            self.answer(dict(os.environ))
        else:
            self.answer({"data": [{"id": model}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = os.environ.get("VLLM_API_KEY")
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self.answer({"error": "Unauthorized"}, 401)
        elif fault == "crash-at-first-completion":
            print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
            os._exit(1)
        elif fault == "no-answer":
            time.sleep(3600)
        elif asked["model"] != model:
            self.answer({"error": f"The model `{asked['model']}` does not exist."}, 404)
        else:
            text = "" if fault == "empty" else " Paris"
            self.answer({"model": "another" if fault == "foreign" else model, "choices": [{"text": text}]})

    def log_message(self, *_unused):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64


server = Server((settings.get("host", "0.0.0.0"), int(settings["port"])), Answers)
loading = False
print("stand-in: listening", flush=True)
if fault == "dies-later":
    threading.Timer(2.0, lambda: os._exit(1)).start()
server.serve_forever()
