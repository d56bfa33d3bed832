"""Errors of a user's own classes: a task, environment, sampler or piece that raises is named in one line."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

from proximo.system.safe_text import visible

PACKAGE = str(Path(__file__).parents[1]) + os.sep
MAX_MESSAGE = 500
"""Maximum characters of an exception's message."""


class OutsideFailed(ValueError):
    """Raised from the exception of a class of a user's own."""


@contextmanager
def name_user_code(config: Any) -> Iterator[None]:
    """Name the user's class that raises, if `config` names it: raise an OutsideFailed with the class, the exception and
    the line in the user's file. Errors that come from Proximo's own code, even if a user's class called it, are left
    as they are."""
    try:
        yield
    except Exception as error:
        message = None if type(error).__module__.startswith("proximo.") else _named(config, error)
        if message is None:
            raise
        raise OutsideFailed(message) from error


def _named(config: Any, error: Exception) -> str | None:
    """The message; None if the code that raised was called by none of the config's outside classes."""
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__)]
    while any(_file(frame).startswith(PACKAGE) for frame, _ in frames):
        frames.pop(0)  # what is left was called by the last of Proximo's own functions
    parts = [(field, part, _source(type(part))) for field, part in outside_parts(config)]
    files = {source for *_, source in parts}
    user_frames = [(frame, line) for frame, line in frames if _file(frame) in files]
    if not user_frames:
        return None
    frame, line = user_frames[-1]
    callers = {type(caller.f_locals.get("self")) for caller, _ in user_frames}
    named = next((f"{field} {type(part).__name__}" for field, part, _ in parts if type(part) in callers), None)
    name = Path(_file(frame)).name
    where = f"{name}, line {line}, in {frame.f_code.co_qualname}"
    text = " ".join(str(error).split())
    raised = f"{type(error).__name__}: {visible(text, MAX_MESSAGE)}" if text else type(error).__name__
    return f"{named or name} raised {raised} ({where}); correct it, then run the same command again"


def outside_parts(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """The objects of a config whose classes are not Proximo's, with their fields, such as `algorithm.gate`."""
    if isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from outside_parts(item, f"{field}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not type(value).__module__.startswith("proximo."):
            yield field, value
        for its in dataclasses.fields(value):
            yield from outside_parts(getattr(value, its.name, None), f"{field}.{its.name}".lstrip("."))


def _source(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
