"""A server with OpenAI's chat completions, for tests: what it answers to a request is a function's decision."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answering = Callable[[dict[str, Any]], Any]
"""Gets the body of a request. Returns the judge's reply as text or as a choice with more, (status, message) and
perhaps headers, bytes to send as they are, or None to close the connection."""


def verdict(score: float) -> str:
    return json.dumps({"reason": "as asked", "score": score})


def case_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be judged, from the first user message of a request."""
    return json.loads(body["messages"][1]["content"])


def by_length(body: Mapping[str, Any]) -> str:
    """A judge that likes long completions: a point for each character, 10 at most."""
    return verdict(min(len(case_of(body)["completion"]), 10))


class JudgeServer:
    """Listens on a free port, which it keeps when it is closed and opened again."""

    def __init__(self, answer: Answering = by_length, models: tuple[str, ...] = ("judge",), port: int = 0) -> None:
        self.answer, self.models = answer, models
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = self._running = 0
        """Requests that were there at the same time."""
        self._lock = threading.Lock()
        self.port = port
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def open(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self), bind_and_activate=False)
        self._server.request_queue_size, self._server.daemon_threads = 512, True
        self._server.allow_reuse_address = True
        self._server.server_bind()
        self._server.server_activate()
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def counted(self, body: dict[str, Any], key: str | None) -> Iterator[None]:
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self._running += 1
            self.most = max(self.most, self._running)
        yield
        with self._lock:
            self._running -= 1


def _handler(server: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": each} for each in server.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.counted(body, self.headers["Authorization"]):
                answer = server.answer(body)
            if isinstance(answer, str):
                answer = {"message": {"content": answer}}
            if isinstance(answer, dict):
                usage = {"prompt_tokens": 100, "completion_tokens": 10}
                self._send(200, {"choices": [answer], "usage": usage})
            elif isinstance(answer, tuple):
                self._send(answer[0], {"error": {"message": answer[1]}}, **dict(answer[2:]))
            elif answer is None:
                self.close_connection = True
            else:
                self._drip(answer)

        def _drip(self, parts: Iterator[bytes]) -> None:
            """Sends part after part, as long as somebody listens."""
            self.close_connection = True
            try:
                for part in parts:
                    self.wfile.write(part)
                    time.sleep(0.02)
            except OSError:
                pass

        def _send(self, status: int, body: Any, **headers: str) -> None:
            data = json.dumps(body).encode()
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass

    return Handler
