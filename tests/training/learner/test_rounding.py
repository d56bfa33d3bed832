"""A sampler that is not the policy stops a run at its first step, before anything is updated; rounding never does."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import DAPO, GRPO, Algorithm
from proximo.maths.mismatch import MismatchStats
from proximo.models import tiny_model, tiny_moe, with_precision
from proximo.samplers import Sampler, SamplingOptions
from proximo.samplers.mismatched import Mismatched
from proximo.training.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.training.learner.learner import Learner
from proximo.training.learner.policy import PlainPolicy
from proximo.training.learner.rounding import check_gap, max_gap
from proximo.training.records import DataCursor
from proximo.training.rl.assemble import assemble
from proximo.training.rl.progress import Lines
from proximo.training.rl.run import Run
from proximo.training.rl.step import train_step
from tests.training.rl.test_training import rollouts

CONFIG = RunConfig(
    algorithm=replace(DAPO, keep=GRPO.keep),
    sampling=SamplingOptions(max_tokens=5),
    training=TrainingOptions(groups=8, group_size=6, minibatches=1, warmup_steps=0),
    evaluation=EvaluationOptions(problems=1),
    steps=1,
)


@dataclass(frozen=True)
class Shifted:
    """A sampler whose log-probs are not those of the policy."""

    inner: Sampler
    shift: float

    repeats = True

    def refresh(self, policy, version):
        return self.inner.refresh(policy, version)

    def stream(self, requests, options, *, seed, step, version=0):
        for number, siblings in self.inner.stream(requests, options, seed=seed, step=step, version=version):
            yield (
                number,
                tuple(replace(each, logprobs=tuple(p - self.shift for p in each.logprobs)) for each in siblings),
            )


@pytest.fixture
def float32():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def first_step(folder: Path, shift: float, **training: int) -> Run:
    run = Run(replace(CONFIG, training=replace(CONFIG.training, **training)), folder, Lines())
    run.collector = replace(run.collector, sampler=Shifted(run.collector.sampler, shift))
    run.log.start("")
    train_step(run, 0, DataCursor())
    return run


@pytest.mark.parametrize("minibatches", [1, 2], ids=["measured in the first update", "measured before it"])
def test_a_sampler_that_is_not_the_policy_stops_the_first_step(tmp_path, float32, minibatches: int):
    run = Run(replace(CONFIG, training=replace(CONFIG.training, minibatches=minibatches)), tmp_path, Lines())
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.collector = replace(run.collector, sampler=Shifted(run.collector.sampler, 0.5))
    run.log.start("")
    with pytest.raises(ValueError, match=r"sampler_gap is 0\.5 nats per token at the first step, above 0\.02") as error:
        train_step(run, 0, DataCursor())
    assert "\n" not in str(error.value)
    assert "Qwen3ForCausalLM" in str(error.value)
    assert run.learner.version == 0
    assert all(torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_gap_of_rounding_stops_nothing(tmp_path, float32, minibatches: int):
    assert first_step(tmp_path, 1e-3, minibatches=minibatches).learner.version >= 1


def test_a_mismatch_that_was_asked_for_stops_nothing(tmp_path, float32):
    run = Run(replace(CONFIG, sampler=Mismatched()), tmp_path, Lines())
    run.collector = replace(run.collector, sampler=Shifted(run.collector.sampler, 0.5))
    run.log.start("")
    train_step(run, 0, DataCursor())
    assert run.learner.version == 1


def learner(algorithm: Algorithm, most: float | None) -> Learner:
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1).double()
    options = TrainingOptions(groups=4, group_size=3, minibatches=2, warmup_steps=0)
    return Learner(PlainPolicy(model), algorithm, options, temperature=1.0, seed=0, max_gap=most)


def test_only_the_first_measured_gap_is_judged():
    checked = learner(GRPO, 10.0)
    groups = rollouts(checked.model)
    far = [
        replace(
            group,
            rollouts=tuple(
                replace(each, completion=replace(each.completion, logprobs=(-50.0,) * len(each.completion.tokens)))
                for each in group.rollouts
            ),
        )
        for group in groups
    ]
    with pytest.raises(ValueError, match="sampler_gap is"):
        assemble(far, [], checked, 8)
    assemble(groups, [], checked, 8)
    found = assemble(far, [], checked, 8).sampler_gap
    assert found is not None
    assert found.gap > 40


def stats(gap: float) -> MismatchStats:
    return MismatchStats(gap, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0)


def test_bounds_by_precision_and_experts():
    dense, mixture = tiny_model(hidden=32, layers=1), tiny_moe(hidden=32, layers=1)
    assert (max_gap(dense), max_gap(mixture)) == (0.02, 0.2)
    half = with_precision(dense, torch.bfloat16), with_precision(mixture, torch.bfloat16)
    assert tuple(map(max_gap, half)) == (0.25, 1.0)
    check_gap(stats(0.25), 0.25, half[0])
    check_gap(stats(math.nan), 0.25, half[0])  # the guard's business
    with pytest.raises(ValueError, match="try dtype float32"):
        check_gap(stats(0.26), 0.25, half[0])
