"""Runs a program in its own process, which has been restricted before.

Nothing here is hidden from the program, and nothing here is secret: it has only the inputs, and results are compared
with the expected ones elsewhere.
"""

import atexit
import io
import json
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

ANSWERS = 3
"""Descriptor that results of calls are written to."""

_exit, _write = os._exit, os.write  # bound now, in case a program replaces them


def run(program: str, calls: dict[str, Any] | None, nonce: str) -> NoReturn:
    for name in [name for name in sys.modules if name.partition(".")[0] == "proximo"]:
        del sys.modules[name]
    sys.argv = ["program.py"]
    random.seed(0)  # the same program draws the same numbers in every run
    _open_streams()
    _exit(_run_script(program) if calls is None else _run_calls(program, calls["function"], calls["arguments"], nonce))


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    errors = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(errors, "utf-8", "backslashreplace", line_buffering=True)


def _module(name: str) -> types.ModuleType:
    """A module registered under its name, where dataclasses and others look it up."""
    sys.modules[name] = module = types.ModuleType(name)
    return module


def _run_script(program: str) -> int:
    """Run a script as Python does, including its threads, exit functions and buffered output."""
    code = _guarded(
        lambda: exec(compile(program, "program.py", "exec", dont_inherit=True), _module("__main__").__dict__)
    )
    ending = _guarded(_finish)
    return code or ending


def _finish() -> None:
    getattr(threading, "_shutdown")()  # noqa: B009 - what the interpreter itself calls: waits for threads
    getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    sys.stdout.flush()


def _guarded(body: Callable[[], object]) -> int:
    """Run `body`; returns the exit code that Python would end with."""
    try:
        body()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run_calls(program: str, function: str, calls: list[str], nonce: str) -> int:
    loads, dumps = json.loads, json.JSONEncoder().encode
    module = _module("program")
    code = _guarded(lambda: exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__))
    for number, text in enumerate([] if code else calls):
        arguments = loads(text)
        try:
            called = _callable(module, function)
            value = called(**arguments) if type(arguments) is dict else called(*arguments)
            line = dumps([nonce, number, plain(value)])
        except BaseException:
            traceback.print_exc()
            return 1
        _write_all(line.encode() + b"\n")
    return code


def _callable(module: types.ModuleType, function: str) -> Callable[..., Any]:
    """A function, or a method of a new instance."""
    owner, _, method = function.rpartition(".")
    return getattr(getattr(module, owner)(), method) if owner else getattr(module, method)


def plain(value: Any) -> Any:
    """The value as plain JSON types only, so that nothing has a custom equality."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [plain(item) for item in value]
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {str(key): plain(item) for key, item in value.items()}
    raise TypeError(f"the result is a {kind.__name__}: only plain data counts")


def _write_all(data: bytes) -> None:
    while data:
        data = data[_write(ANSWERS, data) :]
