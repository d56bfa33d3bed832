"""The process that runs a reward function. Started as a script by processes.py, it imports nothing of Proximo.

It is two processes. The keeper runs no foreign code: it waits until the trainer lets go of it, by will or by death,
and then kills whatever is below it, also what has left its process group or lost its parent. The runner below it
loads the function and calls it; what it says and prints goes to the trainer directly.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def _beside(name: str) -> Any:
    """A module of this folder, by its file: a script that is started in isolation finds no package."""
    spec = importlib.util.spec_from_file_location(f"proximo_rewards_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


calling = _beside("calling")
LENGTH = 8
"""Bytes before each message that say how long it is."""
ROUNDS = 200
"""So often the keeper kills what is left, a hundredth of a second apart; a process stuck in the kernel outlasts it."""

# From Linux's prctl.h.
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def main(requests: int, answers: int, life: int, trainer: int, *, serve: Any = None) -> None:
    """Three file descriptors, a process, and what the runner does; None: it calls reward functions."""
    for descriptor in (requests, answers, life):
        os.set_inheritable(descriptor, False)  # by programs that a function starts
    _prctl(_SET_CHILD_SUBREAPER, 1)  # orphans below become ours, so that we can kill them
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)  # the function may have stopped us when the trainer dies
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    keeper = os.getpid()
    runner = os.fork()
    if runner:
        send(answers, {"runner": runner})
        for descriptor in (requests, answers, 1, 2):
            os.close(descriptor)
        os._exit(keep(runner, life, wake, trainer))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (life, wake, wake_write):
        os.close(descriptor)
    os.setsid()
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == keeper:
        (serve or serve_rewards)(requests, answers)
    os._exit(0)


# The keeper


def keep(runner: int, life: int, wake: int, trainer: int) -> int:
    """Wait for the end of the runner, the trainer or its patience; the runner's status as a shell would say it."""
    status = _reap(runner)
    # Looked at once a second too: a process that the trainer forked may hold its end of `life` open.
    while status is None and os.getppid() == trainer:
        ready, _, _ = select.select([life, wake], [], [], 1.0)
        if life in ready:
            break
        if wake in ready:
            os.read(wake, 4096)
        status = _reap(runner)
    for _ in range(ROUNDS):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(runner, signal.SIGKILL)
        for child in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            break
        time.sleep(0.01)
    return status or 0


