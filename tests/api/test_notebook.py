"""Progress in a notebook: one display that each step updates, made of a stand-in for IPython."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from proximo.api.progress import NotebookProgress, progress_here
from proximo.rl.progress import ProgressLines
from proximo.runs.records import Collected, DataCursor, Evaluation
from proximo.types import Completion, Grade, Group, Problem, Rollout

METRICS = {"outcome": 0.25, "length": 3.0, "dead_groups": 0.0, "learning_rate": 2e-5}
NONE = Evaluation.none()


class Display:
    """Stands for IPython's `display` and for the handle that it returns."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.updates = 0

    def __call__(self, bundle: dict[str, str], **options: Any) -> "Display":
        assert options == {"raw": True, "display_id": True}
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.updates += 1
        self.shown[-1] = bundle


@pytest.fixture
def display(monkeypatch) -> Display:
    """A notebook's IPython."""
    shown, ipython, inner = Display(), ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # pyright: ignore[reportAttributeAccessIssue]
    inner.display = shown  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return shown


def collected(text: str = "85") -> Collected:
    problem = Problem(id="sum", prompt="37+48=", answer="85")
    group = Group(problem, (1,), (Rollout(Completion((1,), (0.0,), text, "stop"), Grade(1.0)),))
    return Collected((group,), dropped=(), cursor=DataCursor(), rounds=1, sampled_tokens=30)


def test_steps_update_one_display(display: Display, capsys):
    progress = progress_here()
    assert isinstance(progress, NotebookProgress)
    progress.start(4, NONE)
    for step in (1, 2):
        progress.stepped(step, METRICS, {"rollout": 1.5}, collected("<b>85</b>\x1b[2J"))
    assert (len(display.shown), display.updates) == (1, 1)
    [bundle] = display.shown
    first, curve, numbers, sample = bundle["text/plain"].split("\n")
    assert first.startswith("step 2/4  ████████████████████░░░░░░░░░░░░░░░░░░░░  20 tokens/s  1.5 s  ")
    assert first.endswith(" left")
    assert curve == "task score ▃▃"
    assert numbers.endswith("lr 2e-05")
    assert sample == "37+48=<b>85</b>\\x1b[2J   task score 1"
    assert "&lt;b&gt;85&lt;/b&gt;" in bundle["text/html"]  # a completion is no markup
    progress.warned(2, "look here")
    progress.stop()
    assert capsys.readouterr().err == "warning at step 2: look here\n"


def test_a_terminal_of_ipython_and_plain_python_have_lines(display: Display, monkeypatch):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    assert type(progress_here()) is ProgressLines
    monkeypatch.delitem(sys.modules, "IPython")
    assert type(progress_here()) is ProgressLines
