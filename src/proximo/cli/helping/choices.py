"""The flags that choose a class for a field, with the fields of every class that may be chosen: for the help."""

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from proximo.config.plugins import FORM
from proximo.config.unions import classes, given_fields, protocols, union_members

WIDTH = 118
KEPT = "\0"
"""A space at which no line ends."""


def type_lines(value: object) -> list[str]:
    """Lines for the help of a value: a flag for each choice, and below it the fields of the classes not chosen now."""
    found = list(_of_value(value, "--"))
    return ["choices, with the fields of each class and their defaults:", *found] if found else []


def alternatives(value: object, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """For each field of a value that chooses a class, its path and the other choices."""
    if not is_dataclass(value) or isinstance(value, type):
        return
    for field, kind in given_fields(type(value)):
        held = vars(value)[field.name]
        others = [each.__name__ for each in classes(kind) if each is not type(held)]
        if is_dataclass(held) and (others or protocols(kind)):
            yield f"{path}{field.name}", [*others, *[FORM] * bool(protocols(kind))]
        yield from alternatives(held, f"{path}{field.name}.")


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


def _of_value(value: object, path: str) -> Iterator[str]:
    """Of the fields that a value has now, and of what they hold."""
    if not is_dataclass(value) or isinstance(value, type):
        return
    for field, kind in given_fields(type(value)):
        held, here = vars(value)[field.name], _flag(path, field)
        now = type(held).__name__ if is_dataclass(held) else "none" if held is None else "several"
        yield from _choice(here, kind, f"  (now:{KEPT}{now})", 2, type(held))
        yield from _of_value(held, f"{here}.")


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
    margin, own = " " * indent, f" or {FORM}" * bool(protocols(kind))
    names = [each.__name__ for each in classes(kind)]
    kinds, path = [each for each in classes(kind) if each is not chosen], f"{here}."
    options = names + ["None"] * (bool(names) and NoneType in union_members(kind))
    if len(options) > 1 or own:
        yield from _wrapped(f"{here}.type {{{','.join(options)}}}{own}{after}", indent)
    if names and holds_several(kind):
        yield from _wrapped(f"{here}.add {{{','.join(names)}}}{own}  (adds one more)", indent)
    held = element(kind)
    if held is not None:
        inner = required_choice(held)
        added = [held] if inner is None else classes(inner[1])
        fields = ", ".join(f"{_flag(f'{here}.N.', field)}{KEPT}{_default(field)}" for field, _ in given_fields(held))
        yield from _wrapped(f"{here}.add {{{','.join(each.__name__ for each in added)}}}  (adds one more)", indent)
        yield from _wrapped(f"{held.__name__}, number N from 0: {fields}", indent + 4)
        kinds, path = ([], "") if inner is None else (added, f"{here}.N.{inner[0].name}.")
    if len(options) > 1 or own or held is not None:
        for each in kinds:
            yield from _of_class(each, path, len(margin) + 4)


def _is_plain_table(kind: Any) -> bool:
    """Whether a field always holds a value of one class."""
    return len(union_members(kind)) == 1 and len(classes(kind)) == 1


def _flag(path: str, field: Field[Any]) -> str:
    return f"{path}{field.name.replace('_', '-')}"


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
