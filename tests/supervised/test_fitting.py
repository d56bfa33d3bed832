"""The loop of the stages: its schedule by hand, its steps, and which weights it keeps."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from proximo.models import load_model, tiny_model, tiny_tokenizer
from proximo.models.shipped import resolve
from proximo.runs.checkpoints import saved
from proximo.runs.log import RunLog
from proximo.supervised.fitting import FitOptions, Fitted, Schedule, fit
from proximo.supervised.kept_checkpoints import KeptCheckpoints, is_untrained, remove_later
from proximo.supervised.schedule import fit_length
from proximo.supervised.stage_model import stage_model

OPTIONS = FitOptions(batch=2, learning_rate=0.01, warmup_steps=0, evaluate_every=1)


class Pulled:
    """Pulls one norm's weights to a target per item; held-out losses are told beforehand."""

    def __init__(self, held_out: Sequence[float] = (), targets: Sequence[float] = (0.0, 0.0)) -> None:
        self.model = tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16)
        self.size = len(targets)
        self.weight = self.model.get_parameter("model.norm.weight")
        self.modes, self.seen = [], []
        self._targets, self._held_out = targets, list(held_out)

    def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, float | Tensor]]]:
        self.modes.append(self.model.training)
        for item in items:
            distance = (self.weight - self._targets[item]).square().mean()
            yield distance / len(items), {"count": 1.0, "share": torch.tensor(1 / len(items))}

    def held_out(self) -> dict[str, float]:
        self.modes.append(self.model.training)
        self.seen.append(float(self.weight.detach().mean()))
        return {"loss": self._held_out.pop(0)} if self._held_out else {}


def fitted(stage: Pulled, options: FitOptions, folder: Path, seed: int = 0) -> Fitted:
    log = RunLog(folder)
    log.start("")
    return fit(stage, options, tokenizer=tiny_tokenizer(), log=log, seed=seed, say=lambda line: None)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


# The schedule.


def test_an_epoch_visits_everything_once_in_even_batches():
    schedule = Schedule(10, FitOptions(batch=4, epochs=2.0), seed=0)
    assert (schedule.epoch, schedule.steps) == (3, 6)
    batches = [schedule.items(step) for step in range(6)]
    assert [len(batch) for batch in batches] == [4, 3, 3, 4, 3, 3]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(item for batch in epoch for item in batch) == list(range(10))
    assert batches[:3] != batches[3:]
    assert [schedule.items(step) for step in range(6)] == batches
    assert replace(schedule, seed=1).items(0) != batches[0]


@pytest.mark.parametrize(("epochs", "steps"), [(0.1, 1), (0.5, 2), (1.0, 3), (1.5, 5), (3.0, 9)])
def test_epochs_may_be_parts(epochs: float, steps: int):
    assert Schedule(10, FitOptions(batch=4, epochs=epochs), seed=0).steps == steps


def test_steps_take_the_place_of_epochs():
    schedule = Schedule(10, FitOptions(batch=4, epochs=2.0, steps=7), seed=0)
    assert (schedule.epoch, schedule.steps) == (3, 7)
    assert sorted(item for step in (3, 4, 5) for item in schedule.items(step)) == list(range(10))
    assert [schedule.learning_rate(step) for step in (0, 6)] != [0.0, 0.0]
    assert [step for step in range(1, 8) if schedule.evaluates(step)] == [3, 6, 7]
    options = FitOptions(epochs=2.0, steps=7)
    assert fit_length(options, ["fit.steps", "fit.batch"]) == fit_length(options, []) == options
    assert fit_length(options, ["epochs"]) == FitOptions(epochs=2.0)
    for both in (["epochs", "steps"], ["fit.epochs", "steps"]):
        with pytest.raises(ValueError, match="epochs and steps are both given: give one of them"):
            fit_length(options, both)


def test_learning_rates_by_hand():
    schedule = Schedule(8, FitOptions(batch=1, learning_rate=12.0, warmup_steps=2), seed=0)
    assert [schedule.learning_rate(step) for step in range(8)] == [6, 12, 12, 10, 8, 6, 4, 2]
    # A run shorter than its warm-up still reaches its learning rate.
    schedule = Schedule(4, FitOptions(batch=1, learning_rate=12.0, warmup_steps=10), seed=0)
    assert [schedule.learning_rate(step) for step in range(4)] == [6, 12, 12, 6]
    schedule = Schedule(3, FitOptions(batch=1, learning_rate=12.0, warmup_steps=0), seed=0)
    assert [schedule.learning_rate(step) for step in range(3)] == [12, 8, 4]
    assert Schedule(1, FitOptions(learning_rate=12.0), seed=0).learning_rate(0) == 12


