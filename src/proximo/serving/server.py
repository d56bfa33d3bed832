"""The server: OpenAI's endpoints for one model, and a page to chat with it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from proximo.insight.charts.pages import style
from proximo.insight.page.connections import HEADER_SECONDS, server_of
from proximo.models.tokens.spelling import Spelling
from proximo.serving.auth import Guard
from proximo.serving.engine import ServingEngine
from proximo.serving.errors import Refusal
from proximo.serving.queue import CompletionJob, CompletionPiece, CompletionRequest
from proximo.serving.reading import Kind, RequestReader
from proximo.serving.requests import CompletionQuery
from proximo.serving.responses import Choice, Replies, in_pieces
from proximo.system.safe_text import quoted

STATIC = Path(__file__).parent / "static"
"""Style sheet that the other pages use, too."""
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
MAX_BODY = 4 << 20
"""Maximum bytes of a request."""
BODY_SECONDS = 30.0
"""Seconds for the body of a request to arrive."""
MAX_WAITING = 512
"""Maximum completions that wait for a slot, and requests that are read; what comes beyond them is refused."""
MAX_BODIES = 256 << 20
"""Maximum bytes of all requests that are read."""


@dataclass
class Load:
    """Load of the requests that are being read."""

    requests: int = 0
    """Number that have arrived."""
    bytes: int = 0
    """Bytes of all, as far as they have arrived."""


@dataclass(frozen=True)
class Service:
    """One model behind OpenAI's endpoints."""

    engine: ServingEngine
    reader: RequestReader
    spelling: Spelling
    load: Load = field(default_factory=Load)

    @property
    def model(self) -> str:
        """Name that clients give."""
        return self.reader.asking.model

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "proximo"}
        card["chat"] = self.engine.tokenizer.chat_template is not None  # for the page
        return JSONResponse({"object": "list", "data": [card]})

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, await self._query("chat", request))

    async def text(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, await self._query("text", request))

    async def _query(self, kind: Kind, request: Request) -> CompletionQuery:
        """Read what is asked. Neither its JSON nor its texts are read here, where all others would wait for it."""
        async with _body(request, self.load) as body:
            self._check_room(self.load.requests + 1)
            self.load.requests += 1
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self.reader.threads, self.reader.read, kind, body)
            finally:
                self.load.requests -= 1

    async def _answer(self, request: Request, query: CompletionQuery) -> Response:
        self._check_room(len(query.requests))
        delivery = Delivery(query.requests)
        self.engine.submit(*delivery.jobs)
        replies = Replies(query, self.model, self.spelling)
        if query.stream:
            return StreamingResponse(_events(delivery, replies), media_type="text/event-stream")
        return await _unless_gone(request, delivery, replies)

    def _check_room(self, more: int) -> None:
        if self.engine.waiting + more > MAX_WAITING:
            raise Refusal(f"{self.engine.waiting} completions are waiting already: try again later", status=429)


