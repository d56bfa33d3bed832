"""Connections: as many at once as there are file descriptors for; what comes beyond them waits until it is accepted.

A connection without a request is closed after a while, and sooner where others wait for its place: so neither idle
clients nor slow ones keep anybody out, and no request is cut off.
"""

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 5.0
"""Seconds for the rest of a request's headers to arrive after their first byte."""
IDLE_SECONDS = 60.0
"""Seconds that a connection without a request is kept."""
CROWDED_SECONDS = 5.0
"""The same where others wait for its place."""
STALLED_SECONDS = 60.0
"""Seconds in which a client may take nothing of an answer."""
LOOK_SECONDS = 1.0
"""Seconds between looks whether a client that will send nothing more has gone."""
TURN = 4096
"""Bytes that are read before others have their turn: each few of them may be a chunk of a body, which takes time."""
MAX_CONNECTIONS = 4096
SPARE = 64
"""File descriptors that are left for everything else."""
RETRY_SECONDS = 0.1
"""Seconds until connections are accepted again after all descriptors were taken."""


class Crowd:
    """The connections of a server: at most so many, and which of them are idle."""

    def __init__(self, limit: int, header_seconds: float) -> None:
        self.limit, self.header_seconds = limit, header_seconds
        self.idle: dict[Connection, float] = {}
        """Connections without a request, with the time since when; the oldest first."""
        self.changed = asyncio.Event()

    async def room(self, connections: Collection[object]) -> None:
        """Wait until there may be one more. Where all are taken, the oldest idle one is closed."""
        loop = asyncio.get_running_loop()
        while len(connections) >= self.limit:
            oldest = next(iter(self.idle), None)
            left = None if oldest is None else self.idle[oldest] + CROWDED_SECONDS - loop.time()
            if oldest is not None and left is not None and left <= 0:
                oldest.give_up(HTTPStatus.SERVICE_UNAVAILABLE)
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left if left is None or left > 0 else None):
                    await self.changed.wait()


class Transport:
    """A connection's transport, which uvicorn closes whatever its client is still sending."""

    def __init__(self, inner: asyncio.Transport, close: Callable[[], None], is_leaving: Callable[[], bool]) -> None:
        self._inner, self._is_leaving = inner, is_leaving
        self.close = close

    def is_closing(self) -> bool:
        return self._is_leaving() or self._inner.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A connection that is closed when its client is silent for too long, and not before the client has read why."""

    def __init__(self, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self._crowd = crowd
        self._socket: asyncio.Transport
        """The transport that uvicorn's is around."""
        self._arrived = bytearray(TURN)
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._has_begun = False
        """True if there is a part of a request."""
        self._is_leaving = False

    def connection_made(self, transport: Any) -> None:
        self._socket = transport
        super().connection_made(cast("asyncio.Transport", Transport(transport, self._close, lambda: self._is_leaving)))
        self._wait()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._arrived

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._arrived[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if not self._is_leaving:
            super().data_received(data)
        if self._is_leaving:
            return
        is_partial = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if self._is_busy:
            self._stop_waiting()
        elif is_partial and not self._has_begun:
            self._has_begun = True
            self._set_timer(self._crowd.header_seconds, self.give_up)
        elif self._has_begun and not is_partial:  # the rest of a body whose request is answered already
            self._wait()

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] (as asyncio has it)
        """True if the connection stays, for the answer: a client may send its request, say that this was all, and
        read."""
        is_whole = self._is_busy and not self.cycle.more_body
        if is_whole and self._look is None:
            self.cycle.keep_alive = False
            self._look = self.loop.call_later(LOOK_SECONDS, self._look_for_client, True)
        return is_whole

    def _look_for_client(self, ask: bool) -> None:
        """Close the connection if the client has gone, which looks like one that only reads until something is sent:
        an interim answer, which every client of HTTP/1.1 passes over."""
        if self._socket.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._socket.abort()
            return
        if ask and self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version == b"1.1":
            self._socket.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        self._look = self.loop.call_later(LOOK_SECONDS, self._look_for_client, False)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)
        self._crowd.changed.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def give_up(self, status: HTTPStatus = HTTPStatus.REQUEST_TIMEOUT) -> None:
        """Close the connection. A client that is sending, or has not begun to, is told why."""
        is_awaited = self._has_begun or (self.cycle is None and not self._is_leaving)
        self._stop_waiting()
        if self.transport.is_closing():  # and its client takes nothing, or does not end
            self.transport.abort()
        elif is_awaited:
            self._refuse(status)
        else:
            self._close_now()

    def _refuse(self, status: HTTPStatus) -> None:
        """Say the last word."""
        if self.conn.our_state is self.conn.their_state is h11.IDLE:
            headers = [("retry-after", "1"), ("content-length", "0"), ("connection", "close")]
            response = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
            for event in (response, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._leave()

    def _close(self) -> None:
        """End the connection when its client has read the answer: one that is closed while something arrives is reset,
        and what was said is lost."""
        if self._socket.is_closing():
            return
        has_all = self.conn.their_state in (h11.DONE, h11.IDLE, h11.MUST_CLOSE) and not self.conn.trailing_data[0]
        if has_all or self._is_leaving:
            self._close_now()
        else:
            self._leave()

    def _leave(self) -> None:
        """Say and read nothing more, until the client ends the connection, or a while is over."""
        self._is_leaving = True
        self._socket.write_eof()
        self._socket.resume_reading()
        self._wait()

    def _close_now(self) -> None:
        self._socket.close()
        self._set_timer(STALLED_SECONDS, self._socket.abort)

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        """Wait for a request."""
        self._stop_waiting()
        self._crowd.idle[self] = self.loop.time()
        self._crowd.changed.set()
        self._set_timer(IDLE_SECONDS, self.give_up)

    def _stop_waiting(self) -> None:
        self._crowd.idle.pop(self, None)
        self._has_begun = False
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, seconds: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, action)


