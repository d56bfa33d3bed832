"""Flags that choose a class for a field, such as --gate.type SoftGate: the value with what they put there, and their
part of the help, with the fields of every class that may be chosen."""

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, is_dataclass, replace
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from proximo.cli.arguments import asks_for_help, flag_names, nearest, refuse, refusing, take
from proximo.config.plugins import FORM, is_outside
from proximo.config.unions import (
    choices,
    classes,
    foreign_class,
    given_fields,
    kinds_of,
    made,
    protocols,
    union_members,
    walk,
)

Value = TypeVar("Value")
WIDTH = 118
KEPT = "\0"
"""A space at which no line ends."""


# Flags and fields


def flags_of(value: object) -> dict[str, Any]:
    """All flags of a value, and of those that are tables: with the type of what each holds."""
    return {f"--{name.replace('_', '-')}": kind for name, kind, _ in walk(value)}


def _flag(path: str, field: Field[Any]) -> str:
    return f"{path}{field.name.replace('_', '-')}"


def _path(flag: str) -> list[str]:
    """Example: _path("--fit.learning-rate") == ["fit", "learning_rate"]."""
    return flag.removeprefix("--").replace("-", "_").split(".")


def element(kind: Any) -> type | None:
    """The one class that a tuple holds, such as WeightedRule in tuple[WeightedRule, ...]; None of other types."""
    if get_origin(kind) is not tuple:
        return None
    inner = classes(get_args(kind)[0])
    return inner[0] if len(inner) == 1 and not protocols(get_args(kind)[0]) else None


def required_choice(kind: type) -> tuple[Field[Any], Any] | None:
    """A class's field without a default that holds one of several classes, such as a rule's reward."""
    needed = [(field, its) for field, its in given_fields(kind) if is_required(field) and classes(its)]
    return needed[0] if needed else None


def is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def holds_several(kind: Any) -> bool:
    return any(get_origin(option) is tuple for option in union_members(kind))


# Pieces put in their places


def with_pieces(value: Value, flags: list[str]) -> Value:
    """The value with the pieces that `--field.type NAME` and `--field.add NAME` ask for, looked up among those the
    field may hold. `--field None` means `--field.type None`. An empty field that can hold one kind of piece gets it
    from a flag for one of the piece's fields, such as --ranks.shard."""
    with said_later():
        value = _filled(value, flags)
        for flag in flag_names(flags):
            prefix, _, verb = flag.rpartition(".")
            if verb not in ("type", "add"):
                if not _empties(type(value), flag, flags):
                    continue
                prefix, verb = flag, "type"
            name = take(flags, flag)
            assert name is not None
            with refusing():
                value = _with_piece(value, _path(prefix), name, prefix, verb, flags)
        return _inferred(value, flags)


def _inferred(value: Value, flags: list[str]) -> Value:
    """The value with the pieces that a flag can only mean, such as PythonFunction of --task.reward.path: the one class
    of the field that has the flag, and cannot be made without."""
    for flag in flag_names(flags):
        prefix, _, field = flag.replace("_", "-").rpartition(".")
        known = flags_of(value) if prefix else {}
        if prefix not in known or flag.replace("_", "-") in known:
            continue
        name = field.replace("-", "_")
        owners = [
            each.__name__
            for each in classes(known[prefix])
            if name in {its.name for its, _ in given_fields(each) if is_required(its)}
        ]
        if len(owners) == 1:
            with refusing():
                value = _with_piece(value, _path(prefix), owners[0], prefix, "type", flags)
    return value


@contextmanager
def said_later() -> Iterator[None]:
    """Hold back remarks on values that are not whole yet: `changed` makes them once, when all flags are read."""
    from proximo.algorithms import UnusualChoice

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualChoice)
        yield


def _filled(value: Value, flags: Sequence[str]) -> Value:
    for flag in flag_names(flags):
        with suppress(ValueError):  # a piece that this value has no use for: its flags are refused by name, later
            value = _filled_at(value, _path(flag))
    return value


def _filled_at(value: Value, path: Sequence[str]) -> Value:
    field, *rest = path
    kinds = kinds_of(type(value)) if is_dataclass(type(value)) else {}
    if not rest or field not in kinds:
        return value
    held, known = vars(value)[field], classes(kinds[field])
    if held is None and len(known) == 1:
        fields = {each.name: each for each, _ in given_fields(known[0])}
        inner = known[0]() if rest[0] in fields and not any(map(is_required, fields.values())) else None
    else:
        inner = _filled_at(held, rest)
    return value if inner is held else replace(value, **{field: inner})  # pyright: ignore[reportArgumentType]


def _empties(kind: Any, flag: str, flags: Sequence[str]) -> bool:
    """True if the flag says None to a field that holds a piece or nothing. Other fields' None is tyro's to read."""
    given = [later for flag_, later in zip(flags, [*flags[1:], ""], strict=False) if flag_ == flag]
    given += [each.removeprefix(f"{flag}=") for each in flags if each.startswith(f"{flag}=")]
    if not given or given[0].lower() != "none":
        return False
    for name in _path(flag):
        kinds = [kinds_of(each).get(name) for each in classes(kind)]
        kind = next((each for each in kinds if each is not None), None)
    return bool(classes(kind)) and NoneType in union_members(kind)


