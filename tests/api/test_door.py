"""`import proximo`: light, complete, and documented by its own help."""

import inspect
import io
import json
import pydoc
import re
import subprocess
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest

import proximo
from proximo.api.rewards import with_rewards
from proximo.rewards import ExactMatch
from tests import ROOT
from tests.api.settings import small

FUNCTIONS = ("train", "sft", "dpo", "reward_model", "merge", "compare", "evaluate", "open_run", "plan", "config_for")
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


def test_importing_it_loads_nothing_heavy():
    script = """
import sys
import proximo
dir(proximo), proximo.__doc__, proximo.__version__
heavy = {"torch", "transformers", "numpy", "pyarrow", "tyro", "rich", "jinja2"} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_name_is_there_and_no_other():
    for name in proximo.__all__:
        assert getattr(proximo, name) is not None
    assert set(proximo.__all__) <= set(dir(proximo))
    found = [name for names in proximo._WHERE.values() for name in names]
    assert sorted([*found, *proximo._ROOMS, "__version__"]) == sorted(proximo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        proximo.trian  # noqa: B018


def test_the_names_that_types_see_are_those_that_are_there():
    source = (ROOT / "src" / "proximo" / "__init__.py").read_text()
    block = source[source.index("if _typing.TYPE_CHECKING:") : source.index("__all__ = [")]
    seen = set(re.findall(r"\b\w+\b", re.sub(r"from [\w.]+ import", "", block))) - {"if", "_typing", "TYPE_CHECKING"}
    assert seen | {"__version__"} == set(proximo.__all__)


def test_help_reads_like_a_page():
    shown = io.StringIO()
    with redirect_stdout(shown):
        print(pydoc.plain(pydoc.render_doc(proximo)))
    page = shown.getvalue()
    for name in FUNCTIONS:
        assert re.search(rf"^    {name}\(", page, re.MULTILINE), name
    for name in proximo.__all__:
        assert name == "__version__" or re.search(rf"\b{name}\b", proximo.__doc__ or "") or name in page, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_is_typed_and_has_an_example(name: str):
    function = getattr(proximo, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())
    text = inspect.getdoc(function) or ""
    assert "Example" in text
    for each in signature.parameters:
        assert each in text or "The other arguments are those of `proximo.train`" in text, each


@pytest.mark.slow("runs a notebook")
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    space: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [], "outputs are stripped"
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number + 1}", "exec"), space)


def length(prompts, completions, **columns):
    return [float(len(each)) for each in completions]


DOOR: Any = proximo
"""Called with what its types do not allow."""


@pytest.mark.parametrize(
    ("call", "error", "line"),
    [
        (
            lambda: DOOR.train({"steps": 3}),
            TypeError,
            "model is {'steps': 3}: give a model's folder or name, or a RunConfig",
        ),
        (
            lambda: DOOR.sft([{"prompt": "a"}]),
            ValueError,
            "model is not given: name the model to start from, or give a whole SftConfig",
        ),
        (lambda: DOOR.dpo(None, model="m"), ValueError, "data is a NoneType: give a path, a hub id, a list"),
        (lambda: DOOR.evaluate(None), TypeError, "model is None: give a folder, a run's folder or a hub id"),
        (lambda: DOOR.evaluate("m", "arithmetics"), ValueError, "task is 'arithmetics': give one of arithmetic, "),
        (lambda: DOOR.evaluate("m", "file"), ValueError, "task is 'file': give one of arithmetic, countdown"),
        (lambda: DOOR.evaluate("m", 3), TypeError, r"task is 3: give a task, such as proximo.Arithmetic\(\)"),
        (lambda: DOOR.compare("five"), TypeError, "configs is 'five': give a dict of RunConfigs by name, or a list"),
        (lambda: DOOR.compare(["grpo"]), TypeError, "configs: one is 'grpo': give a RunConfig, such as"),
        (lambda: DOOR.train(small(), rewards="length"), TypeError, "rewards is 'length': give a function f"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(call, error, line):
    with pytest.raises(error, match=line) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_one_reward_function_needs_no_list():
    assert with_rewards(small(), length) == with_rewards(small(), [length])
    assert with_rewards(small(), ExactMatch()) == with_rewards(small(), [ExactMatch()])


def test_the_help_of_train_fits_a_screen():
    """What `help(proximo.train)` prints in an interpreter: 45 lines, as a terminal of 120 columns wraps them."""
    title, _, *lines = pydoc.plain(pydoc.render_doc(proximo.train)).splitlines()
    assert title.startswith("Python Library Documentation")
    assert sum(max(1, -(-len(line) // 120)) for line in lines) <= 45
