"""The keeper of one program: starts its process, reads its output, ends it, and reports the result."""

import fcntl
import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from proximo.processes.sandbox import harness, isolation, kernel
from proximo.processes.sandbox.isolation import Cage
from proximo.processes.sandbox.limits import Limits
from proximo.processes.sandbox.protocol import receive, send

_READY = b"ready"
_SETUP_SECONDS = 20.0
"""Seconds allowed to set up the isolation, which takes milliseconds."""
_BLOCK = 65536


def keep(connection: socket.socket, cage: Cage, server: int) -> None:
    """Read one request, run it and answer it. The server's memory never holds a program's input or output."""
    kernel.die_with_parent()
    if os.getppid() != server:
        return
    header, _ = receive(connection)
    limits = Limits(**header["limits"])
    isolation.become_nobody()
    if cage.namespaces:
        assert cage.process_files is not None
        isolation.enter_namespaces(cage.process_files)
        if cage.scratch:
            isolation.mount_scratch(limits)
    kernel.die_with_parent()  # again: a change of user resets it
    ending = _Program(header, cage, limits).watch(connection)
    if isinstance(ending, str):
        send(connection, {"failed": ending})
    else:
        send(connection, *ending)


class _Program:
    """A process and its pipes."""

    def __init__(self, header: dict[str, Any], cage: Cage, limits: Limits) -> None:
        self._limits, self._nonce = limits, header["nonce"]
        question = _sealed(header["stdin"].encode("utf-8", "surrogatepass"))
        pipes = [os.pipe() for _ in range(4)]
        self._child = os.fork()
        if self._child == 0:
            _inhabit(header, cage, limits, question, [write for _, write in pipes])
        for file in (question, *(write for _, write in pipes)):
            os.close(file)
        *self._outputs, self._status = [read for read, _ in pipes]
        self._heard = {file: bytearray() for file in (*self._outputs, self._status)}

    def watch(self, connection: socket.socket) -> tuple[Any, ...] | str:
        """Wait until it ends, is killed, or the trainer is gone. A text result says why it never started."""
        ending, started = self._listen(connection)
        os.kill(self._child, signal.SIGKILL)  # has no effect if it ended by itself
        _, status = os.waitpid(self._child, 0)
        for file in self._heard:
            self._drain(file)
        report = bytes(self._heard[self._status])
        if report != _READY:
            return report.decode(errors="replace") or "the program's process ended before it began"
        if ending == "exit" and self._too_much():
            ending = "output"
        number = os.waitstatus_to_exitcode(status)
        if ending == "exit" and number < 0:
            ending = "signal"
        max_bytes = self._limits.output_kb * 1024
        return (
            {"nonce": self._nonce, "ended": ending, "code": abs(number), "seconds": time.monotonic() - started},
            *(bytes(self._heard[file][:max_bytes]) for file in self._outputs),
        )

    def _listen(self, connection: socket.socket) -> tuple[str, float]:
        poll = select.poll()
        ended = os.pidfd_open(self._child)
        for file in (*self._heard, ended):
            poll.register(file, select.POLLIN)
        poll.register(connection, select.POLLRDHUP)
        started, deadline, began = time.monotonic(), time.monotonic() + _SETUP_SECONDS, False
        while (left := deadline - time.monotonic()) > 0:
            for file, _ in poll.poll(left * 1000 + 1):
                if file == ended:
                    return "exit", started
                if file == connection.fileno():
                    os.kill(self._child, signal.SIGKILL)
                    os._exit(0)
                if not self._hear(file):
                    poll.unregister(file)
                    if file == self._status and not began:
                        began, started = True, time.monotonic()
                        deadline = started + self._limits.seconds
            if self._too_much():
                return "output", started
        return "time", started

    def _hear(self, file: int) -> bool:
        """Read available output; False at the end."""
        part = os.read(file, _BLOCK)
        self._heard[file] += part
        return bool(part)

    def _drain(self, file: int) -> None:
        """Read the remaining output of the dead process, up to the limit."""
        while len(self._heard[file]) <= self._limits.output_kb * 1024 and self._hear(file):
            pass

    def _too_much(self) -> bool:
        return any(len(self._heard[file]) > self._limits.output_kb * 1024 for file in self._outputs)


def _sealed(data: bytes) -> int:
    """A sealed file in memory, which cannot be changed."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _inhabit(header: dict[str, Any], cage: Cage, limits: Limits, question: int, pipes: list[int]) -> NoReturn:
    """Apply the last restrictions in the new process, then run the program."""
    status = pipes[-1]
    try:
        _easy_victim(cage)
        os.setsid()
        # High descriptors first, so that none is overwritten before it is copied.
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, 64) for file in (question, *pipes)]
        for number, file in enumerate(high):
            os.dup2(file, number)
        status = len(high) - 1
        os.closerange(len(high), 65536)
        os.environ.clear()
        os.environ |= {"HOME": os.curdir, "LANG": "C.UTF-8", "TZ": "UTC"}
        isolation.lock_in(cage, limits)
        _check_keeper()
        os.write(status, _READY)
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(status)
    program, calls, nonce = header["program"], header["calls"], header["nonce"]
    if calls is None:
        os.close(harness.ANSWERS)
    harness.run(program, calls, nonce)


def _easy_victim(cage: Cage) -> None:
    """Make the kernel kill this process first when memory runs out."""
    if cage.process_files is None:
        return
    file = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=cage.process_files)
    try:
        os.write(file, b"1000")
    finally:
        os.close(file)


def _check_keeper() -> None:
    """Exit if the keeper died before die_with_parent took effect: then the output has no reader."""
    poll = select.poll()
    poll.register(1, 0)
    if poll.poll(0):
        os._exit(1)
