"""Open unions for tyro, which knows none: a protocol in a field's type is replaced by the classes it holds now."""

from collections.abc import Callable, Container, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, get_args, get_origin

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from proximo.config.unions import protocols, union_members


def closed_unions(raised: list[ValueError], named: Container[str] | None) -> ConstructorRegistry:
    """A rule for `tyro.cli`: each dataclass as tyro sees it, its fields' unions closed. What a class refuses is added
    to `raised`, because tyro shows it in words of its own. `named` are the fields that flags may change: others keep
    what they hold, and tyro is spared its work on them, which is most of it. None: all of them, with the docstrings
    that help shows."""
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
