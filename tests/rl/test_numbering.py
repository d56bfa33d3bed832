"""One numbering of steps: n is after n steps, in everything that a run shows or stores."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import GRPO
from proximo.cli import main
from proximo.insight.compare.fairness import first_difference
from proximo.insight.compare.measured import MeasuredRun as Compared
from proximo.insight.compare.plan import RunJob
from proximo.insight.doctor.checkup import check_up
from proximo.insight.folder import RunFolder
from proximo.insight.page.overview import summary
from proximo.insight.report.run_details import gather
from proximo.insight.report.summary import first_and_last
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.checkpoints import CHECKPOINTS, saved
from proximo.runs.options import CheckpointOptions
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.schedule import FitOptions, Schedule
from proximo.system.sealing import HASH, SEALED
from proximo.tasks.arithmetic import Arithmetic

STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str, list[int]]:
    """A run's folder, what it said, and the indices that its sampler drew random numbers by."""
    folder, drawn = tmp_path_factory.mktemp("numbered"), []
    said = []
    with pytest.MonkeyPatch.context() as patch:
        torch.set_default_dtype(torch.float32)
        config = RunConfig(
            algorithm=GRPO,
            task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=4),
            device="cpu",
            sampling=SamplingOptions(max_tokens=6),
            training=TrainingOptions(groups=4, group_size=4, minibatches=1, learning_rate=1e-3, warmup_steps=3),
            evaluation=EvaluationOptions(problems=4, every=2),
            checkpoints=CheckpointOptions(every=1, keep=9),
            steps=STEPS,
        )
        real = EmbeddedSampler.stream

        def stream(self, *given, step, **more):
            drawn.append(step)
            return real(self, *given, step=step, **more)

        patch.setattr(EmbeddedSampler, "stream", stream)
        patch.setattr(ProgressLines, "_say", lambda self, line: said.append(line))
        train(Run(config, folder / "run", ProgressLines()))
        torch.set_default_dtype(torch.float64)
    return folder / "run", "\n".join(said), drawn


def stored(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow("trains and resumes a run")
def test_everything_that_a_run_stores_counts_steps_from_1(trained):
    folder = trained[0]
    rows = stored(folder, "metrics.jsonl")
    assert [row["step"] for row in rows if "held_out/outcome" in row] == [0, 2, 4, 6]
    assert [row["step"] for row in rows if "outcome" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert [row["step"] for row in stored(folder, "timings.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert sorted({row["step"] for row in stored(folder, "ledger.jsonl")}) == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == [
        f"step-{step:06d}.parquet" for step in range(1, STEPS + 1)
    ]
    assert [path.name for path in saved(folder / CHECKPOINTS)] == [f"step-{step:06d}" for step in (6, 5, 4, 3, 2, 1)]


@pytest.mark.slow("trains a run")
def test_a_person_is_told_the_same_numbers(trained):
    said = trained[1]
    assert re.findall(r"(?m)^step (\d+)/6 ", said) == ["1", "2", "3", "4", "5", "6"]
    assert re.findall(r"(?m)^held-out accuracy (before|after step \d+):", said) == [
        "before",
        "after step 2",
        "after step 4",
    ]


@pytest.mark.slow("trains a run")
def test_random_numbers_and_learning_rates_are_by_an_index_from_0(trained):
    """The labels are others, the values are not: −1 is the stream of evaluations, 0 that of the first step."""
    folder, _, drawn = trained
    assert drawn == [-1, 0, 1, -1, 2, 3, -1, 4, 5, -1]
    rates = [row["learning_rate"] for row in stored(folder, "metrics.jsonl") if "learning_rate" in row]
    assert rates[:4] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


@pytest.mark.slow("trains a run")
def test_everything_that_reads_a_run_has_the_same_numbers(trained, capsys):
    folder = trained[0]
    run, facts = RunFolder(folder), gather(RunFolder(folder))
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    assert facts.steps_done == check_up(run).steps == summary(run)["step"] == STEPS
    before, after = first_and_last(facts)
    assert before is not None
    assert before["step"] == 0
    assert after is not None
    assert after["step"] == STEPS
    compared = Compared(RunJob("grpo", run.config), facts)
    assert [point.steps for point in compared.held_out()] == [0, 2, 4, 6]
    outcome = next(row for row in facts.training if row["step"] == 3)["sampled_tokens"]
    assert compared.held_out()[0].tokens == 0
    assert compared.held_out()[-1].tokens == compared.tokens > outcome
    assert first_difference(compared, compared) is None
    shorter = Compared(
        RunJob("grpo", run.config), replace(facts, metrics=[row for row in facts.metrics if row["step"] < 4])
    )
    assert first_difference(compared, shorter) == 4
    assert main(["replay", str(folder), "--step", "1", "--as", "sapo"]) == 0
    assert "step 1 of " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["replay", str(folder), "--step", "0"])
    assert "no rollouts of step 0: there are 1 to 6" in capsys.readouterr().err


@pytest.mark.slow("trains a run")
def test_a_stored_step_is_the_one_that_its_number_says(trained, capsys):
    """Checkpoint n is the policy that step n + 1 began with, to the last bit."""
    folder = trained[0]
    model = str(folder / CHECKPOINTS / "step-000002")
    assert main(["replay", str(folder), "--step", "3", "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["is_policy"] is True
    assert main(["replay", str(folder), "--step", "2", "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["is_policy"] is False


@pytest.mark.slow("trains a run")
def test_a_run_with_the_old_numbers_is_refused(trained, tmp_path, capsys):
    folder = trained[0]
    record = json.loads((folder / "run.json").read_text())
    assert record.pop("format") == 2
    del record[SEALED], record[HASH]
    old = tmp_path / "old"
    old.mkdir()
    (old / "run.json").write_text(json.dumps(record))
    (old / "config.toml").write_text((folder / "config.toml").read_text())
    before = {path: path.read_bytes() for path in old.iterdir()}
    with pytest.raises(SystemExit):
        main(["train", str(folder / "config.toml"), "--run", str(old)])
    assert "has the format 1, with other step numbers; this version reads 2" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in old.iterdir()} == before


def test_a_stage_evaluates_after_the_steps_that_it_names():
    schedule = Schedule(12, FitOptions(batch=2, evaluate_every=4, warmup_steps=2), seed=0)
    assert [step for step in range(1, 7) if schedule.evaluates(step)] == [4, 6]
    assert [schedule.learning_rate(index) for index in range(6)] == pytest.approx(
        [1e-5 * share for share in (1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4)]
    )
