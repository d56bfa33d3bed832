"""`import proximo`: light, complete, and documented by its own help."""

import inspect
import io
import json
import pydoc
import re
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

import proximo
from tests import ROOT

FUNCTIONS = ("train", "sft", "dpo", "reward_model", "compare", "evaluate", "open_run")
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
    block = source[source.index("if TYPE_CHECKING:") : source.index("__all__ = [")]
    seen = set(re.findall(r"\b\w+\b", re.sub(r"from [\w.]+ import", "", block))) - {"if", "TYPE_CHECKING"}
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


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    space: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [], "outputs are stripped"
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number + 1}", "exec"), space)
