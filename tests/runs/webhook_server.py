"""A server that takes POSTs, for tests: what it answers is a function's decision."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Posted:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    text: str


@dataclass
class WebhookServer:
    port: int = 0
    posts: list[Posted] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    """Set when the test is over, for answers that wait."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/T0/s3cretTok3n?wait=true"

    @property
    def texts(self) -> list[str]:
        return [each.text for each in self.posts]


Answering = Callable[[BaseHTTPRequestHandler, WebhookServer], None]


def accept(request: BaseHTTPRequestHandler, _: WebhookServer) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "0")
    request.end_headers()


def hang(_: BaseHTTPRequestHandler, server: WebhookServer) -> None:
    server.closing.wait(30)


@contextmanager
def serving(answer: Answering = accept) -> Iterator[WebhookServer]:
    webhook = WebhookServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            webhook.posts.append(Posted(self.path, dict(self.headers), text))
            answer(self, webhook)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing to stderr, which tests read."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    webhook.port = listening.server_address[1]
    threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield webhook
    finally:
        webhook.closing.set()
        listening.shutdown()
        listening.server_close()
