"""Rules over metrics: each has a run that it must find and one near it that it must not; what a monitor promises."""

import json
import math
import re
import runpy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from proximo.algorithms import GRPO, PPO, SAPO
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.values import TrunkHead
from proximo.rewards import ExactMatch
from proximo.rewards.grading import Grading
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.metrics import group_metrics, rollout_metrics, turn_metrics
from proximo.rl.monitor import Monitor
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.health import RULES, HealthMonitor, findings, monitored
from proximo.runs.health.gains import HeldOutFall
from proximo.runs.health.history import History
from proximo.runs.health.reward_signal import ColdStart, DeadGroups, NoReward
from proximo.runs.health.updates import WeakValueModel
from proximo.runs.log import RunLog
from proximo.runs.metric_docs import MEANINGS, meaning
from proximo.runs.options import CheckpointOptions
from proximo.runs.records import Collected, DataCursor
from proximo.samplers.sampler import SamplingOptions
from proximo.system.lines import JsonLines
from proximo.tasks import File
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import MALFORMED, Completion, Grade, Group, Problem, Rollout, Turn
from tests import ROOT

Column = float | None | Callable[[int], float]

HEALTHY: dict[str, Column] = {
    "outcome": 0.5,
    "reward": 0.5,
    "reward_spread": 0.3,
    "completions": 256,
    "unscored": 0,
    "length": 100.0,
    "truncated": 0.02,
    "dead_groups": 0.3,
    "dead_solved": 0.2,
    "dead_rows": 0.3,
    "wasted_tokens": 0.0,
    "solved_by_all": 0.2,
    "solved_by_any": 0.9,
    "duplicates_unsolved": 0.1,
    "entropy": 0.4,
    "gate": 0.98,
    "clip_low": 0.01,
    "clip_high": 0.01,
    "reference_kl": 5.0,
    "mismatch_kl": 1e-7,
    "mismatch_ess": 1.0,
}
"""A step of a run that goes well."""


def run_of(steps: int, **changes: Column) -> list[dict[str, Any]]:
    """Rows of a run: constants, or functions of the step; None leaves a metric out."""
    columns = HEALTHY | {name.replace("__", "/"): column for name, column in changes.items()}
    return [
        {"step": step}
        | {name: each(step) if callable(each) else each for name, each in columns.items() if each is not None}
        for step in range(steps)
    ]


def held_out(step: int, outcome: float, problems: int = 1000) -> dict[str, Any]:
    return {"step": step, "held_out/outcome": outcome, "held_out/problems": problems, "held_out/unscored": 0}


def from_step(first: int, then: float, before: float) -> Callable[[int], float]:
    return lambda step: then if step >= first else before


def wobbling(value: float, size: float = 0.02) -> Callable[[int], float]:
    """A curve that goes nowhere."""
    return lambda step: value + size * math.sin(2.4 * step)


STUCK = {"dead_groups": 0.7, "dead_solved": 0.1, "dead_rows": 0.7}
NOTHING = {"outcome": 0.0, "reward": 0.0, "reward_spread": 0.0, "solved_by_any": 0.0, "solved_by_all": 0.0}
COLLAPSED = {"entropy": from_step(20, 0.1, 0.4), "solved_by_any": 0.85, "outcome": wobbling(0.5)}
SUDDEN = {"entropy": from_step(1, 0.0195, 0.4), "solved_by_any": 0.2, "outcome": from_step(1, 0.0, 0.5)}
RISING = {"entropy": from_step(20, 1.2, 0.4), "outcome": wobbling(0.5)}
LONG = {"length": from_step(20, 210.0, 100.0), "truncated": from_step(20, 0.25, 0.02)}
FAR = {"reference_kl": lambda step: 4.0 * step}
BEHIND = {"mismatch_kl": 1.2e-3, "mismatch_ess": 0.9}
SATURATED = {"gate": 0.4, "clip_high": 0.5, "clip_low": 0.1, "outcome": wobbling(0.5)}
PARTS = {
    "rewards__task": wobbling(0.5),
    "outcome": wobbling(0.5),
    "rewards__format": lambda step: 0.011 * step,
    "reward": lambda step: 0.5 + 0.01 * step,
}
LEARNING = {"outcome": lambda step: 0.3 + 0.01 * step}
"""Where that is so, much can be forgiven."""
STYLE = {"rewards__style": lambda step: 0.0008 * step}
REPEATED = {"duplicates_unsolved": 0.97, "solved_by_all": 0.75}
BROKEN_CALLS = {"malformed_calls": from_step(20, 0.8, 0.05), "failed_calls": from_step(20, 0.95, 0.2)}
SCORES: dict[str, Column] = {"outcome": 5.0, "reward": 5.0}
SCORES |= dict.fromkeys(("solved_by_all", "solved_by_any", "dead_solved", "duplicates_unsolved"))
"""Of a reward model, on prompts without a verdict: 5 is not solved."""
ONE_SIBLING = NOTHING | {"reward_p10": 0.0, "reward_p90": 0.0}
ONE_AND_PARTS = {"reward_spread": 0.0, "reward_p10": 0.4, "reward_p90": 0.7}
WEAK = {"baseline_error__value": 0.25, "baseline_error__group": 0.2}

GROWING = {"stale_gap": from_step(30, 4e-3, 1e-3)}
SLOW = {"pace": 0.4, "slowest": 3.0, "slowest_is_rank": 0.0}

LOST: dict[str, Column] = {"groups": 16, "lost_groups": 2, "longer_lost": wobbling(0.5), "easier_lost": 0.0}

