"""Messages between the trainer and its servers: a JSON header, then raw bytes."""

import json
import socket
import struct
from typing import Any


def send(connection: socket.socket, header: dict[str, Any], *payloads: bytes) -> None:
    text = json.dumps(header | {"sizes": [len(payload) for payload in payloads]}).encode()
    connection.sendall(struct.pack(">I", len(text)) + text + b"".join(payloads))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Receive a message; EOFError if the other side is gone."""
    (size,) = struct.unpack(">I", _exactly(connection, 4))
    header = json.loads(_exactly(connection, size))
    return header, [_exactly(connection, size) for size in header["sizes"]]


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)
