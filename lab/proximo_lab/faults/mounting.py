"""File systems of a process's own: one that is small, one that cannot be written to."""

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from proximo.runs.checkpoints import CHECKPOINTS
from proximo_lab.faults.processes import command
from proximo_lab.faults.runs import RunSet

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
PRIVATE, BIND, REMOUNT, READ_ONLY = 0x44000, 0x1000, 0x20, 0x1
CANNOT = 99
"""The exit code of a child that may not mount anything."""


def small_disk(runs: RunSet, name: str, size: int, in_the_way: int) -> Callable[[], int]:
    """A run on a file system of so many bytes; where something is in the way, it is tried again without that.

    What it left is copied beside it as NAME-left.
    """

    def work() -> int:
        folder = runs.folder / name
        folder.mkdir()
        _enter()
        _mount("tmpfs", folder, "tmpfs", 0, f"size={size}")
        if in_the_way:
            (folder / "ballast").write_bytes(bytes(in_the_way))
            _command(runs.arguments(name))
            (folder / "ballast").unlink()
        code = _command(runs.arguments(name))
        shutil.copytree(folder, runs.folder / f"{name}-left")
        return code

    return work


def _command(arguments: list[str]) -> int:
    try:
        return command(*arguments)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def read_only(runs: RunSet, name: str, at_step: int | None) -> Callable[[], int]:
    """A run in a folder that nobody may write to; or whose checkpoints nobody may, from a step on."""

    def work() -> int:
        folder = runs.folder / name
        folder.mkdir()
        _enter()
        if at_step is None:
            _mount(str(folder), folder, None, BIND)
            _mount(str(folder), folder, None, BIND | REMOUNT | READ_ONLY)
        else:
            _closing(folder, at_step)
        return _command(runs.arguments(name))

    return work


def _closing(folder: Path, at_step: int) -> None:
    from proximo.rl import train as rl

    real = rl.train_step

    def train_step(run, index, cursor):
        if index == at_step:
            _close(folder)
        return real(run, index, cursor)

    rl.train_step = train_step


def _close(folder: Path) -> None:
    """Close its checkpoints: the folder itself has a file open, the lock."""
    checkpoints = folder / CHECKPOINTS
    _mount(str(checkpoints), checkpoints, None, BIND)
    _mount(str(checkpoints), checkpoints, None, BIND | REMOUNT | READ_ONLY)


def _enter() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS | (0 if os.getuid() == 0 else NEW_USER)):
        _give_up("unshare")
    _mount("none", Path("/"), None, PRIVATE)


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    given = [None if each is None else os.fsencode(each) for each in (source, str(target), kind)]
    if libc.mount(*given, ctypes.c_ulong(flags), None if options is None else options.encode()):
        _give_up(f"mount of {target.name}")


def _give_up(what: str) -> None:
    print(f"{what}: {os.strerror(ctypes.get_errno())}", flush=True)
    os._exit(CANNOT)
