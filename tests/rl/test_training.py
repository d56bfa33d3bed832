"""The loop's parts on fakes and tiny models: what is kept, what is trained, and that no split changes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow.parquet as pq
import pytest
import torch

import proximo
from proximo.algorithms import CLIP_COV, DAPO, DR_GRPO, GRPO, GSPO, PPO, RLOO, SAPO, VAPO, Algorithm
from proximo.config import toml
from proximo.learner.gradients import old_logprobs
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.passes import minibatches
from proximo.learner.policy import PlainPolicy
from proximo.losses import ConstantLength, IcePop, KeepAll, KeepCorrect, KeepMixed, SoftOverlong
from proximo.losses.intervals import half_width, t_quantile_95
from proximo.losses.pieces.credit import ProcessNormalized
from proximo.losses.pieces.ratios import CurrentPolicy
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.scoring import score
from proximo.rl.assemble import assemble, to_batch
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.evaluate import evaluate, wilson
from proximo.rl.metrics import rollout_metrics, step_metrics
from proximo.rl.progress import ProgressLines, measure, share, sparkline
from proximo.rl.rollouts import Collector
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.records import Collected, DataCursor, Evaluation
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Completion, Grade, Group, Problem, Request, Rollout
from tests.batches import NAMED
from tests.models.test_scoring import exact
from tests.policies import plain
from tests.rows import metrics_of

TOKENIZER = tiny_tokenizer()


def small_model():
    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1).double()


# Fakes


@dataclass
class FakeSampler:
    """Says the sample's number; remembers what it was asked."""

    calls: list
    repeats = True

    def refresh(self, policy, version: int) -> int:
        return version

    def stream(self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0):
        self.calls.append(([request.key for request in requests], seed, step))
        for number, request in enumerate(requests):
            yield (
                number,
                tuple(
                    Completion((7, 8), (-0.1, -0.2), f"{request.key}.{sample}", "stop", version)
                    for sample in range(request.num_samples)
                ),
            )


@dataclass(frozen=True)
class FakeTask:
    """Even problems have mixed outcomes; others are all wrong, or unscored where they say so."""

    mixed_every: int = 2

    while_sampling = True

    def size(self, split) -> int | None:
        return None

    def problem(self, index: int, split, seed: int) -> Problem:
        return Problem(str(index), f"{index}=", str(index))

    def grade(self, problems, completions) -> list[Grade]:
        return [
            Grade(float(int(problem.id) % self.mixed_every == 0 and completion.text.endswith(".0")))
            for problem, completion in zip(problems, completions, strict=True)
        ]

    def reference(self, problem: Problem) -> str | None:
        return problem.answer


def collector(keep, task=None, **changes) -> Collector:
    options = replace(TrainingOptions(groups=4, group_size=2, minibatches=2), **changes)
    return Collector(task or FakeTask(), FakeSampler([]), TOKENIZER, SamplingOptions(), options, keep, seed=5)


# Collect


def test_without_a_filter_one_round_is_enough():
    collected = collector(KeepAll()).collect(DataCursor(), step=3, version=9)
    assert [group.problem.id for group in collected.groups] == ["0", "1", "2", "3"]
    assert collected.rounds == 1
    assert collected.cursor == DataCursor(4)
    assert collected.sampled_tokens == 16
    assert collected.wasted_tokens == 0
    assert collected.groups[0].rollouts[0].completion.version == 9


def test_dead_groups_are_replaced_by_new_prompts_up_to_the_last_that_is_needed():
    gather = collector(KeepMixed())
    collected = gather.collect(DataCursor(), step=0, version=0)
    assert [group.problem.id for group in collected.groups] == ["0", "2", "4", "6"]
    assert [group.problem.id for group in collected.dropped] == ["1", "3", "5"]
    # Of 7 prompts 4 were kept, and of 4 before them all.
    assert collected.cursor == DataCursor(7, kept_share=(4 + 4) / (4 + 7))
    assert (collected.wasted_tokens, collected.sampled_tokens, collected.rounds) == (12, 28, 2)
    following = collector(KeepMixed(), task=FakeTask(mixed_every=1)).collect(
        DataCursor(8, carried=collected.groups[:1]), step=1, version=1
    )
    assert [group.problem.id for group in following.groups] == ["0", "8", "9", "10"]


