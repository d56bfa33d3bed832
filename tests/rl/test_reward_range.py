"""The length penalty is half the distance between what a right and a wrong answer earn, whatever the scale."""

import json
from dataclasses import replace
from statistics import mean

import pyarrow.parquet as pq
import pytest
import torch

from proximo.algorithms import DAPO, GRPO
from proximo.config import toml
from proximo.insight.lens.crediting import advantages_under
from proximo.losses import LinearOverlong, SoftOverlong
from proximo.losses.advantage_inputs import shaped_rewards
from proximo.rewards import ExactMatch, FormatReward, PythonFunction
from proximo.rl.assemble import assemble
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.rl.preflight.calibration import calibrate
from proximo.rl.preflight.estimate import batch_lines
from proximo.rl.progress import ProgressLines
from proximo.rl.reward_config import RewardMix, RewardModel, WeightedRule
from proximo.rl.run import Run
from proximo.rl.train import train_step
from proximo.runs.records import DataCursor
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Arithmetic, Code, Countdown, Echo, File, Gym, Sorting, reward_range
from tests.fixture import assert_close
from tests.rl.preflight.test_calibration import Sums
from tests.rl.test_training import group_of, learner
from tests.steps import config, fixture_step

FUNCTION = "my_rewards.py:score"


def function(wrong: float, right: float) -> File:
    return File("sums.jsonl", reward=PythonFunction(FUNCTION, reward_range=(float(wrong), float(right))))


def unit(task, mix: RewardMix | None = None) -> float:
    return RunConfig(algorithm=GRPO, task=task, rewards=mix or RewardMix()).penalty_unit


# What a unit is


def test_a_unit_is_half_the_distance_from_wrong_to_right():
    assert unit(Arithmetic()) == 0.5
    assert unit(function(-1, 1)) == 1.0  # the paper's
    assert unit(function(0, 10)) == 5.0
    assert unit(Arithmetic(), RewardMix(task=2.0)) == 1.0
    assert unit(function(-1, 1), RewardMix(task=0.5)) == 0.5
    assert unit(File("a.jsonl")) == 0.5


def test_every_task_and_rule_with_a_known_verdict_says_what_it_gives():
    for task in (Arithmetic(), Countdown(), Echo(), Sorting(), Gym("leg_counting"), Code("tests.jsonl")):
        assert reward_range(task) == (0, 1)
    assert reward_range(FormatReward("a")) == reward_range(ExactMatch()) == (0, 1)
    assert reward_range(PythonFunction(FUNCTION)) is None
    assert reward_range(object()) is None


def test_what_is_added_to_the_verdict_comes_to_right_and_wrong_alike():
    rules = (WeightedRule(FormatReward("a"), 3.0),)
    assert unit(Arithmetic(), RewardMix(rules=rules)) == 0.5
    assert unit(Arithmetic(), RewardMix(models=(RewardModel("judge"),))) == 0.5


def test_without_the_verdict_rules_add_up_and_a_models_scale_is_unknown():
    rules = (WeightedRule(ExactMatch(), 3.0), WeightedRule(FormatReward("a"), -1.0))
    assert unit(Arithmetic(), RewardMix(task=0.0, rules=rules)) == 2.0
    unknown = WeightedRule(PythonFunction(FUNCTION))
    assert unit(Arithmetic(), RewardMix(task=0.0, rules=(*rules, unknown))) == 1.0
    assert unit(Arithmetic(), RewardMix(task=0.0, models=(RewardModel("judge"),))) == 1.0


