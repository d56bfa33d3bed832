"""A server: a warm interpreter that forks a keeper for each request. It never reads a request or runs a program itself.

Started as a separate process with a clean environment and only the standard library, so that it holds no secrets.
"""

import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable

from proximo.processes.sandbox import isolation, kernel
from proximo.processes.sandbox.filtering import instructions
from proximo.processes.sandbox.isolation import Cage
from proximo.processes.sandbox.protocol import send
from proximo.processes.sandbox.supervisor import keep

_WARM = """
array bisect collections copy dataclasses datetime decimal enum fractions functools hashlib heapq io itertools json
math operator random re statistics string textwrap threading time typing
"""
"""Modules that programs often import."""


def main(number: int, root_is_made: bool) -> None:
    os.umask(0o022)
    for name in _WARM.split():
        importlib.import_module(name)
    connection = socket.socket(fileno=number)
    missing: dict[str, str] = {}
    cage = _build(root_is_made, missing)
    instructions(1)  # built once and cached for every program: in its own namespace, a process has id 1
    send(connection, {"missing": missing})
    gc.freeze()
    server = os.getpid()
    while connection.recv(1, socket.MSG_PEEK):
        answered, answer = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            _keep(connection, cage, server, answer)
        os.close(answer)
        # Do not wait for its end: the kernel takes some milliseconds to remove a namespace.
        if not os.read(answered, 1):
            send(connection, {"failed": "its keeper died"})
        os.close(answered)
        _forget_the_dead()


def _keep(connection: socket.socket, cage: Cage, server: int, answer: int) -> None:
    try:
        keep(connection, cage, server)
    except BaseException as error:
        send(connection, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os.write(answer, b".")
        os._exit(0)


def _forget_the_dead() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _build(root_is_made: bool, missing: dict[str, str]) -> Cage:
    """Set up every available mechanism; record the missing ones with the reason."""
    processes = None if root_is_made else os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    folders = isolation.readable_folders()
    sys.path[:] = [os.path.realpath(path) for path in sys.path]
    own_root = root_is_made
    if not root_is_made:
        try:
            isolation.build_root(folders)
            own_root = True
        except OSError as error:
            missing["a root of its own"] = str(error)
            if reason := _in_a_child(lambda: _try_reading(folders)):
                missing["an interpreter that everybody can read"] = reason
    landlock = isolation.landlock_version()
    if not landlock:
        missing["Landlock"] = "the kernel has none, or it is switched off"
    if processes is not None and (reason := _in_a_child(lambda: _try_namespaces(processes))):
        missing["namespaces"] = reason
    if reason := _in_a_child(_try_filter):
        missing["seccomp"] = reason
    return Cage(folders, own_root, not root_is_made and "namespaces" not in missing, landlock, processes)


def _try_namespaces(processes: int) -> None:
    isolation.become_nobody()
    isolation.enter_namespaces(processes)


def _try_reading(folders: tuple[str, ...]) -> None:
    """Test that the user nobody can read these folders, even if they are below root's home."""
    isolation.become_nobody()
    for folder in folders:
        os.close(os.open(folder, os.O_RDONLY))


def _try_filter() -> None:
    kernel.no_new_privileges()
    kernel.set_filter(instructions(os.getpid()))


def _in_a_child(attempt: Callable[[], None]) -> str:
    """Try something in a child process; returns the error, or an empty text if it works."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except OSError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    reason = os.read(read, 4096).decode(errors="replace")
    os.close(read)
    _, status = os.waitpid(child, 0)
    return reason or (f"the attempt ended with {status}" if status else "")
