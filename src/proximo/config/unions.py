"""Classes that a field of a frozen value may hold: its own union says so, and no registry.

A union is open where one of its members is a Protocol: then a frozen dataclass from a user's file, which has the
protocol's members, is accepted too (proximo/config/plugins.py loads it).
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from proximo.config import plugins

Value = TypeVar("Value")
RESERVED = "type"
"""The key of a table that says which class it is, so no field is called so."""
NUMBERS: Mapping[type, tuple[type, ...]] = {int: (Integral,), float: (Real,), types.NoneType: (types.NoneType,)}
"""Types that are accepted where a field holds a number, or none."""
WORDS = {int: "a whole number", float: "a number", types.NoneType: "None"}
SPECIAL = ("__call__",)
"""Special methods that a protocol asks for."""


def union_members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def classes(kind: Any) -> list[type]:
    """The dataclasses among the options."""
    return [option for option in union_members(kind) if isinstance(option, type) and dataclasses.is_dataclass(option)]


def protocols(kind: Any) -> list[type]:
    """The protocols among the options; any makes the union open."""
    bases = [(option, option.__bases__) for option in union_members(kind) if isinstance(option, type)]
    return [option for option, its_bases in bases if typing.Protocol in its_bases]


def choices(kind: Any, *more: str) -> list[str]:
    """Values that `type` may have: the names of the dataclasses, `more`, and where the union is open the form in which
    a class of a user's own is named."""
    return [*(option.__name__ for option in classes(kind)), *more, *[f"or {plugins.FORM}"] * bool(protocols(kind))]


def is_choice(kind: Any) -> bool:
    """Tell whether a table has to say which class it is."""
    return len(choices(kind)) > 1


