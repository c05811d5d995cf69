"""An OpenAI-compatible server that misbehaves on demand, over real HTTP: one handler a request, in threads.

A `Double` answers prompts of token ids with ids that follow from them (`written`), so that a right answer can be told from a
mixed-up one. `plan` says for each attempt, by its number, what to do instead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 257


def written(prompt: list[int]) -> list[int]:
    """What the double writes after a prompt."""
    return [(sum(prompt) * 7 + place) % 200 + 10 for place in range(3)] + [END]


class Double:
    """A server on a free port of this machine. `plan(number, prompt)` gives the behaviour of request `number` (from 0)."""

    def __init__(self, plan: Callable[[int, list[int]], str] = lambda number, prompt: "well") -> None:
        self.plan = plan
        self.times: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path.endswith("/models"):
                    self.reply(200, {"data": [{"id": "the-target"}]})
                else:
                    self.reply(200, {"version": "double 1.0"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with double.lock:
                    number = len(double.times)
                    double.times.append(time.monotonic())
                    double.bodies.append(body)
                behaviour = double.plan(number, body["prompt"])
                getattr(self, behaviour.partition(" ")[0])(body["prompt"], behaviour.partition(" ")[2])

            def reply(self, status: int, document: Any, **headers: str) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def document(self, prompt: list[int], **changes: Any) -> dict[str, Any]:
                ids = written(prompt)
                choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop"}
                usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
                return {"choices": [choice], "usage": usage, **changes}

            def well(self, prompt: list[int], _: str) -> None:
                self.reply(200, self.document(prompt))

            def slowly(self, prompt: list[int], seconds: str) -> None:
                time.sleep(float(seconds))
                self.well(prompt, "")

            def busy(self, prompt: list[int], seconds: str) -> None:
                self.reply(429, {"error": "slow down"}, retry_after=seconds)

            def status(self, prompt: list[int], code: str) -> None:
                self.reply(int(code), {"error": "no"})

            def hang(self, prompt: list[int], _: str) -> None:
                double.stopping.wait(60)

            def drip(self, prompt: list[int], _: str) -> None:
                self.send_response(200)
                self.send_header("content-length", "100000")
                self.end_headers()
                while not double.stopping.wait(0.05):
                    try:
                        self.wfile.write(b" ")
                        self.wfile.flush()
                    except OSError:
                        return

            def half(self, prompt: list[int], _: str) -> None:
                data = json.dumps(self.document(prompt)).encode()[:40]
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def closed(self, prompt: list[int], _: str) -> None:
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices"')
                self.close_connection = True

            def empty(self, prompt: list[int], _: str) -> None:
                self.reply(200, self.document(prompt, choices=[]))

            def disordered(self, prompt: list[int], _: str) -> None:
                right = self.document(prompt)["choices"][0]
                other = {**right, "token_ids": written([1, *prompt])}
                self.reply(200, self.document(prompt, choices=[{**other, "index": 1}, right]))

            def another(self, prompt: list[int], _: str) -> None:
                right = self.document(prompt)["choices"][0]
                choice = {**right, "token_ids": written([1, *prompt]), "prompt_token_ids": [1, *prompt]}
                self.reply(200, self.document(prompt, choices=[choice]))

            def list(self, prompt: list[int], _: str) -> None:
                self.reply(200, ["not", "an", "answer"])

            def reread(self, prompt: list[int], _: str) -> None:
                usage = {"prompt_tokens": len(prompt) + 1, "completion_tokens": 4}
                self.reply(200, self.document(prompt, usage=usage))

            def filtered(self, prompt: list[int], _: str) -> None:
                right = self.document(prompt)["choices"][0]
                self.reply(200, self.document(prompt, choices=[{**right, "finish_reason": "content_filter"}]))

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *arguments: Any) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Stops it; its port refuses connections from here on."""
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
