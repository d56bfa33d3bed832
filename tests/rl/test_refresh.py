"""A sampler with weights of its own is told of every update, and so keeps sampling the policy that is trained."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from proximo.algorithms import GRPO
from proximo.models import frozen_copy
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train_step
from proximo.runs.records import DataCursor
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import RunSamplers, SampledPolicy, SamplingOptions, Stream
from proximo.types import Request

CONFIG = RunConfig(
    algorithm=GRPO,
    sampling=SamplingOptions(max_tokens=5),
    training=TrainingOptions(groups=8, group_size=4, minibatches=2, learning_rate=1e-3, warmup_steps=0),
    evaluation=EvaluationOptions(problems=20, samples=2),
)


@dataclass(frozen=True)
class OwnWeights:
    """Samples with a copy of the policy, which takes the policy's weights when it is told, or, `deaf`, never."""

    deaf: bool = False
    copies: ClassVar[int] = 1

    def build(
        self, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        engine = CopySampler(policy, tokenizer, slots, self.deaf)
        return RunSamplers(engine, engine)


class CopySampler:
    repeats = True

    def __init__(self, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, slots: int, deaf: bool) -> None:
        self._copy, self._deaf = frozen_copy(policy.model), deaf
        self._sampler = local_sampler(self._copy, tokenizer, slots=slots)

    @torch.no_grad()
    def refresh(self, policy: SampledPolicy, version: int) -> int:
        if not self._deaf:
            for own, (_, weight) in zip(self._copy.parameters(), policy.weights(), strict=True):
                own.copy_(weight)
        return version

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Stream:
        return self._sampler.stream(requests, options, seed=seed, step=step, version=version)


def after_two_steps(config: RunConfig, folder: Path) -> tuple[Run, list[float], list[tuple[int, ...]]]:
    """The run, the gap between sampler and learner at each step, and the tokens of an evaluation after them."""
    run = Run(config, folder, ProgressLines())
    run.log.start("")
    cursor = DataCursor()
    for index in range(2):
        cursor = train_step(run, index, cursor).cursor
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    _, answered = run.evaluate()
    assert {each.completion.version for each in answered} == {run.learner.version}
    return run, [row["sampler_gap"] for row in rows], [each.completion.tokens for each in answered]


@pytest.mark.slow("trains and resumes a run")
def test_a_sampler_with_weights_of_its_own_stays_the_policy(tmp_path: Path, ordinary_precision):
    exact, exact_gaps, exact_answers = after_two_steps(CONFIG, tmp_path / "embedded")
    run, gaps, answers = after_two_steps(replace(CONFIG, sampler=OwnWeights()), tmp_path / "own")
    assert max(gaps) < 1e-4
    assert gaps == exact_gaps
    assert answers == exact_answers
    assert run.learner.version == exact.learner.version == 4
    # One that is not told what has changed falls behind, and evaluation scores the policy of the start.
    _, deaf_gaps, deaf_answers = after_two_steps(replace(CONFIG, sampler=OwnWeights(deaf=True)), tmp_path / "deaf")
    assert deaf_gaps[1] > 1e-2 > deaf_gaps[0]
    assert deaf_answers != exact_answers


# A factory that breaks its promise is named before the first step


@dataclass(frozen=True)
class BuildsNothing:
    copies: ClassVar[int] = 0

    def build(self, *policy: object, **slots: object) -> RunSamplers:
        return None  # pyright: ignore[reportReturnType]


class Half:
    """A sampler that has one of its three members."""

    repeats = True


@dataclass(frozen=True)
class BuildsHalf(BuildsNothing):
    def build(self, *policy: object, **slots: object) -> RunSamplers:
        return RunSamplers(Half(), Half())  # pyright: ignore[reportArgumentType]


def test_a_factory_that_builds_no_samplers_is_named(tmp_path: Path, ordinary_precision):
    with pytest.raises(ValueError, match=r"^sampler BuildsNothing.build returned None: it must return .*RunSamplers$"):
        Run(replace(CONFIG, sampler=BuildsNothing()), tmp_path, ProgressLines())
    with pytest.raises(
        ValueError, match=r"^RunSamplers.training is of Half, which has no refresh and no stream: it mu"
    ):
        Run(replace(CONFIG, sampler=BuildsHalf()), tmp_path, ProgressLines())