def _reap(runner: int) -> int | None:
    """Bury the dead; the runner's status where it is among them. A runner that was stopped goes on: what it started
    must not make the trainer wait."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (changed := os.waitpid(-1, os.WNOHANG | os.WUNTRACED)) != (0, 0):
            if changed[0] != runner:
                continue
            if os.WIFSTOPPED(changed[1]):
                os.kill(runner, signal.SIGCONT)
                continue
            code = os.waitstatus_to_exitcode(changed[1])
            found = code if code >= 0 else 128 - code
    return found


def _children() -> list[int]:
    """Our own, orphans that we adopted included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name stands in brackets and may hold anything; behind it come the state and the parent.
            if int(entry.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


# The runner


def serve_rewards(requests: int, answers: int) -> None:
    """Load the function of the first message, then call it with each of the others."""
    job = receive(requests)
    if job is None:
        return
    sys.path[:] = job["path"]
    sys.argv[:] = [""]
    limit_memory(job["memory"])
    try:
        module = load(job["place"])
    except BaseException as error:  # a user's module may raise anything while it is imported
        send(answers, {"refused": f"{job['place']} cannot be imported, {calling.described(error)}"})
        return
    function = vars(module).get(job["name"])
    if function is None or not (callable(function) or job["user"]):
        known = ", ".join(functions(module)) or "none"
        send(answers, {"refused": f"{job['place']} has no function {job['name']}; it has {known}"[:500]})
        return
    try:
        called: Any = calling.adapted(function) if job["user"] else function
    except (TypeError, ValueError) as error:
        send(answers, {"refused": f"{job['name']} cannot be called: {error}"})
        return
    runner = os.getpid()
    send(answers, {"ready": True, "form": called.form if job["user"] else ""})
    while (request := receive(requests)) is not None:
        before = _computed()
        answer = answered(called, request, is_users=job["user"])
        if os.getpid() != runner:  # the function forked, and this is the copy coming back
            os._exit(0)
        health = {"memory": _memory(), "children": _count_children(), "closed": _is_closed(1) or _is_closed(2)}
        send(answers, answer | {"id": request["id"], "computed": _computed() - before} | health)


def limit_memory(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # shared memory is in no limit: when it runs out, not the trainer is ended
        Path("/proc/self/oom_score_adj").write_text("1000")


def load(place: str) -> ModuleType:
    """A module, or a file as one."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    folder = str(Path(place).parent)
    sys.path_hooks.insert(0, _finders(folder, [each for each in sys.path if each != folder]))
    sys.path_importer_cache.pop(folder, None)
    sys.path.insert(0, folder)  # as with `python file.py`: it may import what is next to it
    name = f"reward_{Path(place).stem}"
    spec = importlib.util.spec_from_file_location(name, place, loader=_Source(name, place))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Source(SourceFileLoader):
    """Executes what a file says: cached bytecode beside it may be of another one, and is neither read nor written."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class _Finder(FileFinder):
    """Finds no module that has the name of one of Python's own."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if fullname in sys.stdlib_module_names else super().find_spec(fullname, target)


def _finders(folder: str, others: Sequence[str]) -> Callable[[str], FileFinder]:
    """Finds modules in a folder and below it by their source, but not in other folders of sys.path, such as that of
    installed packages."""

    def finder(path: str) -> FileFinder:
        if not _is_below(path, folder) or any(_is_below(each, folder) and _is_below(path, each) for each in others):
            raise ImportError
        return _Finder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Source, SOURCE_SUFFIXES))

    return finder


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def functions(module: ModuleType) -> list[str]:
    """Names of the functions that a module defines itself."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if callable(vars(module)[name]) and not name.startswith("_")]


def answered(function: Callable[..., Any], request: Mapping[str, Any], *, is_users: bool) -> dict[str, Any]:
    """The scores, or how the function failed."""

    def scored() -> dict[str, Any]:
        arguments, count = request["arguments"], request["count"]
        # A function of Proximo's own takes its arguments as they are.
        scores = function(arguments, count) if is_users else calling.listed(function(**arguments), count)
        return {"scores": [calling.to_number(score) for score in scores]}

    return guarded(scored, request["seed"])


def guarded(call: Callable[[], dict[str, Any]], seed: int) -> dict[str, Any]:
    """What foreign code returns, or how it failed."""
    _seed(seed)
    try:
        return call()
    except SystemExit as error:
        return {"failed": "exit", "message": f"it called sys.exit({error.code!r})"[:500]}
    except MemoryError as error:
        return {"failed": "memory", "message": calling.described(error)}
    except calling.Junk as error:
        return {"failed": "junk", "message": str(error)[:500]}
    except BaseException as error:  # a user's code may raise anything
        return {"failed": type(error).__name__[:80], "message": calling.described(error)}
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()


def _seed(number: int) -> None:
    """A function that draws draws the same whenever it is asked the same."""
    random.seed(number)
    with contextlib.suppress(Exception):
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number % 2**32)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(number)


def _computed() -> float:
    """Processor seconds of this process and of those below it that have ended, and those that it was kept waiting for a
    processor, where the system says so: a busy machine makes no function one that waits."""
    children, delay = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        delay = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return time.process_time() + children.ru_utime + children.ru_stime + delay


def _memory() -> int:
    """Bytes that are really in use."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def _count_children() -> int:
    with contextlib.suppress(OSError):
        return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    return 0


# Messages


def send(descriptor: int, message: Mapping[str, Any]) -> None:
    data = memoryview(encoded(message))
    while data:
        data = data[os.write(descriptor, data) :]


def encoded(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(LENGTH) + body


def receive(descriptor: int) -> dict[str, Any] | None:
    """None where the other side has closed."""
    size = _read(descriptor, LENGTH)
    body = None if size is None else _read(descriptor, int.from_bytes(size))
    return None if body is None else json.loads(body)


def _read(descriptor: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