def given_fields(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Every field that can be given, with its resolved type."""
    yield from _given_fields(kind)


@cache
def _given_fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints, fields = typing.get_type_hints(kind), [field for field in dataclasses.fields(kind) if field.init]
    assert all(field.name != RESERVED for field in fields), f"{kind.__name__}.type would hide which class a table is"
    return tuple((field, hints[field.name]) for field in fields)


def walk(value: object, path: str = "") -> Iterator[tuple[str, Any, object]]:
    """Every field that a value has now, and those of the values in them: the dotted name, the type, what it holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field, kind in given_fields(type(value)):
            yield f"{path}{field.name}", kind, (held := vars(value)[field.name])
            yield from walk(held, f"{path}{field.name}.")


def with_fields(value: Value, changes: Mapping[str, Any], where: str = "") -> Value:
    """The value with other ones in fields named by dotted paths, all of a table at once: each alone need not suit what
    stands there. A table that is not there, and can be of one class only, is added. `where` is the way to the value.

    Example: with_fields(RunConfig(), {"training.groups": 2, "training.minibatches": 1}).training.groups == 2
    """
    tables: dict[str, dict[str, Any]] = {}
    kinds = kinds_of(type(value))
    for path, item in changes.items():
        field, _, rest = path.partition(".")
        if field not in kinds:
            raise ValueError(
                f"{where}{path} is {item!r}: there is no such field, {type(value).__name__} has {', '.join(kinds)}"
            )
        tables.setdefault(field, {})[rest] = item
    fields = {}
    for field, inside in tables.items():
        held, known = inside.pop("", vars(value)[field]), classes(kinds[field])
        held = known[0]() if held is None and inside and len(known) == 1 else held
        if inside and not dataclasses.is_dataclass(held):
            first = f"{where}{field}.{next(iter(inside))}"
            raise ValueError(f"{first}: {where}{field} is {held!r} and has no fields, choose one that has")
        fields[field] = with_fields(held, inside, f"{where}{field}.") if inside else held
    return dataclasses.replace(value, **fields)  # pyright: ignore[reportArgumentType]


def kinds_of(kind: type) -> dict[str, Any]:
    """The resolved types of the fields that can be given, by name."""
    return {field.name: its_kind for field, its_kind in given_fields(kind)}


def check_kinds(value: object, path: str = "") -> None:
    """Refuse a number that is text, and a table that is a dict or a class of another library's: ValueError says what
    the field holds."""
    for name, kinds, wanted in _closed_fields(type(value)):
        held = vars(value)[name]
        if not isinstance(held, kinds):
            shown = repr(held) if isinstance(held, str) else f"a {type(held).__name__}"
            raise ValueError(f"{path}{name} is {shown}: give {wanted}")


@cache
def _closed_fields(kind: type) -> list[tuple[str, tuple[type, ...], str]]:
    """The fields that hold numbers or one of a few classes, with what they may hold and its name for a person."""
    closed = []
    for field, its_kind in given_fields(kind):
        members = union_members(its_kind)
        tables = all(member is types.NoneType or member in classes(its_kind) for member in members)
        if (tables and members != (types.NoneType,)) or all(member in NUMBERS for member in members):
            kinds = tuple(accepted for member in members for accepted in NUMBERS.get(member, (member,)))
            names = [WORDS.get(member) or f"a {member.__name__}(...)" for member in members]
            closed.append((field.name, kinds, " or ".join(names)))
    return closed


# Classes of a user's own


def foreign_class(name: str, kind: Any, load: Callable[[str], type] = plugins.load_class) -> type:
    """The class that a name like "file.py:Name" points at, fit for this field; ValueError says what is missing."""
    loaded = load(name)
    check_foreign(loaded, kind)
    return loaded


def made(its_class: type, kind: Any, arguments: Mapping[str, Any]) -> Any:
    """A value of a field's class; whatever a class of a user's own raises is a ValueError of one line."""
    try:
        return its_class(**arguments)
    except ValueError:
        raise
    except Exception as error:
        if its_class in classes(kind):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{its_class.__name__} cannot be made, {type(error).__name__}: {reason}") from error


def foreign_name(its_class: type, kind: Any) -> str:
    """Name of a user's own class in a config; ValueError where this field, or a config, cannot hold it."""
    name = plugins.place_of(its_class)
    if name is None or its_class.__module__ == "__main__":  # loading a script again would run all of it again
        raise ValueError(
            f"no other process can load the class {its_class.__name__}: write it at the top level of a file of its "
            "own, and import it from there"
        )
    check_foreign(its_class, kind)
    return name


def check_foreign(foreign: type, kind: Any) -> None:
    """Refuse a class that this field could not hold, or that TOML could not hold."""
    parameters = getattr(foreign, "__dataclass_params__", None)
    if not dataclasses.is_dataclass(foreign) or parameters is None or not parameters.frozen:
        raise ValueError(f"{foreign.__name__} is no frozen dataclass: write @dataclass(frozen=True) above it")
    try:
        hints = typing.get_type_hints(foreign)
    except Exception as error:  # an annotation may be any expression
        raise ValueError(f"{foreign.__name__} has annotations that cannot be read, {error}: correct them") from None
    for field in dataclasses.fields(foreign):
        if field.init and field.name == RESERVED:
            raise ValueError(f"{foreign.__name__} has a field called type, which says the class here: rename it")
        if field.init and not _is_writable(hints[field.name]):
            raise ValueError(
                f"{foreign.__name__}.{field.name} is {_spelled(hints[field.name])}, which no config can hold: make it "
                "a bool, int, float, str, tuple, dict, a frozen dataclass or a union of these"
            )
    lacking = [(protocol, missing_members(foreign, protocol)) for protocol in protocols(kind)]
    protocol, missing = min(lacking, key=lambda pair: len(pair[1]))
    if missing:
        raise ValueError(
            f"{foreign.__name__} lacks {', '.join(missing)}, which a {protocol.__name__} has: add what is missing"
        )


def missing_members(kind: type, protocol: type) -> list[str]:
    """Members that a protocol has and the class has not; a method of the protocol must be one of the class, too."""
    names = {field.name for field in dataclasses.fields(kind)}
    missing = []
    for name, member in _members(protocol).items():
        # Not getattr, which finds a class's own `__call__` for every class.
        held = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
        declared = bool(held) and held[0] is member and _is_stub(member)  # by the protocol, of which it is a subclass
        is_method = isinstance(member, types.FunctionType)
        wrong = is_method and bool(held) and not callable(held[0]) and not hasattr(held[0], "__func__")
        if (name not in names and not held) or declared or wrong:
            missing.append(f"{name}()" if is_method else name)
    return missing


def _members(protocol: type) -> dict[str, Any]:
    """Attributes, properties and methods of a protocol by name."""
    members: dict[str, Any] = {}
    for base in reversed(protocol.__mro__):
        if typing.Protocol in base.__bases__:
            declared = dict.fromkeys(vars(base).get("__annotations__", {})) | dict(vars(base))
            members |= {name: item for name, item in declared.items() if name[0] != "_" or name in SPECIAL}
    return members


def _is_stub(member: object) -> bool:
    """Tell whether a protocol only declares this member: its body is a docstring and an ellipsis."""
    function = member.fget if isinstance(member, property) else member
    code = function.__code__ if isinstance(function, types.FunctionType) else None
    return code is not None and not code.co_names and set(code.co_consts) <= {None, function.__doc__}


def _is_writable(kind: Any) -> bool:
    """Tell whether TOML holds values of this type and gives them back equal."""
    for option in union_members(kind):
        origin, inner = typing.get_origin(option), typing.get_args(option)
        if origin is tuple and inner:
            good = all(item is Ellipsis or _is_writable(item) for item in inner)
        elif origin in (dict, Mapping) or option in (dict, Mapping):
            good = not inner or (inner[0] is str and _is_writable(inner[1]))
        else:
            simple = option in (bool, int, float, str, types.NoneType, Any) or origin is Literal
            good = simple or bool(classes(option)) or bool(protocols(option))
        if not good:
            return False
    return True


def _spelled(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