TRAINED = {"rejected": 0.9, "gradient_norm": 0.01}
SOLVED_LATER = {name: from_step(6, 0.7, 0.2) for name in ("dead_groups", "dead_solved", "dead_rows")}
OF_VALUES = "squared error of the value model is 0.25, that of the group mean 0.2"

CASES = [
    # rule, the run that shows it, at which step, what is said; what is else in a run near it
    ("no-reward", NOTHING, 9, "the task score of all 2560 is 0", {"outcome": from_step(9, 1 / 256, 0.0)}),
    ("no-reward", NOTHING | {"outcome": -1.0}, 9, "2560 is -1", {"solved_by_any": from_step(9, 0.03, 0.0)}),
    ("no-reward", NOTHING, 9, "above 0", {"reward_spread": 0.2}),
    ("no-reward", ONE_SIBLING, 9, "above 0", {"reward": lambda step: 0.01 * step}),
    ("no-reward", ONE_SIBLING, 9, "above 0", {"reward_p90": 0.1}),
    ("no-reward", NOTHING, 9, "above 0", {"outcome": from_step(5, 0.0, -4.0)}),  # a distance that is gone
    ("dead-groups", STUCK, 9, "60% of the samples were in no-signal groups", {"dead_solved": 0.25}),
    ("dead-groups", STUCK | {"dead_rows": 0.0, "wasted_tokens": 0.7}, 9, "another 10%", {"wasted_tokens": 0.0}),
    (
        "dead-groups",
        STUCK | {"solved_by_any": 0.0},
        9,
        "(no task score reaches 1 in 100% of the groups)",
        {"dead_rows": 0},
    ),
    (
        "dead-groups",
        SCORES | {"dead_groups": 1.0, "dead_rows": 1.0},
        9,
        "within a group were equal",
        {"dead_rows": 0.4},
    ),
    ("too-easy", STUCK | {"dead_solved": 0.7}, 9, "70% of the samples of the first 10 steps", SOLVED_LATER),
    ("unscored", {"unscored": 13}, 2, "39 of the 768 completions", {"unscored": 12}),
    ("loops", {"repeated_turns": 0.6}, 9, "60% of the later replies say the same", {"repeated_turns": 0.45}),
    (
        "tools-unused",
        {"calls": 0.0},
        9,
        "no completion of the last 10 steps called",
        {"calls": from_step(9, 0.01, 0.0)},
    ),
    ("tools-unused", {"calls": 0.0}, 9, "called a tool", {"calls": None}),
    ("tools-fail", {"failed_calls": 0.95}, 9, "95% of the calls failed", {"failed_calls": 0.85}),
    ("format-collapse", BROKEN_CALLS, 25, "80% of the calls could not be read, 5% in", {"malformed_calls": 0.4}),
    ("duplicates", REPEATED, 9, "97% of the pairs of completions", {"solved_by_all": 0.85}),
    ("duplicates", REPEATED, 9, "the 25% of the groups", {"duplicates_unsolved": 0.88}),
    ("duplicates", SCORES | {"duplicates": 0.97}, 9, "in a group are identical", {"duplicates": 0.88}),
    ("entropy-collapse", COLLAPSED, 25, "0.4 nats a token in the first 10 steps and is 0.1", {"solved_by_any": 0.95}),
    ("entropy-collapse", COLLAPSED, 25, "only 85% of the prompts have a right one", LEARNING),
    ("entropy-collapse", COLLAPSED | {"entropy": from_step(20, 0.13, 0.4)}, 25, "and is 0.13", LEARNING),
    ("entropy-collapse", COLLAPSED | {"outcome": 0.0}, 25, "", {"reward": lambda step: 0.01 * step}),
    ("entropy-collapse", COLLAPSED, 25, "", {"entropy": from_step(20, 0.14, 0.4)}),
    ("entropy-collapse", COLLAPSED | {"solved_by_any": None}, 25, "while rewards do not rise", {"solved_by_any": 0.9}),
    ("sudden-collapse", SUDDEN, 2, "entropy was 0.4 nats a token at step 1 and is 0.0195", {"solved_by_any": 0.95}),
    ("sudden-collapse", SUDDEN, 2, "the task score went from 0.5 to 0", {"entropy": from_step(1, 0.03, 0.4)}),
    ("sudden-collapse", SUDDEN, 2, "", {"outcome": from_step(1, 0.6, 0.5)}),
    ("entropy-rise", RISING, 25, "0.4 nats a token in the first 10 steps and is 1.2", {"entropy": wobbling(0.8, 0.3)}),
    ("entropy-rise", RISING, 25, "task scores do not rise", LEARNING),
    ("nothing-trained", {"rejected": 1.0, "gradient_norm": 0.0}, 4, "100% of the tokens rejected", TRAINED),
    ("nothing-trained", {"masked": 0.97}, 4, "in 5 of 5 steps nothing was trained; the last: 97%", {"masked": 0.6}),
    ("nothing-trained", {"gradient_norm_max": 0.0}, 4, "the gradient was 0", {"gradient_norm_max": 1e-7}),
    ("nothing-trained", {"gradient_norm": 0.0}, 4, "", {"learning_rate": 0.0}),  # values alone are trained
    ("nothing-trained", {"gradient_norm": 0.0}, 4, "", {"dead_rows": 1.0, "dead_groups": 1.0, "dead_solved": 1.0}),
    ("nothing-trained", {"rejected": lambda step: float(step % 3 > 0)}, 4, "in 3 of 5", {"rejected": 0.0}),
    ("selection", LOST | {"expired_groups": 2}, 9, "11% of the groups were given up as they took", {"lost_groups": 0}),
    ("selection", LOST, 9, "tokens as a share of those kept is +0.50 ±", {"longer_lost": wobbling(0.0, 0.5)}),
    ("selection", LOST | {"longer_lost": 0.0, "easier_lost": -0.3}, 9, "task score is -0.30", {"easier_lost": -0.05}),
    ("huge-update", {"old_kl": from_step(1, 1.2, 0.01)}, 1, "moved the policy 1.2 nats a token", {"old_kl": 0.9}),
    ("length-explosion", LONG, 25, "100 tokens in the first 10 steps and have 210", {"truncated": 0.17}),
    ("length-explosion", LONG, 25, "25% are cut", {"length": from_step(20, 190.0, 100.0)}),
    ("truncation", {"truncated": 0.25}, 19, "25% of the completions", {"truncated": 0.17}),
    ("truncation", {"truncated": 0.25}, 19, "", {"truncated": lambda step: 0.9 * (step % 3 == 0)}),
    ("kl-runaway", FAR, 30, "nats a token from its reference", {"reference_kl": lambda step: min(4.0 * step, 90.0)}),
    ("sampler-gap", BEHIND, 9, "0.0012 nats a token", {"correction": 1.0}),
    ("sampler-gap", BEHIND, 9, "", {"mismatch_kl": 8e-4}),
    ("sampler-gap", BEHIND, 9, "uncorrected", {"mismatch_kl": lambda step: 0.1 * (step % 4 == 0)}),
    ("sampler-gap", BEHIND | {"correction": 1.0, "mismatch_ess": 0.4}, 9, "sample size is 40%", {"mismatch_ess": 0.6}),
    ("clip-saturation", SATURATED, 19, "60% of the gradient (50% of the tokens clipped above, 10% below)", LEARNING),
    ("clip-saturation", SATURATED, 19, "task scores do not rise", {"gate": 0.6}),
    ("weak-value-model", WEAK, 39, OF_VALUES, {"baseline_error__value": from_step(20, 0.225, 0.9)}),
    ("one-reward-part", PARTS, 23, "format made 100%", LEARNING),
    ("one-reward-part", PARTS | STYLE, 23, "format made 93%", {"rewards__style": lambda step: 0.002 * step}),
    ("one-reward-part", PARTS | {"solved_by_all": 0.85}, 23, "task score went from 0.5", {"solved_by_all": 0.92}),
    ("one-reward-part", PARTS | ONE_AND_PARTS, 23, "format made 100%", {"reward_p90": 1.5}),
    ("one-reward-part", PARTS, 23, "", {"rewards__format": lambda step: 0.001 * step}),
    (
        "growing-gap",
        GROWING,
        35,
        "0.004 nats a token from the learner; 20 steps before it was 0.001",
        {"stale_gap": 4e-3},
    ),
    ("growing-gap", GROWING, 35, "", {"stale_gap": from_step(20, 8e-4, 1e-4)}),
    ("idle-learner", {"learner_idle": 0.7}, 9, "waited for rollouts 70% of the time", {"learner_idle": 0.5}),
    ("idle-engines", {"engines_idle": 0.7}, 9, "no request 70% of the time", {"engines_idle": 0.5}),
    ("slow-push", {"push_share": 0.3}, 9, "took 30% of the time", {"push_share": from_step(1, 0.1, 0.9)}),
    ("straggler", SLOW, 9, "engine-3 was the slowest in 10 of 10 steps and sampled at 40%", {"pace": 0.6}),
    ("straggler", SLOW, 9, "", {"slowest": lambda step: step % 2}),
    ("straggler", SLOW | {"slowest_is_rank": 1.0}, 9, "rank 3 was", {"pace": None}),
]


