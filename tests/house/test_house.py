"""The house stays small: sizes, weight of an import, no question which algorithm this is."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT

SOURCE = ROOT / "src" / "proximo"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Shared by the rules: parsing all files takes seconds each time."""
    return ast.parse(path.read_text())


@pytest.mark.slow("reads the whole package")
def test_functions_stay_short():
    assert len(FILES) > 20
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 60, f"{path.name}: {node.name} has {length} lines"


def test_nothing_asks_which_algorithm_it_is():
    for path in FILES:
        assert not re.search(r"(?<!for )\b(name|algorithm)\s*(==|in)\s*[\"'\[(]", path.read_text()), path.name


@pytest.mark.slow("reads the whole package")
def test_nothing_asks_which_class_a_piece_is():
    """Stages ask a piece what it does (protocols and traits), so that a piece from anywhere does what it says."""
    pieces = {
        node.name
        for path in FILES
        if path.parent == SOURCE / "losses" / "pieces" and path.stem != "protocols"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {"Clip", "KeepMixed", "PositiveNll", "SamplerPolicy"} <= pieces
    asked = [
        f"{path.name}:{node.lineno}"
        for path in FILES
        if "isinstance" in path.read_text()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name | ast.Attribute)
        if (name.id if isinstance(name, ast.Name) else name.attr) in pieces
    ]
    assert asked == []


def test_no_room_called_utils():
    forbidden = {"utils", "common", "base", "core", "helpers"}
    assert not {path.stem for path in FILES} & forbidden


@pytest.mark.slow("starts Python anew")
def test_importing_the_library_loads_torch_and_nothing_else_heavy():
    # Everything but torch is hidden: the library must import on a machine that has torch alone.
    script = """
import sys
for name in ("tyro", "rich", "jaxtyping", "beartype", "transformers", "pyarrow"):
    sys.modules[name] = None
import proximo, proximo.losses
assert proximo.policy_loss and proximo.advantages
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_constraints_are_within_the_ranges():
    """constraints.txt names every direct dependency, in a version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["gym"], *extras["lora"], *extras["view"], *extras["dev"]]
    for each in map(Requirement, wanted):
        if each.name != "proximo":
            assert each.specifier.contains(pinned[canonicalize_name(each.name)]), each
    for each in map(Requirement, [line for lines in extras.values() for line in lines]):
        version = pinned.get(canonicalize_name(each.name))
        assert version is None or each.specifier.contains(version), each


def test_the_constraints_leave_room_for_what_extras_need():
    """An extra whose package needs an older version than the one pinned could not be installed with the constraints.

    trackio, the newest and the last that installs with huggingface-hub 2, needs a pillow before 13, and the releases
    before it a huggingface-hub before 2.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert Requirement("pillow<13").specifier.contains(pinned.get(canonicalize_name("pillow"), "12"))


@pytest.mark.slow("starts Python anew")
def test_what_users_files_import_loads_no_torch():
    """Rewards and environments have processes of their own: torch would cost each of them seconds and 200 MB."""
    script = "import sys, proximo.environments.examples\nfrom proximo.types import Completion, Grade, Problem\n"
    script += "from proximo import Done, Environment, Observation\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow("starts Python anew")
def test_what_loads_no_model_imports_no_model_code():
    """Reading and showing runs takes half the time and 100 MB less without transformers' model code."""
    script = "import sys, proximo.insight.page.server, proximo.api.run\nassert 'transformers' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow("reads the whole package")
def test_model_types_are_for_signatures_only():
    """At run time they are Any: a test against one would not hold, and a call would fail."""
    checked = 0
    for path in FILES:
        tree = parsed(path)
        names = {
            each.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "proximo.models.model_types"
            for each in node.names
        }
        checked += len(names)
        said = {part for node in ast.walk(tree) for part in _annotations(node)}
        used = {
            f"{path.name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and node.id in names and node not in said
        }
        assert used == set()
    assert checked > 80


def _annotations(node: ast.AST) -> list[ast.AST]:
    """All nodes of the annotations of a function, an argument or a variable, and of a type's alias or cast."""
    found: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        found.append(node.returns)
    if isinstance(node, ast.arg | ast.AnnAssign):
        found.append(node.annotation)
    return [part for each in found if each is not None for part in ast.walk(each)]


@pytest.mark.slow("reads the whole package")
def test_the_map_of_rooms_is_the_house():
    """AGENTS.md names every room once, in an order in which nothing is imported from below, and paths that exist."""
    text = (ROOT / "AGENTS.md").read_text()
    rooms = re.findall(
        r"`(\w+)`", "\n".join(re.findall(r"^\| (`[^|]+) \|", text.partition("## The rooms")[2], re.MULTILINE))
    )
    assert sorted(rooms) == sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
    floor = {room: number for number, room in enumerate(rooms)}
    upwards = {
        f"{room} imports {other}"
        for path in FILES
        for room in path.relative_to(SOURCE).parts[:1]
        if room in floor
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("proximo.")
        for other in (node.module or "").split(".")[1:2]
        if floor[other] > floor[room]
    }
    assert upwards == set()
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)+/?)`", text)
    assert len(paths) > 10
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, SOURCE))] == []
