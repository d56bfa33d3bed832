"""A sampler that is not the policy stops a run at its first step, before anything is updated; rounding never does."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import DAPO, GRPO, Algorithm
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.learner.rounding import check_gap, max_gap
from proximo.losses.diagnostics import MismatchStats
from proximo.models import tiny_model, tiny_moe, with_precision
from proximo.rl.assemble import assemble
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.rollouts import Synchronous
from proximo.rl.run import Run
from proximo.rl.train import train_step
from proximo.runs.records import DataCursor
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import Sampler, SamplingOptions
from proximo.types import Group
from tests.rl.test_training import rollouts

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


def first_step(folder: Path, shift: float, **training: int) -> Run:
    run = Run(replace(CONFIG, training=replace(CONFIG.training, **training)), folder, ProgressLines())
    run.rollouts = Synchronous(replace(run.collector, sampler=Shifted(run.collector.sampler, shift)))
    run.log.start("")
    train_step(run, 0, DataCursor())
    return run


@pytest.mark.parametrize("minibatches", [1, 2], ids=["measured in the first update", "measured before it"])
def test_a_sampler_that_is_not_the_policy_stops_the_first_step(tmp_path, ordinary_precision, minibatches: int):
    run = Run(replace(CONFIG, training=replace(CONFIG.training, minibatches=minibatches)), tmp_path, ProgressLines())
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.rollouts = Synchronous(replace(run.collector, sampler=Shifted(run.collector.sampler, 0.5)))
    run.log.start("")
    with pytest.raises(ValueError, match=r"sampler_gap is 0\.5 nats per token at the first step, above 0\.02") as error:
        train_step(run, 0, DataCursor())
    assert "\n" not in str(error.value)
    assert "Qwen3ForCausalLM" in str(error.value)
    assert run.learner.version == 0
    assert all(torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_gap_of_rounding_stops_nothing(tmp_path, ordinary_precision, minibatches: int):
    assert first_step(tmp_path, 1e-3, minibatches=minibatches).learner.version >= 1


def test_a_mismatch_that_was_asked_for_stops_nothing(tmp_path, ordinary_precision):
    run = Run(replace(CONFIG, sampler=Mismatched()), tmp_path, ProgressLines())
    run.rollouts = Synchronous(replace(run.collector, sampler=Shifted(run.collector.sampler, 0.5)))
    run.log.start("")
    train_step(run, 0, DataCursor())
    assert run.learner.version == 1


def learner(algorithm: Algorithm, most: float | None) -> Learner:
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1).double()
    options = LearnerOptions(groups=4, minibatches=2, warmup_steps=0)
    return Learner(PlainPolicy(model), algorithm, options, temperature=1.0, seed=0, max_gap=most)


def shifted(groups: list[Group], logprob: float) -> list[Group]:
    """The same completions from a sampler that says this of each token."""
    return [
        replace(
            group,
            rollouts=tuple(
                replace(each, completion=replace(each.completion, logprobs=(logprob,) * len(each.completion.tokens)))
                for each in group.rollouts
            ),
        )
        for group in groups
    ]


def test_the_first_gap_ends_a_run_and_later_ones_are_told_when_they_appear():
    checked = learner(GRPO, 10.0)
    groups = rollouts(checked.model)
    far = shifted(groups, -50.0)
    with pytest.raises(ValueError, match="sampler_gap is"):
        assemble(far, [], checked, 8)
    told = []
    for each in (groups, far, far, groups, far):
        checked.trusts_sampler = False  # so that a step has an old pass
        assembled = assemble(each, [], checked, 8)
        assert assembled.sampler_gap is not None
        assert (assembled.sampler_gap.gap > 40) == (each is far)
        told.append([notice.kind for notice in checked.guard.take_notices()])
    assert told == [[], ["sampler_gap"], [], [], ["sampler_gap"]]
    assemble(groups, [], checked, 8)
    assert checked.needs_old_pass()  # the sampler was close again, and is not trusted any more


def test_log_probs_that_stood_for_the_old_policys_are_computed_again_when_a_gap_appears():
    """Without an old pass the step's first minibatch shows the gap; a resumed run knows what was seen."""
    trained = learner(GRPO, None)
    trained.trusts_sampler = True  # an earlier step measured it
    assert not trained.needs_old_pass()
    far = shifted(rollouts(trained.model), -9.0)
    assembled = assemble(far, [], trained, 8)
    assert assembled.sampler_gap is None  # no pass was spent on it
    first, *_ = trained.updates(assembled.batch)
    assert first.first_gap is not None
    [notice] = trained.guard.take_notices()
    assert notice.kind == "sampler_gap"
    assert "above 0.02, a tenth of the gate's width" in notice.message
    assert trained.needs_old_pass()
    resumed = learner(GRPO, None)
    resumed.load(trained.state())
    for each in (trained, resumed):
        each.start_step()
        batch = replace(assembled.batch, version=torch.full_like(assembled.batch.version, each.version))
        assert each.measure_gap(batch, batch.rollout_logprobs) is not None
        assert each.needs_old_pass()  # although the two are equal now
        assert each.guard.take_notices() == []


def test_an_old_checkpoint_is_read():
    trained, resumed = learner(GRPO, 10.0), learner(GRPO, 10.0)
    state = trained.state()
    resumed.load(replace(state, values={k: v for k, v in state.values.items() if k not in ("gap", "lost_trust")}))
    assert resumed.state().values == state.values


def test_a_gap_that_appears_in_a_run_is_an_event(tmp_path, ordinary_precision):
    run = first_step(tmp_path, 0.0, minibatches=2)
    run.rollouts = Synchronous(replace(run.collector, sampler=Shifted(run.collector.sampler, 0.5)))
    train_step(run, 1, DataCursor())
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "sampler_gap"]
    assert [event["step"] for event in told] == [2] * len(told)
    assert "its weights" not in told[0]["message"]
    assert any("the sampler no longer samples from the policy" in event["message"] for event in told)
    assert run.learner.needs_old_pass()


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
