"""What relay and listener say to each other. Imports nothing of Proximo, since both are scripts."""

import os
import socket

PLACE = "PROXIMO_PLACE"
"""Environment variable of a relay: the listener's address, its token, and which worker is wanted."""
TOKEN = "PROXIMO_PLACE_TOKEN"
"""Environment variable of a listener: what a relay must say first."""
WORKERS = ("rewards", "environments")
"""Folders of the package with a worker.py. A relay asks for one by its number; nothing else can be started."""
REQUEST, ANSWER, PRINTED, ENDED = b"r", b"a", b"p", b"e"
"""Kinds of frames: what is said to a worker, what it answers and prints, and its status as a shell would say it."""
LOST = 254
"""Status of a relay whose listener or node is gone."""
LENGTH = 8
"""Bytes before each message of a worker that say how long it is, as in worker.py."""
HEAD = 5
"""Bytes before each frame: its kind, and how long it is."""
LARGEST = 1 << 16
SILENT = 10
"""Seconds after which a silent connection is tried; three tries without an answer end it."""


def send(connection: socket.socket, kind: bytes, content: bytes) -> None:
    connection.sendall(kind + len(content).to_bytes(HEAD - 1) + content)


def receive(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """The next frame; None where the other side is gone or says something else."""
    head = _exactly(connection, HEAD)
    if head is None or (size := int.from_bytes(head[1:])) > LARGEST:
        return None
    content = _exactly(connection, size)
    return None if content is None else (head[:1], content)


def write(descriptor: int, content: bytes) -> None:
    """All of it, into a pipe."""
    while content:
        content = content[os.write(descriptor, content) :]


def watch(connection: socket.socket) -> None:
    """See that the other machine is gone, even where nothing is being said."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_KEEPIDLE": SILENT, "TCP_KEEPINTVL": SILENT, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000 * SILENT}
    for name, value in times.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(size - len(parts))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
