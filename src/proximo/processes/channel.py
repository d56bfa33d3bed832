"""Messages between processes: JSON with its length before it, through pipes and sockets. Needs Python's library alone.

What comes from a process that ran foreign code is data, and nothing about it is taken on trust: how long a message says
it is, whether it is one at all, and what it holds.
"""

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

LENGTH = 8
"""Bytes before each message that say how long it is."""


def encoded(message: Mapping[str, Any]) -> bytes:
    return framed(json.dumps(message).encode())


def framed(body: bytes) -> bytes:
    """A message that is JSON already."""
    return len(body).to_bytes(LENGTH) + body


def send(descriptor: int, message: Mapping[str, Any]) -> None:
    write(descriptor, encoded(message))


def write(descriptor: int, content: bytes) -> None:
    """Write all of it."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int) -> dict[str, Any] | None:
    """The next message; None where the other side has closed."""
    size = _exactly(descriptor, LENGTH)
    body = None if size is None else _exactly(descriptor, int.from_bytes(size))
    return None if body is None else json.loads(body)


def _exactly(descriptor: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Incoming:
    """A message that arrives in parts from a process that is not trusted."""

    def __init__(self, max_bytes: int) -> None:
        self._data, self._max_bytes = bytearray(), max_bytes

    def add(self, part: bytes) -> None:
        self._data += part

    @property
    def size(self) -> int | None:
        """Bytes that the message says it has; None while that is not known."""
        return int.from_bytes(self._data[:LENGTH]) if len(self._data) >= LENGTH else None

    @property
    def is_too_large(self) -> bool:
        return (self.size or 0) > self._max_bytes

    @property
    def is_whole(self) -> bool:
        return self.size is not None and len(self._data) >= LENGTH + self.size

    def parsed(self) -> dict[str, Any] | None:
        """The message, with nothing behind it; None if that is no JSON object."""
        try:
            message = json.loads(bytes(self._data[LENGTH:]))
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


# Frames, in which a relay and a listener pass messages and output on

REQUEST, ANSWER, PRINTED, ENDED = b"r", b"a", b"p", b"e"
"""Kinds of frames: what is asked of a worker, what it answers and prints, and its status as a shell would say it."""
HEAD = 5
"""Bytes before each frame: its kind, and how long it is."""
LARGEST = 1 << 16
SILENT = 10
"""Seconds after which a silent connection is tried; three tries without an answer end it."""


def send_frame(connection: socket.socket, kind: bytes, content: bytes) -> None:
    connection.sendall(kind + len(content).to_bytes(HEAD - 1) + content)


def receive_frame(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """The next frame; None where the other side is gone or sends something else."""
    try:
        head = _exactly(connection.fileno(), HEAD)
        if head is None or (size := int.from_bytes(head[1:])) > LARGEST:
            return None
        content = _exactly(connection.fileno(), size)
    except OSError:
        return None
    return None if content is None else (head[:1], content)


def watch(connection: socket.socket) -> None:
    """See that the other machine is gone, even where nothing is being said."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_KEEPIDLE": SILENT, "TCP_KEEPINTVL": SILENT, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000 * SILENT}
    for name, value in times.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
