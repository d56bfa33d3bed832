"""Completion scripts for bash, zsh and fish, made from the commands' own help: what it lists is completed."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO

SHELLS = ("bash", "zsh", "fish")
FLAG = re.compile(r"(?<![\w.-])(--[a-z][\w.-]*\w)(?: (\{[^}]*\}|[^\s,|│-][^\s,]*))?")
"""A flag, and the choices, default or placeholder that stands one space behind it."""
SWITCHES = ("True", "False")
"""Defaults of flags that need no value."""


@dataclass(frozen=True)
class Words:
    """What may follow a command."""

    names: tuple[str, ...]
    """Presets and the like."""
    flags: Mapping[str, tuple[str, ...] | None]
    """The values of each flag; empty: any, such as a file's name; None: the flag is a switch."""


def script(shell: str, commands: Sequence[str]) -> str:
    """The completion script of a shell."""
    os.environ["COLUMNS"] = "1000"  # no help text is wrapped
    known = {command: words_of(command, help_of(command)) for command in commands}
    if shell == "fish":
        return "\n".join(["complete -c proximo -f", *_fish(known)]) + "\n"
    return (ZSH if shell == "zsh" else "") + "\n".join(_bash(known)) + "\n"


def help_of(command: str) -> str:
    """What a command prints as its help."""
    from proximo.cli import main

    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue()


def words_of(command: str, text: str) -> Words:
    """The flags that a help text lists, and the names of what it takes."""
    from proximo.algorithms import explain
    from proximo.recipes.presets import COMPARISONS, PRESETS

    algorithms = tuple(card.name for card in explain.CARDS)
    listed = re.sub(r"\n\s+\{", " {", text.partition("\nexamples:")[0])
    flags: dict[str, tuple[str, ...] | None] = {}
    for name, value in FLAG.findall(listed.replace(".N.", ".0.")):
        if flags.get(name) is None or value.startswith("{"):
            choices = tuple(value[1 : value.index("}")].split(",")) if value.startswith("{") else ()
            flags[name] = None if not value or value in SWITCHES else choices
    flags |= dict.fromkeys({"--algorithm", "--as"} & flags.keys(), algorithms)
    presets = [each.name for each in PRESETS] if "PRESET" in text else []
    whole = [each.name for each in COMPARISONS if f"[{each.name} |" in text]
    return Words((*whole, *presets, *(algorithms if command == "explain" else ())), flags)


ZSH = """#compdef proximo
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def _bash(known: Mapping[str, Words]) -> Iterator[str]:
    """One function that looks at the command and at the word before; where nothing matches, files are offered."""
    yield "_proximo() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield '  case "$COMP_CWORD ${COMP_WORDS[1]} $before" in'
    yield f"    '1 '*) words='{' '.join([*known, *TOP])}' ;;"
    for command, words in known.items():
        for values, flags in _by_values(words).items():
            patterns = "|".join(f"*' {command} {flag}'" for flag in flags)
            yield f"    {patterns}) words='{' '.join(values)}' ;;"
        yield f"    *' {command} '*) words='{' '.join([*words.names, *words.flags])}' ;;"
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield "complete -o default -F _proximo proximo"


def _by_values(words: Words) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for flag, values in words.flags.items():
        if values is not None:
            found.setdefault(values, []).append(flag)
    return found


def _fish(known: Mapping[str, Words]) -> Iterator[str]:
    yield f"complete -c proximo -n __fish_use_subcommand -a '{' '.join([*known, *TOP])}'"
    for command, words in known.items():
        after = f"complete -c proximo -n '__fish_seen_subcommand_from {command}'"
        if words.names:
            yield f"{after} -a '{' '.join(words.names)}'"
        for flag, values in words.flags.items():
            value = "" if values is None else f" -x -a '{' '.join(values)}'" if values else " -r -F"
            yield f"{after} -l {flag.removeprefix('--')}{value}"


TOP = ("--help", "--version", "--print-completion")
