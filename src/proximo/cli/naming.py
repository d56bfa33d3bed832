"""Names of a run on a command line, known before torch is imported, and the first line of a command that says so."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from proximo.cli.arguments import asks_for_help, flag_names
from proximo.config.toml import MAX_BYTES
from proximo.system.opening import read_file, without_links

DEMO = (
    "the demo: sums of two numbers with tiny-arithmetic, 0.8 M parameters, by reinforcement learning in minutes on a "
    "CPU; for your own, give --model MODEL --data DATA"
)
NAMES = {"model": ("--model",), "data": ("--data", "--task", "--task.type")}
"""Flags, and a file's keys as such, that name what is trained, and on what."""
OF_DEMO = ("train", "init", "selfcheck", "iterate")
"""Commands that take the demo where nothing names a model or data; compare does if it is told which algorithms."""
SHOWN = ("--model", "--data", "--task.type", "--algorithm", "--reward-model", "--run")
"""Flags of train that its first line repeats."""


def first_line(command: str, arguments: Sequence[str]) -> str | None:
    """Line on what a command is about to do, as far as its arguments say; None where that is nothing worth a line."""
    of_demo = command in OF_DEMO or (command == "compare" and {"--algorithms", "--ablate"} & set(flag_names(arguments)))
    if asks_for_help(arguments) or not of_demo:
        return None
    first = [each for each in arguments[:1] if not each.startswith("-")]
    if not first and not named(arguments):
        return DEMO
    if command != "train":
        return None
    shown = [f"{flag.lstrip('-')} {value}" for flag in SHOWN if (value := _value(arguments, flag))]
    return f"train {', '.join([*first, *shown])}; loading torch"


def named(arguments: Sequence[str]) -> set[str]:
    """The model and data that the arguments name, by flags, a preset or a file; keys of NAMES."""
    first = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if first and not first.endswith(".toml"):
        return set(NAMES)
    known = {*flag_names(arguments), *(f"--{key}" for key in file_tables(first))}
    return {what for what, names in NAMES.items() if not known.isdisjoint(names)}


def file_tables(path: str) -> list[str]:
    """The keys at the top of a TOML file; none of one that cannot be read, which is refused where it is loaded."""
    try:
        return list(tomllib.loads(read_file(without_links(Path(path)), MAX_BYTES).decode("utf-8-sig")))
    except (OSError, ValueError, RecursionError):
        return []


def _value(arguments: Sequence[str], flag: str) -> str:
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == flag:
            return following
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return ""
