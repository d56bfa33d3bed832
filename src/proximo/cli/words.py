"""Words on the command line: each stands for the flag of one field, and a name of another library is answered."""

import re
from collections.abc import Collection, Sequence

from proximo.config.vocabulary import (
    BY_NAME,
    Word,
    field_of,
    fields_by_word,
    foreign,
    kind_of,
    names_in_stages,
    words_of,
)

LORA, ENVIRONMENT, TOOLS = (BY_NAME[name] for name in ("lora", "environment", "tools"))


def spelled_out(command: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with each word's flag in the place of the word.

    Example: spelled_out("sft", ["--lr", "1e-5"]) == ["--fit.learning-rate", "1e-5"]
    """
    kind, written = kind_of(command), list[str]()
    if kind is None:
        return list(arguments)
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        name = _name(flag)
        field = field_of(kind, name.removeprefix("no_")) if flag.startswith("--") else None
        if not field:
            written.append(argument)
            continue
        following = value if equals else next(iter(arguments[number + 1 : number + 2]), "--")
        written += _flags(BY_NAME[name.removeprefix("no_")], field, name, following, equals)
    return written


def _flags(word: Word, field: str, name: str, following: str, equals: str) -> list[str]:
    if word is LORA and not equals and following.startswith("-"):
        return ["--adapter.type", "Lora"]
    if word is ENVIRONMENT and ":" not in following:
        return [f"--environment={following}" if equals else "--environment"]
    table, dot, last = field.rpartition(".")
    last = f"no-{last}" if name.startswith("no_") else last
    flag = f"--{table}{dot}{last}".replace("_", "-")
    begins = ["--environment.type", "MultiTurn"] * (word in (ENVIRONMENT, TOOLS))
    return [*begins, f"{flag}={following}" if equals else flag]


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def answer_to(kind: str, flag: str, known: Collection[str]) -> str | None:
    """Answer to a flag of another library; None where nothing is known, or it names a flag that is not among those
    that are there. `kind` is empty for a command that reads no config with words."""
    if (answer := foreign(flag, kind)) is None:
        return None
    ours = next((each for each in _flags_for(kind, answer.ours) if each in known), "")
    missing = [each for each in re.findall(r"--[a-z][\w.-]*\w", _of_this(answer.remark)) if each not in known]
    if missing or bool(answer.ours) != bool(ours):
        return None
    return answer.in_words(ours)


def _of_this(remark: str) -> str:
    """A remark on this command's flags: without the other commands that it quotes."""
    return re.sub("`[^`]*`", "", remark)


def _flags_for(kind: str, ours: str) -> list[str]:
    """Flags that a word or a field may have in a kind of config: stages call the table of training `fit`."""
    if ours in BY_NAME:
        return [BY_NAME[ours].flag] * (not kind or field_of(kind, ours) is not None)
    flags = [f"--{each}".replace("_", "-") for each in (ours, f"{ours}.path") if ours]
    fit = names_in_stages(ours)[-1]
    return flags if fit == ours or fit in fields_by_word(kind).values() else [*flags, f"--{fit}".replace("_", "-")]


def word_lines(command: str) -> list[str]:
    """Lines of a help page: the words of a command, with the fields that they stand for."""
    kind = kind_of(command)
    if kind is None:
        return []
    lines = ["settings by one word (each stands for the field behind it):"]
    for word, field in words_of(kind):
        flags = ", ".join(f"{flag} {word.takes}".rstrip() for flag in word.flags)
        meaning = word.of_stages if word.of_stages and kind != "train" else word.meaning
        lines.append(f"  {flags:<34} {meaning}{f' ({field})' if field else ''}")
    return [*lines, ""]
