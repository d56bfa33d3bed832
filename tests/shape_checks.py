"""Shapes in signatures, checked while tests run: `Float[Tensor, "B T"]` must be what was given and what came back.

Only functions and dataclasses that name a shape are checked. jaxtyping's own import hook checks every function of a
package, which doubled the processor time of the suite; types without shapes are basedpyright's work. Whether shapes fit
depends on the shapes alone, so a function that was called with the same ones before is not checked again.
"""

import ast
import inspect
import marshal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source, source_hash
from pathlib import Path
from threading import Lock
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
    known = _Known()
    look, look_again = cache(lambda: _looking(function)), cache(lambda: _Result(function))  # many are never called

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # what looks cannot be compiled
            return function(*arguments, **named)
        values = (*arguments, *named.values()) if named else arguments
        seen = known[(*map(type, values), *named)] if named else known[tuple(map(type, values))]
        shapes = seen.read(values)
        if shapes in seen.shapes:
            return function(*arguments, **named)
        if seen.results is None:
            result = look()(*arguments, **named)
            if seen.has_tensor:
                seen.shapes.add(shapes)
            elif seen.is_plain:
                seen.results = set()
            return result
        # Nothing but the result has a shape: what it may be does not depend on the arguments.
        result = function(*arguments, **named)
        shape = _described(result)
        if shape not in seen.results:
            look_again()(result, *arguments, **named)
            if _family(type(result)) in (torch.Tensor, object):  # of many values, a check may look at another each time
                seen.results.add(shape)
        return result

    return call


def _looking(function: Callable[..., Any]) -> Callable[..., Any]:
    from beartype import beartype
    from jaxtyping import jaxtyped

    # beartype sees arguments and result once, and names of sizes hold for the call; given its checker, jaxtyping would
    # look at the arguments twice.
    return jaxtyped(typechecker=None)(beartype(function))


class _Result:
    """Looks at what a function gave, without calling it again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._lock, self._result = Lock(), None
        self._look = _looking(_with_signature(function, lambda: self._result))

    def __call__(self, result: Any, *arguments: Any, **named: Any) -> None:
        with self._lock:
            self._result = result
            try:
                self._look(*arguments, **named)
            finally:
                self._result = None  # a result may be gigabytes of gradients


def _with_signature(function: Callable[..., Any], body: Callable[[], Any]) -> Callable[..., Any]:
    """Another function, with the parameters of this one."""
    given = inspect.signature(function)
    bare = [
        each.replace(annotation=each.empty, default=each.default if each.default is each.empty else None)
        for each in given.parameters.values()
    ]
    made: dict[str, Any] = {}
    text = f"def make(body):\n  def {function.__name__}{given.replace(parameters=bare, return_annotation=given.empty)}:"
    exec(f"{text}\n    return body()\n  return {function.__name__}", function.__globals__, made)
    other = made["make"](body)
    for name in ("__module__", "__qualname__", "__annotations__", "__defaults__", "__kwdefaults__"):
        setattr(other, name, getattr(function, name))
    return other


def checked_fields(kind: type) -> type:
    """The dataclass, whose fields are looked at when it is made of new shapes or types."""
    from beartype import beartype
    from jaxtyping import jaxtyped

    plain = kind.__init__
    kind = jaxtyped(typechecker=beartype)(kind)
    looking = kind.__init__
    known = _Known()

    @wraps(plain)
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        values = (*arguments, *named.values())
        seen = known[(*map(type, values), *named)]
        shapes = seen.read(values)
        if shapes in seen.shapes:
            plain(self, *arguments, **named)
            return
        looking(self, *arguments, **named)
        seen.shapes.add(shapes)

    kind.__init__ = make
    return kind


class _Seen:
    """Of calls with values of these types: how their shapes are read, and which were looked at."""

    def __init__(self, kinds: Sequence[type]) -> None:
        families = [_family(kind) for kind in kinds]
        self.has_tensor, self.is_plain = torch.Tensor in families, set(families) <= {object}
        self.shapes: set[tuple[Any, ...]] = set()
        self.results: set[Any] | None = None
        """Shapes of results, where nothing else has one."""
        reads = {torch.Tensor: "v[{0}].shape, v[{0}].dtype", object: ""}
        parts = [reads.get(family, "described(v[{0}])").format(place) for place, family in enumerate(families)]
        # One expression for all of them: it is computed before every checked call.
        self.read = eval(f"lambda v: ({''.join(f'{part}, ' for part in parts if part)})", {"described": _described})


class _Known(dict[tuple[Any, ...], _Seen]):
    """By types of all arguments, and names of those that were given by name."""

    def __missing__(self, key: tuple[Any, ...]) -> _Seen:
        return self.setdefault(key, _Seen([each for each in key if isinstance(each, type)]))


def _described(value: Any) -> Any:
    """What a check of it could depend on."""
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
        if b"proximo.types.tensor_types import" not in source:
            return super().get_code(fullname)
        # In a file of its own: the usual one is the unchecked code's.
        kept = Path(cache_from_source(self.path, optimization="checked"))
        stamp = source_hash(source + Path(__file__).read_bytes())
        with suppress(OSError):
            if (held := kept.read_bytes()).startswith(stamp):
                return marshal.loads(held[len(stamp) :])
        code = compile(with_checks(source), self.path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            self.set_data(str(kept), stamp + marshal.dumps(code))  # whole or not at all, also by two processes at once
        return code


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
