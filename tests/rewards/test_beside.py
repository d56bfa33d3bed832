"""What a worker executes for a reward function of a file: its source, and that of modules beside it."""

import importlib.util
import os
import py_compile
from pathlib import Path

import pytest

from proximo.rewards import PythonFunction
from proximo.types import Completion, Problem

MINE = """
import statistics
import helper
def f(completions, **_):
    return [helper.score(each) for each in completions]
"""


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("def score(text):\n    return 1.0\n")
    return tmp_path


def scored(grading) -> list[float | None]:
    problem = Problem("p", "1+1=", "2")
    return PythonFunction("mine.py:f")([problem], [Completion(tokens=(1,), logprobs=(0.0,), text="2", finish="stop")])


@pytest.mark.parametrize("name", ["mine", "helper"])
def test_cached_bytecode_is_not_executed(beside, grading, name):
    """Python takes bytecode for a source's own that has its time and size, whatever is in it."""
    source = beside / f"{name}.py"
    text, status = source.read_text(), source.stat()
    (beside / "other.py").write_text("raise SystemExit('bytecode')\n".ljust(len(text), "#"))
    os.utime(beside / "other.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(beside / "other.py"), cfile=importlib.util.cache_from_source(str(source)), doraise=True)
    assert scored(grading) == [1.0]


def test_a_file_with_the_name_of_a_module_of_pythons_is_not_executed(beside, grading):
    (beside / "statistics.py").write_text("raise SystemExit('shadowed')\n")
    assert scored(grading) == [1.0]
