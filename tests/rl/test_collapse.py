"""Runs that collapse: what ends them, what their result is, and steps that train nothing and so move no weight."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import proximo
from proximo.algorithms import GRPO
from proximo.cli import main
from proximo.config import toml
from proximo.losses import GeometricRejection
from proximo.models.shipped import resolve
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.evaluate import since_best
from proximo.rl.progress import ProgressLines
from proximo.rl.result import RunResult
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of
from proximo.runs.health import HealthMonitor
from proximo.runs.health.drift import EntropyCollapse
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")

TRAINED = str(Path(proximo.__file__).parent / "models" / "weights" / "tiny-arithmetic")
"""The demo's own model, whatever other tests have in its place."""
PEAK = (0.2, 0.3, 0.8, 0.75, 0.3, 0.2)
"""Held-out accuracy after each step of a run that collapses."""


def config(**changes) -> RunConfig:
    small = RunConfig(
        task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=40),
        device="cpu",
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1, learning_rate=1e-4),
        evaluation=EvaluationOptions(problems=40, every=1),
        steps=9,
    )
    return replace(small, **changes)


def trained(settings: RunConfig, folder: Path, held_out=PEAK, watch: HealthMonitor | None = None) -> RunResult:
    """A run whose held-out problems go as they are told."""
    run = Run(settings, folder, ProgressLines())
    run.monitor.health = watch or run.monitor.health
    evaluate = run.evaluate

    def told():
        evaluation, answers = evaluate()
        share = held_out[min(run.learner.version, len(held_out) - 1)]
        right = round(share * len(answers))
        answers = [
            replace(each, grade=replace(each.grade, outcome=float(number < right)))
            for number, each in enumerate(answers)
        ]
        return replace(evaluation, accuracy=share, outcome=share), answers

    run.evaluate = told
    return train(run)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory) -> tuple[Path, RunResult]:
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("runs") / "collapsed"
    return folder, trained(config(stop_on="collapse"), folder)


@pytest.mark.slow("trains a run")
def test_a_run_that_collapses_ends_with_its_best_checkpoint(collapsed):
    folder, result = collapsed
    assert (result.checkpoint.name, result.last and result.last.name) == ("step-000002", "step-000005")
    assert (result.before.accuracy, result.after.accuracy, len(result.examples)) == (0.2, 0.8, 40)
    assert sum(after.outcome for _, after in result.examples) == 32
    assert (
        'as stop_on is "collapse": held-out-fall, held-out task scores were 0.800 at best, after step 2' in result.ended
    )
    assert [step_of(each) for each in saved(folder / CHECKPOINTS)] == [5, 2]  # with default options, every ten steps
    assert resolve(str(folder)) == str(result.checkpoint)
    assert proximo.open_run(folder).result == result
    [event] = [row for row in rows(folder, "events.jsonl") if row["kind"] == "early_end"]
    assert event["message"] == result.ended
    assert [row["step"] for row in rows(folder) if "held_out/outcome" in row] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow("trains runs that collapse")