@pytest.mark.slow("makes a run of every rule")
@pytest.mark.parametrize(("rule", "sick", "step", "said", "changes"), CASES)
def test_a_rule_finds_its_run_and_not_the_one_beside_it(rule, sick, step, said, changes):
    found = [each for each in findings(run_of(50, **sick)) if each.rule != "cold-start"]
    assert [(each.rule, each.step) for each in found] == [(rule, step)]
    assert said in found[0].message
    assert rule not in [each.rule for each in findings(run_of(50, **sick | changes))]


def test_every_rule_has_its_runs():
    assert {case[0] for case in CASES} | {"held-out-flat", "held-out-fall", "cold-start"} == {
        rule.name for rule in RULES
    }
    assert len({rule.name for rule in RULES}) == len(RULES)


CUT = {"truncated": 0.97, "outcome": 0.1}
ZERO = NOTHING | {"outcome": 0.01, "reward": 0.01, "solved_by_any": 0.1, "reward_spread": 0.1}


@pytest.mark.parametrize(
    ("sick", "before", "said", "changes"),
    [
        (NOTHING, None, "none of the first 256 completions has a task score above 0, and 2% are cut", {"outcome": 0.1}),
        (
            NOTHING,
            0.0,
            "2% are cut at the limit; held-out task scores were 0 before training (1000 problems)",
            ZERO | CUT,
        ),
        (NOTHING | {"outcome": -1.0}, None, "none of the first 256", {"reward_spread": 0.2}),
        (
            CUT,
            None,
            "97% of the first 256 completions are cut at the limit; their mean task score: 0.1",
            {"outcome": 0.6},
        ),
        (CUT, 0.2, "held-out task scores were 0.2 before training", {"truncated": 0.9}),
        (ZERO, 0.0, "the mean task score of the first 256 completions is 0.01; held-out", {"outcome": 0.05}),
        (NOTHING, None, "none of the first", {"completions": 6}),
        (NOTHING, None, "none of the first", {"outcome": from_step(0, math.nan, math.nan)}),
    ],
)
def test_a_run_that_begins_with_nothing_right_or_nothing_ended_is_told_how_to_ask(sick, before, said, changes):
    first = [] if before is None else [held_out(-1, before)]

    def found(columns: dict[str, Column]) -> list[tuple[int, str]]:
        rows = [*first, *run_of(5, **columns)]
        return [(each.step, each.message) for each in findings(rows) if each.rule == "cold-start"]

    [(step, message)] = found(sick)
    assert step == 0
    assert said in message
    near = found(sick | changes)
    assert not near or said not in near[0][1]


