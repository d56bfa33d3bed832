"""Signals: a run ends between two steps, saved, and the same command goes on as if nothing had been."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proximo.algorithms import GRPO
from proximo.config import toml
from proximo.rl import grading
from proximo.rl import run as run_module
from proximo.rl import train as stepping
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.grading import GroupGrader
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.log import RunLog
from proximo.runs.options import CheckpointOptions
from proximo.runs.signals import SIGNALS, Stop, Stopped
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Completion, Problem
from tests.run_processes import Command

SOON = 60.0
"""Seconds that nothing here needs; a bound, not a measure."""


pytestmark = pytest.mark.usefixtures("signals_are_heard")


# The flag


def test_the_first_signal_is_noted_and_taken_at_the_next_check(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        stop.check()
        signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err == "SIGTERM: stopping after this step, Ctrl-C again to stop at once\n"
        with pytest.raises(Stopped) as stopped:
            stop.check()
    assert stopped.value.code == 143
    assert stopped.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_may_be_abandoned_is_left_at_once():
    done = []

    def work() -> None:
        done.append("begun")
        signal.raise_signal(signal.SIGINT)
        done.append("never")

    with Stop() as stop, pytest.raises(Stopped) as stopped, stop.anywhere():
        work()
    assert done == ["begun"]
    assert stopped.value.code == 130


def test_nothing_is_begun_after_a_signal():
    with Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), stop.anywhere():
            pytest.fail("begun")


def test_a_second_interrupt_ends_everything_and_a_second_term_nothing_more():
    with Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped) as stopped:
            stop.check()
    assert stopped.value.code == 143  # the first that came


def test_a_request_that_a_finalizer_swallowed_is_not_lost(monkeypatch):
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: swallowed.append(found.exc_type))

    class Noisy:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with Stop() as stop, pytest.raises(Stopped), stop.anywhere():
        Noisy()
    assert swallowed == [Stopped]


def test_a_wait_is_interrupted():
    sent = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    with Stop() as stop:
        sent.start()
        with pytest.raises(Stopped), stop.anywhere():
            threading.Event().wait(SOON)
    sent.join(SOON)


def test_off_the_main_thread_signals_are_left_alone():
    found = []

    def work() -> None:
        with Stop() as stop:
            found.append(signal.getsignal(signal.SIGTERM))
            with stop.anywhere():
                stop.check()

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(SOON)
    assert found == [before]


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        stop.check()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


# A run, stopped in each of its phases


@pytest.fixture(scope="module")
def settings() -> RunConfig:
    return RunConfig(
        algorithm=GRPO,
        task=Arithmetic(held_out=8),
        model="tiny-arithmetic",
        device="cpu",
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=4, group_size=2, minibatches=2, learning_rate=1e-3),
        evaluation=EvaluationOptions(problems=4, every=2),
        checkpoints=CheckpointOptions(every=100, keep_best=False),
        steps=4,
    )


def run_in(folder: Path, settings: RunConfig, prepare: Callable[[Run], None] = lambda run: None) -> None:
    run = Run(settings, folder, ProgressLines())
    prepare(run)
    train(run)


def left_by(folder: Path) -> dict[str, bytes]:
    files = [folder / "metrics.jsonl", folder / "ledger.jsonl"]
    files += sorted((folder / "rollouts").iterdir())
    files += sorted((folder / "checkpoints" / "step-000004").glob("*.safetensors"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def golden(tmp_path_factory, settings) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("golden")
    torch.set_default_dtype(torch.float32)
    run_in(folder, settings)
    torch.set_default_dtype(torch.float64)
    norms = [json.loads(line).get("gradient_norm") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(norms)  # it learns
    return left_by(folder)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def when(number: int, happens: Callable[[], None]) -> Callable[[], None]:
    """To be called often; the so-manieth time, counted from 0, it happens."""
    calls = iter(range(10**6))

    def call() -> None:
        if next(calls) == number:
            happens()

    return call


def before_call(monkeypatch, owner: object, name: str, call: Callable[[], None]) -> None:
    """Something to be done before each call of a function."""
    whole = getattr(owner, name)

    def wrapped(*arguments, **keywords):
        call()
        return whole(*arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapped)


def in_rollout(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    """In the middle of step 1's decoding."""
    whole, call = run.samplers.training.stream, when(2, happens)

    def stream(requests, options, *, seed, step, version=0):
        for found in whole(requests, options, seed=seed, step=step, version=version):
            if step == 1:
                call()
            yield found

    monkeypatch.setattr(run.samplers.training, "stream", stream)