def test_when_it_is_evaluated():
    epochs = Schedule(6, FitOptions(batch=2, epochs=2.5), seed=0)
    assert [step for step in range(1, epochs.steps + 1) if epochs.evaluates(step)] == [3, 6, 8]
    often = Schedule(6, FitOptions(batch=2, epochs=2.5, evaluate_every=4), seed=0)
    assert [step for step in range(1, often.steps + 1) if often.evaluates(step)] == [4, 8]


def test_options_out_of_range():
    whole = {"batch": 0, "steps": 0, "token_budget": 0, "evaluate_every": 0, "patience": 0}
    for field, value in (whole | {"epochs": 0.0, "learning_rate": math.inf, "max_gradient_norm": -1.0}).items():
        with pytest.raises(ValueError, match=f"fit.{field} is {value}: it must be"):
            replace(FitOptions(), **{field: value})
    with pytest.raises(ValueError, match="fit.warmup_steps -1"):
        FitOptions(warmup_steps=-1)


# The steps.


def test_a_step_by_hand(tmp_path: Path):
    """The gradient of a mean square is 2·(1 − target)/16 each; AdamW's first step has the size of its rate."""
    stage = Pulled(targets=(0.0, -1.0))
    result = fitted(stage, OPTIONS, tmp_path)
    # Norm: √(Σ (mean of 2 and 4, over 16)²) = 3/16 · √16, below the bound of 1.
    [row] = rows(tmp_path)
    assert row == {
        "step": 1,
        "loss": pytest.approx((1 + 4) / 2),
        "count": 2.0,
        "share": 1.0,
        "gradient_norm": pytest.approx(0.75),
        "learning_rate": 0.01,
    }
    assert_close(stage.weight.detach(), torch.full((16,), 0.99, dtype=torch.float32), atol=1e-6, rtol=0)
    assert (result.steps, result.best_step, result.before, result.best) == (1, 1, {}, {})
    assert result.checkpoint == tmp_path / "checkpoints" / "step-000001"
    assert "step" in rows(tmp_path, "timings.jsonl")[0]
    assert not (tmp_path / "rollouts").exists()


def test_the_model_trains_while_it_learns_only(tmp_path: Path):
    stage = Pulled([3.0, 2.0])
    fitted(stage, OPTIONS, tmp_path)
    assert stage.modes == [False, True, False]
    assert not stage.model.training


def test_a_loss_that_is_not_finite_is_skipped(tmp_path: Path):
    stage = Pulled(targets=(0.0, math.inf, 0.0, 0.0))
    result = fitted(stage, OPTIONS, tmp_path)
    losses = [row["loss"] for row in rows(tmp_path)]
    assert sorted(loss is None for loss in losses) == [False, True]
    [event] = rows(tmp_path, "events.jsonl")
    assert (event["step"], event["kind"]) == (1 + losses.index(None), "skipped_update")
    assert stage.weight.isfinite().all()
    assert result.steps == 2


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        stage = Pulled([3.0, 2.5, 2.0, 1.0], targets=(0.0, 0.2, 0.5, 0.9, -1.0, -2.0))
        fitted(stage, OPTIONS, tmp_path / name, seed)
    first, second, other = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in "abc")
    assert first == second != other
    assert [row["step"] for row in rows(tmp_path / "a")] == [0, 1, 1, 2, 2, 3, 3]
    assert rows(tmp_path / "a")[0] == {"step": 0, "held_out/loss": 3.0}


# Which weights are kept.


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path):
    log = RunLog(tmp_path)
    log.start("")
    options = replace(OPTIONS, epochs=6.0, save_every=1, evaluate_every=None)
    fitted_to = partial(fit, tokenizer=tiny_tokenizer(), log=log, seed=0, say=lambda line: None)
    whole = fitted_to(Pulled(), options)
    point = tmp_path / "resume" / "step-000004"
    for steps in (3, 4):
        with pytest.raises(ValueError, match=f"the run has {steps} steps now, and 4 are done: give a larger fit.steps"):
            fitted_to(Pulled(), replace(options, steps=steps), point=point)
    before = rows(tmp_path)
    assert (whole.steps, len(before)) == (6, 6)
    more = fitted_to(Pulled(), replace(options, steps=6, epochs=1.0), point=point)
    assert (more.steps, rows(tmp_path)) == (6, before)