class Delivery:
    """The pieces of a request's completions, from the engine's thread to the server's loop."""

    def __init__(self, requests: tuple[CompletionRequest, ...]) -> None:
        self._queue: asyncio.Queue[tuple[int, CompletionPiece]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.jobs = [CompletionJob(each, self._deliverer(number)) for number, each in enumerate(requests)]

    def _deliverer(self, number: int) -> Callable[[CompletionPiece], None]:
        def deliver(piece: CompletionPiece) -> None:
            with suppress(RuntimeError):  # the server has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, piece))

        return deliver

    async def pieces(self) -> AsyncIterator[tuple[int, CompletionPiece]]:
        """The number of a completion and a piece of it, as they come; Refusal where one failed. However this ends,
        completions that are not finished are given up."""
        left = len(self.jobs)
        try:
            while left:
                number, piece = await self._queue.get()
                if piece.error is not None:
                    raise Refusal(piece.error, status=500)
                left -= piece.finish is not None
                yield number, piece
        finally:
            for job in self.jobs:
                job.cancelled = True

    @property
    def tokens(self) -> int:
        return sum(len(job.tokens) for job in self.jobs)


async def _unless_gone(request: Request, delivery: Delivery, replies: Replies) -> Response:
    """The whole answer; nothing is computed any more for a client that has gone."""
    answer = asyncio.ensure_future(_whole(delivery, replies))
    gone = asyncio.ensure_future(request.receive())  # the body is read, so all that can come is the end
    done, waiting = await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
        with suppress(asyncio.CancelledError):
            await each
    return await answer if answer in done else Response(status_code=499)


async def _whole(delivery: Delivery, replies: Replies) -> Response:
    choices = [Choice() for _ in delivery.jobs]
    async for number, piece in delivery.pieces():
        choice = choices[number]
        choice.text += piece.text
        choice.logprobs += piece.logprobs
        choice.finish = piece.finish
    content = await asyncio.to_thread(lambda: "".join(in_pieces(replies.whole(choices, delivery.tokens))))
    return Response(content, media_type="application/json")


async def _events(delivery: Delivery, replies: Replies) -> AsyncIterator[str]:
    """Server-sent events, as OpenAI's clients read them."""
    try:
        if replies.query.is_chat:
            for number in range(len(delivery.jobs)):
                yield _event(replies.first(number))
        async for number, piece in delivery.pieces():
            if piece.logprobs:
                yield await asyncio.to_thread(_with_logprobs, replies, number, piece)
            elif piece.text:
                yield _event(replies.part(number, piece.text, (), None))
            if piece.finish is not None:
                yield _event(replies.part(number, "", (), piece.finish))
        if replies.query.with_usage:
            yield _event(replies.end(delivery.tokens))
    except Refusal as refusal:
        yield _event(refusal.body)
    yield "data: [DONE]\n\n"


def _with_logprobs(replies: Replies, number: int, piece: CompletionPiece) -> str:
    return _event(replies.part(number, piece.text, piece.logprobs, None))


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


@asynccontextmanager
async def _body(request: Request, load: Load) -> AsyncIterator[bytes]:
    """A request's body; its size and the time it takes are limited."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(f"content-type is {quoted(kind)}: send application/json", status=415)
    data = bytearray()
    try:
        if int(request.headers.get("content-length", "0")) > MAX_BODY:
            raise _too_large()
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                load.bytes += len(part)
                if len(data) > MAX_BODY:
                    raise _too_large()
                if load.bytes > MAX_BODIES:
                    raise Refusal("requests of many bytes are being read already: try again later", status=429)
        yield bytes(data)
    except TimeoutError:
        raise Refusal(f"the request did not arrive within {BODY_SECONDS:g} s: send it again", status=408) from None
    finally:
        load.bytes -= len(data)


def _too_large() -> Refusal:
    return Refusal(f"the request has more than {MAX_BODY >> 20} MiB: send less", status=413)


def application(engine: ServingEngine, reader: RequestReader, *, port: int, token: str | None) -> ASGIApp:
    """The application that serves one model at a port."""
    service = Service(engine, reader, Spelling(engine.tokenizer))
    files = {f"/{path.name}": (path.read_bytes(), KINDS[path.suffix]) for path in STATIC.iterdir()}
    files["/style.css"] = (style().encode(), KINDS[".css"])
    files["/"] = files.pop("/index.html")

    async def file(request: Request) -> Response:
        content, kind = files[request.scope["path"]]
        return Response(content, media_type=kind)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return JSONResponse(error.body, error.status, error.headers)

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}: this server has no such address"
        return JSONResponse(Refusal(what, status=error.status_code).body, error.status_code)

    routes = [
        Route("/v1/models", service.models),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.text, methods=["POST"]),
        *(Route(path, file) for path in files),
    ]
    inner = Starlette(routes=routes, exception_handlers={Refusal: refused, HTTPException: missing})
    inner.router.redirect_slashes = False
    return Guard(inner, port=port, token=token, open_paths=files)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free port. OSError if it is not available."""
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()  # now, so that a second server does not take the port while the model is loaded
    except OSError:
        made.close()
        raise
    return made


def is_loopback(made: socket.socket) -> bool:
    """True if only this machine reaches the socket."""
    host = made.getsockname()[0]
    return host == "::1" or host.startswith("127.")


def server(app: ASGIApp, *, header_seconds: float = HEADER_SECONDS) -> uvicorn.Server:
    """The server; `run(sockets=[...])` serves until interrupted."""
    return server_of(app, header_seconds=header_seconds, closing_seconds=2)
