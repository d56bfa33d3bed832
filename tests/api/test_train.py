"""`proximo.train`: the command line's runs, from Python."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import logging

import proximo
from proximo.cli import main
from proximo.cli.arguments import as_flags
from proximo.config import toml
from proximo.rl import build
from tests.api.settings import small


@pytest.mark.slow("trains a run, and goes on with it")
def test_one_permission_is_enough_for_more_steps(tmp_path: Path, capsys):
    """How often is evaluated is chosen by the steps, and keeps the value that the run began with."""
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(20)]
    small: dict[str, Any] = {"data": rows, "batch": 2, "group_size": 2, "max_tokens": 2, "quiet": True}
    for steps, allowed in ((20, []), (40, ["steps"])):
        run = proximo.train(
            "tiny-arithmetic",
            tmp_path / "run",
            steps=steps,
            allow_change=allowed,
            on_step=lambda step, metrics: True,
            **small,
        )
    config = toml.loads((tmp_path / "run" / "config.toml").read_text(), proximo.RunConfig)
    assert (config.steps, config.evaluation.every) == (40, 2)
    assert [row["step"] for row in run.metrics().to_pylist() if "reward" in row and row["reward"] is not None] == [1, 2]
    with pytest.raises(ValueError, match="seed was 0, now 1") as refused:
        proximo.train("tiny-arithmetic", tmp_path / "run", steps=60, allow_change=["steps"], seed=1, **small)
    assert "evaluation.every" not in str(refused.value)


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Never interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    torch.set_default_dtype(torch.float32)
    proximo.train(small(), folder, quiet=True)
    return folder


@pytest.mark.slow("trains two runs")
def test_it_writes_what_the_command_line_writes(whole: Path, tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(toml.dumps(small()))
    assert main(["train", str(file), "--run", str(tmp_path / "run")]) == 0
    assert metrics(tmp_path / "run") == metrics(whole)
    ours, theirs = (folder / "config.toml" for folder in (whole, tmp_path / "run"))
    assert ours.read_text() == theirs.read_text()


def test_a_run_that_compiles_says_what_the_first_step_waits_for(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr("proximo.api.training.compiles", lambda model: True)
    proximo.train(small(steps=1), tmp_path / "run")
    assert "compiling for this GPU: the first evaluation and the first update take" in capsys.readouterr().err


def test_command_line_and_python_resume_each_others_runs(tmp_path: Path):
    """PPO's value options are written out by both."""
    config = small(algorithm=proximo.PPO, steps=1)
    proximo.train(config, tmp_path / "run", quiet=True)
    file = tmp_path / "run.toml"
    file.write_text(toml.dumps(config))
    assert main(["train", str(file), "--run", str(tmp_path / "run")]) == 0


def test_a_finished_run_returns_its_result_at_once(whole: Path, monkeypatch):
    monkeypatch.setattr(build, "load_model", None)  # no model is loaded
    result = proximo.train(small(), whole, quiet=True)
    assert result.checkpoint == whole / "checkpoints" / "step-000003"
    assert result.result == proximo.open_run(whole).result


# on_step


@pytest.mark.slow("trains a run")
def test_true_ends_a_run_saved_evaluated_and_finished(whole: Path, tmp_path: Path):
    seen: dict[int, dict[str, float]] = {}

    def stop_at_two(step: int, found: dict[str, float]) -> np.bool_:
        seen[step] = found
        return np.float64(step) == 2

    folder = tmp_path / "run"
    result = proximo.train(small(), folder, on_step=stop_at_two, quiet=True)
    rows = {row["step"]: row for row in proximo.open_run(whole).metrics().to_pylist()}
    assert {step: found["outcome"] for step, found in seen.items()} == {step: rows[step]["outcome"] for step in (1, 2)}
    assert result.checkpoint == folder / "checkpoints" / "step-000002"
    assert result.checkpoint.is_dir()
    assert proximo.open_run(folder).state == "finished"
    # The same call is done; the other steps are done where that is asked for, to the same bytes.
    again = proximo.train(small(), folder, on_step=lambda step, found: pytest.fail("it is finished"), quiet=True)
    assert again.result == result.result
    assert proximo.train(small(), folder, allow_change=["steps"], quiet=True).checkpoint.name == "step-000003"
    assert metrics(folder) == metrics(whole)


# Refusals


def test_a_folder_with_another_run_is_refused_as_the_command_line_refuses_it(whole: Path, tmp_path: Path, capsys):
    other = small(seed=7)
    with pytest.raises(ValueError, match="holds a run with another config") as error:
        proximo.train(other, whole, quiet=True)
    file = tmp_path / "run.toml"
    file.write_text(toml.dumps(other))
    with pytest.raises(SystemExit):
        main(["train", str(file), "--run", str(whole)])
    assert "--" not in str(error.value)
    assert "(`allow_change=['seed']`)" in str(error.value)
    assert capsys.readouterr().err.strip() == f"error: {as_flags(str(error.value))}"


def test_a_folder_that_is_not_empty_is_refused_where_nothing_is_resumed(whole: Path):
    with pytest.raises(ValueError, match="is not empty, and resume is False"):
        proximo.train(small(), whole, resume=False)


REFUSED = [
    (lambda: small(model="no/such/folder/here"), "no/such/folder/here"),
    (lambda: small(device="no such device"), "no such device"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_bad_input_is_refused_before_a_model_loads(config, message: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(build, "load_model", None)
    with pytest.raises(ValueError, match=message):
        proximo.train(config(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


# The process


@pytest.mark.slow("trains a run")
def test_the_process_is_left_as_it_was_found(whole: Path, tmp_path: Path, monkeypatch):
    from proximo.system import machine

    before, handler, bars = torch.get_num_threads(), signal.getsignal(signal.SIGTERM), logging.is_progress_bar_enabled()
    inside = []
    monkeypatch.setattr(machine, "machine_for", lambda parameters: machine.Machine(before + 1, True))
    proximo.train(
        small(steps=1), tmp_path / "run", on_step=lambda step, _: inside.append(torch.get_num_threads()), quiet=True
    )
    assert inside == [before + 1]
    assert torch.get_num_threads() == before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert logging.is_progress_bar_enabled() == bars


@pytest.mark.slow("trains a run")
def test_ctrl_c_saves_the_run(whole: Path, tmp_path: Path, signals_are_heard):
    def press(step: int, _: dict[str, float]) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="stopped and saved"):
        proximo.train(small(), tmp_path / "run", on_step=press, quiet=True)
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    proximo.train(small(), tmp_path / "run", quiet=True)
    assert metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.slow("trains a run")
def test_lines_of_progress_unless_quiet(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    proximo.train(small(steps=1), quiet=True)
    assert capsys.readouterr() == ("", "")
    proximo.train(small(steps=1), "mine")
    shown = capsys.readouterr().err
    assert "step 1/1" in shown
    assert shown.index("step 1/1") < shown.index(" after  ") < shown.index("run folder  mine\n")  # as the command ends
    assert "proximo view mine " in shown
    (folder,) = Path("runs").iterdir()  # one name of its own
    assert folder.name.startswith("grpo-")
