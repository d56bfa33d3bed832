"""Numbers that change from step to step: what a schedule gives, which fields can have one, what a run makes of it."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import proximo
from proximo.algorithms import DAPO, GRPO, PPO, SAPO
from proximo.config import toml
from proximo.config.trust.naming import named_code
from proximo.config.trust.permission import OfRun
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.losses.pieces.protocols import GateTraits
from proximo.losses.pieces.shaping import AdaptiveKl, KlReward
from proximo.models import tiny_model
from proximo.rl.assemble import assemble
from proximo.rl.config import AheadOptions, RunConfig, TrainingOptions, load_run, loads_run
from proximo.rl.schedules import (
    Constant,
    Cosine,
    Linear,
    Piecewise,
    PythonSchedule,
    Schedule,
    parsed,
    schedule_of,
    with_schedules,
)
from proximo.rl.step_numbers import StepNumbers, as_logged
from proximo.runs.config_changes import differences, function_fingerprints
from proximo.runs.metric_docs import meaning
from proximo.system.lines import JsonLines as Rows
from tests.distributed.rank_cases import make_groups
from tests.rl.async_sampling.test_running_ahead import assert_equals_lag, assert_resumed, config, left_after, trained

HIGH, TEMPERATURE, RATE = "algorithm.gate.high", "sampling.temperature", "training.learning_rate"


def warm(step: int, steps: int) -> float:
    return 1 + step / steps


# Values


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Constant(0.5), [0.5, 0.5, 0.5, 0.5, 0.5]),
        (Linear(0.0, 2.0), [0.0, 0.5, 1.0, 1.5, 2.0]),
        (Linear(0.0, 2.0, steps=3), [0.0, 1.0, 2.0, 2.0, 2.0]),
        (Linear(1.0, 0.0, steps=9), [1.0, 0.875, 0.75, 0.625, 0.5]),
        (Linear(1.0, 0.0, steps=1), [1.0, 0.0, 0.0, 0.0, 0.0]),
        (Cosine(1.0, 0.0), [1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0]),
        (Cosine(1.0, 3.0, steps=3), [1.0, 2.0, 3.0, 3.0, 3.0]),
        (Piecewise((3.0, 2.0, 1.0), at=(1, 3)), [3.0, 2.0, 2.0, 1.0, 1.0]),
        (PythonSchedule(f"{__name__}:warm"), [1.0, 1.2, 1.4, 1.6, 1.8]),
    ],
)
def test_values_by_hand(schedule: Schedule, values: list[float]):
    assert schedule.values(5) == pytest.approx(values)


numbers = st.floats(-1e6, 1e6)


@given(numbers, numbers, st.integers(2, 40), st.sampled_from([Linear, Cosine]))
def test_a_ramp_begins_and_ends_exactly_and_never_turns(start: float, end: float, steps: int, kind):
    values = kind(start, end).values(steps)
    assert (values[0], values[-1]) == (start, end)
    rises = [later - earlier for earlier, later in pairwise(values)]
    slack = 1e-9 * max(abs(start), abs(end), 1)
    assert all(rise >= -slack for rise in rises) or all(rise <= slack for rise in rises)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30))
def test_a_longer_run_keeps_the_numbers_of_its_first_steps_where_the_length_is_given(length: int, run: int, more: int):
    ramp = Linear(0.0, 1.0, steps=length)
    assert ramp.values(run + more)[:run] == ramp.values(run)


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=20))
def test_a_function_that_no_file_holds_becomes_its_numbers(wanted: list[float]):
    schedule = schedule_of(lambda step, steps: wanted[step], len(wanted))
    assert schedule.values(len(wanted)) == wanted
    assert isinstance(schedule, Piecewise)


# As they are written


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("0.25", Constant(0.25)),
        ("constant:0.25", Constant(0.25)),
        ("linear:0.28:0.2", Linear(0.28, 0.2)),
        ("linear:1:-1e-3:50", Linear(1.0, -1e-3, steps=50)),
        ("cosine:1.0:0.7:10", Cosine(1.0, 0.7, steps=10)),
        ("piecewise:0.3:10:0.2:20:0.1", Piecewise((0.3, 0.2, 0.1), at=(10, 20))),
        ("mine.py:f", PythonSchedule("mine.py:f")),
    ],
)
def test_texts(text: str, schedule: Schedule):
    assert parsed(text) == schedule


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("linear:0.28", "linear:0.28 has 1 numbers: give constant:VALUE"),
        ("linear:a:b", "'a' is no number"),
        ("linear:1:2:2.5", "2.5 is no step"),
        ("linear:1:2:inf", "inf is no step"),
        ("cosine:1:2:nan", "nan is no step"),
        ("piecewise:1:1e400:2", "inf is no step"),
        ("piecewise:1:2", "give a step for each number but the first"),
        ("piecewise:1:3:2:2:1", "each later than the one before"),
        ("constant:inf", "give finite numbers"),
        ("linear:1:2:0", "steps is 0: give at least 1"),
        ("fast", "'fast' is no number, kind of schedule"),
    ],
)
def test_texts_that_are_none(text: str, line: str):
    with pytest.raises(ValueError, match=re.escape(line)):
        parsed(text)


def test_a_file_gives_texts_tables_words_and_names_without_quotes(tmp_path: Path):
    (tmp_path / "run.toml").write_text(
        '[schedules]\nalgorithm.gate.high = "linear:0.28:0.2"\nsampling.temperature = 0.9\n'
        '"algorithm.gate.low" = {type = "Linear", start = 0.2, end = 0.1}\nlearning_rate = "mine.py:f"\n'
    )
    schedules = load_run(str(tmp_path / "run.toml")).schedules
    assert schedules == {
        HIGH: Linear(0.28, 0.2),
        TEMPERATURE: Constant(0.9),
        "algorithm.gate.low": Linear(0.2, 0.1),
        RATE: PythonSchedule(str(tmp_path / "mine.py:f")),
    }


def test_a_config_holds_its_schedules_and_one_without_has_no_line_of_them():
    settings = RunConfig(schedules={HIGH: Linear(0.28, 0.2), TEMPERATURE: Piecewise((1.0, 0.8), at=(3,))})
    assert loads_run(toml.dumps(settings)) == settings
    assert "schedules" not in toml.dumps(RunConfig())
    changes = differences(toml.dumps(RunConfig()), toml.dumps(settings))
    assert changes["schedules.algorithm.gate.high.end"] == "was not given, now 0.2"


def test_what_is_given_in_python_is_added_to_what_the_config_has():
    given_now = {"temperature": "linear:1:0.5", HIGH: 0.3, "algorithm.gate.low": warm}
    schedules = with_schedules(given_now, {HIGH: Constant(0.2), RATE: Constant(1e-5)}, 4)
    assert schedules == {
        HIGH: Constant(0.3),
        RATE: Constant(1e-5),
        TEMPERATURE: Linear(1.0, 0.5),
        "algorithm.gate.low": PythonSchedule(f"{__name__}:warm"),
    }


# Refusals


@pytest.mark.parametrize(
    ("schedules", "line"),
    [
        ({"algorithm.gate.hihg": Constant(1)}, "which this run does not have, perhaps algorithm.gate.high; those that"),
        ({"epsilon_high": Constant(1)}, "schedules has epsilon_high, which here is algorithm.gate.high; those that"),
        ({"init_kl_coef": Constant(1)}, "which here is algorithm.kl.coefficient; those that can"),
        ({"training.group_size": Constant(4)}, "training.group_size, which cannot change in the middle of a run"),
        ({"sampling.max_tokens": Constant(4)}, "cannot change in the middle of a run; those that can: .*temperature"),
        ({"model": Constant(1)}, "model, which cannot change"),
        ({"algorithm.keep.truncated": Constant(1)}, "algorithm.keep.truncated, which cannot change"),
        ({"algorithm.shape.coefficient": Constant(1)}, "which this run does not have"),
        ({HIGH: "linear:1:2"}, "schedules.algorithm.gate.high is 'linear:1:2': give proximo.linear"),
    ],
)
def test_fields_without_a_schedule(schedules, line: str):
    with pytest.raises(ValueError, match=line):
        RunConfig(schedules=schedules)


def test_two_schedules_of_one_learning_rate_are_refused():
    with pytest.raises(ValueError, match="learning_rate_schedule is 'linear': leave one of them out"):
        RunConfig(training=TrainingOptions(learning_rate_schedule="linear"), schedules={RATE: Linear(1e-5, 1e-6)})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            RunConfig(steps=9, schedules={HIGH: Linear(0.2, -0.2)}),
            r"at step 6, with algorithm.gate.high -0.05: gate.low 0.2, gate.high -0.0.*: widths of the clip",
        ),
        (
            RunConfig(steps=3, schedules={TEMPERATURE: Linear(1.0, 0.0)}),
            "at step 3, with sampling.temperature 0: sampling.temperature is 0",
        ),
        (
            RunConfig(steps=20_000, schedules={HIGH: Linear(0.2, 0.1), RATE: Linear(1e-5, 0.0)}),
            r"at step 20000, with algorithm.gate.high 0.1, training.learning_rate 0: training.learning_rate is 0.0",
        ),
        (
            RunConfig(
                steps=4,
                algorithm=replace(PPO, shape=KlReward(0.05, controller=AdaptiveKl())),
                schedules={"algorithm.shape.coefficient": Linear(0.05, 0.01)},
            ),
            "which algorithm.shape.controller moves too: leave one of them out",
        ),
        (
            RunConfig(steps=4, algorithm=DAPO, schedules={"algorithm.shape.limit": Linear(4, 5)}),
            "algorithm.shape.limit takes whole numbers",
        ),
        (
            RunConfig(steps=3, schedules={RATE: Linear(1e308, -1e308)}),
            "is -inf at step 2: give numbers that are nearer",
        ),
        (
            RunConfig(steps=10**12, schedules={TEMPERATURE: Constant(1.0)}),
            "steps is 1000000000000, and schedules need at most 1,000,000",
        ),
    ],
)
def test_values_are_checked_at_the_steps_before_a_run(settings: RunConfig, line: str):
    with pytest.raises(ValueError, match=line):
        StepNumbers(settings).check()


def failing(step: int, steps: int) -> float:
    return [1.0, float("nan")][step]


def leaving(step: int, steps: int) -> float:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("failing", r"failing\(1, 2\) is nan: return a finite number"),
        ("leaving", r"leaving\(0, 2\) failed, SystemExit: 3; give a function"),
        ("none", r"has no function none"),
    ],
)
def test_a_function_without_numbers_is_named(function: str, line: str):
    with pytest.raises(ValueError, match=f"schedules.{TEMPERATURE}: .*{line}"):
        StepNumbers(RunConfig(steps=2, schedules={TEMPERATURE: PythonSchedule(f"{__name__}:{function}")}))


def test_a_function_is_code_that_a_strangers_run_may_not_load(tmp_path: Path):
    """As a reward function is: known by its form, hashed, and asked about before the config is read."""
    (tmp_path / "mine.py").write_text("def f(step, steps):\n    return 1.0\n")
    text = toml.dumps(RunConfig(schedules={TEMPERATURE: PythonSchedule(f"{tmp_path}/mine.py:f")}))
    field = f"schedules.{TEMPERATURE}.path"
    assert [each.field for each in named_code(toml.tomllib.loads(text))] == [field]
    assert list(function_fingerprints(text)) == [field]
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match="which is not loaded, because a run folder may come from anyone"):
        loads_run(text, code=OfRun(run))


def test_reading_a_config_calls_no_function():
    RunConfig(schedules={TEMPERATURE: PythonSchedule("nowhere.py:f")})


# What a step has


def test_a_step_has_its_own_config_and_the_others_stay():
    settings = RunConfig(steps=5, schedules={HIGH: Linear(0.28, 0.2), TEMPERATURE: Linear(1.0, 0.5)})
    numbers = StepNumbers(settings)
    assert numbers.at(4).algorithm.gate == replace(settings.algorithm.gate, high=0.2)
    assert numbers.at(2).algorithm.gate.high == pytest.approx(0.24)  # pyright: ignore
    assert numbers.sampling(4).temperature == numbers.at(4).sampling.temperature == 0.5
    assert settings.algorithm == GRPO
    assert numbers.logged(0) == {f"schedule/{HIGH}": 0.28, f"schedule/{TEMPERATURE}": 1.0}
    assert meaning(f"schedule/{HIGH}") is not None


def test_a_stored_step_has_the_numbers_of_its_row():
    settings = RunConfig(
        steps=3, algorithm=DAPO, schedules={HIGH: Linear(0.3, 0.2), "algorithm.shape.limit": Linear(4, 8)}
    )
    numbers = StepNumbers(settings)
    read = as_logged(settings, numbers.logged(1))
    assert read.algorithm == numbers.at(1).algorithm
    assert as_logged(settings, {f"schedule/{HIGH}": "0.1", "schedule/algorithm.shape.limit": None}) == replace(
        settings, schedules={}
    )
    assert as_logged(RunConfig(), {f"schedule/{HIGH}": 0.1}) == RunConfig()


def test_without_schedules_all_is_as_it_was():
    settings = RunConfig()
    numbers = StepNumbers(settings)
    assert numbers.at(3) is settings
    assert numbers.sampling(3) is settings.sampling
    assert numbers.logged(3) == {}


def test_whole_numbers_stay_whole():
    settings = RunConfig(steps=3, algorithm=DAPO, schedules={"algorithm.shape.limit": Linear(4, 8)})
    assert [StepNumbers(settings).at(step).algorithm.shape.limit for step in range(3)] == [4, 6, 8]  # pyright: ignore


def learner(algorithm=GRPO) -> Learner:
    policy = PlainPolicy(tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16))
    return Learner(policy, algorithm, LearnerOptions(warmup_steps=0), temperature=1.0, seed=0)


@pytest.mark.slow("imports what builds an optimizer, where it is the first")
def test_a_learner_takes_every_number_of_the_step():
    trainer = learner(replace(PPO, extra=replace(PPO.extra, coefficient=0.1)))  # pyright: ignore
    later = replace(PPO, extra=replace(PPO.extra, coefficient=0.5), gate=replace(PPO.gate, high=0.3))  # pyright: ignore
    options = LearnerOptions(warmup_steps=0, learning_rate=3e-5, max_gradient_norm=0.1, skip_spikes=7.0)
    trainer.set_numbers(later, options, temperature=0.5, value_learning_rate=2e-4)
    assert trainer.set_learning_rate(4) == 3e-5
    assert trainer.rates == (3e-5, 2e-4)
    assert trainer.passes.temperature == 0.5
    assert trainer.algorithm is trainer.gradients._algorithm is later
    assert trainer.gradients._critic.loss.coefficient == 0.5  # pyright: ignore[reportOptionalMemberAccess]
    assert trainer.guard.options.max_gradient_norm == 0.1


def test_a_controllers_coefficient_stays_where_another_number_changes():
    algorithm = replace(PPO, shape=KlReward(0.05, controller=AdaptiveKl()))
    trainer = learner(algorithm)
    trainer.adapt_kl(100.0, 10_000)
    moved = trainer.kl_reward.coefficient  # pyright: ignore[reportOptionalMemberAccess]
    trainer.set_numbers(replace(algorithm, gate=SAPO.gate), trainer.options, temperature=1.0)
    assert moved == trainer.kl_reward.coefficient != 0.05  # pyright: ignore[reportOptionalMemberAccess]
    fixed = learner(PPO)
    fixed.set_numbers(replace(PPO, shape=KlReward(0.01)), fixed.options, temperature=1.0)
    assert fixed.kl_reward == KlReward(0.01)


@pytest.mark.slow("computes gradients of a model")
def test_other_processes_take_the_algorithm_with_their_rows():
    """Ranks above 0 build the run's own algorithm, and hear of a step's numbers with the rows of its updates."""
    trainer, other, sent = learner(), learner(), []
    later = replace(GRPO, gate=replace(GRPO.gate, high=0.3))

    def shipped(task, run, passes, update):
        sent.append(update)
        return []

    trainer.policy.map_rows = shipped  # pyright: ignore[reportAttributeAccessIssue]
    trainer.set_numbers(later, trainer.options, temperature=1.0)
    batch = assemble(make_groups(2, seed=0), [], other, 24).batch
    trainer.gradients.of_update(trainer.passes, batch, torch.zeros(len(batch), dtype=torch.bool))
    other.gradients.of_rows(other.passes, sent[0])
    assert other.gradients._algorithm == later


# Whole runs

SCHEDULES = {
    HIGH: Linear(0.28, 0.02),
    TEMPERATURE: Piecewise((1.0, 0.6, 1.3), at=(2, 4)),
    RATE: Cosine(1e-3, 1e-4),
    "algorithm.kl.coefficient": Piecewise((0.5, 0.0, 0.1), at=(1, 3)),
}


@pytest.fixture
def scheduled(small_shipped_model, ordinary_precision) -> RunConfig:
    return config(schedules=SCHEDULES)


@pytest.mark.slow("trains two runs")
def test_a_killed_and_resumed_run_has_the_bytes_of_one_left_alone(scheduled: RunConfig, tmp_path: Path):
    trained(scheduled, tmp_path / "whole")
    folder = left_after(2, tmp_path / "whole", tmp_path / "run")
    trained(scheduled, folder)
    assert_resumed(folder, tmp_path / "whole")
    rows = [row for row in Rows(folder / "metrics.jsonl") if "reward" in row]
    assert [row[f"schedule/{TEMPERATURE}"] for row in rows] == [1.0, 1.0, 0.6, 0.6, 1.3]
    assert [row["learning_rate"] for row in rows] == [row[f"schedule/{RATE}"] for row in rows]
    # The learner reads log-probs at the temperature of the step that was sampled: else they would differ by far.
    assert all(row["mismatch_kl"] < 1e-9 for row in rows)
    entropy = [row["update_entropy"] for row in rows]
    assert max(entropy[2:4]) < min(entropy[0], entropy[4])
    seen = [proximo.open_run(folder).lens(step)[0] for step in (2, 5)]  # under the algorithm of the step
    edges = [GateTraits.read(each.seen.algorithm.gate).band[1] - 1 for each in seen]
    assert edges == pytest.approx([rows[step][f"schedule/{HIGH}"] for step in (1, 4)])
    assert [each.name for each in seen] == ["own", "own"]
    assert [row["kl_loss"] > 0 for row in rows[1:]] == [False, False, True, True]  # none before the first update


@pytest.mark.slow("trains two runs")
def test_steps_that_are_sampled_ahead_have_their_own_temperature(scheduled: RunConfig, tmp_path: Path):
    assert_equals_lag(scheduled, 1, tmp_path)
    other = replace(scheduled, schedules={**SCHEDULES, TEMPERATURE: Constant(1.0)})
    trained(replace(other, ahead=AheadOptions(1)), tmp_path / "other")
    first, second = ((tmp_path / name / "rollouts").glob("*3.parquet") for name in ("ahead", "other"))
    assert next(first).read_bytes() != next(second).read_bytes()
