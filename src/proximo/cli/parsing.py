"""Flags read by tyro, and what is wrong with them in one line. With closed_unions.py the only place that knows tyro."""

import difflib
import io
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, TypeVar

from proximo.config.unions import choices, classes, given_fields, is_choice, union_members

Value = TypeVar("Value")

REFUSED = 2
"""Exit status of tyro where flags are wrong."""
NUMBERS = (
    (re.compile(r"invalid literal for int\(\) with base 10: (.*)"), r"\1 is no whole number"),
    (re.compile(r"could not convert string to float: (.*)"), r"\1 is no number"),
)
"""What Python says of text that is no number, and what a person is told."""


def asks_for_help(arguments: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def parsed(default: Value, flags: Sequence[str], prog: str, usage: str, description: str) -> Value:
    """The value with the fields changed that the flags name; ValueError says in one line what is wrong. Help is printed
    and ends in SystemExit(0)."""
    # Imported late, because it takes a second, and a list of commands or a refusal does not need it.
    import tyro

    from proximo.cli.closed_unions import closed_unions

    raised: list[ValueError] = []
    shown = io.StringIO()
    try:
        with redirect_stderr(shown):
            value, unknown = tyro.cli(
                type(default),
                default=default,
                args=_with_switches(default, flags),
                prog=f"{prog} {usage}".strip(),
                description=description,
                config=(tyro.conf.AvoidSubcommands,),
                registry=closed_unions(raised, None if asks_for_help(flags) else _named(flags)),
                return_unknown_args=True,
            )
    except SystemExit as stopped:
        if stopped.code != REFUSED:  # help, or a signal in the middle
            raise
        raise ValueError(_line(shown.getvalue(), type(default).__name__, raised)) from None
    if unknown:
        raise ValueError(_unknown(default, unknown[0], unknown[1:2], prog))
    return value


def _named(flags: Sequence[str]) -> set[str]:
    """All words of the flags' names, among them the fields that they change."""
    names = [flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in flags if flag.startswith("-")]
    words = {word for name in names for word in name.split(".")}
    return words | {word.removeprefix("no_") for word in words}


def _with_switches(default: object, flags: Sequence[str]) -> list[str]:
    """`--a.b True` and `--a.b False` as the switches `--a.b` and `--a.no-b`, which is what tyro reads; of a switch that
    may be undecided the other way round."""
    kinds = {name: kind for name, (_, _, kind) in flags_of(default, "--")}
    switches = {name for name, kind in kinds.items() if kind is bool}
    undecided = {name for name, kind in kinds.items() if {bool, NoneType} == {*union_members(kind)}}
    given, found = [part for flag in flags for part in _halves(flag, switches)], []
    for number, flag in enumerate(given):
        name, following = flag.replace("_", "-"), given[number + 1 : number + 2]
        if name in undecided and not (following and following[0].lower() in ("true", "false", "none")):
            found += [flag, "True"]
            continue
        if (positive := _positive(name)) in undecided:
            found += [positive, "False"]
            continue
        before = found[-1].replace("_", "-") if found else ""
        if before in switches and flag.lower() in ("true", "false"):
            table, dot, field = before.rpartition(".")
            no = f"{table}{dot}no-{field}" if dot else f"--no-{before.removeprefix('--')}"
            found[-1] = before if flag.lower() == "true" else no
        else:
            found.append(flag)
    return found


def _positive(flag: str) -> str:
    """Example: _positive("--task.no-chat") == "--task.chat"."""
    table, _, field = flag.removeprefix("--").rpartition(".")
    return f"--{table}{'.' * bool(table)}{field.removeprefix('no-')}" if field.startswith("no-") else ""


def _halves(flag: str, switches: Container[str]) -> list[str]:
    """`--a.b=True` in two, of a switch only: another flag's value may be anything."""
    name, _, value = flag.partition("=")
    return [name, value] if value and name.replace("_", "-") in switches else [flag]


def _line(box: str, whole: str, raised: Sequence[ValueError]) -> str:
    """What tyro draws as a box, in a line; of an error of ours its own words, after the table that it is about."""
    # A title, a rule, what is wrong, and perhaps another rule and more; a title within a frame is its own rule.
    rows = [row.strip("│ ") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    rules = [number for number, row in enumerate(rows) if "───" in row or re.fullmatch("-{3,}", row)]
    start, end = (*rules, len(rows), len(rows))[:2] if rules else (-1, len(rows))
    said = " ".join(rows[start + 1 : end])
    found = re.match(r"Error parsing (\S+): (.*)", said)
    if found is None:
        return said
    where, why = found[1], str(raised[-1]) if raised else found[2]
    for pattern, words in NUMBERS:
        why = pattern.sub(words, why)
    is_told = where == whole or why.startswith(f"{where.rpartition('.')[2]}.")
    return why if is_told else f"{where}: {why}"


def _unknown(default: object, flag: str, following: Sequence[str], prog: str) -> str:
    """A flag that names a whole table needs a `.type` or a field; another one is misspelt."""
    if not flag.startswith("-"):
        return f"{flag}: {prog} takes no such argument; {prog} --help lists what it takes"
    name = flag.partition("=")[0].replace("_", "-")
    known = dict(flags_of(default, "--"))
    if name in known:
        fields, has_types, kind = known[name]
        given = flag.partition("=")[2] or next(iter(following), "NAME")
        piece = "NAME" if given.startswith("-") or given.lower() == "none" else given
        remedy = f"{name}.type {piece} chooses a piece" if has_types else ""
        if not has_types and not fields:  # a table that is not there, and can be of one class only
            remedy = f"{name}.type {choices(kind)[0]} adds it"
        others = f"{', '.join(fields)} set its fields" if fields else ""
        return f"{name} alone takes no value: {' and '.join(filter(None, (remedy, others)))}"
    table, _, field = name.rpartition(".")
    kinds = classes(known[table][2]) if table in known else []
    if owners := [each.__name__ for each in kinds if field in _names(each)]:
        return f"{name} belongs to {table}.type {' or '.join(owners)}: give that, too"
    return no_such_flag(name, list(known), prog)


def no_such_flag(name: str, known: Sequence[str], prog: str) -> str:
    return f"{name}: there is no such flag{_nearest_flag(name, known)}; {prog} --help lists all"


def _names(kind: type) -> list[str]:
    return [field.name.replace("_", "-") for field, _ in given_fields(kind)]


def _nearest_flag(name: str, known: Sequence[str]) -> str:
    """Of a field whose table was left out, such as --learning-rate or --lr, the whole flag."""
    short = name.removeprefix("--")
    ends = [(flag, flag.removeprefix("--").rpartition(".")[2]) for flag in known]
    by_end = [flag for flag, end in ends if end == short] or [flag for flag, end in ends if _initials(end) == short]
    return f", the nearest is {by_end[0]!r}" if by_end else nearest(name, known)


def _initials(words: str) -> str:
    """Example: _initials("learning-rate") == "lr"."""
    return "".join(word[0] for word in words.split("-") if word)


def flags_of(value: object, path: str) -> Iterator[tuple[str, tuple[list[str], bool, Any]]]:
    """All flags of a value: with the flags of its fields, where it is a table, whether it has a choice of types, and
    its type."""
    if not is_dataclass(value) or isinstance(value, type):
        return
    for field, kind in given_fields(type(value)):
        here, held = f"{path}{field.name.replace('_', '-')}", vars(value)[field.name]
        inner = dict(flags_of(held, f"{here}."))
        yield here, ([each for each in inner if each.count(".") == here.count(".") + 1], is_choice(kind), kind)
        yield from inner.items()


def nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f", the nearest is {close[0]!r}" if close else ""
