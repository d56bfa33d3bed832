"""Help as text: pages of the commands that are asked most, kept in the user's cache, and what is read off a page: flags
that certainly do not exist, and completion scripts for bash, zsh and fish.

Rendering a page imports torch to list every field; reading it does not. Pages are made when one is first needed, all
at once, and hold for this source code only. The cache may be anything: what another user could have written, or is no
regular file, is not read, and where nothing can be written pages are made each time.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from io import StringIO
from pathlib import Path

from proximo.cli.arguments import in_lines, no_such_flag, say
from proximo.system.caches import cache_folder, is_own
from proximo.system.folders import write_file
from proximo.system.opening import make_folder, names, open_file, remove
from proximo.system.version import __version__, source_fingerprint

WIDTH = 80
"""Columns that the pages are rendered for."""
PAGED = ("train", "eval", "sft", "reward-model", "dpo")
"""Commands with a page."""
MAX_BYTES = 10_000_000
MAX_VERSIONS = 8
"""Versions whose pages are kept."""
SHELLS = ("bash", "zsh", "fish")
FLAG = re.compile(r"(?<![\w.-])(--[a-z][\w.-]*\w)(?: (\{[^}]*\}|[^\s,|│-][^\s,]*))?")
"""A flag, and the choices, default or placeholder that stands one space behind it."""
KIND = r"\{[^}]*\}|INT|FLOAT|STR"
TAKES = re.compile(rf"(?<![\w.-])(--[\w.-]+) ((?:{KIND})(?:\|(?:{KIND}))*)(?=,|\s*$|  )", re.MULTILINE)
"""A flag and what it takes, as tyro draws it."""
SWITCHES = ("True", "False")
"""Defaults of flags that need no value."""


@dataclass(frozen=True)
class Words:
    """Words that may follow a command."""

    names: tuple[str, ...]
    """Presets and the like."""
    flags: Mapping[str, tuple[str, ...] | None]
    """The values of each flag; empty: any, such as a file's name; None: the flag is a switch."""


# Pages


def page_of(command: str, arguments: Sequence[str]) -> str | None:
    """The page, where nothing but help is asked for; None where there is none, or another width is needed."""
    if command not in PAGED or list(arguments) not in (["-h"], ["--help"]):
        return None
    if "COLUMNS" in os.environ or shutil.get_terminal_size((WIDTH, 24)).columns < WIDTH:
        return None
    return page(command)


def page(command: str) -> str | None:
    """The page of a command; None where it has none."""
    if command not in PAGED:
        return None
    file = _file()
    pages = {} if file is None else _kept(file)
    if command not in pages:
        if sys.stderr.isatty():
            say("the help of this version is made once, which takes a few seconds")
        pages = _rendered()
        if file is not None:
            _keep(file, pages)
    return pages[command]