def test_groups_that_are_dropped_are_replaced_only_where_their_filter_asks_for_it():
    """Rejection sampling leaves out groups without a right completion, and takes what is left."""
    collected = collector(KeepCorrect()).collect(DataCursor(), step=0, version=0)
    assert [group.problem.id for group in collected.groups] == ["0", "2"]
    assert [group.problem.id for group in collected.dropped] == ["1", "3"]
    assert (collected.rounds, collected.cursor) == (1, DataCursor(4))


def test_groups_beyond_the_step_are_carried_over():
    @dataclass(frozen=True)
    class LateTask(FakeTask):
        def grade(self, problems, completions):
            return [
                Grade(float(int(problem.id) >= 3 and completion.text.endswith(".0")))
                for problem, completion in zip(problems, completions, strict=True)
            ]

    collected = collector(KeepMixed(), task=LateTask(), refill="same_prompt").collect(DataCursor(), step=0, version=0)
    # Of 0..3 only 3 is mixed: a share of 1/4, so the 3 missing are sought among 8 more (twice a step at most).
    assert [group.problem.id for group in collected.groups] == ["3", "4", "5", "6"]
    assert [group.problem.id for group in collected.cursor.carried] == ["7", "8"]


def test_refilling_ends_after_its_rounds_and_trains_on_what_there_is():
    collected = collector(KeepMixed(), task=FakeTask(mixed_every=10**6), refill_rounds=3).collect(
        DataCursor(1), step=0, version=0
    )
    assert collected.groups == ()
    assert collected.rounds == 3


@pytest.mark.parametrize("refill", ["new_prompts", "same_prompt"])
def test_refilling_ends_when_its_tokens_are_spent(refill: Literal["new_prompts", "same_prompt"]):
    task = FakeTask(mixed_every=10**6)
    gather = collector(KeepMixed(), task=task, refill=refill, refill_rounds=9, refill_tokens=17)
    collected = gather.collect(DataCursor(1), step=0, version=0)
    # A round of four groups is 16 tokens: the second still starts, the third does not.
    assert collected.rounds == 2


def test_the_same_prompt_is_sampled_anew_with_other_random_numbers():
    gather = collector(KeepMixed(), refill="same_prompt", refill_rounds=2)
    gather.collect(DataCursor(), step=0, version=0)
    assert isinstance(gather.sampler, FakeSampler)
    (first, second) = gather.sampler.calls
    assert first[0] == [0, 1, 2, 3]
    assert second[0][:2] == [1, 3]
    assert first[1] != second[1]


# Assemble


def group_of(
    outcomes: list[float], lengths: list[int], finish: Literal["stop", "length"] = "stop", version=0, prompt=(5, 6, 7)
) -> Group:
    rollouts = tuple(
        Rollout(Completion(tuple(range(3, 3 + length)), (-1.0,) * length, "x", finish, version), Grade(outcome))
        for outcome, length in zip(outcomes, lengths, strict=True)
    )
    return Group(Problem("p", "p", None), prompt, rollouts)


def learner(algorithm: Algorithm, model=None, **options) -> Learner:
    settings = replace(LearnerOptions(groups=2, minibatches=2, warmup_steps=0), **options)
    return Learner(PlainPolicy(model or small_model()), algorithm, settings, temperature=1.0, seed=0)


def test_tensors_of_ragged_groups():
    batch = to_batch([group_of([1.0, 0.0], [2, 3]), group_of([math.nan], [1], finish="length")])
    assert batch.tokens.tolist() == [[3, 4, 0], [3, 4, 5], [3, 0, 0]]
    assert batch.mask.sum(dim=1).tolist() == [2, 3, 1]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.truncated.tolist() == [False, False, True]
    assert batch.outcome.isnan().tolist() == [False, False, True]
    assert batch.rewards.isnan().tolist() == [False, False, True]


