"""Values changed by flags, which tyro reads. The only file that knows tyro.

tyro knows no open union: a protocol in a field's type is replaced by the classes that the field holds now. Of what is
wrong with a flag it draws a box, which becomes a line.
"""

import io
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from operator import or_
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from proximo.api.validate import refuse_values
from proximo.cli.arguments import asks_for_help, in_lines, no_such_flag, refusing
from proximo.cli.help_pages import flags_in
from proximo.cli.pieces import flags_of, type_lines, with_pieces
from proximo.cli.words import word_lines
from proximo.config.unions import choices, classes, is_choice, kinds_of, protocols, union_members
from proximo.config.vocabulary import kind_of, words_of
from proximo.system.safe_text import visible

if TYPE_CHECKING:  # tyro takes a second to import, and a list of commands or a refusal does not need it
    from tyro.constructors import ConstructorRegistry

Value = TypeVar("Value")
REFUSED = 2
"""Exit status of tyro where flags are wrong."""
NUMBERS = (
    (re.compile(r"invalid literal for int\(\) with base 10: (.*)"), r"\1 is no whole number"),
    (re.compile(r"could not convert string to float: (.*)"), r"\1 is no number"),
)
"""Message of Python about text that is no number, and the one for a person."""


def changed(
    default: Value, flags: Sequence[str], *, prog: str, description: str, usage: str = "", help_more: str = ""
) -> Value:
    """A frozen value with some fields changed, like `--gate.high 0.2`; remarks on unusual choices go to stderr.

    `--gate.type SoftGate` puts another piece in a field's place, with its defaults; `--shape.type None` takes it away
    where a field may be empty; `--extra.add EntropyBonus` adds one to what is there; `--gate.type my_file.py:MyGate`
    takes a class of the user's own where the field's union is open. In the help, `usage` follows the command's name;
    `help_more` comes before the fields, and its examples last.
    """
    usual, examples, lines = help_more.partition("examples:\n")
    first = [description, "", *word_lines(prog.rpartition(" ")[2]), *usual.splitlines()]
    description = "\n".join(_in_sections(first))
    try:
        value, remarks = read_flags(default, flags, prog=prog, description=description, usage=usage)
    except SystemExit as stopped:
        if stopped.code == 0:  # help was asked for, and printed
            print("\n".join([*type_lines(with_pieces(default, list(flags))), *f"{examples}{lines}".splitlines()]))
        raise
    for message in remarks:
        print(f"unusual: {visible(message)}", file=sys.stderr)
    return value


def _in_sections(lines: Sequence[str]) -> Iterator[str]:
    """The lines with an empty one before each heading, without which it would be drawn into the line before."""
    for before, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith(" ") and before.startswith(" "):
            yield ""
        yield line


def read_flags(
    default: Value, flags: Sequence[str], *, prog: str, description: str = "", usage: str = ""
) -> tuple[Value, list[str]]:
    """The changed value, and remarks on unusual choices."""
    # Imported late, because it takes seconds, and a list of commands or a refusal does not need it.
    from proximo.algorithms import UnusualChoice

    flags = list(flags)
    default = with_pieces(default, flags)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusualChoice)
        with refusing():
            value = parsed(default, flags, prog, usage, description)
            refuse_values(value)
    return value, list(dict.fromkeys(str(warning.message) for warning in caught))


# What tyro reads


def parsed(default: Value, flags: Sequence[str], prog: str, usage: str, description: str) -> Value:
    """The value with the fields changed that the flags name; ValueError says in one line what is wrong. Help is printed
    and ends in SystemExit(0)."""
    import tyro

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
        raise ValueError(in_lines([*_unknown(default, unknown, prog, flags_in(description))]))
    return value


def _named(flags: Sequence[str]) -> set[str]:
    """All words of the flags' names, among them the fields that they change."""
    names = [flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in flags if flag.startswith("-")]
    words = {word for name in names for word in name.split(".")}
    return words | {word.removeprefix("no_") for word in words}


