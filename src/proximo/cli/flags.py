"""Values changed by flags, and refusals."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass, replace
from types import NoneType
from typing import Any, NoReturn, TypeVar

from proximo.api import messages
from proximo.api.validate import refuse_values
from proximo.cli.helping.choices import element, holds_several, is_required, required_choice, type_lines
from proximo.cli.parsing import asks_for_help, flags_of, nearest, parsed
from proximo.config.plugins import is_outside
from proximo.config.unions import choices, classes, foreign_class, given_fields, made, protocols, union_members
from proximo.system.safe_text import visible

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


def changed(
    default: Value, flags: Sequence[str], *, prog: str, description: str, usage: str = "", help_more: str = ""
) -> Value:
    """A frozen value with some fields changed, like `--gate.high 0.2`; remarks on unusual choices go to stderr.

    `--gate.type SoftGate` puts another piece in a field's place, with its defaults; `--shape.type None` takes it away
    where a field may be empty; `--extra.add EntropyBonus` adds one to what is there; `--gate.type my_file.py:MyGate`
    takes a class of the user's own where the field's union is open. In the help, `usage` follows the command's name,
    and `help_more` comes last.
    """
    try:
        value, remarks = read_flags(default, flags, prog=prog, description=description, usage=usage)
    except SystemExit as stopped:
        if stopped.code == 0:  # help was asked for, and printed
            print("\n".join([*type_lines(with_pieces(default, list(flags))), *help_more.splitlines()]))
        raise
    for message in remarks:
        print(f"unusual: {visible(message)}", file=sys.stderr)
    return value


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
        try:
            value = parsed(default, flags, prog, usage, description)
            refuse_values(value)
        except ValueError as error:
            refuse(str(error))
    return value, list(dict.fromkeys(str(warning.message) for warning in caught))


def with_pieces(value: Value, flags: list[str]) -> Value:
    """The value with the pieces that `--field.type NAME` and `--field.add NAME` ask for, looked up among those the
    field may hold. `--field None` means `--field.type None`. An empty field that can hold one kind of piece gets it
    from a flag for one of the piece's fields, such as --ranks.shard."""
    with said_later():
        value = _filled(value, flags)
        for flag in [flag.partition("=")[0] for flag in flags if flag.startswith("--")]:
            prefix, _, verb = flag.rpartition(".")
            if verb not in ("type", "add"):
                if not _empties(type(value), flag, flags):
                    continue
                prefix, verb = flag, "type"
            name = take(flags, flag)
            assert name is not None
            path = prefix.removeprefix("--").replace("-", "_")
            try:
                value = _with_piece(value, path.split("."), name, prefix, verb, flags)
            except ValueError as error:
                refuse(str(error))
        return _inferred(value, flags)


def _inferred(value: Value, flags: list[str]) -> Value:
    """The value with the pieces that a flag can only mean, such as PythonFunction of --task.reward.path: the one class
    of the field that has the flag, and cannot be made without."""
    for flag in [flag.partition("=")[0] for flag in flags if flag.startswith("--")]:
        prefix, _, field = flag.replace("_", "-").rpartition(".")
        known = dict(flags_of(value, "--")) if prefix else {}
        if prefix not in known or flag.replace("_", "-") in known:
            continue
        name = field.replace("-", "_")
        owners = [
            each.__name__
            for each in classes(known[prefix][2])
            if name in {own.name for own, _ in given_fields(each) if is_required(own)}
        ]
        if len(owners) == 1:
            path = prefix.removeprefix("--").replace("-", "_").split(".")
            try:
                value = _with_piece(value, path, owners[0], prefix, "type", flags)
            except ValueError as error:
                refuse(str(error))
    return value


@contextmanager
def said_later() -> Iterator[None]:
    """For values that are not whole yet: `changed` remarks on unusual choices once, when all flags are read."""
    from proximo.algorithms import UnusualChoice

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualChoice)
        yield


def _filled(value: Value, flags: Sequence[str]) -> Value:
    kinds = dict(_kinds(type(value))) if is_dataclass(type(value)) else {}
    for flag in [flag.partition("=")[0] for flag in flags if flag.startswith("--")]:
        field, _, inner = flag.removeprefix("--").replace("-", "_").partition(".")
        known = classes(kinds[field]) if field in kinds and vars(value)[field] is None else []
        if len(known) != 1 or inner in ("", "type", "add"):
            continue
        fields = {each.name: each for each, _ in given_fields(known[0])}
        if inner.partition(".")[0] in fields and not any(is_required(each) for each in fields.values()):
            with suppress(ValueError):  # a piece that this value has no use for: its flags are refused by name, later
                value = replace(value, **{field: known[0]()})  # pyright: ignore[reportArgumentType]
    return value


def _empties(kind: Any, flag: str, flags: Sequence[str]) -> bool:
    """Whether the flag says None to a field that holds a piece or nothing. Other fields' None is tyro's to read."""
    given = [later for flag_, later in zip(flags, [*flags[1:], ""], strict=False) if flag_ == flag]
    given += [each.removeprefix(f"{flag}=") for each in flags if each.startswith(f"{flag}=")]
    if not given or given[0].lower() != "none":
        return False
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        kinds = [dict(_kinds(each)).get(name) for each in classes(kind)]
        kind = next((each for each in kinds if each is not None), None)
    return bool(classes(kind)) and NoneType in union_members(kind)