def test_unscored_rows_leave_and_advantages_know_nothing_of_them():
    dropped = [group_of([math.nan, 1.0], [2, 2])]
    assembled = assemble([group_of([1.0, math.nan, 0.0], [2, 2, 2])], dropped, learner(GRPO), 8)
    assert assembled.unscored == 1  # of what was kept
    assert len(assembled.batch) == 2
    advantages, _ = proximo.advantages(
        GRPO, rewards=torch.tensor([1.0, 0.0]), group=torch.tensor([0, 0]), mask=torch.ones(2, 2).bool()
    )
    assert torch.equal(assembled.batch.advantages, advantages)


def test_overlong_shaping_moves_the_reward_and_not_the_outcome():
    algorithm = replace(DAPO, shape=SoftOverlong(limit=4, cache=2))
    assembled = assemble([group_of([1.0, -1.0], [4, 2])], [], learner(algorithm), 8)
    assert assembled.batch.rewards.tolist() == [0.0, -1.0]
    assert assembled.batch.outcome.tolist() == [1.0, -1.0]
    assert assembled.dead_rows == 0


def test_truncated_completions_can_be_masked():
    algorithm = replace(GRPO, keep=KeepAll(truncated=False))
    groups = [group_of([1.0, 0.0], [2, 2]), group_of([1.0, 0.0], [2, 2], finish="length")]
    batch = assemble(groups, [], learner(algorithm), 8).batch
    assert batch.mask.any(dim=1).tolist() == [True, True, False, False]
    assert (batch.advantages[2] != 0).all()


def test_only_what_the_algorithm_needs_is_computed():
    groups = [group_of([1.0, 0.0], [2, 3])]
    sapo = learner(SAPO)
    assert plain(sapo).reference is None
    assert assemble(groups, [], sapo, 8).batch.ref_logprobs is None
    single = learner(SAPO, groups=1, minibatches=1)
    assert assemble(groups, [], single, 8).sampler_gap is None  # one update: no old pass
    assert assemble(groups, [], learner(GRPO), 8).batch.ref_logprobs is not None
    ppo = assemble(groups, [], learner(PPO), 8).batch
    assert ppo.values is not None
    assert ppo.returns is not None
    assert ppo.ref_logprobs is not None


def test_a_stale_row_keeps_its_samplers_log_probs():
    fresh, stale = group_of([1.0, 0.0], [2, 2], version=3), group_of([1.0, 0.0], [2, 2], version=2)
    trainer = learner(SAPO)
    trainer.policy.version = 3
    trainer.start_step()
    batch = assemble([fresh, stale], [], trainer, 8).batch
    assert (batch.old_logprobs[2:] == -1.0).all()
    assert (batch.old_logprobs[:2] != -1.0).all()


def test_with_one_update_a_step_only_stale_rows_have_a_ratio():
    fresh, stale = group_of([1.0, 0.0], [2, 2], version=3), group_of([1.0, 0.0], [2, 2], version=2)
    for groups, ratio_moves in (([fresh], False), ([fresh, stale], True)):
        trainer = learner(SAPO, groups=2, minibatches=1)
        trainer.policy.version = 3
        trainer.start_step()
        update = trainer.update(assemble(groups, [], trainer, 8).batch, fresh=True)
        assert (update.stats.floats()["log_ratio_max"] > 1) is ratio_moves


# Learner


def rollouts(model, seed: int = 0, num_groups: int = 4, group_size: int = 3) -> list[Group]:
    random = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(num_groups):
        prompt = tuple(
            torch.randint(5, 90, (int(torch.randint(1, 5, (1,), generator=random)),), generator=random).tolist()
        )
        siblings = []
        for number in range(group_size):
            tokens = tuple(
                torch.randint(5, 90, (int(torch.randint(1, 7, (1,), generator=random)),), generator=random).tolist()
            )
            siblings.append(Rollout(Completion(tokens, (-4.0,) * len(tokens), "x", "stop"), Grade(float(number == 0))))
        groups.append(Group(Problem("p", "p", None), prompt, tuple(siblings)))
    return groups


