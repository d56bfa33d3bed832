"""Stands on the trainer's machine in the place of a worker that runs on a node: what is said to it goes there, and what
the worker answers and prints comes back. Started as a script by processes.py, it imports nothing of Proximo.

It ends with the trainer and when the trainer lets go of it; the listener sees that the connection is closed, and ends
the worker. Its status is the worker's, or LOST where the listener is gone.
"""

import json
import os
import select
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proximo.processes.remote import frames
else:  # a script that is started in isolation finds only what is beside it
    sys.path.insert(0, str(Path(__file__).parent))
    import frames

CONNECT_SECONDS = 30.0


def main(requests: int, answers: int, life: int, trainer: int) -> int:
    """Three file descriptors and a process, as of a worker."""
    for descriptor in (requests, answers, life):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with, args=(life, trainer), daemon=True).start()
    address, token, worker = os.environ.pop(frames.PLACE).split()
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        connection.settimeout(None)
        frames.watch(connection)
        connection.sendall(f"{token} {worker}\n".encode())
    except OSError as error:
        print(f"{address} does not answer: {error}", flush=True)
        return frames.LOST
    frames.write(answers, _message({"runner": os.getpid()}))  # this process: who kills it ends the worker
    threading.Thread(target=_ask, args=(connection, requests), daemon=True).start()
    while frame := frames.receive(connection):
        kind, content = frame
        if kind == frames.ENDED:
            return int(content)
        frames.write(answers if kind == frames.ANSWER else sys.stdout.fileno(), content)
    return frames.LOST


def _ask(connection: socket.socket, requests: int) -> None:
    """Pass on what the trainer says."""
    try:
        while part := os.read(requests, frames.LARGEST):
            frames.send(connection, frames.REQUEST, part)
    except OSError:  # the other thread sees that the connection is closed
        pass


def _end_with(life: int, trainer: int) -> None:
    """Looked at once a second too: a process that the trainer forked may hold its end of `life` open."""
    while os.getppid() == trainer and not select.select([life], [], [], 1.0)[0]:
        pass
    os._exit(0)


def _message(content: dict[str, int]) -> bytes:
    body = json.dumps(content).encode()
    return len(body).to_bytes(frames.LENGTH) + body


if __name__ == "__main__":
    os._exit(main(*map(int, sys.argv[1:5])))