def test_a_collapsed_run_that_is_called_again_says_why_it_ended(collapsed, capsys):
    folder, result = collapsed
    again = folder.parent / "run.toml"
    again.write_text(toml.dumps(config(stop_on="collapse")))
    assert main(["train", str(again), "--run", str(folder)]) == 0
    said = capsys.readouterr().out
    assert result.ended in said
    assert f"the result is the best checkpoint, step 2; the last is {result.last}" in said
    assert f"the model   {result.checkpoint}\n" in said
    assert main(["train", str(again), "--run", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["steps"], told["checkpoint"], told["ended"]) == (5, str(result.checkpoint), result.ended)
    assert main(["doctor", str(folder)]) == 4
    assert "its result is the best checkpoint, step-000002" in capsys.readouterr().out


@pytest.mark.slow("trains runs that collapse")
def test_what_is_left_of_a_collapsed_run_resumes_to_the_same_end(collapsed, tmp_path: Path):
    folder, result = collapsed
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("step-000005", "result.json"))
    again = trained(config(stop_on="collapse"), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert (again.ended, again.checkpoint.name, again.after) == (result.ended, "step-000002", result.after)


@pytest.mark.slow("trains runs that collapse")
@pytest.mark.parametrize(
    "text",
    ['{"checkpoint": "../../x", "last": "step-000005"}', '{"checkpoint": "step-000009", "last": 1}', "[" * 99, "7"],
)
def test_a_result_that_names_no_checkpoint_of_the_run_is_passed_over(text: str, collapsed, tmp_path: Path):
    shutil.copytree(collapsed[0], tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(text)
    assert resolve(str(tmp_path / "run")).endswith("checkpoints/step-000005")


@pytest.mark.slow("trains runs that collapse")
def test_a_best_checkpoint_that_is_damaged_is_not_used(collapsed, tmp_path: Path):
    shutil.copytree(collapsed[0], tmp_path / "run")
    weights = tmp_path / "run" / CHECKPOINTS / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert resolve(str(tmp_path / "run")).endswith("checkpoints/step-000005")


@pytest.mark.slow("trains a run")
def test_without_stop_on_the_end_says_which_checkpoint_was_better(tmp_path: Path, capsys):
    """The whole run, with its last checkpoint as its result."""
    result = trained(config(steps=5), tmp_path / "run")
    assert (result.checkpoint.name, result.last, result.ended) == ("step-000005", None, "")
    assert str(result.better).startswith("checkpoints/step-000002: held-out 0.800, and the last has 0.200")
    assert resolve(str(tmp_path / "run")) == str(result.checkpoint)
    assert "better_checkpoint" in [row["kind"] for row in rows(tmp_path / "run", "events.jsonl")]
    [finding] = [row for row in rows(tmp_path / "run", "events.jsonl") if row.get("rule") == "held-out-fall"]
    assert finding["message"].endswith("the best: checkpoints/step-000002")
    file = tmp_path / "run.toml"
    file.write_text(toml.dumps(config(steps=5)))
    assert main(["train", str(file), "--run", str(tmp_path / "run")]) == 0
    assert "better than the last: checkpoints/step-000002" in capsys.readouterr().out


@pytest.mark.slow("trains a run")
def test_a_run_that_stays_as_good_as_its_best_is_left_alone(tmp_path: Path):
    result = trained(config(steps=5, stop_on="collapse"), tmp_path, (0.2, 0.3, 0.8, 0.75, 0.78, 0.75))
    assert (result.checkpoint.name, result.ended, result.better) == ("step-000005", "", None)


class CollapsesAtThree(EntropyCollapse):
    def evidence(self, history) -> str | None:
        return "entropy is gone" if history.step >= 3 else None


@pytest.mark.slow("trains a run")
def test_a_collapse_between_evaluations_ends_the_run_at_that_step(tmp_path: Path):
    settings = config(evaluation=EvaluationOptions(problems=40, every=2), stop_on="collapse")
    result = trained(settings, tmp_path / "run", watch=HealthMonitor([CollapsesAtThree()]))
    assert (result.checkpoint.name, result.last and result.last.name) == ("step-000002", "step-000003")
    assert result.ended.endswith("entropy-collapse, entropy is gone")
    assert [row["step"] for row in rows(tmp_path / "run") if "held_out/outcome" in row] == [0, 2, 3]
    soon = config(evaluation=EvaluationOptions(problems=40, every=4), stop_on="collapse")
    result = trained(soon, tmp_path / "soon", watch=HealthMonitor([CollapsesAtThree()]))
    assert (result.checkpoint.name, result.last) == ("step-000003", None)  # nothing was evaluated before


@pytest.mark.slow("trains a run")
def test_updates_that_cannot_be_applied_end_such_a_run_with_its_best_checkpoint(tmp_path: Path):
    broken = replace(config().training, max_skipped=1, skip_spikes=2.0)

    def run_of(settings: RunConfig, folder: Path) -> Run:
        run = Run(settings, folder, ProgressLines())
        parameter = next(iter(run.model.parameters()))
        parameter.register_hook(lambda gradient: gradient * float("nan") if run.learner.version >= 3 else gradient)
        return run

    result = train(run_of(config(training=broken, stop_on="collapse"), tmp_path / "run"))
    assert "1 updates in a row were skipped" in result.ended
    assert result.checkpoint.is_dir()
    with pytest.raises(ValueError, match="1 updates in a row were skipped"):
        train(run_of(config(training=broken), tmp_path / "other"))


def test_stop_on_needs_evaluations_and_the_best_checkpoint(tmp_path: Path):
    for settings in (
        config(stop_on="collapse", evaluation=EvaluationOptions(problems=4)),
        config(stop_on="collapse", checkpoints=replace(config().checkpoints, keep_best=False)),
    ):
        with pytest.raises(ValueError, match="stop_on is .collapse., which ends a run with its best checkpoint"):
            Run(settings, tmp_path, ProgressLines())


@pytest.mark.slow("trains runs that collapse")
def test_a_learning_rate_that_is_much_too_high_is_stopped_at_the_best_checkpoint(tmp_path: Path):
    """Of the demo's sums; nothing is made up."""
    settings = replace(
        ARITHMETIC,
        model=TRAINED,
        training=replace(ARITHMETIC.training, groups=8, learning_rate=3e-4),
        evaluation=EvaluationOptions(problems=60, every=2),
        steps=16,
        stop_on="collapse",
        device="cpu",
    )
    result = train(Run(settings, tmp_path / "run", ProgressLines()))
    held = {row["step"]: row["held_out/outcome"] for row in rows(tmp_path / "run") if "held_out/outcome" in row}
    assert result.ended
    assert step_of(result.checkpoint) == max(held, key=lambda step: held[step])
    assert result.after.outcome == max(held.values())


@pytest.mark.slow("trains runs that collapse")
def test_the_change_since_the_best_is_of_the_same_problems(collapsed):
    _, result = collapsed
    before, after = ([pair[side] for pair in result.examples] for side in (0, 1))
    found = since_best(before, after)
    # 24 of 40 went from wrong to right, the others stayed as they were.
    assert found["held_out/since_best"] == pytest.approx(0.6)
    assert found["held_out/since_best_error"] == pytest.approx((0.6 * 0.4 / 39) ** 0.5)
    assert since_best(before[:1], after) == {}


@pytest.mark.slow("trains a run")
def test_a_run_that_rejects_everything_says_so_and_stays_where_it_is(tmp_path: Path):
    """An older sampler and bounds that no completion keeps, as `rejected` 1.00 went unreported."""
    strict = replace(GRPO, kl=None, correct=GeometricRejection(0.5, 0.6))
    settings = replace(
        ARITHMETIC,
        model=TRAINED,
        algorithm=strict,
        training=replace(ARITHMETIC.training, groups=4, group_size=4, minibatches=1),
        evaluation=EvaluationOptions(problems=0),
        steps=6,
        device="cpu",
    )
    run = Run(settings, tmp_path / "run", ProgressLines())
    before = [each.detach().clone() for each in run.model.parameters()]
    train(run)
    steps = [row for row in rows(tmp_path / "run") if "outcome" in row]
    assert all(row.get("rejected") == 1 or row["dead_rows"] == 1 for row in steps)
    assert {row["gradient_norm"] for row in steps} == {0.0}
    assert all(map(torch.equal, before, run.model.parameters()))
    [finding] = [row for row in rows(tmp_path / "run", "events.jsonl") if row.get("rule") == "nothing-trained"]
    assert "100% of the tokens rejected" in finding["message"]
