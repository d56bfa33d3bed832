"""Workers on other machines: a relay here, a listener there, and a connection between them.

A relay stands on the trainer's machine in the place of a worker: what is said to it goes to the listener, and what the
worker answers and prints comes back. It ends with the trainer and when the trainer lets go of it; its status is the
worker's, or LOST where the listener is gone. A listener runs on a node of a cluster and starts a worker for each relay
that connects and knows the token; a worker ends with its connection: when the trainer lets go of it, dies, or its
machine is gone.

A script: `python remote.py REQUESTS ANSWERS LIFE TRAINER` is a relay, as child.py starts it, without any other package;
`python remote.py HOST PORT` is a listener.
"""

import contextlib
import hmac
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # a script that is started in isolation finds no package
from proximo.processes import channel
from proximo.processes.program import Program, local_command

NODE_PLACE = "PROXIMO_PLACE"
"""Environment variable of a relay: the listener's address, its token, and which worker is wanted."""
TOKEN = "PROXIMO_PLACE_TOKEN"
"""Environment variable of a listener: what a relay must say first."""
WORKERS = ("rewards", "environments")
"""Folders of the package with a worker.py. A relay asks for one by its number; nothing else can be started."""
LOST = 254
"""Status of a relay whose listener or node is gone."""
CONNECT_SECONDS = 30.0
HELLO_SECONDS = 10.0
"""Seconds for a connection to say who it is."""
KILL_SECONDS = 10.0
"""Seconds for a worker to end that was let go."""


# The relay


def relay(requests: int, answers: int, life: int, trainer: int) -> int:
    """Stand for a worker, with three descriptors and the trainer's process id as it has them; the status."""
    for descriptor in (requests, answers, life):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with, args=(life, trainer), daemon=True).start()
    address, token, worker = os.environ.pop(NODE_PLACE).split()
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        connection.settimeout(None)
        channel.watch(connection)
        connection.sendall(f"{token} {worker}\n".encode())
    except OSError as error:
        print(f"{address} does not answer: {error}", flush=True)
        return LOST
    channel.send(answers, {"runner": os.getpid()})  # this process: who kills it ends the worker
    threading.Thread(target=_pass_requests, args=(connection, requests), daemon=True).start()
    while frame := channel.receive_frame(connection):
        kind, content = frame
        if kind == channel.ENDED:
            return int(content)
        channel.write(answers if kind == channel.ANSWER else sys.stdout.fileno(), content)
    return LOST


def _pass_requests(connection: socket.socket, requests: int) -> None:
    try:
        while part := os.read(requests, channel.LARGEST):
            channel.send_frame(connection, channel.REQUEST, part)
    except OSError:  # the other thread sees that the connection is closed
        pass


def _end_with(life: int, trainer: int) -> None:
    """End with the trainer, looking once a second too: a process that it forked may hold its end of `life` open."""
    while os.getppid() == trainer and not select.select([life], [], [], 1.0)[0]:
        pass
    os._exit(0)


# The listener


def listen(host: str, port: int) -> None:
    """Start a worker for each relay that knows the token of the environment."""
    from proximo.processes import worker

    token = os.environ.pop(TOKEN)
    worker.raise_open_files()  # five for each worker
    with socket.create_server((host, port), backlog=128) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(connection, token), daemon=True).start()


def _serve(connection: socket.socket, token: str) -> None:
    with contextlib.closing(connection), contextlib.suppress(OSError):
        name = _wanted(connection, token)
        if name is None:
            return
        channel.watch(connection)
        worker = Program(local_command(Path(__file__).parents[1] / name / "worker.py"), os.environ)
        asking = threading.Thread(target=_ask, args=(connection, worker), daemon=True)
        try:
            _drop_hello(worker.answers)
            asking.start()
            _answer(connection, worker)
        finally:
            worker.let_go()
            _end(connection, worker, asking)


def _wanted(connection: socket.socket, token: str) -> str | None:
    """Name of the wanted worker; None for whoever does not know the token."""
    connection.settimeout(HELLO_SECONDS)
    hello = b""
    while not hello.endswith(b"\n") and len(hello) < 256:
        part = connection.recv(1)
        if not part:
            return None
        hello += part
    connection.settimeout(None)
    given, _, number = hello.decode(errors="replace").strip().partition(" ")
    if not hmac.compare_digest(given.encode(), token.encode()) or not number.isdecimal():
        return None
    return WORKERS[int(number)] if int(number) < len(WORKERS) else None


def _drop_hello(answers: int) -> None:
    """Skip the worker's message with its process id; the relay has sent that of its process."""
    os.read(answers, int.from_bytes(os.read(answers, channel.LENGTH)))


def _answer(connection: socket.socket, worker: "Program") -> None:
    """Pass on what the worker answers and prints, and at last how it ended."""
    kinds = {worker.printed: channel.PRINTED, worker.answers: channel.ANSWER}
    poll = select.poll()
    for descriptor in kinds:
        poll.register(descriptor, select.POLLIN)
    while worker.answers in kinds:
        ready = {descriptor for descriptor, _ in poll.poll()}
        for descriptor in [key for key in kinds if key in ready]:  # what was printed first: it belongs to the answer
            if part := os.read(descriptor, channel.LARGEST):
                channel.send_frame(connection, kinds[descriptor], part)
            else:
                poll.unregister(descriptor)
                del kinds[descriptor]
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(KILL_SECONDS)
    while kinds and poll.poll(0) and (part := os.read(worker.printed, channel.LARGEST)):
        channel.send_frame(connection, channel.PRINTED, part)
    status = worker.process.poll()
    shown = 1 if status is None else status if status >= 0 else 128 - status
    channel.send_frame(connection, channel.ENDED, str(shown).encode())


def _ask(connection: socket.socket, worker: "Program") -> None:
    """Pass on what the trainer says; where it is gone, let the worker end."""
    try:
        while (frame := channel.receive_frame(connection)) is not None:
            channel.write(worker.requests, frame[1])
    except OSError:  # it has ended, which the other thread says
        pass
    finally:
        worker.let_go()


def _end(connection: socket.socket, worker: "Program", asking: threading.Thread) -> None:
    """See the worker end before its pipes are closed: another worker's would get their numbers."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(KILL_SECONDS)
    worker.process.kill()
    worker.process.wait()
    if asking.ident is not None:
        asking.join()
    worker.close()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        listen(sys.argv[1], int(sys.argv[2]))
    else:
        os._exit(relay(*map(int, sys.argv[1:5])))
