"""Learning-rate schedules: values by hand, in reinforcement learning and in stages that train on files."""

import math

import pytest

from proximo.algorithms import GRPO
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions, rate_share
from proximo.learner.policy import PlainPolicy
from proximo.runs.config_changes import differences
from proximo.supervised.schedule import FitOptions, Schedule
from tests.learner.test_lora import small


def test_shares_by_hand():
    def shares(schedule, steps: int | None = 8, warmup=2):
        return [rate_share(schedule, index, warmup=warmup, steps=steps) for index in range(-1, 9)]

    assert shares("constant") == [0, 0.5, 1, 1, 1, 1, 1, 1, 1, 1]
    assert shares("constant", steps=None, warmup=0) == [0, *[1] * 9]
    assert shares("linear") == pytest.approx([0, 0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert shares("cosine", steps=4, warmup=0) == pytest.approx([0, 1, quarter, 0.5, 1 - quarter, 0, 0, 0, 0, 0])


def learner(**changes) -> Learner:
    options = LearnerOptions(groups=2, minibatches=1, learning_rate=1.0, **changes)
    return Learner(PlainPolicy(small()), GRPO, options, temperature=1.0, seed=0, value_learning_rate=10.0, steps=6)


def test_a_run_s_rates_fall_over_its_steps_and_values_are_on_their_own_clock():
    trained = learner(learning_rate_schedule="linear", warmup_steps=0)
    assert [trained.set_learning_rate(step) for step in range(6)] == pytest.approx(
        [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    )
    # With two steps of pre-training the policy has four steps, and the value model six.
    found = [trained.set_learning_rate(step, policy_step=step - 2) for step in range(6)]
    assert found == pytest.approx([0, 0, 1, 3 / 4, 2 / 4, 1 / 4])
    assert trained.policy.optimizer.param_groups[1]["lr"] == pytest.approx(10 / 6)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_warm_up_takes_at_most_half_of_a_rate_that_falls():
    found = [learner(learning_rate_schedule="cosine", warmup_steps=20).set_learning_rate(step) for step in range(4)]
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert learner(warmup_steps=20).set_learning_rate(5) == pytest.approx(6 / 20)


@pytest.mark.parametrize(("schedule", "expected"), [("constant", [6, 12, 12, 12]), ("cosine", [6, 12, 12, 6])])
def test_stages_on_files_take_the_same_schedules(schedule, expected):
    options = FitOptions(batch=1, learning_rate=12.0, warmup_steps=2, learning_rate_schedule=schedule)
    found = Schedule(4, options, seed=0)
    assert [found.learning_rate(step) for step in range(4)] == pytest.approx(expected)


def test_a_config_from_before_the_schedules_is_the_same_config():
    for table, was in (("training", "constant"), ("fit", "linear")):
        before = f"[{table}]\nlearning_rate = 1.0\n"
        after = f'{before}learning_rate_schedule = "{was}"\nadam_moments = "float32"\n'
        assert differences(before, after) == {}
        field = f"{table}.learning_rate_schedule"
        assert differences(before, after.replace(was, "cosine")) == {field: f"was '{was}', now 'cosine'"}