@pytest.mark.parametrize("given", [(1.0, 1.0), (1.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_range_goes_from_wrong_to_right(given: tuple[float, float]):
    with pytest.raises(ValueError, match="reward.reward_range is .*what a wrong answer earns"):
        PythonFunction(FUNCTION, reward_range=given)


def test_a_range_is_kept_with_the_run():
    run = RunConfig(algorithm=GRPO, task=function(0, 10))
    assert toml.loads(toml.dumps(run), RunConfig) == run


# What a penalty then is


@pytest.mark.parametrize(("wrong", "right"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 10.0), (0.0, 2.0)])
def test_a_right_answer_at_the_limit_earns_halfway_between_wrong_and_right(wrong: float, right: float):
    half = (right - wrong) / 2
    lengths = torch.tensor([80, 90, 100, 120])
    penalty = SoftOverlong()(lengths, 100, half)
    assert_close(penalty, [0, -half / 2, -half, -half])
    assert_close(right + penalty[2], (right + wrong) / 2)
    assert right + float(penalty.min()) > wrong
    assert_close(LinearOverlong(0.1)(torch.tensor([90, 103]), 100, half), [0, -0.3 * half])


def test_a_group_that_the_filter_kept_is_not_made_dead():
    """Rewards of 0 and 1; the right answer is at the limit, the wrong one short."""
    algorithm = replace(DAPO, shape=SoftOverlong(limit=4, cache=2))
    assembled = assemble([group_of([1.0, 0.0], [4, 2])], [], learner(algorithm), 8, penalty_unit=0.5)
    assert assembled.batch.rewards.tolist() == [0.5, 0.0]
    assert assembled.batch.outcome.tolist() == [1.0, 0.0]
    assert assembled.dead_rows == 0
    assert assembled.batch.advantages[0, 0] > 0 > assembled.batch.advantages[1, 0]


@pytest.mark.parametrize("keep", [GRPO.keep, DAPO.keep], ids=["trained", "all dropped"])
@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_measures_by_its_own_scale(tmp_path, keep):
    """Rewards of 0 and 1, so a unit of 0.5; of two tokens the second costs one unit."""
    run = RunConfig(
        algorithm=replace(DAPO, keep=keep),
        device="cpu",
        sampling=SamplingOptions(max_tokens=2),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1, refill_rounds=1),
    )
    started = Run(run, tmp_path, ProgressLines())
    started.log.start("")
    train_step(started, 0, DataCursor())
    rows = pq.read_table(tmp_path / "rollouts" / "step-000001.parquet").to_pylist()
    lengths = [len(row["tokens"]) for row in rows]
    assert 2 in lengths
    assert [row["reward"] - row["outcome"] for row in rows] == [-0.5 * (length == 2) for length in lengths]
    assert {row["state"] for row in rows} == {"trained" if keep == GRPO.keep else "dropped"}
    [logged] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert logged["reward"] == pytest.approx(mean(row["reward"] for row in rows))
    assert logged["reward_unshaped"] == pytest.approx(mean(row["outcome"] for row in rows))
    assert logged["length_penalty"] == pytest.approx(-0.5 * lengths.count(2) / len(lengths))


def test_the_lens_measures_by_the_runs_own_scale(tmp_path, monkeypatch):
    asked = []

    def spy(batch, penalties, limit, penalty_unit):
        asked.append(penalty_unit)
        return shaped_rewards(batch, penalties, limit, penalty_unit)

    monkeypatch.setattr("proximo.insight.lens.crediting.shaped_rewards", spy)
    step = fixture_step(tmp_path)
    for run in (config(GRPO), config(GRPO, rewards=RewardMix(task=2.0)), config(GRPO, task=function(0, 10))):
        advantages_under(step, DAPO, run)
        assert set(asked) == {run.penalty_unit}
        asked.clear()
    assert [config(GRPO, task=function(0, 10)).penalty_unit, config(GRPO).penalty_unit] == [5.0, 0.5]


# What a user is told


def test_a_scale_that_has_to_be_guessed_is_said_before_the_run():
    unknown = File("sums.jsonl", reward=PythonFunction(FUNCTION))
    (remark,) = RunConfig(algorithm=DAPO, task=unknown).penalty_remarks
    assert "-1 and 1 are assumed" in remark
    assert dict(batch_lines(RunConfig(algorithm=DAPO, task=unknown)))["length penalty"] == ""  # the remark says it
    assert RunConfig(algorithm=GRPO, task=unknown).penalty_remarks == []
    assert RunConfig(algorithm=DAPO).penalty_remarks == []
    assert dict(batch_lines(RunConfig(algorithm=DAPO)))["length penalty"].startswith("in units of 0.5, half")


class Ranged(Sums):
    reward_range = (0.0, 1.0)


def test_calibration_contradicts_a_declared_range():
    assert calibrate(Ranged(lambda answer, text: float(text == str(answer))), 0) == []
    (remark,) = calibrate(Ranged(lambda answer, text: 10.0 * (text == str(answer))), 0)
    assert "a wrong answer earns 0 and a right one 1, but sum-0: '11' scores 10" in remark
    (remark,) = calibrate(Ranged(lambda answer, text: 1.0 if text == str(answer) else -1.0), 0)
    assert "scores -1" in remark
    # Nobody knows an answer: whatever is scored must lie within.
    assert calibrate(Ranged(lambda answer, text: 0.5, knows=False), 0) == []
    (remark,) = calibrate(Ranged(lambda answer, text: 7.0, knows=False), 0)
    assert "scores 7" in remark
