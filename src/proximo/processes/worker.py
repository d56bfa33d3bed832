"""The process of a worker, which runs foreign code: a reward function, an environment. A worker.py of rewards and of
environments is its script.

It is two processes. The keeper (tree.py) runs no foreign code: it waits until the trainer lets go of it, by will or by
death, and then kills whatever is below it. The runner below it loads what it is told to and is asked; what it answers
and prints goes to the trainer directly. Nothing heavy is imported here: a worker is started in a moment.
"""

import contextlib
import importlib
import importlib.util
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
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

import psutil

from proximo.processes import channel, tree

Serve = Callable[[int, int], None]
"""Work of a runner, given the descriptors of requests and answers, until its requests end."""


class Junk(Exception):
    """Error where foreign code returned something other than what it was asked for."""


def main(arguments: Sequence[str], serve: Serve) -> None:
    """Become a keeper with a runner. The arguments are three descriptors, of requests, of answers, and the one that is
    closed when the trainer lets go, and the trainer's process id."""
    requests, answers, life, trainer = map(int, arguments)
    for descriptor in (requests, answers, life):
        os.set_inheritable(descriptor, False)  # by programs that a function starts
    keeper, pid = tree.Keeper(), os.getpid()
    tree.signal_at_parents_death(signal.SIGCONT)  # the function may have stopped us when the trainer dies
    runner = os.fork()
    if runner:
        channel.send(answers, {"runner": runner})
        for descriptor in (requests, answers, 1, 2):
            os.close(descriptor)
        status = keeper.keep(runner, life, trainer=trainer) or 0
        os._exit(status if status >= 0 else 128 - status)  # as a shell would say it
    keeper.forget()
    os.close(life)
    os.setsid()
    if tree.end_with(pid):
        serve(requests, answers)
    os._exit(0)


def begin(job: dict[str, Any]) -> None:
    """Take the path and the limits of the first message."""
    sys.path[:] = job["path"]
    sys.argv[:] = [""]
    resource.setrlimit(resource.RLIMIT_DATA, (job["memory"], job["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # shared memory is in no limit: when it runs out, not the trainer is ended
        Path("/proc/self/oom_score_adj").write_text("1000")


def raise_open_files() -> None:
    """Let this process open as many files as the system lets it choose."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# A user's code


def load(module: str) -> ModuleType:
    """A module, or a file as one."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    if os.path.exists(module) and not os.path.isfile(module):  # a pipe would be read forever
        raise OSError(f"{module} is not a file")
    folder = str(Path(module).parent)
    sys.path_hooks.insert(0, _finders(folder, [entry for entry in sys.path if entry != folder]))
    sys.path_importer_cache.pop(folder, None)
    sys.path.insert(0, folder)  # as with `python file.py`: it may import what is next to it
    name = f"reward_{Path(module).stem}"
    return module_at(module, name, _Source(name, module))


def module_at(path: str, name: str, loader: SourceFileLoader | None = None) -> ModuleType:
    """The module in a file, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
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
        if not _is_below(path, folder) or any(_is_below(other, folder) and _is_below(path, other) for other in others):
            raise ImportError
        return _Finder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Source, SOURCE_SUFFIXES))

    return finder


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def functions(module: ModuleType) -> list[str]:
    """Names of the functions that a module defines itself."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in defined if callable(vars(module)[name]) and not name.startswith("_")]


def guarded(call: Callable[[], dict[str, Any]], seed: int) -> dict[str, Any]:
    """Value that foreign code returns, or how it failed."""
    _seed(seed)
    try:
        return call()
    except SystemExit as error:
        return {"failed": "exit", "message": f"it called sys.exit({error.code!r})"[:500]}
    except MemoryError as error:
        return {"failed": "memory", "message": described(error)}
    except Junk as error:
        return {"failed": "junk", "message": str(error)[:500]}
    except BaseException as error:  # a user's code may raise anything
        return {"failed": type(error).__name__[:80], "message": described(error)}
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()


def described(error: BaseException) -> str:
    """An error with the line that raised it, whatever it does when it is shown."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # its own __str__ may be what is broken
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return text[:500] + location


def _seed(number: int) -> None:
    """Seed every generator: a function that draws draws the same whenever it is asked the same."""
    random.seed(number)
    with contextlib.suppress(Exception):
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number % 2**32)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(number)


# How a runner is


def computed() -> float:
    """Processor seconds of this process and of those below it that have ended, and those that it was kept waiting for a
    processor, where the system says so: a busy machine makes no function one that waits."""
    children, delay = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):  # Linux alone tells
        delay = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return time.process_time() + children.ru_utime + children.ru_stime + delay


def health() -> dict[str, Any]:
    """Bytes that are really in use, the number of children, and whether what it prints has been closed."""
    return {"memory": _memory(), "children": _count_children(), "closed": _is_closed(1) or _is_closed(2)}


def _memory() -> int:
    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process().memory_info().rss
    return 0


def _count_children() -> int:
    """Listing all processes takes milliseconds: it is done only where there is a child."""
    with contextlib.suppress(psutil.Error, OSError):
        if hasattr(os, "waitid"):  # an error without any child; not on every system
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return len(psutil.Process().children())
    return 0


def _is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False
