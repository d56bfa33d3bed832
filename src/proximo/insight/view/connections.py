"""Idle connections: closed after a few seconds, and limited so that they cannot block the user."""

import asyncio
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 5.0
"""Seconds for the headers of a request to arrive, from the connection's start or the last response."""
MAX_IDLE = 50
"""Maximum connections without a request; for a new one the oldest is closed. The page itself keeps six at most."""


def bounded(seconds: float = HEADER_SECONDS, most: int = MAX_IDLE) -> type[H11Protocol]:
    """A protocol class for one server; its class attributes are shared by the server's connections."""

    class Bounded(H11Protocol):
        idle: ClassVar[dict[H11Protocol, asyncio.TimerHandle]] = {}
        """Idle connections, oldest first, with the timers that will close them."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_busy:
                self._stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._is_busy and not self.transport.is_closing():
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        @property
        def _is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            self._stop_waiting()
            self.idle[self] = self.loop.call_later(seconds, self.transport.abort)
            if len(self.idle) > most:
                oldest = next(iter(self.idle))
                self.idle.pop(oldest).cancel()
                oldest.transport.abort()

        def _stop_waiting(self) -> None:
            if (timer := self.idle.pop(self, None)) is not None:
                timer.cancel()

    return Bounded


def server_of(app: ASGIApp, *, header_seconds: float, most_requests: int, closing_seconds: int) -> uvicorn.Server:
    """A server of a local page; `run(sockets=[...])` serves until interrupted. Proxy headers are ignored."""
    config = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        http=bounded(header_seconds),
        loop="asyncio",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=most_requests,
        timeout_graceful_shutdown=closing_seconds,
    )
    return uvicorn.Server(config)
