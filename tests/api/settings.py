"""The small runs that the tests of the door make."""

from dataclasses import replace
from typing import Any

from proximo.algorithms import GRPO
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Arithmetic


def small(**changes: Any) -> RunConfig:
    config = RunConfig(
        algorithm=GRPO,
        task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=8),
        device="cpu",
        sampling=SamplingOptions(max_tokens=6),
        training=TrainingOptions(groups=2, group_size=4, minibatches=1, learning_rate=1e-4),
        evaluation=EvaluationOptions(problems=4),
        steps=3,
    )
    return replace(config, **changes)
