"""Shapes in signatures, checked while tests run: `Float[Tensor, "B T"]` must be what was given and what came back.

Only functions and dataclasses that name a shape are checked. jaxtyping's own import hook checks every function of a
package, which doubled the processor time of the suite; types without shapes are basedpyright's work. Whether shapes fit
depends on the shapes alone, so a function that was called with the same ones before is not checked again.
"""

import ast
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch

PACKAGE = "proximo"
SHAPES = {"Bool", "Float", "Int"}
CHECK = ast.parse(f"__import__({__name__!r}, fromlist=['checked']).checked", mode="eval").body
"""Around a function."""
CHECK_FIELDS = ast.parse(f"__import__({__name__!r}, fromlist=['checked']).checked_fields", mode="eval").body
"""Around a dataclass."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which looks at its arguments and its result when it is called with new shapes or types."""
    from beartype import beartype
    from jaxtyping import jaxtyped

    # beartype sees arguments and result once, and names of sizes hold for the call; given its checker, jaxtyping would
    # look at the arguments twice.
    looking, seen = jaxtyped(typechecker=None)(beartype(function)), set()

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        shapes = _all_described(arguments, named)
        if shapes in seen:
            return function(*arguments, **named)
        result = looking(*arguments, **named)
        # Without a tensor among the arguments, what comes back depends on something else.
        if any(isinstance(each, torch.Tensor) for each in (*arguments, *named.values())):
            seen.add(shapes)
        return result

    return call


def checked_fields(kind: type) -> type:
    """The dataclass, whose fields are looked at when it is made of new shapes or types."""
    from beartype import beartype
    from jaxtyping import jaxtyped

    plain = kind.__init__
    kind = jaxtyped(typechecker=beartype)(kind)
    looking, seen = kind.__init__, set()

    @wraps(plain)
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        shapes = _all_described(arguments, named)
        if shapes in seen:
            plain(self, *arguments, **named)
            return
        looking(self, *arguments, **named)
        seen.add(shapes)

    kind.__init__ = make
    return kind


def _all_described(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    shapes = [_described(each) for each in arguments]
    return (*shapes, *[(name, _described(each)) for name, each in named.items()]) if named else tuple(shapes)


def _described(value: Any) -> Any:
    """What a check of it could depend on. Runs before every checked call, so it looks at types by identity alone."""
    kind = type(value)
    family = _FAMILIES.get(kind) or _family(kind)
    if family is object:
        return kind
    if family is torch.Tensor:
        return value.shape, value.dtype
    if family is dict:
        return dict, *[(name, _described(each)) for name, each in value.items()]
    some = [_described(each) for each in value[:8]]
    return kind, *some, len(value) if some and type(some[0]) is tuple else 0


_FAMILIES: dict[type, type] = {}


def _family(kind: type) -> type:
    found = next((each for each in (torch.Tensor, dict, tuple, list) if issubclass(kind, each)), object)
    return _FAMILIES.setdefault(kind, found)


def install() -> None:
    """Before anything of the package is imported. Without jaxtyping, a development tool, nothing is checked."""
    try:
        import beartype  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import jaxtyping  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return
    imported = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    assert not imported, f"shapes cannot be checked in what is imported already: {imported}"
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        if b"proximo.tensor_types import" not in source:
            return super().get_code(fullname)
        # Never from a cached file, nor into one: that one is the unchecked code's.
        return compile(with_checks(source), self.path, "exec", dont_inherit=True)


def with_checks(source: bytes | str) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Function) and _signature_has_shape(node):
            node.decorator_list.append(CHECK)  # innermost: a property or a cache is around it
        elif isinstance(node, ast.ClassDef) and _fields_have_shape(node):
            node.decorator_list.insert(0, CHECK_FIELDS)  # outermost: it checks the constructor that dataclass makes
    return ast.fix_missing_locations(tree)


def _signature_has_shape(node: Function) -> bool:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return any(map(_names_shape, [node.returns, *(each.annotation for each in given if each is not None)]))


def _fields_have_shape(node: ast.ClassDef) -> bool:
    is_dataclass = any("dataclass" in ast.dump(each) for each in node.decorator_list)
    return is_dataclass and any(_names_shape(each.annotation) for each in node.body if isinstance(each, ast.AnnAssign))


def _names_shape(annotation: ast.expr | None) -> bool:
    nodes = ast.walk(annotation) if annotation is not None else ()
    return any(isinstance(each, ast.Name) and each.id in SHAPES for each in nodes)
