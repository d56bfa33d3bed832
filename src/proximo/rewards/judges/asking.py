"""One request to a server over HTTP, with a limit for all of it: a server that sends a byte now and then is cut off."""

import io
import json
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

MAX_BYTES = 4 << 20
"""Bytes of an answer at most."""


class Unreachable(Exception):
    """Raised where there is no server, or it closed the connection."""


class TooLate(Exception):
    """Raised where no whole answer has come within the limit."""


@dataclass(frozen=True)
class Reply:
    """The answer of a server."""

    status: int
    body: bytes
    retry_after: str = ""
    """The server's word on when to ask again."""

    @property
    def json(self) -> Any:
        """The body's value; None where it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


def request(method: str, url: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], seconds: float) -> Reply:
    """Send a request; raises Unreachable or TooLate."""
    parts, until = urlsplit(url), time.monotonic() + seconds
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        connection.connect()
        with closing(connection.sock) as inner:
            connection.sock = _Limited(inner, until)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path, data, {"Content-Type": "application/json", **headers})
            answer, body_read = _received(connection)
            if len(body_read) > MAX_BYTES:
                raise Unreachable(f"its answer has more than {MAX_BYTES // 2**20} MiB")
            return Reply(answer.status, body_read, answer.getheader("Retry-After") or "")
    except TimeoutError:
        raise TooLate(f"no answer within {seconds:g} s") from None
    except (OSError, HTTPException) as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from None


def _received(connection: HTTPConnection) -> tuple[HTTPResponse, bytes]:
    answer = connection.getresponse()
    try:
        return answer, answer.read(MAX_BYTES + 1)
    except ValueError:  # http.client takes a chunk of fewer than no bytes
        raise Unreachable("its answer is not HTTP") from None


class _Limited:
    """A socket as http.client uses it, all of whose reads and writes together end at a certain time."""

    def __init__(self, inner: socket.socket, until: float) -> None:
        self._inner, self._until = inner, until

    def sendall(self, data: bytes) -> None:
        self._wait()
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Reading(self))

    def read_into(self, buffer: memoryview) -> int:
        self._wait()
        return self._inner.recv_into(buffer)

    def close(self) -> None:
        """Do nothing: where a server ends the connection, http.client closes it before the body is read."""

    def _wait(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._inner.settimeout(left)


class _Reading(io.RawIOBase):
    def __init__(self, limited: _Limited) -> None:
        super().__init__()
        self._limited = limited

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._limited.read_into(memoryview(buffer))