def test_what_begins_later_is_no_cold_start():
    rows = [held_out(-1, 0.0), *run_of(12, **HEALTHY | {"truncated": from_step(9, 1.0, 0.0)})]
    assert [each.rule for each in findings(rows)] == []
    monitor = monitored(run_of(12, **NOTHING))
    assert [each.rule for each in monitor.standing()] == ["no-reward"]
    assert [(active.finding.rule, active.is_over) for active in monitor.findings][:1] == [("cold-start", True)]


def test_held_out_that_stays_where_training_rises():
    rising = run_of(60, outcome=lambda step: 0.3 + 0.01 * step, reward=lambda step: 0.3 + 0.01 * step)

    def told(before: float, after: float, problems: int = 1000) -> list[str]:
        rows = [held_out(-1, before), *rising, held_out(60, after, problems)]
        return [each.rule for each in findings(rows)]

    rows = [held_out(-1, 0.3), *rising, held_out(60, 0.31)]
    [found] = findings(rows)
    assert (found.rule, found.step, found.show) == ("held-out-flat", 59, "best")
    assert (
        "from step 0 to 60 training task scores went 0.345 → 0.845, held-out task scores 0.300 → 0.310" in found.message
    )
    assert "accurate to ±0.03" in found.message
    assert told(0.3, 0.34) == []  # that is more than chance
    assert told(0.98, 0.98) == []  # there is no room above
    assert told(0.3, 0.31, problems=20) == []  # 20 problems could have hidden it
    steeper = run_of(60, outcome=lambda step: 0.3 + 0.0025 * step), run_of(60, outcome=lambda step: 0.3 + 0.0017 * step)
    many = [[held_out(-1, 0.3), *rows, held_out(60, 0.3, 10000)] for rows in steeper]
    assert [len(findings(rows)) for rows in many] == [1, 0]  # by 0.125 and 0.085
    soon = [[held_out(-1, 0.3), *rising[:steps], held_out(steps, 0.3)] for steps in (30, 29)]
    assert [len(findings(rows)) for rows in soon] == [1, 0]
    # From the evaluation after step 30 on, nothing came of it; before that, it did.
    midway = [held_out(-1, 0.3), *rising[:30], held_out(29, 0.6), *rising[30:], held_out(60, 0.61)]
    assert "from step 30 to 60" in findings(midway)[0].message


def fallen(*outcomes: float, problems: int = 600, error: float | None = None) -> list[str]:
    """What is said of a run that is evaluated every ten steps with these outcomes."""
    paired = {} if error is None else {"held_out/since_best_error": error}
    rows = [held_out(0, outcomes[0], problems)]
    for number, outcome in enumerate(outcomes[1:], 1):
        steps = [row | {"step": 10 * number - 9 + row["step"]} for row in run_of(10, outcome=wobbling(0.35))]
        rows += [*steps, held_out(10 * number, outcome, problems) | paired]
    return [each.message for each in findings(rows) if each.rule == "held-out-fall"]


def test_held_out_outcomes_that_fall_again_name_the_best_checkpoint():
    [message] = fallen(0.26, 0.38, 0.28, 0.27)
    assert "0.380 at best, after step 10, and were 0.280 and 0.270 after steps 20 and 30 (600 problems" in message
    assert message.endswith("the best: checkpoints/step-000010")
    assert "the best: the model as it was before training" in fallen(0.5, 0.3, 0.25)[0]
    for fine in ((0.26, 0.38, 0.28, 0.37), (0.26, 0.38, 0.25), (0.26, 0.38, 0.36, 0.355), (0.3, 0.34, 0.38, 0.43)):
        assert fallen(*fine) == []  # one alone, the first after the best, chance, a rise
    assert fallen(0.3, 0.6, 0.4, 0.4, problems=12) == []
    assert fallen(3.0, 6.0, 2.0, 2.0) == []  # of scores on any scale nothing is known
    assert fallen(3.0, 6.0, 2.0, 2.0, error=0.3) != []  # but for the differences by problem
    assert fallen(0.26, 0.382, 0.378, 0.34, 0.325) == []
    assert fallen(0.26, 0.382, 0.378, 0.34, 0.325, error=0.012) != []  # most answers stayed as they were
    assert fallen(0.26, 0.33, 0.37, 0.38, 0.375, 0.36, 0.34, 0.32, 0.31, 0.3) != []  # slowly: by neighbours


def test_the_checkpoint_that_is_kept_is_the_best_one_by_the_metric_of_the_run():
    rows = [held_out(0, 0.3), *run_of(9)[1:], held_out(8, 0.58), held_out(9, 0.6)]
    rows += [held_out(step, 0.3) | {"held_out/best_step": 8} for step in (10, 11)]
    assert "after step 8" in next(each.message for each in findings(rows) if each.rule == "held-out-fall")


