"""Configs that several studies start from, and small changes of them."""

import warnings
from dataclasses import replace
from typing import Any

from proximo.algorithms import GRPO, Algorithm, UnusualChoice
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.runs.options import CheckpointOptions
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.echo import Echo
from proximo_lab.studies.study import Arm, Contrast, Measure

NEAR = replace(
    ARITHMETIC,
    algorithm=replace(GRPO, kl=None),
    device="cpu",
    evaluation=EvaluationOptions(problems=500, every=5),
    checkpoints=CheckpointOptions(every=1000, keep=1, keep_best=False),
    steps=60,
)
"""The demo's own settings without a KL term: four updates a step, at a rate at which clips hardly act."""
FAR = replace(
    NEAR,
    training=TrainingOptions(groups=32, group_size=8, minibatches=4, epochs=4, learning_rate=1e-4, warmup_steps=2),
    evaluation=EvaluationOptions(problems=300, every=3, samples=8),
)
"""Sixteen updates on each step's samples at five times the demo's learning rate: clips act on 5 to 20 % of the tokens,
where at the demo's own settings they never do."""
TWINS_LATER = (
    "The negative control, runs that differ by rounding, was added when the others were known; before, it was that "
    "nothing differs before the first step, which could not fail."
)
TWINS = "the negative control"
SMALL = "A model of 0.8 M parameters and answers of three tokens: nothing is said about large models or long text."


def changed(config: RunConfig, **stages: Any) -> RunConfig:
    """The config with stages of its algorithm replaced; an unusual choice is what a study is for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualChoice)
        return replace(config, algorithm=replace(config.algorithm, **stages))


def trained(config: RunConfig, **options: Any) -> RunConfig:
    """The config with training options replaced."""
    return replace(config, training=replace(config.training, **options))


def at(name: str, rate: float) -> str:
    """The name of an arm at a learning rate."""
    return f"{name} at {rate:g}"


def at_rate(name: str, config: RunConfig, rate: float) -> Arm:
    """A config's arm at a learning rate."""
    return Arm(at(name, rate), trained(config, learning_rate=rate))


def once(config: RunConfig) -> RunConfig:
    """The same with one update on each step's samples, so that every ratio is 1."""
    return trained(config, minibatches=1, epochs=1)


def twins(name: str, config: RunConfig) -> tuple[Arm, Arm]:
    """A config's arm, and one that is the same but for rounding, which soon changes its samples: what differs between
    the two is noise."""
    return Arm(name, config), Arm("the same, Adam's ε a tenth larger", trained(config, adam_epsilon=1.1e-8))


def alike(pair: tuple[Arm, Arm], measure: Measure, counts: float) -> Contrast:
    """The control that twins must not differ."""
    return Contrast("runs that differ by rounding learn alike", pair[1].name, pair[0].name, measure, counts)


def in_world(preset: RunConfig, algorithm: Algorithm) -> RunConfig:
    """A world's preset with an algorithm, on the CPU, evaluated by samples."""
    return replace(
        preset,
        algorithm=algorithm,
        device="cpu",
        evaluation=EvaluationOptions(problems=150, every=10, samples=4),
        checkpoints=NEAR.checkpoints,
    )


def copies(preset: RunConfig, algorithm: Algorithm, letters: int) -> RunConfig:
    """Copies of so many letters. Training problems never repeat, so their outcomes are those of new problems; a few are
    held out for the end."""
    assert isinstance(preset.task, Echo)
    return replace(
        in_world(preset, algorithm),
        task=replace(preset.task, length=letters),
        sampling=SamplingOptions(temperature=1.0, max_tokens=2 * letters + 8),
        evaluation=EvaluationOptions(problems=50),
        steps=40,
    )
