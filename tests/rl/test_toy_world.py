"""The toy world that every algorithm must solve: say a token from the right half of the vocabulary.

A random model does so half of the time. Two updates a step where the algorithm allows them, so ratios leave 1.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from proximo.algorithms import GRPO, Algorithm
from proximo.learner.learner import Learner
from proximo.learner.policy import PlainPolicy
from proximo.losses import CurrentPolicy, Gae, KeepAll, TokenWhitened
from proximo.losses.pieces.protocols import KeepTraits
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rl.assemble import assemble
from proximo.rl.config import TrainingOptions
from proximo.rl.rollouts import Collector
from proximo.runs.records import DataCursor
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Grade, Problem
from tests.batches import NAMED


@dataclass(frozen=True)
class RightHalf:
    """The prompt says which half is right, so a constant answer is only half the solution."""

    while_sampling = True

    def size(self, split):
        return None

    def problem(self, index: int, split, seed: int) -> Problem:
        return Problem(str(index), "ab"[index % 2], index % 2)

    def grade(self, problems, completions) -> list[Grade]:
        return [
            Grade(float((completion.tokens[0] >= 50) == problem.answer))
            for problem, completion in zip(problems, completions, strict=True)
        ]

    def reference(self, problem: Problem) -> str | None:
        return None


@pytest.mark.slow("trains every algorithm")
@pytest.mark.parametrize("name", NAMED)
def test_every_algorithm_learns(name: str):
    algorithm: Algorithm = replace(NAMED[name], shape=None)
    if KeepTraits.read(algorithm.keep).refills:
        algorithm = replace(algorithm, keep=KeepAll())
    if name == "VAPO":
        # Its λ = 1 − 1/(0.05·length) is made for long answers: 0 for these two tokens, and the first gets no credit.
        algorithm = replace(algorithm, advantage=TokenWhitened(Gae(length_adaptive=20.0, critic_decay=1.0)))
    single = isinstance(algorithm.anchor, CurrentPolicy)
    training = TrainingOptions(
        groups=8, group_size=8, minibatches=1 if single else 2, learning_rate=4e-2, warmup_steps=0
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        teacher = learn(GRPO, training, steps=8)[0] if name == "DISTILL" else None
        # Online DPO learns from two of eight completions.
        outcomes = learn(algorithm, training, steps=16 if name == "ONLINE_DPO" else 8, teacher=teacher)[1]
    finally:
        torch.set_default_dtype(torch.float64)
    assert 0.3 < outcomes[0] < 0.7
    assert sum(outcomes[-3:]) / 3 > 0.8, f"{name} went from {outcomes[0]:.2f} to {outcomes[-3:]}"


def learn(
    algorithm: Algorithm, training: TrainingOptions, steps: int, teacher: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, list[float]]:
    """The trained model, and the mean outcome of each step."""
    model, tokenizer = tiny_model(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, seed=0), tiny_tokenizer()
    learner = Learner(PlainPolicy(model), algorithm, training.for_learner(), temperature=1.0, seed=0)
    sampling = SamplingOptions(max_tokens=2)
    collector = Collector(
        RightHalf(), EmbeddedSampler(model, tokenizer), tokenizer, sampling, training, algorithm.keep, seed=0
    )
    cursor, outcomes = DataCursor(), []
    for step in range(steps):
        collected = collector.collect(cursor, step=step, version=learner.version)
        cursor = collected.cursor
        assembled = assemble(collected.groups, collected.dropped, learner, sampling.max_tokens, teacher=teacher)
        outcomes.append(float(assembled.everyone.outcome.mean()))
        for _ in learner.updates(assembled.batch):
            pass
    return model, outcomes
