"""Words of the code: what a docstring may open with, names that say nothing, classes that share a name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

SOURCE = ROOT / "src" / "proximo"
FILES = sorted(SOURCE.rglob("*.py"))
LAB = ROOT / "lab" / "proximo_lab"
STORED = {
    "lab/proximo_lab/bench/options.py": {"own"},
    "src/proximo/api/export/export.py": {"place"},
    "src/proximo/runs/tracking/tracker.py": {"facts", "place"},
}
"""Fields that stored results, or the code of users, have under such a name, by file."""
RIDDLES = {"facts", "found", "least", "most", "own", "place", "said", "told"}
"""Names that could be anything's. A longer name that contains one is a name."""
OPENERS = (
    "about above after against along among around as at because before behind below beneath beside between beyond "
    "both but by despite during either enough everything everywhere except for from he her here his how however if "
    "in inside instead into it its itself just least less many more most near neither never none nor not nothing "
    "now of off on once only onto or otherwise out outside over perhaps same since so something such than that "
    "their them then there these they this those though through throughout till together too toward under unless "
    "until up upon very via was what whatever when whenever where wherever whether which while who whoever whom "
    "whose why with within without yet"
)
"""Prepositions, pronouns, conjunctions and adverbs: with these a docstring does not say what the thing is."""
SHARED_CLASSES: set[str] = set()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of attributes and constants included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in zip(node.body, node.body[1:], strict=False):
                match before, after:
                    case (ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text)))):
                        yield after.lineno, text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that is defined or bound: variables, arguments, attributes, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case _:
                pass


def opener(text: str) -> str:
    return text.split()[0].strip("`.,:;'\"()").lower()


def rooms() -> dict[str, list[Path]]:
    """Files of each room of the package, and of each of the lab."""
    homes = defaultdict(list)
    for folder, prefix in ((SOURCE, ""), (LAB, "lab/")):
        for path in sorted(folder.rglob("*.py")):
            homes[prefix + path.relative_to(folder).parts[0]].append(path)
    return homes


@pytest.mark.slow("reads the whole package")
@pytest.mark.parametrize("files", rooms().values(), ids=rooms())
def test_a_docstring_opens_with_a_verb_or_a_noun(files: list[Path]):
    assert [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in docstrings(parsed(path))
        if opener(text) in OPENERS.split()
    ] == []


@pytest.mark.slow("reads the whole package")
@pytest.mark.parametrize("files", rooms().values(), ids=rooms())
def test_no_name_could_be_anything_s(files: list[Path]):
    assert [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in names(parsed(path))
        if name.strip("_").lower() in RIDDLES - STORED.get(str(path.relative_to(ROOT)), set())
    ] == []


@pytest.mark.slow("reads the whole package")
def test_a_class_s_name_has_one_meaning():
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in homes.items() if len(where) > 1 and name not in SHARED_CLASSES} == {}


def test_the_rules_see_what_they_refuse():
    tree = ast.parse('class A:\n    found = 1\n    """Of what."""\n\ndef said(told):\n    """Whether it is."""\n')
    assert {name for _, name in names(tree)} == {"A", "found", "said", "told"}
    assert {opener(text) for _, text in docstrings(tree)} == {"whether", "of"}
