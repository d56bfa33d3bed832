"""A run that samples ahead writes the bytes of one whose sampler lags, also when it was killed and resumed."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import DAPO, GRPO, PPO, Algorithm
from proximo.config import toml
from proximo.models.adapters.lora import Lora
from proximo.models.tiny import tiny_moe, tiny_tokenizer
from proximo.rl.async_sampling.one_step_ahead import OneStepAhead
from proximo.rl.config import AheadOptions, Curriculum, EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.preflight.estimate import held_models
from proximo.rl.progress import ProgressLines
from proximo.rl.rollouts import Collector, Synchronous
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of
from proximo.runs.ledger import check_ledger
from proximo.runs.options import CheckpointOptions
from proximo.runs.session import open_session
from proximo.runs.signals import Stopped
from proximo.samplers.mismatched import Mismatched
from proximo.system.lines import JsonLines as Rows
from tests.run_processes import Command
from tests.runs.test_resume import config as small_run

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")
OWN = {"config.toml", "run.json", "timings.jsonl", "timeline.jsonl", "manifest.json", "ahead.json", "ahead.safetensors"}
"""Files that differ between any two runs, and those of a run that samples ahead alone."""


def config(algorithm: Algorithm = GRPO, **changes) -> RunConfig:
    usual = {
        "training": TrainingOptions(groups=3, group_size=4, minibatches=1, learning_rate=1e-3, warmup_steps=0),
        "evaluation": EvaluationOptions(problems=4, every=2),
        "checkpoints": CheckpointOptions(every=2, keep=100),
        "steps": 5,
    }
    return small_run(algorithm, **{**usual, **changes})


def trained(settings: RunConfig, folder: Path, progress: ProgressLines | None = None) -> Run:
    run = Run(settings, folder, progress or ProgressLines())
    train(run)
    return run


def numbers(folder: Path) -> dict[str, object]:
    """Contents of all files, without times and identities, and without the warning about older weights."""
    found: dict[str, object] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in OWN):
        content: object = path.read_bytes()
        if path.name in ("run_state.json", "result.json"):
            content = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("seconds", "run")}
        if path.name == "events.jsonl":
            content = [row for row in Rows(path) if row["kind"] != "stale"]
        if content:
            found[str(path.relative_to(folder))] = content
    return found


def assert_same(found: dict[str, object], wanted: dict[str, object]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


def assert_resumed(folder: Path, whole: Path) -> None:
    """A resumed run has the files of one that was left alone, but for older checkpoints and the events of resuming."""
    found, wanted = numbers(folder), numbers(whole)
    assert [name for name in found if name != "events.jsonl" and found[name] != wanted.get(name)] == []
    assert [name for name in wanted if name not in found and not name.startswith("checkpoints/")] == []
    assert check_ledger(folder).wrong == ()


def assert_equals_lag(settings: RunConfig, staleness: int, tmp_path: Path) -> None:
    trained(replace(settings, sampler=Mismatched(lag=staleness)), tmp_path / "lag")
    trained(replace(settings, ahead=AheadOptions(staleness)), tmp_path / "ahead")
    wanted = numbers(tmp_path / "lag")
    assert_same(numbers(tmp_path / "ahead"), wanted)
    assert sum(name.endswith("sampler.safetensors") for name in wanted) == (3 if staleness else 0)
    assert len(wanted) > 25


CASES = {
    "grpo, 1": (config(), 1),
    "dapo, 2": (config(DAPO), 2),
}
MORE = {
    "grpo, 0": (config(), 0),
    "grpo, 2": (config(), 2),
    "dapo, 1": (config(DAPO), 1),
    "dapo, same prompt": (config(DAPO, training=replace(config().training, refill="same_prompt")), 2),
    "ppo": (config(PPO), 2),
    "more than the run": (config(), 9),
}


@pytest.mark.slow("trains several runs")
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_a_sampler_that_lags(name: str, tmp_path: Path):
    assert_equals_lag(*CASES[name], tmp_path)
    [event] = [row for row in Rows(tmp_path / "ahead/events.jsonl") if row["kind"] == "stale"]
    assert f"ahead.staleness is {CASES[name][1]} and the algorithm has no correction" in event["message"]
    if "dapo" in name:  # there is something to drop, and something that was asked for in vain
        assert {"trained", "filtered"} <= {row["state"] for row in Rows(tmp_path / "ahead/ledger.jsonl")}
        assert any(row.get("unneeded_prompts") for row in Rows(tmp_path / "ahead/metrics.jsonl"))


@pytest.mark.scale
@pytest.mark.parametrize("name", MORE)
def test_more_runs_have_the_bytes_of_a_sampler_that_lags(name: str, tmp_path: Path):
    assert_equals_lag(*MORE[name], tmp_path)


@pytest.mark.scale
def test_of_an_adapter_only_what_is_trained_is_kept(tmp_path: Path):
    settings = config(adapter=Lora(4), steps=3)
    trained(replace(settings, sampler=Mismatched(lag=1)), tmp_path / "lag")
    trained(replace(settings, ahead=AheadOptions(1)), tmp_path / "ahead")
    wanted, found = numbers(tmp_path / "lag"), numbers(tmp_path / "ahead")
    other = [name for name in wanted if found.get(name) != wanted[name]]
    assert {Path(name).name for name in other} == {"sampler.safetensors"}
    sizes = [(tmp_path / kind / other[0]).stat().st_size for kind in ("ahead", "lag")]
    assert sizes[0] < sizes[1] / 2
    folder = left_after(2, tmp_path / "ahead", tmp_path / "run")
    trained(replace(settings, ahead=AheadOptions(1)), folder)
    assert_resumed(folder, tmp_path / "ahead")


# Resume


def left_after(step: int, whole: Path, folder: Path) -> Path:
    """What a run leaves that dies somewhere after this step was saved: logs go on behind it."""
    ignore = [path.name for path in saved(whole / CHECKPOINTS) if step_of(path) != step]
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*ignore, "result.json"))
    return folder


def waiting_for_all(self: OneStepAhead) -> tuple:
    return tuple(order.result.result() for order in self.active)


@pytest.mark.slow("trains and resumes a run")
@pytest.mark.parametrize("graded", [lambda self: (), waiting_for_all], ids=["nothing graded", "all graded"])
def test_a_resumed_run_goes_on_with_what_is_graded_and_samples_the_rest_again(
    graded: Callable, tmp_path: Path, monkeypatch
):
    settings = config(
        DAPO, ahead=AheadOptions(2), training=replace(config().training, refill="same_prompt", curriculum=Curriculum())
    )
    monkeypatch.setattr(OneStepAhead, "graded", graded)
    trained(settings, tmp_path / "whole")
    folder = left_after(2, tmp_path / "whole", tmp_path / "run")
    [point] = saved(folder / CHECKPOINTS)
    known = 0 if graded is not waiting_for_all else 2
    assert (point / "state/ahead.json").exists() == bool(known)
    steps, collect = [], Collector.collect

    def noted(self, cursor, *, step, version):
        steps.append(step)
        return collect(self, cursor, step=step, version=version)

    monkeypatch.setattr(Collector, "collect", noted)
    trained(settings, folder)
    assert steps == list(range(2 + known, 5))
    assert_resumed(folder, tmp_path / "whole")


@pytest.mark.slow("trains and resumes a run")
def test_routes_of_graded_steps_are_saved(tmp_path: Path, monkeypatch):
    """Of a mixture that replays the sampler's choice of experts."""
    tiny_moe(hidden=32, layers=2, heads=2, kv_heads=1, experts=4, chosen=2, intermediate=32).save_pretrained(
        tmp_path / "model"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    settings = config(
        model=str(tmp_path / "model"),
        routing_replay="sampler",
        ahead=AheadOptions(1),
        steps=3,
        evaluation=EvaluationOptions(problems=0),
        checkpoints=CheckpointOptions(every=1, keep=9),
    )
    monkeypatch.setattr(OneStepAhead, "graded", waiting_for_all)
    trained(settings, tmp_path / "whole")
    folder = left_after(1, tmp_path / "whole", tmp_path / "run")
    assert (saved(folder / CHECKPOINTS)[0] / "state/ahead.safetensors").exists()
    trained(settings, folder)
    assert_resumed(folder, tmp_path / "whole")


class StopsAt(ProgressLines):
    """Stops the run with a signal while it trains a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def stepped(self, step, metrics, seconds, collected) -> None:
        if step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow("trains and resumes a run")
@pytest.mark.usefixtures("signals_are_heard")
def test_a_signal_and_an_early_end_save_what_is_active(tmp_path: Path):
    settings = config(ahead=AheadOptions(1), checkpoints=CheckpointOptions(every=100), steps=4)
    run = trained(settings, tmp_path / "whole")
    assert isinstance(run.rollouts, OneStepAhead)
    assert run.rollouts.active == ()
    run = Run(settings, tmp_path / "run", StopsAt(2))
    with pytest.raises(Stopped):
        train(run)
    [point] = saved(tmp_path / "run" / CHECKPOINTS)
    assert step_of(point) == 2
    assert json.loads((point / "state/run_state.json").read_text())["parts"]["sampler"]["versions"] == [1]
    trained(settings, tmp_path / "run")
    shutil.rmtree(point)
    assert_resumed(tmp_path / "run", tmp_path / "whole")
    # A limit on tokens ends the run with steps in flight: they are not in the ledger, and the checkpoint has them.
    trained(replace(settings, max_generated_tokens=1), tmp_path / "short")
    assert {row["step"] for row in Rows(tmp_path / "short/ledger.jsonl")} == {1}
    assert check_ledger(tmp_path / "short").wrong == ()
    with open_session(tmp_path / "short", toml.dumps(settings), allowed=["max_generated_tokens"]) as attempt:
        train(Run(settings, tmp_path / "short", ProgressLines()), attempt)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "short" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow("trains a run")
def test_out_of_memory_while_both_run_is_repeated_alone_and_told(tmp_path: Path, monkeypatch):
    settings = config(ahead=AheadOptions(1), steps=2)
    trained(settings, tmp_path / "whole")
    failed, collect = [], Collector.collect

    def once(self, cursor, *, step, version):
        if step == 1 and not failed:
            failed.append(step)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return collect(self, cursor, step=step, version=version)

    monkeypatch.setattr(Collector, "collect", once)
    trained(settings, tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    [event] = [row for row in Rows(tmp_path / "run/events.jsonl") if row["kind"] == "out_of_memory"]
    assert "was done again alone, with the same result" in event["message"]

    def never(self, cursor, *, step, version):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Collector, "collect", never)
    with pytest.raises(ValueError, match="out of memory .* use a smaller sampling.max_tokens"):
        trained(settings, tmp_path / "never")


@pytest.mark.slow("trains a run")
def test_the_config(tmp_path: Path):
    with pytest.raises(ValueError, match=r"ahead.staleness is -1: give a number of steps"):
        AheadOptions(-1)
    with pytest.raises(ValueError, match=r"ahead.staleness is 1, but sampler Mismatched keeps older weights itself"):
        Run(config(ahead=AheadOptions(1), sampler=Mismatched(lag=1)), tmp_path / "both", ProgressLines())
    assert isinstance(Run(config(), tmp_path / "plain", ProgressLines()).rollouts, Synchronous)
    whole, held = held_models(config())[0].parameters, held_models(config(ahead=AheadOptions(2)))
    assert [each.parameters for each in held[-2:]] == [whole, 3 * whole]
    adapter, held = (
        held_models(config(adapter=Lora(4)))[1].parameters,
        held_models(config(adapter=Lora(4), ahead=AheadOptions(2))),
    )
    assert [each.parameters for each in held[-2:]] == [whole, 3 * adapter]
    assert toml.loads(toml.dumps(config(ahead=AheadOptions(2))), RunConfig).ahead == AheadOptions(2)


# Killed for real


KILLS = 50


@pytest.mark.scale
def test_killed_at_random_moments_nothing_is_lost(tmp_path: Path, small_model: Path):
    """Many SIGKILLs of a run, each at a drawn moment after it has gone on; in the end the run is the one that was left
    alone."""
    settings = config(
        DAPO,
        model=str(small_model / "tiny-arithmetic"),
        ahead=AheadOptions(2),
        steps=4 * KILLS,
        checkpoints=CheckpointOptions(every=1, keep=2),
    )
    (tmp_path / "run.toml").write_text(toml.dumps(settings))

    def start(name: str, number: int = 0) -> Command:
        arguments = ("train", str(tmp_path / "run.toml"), "--run", str(tmp_path / name))
        return Command(*arguments, stderr=tmp_path / f"{name}-{number}.txt")

    began = time.monotonic()
    assert start("whole").wait() == 0, (tmp_path / "whole-0.txt").read_text()
    step = (time.monotonic() - began) / settings.steps  # a fast machine must not reach the end before the last kill
    draws = random.Random(0)
    for number in range(KILLS):
        process, steps = start("run", number), draws.choice([1, 1, 2])
        for line in process.lines():
            steps -= line.startswith("step ")
            if not steps:
                break
        process._process.join(draws.uniform(0.0, 2 * step))
        process.kill()
        process.wait()
    assert start("run", KILLS).wait() == 0, (tmp_path / f"run-{KILLS}.txt").read_text()
    assert len(json.loads((tmp_path / "run/run.json").read_text())["attempts"]) > KILLS // 2
    assert_resumed(tmp_path / "run", tmp_path / "whole")
    assert check_ledger(tmp_path / "run").drawn == check_ledger(tmp_path / "whole").drawn