def _kinds(kind: type) -> Iterator[tuple[str, Any]]:
    for field, its_kind in given_fields(kind):
        yield field.name, its_kind


def _with_piece(value: Value, path: list[str], name: str, prefix: str, verb: str, flags: list[str]) -> Value:
    field, *rest = path
    asked = f"{prefix}.{verb} {name}"
    if value is None:
        refuse(f"{asked}: nothing is set there that it could change; this run does not ask for it")
    kinds = dict(_kinds(type(value))) if is_dataclass(value) else {}
    if field not in kinds:
        refuse(f"{asked}: {type(value).__name__} has no field {field}{nearest(field, list(kinds))}")
    if rest:
        inner = _with_piece(vars(value)[field], rest, name, prefix, verb, flags)
    elif verb == "add" and (held := element(kinds[field])) is not None:
        inner = (*vars(value)[field], _one_more(held, len(vars(value)[field]), name, asked, prefix, flags))
    elif verb == "add":
        inner = _added(vars(value)[field], kinds[field], asked, _piece(kinds[field], name, asked, prefix, flags))
    elif name.lower() == "none" and NoneType in union_members(kinds[field]) and classes(kinds[field]):
        inner = None
    else:
        inner = _piece(kinds[field], name, asked, prefix, flags)
    return replace(value, **{field: inner})  # pyright: ignore[reportArgumentType]


def _piece(kind: Any, name: str, asked: str, prefix: str, flags: list[str]) -> object:
    known = {each.__name__: each for each in classes(kind)}
    if is_outside(name) and protocols(kind):
        try:
            known[name] = foreign_class(name, kind)
        except ValueError as error:
            refuse(f"{asked}: {error}")
    if not known and holds_several(kind):
        table = prefix.removeprefix("--").replace("-", "_")
        refuse(f"{asked}: no flag changes what this field holds; write it in a .toml file, as [[{table}]]")
    if not known:
        refuse(f"{asked}: this field holds a value and no piece; give it with {prefix} VALUE")
    if name not in known:
        can_be_empty = NoneType in union_members(kind) and not asked.startswith(f"{prefix}.add ")
        refuse(f"{asked}: give one of {', '.join(choices(kind, *['None'] * can_be_empty))}")
    return made(known[name], kind, _required(known[name], asked, prefix, flags))


def _added(current: object, kind: Any, asked: str, piece: object) -> object:
    """Behind what is there; alone where nothing is."""
    if not holds_several(kind):
        refuse(f"{asked}: this field holds one piece; put another in its place with .type")
    if current is None:
        return piece
    return (*current, piece) if isinstance(current, tuple) else (current, piece)


def _one_more(kind: type, number: int, name: str, asked: str, prefix: str, flags: list[str]) -> object:
    """A further entry of a list, such as a weighted rule: named by the class that it has to hold, or by its own."""
    here, inner = f"{prefix}.{number}", required_choice(kind)
    if inner is None:
        return _piece(kind, name, asked, here, flags)
    field, its_kind = inner
    return kind(**{field.name: _piece(its_kind, name, asked, f"{here}.{field.name}", flags)})


def _required(kind: type, asked: str, prefix: str, flags: list[str]) -> dict[str, Any]:
    """What a piece cannot be made without, taken from the flags."""
    values = {}
    for field, field_kind in given_fields(kind):
        if is_required(field):
            flag = f"{prefix}.{field.name.replace('_', '-')}"
            given = take(flags, flag) or take(flags, f"{prefix}.{field.name}")
            if given is None and field_kind is str and asks_for_help(flags):
                given = field.name.upper()  # stands for what has to be given
            if given is None or field_kind not in (str, int, float):
                refuse(f"{asked} needs {flag} too, or a .toml file that says it")
            try:
                values[field.name] = field_kind(given)
            except ValueError:
                refuse(f"{flag} {given}: give {'a whole number' if field_kind is int else 'a number'}")
    return values


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


def take_switch(arguments: list[str], flag: str) -> bool:
    """Whether a switch of our own is given; removed from the arguments."""
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


def as_flags(message: str) -> str:
    """A message with its options as flags. Messages name an option as Python does, in backticks.

    Example: as_flags("give `tokens=N` or `allow_change=['steps']`") == "give --tokens N or --allow-change steps"
    """

    def flag(found: re.Match[str]) -> str:
        name, value = found[1].replace("_", "-"), found[2].strip("[]'")
        return f"--{name}" if value == "True" else f"--{name} {value}"

    return re.sub(r"`([a-z][a-z0-9_.]*)=([^`]*)`", flag, message)


def say(message: str) -> None:
    """A line for a person, on stderr, with options as flags."""
    messages.say(as_flags(message))


def refuse(message: str) -> NoReturn:
    """Bad input: one clear error, nothing started."""
    say(f"error: {message}")
    raise SystemExit(2)