@pytest.mark.parametrize("agreement", [0.0, 0.7])
def test_runs_that_stay_flat_are_rarely_called_falling(agreement: float):
    """Of 20 evaluations each, problem by problem. Of 3,000 runs each 2.9 and 1.8 % were called so."""
    draw, called, count = Random(7), 0, 60
    for _ in range(count):
        first, history, found = [draw.random() < 0.4 for _ in range(200)], History(), False
        best = first
        for step in range(20):
            now = [one if draw.random() < agreement else draw.random() < 0.4 for one in first]
            differ = sum(one != two for one, two in zip(best, now, strict=True)) / 200
            error = {"held_out/since_best_error": math.sqrt(differ / 200)} if step else {}
            history.add(held_out(step, sum(now) / 200, 200) | error)
            best = max(best, now, key=sum) if step else now
            found = found or HeldOutFall().evidence(history) is not None
        called += found
    assert called <= 4


def test_a_reward_that_is_gamed_is_seen_by_the_verdict_that_is_only_watched():
    gamed = {"rewards__reward_model": lambda step: 0.02 * step, "reward": lambda step: 0.02 * step}
    flat = {"outcome": wobbling(0.4)}
    rows = [held_out(-1, 0.4), *run_of(60, **gamed, **flat), held_out(60, 0.4)]
    assert "the reward went 0.09 → 1.09 and task scores 0.4" in findings(rows)[0].message
    honest = [held_out(-1, 0.4), *run_of(60, **gamed | {"reward": wobbling(0.4)}, **flat), held_out(60, 0.4)]
    assert findings(honest) == []


@pytest.mark.slow("draws thousands of runs")
@pytest.mark.parametrize(("every", "noise"), [(1, 0.05), (5, 0.08), (10, 0.12)])
def test_noise_alone_is_not_held_against_held_out_outcomes(every, noise):
    """However often there is an evaluation to be unlucky with."""
    for seed in range(6):
        draw = Random(seed)
        rows = [held_out(-1, draw.gauss(0.6, 0.014))]
        for row in run_of(150, outcome=lambda _, draw=draw: draw.gauss(0.6, noise)):
            rows += [row] if (row["step"] + 1) % every else [row, held_out(row["step"], draw.gauss(0.6, 0.014))]
        assert findings(rows) == []


@pytest.mark.parametrize("every", [1, 5, 20])
def test_the_gamed_run_of_the_pipeline_demo_is_found_however_often_it_is_evaluated(every):
    draw = Random(1)

    def along_the_run(first: float, last: float, noise: float) -> Callable[[int], float]:
        return lambda step: first + (last - first) * step / 59 + draw.gauss(0.0, noise)

    gamed = along_the_run(0.7, 2.3, 0.05)
    outcome = along_the_run(0.79, 0.39, 0.04)
    rows = [held_out(-1, 0.968, 200)]
    for row in run_of(60, reward=gamed, rewards__reward_model=gamed, outcome=outcome):
        held = 0.968 - (0.968 - 0.465) * (row["step"] + 1) / 60
        rows += [row] if (row["step"] + 1) % every else [row, held_out(row["step"], held, 200)]
    [found] = [each for each in findings(rows) if each.rule != "held-out-fall"]  # which it is, too
    assert found.rule == "held-out-flat"
    assert "from step 0 to" in found.message
    assert "the reward went" in found.message


def test_what_follows_an_evaluation_is_kept_whatever_evaluations_come_between():
    history = History()
    for row in run_of(12, outcome=float):
        for each in (held_out(row["step"] - 1, 0.5), row):
            history.add(each)
    followed = [[int(row["outcome"]) for row in each.following] for each in history.evaluations]
    assert followed == [[*range(start, min(start + 10, 12))] for start in range(12)]


# Runs that go well, as they were measured: values of the demo at every fifteenth step

DEMOS = {
    "grpo": {
        "outcome": [0.492, 0.654, 0.758, 0.801, 0.83, 0.857, 0.875, 0.895, 0.873, 0.91],
        "dead": [0.281, 0.266, 0.328, 0.344, 0.438, 0.453, 0.531, 0.547, 0.578, 0.672],
        "solved": [0.219, 0.219, 0.312, 0.312, 0.438, 0.453, 0.531, 0.547, 0.578, 0.672],
        "entropy": [0.191, 0.218, 0.174, 0.153, 0.138, 0.124, 0.101, 0.104, 0.09, 0.078],
        "gate": [1.0] * 10,
    },
    "gspo": {
        "outcome": [0.467, 0.549, 0.643, 0.691, 0.734, 0.773, 0.832, 0.877, 0.832, 0.889],
        "dead": [0.375, 0.219, 0.266, 0.25, 0.281, 0.344, 0.422, 0.453, 0.469, 0.594],
        "solved": [0.281, 0.203, 0.266, 0.234, 0.281, 0.344, 0.422, 0.453, 0.438, 0.594],
        "entropy": [0.2, 0.228, 0.227, 0.226, 0.209, 0.197, 0.176, 0.173, 0.154, 0.146],
        "gate": [0.3, 0.411, 0.389, 0.472, 0.521, 0.63, 0.702, 0.699, 0.734, 0.72],
    },
}


def along(values: list[float], size: float = 0.01) -> Callable[[int], float]:
    """From one value to the next, fifteen steps each, with a little noise."""

    def at(step: int) -> float:
        left, share = divmod(min(step, 134), 15)
        return values[left] + (values[left + 1] - values[left]) * share / 15 + size * math.sin(2.4 * step)

    return at