def _file() -> Path | None:
    """The file of this version's pages; None where there is no folder for it."""
    if (folder := cache_folder("help")) is None:
        return None
    tyro = PathFinder.find_spec("tyro")
    drawn_by = None if tyro is None or tyro.origin is None else Path(tyro.origin).stat().st_mtime_ns
    key = f"{__version__} {source_fingerprint()} {sys.version} {drawn_by}"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _kept(file: Path) -> dict[str, str]:
    """The pages that a file holds; none where it is damaged, or another user could have written it."""
    try:
        with open_file(file) as opened:
            if not (is_own(os.fstat(opened.fileno())) and is_own(file.parent.lstat())):
                return {}
            pages = json.loads(opened.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    is_whole = isinstance(pages, dict) and all(isinstance(pages.get(command), str) for command in PAGED)
    return pages if is_whole else {}


def _keep(file: Path, pages: Mapping[str, str]) -> None:
    """Write the pages, and remove those of old versions; nothing happens where that is not possible."""
    folder = file.parent
    with suppress(OSError, ValueError):
        make_folder(folder, mode=0o700)
        if not is_own(folder.lstat()):
            return
        write_file(file, json.dumps(pages).encode())
        others = [folder / name for name in names(folder) if name != file.name]
        for old in sorted(others, key=lambda path: path.lstat().st_mtime)[: -MAX_VERSIONS + 1]:
            remove(old)


def _rendered() -> dict[str, str]:
    """All pages, whatever the terminal's width and colours."""
    before = {name: os.environ.pop(name, None) for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")}
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        pages = {command: help_of(command) for command in PAGED}
        assert all(text.startswith(f"usage: proximo {command} ") for command, text in pages.items())
        return pages
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def help_of(command: str) -> str:
    """Text that a command prints as its help."""
    from proximo.cli import main

    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue()


# Flags


def unknown_flag(command: str, arguments: Sequence[str]) -> str | None:
    """Complaint about the flags that the command's page rules out, a line each; None where there is none, or no page,
    or another config than the page's is named. Fields of a class that can be chosen are left to who knows the class."""
    if _names_a_preset(command, arguments) or (text := page(command)) is None:
        return None
    known = flags_in(text)
    listed = [each for each in known if ".N." not in each]
    typed = [flag.partition("=")[0] for flag in arguments if len(flag) > 2 and flag.startswith("--")]
    unknown = [each for each in typed if not _may_be(each.replace("_", "-"), known)]
    return in_lines([no_such_flag(each, listed, f"proximo {command}") for each in unknown]) or None


def _may_be(name: str, known: Collection[str]) -> bool:
    """True if a flag is on the page, or may be of a class that it does not show."""
    if name.endswith((".type", ".add")):  # which class a field has there is better said by the config
        return True
    is_table = any(each.startswith(f"{name}.") for each in known)
    is_below = any(name.startswith(f"{table}.") for table in _chosen(known))
    return is_table or is_below or any(each in known for each in _spellings(name))


@cache
def flags_in(text: str) -> tuple[str, ...]:
    """The flags that a help text names, without those of its examples."""
    return tuple(name for name, _ in FLAG.findall(text.partition("\nexamples:")[0]))


@cache
def _taken(text: str) -> dict[str, str]:
    """The kinds of value that each flag takes."""
    return dict(TAKES.findall(text))


def _chosen(flags: Collection[str]) -> set[str]:
    """Fields of which a class can be chosen: what is below them depends on the class."""
    return {name.rpartition(".")[0] for name in flags if name.endswith((".type", ".add"))}


def wrong_value(command: str, arguments: Sequence[str]) -> str | None:
    """Complaint about the first value that the page's flag does not take; None where there is none, or no page."""
    if (text := page(command)) is None:
        return None
    takes, tables = _taken(text), _chosen(flags_in(text))
    for argument, following in zip(arguments, [*arguments, "--"][1:], strict=True):
        given_name, equals, value = argument.partition("=")
        name = given_name.replace("_", "-")
        kinds = takes.get(name)
        if kinds is None or any(name.startswith(f"{table}.") for table in tables):
            continue
        given = value if equals else following
        if not equals and given.startswith("--"):
            return f"{name} needs a value: give {_spoken(kinds)}"
        if not any(_fits(given, kind) for kind in re.findall(KIND, kinds)):
            return f"{name} {given}: give {_spoken(kinds)}"
    return None


def _fits(value: str, kind: str) -> bool:
    if kind.startswith("{"):
        return value in kind[1:-1].split(",")
    try:
        {"INT": int, "FLOAT": float, "STR": str}[kind](value)
    except ValueError:
        return False
    return True


def _spoken(kinds: str) -> str:
    """Example: _spoken("{None}|INT") == "None or a whole number"."""
    words = {"INT": ["a whole number"], "FLOAT": ["a number"], "STR": ["a text"]}
    return " or ".join(word for kind in re.findall(KIND, kinds) for word in words.get(kind) or kind[1:-1].split(","))


def _names_a_preset(command: str, arguments: Sequence[str]) -> bool:
    """True if train's first word is no file: a preset may be a chain of runs, which has other flags."""
    first = arguments[0] if arguments else "-"
    return command == "train" and not first.startswith("-") and not first.endswith(".toml")


def _spellings(name: str) -> Iterator[str]:
    """The flag, and of `--a.no-b` the switch that it turns off."""
    table, dot, field = name.removeprefix("--").rpartition(".")
    yield name
    if field.startswith("no-"):
        yield f"--{table}{dot}{field.removeprefix('no-')}"


# Completion


def script(shell: str, commands: Sequence[str]) -> str:
    """The completion script of a shell."""
    os.environ["COLUMNS"] = "1000"  # no help text is wrapped
    known = {command: words_of(command, help_of(command)) for command in commands}
    if shell == "fish":
        return "\n".join(["complete -c proximo -f", *_fish(known)]) + "\n"
    return (ZSH if shell == "zsh" else "") + "\n".join(_bash(known)) + "\n"


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
    by_values: dict[tuple[str, ...], list[str]] = {}
    for flag, values in words.flags.items():
        if values is not None:
            by_values.setdefault(values, []).append(flag)
    return by_values


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
