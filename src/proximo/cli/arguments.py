"""The arguments of a command: flags that it takes itself, and how it says what is wrong with them."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from proximo.api import messages
from proximo.cli.words import answer_to
from proximo.config.vocabulary import foreign, kind_of
from proximo.system.folders import write_file
from proximo.system.opening import without_links

Number = TypeVar("Number", int, float)


# Flags that a command takes itself


def asks_for_help(arguments: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def flag_names(arguments: Sequence[str]) -> list[str]:
    """The names of the flags that are given, such as --model."""
    return [each.partition("=")[0] for each in arguments if each.startswith("--")]


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


def read_number(flag: str, given: str, kind: Callable[[str], Number]) -> Number:
    """The value of a flag as an int or a float."""
    try:
        return kind(given)
    except ValueError:
        refuse(f"{flag} {given}: give a {'whole ' * (kind is int)}number")


def take_number(arguments: list[str], flag: str, kind: Callable[[str], Number]) -> Number | None:
    """`take`, of a number."""
    return None if (given := take(arguments, flag)) is None else read_number(flag, given, kind)


def take_several(arguments: list[str], flag: str) -> list[str] | None:
    """The values of a flag up to the next flag, removed from the arguments; None where it is not given."""
    for position, argument in enumerate(arguments):
        if argument == flag or argument.startswith(f"{flag}="):
            first = [argument.removeprefix(f"{flag}=")] if argument != flag else []
            rest = arguments[position + 1 :]
            count = next((number for number, each in enumerate(rest) if each.startswith("-")), len(rest))
            if not first and not count:
                refuse(f"{flag} needs a value")
            del arguments[position : position + 1 + count]
            return first + rest[:count]
    return None


def take_all(arguments: list[str], flag: str) -> list[str]:
    """The values of a flag that may be given several times, removed from the arguments."""
    values = list[str]()
    while (more := take_several(arguments, flag)) is not None:
        values += more
    return values


def take_list(arguments: list[str], flag: str, belongs: Callable[[str], bool] = lambda _: True) -> list[str] | None:
    """The values of a flag, removed from the arguments: one with commas, or several up to the next flag or to what does
    not belong to them; None where it is not given."""
    given = take(arguments_of := list(arguments), flag)
    if given is None:
        return None
    is_number = given[:1] == "-" and given[1:2].isdigit()  # and no flag
    if "," in given or is_number or f"{flag}={given}" in arguments:
        arguments[:] = arguments_of
        return [each.strip() for each in given.split(",")]
    values = take_several(arguments, flag) or []
    count = next((number for number, each in enumerate(values) if number and not belongs(each)), len(values))
    arguments[:0] = values[count:]  # what was given behind them, and is no value
    return values[:count]


def take_switch(arguments: list[str], flag: str) -> bool:
    """True if a switch of our own is given; it is removed from the arguments."""
    given = flag in arguments
    while flag in arguments:
        arguments.remove(flag)
    return given


def take_model(arguments: list[str], command: str) -> str:
    """The model that comes first, removed from the arguments; empty where only help is asked for."""
    if (not arguments or arguments[0].startswith("-")) and asks_for_help(arguments):
        return ""
    if not arguments or arguments[0].startswith("-"):
        refuse(f"{command} needs a model, a folder or hub id: {command} MODEL")
    return arguments.pop(0)


def take_models(arguments: list[str], command: str) -> list[str]:
    """All models that come first, removed from the arguments; none where only help is asked for."""
    models = [take_model(arguments, command)]
    while arguments and not arguments[0].startswith("-"):
        models.append(arguments.pop(0))
    return [model for model in models if model] if asks_for_help(arguments) else models


# What is said, and refused


def say(message: str) -> None:
    """A line for a person, on stderr, with options as flags."""
    messages.say(as_flags(message))


def as_flags(message: str) -> str:
    """A message with its options as flags. Messages name an option as Python does, in backticks.

    Example: as_flags("give `tokens=N` or `allow_change=['steps']`") == "give --tokens N or --allow-change steps"
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match[1].replace("_", "-"), match[2].strip("[]'")
        return f"--{name}" if value == "True" else f"--{name} {value}"

    return re.sub(r"`([a-z][a-z0-9_.]*)=([^`]*)`", flag, message)


def refuse(message: str) -> NoReturn:
    """Bad input: one clear error, nothing started."""
    say(f"error: {message}")
    raise SystemExit(2)


@contextmanager
def refusing(*more: type[Exception], about: str = "") -> Iterator[None]:
    """Refuse what is wrong with the input: a ValueError within, or one of `more`; `about` says first what it is."""
    try:
        yield
    except BrokenPipeError:  # whoever reads has gone
        raise
    except (ValueError, *more) as error:
        refuse(f"{about}{about and ': '}{error}")


def write_out(out: str | Path, text: str) -> None:
    """Write the file that --out names."""
    try:
        write_file(without_links(out), text.encode())
    except OSError as error:
        refuse(f"--out {out}: {error.strerror}; give another name")


def no_such_flag(typed: str, known: Sequence[str], prog: str) -> str:
    if (answer := answer_to(kind_of(prog.rpartition(" ")[2]) or "", typed, known)) is not None:
        return f"{typed}: {answer}"
    if typed in known:  # the first was taken
        return f"{typed} is given twice: give it once"
    plain = [each for each in known if not each.endswith((".type", ".add"))]
    is_foreign = foreign(typed) is not None  # what is spelled alike means something else
    close = "" if is_foreign else _nearest_flag(typed.replace("_", "-"), plain)
    return f"{typed}: there is no such flag{close}; {prog} --help lists all"


def in_lines(complaints: Sequence[str]) -> str:
    """Complaints in the place of one, each in a line of its own."""
    return "\n       ".join(dict.fromkeys(complaints))


def _nearest_flag(name: str, known: Sequence[str]) -> str:
    """The whole flag of a field whose table was left out, such as --learning-rate or --lr."""
    short = name.removeprefix("--")
    ends = [(flag, flag.removeprefix("--").rpartition(".")[2]) for flag in known]
    by_end = [flag for flag, end in ends if end == short] or [flag for flag, end in ends if _initials(end) == short]
    return f", the nearest is {by_end[0]!r}" if by_end else nearest(name, known)


def _initials(words: str) -> str:
    """Example: _initials("learning-rate") == "lr"."""
    return "".join(word[0] for word in words.split("-") if word)


def nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f", the nearest is {close[0]!r}" if close else ""
