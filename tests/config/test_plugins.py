"""Classes from a user's own files: written back as they were named, loaded once, and refused in one line."""

import copy
import os
import pickle
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proximo.config import toml
from proximo.config.plugins import counted_from, load_class, load_function, named_file, place_of
from proximo.config.trust.permission import command_line
from proximo.config.unions import foreign_name, missing_members, protocols
from proximo.models.values import OwnLayers, ValueForm
from proximo.rewards import Reward
from proximo.rl.config import RunConfig
from proximo.tasks import TaskOptions
from tests.outside_files import REWARD, TASK, forget_package


class Shape(Protocol):
    name: str

    @property
    def sides(self) -> int: ...

    def area(self, unit: float) -> float: ...

    def __call__(self) -> str: ...


@dataclass(frozen=True)
class Square:
    name: str = "square"
    sides: int = 4

    def area(self, unit: float) -> float:
        return unit

    def __call__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Drawing:
    one: Square | Shape = field(default_factory=Square)
    several: Square | Shape | tuple[Square | Shape, ...] | None = None
    closed: Square | None = None


TRIANGLE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Triangle:
    {fields}
    name: str = "triangle"
    height: float = 1.0
    corners: tuple[int, ...] = (1, 2)
    sides = 3
    def area(self, unit): return unit * self.height / 2
    def __call__(self): return self.name
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.py").write_text(TRIANGLE.format(fields=""))
    return tmp_path


def drawing(name: str, rest: str = "") -> Drawing:
    return toml.loads(f'[one]\ntype = "{name}"\n{rest}', Drawing)


def problem(name: str, rest: str = "") -> str:
    with pytest.raises(toml.ConfigError) as caught:
        drawing(name, rest)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line.removeprefix("config:2: one.type is ").removeprefix(f'"{name}": ')


# Round trips


def test_a_class_of_a_file_is_written_back_as_it_was_named(here, monkeypatch):
    (here / "package").mkdir()
    (here / "package" / "__init__.py").touch()
    (here / "package" / "inner.py").write_text(TRIANGLE.format(fields=""))
    forget_package()
    monkeypatch.syspath_prepend(here)
    for name in ("shapes.py:Triangle", "./shapes.py:Triangle", f"{here}/shapes.py:Triangle", "package.inner:Triangle"):
        text = f'[one]\ntype = "{name}"\nname = "x"\nheight = 3.0\ncorners = [4]\n'
        value = toml.loads(text, Drawing)
        assert toml.dumps(value) == text
        assert value.one.area(2.0) == 3.0
        assert value == toml.loads(text, Drawing)
        assert replace(value, closed=Square()).one == value.one
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    assert 'type = "Square"' in toml.dumps(Drawing())
    assert drawing("Square") == toml.loads("", Drawing) == toml.loads("[one]\n", Drawing)


def test_defaults_are_written_out_and_tuples_hold_both_kinds(here):
    assert "height = 1.0\ncorners = [1, 2]" in toml.dumps(drawing("shapes.py:Triangle"))
    triangle = drawing("shapes.py:Triangle").one
    for held in (triangle, (triangle, Square()), (), None):
        value = Drawing(several=held)
        assert toml.loads(toml.dumps(value), Drawing) == value


@settings(max_examples=20)
@given(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.lists(st.integers(-9, 9)))
def test_any_value_of_a_users_class_loads_back_equal(name: str, height: float, corners: list[int]):
    kind: Any = load_class(f"{Path(__file__).parent / 'outside_shapes.py'}:Triangle")
    value = Drawing(kind(name, height, tuple(corners)))
    assert toml.loads(toml.dumps(value), Drawing) == value


