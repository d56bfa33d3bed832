"""Whole runs whose weights change while completions are sampled."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pyarrow.parquet as parquet
import pytest

from proximo.algorithms import DAPO, GRPO, Algorithm
from proximo.config import toml
from proximo.losses import TokenTruncated
from proximo.rl.async_sampling.in_flight import InFlight
from proximo.rl.config import AheadOptions, EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.preflight.estimate import held_models
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of
from proximo.runs.forking import fork
from proximo.runs.ledger import check_ledger
from proximo.runs.options import CheckpointOptions
from proximo.runs.session import open_session
from proximo.samplers.engines.embedded import EmbeddedEngine
from proximo.samplers.engines.options import Fleet
from proximo.samplers.sampler import SamplingOptions
from proximo.system.lines import JsonLines as Rows
from proximo.tasks.arithmetic import Arithmetic

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")
STEPS = 5


def config(algorithm: Algorithm = GRPO, **changes) -> RunConfig:
    small = RunConfig(
        algorithm=replace(algorithm, correct=TokenTruncated()),
        task=Arithmetic(operations=("+",), digits=1, terms=2, held_out=8),
        device="cpu",
        sampling=SamplingOptions(max_tokens=6),
        sampler=Fleet(engine="embedded", engines=2, probe=4),
        training=TrainingOptions(groups=3, group_size=4, minibatches=1, learning_rate=1e-3, warmup_steps=0),
        ahead=AheadOptions(2, switch="in_flight", window=0.7),
        evaluation=EvaluationOptions(problems=4, every=2),
        checkpoints=CheckpointOptions(every=1, keep=100),
        steps=STEPS,
    )
    return replace(small, **changes)


def trained(settings: RunConfig, folder: Path) -> None:
    train(Run(settings, folder, ProgressLines()))


def assert_whole(folder: Path) -> None:
    """Every draw has ended once or is active, every step has its groups, and none is older than the bound."""
    assert check_ledger(folder).wrong == ()
    rows = list(Rows(folder / "ledger.jsonl"))
    for step in range(1, STEPS + 1):
        assert sum(row["step"] == step and row["state"] == "trained" for row in rows) == 3
        table = parquet.read_table(folder / f"rollouts/step-{step:06}.parquet")
        assert min(table["version"].to_pylist()) >= max(step - 1 - 2, 0)  # one update each
        for tokens, version, versions in zip(
            table["tokens"].to_pylist(),
            table["version"].to_pylist(),
            table["versions"].to_pylist() if "versions" in table.column_names else [[]] * len(table),
            strict=True,
        ):
            assert versions == [] or len(versions) == len(tokens)
            assert versions == sorted(versions)
            assert all(version <= each <= step - 1 for each in versions)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["groups"] for row in metrics if "groups" in row] == [3] * STEPS


@pytest.mark.slow("trains and resumes a run")
@pytest.mark.parametrize("algorithm", [DAPO, pytest.param(GRPO, marks=pytest.mark.scale)])
def test_a_run_and_its_resume_lose_nothing(tmp_path: Path, algorithm: Algorithm):
    settings = config(algorithm)
    trained(settings, tmp_path / "whole")
    assert_whole(tmp_path / "whole")
    points = sorted(saved(tmp_path / "whole" / CHECKPOINTS), key=step_of)
    slots = {step_of(each): json.loads((each / "state/active.json").read_text()) for each in points[:-1]}
    assert {step: len(each) for step, each in slots.items()} == {1: 4, 2: 4, 3: 4, 4: 3}
    assert not (points[-1] / "state/active.json").exists()
    folder = tmp_path / "run"
    ignore = [path.name for path in points if step_of(path) != 2]
    shutil.copytree(tmp_path / "whole", folder, ignore=shutil.ignore_patterns(*ignore, "result.json"))
    trained(settings, folder)
    assert_whole(folder)
    known = {each["ordinal"]: each["group"] for each in slots[2] if each["group"] is not None}
    later = {row["ordinal"]: row for row in Rows(folder / "ledger.jsonl") if row["step"] > 2}
    assert known.keys() <= later.keys()
    for ordinal, group in known.items():  # trained on as they were
        if later[ordinal]["state"] == "trained":
            table = parquet.read_table(folder / f"rollouts/step-{later[ordinal]['step']:06}.parquet")
            tokens = table["tokens"].to_pylist()
            assert all(each["tokens"] in tokens for each in group["rollouts"])
    fork(tmp_path / "whole", tmp_path / "fork", points[1])
    alone = replace(settings, ahead=AheadOptions())
    with (
        open_session(tmp_path / "fork", toml.dumps(alone), allowed=["ahead"]) as attempt,
        pytest.raises(ValueError, match="4 groups that were being sampled, whose prompts would be lost"),
    ):
        train(Run(alone, tmp_path / "fork", ProgressLines()), attempt)


class Slow(EmbeddedEngine):
    """Draws two tokens of the first sample of a group of the first step, and then waits for a pause."""

    waits_for: ClassVar[int | None] = None
    waits: ClassVar[threading.Event] = threading.Event()

    def _decode(self, tokens, options, draw, start):
        if (draw.step, draw.key, draw.sample, start) != (0, self.waits_for, 0, 0):
            return super()._decode(tokens, options, draw, start)
        completion, _ = super()._decode(tokens, replace(options, max_tokens=2), draw, start)
        self.waits.set()
        with self._changed:
            while self._paused is None and not self._stopped:
                self._changed.wait(0.01)
        self._check()
        return completion, True


@pytest.mark.slow("trains and resumes a run")
def test_a_completion_in_flight_continues_after_a_resume_behind_its_tokens(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("proximo.samplers.engines.building.EmbeddedEngine", Slow)
    monkeypatch.setattr(Slow, "waits_for", 4)
    newest = InFlight.newest

    def saved_when_it_waits(self, active, *, interrupt):
        assert Slow.waits.wait(60.0)
        return newest(self, active, interrupt=interrupt)

    monkeypatch.setattr(InFlight, "newest", saved_when_it_waits)
    long = SamplingOptions(temperature=3.0, max_tokens=6)
    settings = config(steps=2, sampling=long, ahead=AheadOptions(1, switch="in_flight"))
    trained(settings, tmp_path / "whole")
    monkeypatch.setattr(Slow, "waits_for", None)
    first, last = sorted(saved(tmp_path / "whole" / CHECKPOINTS), key=step_of)
    [slot] = [each for each in json.loads((first / "state/active.json").read_text()) if each["ordinal"] == 4]
    [begun] = [each for each in slot["begun"] if each["sample"] == 0]
    assert (slot["group"], len(begun["tokens"]), begun["versions"], begun["finish"]) == (None, 2, [0, 0], "abort")
    ignore = shutil.ignore_patterns(last.name, "result.json")
    shutil.copytree(tmp_path / "whole", tmp_path / "run", ignore=ignore)
    trained(settings, tmp_path / "run")
    assert check_ledger(tmp_path / "run").wrong == ()
    rows = parquet.read_table(tmp_path / "run" / "rollouts/step-000002.parquet").to_pylist()
    [row] = [row for row in rows if row["tokens"][:2] == begun["tokens"] and len(row["versions"]) > 2]
    assert row["rollout_logprobs"][:2] == pytest.approx(begun["logprobs"])
    assert (row["version"], row["versions"]) == (0, [0, 0] + [1] * (len(row["tokens"]) - 2))


def test_what_cannot_run_in_flight_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match='ahead.switch is "in_flight", but sampler Embedded cannot take new weights'):
        Run(config(sampler=RunConfig().sampler), tmp_path / "run", ProgressLines())
    with pytest.raises(ValueError, match='training.refill is "same_prompt", but with ahead.switch "in_flight"'):
        config(training=replace(config().training, refill="same_prompt"))
    assert len(held_models(config())) == len(held_models(config(ahead=AheadOptions())))