def test_it_stops_early_and_keeps_the_best(tmp_path: Path):
    stage = Pulled([3.0, 2.0, 1.0, 1.5, 1.2, 0.5, 0.4], targets=(0.0,) * 12)
    result = fitted(stage, replace(OPTIONS, patience=2), tmp_path)
    assert (result.steps, result.best_step, result.stopped_early) == (4, 2, True)
    assert (result.before, result.best) == ({"loss": 3.0}, {"loss": 1.0})
    assert len(rows(tmp_path)) == 5 + 4
    # The model and the checkpoint hold the weights of the third evaluation, not of the last.
    assert stage.seen[4] < stage.seen[2] < stage.seen[0] == 1.0
    assert float(stage.weight.detach().mean()) == stage.seen[2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    saved = load_model(str(result.checkpoint)).state_dict()
    assert saved.keys() == stage.model.state_dict().keys()
    for name, tensor in stage.model.state_dict().items():
        assert torch.equal(saved[name], tensor), name


def test_patience_begins_anew_with_every_better_loss(tmp_path: Path):
    stage = Pulled([3.0, 3.5, 2.0, 2.5, 1.0, 1.5, 0.5], targets=(0.0,) * 12)
    result = fitted(stage, replace(OPTIONS, patience=2), tmp_path)
    assert (result.steps, result.best_step, result.stopped_early) == (6, 6, False)


def test_training_that_makes_it_worse_keeps_the_model_it_began_with(tmp_path: Path):
    stage = Pulled([1.0, 2.0, math.nan], targets=(0.0,) * 4)
    result = fitted(stage, OPTIONS, tmp_path)
    assert (result.steps, result.best_step, result.best) == (2, 0, {"loss": 1.0})
    assert float(stage.weight.detach().mean()) == 1.0
    assert result.checkpoint.name == "step-000000"


def test_any_number_is_better_than_none(tmp_path: Path):
    result = fitted(Pulled([math.nan, 2.0, math.nan], targets=(0.0,) * 4), OPTIONS, tmp_path)
    assert (result.best_step, result.best) == (1, {"loss": 2.0})


def test_updates_that_are_not_finite_end_a_stage(tmp_path: Path):
    said = []
    log = RunLog(tmp_path)
    log.start("")
    stage, options = Pulled(targets=(math.nan,) * 20), replace(OPTIONS, save_every=1)
    with pytest.raises(ValueError, match="5 updates in a row .*lower fit.learning_rate"):
        fit(stage, options, tokenizer=tiny_tokenizer(), log=log, seed=0, say=said.append)
    assert [line for line in said if "skipped" in line] == [
        f"warning after step {step}: the update was skipped: loss or gradient is not finite; weights untouched"
        for step in range(1, 6)
    ]
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 6))
    # Whoever goes on from the fourth step has four behind it; one that is finite begins the count anew.
    point, again = tmp_path / "resume" / "step-000004", Pulled(targets=(math.nan,) * 20)
    with pytest.raises(ValueError, match="5 updates in a row"):
        fit(again, options, tokenizer=tiny_tokenizer(), log=log, seed=0, say=said.append, point=point)
    assert len(again.modes) == 1
    single = replace(OPTIONS, batch=1)
    bad = {Schedule(16, single, seed=0).items(step)[0] for step in range(0, 16, 2)}
    fitted(Pulled(targets=[math.nan if item in bad else 0.0 for item in range(16)]), single, tmp_path / "few")
    kinds = [row["kind"] for row in rows(tmp_path / "few", "events.jsonl")]
    assert kinds == ["skipped_update"] * 8


def test_a_stage_has_one_checkpoint(tmp_path: Path):
    """That of an attempt before something was changed is not the newest, whatever its number."""
    fitted(Pulled(targets=(0.0,) * 8), OPTIONS, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    result = fitted(Pulled(targets=(0.0,) * 4), OPTIONS, tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [result.checkpoint]
    assert result.checkpoint.name == "step-000002"


def test_patience_needs_held_out_data(tmp_path: Path):
    with pytest.raises(ValueError, match="fit.patience is 2, but no data is held out"):
        fitted(Pulled(), replace(OPTIONS, patience=2), tmp_path)


@pytest.mark.parametrize("where", ["losses", "held_out"])
def test_memory_that_runs_out_is_told_with_a_remedy(where: str, tmp_path: Path, monkeypatch):
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    stage = Pulled()
    monkeypatch.setattr(stage, where, fails)
    with pytest.raises(ValueError, match=r"out of memory \(CUDA .* GiB\): set a smaller fit.token_budget, it is 16384"):
        fitted(stage, OPTIONS, tmp_path / "run")


def test_frozen_weights_stay_as_they_are(tmp_path: Path):
    """Those whose names hold a part are neither trained nor in the optimizer; the others learn."""
    model = tiny_model(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=16)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    held = stage_model(model, replace(OPTIONS, freeze=("layers.0.", "embed")), 0, torch.float32, None)

    class Everything(Pulled):
        def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, float | Tensor]]]:
            yield torch.stack([each.square().sum() for each in model.parameters()]).sum(), {}

    stage = Everything()
    stage.model = model
    log = RunLog(tmp_path)
    log.start("")
    fit(stage, OPTIONS, tokenizer=tiny_tokenizer(), log=log, seed=0, say=lambda line: None, held=held)
    same = {name for name, each in model.named_parameters() if torch.equal(each, before[name])}
    assert same == {name for name in before if ".layers.0." in name or "embed" in name}
    assert same


