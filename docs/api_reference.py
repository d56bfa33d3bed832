"""The page of every name of `import proximo`, written from its docstrings when the site is built."""

import ast
import inspect
import re
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import proximo

ARGUMENT = re.compile(r"(?P<name>[\w./, *]*\w)  +(?P<text>\S.*)")
"""A line of a docstring's list of arguments: a name, at least two spaces, what it is."""


def page() -> str:
    """The page, in Markdown."""
    named = [(name, getattr(proximo, name)) for name in proximo.__all__ if name != "__version__"]
    functions = [(name, value) for name, value in named if inspect.isfunction(value)]
    classes = [(name, value) for name, value in named if inspect.isclass(value)]
    parts = ["# Python reference", "What `import proximo` has, from its own docstrings."]
    parts += ["## Overview", _fenced("text", inspect.cleandoc(proximo.__doc__ or ""))]
    parts += ["## Functions", *(_function(*each) for each in functions)]
    parts += ["## Classes", *(_class(*each) for each in classes)]
    parts += ["## Modules", *(_module(name, value) for name, value in named if inspect.ismodule(value))]
    values = [name for name, value in named if isinstance(value, proximo.Algorithm)]
    parts += ["## Values", f"{', '.join(f'`{each}`' for each in values)}: values of `Algorithm`."]
    return "\n\n".join(parts) + "\n"


def _function(name: str, value: Any, level: str = "###") -> str:
    return f"{level} {name}\n\n{_fenced('python', _signature(name, value))}\n\n{described(value.__doc__)}"


def _signature(name: str, value: Any) -> str:
    """The signature with the annotations of the source: names of unions, not all their members."""
    written = _source(value)
    assert isinstance(written, ast.FunctionDef)
    every = [*written.args.posonlyargs, *written.args.args, *written.args.kwonlyargs]
    kinds = {each.arg: ast.unparse(each.annotation) for each in every if each.annotation}
    taken = inspect.signature(value).parameters.values()
    shown: list[str] = []
    for each in taken:
        if each.kind is each.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        kind = f": {kinds[each.name]}" if each.name in kinds else ""
        default = "" if each.default is each.empty else f" = {each.default!r}"
        shown += [f"{each.name}{kind}{default}"] if each.name != "self" else []
    result = f" -> {ast.unparse(written.returns)}" if written.returns else ""
    line = f"{name}({', '.join(shown)}){result}"
    return line if len(line) < 100 else f"{name}(\n    " + ",\n    ".join(shown) + f",\n){result}"


def _source(value: Any) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _class(name: str, value: type) -> str:
    parts = [f"### {name}", described(_own_docstring(value))]
    if is_dataclass(value):
        notes = field_docstrings(value)
        rows = [(f"`{each.name}`", _default(each), _cell(notes.get(each.name, ""))) for each in fields(value)]
        parts.append(_table(("field", "default", ""), rows))
    methods = inspect.getmembers(value, inspect.isfunction)
    own = [each for each in methods if each[0][0] != "_" and each[1].__doc__ and each[0] in vars(value)]
    return "\n\n".join([*parts, *(_function(*each, level="####") for each in own)])


def _module(name: str, value: ModuleType) -> str:
    public = [each for each in getattr(value, "__all__", ()) if each[0] != "_"]
    listed = f"\n\n{', '.join(f'`{each}`' for each in public)}" if public else ""
    return f"### {name}\n\n{described(value.__doc__)}{listed}"


def _own_docstring(value: type) -> str:
    """The docstring as it is written: dataclasses make one up where there is none."""
    written = value.__doc__ or ""
    return "" if written.startswith(f"{value.__name__}(") else written


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return _code(field.default)
    return _code(field.default_factory()) if field.default_factory is not MISSING else "required"


def _code(value: Any) -> str:
    return f"`{value!r}`".replace("|", "\\|")


def field_docstrings(value: type) -> dict[str, str]:
    """The text under each field of a dataclass, those of its parents too."""
    found: dict[str, str] = {}
    for each in reversed([kind for kind in value.__mro__ if is_dataclass(kind)]):
        written = _source(each)
        assert isinstance(written, ast.ClassDef)
        body = written.body
        for field, note in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(note.value.value))
    return found


def described(docstring: str | None) -> str:
    """A docstring in Markdown: text as text, lists of arguments as tables, examples and layouts as code."""
    parts: list[str] = []
    blocks = re.split(r"\n\n(?! )", inspect.cleandoc(docstring or ""))
    for block in blocks:
        first, *rest = block.splitlines() or [""]
        if ARGUMENT.fullmatch(first) and all(ARGUMENT.fullmatch(line) or line.startswith("  ") for line in rest):
            parts.append(_table(("argument", ""), _arguments(block)))
        elif rest and all(line.startswith(" ") or not line for line in rest):
            parts += [first, _fenced("python", textwrap.dedent("\n".join(rest)))]
        elif block.startswith("Example: "):
            parts += ["Example:", _fenced("python", block.removeprefix("Example: "))]
        else:
            parts.append(_plain(block))
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    """Text in which only what is between backticks is Markdown."""
    return re.sub(r"(`[^`]*`)|([<*_])", lambda found: found[1] or f"\\{found[2]}", text).replace("\\<", "&lt;")


def _arguments(block: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for line in block.splitlines():
        if match := ARGUMENT.fullmatch(line):
            rows.append((f"`{match['name'].strip()}`", _cell(match["text"])))
        else:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {_cell(line.strip())}")
    return rows


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _fenced(kind: str, text: str) -> str:
    return f"```{kind}\n{text}\n```"