class Listener:
    """Accepts connections of one socket while there is room; uvicorn closes it like a server of asyncio's."""

    def __init__(self, made: socket.socket, crowd: Crowd, others: Collection[object], make: Callable[[], Connection]):
        made.setblocking(False)
        made.listen(MAX_CONNECTIONS)
        self._task = asyncio.create_task(self._accept(made, crowd, others, make))

    async def _accept(
        self, made: socket.socket, crowd: Crowd, others: Collection[object], make: Callable[[], Connection]
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await crowd.room(others)
            try:
                line, _ = await loop.sock_accept(made)
                await loop.connect_accepted_socket(make, line)
            except OSError:  # no descriptor is left, or the client has gone
                await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        self._task.cancel()

    async def wait_closed(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._task


class Server(uvicorn.Server):
    """uvicorn's server with connections of ours."""

    def __init__(self, config: uvicorn.Config, crowd: Crowd) -> None:
        super().__init__(config)
        self._crowd = crowd

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        others = self.server_state.connections
        listeners: list[Any] = [Listener(each, self._crowd, others, self._connection) for each in sockets or ()]
        self.servers += listeners

    def _connection(self) -> Connection:
        return Connection(self._crowd, config=self.config, server_state=self.server_state, app_state={})


def allow_connections() -> None:
    """Raise this process's limit of open files as far as it may and a server has use for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 16 * SPARE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Number of connections that the limit of open files has room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(8, min(MAX_CONNECTIONS, soft - len(os.listdir("/dev/fd")) - SPARE))


def server_of(app: ASGIApp, *, header_seconds: float, closing_seconds: int) -> uvicorn.Server:
    """A server of a local page; `run(sockets=[...])` serves until interrupted. Proxy headers are ignored."""
    config = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        http=H11Protocol,
        loop="asyncio",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(2 * IDLE_SECONDS),  # ours counts
        timeout_graceful_shutdown=closing_seconds,
    )
    return Server(config, Crowd(most_connections(), header_seconds))