class Ranked(Pulled):
    """Two held-out metrics that disagree on which weights are best."""

    told: list[tuple[float, float]]

    def held_out(self) -> dict[str, float]:
        loss, accuracy = self.told.pop(0)
        return {"loss": loss, "accuracy": accuracy}


@pytest.mark.parametrize(("metric", "best", "steps"), [("loss", 1, 3), ("accuracy", 2, 4)])
def test_the_best_is_that_of_the_metric_that_is_named(metric: str, best: int, steps: int, tmp_path: Path):
    """A higher accuracy is better, and a lower loss; the same value again is not."""
    stage = Ranked(targets=(0.0,) * 8)
    stage.told = [(3.0, 0.5), (1.0, 0.5), (2.0, 0.75), (2.0, 0.75), (2.5, 0.5)]
    result = fitted(stage, replace(OPTIONS, metric=metric, patience=2), tmp_path)
    assert (result.best_step, result.steps) == (best, steps)
    assert result.checkpoint.name == f"step-{best:06d}"


def test_checkpoints_on_the_way_are_kept_beside_the_best(tmp_path: Path):
    """Of steps 2, 4, 6 and 7 the two newest stay, and step 1, which was the best, is the result."""
    held_out = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]

    def run(folder: Path, kept: KeptCheckpoints | None) -> Fitted:
        log = RunLog(folder)
        log.start("")
        stage = Pulled(held_out, targets=(0.0,) * 14)
        return fit(stage, OPTIONS, tokenizer=tiny_tokenizer(), log=log, seed=0, say=lambda line: None, kept=kept)

    plain, result = run(tmp_path / "plain", None), run(tmp_path / "kept", KeptCheckpoints(every=2, keep=2))
    names = [path.name for path in saved(tmp_path / "kept" / "checkpoints")]
    assert names == ["step-000007", "step-000006", "step-000001"]
    assert (result.checkpoint.name, result.last and result.last.name) == ("step-000001", "step-000007")
    assert Fitted.from_dict(result.to_dict(), tmp_path / "kept") == result
    assert (plain.last, "last" in plain.to_dict()) == (None, False)
    # Nothing else depends on them.
    for name in ("metrics.jsonl", "checkpoints/step-000001/model.safetensors"):
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    models = [load_model(str(tmp_path / "kept" / "checkpoints" / name)) for name in names]
    means = [float(model.get_parameter("model.norm.weight").detach().mean()) for model in models]
    assert means == sorted(means)  # each step pulls them down
    # A run's folder is its result, and an attempt that begins anew leaves none of later steps.
    (tmp_path / "kept" / "result.json").write_text(json.dumps(result.to_dict()))
    assert resolve(str(tmp_path / "kept")) == str(result.checkpoint)
    remove_later(tmp_path / "kept", 6)
    assert [path.name for path in saved(tmp_path / "kept" / "checkpoints")] == names[1:]
    with pytest.raises(ValueError, match="checkpoints.every is 0"):
        KeptCheckpoints(every=0)


@pytest.mark.parametrize(
    ("result", "untrained"),
    [
        ('{"best_step": 0, "before": {"loss": 1.0}, "checkpoint": "step-000000"}', True),
        ('{"best_step": 3, "before": {"loss": 1.0}, "checkpoint": "step-000003"}', False),
        ('{"best_step": 0, "before": {}, "checkpoint": "step-000003"}', False),  # nothing is held out
        ('{"after": {}}', False),  # a run of train
        ("[1]", False),
        ("{", False),
    ],
)
def test_whether_a_stage_kept_what_it_began_with_is_read_from_its_result(result: str, untrained: bool, tmp_path):
    (tmp_path / "result.json").write_text(result)
    checkpoints = tmp_path / "checkpoints"
    assert is_untrained(str(tmp_path)) is untrained
    assert is_untrained(str(checkpoints / "step-000000")) is untrained
    assert not is_untrained(str(checkpoints / "step-000009"))  # one that was kept on the way
    assert not is_untrained("a/hub-model")