def parameters_after(algorithm: Algorithm, **options) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"groups": 4, "minibatches": 2, "learning_rate": 1e-2} | options
    trainer = learner(algorithm, exact(small_model()), **options)
    assembled = assemble(rollouts(trainer.model), [], trainer, 8)
    for _ in trainer.updates(assembled.batch):
        pass
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.slow("trains several runs")
@pytest.mark.parametrize(
    "algorithm", [PPO, GRPO, DAPO, GSPO, SAPO, VAPO, CLIP_COV], ids=lambda a: type(a.gate).__name__
)
def test_the_token_budget_cannot_change_the_result(algorithm: Algorithm):
    whole = parameters_after(algorithm)
    split = parameters_after(algorithm, token_budget=1)
    assert (whole - split).abs().max() < 1e-9
    before = torch.cat([parameter.detach().flatten() for parameter in exact(small_model()).parameters()])
    assert (whole - before).abs().max() > 1e-3


def test_dead_groups_are_skipped_without_changing_the_update():
    trainer = learner(SAPO, groups=4, minibatches=1)
    groups = rollouts(trainer.model)
    dead = replace(groups[1], rollouts=tuple(replace(rollout, grade=Grade(0.0)) for rollout in groups[1].rollouts))
    batch = assemble([groups[0], dead, *groups[2:]], [], trainer, 8).batch
    assert len(trainer.gradients.rows_with_gradient(batch)) == 9
    trainer.update(batch, fresh=True)
    skipped = [parameter.grad.clone() for parameter in trainer.model.parameters() if parameter.grad is not None]
    other = learner(SAPO, groups=4, minibatches=1)
    other.gradients.rows_with_gradient = lambda batch: torch.arange(len(batch))
    other.update(batch, fresh=True)
    full = [parameter.grad for parameter in other.model.parameters() if parameter.grad is not None]
    for ours, theirs in zip(skipped, full, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert len(learner(GRPO).gradients.rows_with_gradient(batch)) == 12  # a KL term still teaches dead rows


@pytest.mark.slow("compares with a padded model")
@pytest.mark.parametrize("name", NAMED)
def test_the_learners_gradient_is_policy_losss_with_rows_of_advantage_0(name: str):
    """Rows that the learner leaves out are rows that the algorithm's own loss does not move."""
    torch.manual_seed(0)
    trainer = learner(
        NAMED[name].with_length_limit(8), groups=4, minibatches=1 if NAMED[name].anchor == CurrentPolicy() else 2
    )
    teacher = trainer.model if name == "DISTILL" else None
    batch = assemble(rollouts(trainer.model), [], trainer, 8, teacher=teacher).batch
    now = trainer.old_scores(batch).logprobs
    credit = torch.where((batch.group == 1).unsqueeze(1), 0.0, -1.0) * batch.mask
    batch = replace(batch, advantages=credit, old_logprobs=now + 0.3 * torch.randn(now.shape) * batch.mask)
    trainer.critic = None  # the value model's term is not policy_loss's
    if name == "KL_COV":
        plan, _ = trainer.gradients.plan(trainer.passes, batch)
        assert plan.selected is not None
        assert plan.selected[batch.group == 1].any()
    trainer.gradients.of_update(trainer.passes, batch, trainer.own_rows(batch))
    ours = [parameter.grad.clone() for parameter in plain(trainer).parameters().values() if parameter.grad is not None]
    plain(trainer).optimizer.zero_grad()
    fields = {"prompts": batch.prompts, "tokens": batch.tokens, "lengths": batch.lengths, "group": batch.group}
    scores = score(trainer.model, **fields, temperature=1.0, entropy_gradient=True)
    loss, _ = proximo.policy_loss(
        trainer.algorithm,
        logprobs=scores.logprobs,
        old_logprobs=old_logprobs(batch, trainer.own_rows(batch), scores.logprobs.detach()),
        advantages=batch.advantages,
        mask=batch.mask,
        group=batch.group,
        ref_logprobs=batch.ref_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        entropy=scores.entropy,
        outcome=batch.outcome,
        generator=torch.Generator().manual_seed(0),
    )
    loss.backward()
    theirs = [parameter.grad for parameter in plain(trainer).parameters().values() if parameter.grad is not None]
    assert any(gradient.any() for gradient in theirs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-11)


def test_an_update_of_dead_rows_alone_is_a_gradient_of_zero_not_none():
    trainer = learner(SAPO, groups=4, minibatches=1, learning_rate=1e-2)
    groups = rollouts(trainer.model)
    trainer.update(assemble(groups, [], trainer, 8).batch, fresh=True)
    dead = [replace(g, rollouts=tuple(replace(r, grade=Grade(1.0)) for r in g.rollouts)) for g in groups]
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    update = trainer.update(assemble(dead, [], trainer, 8).batch, fresh=True)
    assert update.gradient_norm == 0
    # AdamW's momentum still moves the weights, as it would had the rows been run.
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_minibatches_are_whole_groups_and_never_smaller_than_a_full_steps():
    trainer = learner(SAPO, groups=8, minibatches=4)
    batch = to_batch([group_of([1.0, 0.0], [2, 2], prompt=(5, number)) for number in range(5)])
    parts = minibatches(batch, trainer.options, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    assert [len(part) for part in parts] == [6, 4]  # 3 and 2 groups: two minibatches, not three
    for part in parts:
        assert all((batch.group[part] == number).sum() in (0, 2) for number in range(5))


def test_the_sampler_is_trusted_only_within_a_tenth_of_the_gate():
    for algorithm, gap, trusted in [(GRPO, 0.01, True), (GRPO, 0.05, False), (GSPO, 1e-5, True), (GSPO, 1e-3, False)]:
        trainer = learner(algorithm)
        batch = to_batch([group_of([1.0, 0.0], [2, 2])])
        measured = trainer.measure_gap(batch, batch.rollout_logprobs.double() + gap)
        assert measured is not None
        assert measured.gap == pytest.approx(gap, rel=2e-2)
        assert trainer.trusts_sampler is trusted


def test_the_reference_can_be_reset_to_the_policy():
    trainer = learner(GRPO, groups=4, minibatches=2, learning_rate=1e-2)
    batch = assemble(rollouts(trainer.model), [], trainer, 8).batch
    updates = list(trainer.updates(batch))
    assert sorted(torch.cat([update.rows for update in updates]).tolist()) == list(range(len(batch)))
    assert not torch.allclose(trainer.reference_logprobs(batch), trainer.old_scores(batch).logprobs)
    trainer.policy.reset_reference()
    assert torch.equal(trainer.reference_logprobs(batch), trainer.old_scores(batch).logprobs)


# What a review found


def test_a_length_left_to_the_run_is_filled_in():
    assert DR_GRPO.with_length_limit(64).weights == ConstantLength(64)
    assert replace(DR_GRPO, weights=ConstantLength(8)).with_length_limit(64).weights == ConstantLength(8)
    assert GRPO.with_length_limit(64) == GRPO


def test_a_correction_always_has_an_old_pass_and_a_token_gap_cannot_cancel_within_a_row():
    corrected = replace(GRPO, correct=IcePop())
    trainer = learner(corrected)
    batch = to_batch([group_of([1.0, 0.0], [2, 2])])
    alternating = batch.rollout_logprobs.double() + torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    measured = trainer.measure_gap(batch, alternating)
    assert measured is not None
    assert measured.gap == pytest.approx(1.0)
    assert not trainer.trusts_sampler
    trainer.trusts_sampler = True
    assert trainer.needs_old_pass()
    gspo = learner(GSPO)
    gspo.measure_gap(batch, alternating)
    assert gspo.trusts_sampler  # the mean over the row is what its ratio sees


@pytest.mark.parametrize(("groups", "configured"), [(7, 4), (10, 4), (16, 6), (16, 12)])
def test_there_are_never_more_updates_than_configured(groups: int, configured: int):
    trainer = learner(SAPO, groups=groups, minibatches=configured)
    batch = to_batch([group_of([1.0, 0.0], [1, 1], prompt=(5, number)) for number in range(groups)])
    assert len(minibatches(batch, trainer.options, torch.Generator().manual_seed(0))) == configured


def test_one_unscored_part_leaves_the_whole_completion_out():
    grade = Grade(1.0, {"correct": 1.0, "style": math.nan})
    assert math.isnan(grade.reward)
    assert math.isnan(grade.verdict)
    assert all(math.isnan(each.reward) for each in (Grade(math.inf), Grade(1.0, {"a": 1.0, "b": -math.inf})))
    assert Grade(0.5, {"correct": 0.5, "style": 0.25}).reward == 0.75
    group = group_of([1.0, 0.0, 0.0], [2, 2, 2])
    broken = replace(group, rollouts=(replace(group.rollouts[0], grade=grade), *group.rollouts[1:]))
    trainer = learner(PPO)
    assembled = assemble([broken], [], trainer, 8)
    assert assembled.unscored == 1
    assert all(math.isfinite(update.gradient_norm) for update in trainer.updates(assembled.batch))


@dataclass(frozen=True)
class SmallTask(FakeTask):
    """Three held-out problems; a grader that fails on the last of them."""

    def size(self, split) -> int | None:
        return 3

    def grade(self, problems, completions) -> list[Grade]:
        return [Grade(math.nan if problem.id == "2" else float(problem.id == "0")) for problem in problems]


def test_evaluation_counts_each_problem_once_and_unscored_ones_not_at_all():
    result, answered = evaluate(
        SmallTask(), FakeSampler([]), TOKENIZER, SamplingOptions(), EvaluationOptions(problems=1000, samples=2), seed=0
    )
    assert len(answered) == 3
    assert (result.accuracy, result.problems, result.unscored) == (0.5, 3, 1)
    assert (result.mean_at_k, result.pass_at_k) == (0.5, 0.5)
    assert "3 problems, 1 unscored" in share(result)


def test_two_evaluations_are_written_alike_where_one_has_outcomes_in_between():
    """A policy that ends with nothing but 0 and 1 is still beside its start, which was 0.75 on average."""
    graded = Evaluation(accuracy=0.5, low=0.0, high=1.0, problems=2, unscored=0, outcome=0.75, reward=0.75)
    ended = replace(graded, outcome=0.5)
    assert share(ended) == "50.0% (0.0% to 100.0%, 2 problems)"
    assert share(ended, graded) == "0.500 (50.0% at least 1, 2 problems)"
    assert (measure(ended), measure(ended, graded)) == ("accuracy", "task score")
    unknown = replace(ended, accuracy=math.nan, outcome=math.nan, unscored=2)
    assert (share(ended, unknown), measure(ended, unknown)) == (share(ended), "accuracy")
    assert share(unknown, ended) == "unknown (2 problems, 2 unscored)"


@dataclass(frozen=True)
class MuteTask(SmallTask):
    """A grader that fails on everything."""

    def grade(self, problems, completions) -> list[Grade]:
        return [Grade(math.nan)] * len(problems)


def test_what_could_not_be_graded_at_all_is_unknown_and_not_wrong():
    options = EvaluationOptions(problems=3, samples=2)
    result, _ = evaluate(MuteTask(), FakeSampler([]), TOKENIZER, SamplingOptions(), options, seed=0)
    for value in (result.accuracy, result.mean_at_k, result.mean_half_width, result.pass_at_k):
        assert value is not None
        assert math.isnan(value)
    assert (result.pass_low, result.pass_high) == (0.0, 1.0)


@dataclass(frozen=True)
class GradedTask(SmallTask):
    """Scores of 10 and 30, and one that is missing."""

    def grade(self, problems, completions) -> list[Grade]:
        return [Grade({"0": 10.0, "1": 30.0}.get(problem.id, math.nan)) for problem in problems]


def test_graded_answers_have_an_interval_of_their_own():
    options = EvaluationOptions(problems=3)
    result, _ = evaluate(GradedTask(), FakeSampler([]), TOKENIZER, SamplingOptions(), options, seed=0)
    # The deviation of 10 and 30 is 10·√2, so half of the interval is 12.706 · 10·√2 / √2.
    assert (result.outcome, result.outcome_half_width) == (20.0, pytest.approx(127.06))
    right, _ = evaluate(SmallTask(), FakeSampler([]), TOKENIZER, SamplingOptions(), options, seed=0)
    assert right.outcome_half_width is None  # that of the accuracy says it


def test_the_interval_of_few_problems_is_students():
    # Of 1 and 0: the deviation is √½, so half of the interval is 12.706 · √½ / √2.
    result, _ = evaluate(
        SmallTask(), FakeSampler([]), TOKENIZER, SamplingOptions(), EvaluationOptions(problems=3, samples=2), seed=0
    )
    assert result.mean_half_width == pytest.approx(12.706 / 2)
    assert math.isnan(half_width([0.5]))
    # Solved from the incomplete beta function, to 30 digits: 97.5 % of the distribution lies below.
    assert [round(t_quantile_95(freedom), 3) for freedom in (1, 9, 30, 31, 60, 1000)] == [
        12.706, 2.262, 2.042, 2.040, 2.000, 1.962,
    ]  # fmt: skip


def test_a_reference_that_is_not_there_cannot_be_reset():
    with pytest.raises(ValueError, match="no reference to reset"):
        RunConfig(algorithm=SAPO, training=TrainingOptions(reset_reference_every=5))


# Entropy


def with_entropies(group: Group, value: float) -> Group:
    def said(rollout: Rollout) -> Rollout:
        completion = rollout.completion
        return replace(rollout, completion=replace(completion, entropies=(value,) * len(completion.tokens)))

    return replace(group, rollouts=tuple(map(said, group.rollouts)))


def logged(algorithm: Algorithm) -> dict[str, float]:
    """Of a step with a mixed group, a group that is all wrong, and one that was dropped."""
    mixed = with_entropies(group_of([1.0, 0.0], [2, 2]), 0.5)
    dead, dropped = (with_entropies(group_of([0.0, 0.0], [3, 1]), value) for value in (0.1, 0.3))
    collected = Collected((mixed, dead), (dropped,), DataCursor(), rounds=1, sampled_tokens=12)
    trainer = learner(algorithm, groups=2, minibatches=1)
    assembled = assemble(collected.groups, collected.dropped, trainer, 8)
    return step_metrics(collected, assembled, list(trainer.updates(assembled.batch)), 1e-6)


def test_entropy_is_of_all_that_was_sampled_whatever_the_updates_run():
    """4 tokens each of 0.5, 0.1 and 0.3; dead rows are run by GRPO, for its KL, and by no other of these."""
    found = {algorithm: logged(algorithm) for algorithm in (GRPO, DAPO, GSPO, SAPO, PPO)}
    for metrics in found.values():
        assert metrics["entropy"] == pytest.approx(0.3)
    assert found[GRPO]["measured"] == 1
    assert found[GSPO]["measured"] == 0.5
    # What the updates ran is a number of its own, and not the same for both.
    assert found[GRPO]["update_entropy"] != found[GSPO]["update_entropy"]


def test_entropy_is_not_made_up_where_a_sampler_does_not_say_it():
    collected = Collected((group_of([1.0, 0.0], [2, 2]),), (), DataCursor(), rounds=1, sampled_tokens=4)
    assert "entropy" not in rollout_metrics(collected)


def test_log_probs_of_draws_from_the_whole_distribution_estimate_the_entropy():
    """Two sides, 0.25 and 0.75: the mean of −log p, weighted as they are drawn, is the entropy."""
    said = [Completion((1,), (math.log(share),), "", "stop") for share in (0.25, 0.75, 0.75, 0.75)]
    drawn = Group(Problem("coin", "", ""), (0,), tuple(Rollout(each, Grade(1.0)) for each in said))
    collected = Collected((drawn,), (), DataCursor(), rounds=1, sampled_tokens=4)
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert rollout_metrics(collected, is_whole=True)["entropy"] == pytest.approx(entropy)
    assert "entropy" not in rollout_metrics(collected), "a cut distribution has another entropy"
    told = replace(
        drawn,
        rollouts=tuple(replace(each, completion=replace(each.completion, entropies=(0.5,))) for each in drawn.rollouts),
    )
    assert rollout_metrics(replace(collected, groups=(told,)), is_whole=True)["entropy"] == 0.5


# The whole loop


def tiny_run(algorithm: Algorithm) -> RunConfig:
    return RunConfig(
        algorithm=algorithm,
        task=Arithmetic(),
        model="tiny-arithmetic",
        sampling=SamplingOptions(max_tokens=8),
        training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-4),
        evaluation=EvaluationOptions(problems=5, samples=2),
        steps=2,
    )


@pytest.mark.slow("trains several runs")
@pytest.mark.parametrize("name", ["PPO", "GRPO", "DAPO", "GSPO", "SAPO"])
@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_leaves_its_folder(name: str, tmp_path):
    config = tiny_run(getattr(proximo, name))
    outcome = train(Run(config, tmp_path / "a", ProgressLines()))
    rows = metrics_of(tmp_path / "a")
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    known = "reward outcome length truncated entropy old_kl clip_low clip_high gate ratio_spread dead_groups ess"
    assert {*known.split(), "wasted_tokens", "sampler_gap", "gradient_norm", "loss"} <= rows[1].keys()
    assert rows[1]["sampler_gap"] < 1e-5
    assert ("kl" in rows[1]) == (name in ("PPO", "GRPO"))
    assert toml.loads((tmp_path / "a" / "config.toml").read_text(), RunConfig) == config
    assert (outcome.checkpoint / "model.safetensors").exists()
    assert (outcome.checkpoint / "tokenizer.json").exists()
    table = pq.read_table(tmp_path / "a" / "rollouts" / "step-000001.parquet").to_pydict()
    for tokens, passes, updates, state in zip(
        table["tokens"], table["current_logprobs"], table["updates"], table["state"], strict=True
    ):
        assert [len(logprobs) for logprobs in passes] == [len(tokens)] * len(updates)
        assert updates in ([0], [1]) if state == "trained" else updates == []
    assert 0 <= outcome.before.low <= outcome.before.accuracy <= outcome.before.high <= 1


def test_sparkline_and_interval():
    assert sparkline([0.0, 0.5, 1.0, math.nan]) == "▁▅█"
    assert sparkline([-1.0, 0.0, 3.0]) == "▁▃█"  # from the least to the most
    low, high = wilson(5, 10)
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 10)[1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"sampling": SamplingOptions(top_p=0.9)}, "truncate the distribution"),
        ({"sampling": SamplingOptions(temperature=0.0)}, "greedy completions of a group are all equal"),
        ({"training": TrainingOptions(group_size=1)}, "group_size is 1"),
        ({"algorithm": RLOO}, "training.epochs is 4"),
        ({"algorithm": replace(GRPO, advantage=ProcessNormalized())}, "task Arithmetic gives none: use the task Chain"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_loads(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        RunConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 0}, "training.groups is 0"),
        ({"groups": 2, "minibatches": 4}, "there cannot be more"),
        ({"refill_tokens": 0}, "training.refill_tokens is 0"),
        ({"learning_rate": 0.0}, "training.learning_rate is 0.0: give a number above 0$"),  # and of no other field
        ({"max_gradient_norm": 0.0}, "training.max_gradient_norm is 0.0: give a number above 0$"),
        ({"warmup_steps": -1}, "training.warmup_steps is -1: give 0 or more$"),
        ({"weight_decay": -0.1}, "training.weight_decay is -0.1: give 0 or more$"),
        ({"reset_reference_every": 0}, "training.reset_reference_every is 0"),
    ],
)
def test_bad_options_say_field_and_value(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TrainingOptions(**changes)
