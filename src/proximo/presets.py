"""Runs that are known to work, as values."""

from dataclasses import dataclass

from proximo.samplers import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.training.config import EvaluationOptions, RunConfig, TrainingOptions


@dataclass(frozen=True)
class Preset:
    name: str
    config: RunConfig
    what: str


ARITHMETIC = RunConfig(
    task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=1000),
    model="tiny-arithmetic",
    sampling=SamplingOptions(temperature=1.0, max_tokens=8),
    training=TrainingOptions(groups=32, group_size=8, minibatches=4, learning_rate=2e-5, warmup_steps=2),
    evaluation=EvaluationOptions(problems=1000),
    steps=150,
)

SMOLLM_ARITHMETIC = RunConfig(
    task=Arithmetic(operations=("+",), digits=1, terms=2, held_out=12, chat=True),
    model="smollm2-135m",
    sampling=SamplingOptions(temperature=1.0, max_tokens=16),
    training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-5, warmup_steps=2),
    evaluation=EvaluationOptions(problems=12),
    steps=20,
)

PRESETS = (
    Preset(
        "arithmetic", ARITHMETIC, "two-digit sums with the tiny model that comes with Proximo; a few minutes on a CPU"
    ),
    Preset("smollm-arithmetic", SMOLLM_ARITHMETIC, "one-digit sums asked of SmolLM2-135M; needs the extra smollm"),
)