@pytest.mark.parametrize("name", DEMOS)
@pytest.mark.parametrize("dropped", [False, True])
def test_runs_that_go_well_are_left_in_peace(name, dropped):
    curves = DEMOS[name]
    dead, solved = along(curves["dead"], 0.0), along(curves["solved"], 0.0)
    columns: dict[str, Column] = {
        "outcome": along(curves["outcome"]),
        "reward": along(curves["outcome"]),
        "dead_groups": dead,
        "dead_solved": solved,
        "dead_rows": 0.0 if dropped else dead,
        "wasted_tokens": dead if dropped else 0.0,
        "solved_by_all": solved,
        "solved_by_any": 0.98,
        "duplicates_unsolved": 0.71,
        "entropy": along(curves["entropy"]),
        "gate": along(curves["gate"]),
        "length": 3.4,
        "reference_kl": lambda step: min(0.05 * step, 1.1),
    }
    assert findings([held_out(-1, 0.319), *run_of(150, **columns), held_out(150, 0.95)]) == []


# The monitor


def test_a_weak_value_model_is_said_once_per_spell():
    monitor = HealthMonitor([WeakValueModel(window=3)])
    bad, good = (
        {"outcome": 0.5, "baseline_error/value": 0.3, "baseline_error/group": 0.2},
        {"outcome": 0.5, "baseline_error/value": 0.1, "baseline_error/group": 0.2},
    )
    said = [monitor.update(row) for row in [bad] * 7 + [{}] + [good] * 3 + [bad] * 3]
    # Three steps to learn, three to be looked at; one good spell; then two bad of three are worse again.
    assert [number for number, found in enumerate(said) if found] == [5, 12]
    assert [active.is_over for active in monitor.findings] == [True, False]


def test_what_stands_at_its_threshold_is_one_spell():
    """Above and below from step to step; over only after as many steps without as the rule looks at."""
    monitor = HealthMonitor([DeadGroups(window=3)])
    stuck, fine = run_of(1, **STUCK)[0], run_of(1)[0]
    pattern = [stuck] * 3 + ([fine] * 2 + [stuck] * 2) * 2 + [fine] * 7 + [stuck] * 2
    said = [bool(monitor.update(row | {"step": step})) for step, row in enumerate(pattern)]
    # Medians of three: above from the third on; at the end two of three.
    assert [step for step, new in enumerate(said) if new] == [2, 19]
    first, second = monitor.findings
    assert (first.finding.step, first.last, first.is_over) == (2, 11, True)
    assert [each.step for each in monitor.standing()] == [19]
    assert not second.is_over


def test_the_worst_comes_first():
    monitor = monitored(run_of(30, **NOTHING, truncated=0.5))
    assert [(each.severity, each.rule) for each in monitor.standing()] == [
        ("failing", "no-reward"),
        ("warning", "truncation"),
    ]


def test_rows_in_memory_and_in_files_say_the_same():
    sick = run_of(60, **COLLAPSED, **LONG)
    for number, row in enumerate(sick):
        row["kl"], row["mismatch_kl"] = math.nan, math.inf if number % 2 else math.nan
    stored = [json.loads(json.dumps({name: _plain(value) for name, value in row.items()})) for row in sick]
    assert stored[0]["kl"] is None
    assert [each.rule for each in findings(sick)] == ["entropy-collapse", "length-explosion"]
    assert findings(stored) == findings(sick)


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@pytest.mark.parametrize("cut", [0, 5, 9, 10, 25, 26, 40])
def test_a_watch_that_sees_the_rows_again_goes_on_where_the_first_was(cut):
    rows = [held_out(-1, 0.3), *run_of(60, **STUCK, **LONG, outcome=lambda step: 0.3 + 0.01 * step), held_out(60, 0.3)]
    whole = HealthMonitor()
    said = [whole.update(row) for row in rows]
    assert len([each for found in said for each in found]) == 3
    again = monitored(rows[:cut])
    assert [again.update(row) for row in rows[cut:]] == said[cut:]
    assert again.standing() == whole.standing()


def test_what_is_no_row_is_passed_over():
    strange: list[Mapping[str, object]] = [
        {},
        {"step": "zero", "outcome": "high", "entropy": [1]},
        {"outcome": None, "sampled_tokens": 3},
        {"step": 3, "held_out/outcome": 0.2},
        {"step": 1e300, "outcome": 0.2, "rewards/a": None},
        {"step": 10**400, "outcome": 10**400, "reward": -(10**400), "sampled_tokens": 3},
        {"loss": 2.0, "accuracy": 0.5, "held_out/loss": 2.0},
    ]
    assert findings(strange * 30) == []


def test_a_history_does_not_grow():
    history = History()
    for row in run_of(500):
        history.add(row)
    assert len(history.last("outcome", 60)) == 60
    assert history.last("outcome", 61) == []
    assert history.trained == 500


# What is measured, by hand


def sibling(tokens: tuple[int, ...], outcome: float, finish: Any = "stop", **parts: float) -> Rollout:
    return Rollout(Completion(tokens, tuple(-1.0 for _ in tokens), "", finish), Grade(outcome, parts))


def siblings(*rollouts: Rollout) -> Group:
    return Group(Problem("a", "a", ""), (5, 6), rollouts)


RIGHT = siblings(*[sibling((7, 1), 1.0)] * 4)
WRONG = siblings(*[sibling((8, 1), 0.0)] * 3, sibling((9, 1), 0.0))
MIXED = siblings(sibling((7, 1), 1.0), sibling((8, 1), 0.0), sibling((8, 1), 0.0), sibling((9, 1, 1), math.nan))
UNKNOWN = siblings(*[sibling((8, 1), math.nan)] * 4)