def _with_switches(default: object, flags: Sequence[str]) -> list[str]:
    """`--a.b True` and `--a.b False` as the switches `--a.b` and `--a.no-b`, which is what tyro reads; of a switch that
    may be undecided the other way round."""
    kinds = flags_of(default)
    switches = {name for name, kind in kinds.items() if kind is bool}
    undecided = {name for name, kind in kinds.items() if {bool, NoneType} == {*union_members(kind)}}
    given, switched = [part for flag in flags for part in _halves(flag, switches)], []
    for number, flag in enumerate(given):
        name, following = flag.replace("_", "-"), given[number + 1 : number + 2]
        if name in undecided and not (following and following[0].lower() in ("true", "false", "none")):
            switched += [flag, "True"]
            continue
        if (positive := _positive(name)) in undecided:
            switched += [positive, "False"]
            continue
        before = switched[-1].replace("_", "-") if switched else ""
        if before in switches and flag.lower() in ("true", "false"):
            table, dot, field = before.rpartition(".")
            no = f"{table}{dot}no-{field}" if dot else f"--no-{before.removeprefix('--')}"
            switched[-1] = before if flag.lower() == "true" else no
        else:
            switched.append(flag)
    return switched


def _positive(flag: str) -> str:
    """Example: _positive("--task.no-chat") == "--task.chat"."""
    table, _, field = flag.removeprefix("--").rpartition(".")
    return f"--{table}{'.' * bool(table)}{field.removeprefix('no-')}" if field.startswith("no-") else ""


def _halves(flag: str, switches: Container[str]) -> list[str]:
    """`--a.b=True` in two, of a switch only: another flag's value may be anything."""
    name, _, value = flag.partition("=")
    return [name, value] if value and name.replace("_", "-") in switches else [flag]


# What is wrong


