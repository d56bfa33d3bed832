"""Which classes a field of a frozen value may hold: its own union says so, and no registry."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any


def union_members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def classes(kind: Any) -> list[type]:
    """The dataclasses among the options."""
    return [option for option in union_members(kind) if isinstance(option, type) and dataclasses.is_dataclass(option)]


def given_fields(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Every field that can be given, with its resolved type."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.init:
            assert field.name != "type", f"{kind.__name__}.type would hide which class a table is"
            yield field, hints[field.name]