def test_groups_by_hand():
    found = group_metrics([RIGHT, WRONG, MIXED, UNKNOWN])
    assert found == {
        "dead_groups": 3 / 4,
        "dead_solved": 1 / 4,
        "solved_by_all": pytest.approx(1 / 3),  # of the three that are scored
        "solved_by_any": pytest.approx(2 / 3),
        "reward_spread": pytest.approx((0 + 0 + math.sqrt(2 / 9)) / 3),
        # Of six pairs: all; those of the three that are the same; one; all.
        "duplicates": pytest.approx((1 + 3 / 6 + 1 / 6 + 1) / 4),
        "duplicates_unsolved": pytest.approx((3 / 6 + 1 / 6) / 2),
    }


def test_scores_without_a_verdict_solve_nothing():
    """A reward model's 5 is no 1."""
    high = siblings(*[sibling((7, 1), 5.0)] * 4)
    known, unknown = (group_metrics([high, MIXED], has_verdict=each) for each in (True, False))
    solved = ("dead_solved", "solved_by_all", "solved_by_any", "duplicates_unsolved")
    assert [known[name] for name in solved] == [0.5, 0.5, 1.0, pytest.approx(1 / 6)]
    assert all(math.isnan(unknown[name]) for name in solved)
    assert {name: value for name, value in known.items() if name not in solved} == {
        name: value for name, value in unknown.items() if name not in solved
    }


@pytest.mark.parametrize("size", [4, 32])
def test_duplicates_do_not_grow_with_the_group(size):
    """Two equally likely answers: half of the pairs agree."""
    draw = Random(0)
    groups = [siblings(*(sibling((draw.randrange(2),), 0.0) for _ in range(size))) for _ in range(400)]
    assert group_metrics(groups)["duplicates"] == pytest.approx(0.5, abs=0.05)


def test_a_reward_tells_siblings_apart_where_the_verdict_does_not():
    group = siblings(sibling((7, 1), 1.0, task=1.0, style=0.2), sibling((7, 1), 1.0, task=1.0, style=0.4))
    found = group_metrics([group])
    assert (found["dead_groups"], found["dead_solved"], found["solved_by_all"]) == (0, 0, 1)
    assert found["reward_spread"] == pytest.approx(0.1)


def test_a_completion_alone_has_no_siblings_to_repeat():
    found = group_metrics([siblings(sibling((7, 1), 0.0))])
    assert math.isnan(found["duplicates"])
    assert found["dead_groups"] == 1


def test_tails_by_hand():
    rollouts = [sibling(tuple(range(length)), float(length)) for length in range(1, 12)]
    collected = Collected((siblings(*rollouts),), (), DataCursor(), rounds=1, sampled_tokens=66)
    found = rollout_metrics(collected)
    assert (found["length_p10"], found["length_p90"]) == (2.0, 10.0)  # of 1 to 11
    assert (found["reward_p10"], found["reward_p90"]) == (2.0, 10.0)
    assert found["completions"] == 11
    nothing = rollout_metrics(Collected((UNKNOWN,), (), DataCursor(), rounds=1, sampled_tokens=8))
    assert math.isnan(nothing["reward_p10"])
    assert nothing["unscored"] == 4


# In a run


class Told:
    """What a person is told; and an end at a step, if asked for."""

    def __init__(self, end: int | None = None) -> None:
        self.end, self.warnings = end, list[tuple[int, str]]()

    def start(self, steps, before) -> None: ...
    def stepped(self, step, metrics, seconds, collected) -> None:
        if step == self.end:
            raise KeyboardInterrupt

    def evaluated(self, step, evaluation) -> None: ...
    def warned(self, step, message) -> None:
        self.warnings.append((step, message))

    def stop(self) -> None: ...