def _line(box: str, whole: str, raised: Sequence[ValueError]) -> str:
    """Line for what tyro draws as a box; of an error of ours its own words, after the table that it is about."""
    # A title, a rule, what is wrong, and perhaps another rule and more; a title within a frame is its own rule.
    rows = [row.strip("│ ") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    rules = [number for number, row in enumerate(rows) if "───" in row or re.fullmatch("-{3,}", row)]
    start, end = (*rules, len(rows), len(rows))[:2] if rules else (-1, len(rows))
    text = " ".join(rows[start + 1 : end])
    match = re.match(r"Error parsing (\S+): (.*)", text)
    if match is None:
        return text
    where, why = match[1], str(raised[-1]) if raised else match[2]
    for pattern, words in NUMBERS:
        why = pattern.sub(words, why)
    is_told = where == whole or why.startswith(f"{where.rpartition('.')[2]}.")
    return why if is_told else f"{where}: {why}"


def _unknown(default: object, left: Sequence[str], prog: str, of_command: Sequence[str]) -> Iterator[str]:
    """Complaints about what tyro left over: about the first, and about each other flag. `of_command`: flags that the
    command takes itself."""
    for number, flag in enumerate(left):
        if not number or (len(flag) > 2 and flag.startswith("--")):
            yield _not_taken(default, flag, left[number + 1 : number + 2], prog, of_command)


def _not_taken(default: object, flag: str, following: Sequence[str], prog: str, of_command: Sequence[str]) -> str:
    """A flag that names a whole table needs a `.type` or a field; another one is misspelt."""
    if not flag.startswith("-"):
        return f"{flag}: {prog} takes no such argument; {prog} --help lists what it takes"
    typed = flag.partition("=")[0]
    name, known = typed.replace("_", "-"), flags_of(default)
    if name in known:
        kind, fields = known[name], [each for each in known if each.rpartition(".")[0] == name]
        has_types = is_choice(kind)
        given = flag.partition("=")[2] or next(iter(following), "NAME")
        piece = "NAME" if given.startswith("-") or given.lower() == "none" else given
        remedy = f"{name}.type {piece} chooses a piece" if has_types else ""
        if not has_types and not fields:  # a table that is not there, and can be of one class only
            remedy = f"{name}.type {choices(kind)[0]} adds it"
        others = f"{', '.join(fields)} set its fields" if fields else ""
        return f"{name} alone takes no value: {' and '.join(filter(None, (remedy, others)))}"
    table, _, field = name.rpartition(".")
    kinds = classes(known[table]) if table in known else []
    if owners := [each.__name__ for each in kinds if field in _names(each)]:
        return f"{name} belongs to {table}.type {' or '.join(owners)}: give that, too"
    words = [flag for word, _ in words_of(kind_of(prog.rpartition(" ")[2]) or "") for flag in word.flags]
    types = [f"{each}.type" for each in known if is_choice(known[each])]
    return no_such_flag(typed, [*known, *types, *words, *of_command], prog)


def _names(kind: type) -> list[str]:
    return [name.replace("_", "-") for name in kinds_of(kind)]


# Open unions


def closed_unions(raised: list[ValueError], named: Container[str] | None) -> "ConstructorRegistry":
    """A rule for `tyro.cli`: each dataclass as tyro sees it, its fields' unions closed. What a class refuses is added
    to `raised`, because tyro shows it in words of its own. `named` are the fields that flags may change: others keep
    what they hold, and tyro is spared its work on them, which is most of it. None: all of them, with the docstrings
    that help shows."""
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

    registry, is_asking = ConstructorRegistry(), False
    without_help = {} if named is None else {"helptext": ""}

    @registry.struct_rule
    def close(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_asking
        if is_asking or not is_dataclass(info.type):
            return None
        is_asking = True  # for what tyro itself makes of the class: then this rule passes
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        held = vars(info.default) if named is not None and isinstance(info.default, info.type) else {}
        kept = {
            each.name: held[each.name] for each in spec.fields if each.name in held and each.name not in (named or ())
        }
        shown = (
            replace(field, type=_closed(field.type, field.default), **without_help)
            for field in spec.fields
            if field.name not in kept
        )
        return replace(spec, fields=tuple(shown), instantiate=_noting(spec.instantiate, kept, raised))

    return registry


def _noting(make: Callable[..., Any], kept: dict[str, Any], raised: list[ValueError]) -> Callable[..., Any]:
    def noted(*values: Any, **given: Any) -> Any:
        try:
            return make(*values, **{name: _made_again(value) for name, value in kept.items()}, **given)
        except ValueError as error:
            raised.append(error)
            raise

    return noted


def _made_again(value: Any) -> Any:
    """An equal value, whose classes have remarked again on what is unusual in them."""
    if type(value) is tuple:
        return tuple(map(_made_again, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{each.name: _made_again(vars(value)[each.name]) for each in fields(value) if each.init})


def _closed(kind: Any, held: object) -> Any:
    """Example: `Clip | Gate` is `Clip | MyGate` where a MyGate is held, and `Clip` where a Clip is."""
    if not any(protocols(each) or _is_open_tuple(each) for each in union_members(kind)):
        return kind
    several = [type(each) for each in held] if isinstance(held, tuple) else []
    members = [
        tuple[_without_protocols(get_args(each)[0], several), ...] if _is_open_tuple(each) else each
        for each in union_members(kind)
    ]
    return _without_protocols(reduce(or_, members), [] if isinstance(held, tuple) else [type(held)])


def _is_open_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and bool(protocols(get_args(kind)[0]))


def _without_protocols(kind: Any, held: Sequence[type]) -> Any:
    if not protocols(kind):
        return kind
    kept = [each for each in union_members(kind) if not protocols(each)]
    return reduce(or_, [*kept, *(each for each in held if is_dataclass(each) and each not in kept)])
