"""A bound on what a chat template puts together in one rendering.

A template that doubles a text thirty times, or replaces each of its characters by a long text, takes all memory in one
instruction, which no time limit stops. So the characters of everything that a template makes are counted, and those of
what grows by a product before it is made. transformers compiles templates; its compiled form is used, with
operations that count.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.utils import Namespace

CHARACTERS = 1 << 30
"""Characters of everything that a template makes in one rendering; real ones make some for each that they write."""
_SHALLOW = {
    *(
        "length",
        "count",
        "first",
        "last",
        "list",
        "map",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "attr",
        "items",
    ),
    *("default", "d", "sort", "unique", "reverse", "batch", "slice", "groupby", "random", "min", "max", "dictsort"),
}
"""Filters that write nothing of what is inside."""
_PRODUCTS = {
    *("wordwrap", "urlize", "pprint", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format"),
    *("format_map", "to_bytes", "truncate", "xmlattr"),
}
"""Filters and methods that may write each argument for each character of the first."""

_left: ContextVar[list[int] | None] = ContextVar("_left", default=None)
_binding = threading.Lock()


@contextmanager
def counted_characters() -> Iterator[None]:
    """Bound what bounded templates make until the end; MemoryError where that is more."""
    token = _left.set([CHARACTERS])
    try:
        yield
    finally:
        _left.reset(token)


def bind(template: str) -> None:
    """Give the compiled form of a template, which transformers keeps, operations that count."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(template)
    environment: Any = compiled.environment
    with _binding:
        if environment.code_generator_class is _Counting:
            return
        environment.intercepted_binops = frozenset("+*%")
        environment.binop_table |= {"+": _added, "*": _multiplied, "%": _filled}
        environment.filters = {name: _bounded(name, each) for name, each in environment.filters.items()}
        environment.concat, environment.finalize = _concatenated, _text
        environment.call = functools.partial(_called, environment.call)
        environment.extend(joined=_joined, counted=_counted)
        environment.code_generator_class = _Counting
        again = environment.from_string(template)
        compiled.root_render_func, compiled.blocks = again.root_render_func, again.blocks


class _Counting(CodeGenerator):
    """Jinja's own, for operations that cannot be exchanged otherwise."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        self._write_counted(super().visit_Getitem, node, frame, isinstance(node.arg, nodes.Slice))

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_counted(super().visit_List, node, frame, True)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_counted(super().visit_Dict, node, frame, True)

    def _write_counted(self, visit: Callable[..., None], node: nodes.Node, frame: Frame, counts: bool) -> None:
        self.write("environment.counted(" * counts)
        visit(node, frame)
        self.write(")" * counts)


# What is made


def _check(number: int) -> None:
    left = _left.get()
    if left is not None and number > left[0]:
        raise MemoryError(f"more than {CHARACTERS:,} characters at once")


def _spend(number: int) -> None:
    _check(number)
    if (left := _left.get()) is not None:
        left[0] -= number


def _counted(value: Any) -> Any:
    _spend(_length(value))
    return value


def _length(value: Any) -> int:
    """Length of a text, or what a container takes itself: a member is a pointer of eight bytes. 0 of all else."""
    if isinstance(value, str | bytes):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple | dict) else 0


def _size(value: Any, indent: int = 0) -> int:
    """Characters of the value's text, at least; MemoryError as soon as they are too many. `indent`: those before each
    member, for each level."""
    waiting, total = [(value, 0)], 0
    while waiting:
        each, depth = waiting.pop()
        each = each._Namespace__attrs if isinstance(each, Namespace) else each
        inside = [*each, *each.values()] if isinstance(each, Mapping) else each
        total += len(each) if isinstance(each, str | bytes) else 8
        total += indent * depth
        if isinstance(inside, list | tuple | set | frozenset):
            waiting += [(member, depth + 1) for member in inside]
        _check(total + len(waiting))
    return total


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _check(_size(value))
    return str(value)


def _concatenated(parts: Iterable[str]) -> str:
    def counted() -> Iterator[str]:
        for part in parts:
            _spend(len(part))
            yield part

    return "".join(counted())


def _joined(parts: Iterable[Any]) -> str:
    return _concatenated(map(_text, parts))


# Operators


def _added(left: Any, right: Any) -> Any:
    _spend(_length(left) + _length(right))
    return left + right


def _multiplied(left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int):
            _spend(_length(many) * max(times, 0))
    return left * right


def _filled(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        _check(_product("format", (left, right)))
    return _counted(left % right)


# Filters and methods


def _bounded(operation: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts."""
    context = hasattr(apply, "jinja_pass_arg")

    @functools.wraps(apply)
    def bounded(*given: Any, **options: Any) -> Any:
        if operation == "join" and not isinstance(given[context], str):  # an iterator is gone once it has been counted
            given = (*given[:context], list(given[context]), *given[context + 1 :])
        _check_before(operation, given[context:], options)
        return _counted(apply(*given, **options))

    return bounded


def _called(call: Callable[..., Any], context: Any, obj: Any, /, *given: Any, **options: Any) -> Any:
    method = getattr(obj, "__wrapped__", obj)  # what the sandbox has put around `format`
    owner = getattr(method, "__self__", None)
    if isinstance(owner, str | bytes | int):
        if method.__name__ == "join" and given and not isinstance(given[0], str | bytes):
            given = (list(given[0]), *given[1:])
            _check_before("join", (given[0], owner), options)
        else:
            _check_before(method.__name__, (owner, *given), options)
    return _counted(call(context, obj, *given, **options))


def _check_before(operation: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse what would be too long, before it is."""
    everything = (*given, *options.values())
    if operation in _SHALLOW or not given:
        return
    if operation == "join":
        between = sum(map(_size, everything[1:]))
        _check(_size(given[0]) + between * len(given[0]))
    elif operation == "replace" and len(everything) > 2:
        text, old, new = map(_text, everything[:3])
        _check(len(text) + text.count(old) * len(new))
    elif operation == "indent":
        width = max(map(_amount, everything[1:]), default=4)
        text = _text(given[0])
        _check(len(text) + width * (len(text.splitlines()) + 1))
    elif operation == "tojson":
        _check(_size(given[0], sum(each for each in everything[1:] if isinstance(each, int))))
    elif operation in _PRODUCTS:
        _check(_product(operation, everything))
    else:
        _check(sum(map(_size, everything)))


def _product(operation: str, given: tuple[Any, ...]) -> int:
    """Characters of a result that may hold all other arguments for each part of the first."""
    first, rest = given[0], 1 + sum(map(_amount, given[1:]))
    if operation in ("format", "format_map") and isinstance(first, str):
        widths = sum(int(each) for each in re.findall(r"\d+", first))
        return len(first) + widths + (first.count("%") + first.count("{")) * rest
    return _size(first) * (rest if operation != "pprint" else _size(first))


def _amount(value: Any) -> int:
    if isinstance(value, tuple):  # what follows %
        return sum(map(_amount, value))
    return abs(value) if isinstance(value, int) else _size(value)