def _with_piece(value: Value, path: list[str], name: str, prefix: str, verb: str, flags: list[str]) -> Value:
    field, *rest = path
    asked = f"{prefix}.{verb} {name}"
    if value is None:
        refuse(f"{asked}: nothing is set there that it could change; this run does not ask for it")
    kinds = kinds_of(type(value)) if is_dataclass(value) else {}
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
        with refusing(about=asked):
            known[name] = foreign_class(name, kind)
    if not known and holds_several(kind):
        table = ".".join(_path(prefix))
        refuse(f"{asked}: no flag changes what this field holds; write it in a .toml file, as [[{table}]]")
    if not known:
        refuse(f"{asked}: this field holds a value and no piece; give it with {prefix} VALUE")
    if name not in known:
        can_be_empty = NoneType in union_members(kind) and not asked.startswith(f"{prefix}.add ")
        refuse(f"{asked}: give one of {', '.join(choices(kind, *['None'] * can_be_empty))}")
    return made(known[name], kind, _required(known[name], asked, prefix, flags))


def _added(current: object, kind: Any, asked: str, piece: object) -> object:
    """A field's value with a piece added behind what is there; alone where nothing is."""
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
    """Values that a piece cannot be made without, taken from the flags."""
    values = {}
    for field, field_kind in given_fields(kind):
        if is_required(field):
            flag = _flag(f"{prefix}.", field)
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


# Help


def type_lines(value: object) -> list[str]:
    """Lines for the help of a value: a flag for each choice, and below it the fields of the classes not chosen now."""
    lines = []
    for name, kind, held in walk(value):
        now = type(held).__name__ if is_dataclass(held) else "none" if held is None else "several"
        lines += _choice(f"--{name.replace('_', '-')}", kind, f"  (now:{KEPT}{now})", 2, type(held))
    return ["choices, with the fields of each class and their defaults:", *lines] if lines else []


def alternatives(value: object) -> Iterator[tuple[str, list[str]]]:
    """Path and other choices of each field of a value that chooses a class."""
    for name, kind, held in walk(value):
        others = [each.__name__ for each in classes(kind) if each is not type(held)]
        if is_dataclass(held) and (others or protocols(kind)):
            yield name, [*others, *[FORM] * bool(protocols(kind))]


def _of_class(kind: type, path: str, indent: int) -> Iterator[str]:
    """A line with the fields of a class, and below it the choices among them."""
    plain = [
        f"{_flag(path, field)}{KEPT}{_default(field)}"
        for field, its in given_fields(kind)
        if not (classes(its) or protocols(its))
    ]
    if plain:
        yield from _wrapped(f"{kind.__name__}: {', '.join(plain)}", indent)
    for field, its in given_fields(kind):
        here = _flag(path, field)
        if _is_plain_table(its):
            yield from _of_class(classes(its)[0], f"{here}.", indent)
        else:
            yield from _choice(here, its, f"  (of{KEPT}{kind.__name__})", indent)


def _choice(here: str, kind: Any, after: str, indent: int, chosen: type = NoneType) -> Iterator[str]:
    """The `.type` and `.add` flags of a field, if it has any, and the fields of its classes except the chosen one."""
    margin, custom = " " * indent, f" or {FORM}" * bool(protocols(kind))
    names = [each.__name__ for each in classes(kind)]
    kinds, path = [each for each in classes(kind) if each is not chosen], f"{here}."
    options = names + ["None"] * (bool(names) and NoneType in union_members(kind))
    if len(options) > 1 or custom:
        yield from _wrapped(f"{here}.type {{{','.join(options)}}}{custom}{after}", indent)
    if names and holds_several(kind):
        yield from _wrapped(f"{here}.add {{{','.join(names)}}}{custom}  (adds one more)", indent)
    held = element(kind)
    if held is not None:
        inner = required_choice(held)
        added = [held] if inner is None else classes(inner[1])
        fields = ", ".join(f"{_flag(f'{here}.N.', field)}{KEPT}{_default(field)}" for field, _ in given_fields(held))
        yield from _wrapped(f"{here}.add {{{','.join(each.__name__ for each in added)}}}  (adds one more)", indent)
        yield from _wrapped(f"{held.__name__}, number N from 0: {fields}", indent + 4)
        kinds, path = ([], "") if inner is None else (added, f"{here}.N.{inner[0].name}.")
    if len(options) > 1 or custom or held is not None:
        for each in kinds:
            yield from _of_class(each, path, len(margin) + 4)


def _is_plain_table(kind: Any) -> bool:
    """True if a field always holds a value of one class."""
    return len(union_members(kind)) == 1 and len(classes(kind)) == 1


def _default(field: Field[Any]) -> str:
    """The default in the words of a flag; what has to be given is in capitals."""
    if is_required(field):
        return field.name.upper()
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(value, tuple | list | dict):
        return KEPT.join(map(str, value)) or "..."
    return type(value).__name__ if is_dataclass(value) else str(value)


def _wrapped(text: str, indent: int) -> list[str]:
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(KEPT, " ") for line in lines]
