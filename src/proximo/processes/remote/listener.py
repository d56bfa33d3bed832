"""Runs on a node of a cluster and starts a worker for each relay that connects and knows the token. A script,
`python listener.py HOST PORT`; it imports nothing of Proximo.

A worker ends with its connection: when the trainer lets go of it, dies, or its machine is gone.
"""

import contextlib
import hmac
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

FOLDER = Path(__file__).parent
if TYPE_CHECKING:
    from proximo.processes.remote import frames, program
else:  # a script that is started in isolation finds only what is beside it
    sys.path.insert(0, str(FOLDER))
    import frames
    import program

PACKAGE = FOLDER.parent.parent
HELLO_SECONDS = 10.0
"""For a connection to say who it is."""
KILL_SECONDS = 10.0
"""For a worker to end that was let go."""


def main(host: str, port: int) -> None:
    token = os.environ.pop(frames.TOKEN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # five for each worker
    with socket.create_server((host, port), backlog=128) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(connection, token), daemon=True).start()


def _serve(connection: socket.socket, token: str) -> None:
    with contextlib.closing(connection), contextlib.suppress(OSError):
        worker = _wanted(connection, token)
        if worker is None:
            return
        frames.watch(connection)
        script = PACKAGE / worker / "worker.py"
        started = program.Program([sys.executable, "-P", "-X", "faulthandler", str(script)], os.environ)
        asking = threading.Thread(target=_ask, args=(connection, started), daemon=True)
        try:
            _drop_hello(started.answers)
            asking.start()
            _answer(connection, started)
        finally:
            started.let_go()
            _end(connection, started, asking)


def _wanted(connection: socket.socket, token: str) -> str | None:
    """Which worker; None for whoever does not know the token."""
    connection.settimeout(HELLO_SECONDS)
    said = b""
    while not said.endswith(b"\n") and len(said) < 256:
        part = connection.recv(1)
        if not part:
            return None
        said += part
    connection.settimeout(None)
    given, _, number = said.decode(errors="replace").strip().partition(" ")
    if not hmac.compare_digest(given.encode(), token.encode()) or not number.isdecimal():
        return None
    return frames.WORKERS[int(number)] if int(number) < len(frames.WORKERS) else None


def _drop_hello(answers: int) -> None:
    """Which process it is here; the relay has named its own."""
    os.read(answers, int.from_bytes(os.read(answers, frames.LENGTH)))


def _answer(connection: socket.socket, started: program.Program) -> None:
    """Pass on what the worker answers and prints, and at last how it ended."""
    kinds = {started.printed: frames.PRINTED, started.answers: frames.ANSWER}
    poll = select.poll()
    for descriptor in kinds:
        poll.register(descriptor, select.POLLIN)
    while started.answers in kinds:
        ready = {descriptor for descriptor, _ in poll.poll()}
        for descriptor in [each for each in kinds if each in ready]:  # what was printed first: it belongs to the answer
            if part := os.read(descriptor, frames.LARGEST):
                frames.send(connection, kinds[descriptor], part)
            else:
                poll.unregister(descriptor)
                del kinds[descriptor]
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.process.wait(KILL_SECONDS)
    while kinds and poll.poll(0) and (part := os.read(started.printed, frames.LARGEST)):
        frames.send(connection, frames.PRINTED, part)
    status = started.process.poll()
    said = 1 if status is None else status if status >= 0 else 128 - status
    frames.send(connection, frames.ENDED, str(said).encode())


def _ask(connection: socket.socket, started: program.Program) -> None:
    """Pass on what the trainer says; where it is gone, let the worker end."""
    try:
        while (frame := frames.receive(connection)) is not None:
            frames.write(started.requests, frame[1])
    except OSError:  # it has ended, which the other thread says
        pass
    finally:
        started.let_go()


def _end(connection: socket.socket, started: program.Program, asking: threading.Thread) -> None:
    """See the worker end before its pipes are closed: another worker's would get their numbers."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.process.wait(KILL_SECONDS)
    started.process.kill()
    started.process.wait()
    if asking.ident is not None:
        asking.join()
    started.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