def test_an_instance_made_in_python_is_named_by_its_module_or_file(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    import shapes  # pyright: ignore[reportMissingImports]

    try:
        value = Drawing(shapes.Triangle())
        assert f'"{here / "shapes.py"}:Triangle"' in toml.dumps(value)
        monkeypatch.setenv("PYTHONPATH", str(here))
        assert '"shapes:Triangle"' in toml.dumps(value)
        assert toml.loads(toml.dumps(value), Drawing) == value
    finally:
        del sys.modules["shapes"]

    @dataclass(frozen=True)
    class Inner(Square):
        pass

    assert place_of(Inner) is None
    with pytest.raises(ValueError, match="^one: no other process can load the class Inner: write it at the top level"):
        toml.dumps(Drawing(Inner()))


def test_tasks_rewards_and_value_forms_are_open(here):
    assert all(protocols(each) for each in (TaskOptions, Reward, ValueForm))
    (here / "mine.py").write_text(TASK + REWARD)
    text = toml.dumps(RunConfig()).partition("[task]")[0]
    text += '[task]\ntype = "mine.py:Parrot"\nletters = "xyz"\n\n[rewards]\ntask = 1.0\n\n'
    text += '[[rewards.rules]]\nweight = 0.5\n\n[rewards.rules.reward]\ntype = "mine.py:Short"\nmost = 3\n'
    config = toml.loads(text, RunConfig)
    assert config.task.problem(1, "train", 0).answer == "y"
    assert config.rewards.names == ["short"]
    assert config.penalty_unit == 0.5
    assert toml.loads(toml.dumps(config), RunConfig) == config
    for line in ('type = "mine.py:Parrot"\nletters = "xyz"\nweight = 1.0\n', 'type = "mine.py:Short"\nmost = 3\n'):
        assert line in toml.dumps(config)


def test_our_own_pieces_have_what_their_protocols_ask():
    for union in (TaskOptions, Reward, ValueForm):
        (protocol,) = protocols(union)
        for kind in get_args(union):
            assert not missing_members(kind, protocol) if kind is not protocol else True
    assert OwnLayers().pace == 50.0


# How a file is loaded


def test_two_files_of_one_name_are_two_modules_and_one_file_is_loaded_once(here):
    (here / "a").mkdir()
    counting = "import builtins\nbuiltins.loaded = getattr(builtins, 'loaded', 0) + 1\n"
    (here / "a" / "shapes.py").write_text(counting + TRIANGLE.format(fields="extra: int = 7"))
    here_one, there = load_class("shapes.py:Triangle"), load_class("a/shapes.py:Triangle")
    assert here_one is not there
    assert load_class("a/shapes.py:Triangle") is there
    import builtins

    assert builtins.__dict__.pop("loaded") == 1
    assert not list(here.rglob("__pycache__"))  # no bytecode that could be older than the file


def test_a_changed_file_is_another_class_at_once(here):
    before = load_class("shapes.py:Triangle")
    (here / "shapes.py").write_text(TRIANGLE.format(fields="").replace("sides = 3", "sides = 5"))
    after: Any = load_class("shapes.py:Triangle")
    assert after is not before
    assert after.sides == 5


# Where a path counts from


def test_a_path_counts_from_the_toml_file_that_names_it(here, monkeypatch):
    (here / "configs").mkdir()
    (here / "configs" / "shapes.py").write_text(TRIANGLE.format(fields="").replace("sides = 3", "sides = 5"))
    (here / "configs" / "drawing.toml").write_text('[one]\ntype = "shapes.py:Triangle"\nname = "see/a.py:b"\n')
    value = toml.load("configs/drawing.toml", Drawing)
    assert value.one.sides == 5
    assert 'type = "configs/shapes.py:Triangle"' in toml.dumps(value)
    assert 'name = "configs/see/a.py:b"' in toml.dumps(value)  # whatever names code, such as PythonFunction.path
    assert toml.loads(toml.dumps(value), Drawing) == value
    monkeypatch.chdir(here / "configs")
    assert 'type = "shapes.py:Triangle"' in toml.dumps(toml.load("drawing.toml", Drawing))
    monkeypatch.chdir(here)
    (here / "configs" / "run.json").touch()  # a run's own record, whose paths are those of its command
    with pytest.raises(ValueError, match="one.type is 'shapes.py:Triangle', which is not loaded"):
        toml.load("configs/drawing.toml", Drawing)
    (here / "see").mkdir()
    (here / "see" / "a.py").touch()
    with command_line(True, []):
        assert toml.load("configs/drawing.toml", Drawing).one.sides == 3
    with pytest.raises(
        ValueError, match="none.py cannot be read, .*; a path counts from the current folder, in a TOML"
    ):
        load_class("none.py:Triangle")


def test_a_tilde_is_the_home_folder(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.chdir("/")
    assert place_of(load_class("~/shapes.py:Triangle")) == "~/shapes.py:Triangle"
    assert named_file("~/shapes.py:Triangle") == here / "shapes.py"
    assert counted_from("configs", "~/shapes.py:Triangle") == "~/shapes.py:Triangle"


# What a file may import


def test_a_file_imports_what_is_next_to_it(here):
    """At once and later, modules and packages, which import each other; two folders may use one name."""
    for name, sides in (("a", 6), ("b", 7)):
        (here / name / "parts").mkdir(parents=True)
        (here / name / "helpers.py").write_text(f"import more\nSIDES = more.ONE + {sides}\n")
        (here / name / "more.py").write_text("ONE = 1\n")
        (here / name / "parts" / "__init__.py").write_text("from .inner import DEPTH\n")
        (here / name / "parts" / "inner.py").write_text("import more\nDEPTH = more.ONE\n")
        (here / name / "json.py").write_text("raise AssertionError('in the place of the standard library')\n")
        source = "import json\nimport parts.inner\nfrom helpers import SIDES\nfrom parts import inner\n"
        source += TRIANGLE.format(fields="").replace("sides = 3", "sides = SIDES")
        source += "    def late(self):\n        import more\n        return more.ONE + parts.inner.DEPTH\n"
        (here / name / "shapes.py").write_text(source)
    path, names = list(sys.path), {each for each in sys.modules if "proximo_" not in each}
    found: list[Any] = [load_class(f"{name}/shapes.py:Triangle") for name in "ab"]
    assert [each.sides for each in found] == [7, 8]
    assert found[0]().late() == 2
    assert sys.path == path
    assert {each for each in sys.modules if "proximo_" not in each} == names
    assert not list(here.rglob("__pycache__"))


def test_what_python_finds_there_itself_is_one_module(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    (here / "kinds_of_mine.py").write_text("class Kind: pass\n")
    (here / "uses.py").write_text("from kinds_of_mine import Kind\nfrom proximo.types import Problem\n")
    from kinds_of_mine import Kind  # pyright: ignore[reportMissingImports]

    assert load_class("uses.py:Kind") is Kind
    from proximo.types import Problem

    assert load_class("uses.py:Problem") is Problem


# Refusals, each in one line


@pytest.mark.parametrize(
    ("source", "name", "why"),
    [
        (None, "none.py:Triangle", "none.py cannot be read, No such file or directory; a path counts from"),
        (None, "no.such.module:Triangle", "there is no module no.such.module; check its name and PYTHONPATH"),
        (None, "shapes.py:", "give path/to/file.py:NAME or package.module:NAME"),
        (None, "a b:C", "give path/to/file.py:NAME or package.module:NAME"),
        (None, "shapes.py:Triangel", "shapes.py has no class Triangel, perhaps Triangle"),
        ("X = 3\n", "bad.py:X", "bad.py has no class X"),
        ("1 / 0\n", "bad.py:X", "bad.py cannot be loaded, ZeroDivisionError: division by zero; correct it"),
        ("def f(:\n", "bad.py:X", "bad.py cannot be loaded, SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "bad.py:X", "bad.py cannot be loaded, SystemExit: 3; correct it"),
        ("raise ValueError('a\\nb')\n", "bad.py:X", "bad.py cannot be loaded, ValueError: a; correct it"),
        ("class X: pass\n", "bad.py:X", "X is no frozen dataclass: write @dataclass(frozen=True) above it"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass X: pass\n",
            "bad.py:X",
            "X is no frozen dataclass: write @dataclass(frozen=True) above it",
        ),
        (
            "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass X:\n    name: str = ''\n    area = 3\n",
            "bad.py:X",
            "X lacks sides, area(), __call__(), which a Shape has: add what is missing",
        ),
        (TRIANGLE.format(fields="type: int = 1"), "bad.py:Triangle", "Triangle has a field called type, which says"),
        (
            TRIANGLE.format(fields="where: complex = 1j"),
            "bad.py:Triangle",
            "Triangle.where is complex, which no config can hold: make it a bool, int,",
        ),
        (
            TRIANGLE.format(fields="where: 'Nowhere' = 1"),
            "bad.py:Triangle",
            "Triangle has annotations that cannot be read, name 'Nowhere' is not defined",
        ),
    ],
)
def test_what_is_wrong_with_a_class_is_one_line(here, source, name, why):
    if source is not None:
        (here / "bad.py").write_text(source)
    assert problem(name).startswith(why)


def test_a_subclass_of_the_protocol_must_still_write_its_members(here):
    (here / "lazy.py").write_text(
        "from dataclasses import dataclass\nfrom tests.config.test_plugins import Shape\n"
        "@dataclass(frozen=True)\nclass Lazy(Shape):\n    name: str = ''\n    def __call__(self): return ''\n"
    )
    assert problem("lazy.py:Lazy").startswith("Lazy lacks sides, area(), which a Shape has")


def test_fields_of_a_users_class_are_checked_like_ours(here):
    assert problem("shapes.py:Triangle", "hieght = 3.0") == (
        "config:3: one.hieght = 3.0 is unknown, perhaps height; Triangle knows name, height, corners"
    )
    assert problem("shapes.py:Triangle", 'height = "x"') == 'config:3: one.height is "x": give a number'
    raising = TRIANGLE.format(fields="") + "    def __post_init__(self): raise {}\n"
    (here / "shapes.py").write_text(raising.format("ValueError('height is 1.0: give more')"))
    assert problem("shapes.py:Triangle") == "config:1: one: height is 1.0: give more"
    (here / "shapes.py").write_text(raising.format("KeyError('k')"))
    assert problem("shapes.py:Triangle") == "config:1: one: Triangle cannot be made, KeyError: 'k'"


def test_a_closed_union_stays_closed_and_an_open_one_says_what_it_takes(here):
    with pytest.raises(toml.ConfigError, match="closed.type is .*: give one of Square$"):
        toml.loads('[closed]\ntype = "shapes.py:Triangle"', Drawing)
    assert problem("Sqare") == "give one of Square, or FILE.py:NAME, perhaps Square"
    with pytest.raises(ValueError, match="one is 3: give a table with a type .Square, or FILE.py:NAME."):
        toml.loads("one = 3", Drawing)


def test_a_module_next_to_a_script_is_named_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "next_to_me.py").write_text("class Mine: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from next_to_me import Mine  # pyright: ignore[reportMissingImports]

    assert place_of(Mine) == f"{tmp_path / 'next_to_me.py'}:Mine"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert place_of(Mine) == "next_to_me:Mine"


def test_a_class_of_the_script_that_runs_is_refused(tmp_path, monkeypatch):
    """Loading it again would run the script again."""
    file = tmp_path / "script.py"
    file.write_text("")
    main = sys.modules["__main__"]
    made = dataclass(frozen=True)(type("Made", (), {"__module__": "__main__"}))
    monkeypatch.setattr(main, "__file__", str(file), raising=False)
    monkeypatch.setattr(main, "Made", made, raising=False)
    with pytest.raises(ValueError, match="no other process can load the class Made: .* file of its own"):
        foreign_name(made, Any)


def test_a_pipe_is_no_file_of_code(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ValueError, match=r"pipe\.py is a pipe, not a file"):
        load_function(f"{tmp_path}/pipe.py:f")
