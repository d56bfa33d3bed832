"""Values changed by flags, and refusals. The only place that knows tyro."""

import difflib
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import tyro

from proximo.algorithms import UnusualChoice

Value = TypeVar("Value")


def changed(default: Value, flags: Sequence[str], *, prog: str, description: str) -> Value:
    """A frozen value with some fields changed, like `--gate.high 0.2`; remarks on unusual choices go to stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusualChoice)
        try:
            value = tyro.cli(
                type(default),
                default=default,
                args=list(flags),
                prog=prog,
                description=description,
                config=(tyro.conf.AvoidSubcommands,),
            )
        except ValueError as error:
            refuse(str(error))
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"unusual: {message}", file=sys.stderr)
    return value


def take(arguments: list[str], flag: str) -> str | None:
    """The value of a flag of our own, removed from the arguments; None where it is not given."""
    for position, argument in enumerate(arguments):
        if argument == flag:
            if position + 1 == len(arguments):
                refuse(f"{flag} needs a value")
            value = arguments[position + 1]
            del arguments[position : position + 2]
            return value
        if argument.startswith(f"{flag}="):
            del arguments[position]
            return argument.removeprefix(f"{flag}=")
    return None


def take_switch(arguments: list[str], flag: str) -> bool:
    """Whether a switch of our own is given; removed from the arguments."""
    given = flag in arguments
    while flag in arguments:
        arguments.remove(flag)
    return given


def take_model(arguments: list[str], command: str) -> str:
    """The model that comes first, removed from the arguments; empty where only help is asked for."""
    if arguments[:1] in (["-h"], ["--help"]):
        return ""
    if not arguments or arguments[0].startswith("-"):
        refuse(f"{command} needs a model, a folder or hub id: {command} MODEL")
    return arguments.pop(0)


def nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f", the nearest is {close[0]!r}" if close else ""


def refuse(message: str) -> NoReturn:
    """Bad input: one clear error, nothing started."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
