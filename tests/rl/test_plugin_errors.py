"""A class of a user's own that raises is named in one line, and the run can be resumed."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import proximo
from proximo.cli import main
from proximo.config import toml
from proximo.environments.kinds import Ask
from proximo.rewards import GraderFailed
from proximo.rl.config import RunConfig
from proximo.rl.plugin_errors import OutsideFailed, name_user_code
from tests.outside import pieces

# What is named


@dataclass(frozen=True)
class Rude:
    """Raises what it is told to."""

    error: Exception | None = None

    def play(self, questions, ask):
        if self.error is None:
            return Ask(SimpleNamespace(), None, None, 0, 0, version="none")  # pyright: ignore[reportArgumentType]
        return self._inner()

    def _inner(self):
        assert self.error is not None
        raise self.error


def failure(error: Exception | None, config: RunConfig | None = None) -> BaseException:
    rude = Rude(error)
    config = config or replace(RunConfig(), environment=rude)
    with pytest.raises(Exception) as raised, name_user_code(config):  # noqa: PT011
        rude.play([], None)
    return raised.value


@pytest.mark.parametrize("error", [KeyError("missing"), ValueError("two\nlines\x1b[31m"), RuntimeError()], ids=repr)
def test_class_exception_and_place_are_in_one_line(error: Exception):
    found = failure(error)
    assert isinstance(found, OutsideFailed)
    assert found.__cause__ is error
    text = {KeyError: "KeyError: 'missing'", ValueError: "ValueError: two lines\\x1b[31m", RuntimeError: "RuntimeError"}
    source = Path(__file__).read_text().splitlines()
    line = source.index("        raise self.error") + 1
    place = f"test_plugin_errors.py, line {line}, in Rude._inner"
    assert (
        str(found)
        == f"environment Rude raised {text[type(error)]} ({place}); correct it, then run the same command again"
    )


def test_a_piece_deep_in_the_config_is_named():
    @dataclass(frozen=True)
    class Broken(pieces.Wall):
        def __call__(self, log_ratio, advantages, *others):
            return log_ratio + torch.zeros(99)

    gate = Broken()
    config = replace(RunConfig(), algorithm=replace(proximo.GRPO, gate=gate))
    told = r"^algorithm.gate Broken raised RuntimeError: The size of tensor .*\)"
    with pytest.raises(OutsideFailed, match=told), name_user_code(config):
        gate(torch.zeros(2), torch.zeros(2))


def test_errors_of_our_own_and_of_others_are_left_as_they_are():
    assert type(failure(None)) is ValueError  # Ask refuses its version: the user's class called it, but it is ours
    assert type(failure(GraderFailed("it says so itself"))) is GraderFailed
    assert type(failure(KeyError("x"), RunConfig())) is KeyError  # of nothing that this config names


# A whole run

MINE = """
from dataclasses import dataclass
from pathlib import Path

from proximo.tasks import Arithmetic


@dataclass(frozen=True)
class Fragile(Arithmetic):
    def grade(self, problems, completions):
        if Path("broken").exists() and len(completions) == 3:  # a group of training
            raise KeyError("score")
        return super().grade(problems, completions)
"""
SMALL = """model = "tiny-arithmetic"
steps = 2
task = { type = "mine.py:Fragile" }
training = { groups = 2, group_size = 3, minibatches = 1, warmup_steps = 0 }
sampling = { max_tokens = 4 }
evaluation = { problems = 2 }
"""


@pytest.mark.slow("trains and resumes a run")
def test_a_run_whose_task_raises_ends_in_one_line_and_resumes(tmp_path, monkeypatch, capsys, ordinary_precision):
    monkeypatch.chdir(tmp_path)
    for name, text in {"mine.py": MINE, "run.toml": SMALL, "broken": ""}.items():
        (tmp_path / name).write_text(text)
    assert main(["train", "run.toml", "--run", "run"]) == 1
    *_, error, more = capsys.readouterr().err.splitlines()
    assert error == (
        "error: task Fragile raised KeyError: 'score' (mine.py, line 12, in Fragile.grade); correct it, then run the "
        "same command again"
    )
    assert more.startswith("what was written so far is in run, the traceback in run/traceback.txt; running it again")
    assert 'mine.py", line 12, in grade' in (tmp_path / "run/traceback.txt").read_text()
    # The same from Python, and its note says how to resume.
    config = toml.loads(Path("run/config.toml").read_text(), RunConfig)
    with pytest.raises(OutsideFailed, match=r"^task Fragile raised KeyError: 'score'") as raised:
        proximo.train(config, "run", quiet=True)
    assert isinstance(raised.value.__cause__, KeyError)
    assert "running it again with" in raised.value.__notes__[0]
    Path("broken").unlink()
    proximo.train(config, "run", quiet=True)
    # With three samples of each problem, an evaluation grades groups of three.
    Path("broken").touch()
    with pytest.raises(SystemExit):
        main(["eval", "run", "--problems", "2", "--samples", "3"])
    assert "error: task Fragile raised KeyError: 'score' (mine.py, line 12" in capsys.readouterr().err
    Path("broken").unlink()
    assert not Path("run/traceback.txt").exists()
    proximo.train(config, "whole", quiet=True)
    assert Path("run/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()
