"""Open unions for tyro, which knows none: a protocol in a field's type is replaced by the classes it holds now."""

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, get_args, get_origin

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from proximo.pieces import protocols, union_members


def closed_unions(raised: list[ValueError], has_help: bool) -> ConstructorRegistry:
    """A rule for `tyro.cli`: each dataclass as tyro sees it, its fields' unions closed. What a class refuses is added
    to `raised`, because tyro shows it in words of its own. Without help, tyro need not find the fields' docstrings in
    the source, which takes a third of its time."""
    registry, is_asking = ConstructorRegistry(), False
    without_help = {} if has_help else {"helptext": ""}

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
        fields = (replace(field, type=_closed(field.type, field.default), **without_help) for field in spec.fields)
        return replace(spec, fields=tuple(fields), instantiate=_noting(spec.instantiate, raised))

    return registry


def _noting(make: Callable[..., Any], raised: list[ValueError]) -> Callable[..., Any]:
    def noted(*values: Any, **fields: Any) -> Any:
        try:
            return make(*values, **fields)
        except ValueError as error:
            raised.append(error)
            raise

    return noted


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
