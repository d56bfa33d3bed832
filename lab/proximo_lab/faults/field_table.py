"""Runs in which each field of a run's config matters, and a value that must make a difference there.

A field that cannot change the numbers of a CPU run is listed with the reason, and nothing is claimed about it.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from proximo.algorithms import (
    BNPO,
    CISPO,
    CLIP_COV,
    DAPO,
    GMPO,
    GRPO,
    GSPO_PRODUCT,
    KL_COV,
    LITE_PPO,
    PPO,
    REINFORCE_PP,
    SAPO,
    SAPO_SEQUENCE,
    VAPO,
    VESPO,
)
from proximo.losses.pieces import corrections, credit, divergences, extras, filters, selection, shaping
from proximo.losses.pieces.advantages import BatchScaled, GroupCentred, GroupNormalized
from proximo.losses.pieces.credit import SequenceWhitened, SignScaled
from proximo.losses.pieces.ratios import SamplerPolicy, SequenceRatio
from proximo.losses.pieces.weights import ConstantLength, TokenMean
from proximo.rewards import Judge
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.samplers.engines.options import Fleet
from proximo.samplers.mismatched import Mismatched
from proximo_lab.faults.runs import small

MACHINE = "memory or speed only; the numbers stay within rounding"
LIMIT = "a limit that a run which keeps within it never feels; the families `rewards` and `sandbox` cross it"
FLEET = "where completions are sampled, not what; tests/samplers/engines and `make scale` have engines"
IN_FLIGHT = "a run in flight does not repeat, so its numbers cannot be compared; tests/rl/async_sampling has such runs"
GIVEN = "a function given in Python, which a config file only names; tests/api has it"
JUDGE = "of a judge behind a server; tests/rewards/test_judges.py has one, and the family `judges` breaks it"
SCHEDULED = "the numbers of a schedule; the table of schedules is tried, and tests/rl/test_schedules.py has the numbers"
MEASURED = "it measures, and changes no number of training; tests/rewards/test_metrics.py has what it gives"
LISTED = {
    **dict.fromkeys(("Constant.value", "Piecewise.numbers", "Piecewise.at", "PythonSchedule.path"), SCHEDULED),
    **dict.fromkeys(
        (f"{kind}.{name}" for kind in ("Linear", "Cosine") for name in ("start", "end", "steps")), SCHEDULED
    ),
    **dict.fromkeys(("RunConfig.metrics", "PythonMetric.path", "GivenMetric.name", "GivenMetric.code"), MEASURED),
    "PythonMetric.seconds": LIMIT,
    "PythonMetric.memory_mb": LIMIT,
    "RunConfig.device": "there is one kind of device here",
    "MultiTurn.seconds": LIMIT,
    "MultiTurn.memory_mb": LIMIT,
    "RunConfig.compile": "nothing is compiled on a CPU",
    "TrainingOptions.token_budget": MACHINE,
    "RunConfig.ranks": "the numbers stay within rounding; tests/distributed holds them to it",
    **dict.fromkeys(
        (f"Ranks.{name}" for name in ("processes", "shard", "timeout", "cluster", "address")),
        "of a run with ranks only",
    ),
    "RunConfig.workers": "the numbers stay the same; tests/rewards/test_elsewhere.py holds them to it",
    **dict.fromkeys((f"Workers.{name}" for name in ("processes", "cluster", "address")), "of workers on nodes only"),
    "RewardModel.device": "there is one kind of device here",
    "Ptx.max_tokens": LIMIT,
    "RewardModel.token_budget": MACHINE,
    "FormatReward.seconds": LIMIT,
    "MathVerify.seconds": LIMIT,
    "PythonFunction.seconds": LIMIT,
    "PythonFunction.memory_mb": LIMIT,
    "PythonFunction.at_once": MACHINE,
    "PythonFunction.siblings": "decides only what follows a failure; the family `rewards` has one",
    **dict.fromkeys((f"Judge.{each.name}" for each in fields(Judge)), JUDGE),
    **dict.fromkeys((f"GivenFunction.{name}" for name in ("name", "code", "siblings", "reward_range")), GIVEN),
    "Limits.seconds": LIMIT,
    "Limits.cpu_seconds": LIMIT,
    "Limits.memory_mb": LIMIT,
    "Limits.scratch_mb": LIMIT,
    "Limits.output_kb": LIMIT,
    "Limits.threads": LIMIT,
    "Code.workers": MACHINE,
    "Code.limits": LIMIT,
    **dict.fromkeys((f"Fleet.{each.name}" for each in fields(Fleet)), FLEET),
    **dict.fromkeys((f"AheadOptions.{name}" for name in ("switch", "window", "expire")), IN_FLIGHT),
    "SamplingOptions.top_p": "a run refuses to cut the distribution: it is evaluation's",
    "SamplingOptions.top_k": "a run refuses to cut the distribution: it is evaluation's",
    "SamplingOptions.min_p": "a run refuses to cut the distribution: it is evaluation's",
}


@dataclass(frozen=True)
class Trial:
    base: RunConfig
    path: str
    """Path of the field, with dots."""
    value: Any


def algorithm_trials() -> list[Trial]:
    return [*_algorithms(), *_shapes(), *_selections()]


STRONG = TrainingOptions(groups=3, group_size=4, minibatches=3, epochs=2, learning_rate=2e-3, warmup_steps=0)
"""Several updates on the same rollouts with long steps, so that ratios are far from 1."""


def lively(algorithm: Any, **changes: Any) -> RunConfig:
    return small(algorithm, training=STRONG, steps=2, **changes)


def several(base: RunConfig, piece: str, **values: Any) -> list[Trial]:
    return [Trial(base, f"{piece}.{name}", value) for name, value in values.items()]


def _algorithms() -> list[Trial]:
    grpo, ppo, gate, advantage = lively(GRPO), lively(PPO), "algorithm.gate", "algorithm.advantage"
    whitened = f"{advantage}.of"
    signed = lively(replace(GRPO, advantage=SignScaled(GroupNormalized())))
    constant = lively(replace(GRPO, advantage=GroupCentred(), weights=ConstantLength(5)))
    choices = {
        "shape": shaping.LinearOverlong(0.1),
        "keep": filters.KeepMixed(),
        "advantage": GroupCentred(),
        "anchor": SamplerPolicy(),
        "ratio": SequenceRatio(),
        "gate": SAPO.gate,
        "select": selection.TopEntropy(),
        "kl": None,
        "weights": TokenMean(),
        "extra": extras.EntropyBonus(0.1),
    }
    return [
        *several(grpo, "algorithm", **choices),
        Trial(lagging(), "algorithm.correct", corrections.TokenTruncated(1.0001)),
        *several(grpo, gate, low=0.01, high=0.01, dual=1.21),
        *several(lively(SAPO), gate, tau_pos=0.2, tau_neg=9.0),
        Trial(lively(SAPO_SEQUENCE), f"{gate}.normalised", True),
        *several(lively(GMPO), gate, low=0.001, high=0.001),
        *several(lively(CISPO), gate, high=1.01, low=0.99),
        *several(lively(VESPO), gate, power_pos=1.0, rate_pos=1.0, power_neg=1.0, rate_neg=1.0),
        Trial(lively(GSPO_PRODUCT), "algorithm.ratio.max_log", 0.01),
        *several(grpo, advantage, ddof=0, epsilon=0.1),
        *several(lively(LITE_PPO), advantage, ddof=0, epsilon=0.1),
        *several(signed, advantage, of=BatchScaled(), positive=3.0, negative=3.0),
        *several(lively(REINFORCE_PP), whitened, discount=0.5),
        *several(ppo, whitened, discount=0.5, decay=0.1, length_adaptive=0.5, critic_decay=0.2),
        *several(ppo, advantage, of=credit.Gae(decay=0.2), epsilon=0.1),
        *several(
            lively(replace(GRPO, advantage=SequenceWhitened(GroupCentred()))), advantage, of=BatchScaled(), epsilon=0.1
        ),
        *several(grpo, "algorithm.kl", coefficient=0.5, estimator=divergences.K2()),
        Trial(constant, "algorithm.weights.length", 2),
        *several(ppo, "algorithm.extra", coefficient=5.0, clip=0.001),
        *several(lively(replace(GRPO, extra=extras.EntropyBonus(0.1))), "algorithm.extra", coefficient=1.0),
        *several(lively(replace(GRPO, extra=extras.PositiveNll(0.1))), "algorithm.extra", coefficient=1.0, above=2.0),
        Trial(lively(VAPO), "algorithm.advantage.of.length_adaptive", 0.5),
        Trial(lively(BNPO), "algorithm.advantage", GroupCentred()),
    ]


def _shapes() -> list[Trial]:
    long, linear = "algorithm.shape", lively(replace(GRPO, shape=shaping.LinearOverlong(0.1)))
    overlong = lively(replace(GRPO, shape=shaping.SoftOverlong(limit=4, cache=3)))
    adaptive = shaping.KlReward(0.1, controller=shaping.AdaptiveKl(target=1.0, horizon=8))
    moving = replace(lively(replace(PPO, shape=adaptive)), steps=3)
    return [
        *several(overlong, long, limit=3, cache=1, cap=0.3),
        *several(linear, long, coefficient=0.5, limit=2),
        *several(moving, long, coefficient=0.9, estimator=divergences.K3(), controller=None),
        *several(moving, f"{long}.controller", target=0.01, horizon=80),
        *several(lively(GRPO, sampling=replace(small(GRPO).sampling, max_tokens=2)), "algorithm.keep", truncated=False),
        *several(lively(DAPO, sampling=replace(small(GRPO).sampling, max_tokens=2)), "algorithm.keep", truncated=False),
    ]


def lagging() -> RunConfig:
    """Samples with other weights than it trains, so that there is something to correct."""
    return lively(GRPO, sampler=Mismatched("bfloat16", lag=1))


def _selections() -> list[Trial]:
    trials = [
        *several(lively(CLIP_COV), "algorithm.select", share=0.5, low=0.0, high=0.001),
        *several(lively(KL_COV), "algorithm.select", share=0.5, coefficient=9.0),
        *several(lively(replace(GRPO, select=selection.TopEntropy(0.5))), "algorithm.select", share=0.1),
        *several(lively(replace(GRPO, select=selection.OffPolicyMask(0.1))), "algorithm.select", threshold=1e-6),
    ]
    for piece, values in (
        (corrections.TokenTruncated(2.0), {"cap": 1.0001}),
        (corrections.SequenceTruncated(2.0), {"cap": 1.0001}),
        (corrections.SequenceMasked(0.1, 9.0), {"low": 0.9999, "high": 1.0001}),
        (corrections.IcePop(0.1, 9.0), {"low": 0.9999, "high": 1.0001}),
        (corrections.GeometricRejection(0.1, 9.0), {"low": 0.9999, "high": 1.0001}),
    ):
        base = lagging()
        trials += several(replace(base, algorithm=replace(GRPO, correct=piece)), "algorithm.correct", **values)
    clip = Trial(lively(CLIP_COV), "algorithm.select.share", 0.5)
    return [each for each in trials if each.path != "algorithm.select.low" and each.path != "algorithm.select.high"] + [
        Trial(replace(clip.base, algorithm=replace(CLIP_COV, select=selection.ClipCovariance(0.5, -9.0, 9.0))), path, v)
        for path, v in (("algorithm.select.low", 0.5), ("algorithm.select.high", 0.0))
    ]