def in_grading(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    """On the grader's thread, in step 1: 4 groups a step, after 4 held-out problems."""
    before_call(monkeypatch, Arithmetic, "grade", when(4 + 4 + 2, happens))


def in_evaluation(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    """Between steps 1 and 2."""
    before_call(monkeypatch, run_module, "evaluate", when(1, happens))


def in_assembly(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    before_call(monkeypatch, stepping, "assemble", when(1, happens))


def in_first_update(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    """Of step 1's two."""
    before_call(monkeypatch, run.learner, "update", when(2, happens))


def in_second_update(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    before_call(monkeypatch, run.learner, "update", when(3, happens))


def in_log(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    """Before step 1's row is written; row 0 is the evaluation's."""
    before_call(monkeypatch, RunLog, "metrics", when(2, happens))


def in_last_evaluation(monkeypatch, run: Run, happens: Callable[[], None]) -> None:
    before_call(monkeypatch, run_module, "evaluate", when(2, happens))


PHASES = {
    # where the signal comes, and the step whose boundary is saved
    in_rollout: "step-000001",
    in_grading: "step-000001",
    in_assembly: "step-000001",
    in_first_update: "step-000002",
    in_second_update: "step-000002",
    in_log: "step-000002",
    in_evaluation: "step-000002",
    in_last_evaluation: "step-000004",
}


@pytest.mark.slow("stops and resumes runs")
@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.parametrize(("phase", "expected"), PHASES.items(), ids=[phase.__name__ for phase in PHASES])
def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_end(phase, expected, settings, golden, tmp_path):
    asked = signal.SIGINT if phase in (in_rollout, in_second_update) else signal.SIGTERM
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped) as stopped:
        run_in(tmp_path, settings, lambda run: phase(patch, run, lambda: os.kill(os.getpid(), asked)))
    assert stopped.value.code == 128 + asked
    assert saved(tmp_path) == [expected]
    run_in(tmp_path, settings)
    assert left_by(tmp_path) == golden


@pytest.mark.slow("stops and resumes a run")
@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_stopped_before_its_first_step_begins_again(settings, golden, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        before_call(patch, run_module, "evaluate", when(0, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        with pytest.raises(Stopped):
            run_in(tmp_path, settings)
    run_in(tmp_path, settings)
    assert left_by(tmp_path) == golden


@pytest.mark.slow("stops and resumes a run")
@pytest.mark.usefixtures("ordinary_precision")
def test_a_second_interrupt_while_saving_leaves_a_run_that_goes_on(settings, golden, tmp_path):
    from proximo.runs.checkpointer import Checkpointer

    def again(run: Run) -> None:
        in_rollout(patch, run, lambda: os.kill(os.getpid(), signal.SIGINT))
        before_call(patch, Checkpointer, "_write", when(0, lambda: os.kill(os.getpid(), signal.SIGINT)))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, settings, again)
    assert not (tmp_path / "checkpoints").exists() or saved(tmp_path) == []
    run_in(tmp_path, settings)
    assert left_by(tmp_path) == golden


@pytest.mark.slow("trains a run")
@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_on_another_thread_works_and_hears_no_signal(settings, golden, tmp_path):
    before = {each: signal.getsignal(each) for each in SIGNALS}
    thread = threading.Thread(target=run_in, args=(tmp_path, settings))
    thread.start()
    thread.join(SOON)
    assert {each: signal.getsignal(each) for each in SIGNALS} == before
    assert left_by(tmp_path) == golden


# Real processes


def read_until(process: Command, pattern: str) -> str:
    """What it prints up to a line with the pattern."""
    printed = ""
    for line in process.lines():
        printed += line
        if re.search(pattern, line):
            return printed
    pytest.fail(f"{pattern} was never printed:\n{printed}")


@pytest.mark.slow("starts commands")
@pytest.mark.parametrize(("asked", "times", "code"), [("SIGTERM", 1, 143), ("SIGINT", 2, 130)])
def test_a_real_process_ends_with_the_signals_code_and_no_traceback(asked, times, code, settings, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(toml.dumps(replace(settings, steps=100_000)))
    process = Command("train", str(config), "--run", str(tmp_path / "run"), stderr=tmp_path / "log")
    try:
        read_until(process, "step 2/")
        said = ""
        for _ in range(times):
            process.send_signal(getattr(signal, asked))
            said = said or read_until(process, f"{asked}: stopping")  # two that come together would be one
        found, rest = process.wait(), "".join(process.lines())
    finally:
        process.kill()
    assert found == code
    assert "Traceback" not in said + rest
    assert f"--run {tmp_path / 'run'} resumes" in rest or times == 2
    points = [path.name for path in (tmp_path / "run").glob("checkpoints/step-*") if path.name[5:].isdigit()]
    assert len(points) == 1 or times == 2
    for point in points:
        assert load_file(tmp_path / "run" / "checkpoints" / point / "model.safetensors")


# Waiting for grades


class Slow(Arithmetic):
    """A grader that does not return until the test ends."""

    def grade(self, problems, completions):
        begun.set()
        over.wait(SOON)
        return super().grade(problems, completions)


begun, over = threading.Event(), threading.Event()


def wait_for_slow_grades() -> None:
    begun.clear()
    over.clear()
    try:
        with GroupGrader(Slow()) as grader:
            grader.give(0, Problem("sum-7", "1+1=", "2"), (Completion((1,), (0.0,), "2", "stop"),))
            grader.finish()
    finally:
        over.set()


def test_a_long_wait_for_grades_says_what_it_waits_for_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(grading, "REPORT_EVERY", 0.05)
    monkeypatch.setattr(grading, "LONGEST", 0.3)
    with pytest.raises(ValueError, match=r"grading problem 'sum-7' has taken .* without a result"):
        wait_for_slow_grades()
    assert "waiting for the grades of problem 'sum-7' (0 s)" in capsys.readouterr().err


def test_a_signal_ends_the_wait_for_grades():
    begun.clear()

    def ask() -> None:
        begun.wait(SOON)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    with Stop() as stop:
        asking.start()
        with pytest.raises(Stopped), stop.anywhere():
            wait_for_slow_grades()
    asking.join(SOON)


def test_a_terminal_that_is_closed_asks_to_stop():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Stop() as stop, pytest.raises(Stopped) as stopped, stop.anywhere():
        signal.raise_signal(signal.SIGHUP)
    assert (stopped.value.code, stopped.value.signal) == (129, signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
    with Stop() as stop:
        signal.raise_signal(signal.SIGHUP)
        stop.check()