pytestmark = pytest.mark.usefixtures("ordinary_precision")


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> RunConfig:
    """A model that knows nothing: no answer of its is ever right."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return RunConfig(
        algorithm=GRPO,
        task=Arithmetic(digits=3, held_out=8),
        model=str(folder),
        device="cpu",
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1, learning_rate=1e-3),
        evaluation=EvaluationOptions(problems=4),
        checkpoints=CheckpointOptions(every=1, keep=9),
        steps=5,
    )


def trained(settings: RunConfig, folder: Path, told: Told) -> list[dict[str, Any]]:
    """Its findings in the events, of a monitor that does not look as long as others do."""
    run = Run(settings, folder, told)
    run.monitor.health = HealthMonitor([NoReward(window=3)])
    train(run)
    return [row for row in JsonLines(folder / "events.jsonl") if row["kind"] == "finding"]


@pytest.fixture(scope="module")
def uninterrupted(settings, tmp_path_factory) -> tuple[Path, list[dict[str, Any]], Told]:
    folder, told = tmp_path_factory.mktemp("whole"), Told()
    torch.set_default_dtype(torch.float32)
    return folder, trained(settings, folder, told), told


@pytest.mark.slow("trains a run")
def test_a_run_says_what_it_finds(uninterrupted):
    _, [event], told = uninterrupted
    assert (event["step"], event["rule"], event["severity"], event["show"]) == (3, "no-reward", "failing", "worst")
    assert event["message"] == "over 3 steps no completion has a task score above 0: the task score of all 12 is 0"
    assert "selfcheck" in event["remedy"]
    [(step, said)] = told.warnings
    assert step == 3
    assert said == f"no-reward, the run is failing: {event['message']}. First: {event['remedy']}"


@pytest.mark.slow("trains and resumes runs")
@pytest.mark.parametrize(("end", "attempts"), [(3, [1, 2]), (5, [1])])
def test_a_run_that_was_cut_off_says_what_it_would_have_said(end, attempts, settings, uninterrupted, tmp_path):
    """Cut off just after it was found, with the checkpoint from before that; or so long after that the monitor knows
    and does not say it again."""
    _, whole, _ = uninterrupted
    with pytest.raises(KeyboardInterrupt):
        trained(settings, tmp_path, Told(end))
    told = Told()
    events = trained(settings, tmp_path, told)
    assert [row | {"attempt": 1} for row in events] == whole * len(attempts)
    assert [row["attempt"] for row in events] == attempts
    assert len(told.warnings) == attempts.count(2)


def test_a_run_on_prompts_alone_does_not_know_what_is_solved(settings, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "x"}}\n' for n in range(30)))
    prompts = File(str(tmp_path / "prompts.jsonl"), reward=None)
    mix = RewardMix(task=0.0, rules=(WeightedRule(ExactMatch(), weight=3.0),))
    alone = replace(settings, task=prompts, rewards=mix, steps=1)
    trained(alone, tmp_path / "run", Told())
    [row] = [row for row in JsonLines(tmp_path / "run" / "metrics.jsonl") if "outcome" in row]
    assert (row["outcome"], row["dead_groups"]) == (0.0, 1.0)
    assert (row["solved_by_all"], row["solved_by_any"], row["dead_solved"]) == (None, None, None)


def test_a_damaged_row_is_no_reason_not_to_go_on(tmp_path):
    damaged = b'{"outcome": 0.0}\n{"outcome": 0.0}\n???\n[1]\n\xff\xfe\n{"outcome": 0.0}\n{"outco'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    monitor = Monitor(RunConfig(), RunLog(tmp_path), Told(), Grading())
    monitor.health = HealthMonitor([NoReward(window=3)])
    monitor.remember(tmp_path)
    assert monitor.health.history.trained == 3


# Documentation


GUIDE = (ROOT / "docs" / "guides" / "health.md").read_text()


def test_the_guide_has_every_rule_as_it_is():
    rows = [f"| `{rule.name}` | {rule.severity} | {rule.when} | {rule.why} | {rule.remedy} |" for rule in RULES]
    found = re.findall(r"^\| `[a-z-]+` \| (?:warning|failing) \|.*\|$", GUIDE, re.MULTILINE)
    assert found == rows


def test_the_guide_has_every_metric_as_it_is():
    wanted = []
    for section, names in MEANINGS.items():
        wanted += [f"**{section}**", *(f"| `{name}` | {words} |" for name, words in names.items())]
    found = [line for line in GUIDE.splitlines() if line in set(wanted)]
    assert found == wanted


def test_the_guides_tables_are_written_from_rules_and_metrics():
    script = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    rows = re.compile(r"^\| `(?:loops|outcome|kl|held_out/low)` \|.*\n", re.MULTILINE)
    assert len(rows.findall(GUIDE)) == 5  # `loops` is a rule and a metric
    assert script["health"](rows.sub("", GUIDE)) == GUIDE
    with pytest.raises(ValueError, match="has no line"):
        script["health"]("")


def test_every_metric_of_a_run_has_a_meaning(settings, uninterrupted, tmp_path):
    folder, _, _ = uninterrupted
    values = replace(settings, algorithm=PPO, value=ValueOptions(TrunkHead()), steps=1)
    soft = replace(settings, algorithm=SAPO, steps=1, evaluation=EvaluationOptions(problems=4, samples=2))
    for name, each in (("values", values), ("soft", soft)):
        trained(each, tmp_path / name, Told())
    rows = [
        row for name in (folder, tmp_path / "values", tmp_path / "soft") for row in JsonLines(name / "metrics.jsonl")
    ]
    names = {name for row in rows for name in row} - {"step"}
    assert {name for name in names if meaning(name) is None} == set()
    assert len(names) > 70
    assert meaning("rewards/style") == meaning("rewards/…")
    assert meaning("held_out/parts/style") is not None
    assert meaning("held_out/loss") is None


def test_turns_are_counted():
    def episode(*turns: Turn) -> Rollout:
        return Rollout(Completion((1,), (-0.1,), "a", "stop", turns=turns), Grade(1.0))

    said, again = Turn("assistant", "a", 1), Turn("assistant", "a", 1)
    rollouts = [
        episode(said, Turn("tool", "?", 1, failed=MALFORMED), again),
        episode(said, Turn("tool", "7", 1), Turn("tool", "?", 1, failed="KeyError"), Turn("assistant", "b", 1)),
        episode(Turn("assistant", "c", 1, math.nan, "step 1: it hung")),
        Rollout(Completion((1,), (-0.1,), "a", "stop"), Grade(1.0)),
    ]
    found = turn_metrics(rollouts, has_tools=True)
    assert found == pytest.approx(
        {
            "turns": 5 / 3,
            "failed_episodes": 1 / 3,
            "repeated_turns": 1 / 2,
            "calls": 1.0,
            "failed_calls": 2 / 3,
            "malformed_calls": 1 / 3,
        }
    )
    assert "calls" not in turn_metrics(rollouts, has_tools=False)
    assert turn_metrics(rollouts[3:], has_tools=True) == {}
    assert turn_metrics(rollouts[2:], has_tools=True)["calls"] == 0.0


@pytest.mark.parametrize("rule", [ColdStart, DeadGroups])
def test_a_model_that_answers_nothing_right_may_learn_the_answers_first(rule):
    assert "fine-tune on them first: proximo sft FILE --model MODEL" in rule.remedy
