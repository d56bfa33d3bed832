"""The process that environments run in. Started as a script by episode_pool.py, it loads them once and forks for each
episode.

An episode is a process: one that hangs or dies takes nothing else with it, and all of them work at the same time.
It is forked before `reset`, so that what `reset` opens (a program, threads, an event loop) belongs to one episode.
Siblings start alike because random numbers are seeded alike.
"""

import asyncio
import contextlib
import errno
import functools
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # a script that is started in isolation finds no package
from proximo.processes import channel, tree, worker

MAX_ANSWER = 4 * 2**20
"""Bytes of an episode's answer; its text is cut to far less before it is sent."""


def serve(requests: int, answers: int) -> None:
    """Load what the first message names, then do what each of the others asks."""
    job = channel.receive(requests)
    if job is None:
        return
    worker.begin(job)
    worker.raise_open_files()  # each episode has a socket here
    try:
        loaded = _load(job)
    except BaseException as error:  # a user's module may raise anything while it is imported
        channel.send(answers, {"refused": worker.described(error)})
        return
    channel.send(answers, {"ready": True})
    episodes = Episodes(*loaded, job["max_characters"], (requests, answers))
    while (request := channel.receive(requests)) is not None:
        channel.send(answers, {"id": request["id"], "answers": episodes.do(request["arguments"])})


def _load(job: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load what makes an environment, or None, and the tools by name."""
    modules: dict[str, Any] = {}

    def named(path: str, name: str) -> Any:
        module = modules[path] = modules.get(path) or worker.load(path)
        if not callable(member := vars(module).get(name)):
            raise ValueError(f"{path} has no class or function {name}; it has {', '.join(worker.functions(module))}")
        return member

    tools = {name: named(path, name) for path, name in job["tools"]}
    if job["environment"] is None:
        return None, tools
    kind, arguments = named(*job["environment"]), job["arguments"]
    if callable(before := getattr(kind, "before_episodes", None)):
        before(**arguments)
    return (lambda: kind(**arguments)), tools


class Episodes:
    """The processes of the episodes, by their numbers."""

    def __init__(self, make: Any, tools: dict[str, Any], max_characters: int, inherited: Sequence[int]) -> None:
        self._make, self._tools, self._max_characters = make, tools, max_characters
        self._inherited = inherited
        self._sockets: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}

    def do(self, request: Mapping[str, Any]) -> list[Any]:
        """Answers to the episodes that are asked, in order; None of one that gave none in time."""
        for number in request["ends"]:
            self._end(number)
        asked, refused = [], {}
        for start in request["starts"]:
            for number in start["episodes"]:
                asked.append(number)
                try:
                    self._start(number, start["message"])
                except OSError as error:
                    self._end(number)
                    refused[number] = {"failed": "start", "message": self._why(error)}
        for number, message in request["asks"]:
            asked.append(number)
            with contextlib.suppress(OSError, KeyError):  # it has died: it gives no answer
                self._sockets[number].sendall(channel.encoded(message))
        answers = self._answers(asked, request["seconds"], request["cores"]) | refused
        for number in asked:
            if answers[number] is None:
                self._end(number)
        return [answers[number] for number in asked]

    def _start(self, number: int, message: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets[number] = ours
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                for held in self._inherited:
                    os.close(held)
                for connection in self._sockets.values():
                    connection.close()
                _silence()
                self._live(theirs, message)
            os._exit(0)
        theirs.close()
        self._pids[number] = pid

    def _why(self, error: OSError) -> str:
        """Say why no further episode can be started."""
        message = f"{error.strerror} with {len(self._sockets)} episodes at once"
        if error.errno != errno.EMFILE:
            return message
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{message}: the limit of open files is {limit}, raise it (ulimit -Hn) or run fewer at once"

    def _live(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        """Run an episode's process: reset, then answer what is asked."""
        os.setsid()
        from proximo.environments.instance import Instance

        loop = asyncio.new_event_loop()

        def finish(result: Any) -> Any:
            return loop.run_until_complete(result) if asyncio.iscoroutine(result) else result

        instance: list[Instance] = []

        def reset() -> dict[str, Any]:
            instance.append(Instance(self._make, self._tools, finish, self._max_characters))
            return instance[0].answer(message)

        connection.sendall(channel.encoded(worker.guarded(reset, message["seed"])))
        while (asked := channel.receive(connection.fileno())) is not None:
            answered = functools.partial(instance[0].answer, asked)
            connection.sendall(channel.encoded(worker.guarded(answered, asked["seed"])))

    def _answers(self, numbers: Sequence[int], seconds: float, cores: float) -> dict[int, Any]:
        """The next message of each; None of those that died, or that have not answered in time."""
        from proximo.environments.instance import allowed

        deadline = time.monotonic() + allowed(seconds, len(numbers), cores)
        answers: dict[int, Any] = dict.fromkeys(numbers)
        arriving = {
            self._sockets[number].fileno(): (number, channel.Incoming(MAX_ANSWER))
            for number in numbers
            if number in self._sockets
        }
        poll = select.poll()
        for descriptor in arriving:
            poll.register(descriptor, select.POLLIN)
        while arriving and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                number, answer = arriving[descriptor]
                answer.add(part := _read(descriptor))
                is_whole = bool(answer.size) and answer.is_whole
                if is_whole:
                    parsed = answer.parsed()
                    answers[number] = _junk("it answered no JSON object") if parsed is None else parsed
                elif answer.is_too_large:
                    answers[number] = _junk(f"it answered {answer.size} bytes")
                if is_whole or not part or answer.is_too_large:
                    poll.unregister(descriptor)
                    del arriving[descriptor]
                    # So that one that hangs is waited for only as long as it alone may take.
                    deadline = min(deadline, time.monotonic() + allowed(seconds, len(arriving), cores))
        return answers

    def _end(self, number: int) -> None:
        held, pid = self._sockets.pop(number, None), self._pids.pop(number, None)
        if held is not None:
            held.close()
        if pid is not None:
            tree.send_group(pid, signal.SIGKILL)
            tree.send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _silence() -> None:
    """Throw away what an episode prints, so that it cannot be too much."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _read(descriptor: int) -> bytes:
    """Read what an episode has sent; nothing of one that has died, also where it died before it read its request."""
    try:
        return os.read(descriptor, 1 << 16)
    except ConnectionResetError:
        return b""


def _junk(message: str) -> dict[str, Any]:
    return {"failed": "junk", "message": message}


if __name__ == "__main__":
    worker.main(sys.argv[1:5], serve)
