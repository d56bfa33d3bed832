"""Checks before anything starts: values that no field of a config may hold, and run folders."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path

from proximo.config.unions import given_fields
from proximo.system.locks import FolderLock
from proximo.system.opening import UnsafeFile
from proximo.system.secrets import masked


def refuse_used(path: Path) -> None:
    """Raise ValueError for a folder that holds something, where no run is to be resumed."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"run is {str(path)!r}, which is not empty, and resume is False: choose another folder")


def unwritable(path: Path, error: OSError) -> ValueError:
    if isinstance(error, UnsafeFile):
        return error
    return ValueError(f"`run={path}`: nothing can be written there, {error.strerror or error}; give another folder")


def check_free(path: Path) -> None:
    """ValueError if another process has a run folder, or it cannot be written: before processes are started for it."""
    existed = path.exists()
    try:
        FolderLock(path).release(remove_empty=not existed)
    except OSError as error:
        raise unwritable(path, error) from error


def refuse_values(config: object) -> None:
    """Raise ValueError for numbers that are none and for secrets, which a run folder would keep; a line for each."""
    if complaints := list(_complaints(config, "")):
        raise ValueError("\n".join(complaints))


def refuse_kind(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError for an argument of another kind, in one line that says what to give."""
    if not isinstance(value, kinds):
        shown = repr(value)
        raise TypeError(f"{name} is {shown if len(shown) <= 60 else f'a {type(value).__name__}'}: give {wanted}")


def _complaints(value: object, path: str) -> Iterator[str]:
    """Values that no field may hold, whatever its own rules: a number that is none, a secret to be written down."""
    if is_dataclass(value) and not isinstance(value, type):
        for field, _ in given_fields(type(value)):
            yield from _complaints(vars(value)[field.name], f"{path}.{field.name}".removeprefix("."))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _complaints(item, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _complaints(item, f"{path}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}: give a finite number"
    elif isinstance(value, int) and abs(value) >= 2**63:
        yield f"{path} is {value}: give a number of 64 bits"
    elif isinstance(value, str) and masked(value) != value:
        yield f"{path} is {masked(value)!r}, with a secret that the run folder would keep: leave it to the environment"
    elif isinstance(value, str) and "\0" in value:
        yield f"{path} has a NUL character: remove it"
