"""Completions with tokens that the policy did not sample: read as context, and in no loss, length or statistic."""

import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import proximo
from proximo.algorithms import DAPO, GRPO, GSPO, PPO, REINFORCE_PP, SAPO, Algorithm
from proximo.insight.lens.crediting import advantages_under
from proximo.insight.lens.explanations import why
from proximo.insight.lens.lens import look
from proximo.insight.lens.states import TokenState
from proximo.insight.lens.steps import read_step
from proximo.learner.critic import kl_per_completion
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.losses import ConstantLength, Gae, SoftOverlong
from proximo.models import tiny_model
from proximo.models.scoring import score
from proximo.rl.assemble import assemble, to_batch
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.rl.metrics import rollout_metrics
from proximo.runs.records import Answered, Collected, DataCursor
from proximo.runs.rollouts import rollout_table, write_rollouts
from proximo.runs.state import plain_answer, read_answers
from proximo.samplers.sampler import SamplingOptions
from proximo.system.sealing import seal
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Completion, Grade, Group, Problem, Rollout
from proximo.types.batches import Batch
from tests.steps import SPELLING

SAMPLED = (
    (True, True, False, False, True),
    (True, True, True),
    (True, False, True, True),
    (True, True),
)
"""Of two groups of two: the first completion has a tool's answer in its middle."""
TOKENS: tuple[tuple[int, ...], ...] = ((7, 8, 20, 21, 9), (8, 8, 9), (9, 22, 7, 8), (7, 9))
COUNTS = [3, 3, 3, 2]
VERSION = -1
"""Sampled before the step: ratios are against these log-probs, and not 1."""
FIVE = {"ppo": PPO, "grpo": GRPO, "dapo": DAPO, "gspo": GSPO, "sapo": SAPO}


def groups(garbage: float = 0.0, tool: tuple[int, int] = (20, 21)) -> list[Group]:
    """`garbage` stands where a log-prob of a token that was not sampled would."""
    rollouts = []
    for row, (tokens, sampled) in enumerate(zip(TOKENS, SAMPLED, strict=True)):
        said = (*tokens[:2], *tool, tokens[4]) if row == 0 else tokens
        logprobs = tuple(-4.5 if each else garbage for each in sampled)
        entropies = tuple(0.5 if each else garbage for each in sampled)
        given = () if all(sampled) else sampled
        completion = Completion(said, logprobs, "x", "stop", VERSION, sampled=given, entropies=entropies)
        rollouts.append(Rollout(completion, Grade(float(row % 2))))
    problems = [Problem("a", "1+1=", "2"), Problem("b", "1+2=", "3")]
    return [Group(problem, (5, 6), tuple(rollouts[2 * n : 2 * n + 2]), ordinal=n) for n, problem in enumerate(problems)]


def model(seed: int = 1):
    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=seed).double()


def learner(algorithm: Algorithm) -> Learner:
    settings = LearnerOptions(groups=2, warmup_steps=0, minibatches=1, max_gradient_norm=1e9)
    return Learner(PlainPolicy(model()), algorithm, settings, temperature=1.0, seed=0)


def compact(tensor: Tensor) -> Tensor:
    """[4, 3]: the sampled tokens of each row alone, one next to the other."""
    found = torch.zeros(len(SAMPLED), 3, dtype=tensor.dtype)
    for row, sampled in enumerate(SAMPLED):
        own = tensor[row, : len(sampled)][torch.tensor(sampled)]
        found[row, : len(own)] = own
    return found


MASK = torch.arange(3) < torch.tensor(COUNTS).unsqueeze(1)


def scored(policy, batch: Batch) -> Tensor:
    return score(policy, prompts=batch.prompts, tokens=batch.tokens, lengths=batch.lengths, group=batch.group).logprobs


def test_tensors_say_what_was_sampled_whatever_stands_elsewhere():
    batch = to_batch(groups(garbage=math.nan))
    assert batch.sampled.tolist() == [[*row, *[False] * (5 - len(row))] for row in SAMPLED]
    assert torch.equal(batch.mask, batch.sampled)
    assert batch.lengths.tolist() == [5, 3, 4, 2]
    assert batch.sampled_lengths.tolist() == COUNTS
    assert batch.rollout_logprobs[0].tolist() == [-4.5, -4.5, 0, 0, -4.5]
    assert batch.rollout_entropy is not None
    assert not batch.rollout_entropy.isnan().any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sampled", (True,)), ("logprobs", (0.0,)), ("entropies", (0.5,)), ("routes", torch.zeros(1, 2, 2))],
)
def test_a_wrong_number_of_entries_is_refused(name, value):
    given = {"logprobs": (0.0, 0.0), name: value}
    with pytest.raises(ValueError, match=rf"completion.{name} has 1 entries for 2 tokens: give one for each"):
        Completion((1, 2), text="", finish="stop", **given)


@pytest.mark.parametrize("name", FIVE)
def test_loss_and_gradient_are_those_without_the_other_tokens(name):
    """The loss of log-probs that the model gives in full context, on the sampled tokens alone."""
    algorithm = FIVE[name]
    if isinstance(algorithm.weights, ConstantLength):
        algorithm = replace(algorithm, weights=ConstantLength(8))
    trainer, twin = learner(algorithm), model()
    assembled = assemble(groups(garbage=math.nan), [], trainer, 8)
    batch = assembled.batch
    assert len(batch) == 4
    logprobs = scored(twin, batch)
    old = compact(batch.rollout_logprobs)
    plain = replace(algorithm, extra=None, advantage=GRPO.advantage)
    own = compact(logprobs)
    loss, _ = proximo.policy_loss(
        plain,
        logprobs=own,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=compact(batch.advantages),
        ref_logprobs=own.detach(),
        mask=MASK,
        group=batch.group,
        outcome=batch.outcome,
        entropy=torch.zeros_like(own).detach(),
    )
    [update] = trainer.updates(batch)
    assert float(update.stats.totals["policy_loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert int(update.stats.totals["tokens"]) == sum(COUNTS)
    if not algorithm.extras:
        wanted = torch.autograd.grad(loss, list(twin.parameters()))
        norm = math.sqrt(sum(float((each**2).sum()) for each in wanted))
        assert norm > 0
        assert update.gradient_norm == pytest.approx(norm, rel=1e-6)


def test_the_learner_reads_what_it_did_not_sample():
    ours, theirs = (to_batch(groups(tool=tool)) for tool in ((20, 21), (30, 31)))
    policy = model()
    before, after = (scored(policy, batch) for batch in (ours, theirs))
    assert torch.equal(before[0, :2], after[0, :2])
    assert (before[0, 4] - after[0, 4]).abs() > 1e-3


def test_lengths_and_entropy_count_sampled_tokens():
    collected = Collected(tuple(groups(garbage=9.0)), (), DataCursor(), rounds=1, sampled_tokens=sum(COUNTS))
    metrics = rollout_metrics(collected)
    assert metrics["length"] == sum(COUNTS) / 4
    assert metrics["length_p90"] == 3.0
    assert metrics["entropy"] == 0.5
    dropped = replace(collected, groups=(), dropped=collected.groups)
    assert dropped.wasted_tokens == sum(COUNTS)


def test_a_tool_s_answer_is_not_penalised():
    """Limit 4, buffer 2: 3 sampled tokens cost half a unit; 5 would cost a whole one."""
    algorithm = replace(GRPO, shape=SoftOverlong(cache=2))
    rewards = assemble(groups(), [], learner(algorithm), 4).everyone.rewards
    assert rewards.tolist() == [-0.5, 0.5, -0.5, 1.0]


def test_kl_of_a_completion_is_over_its_sampled_tokens():
    batch = to_batch(groups())
    batch = replace(batch, old_logprobs=torch.full((4, 5), -1.0), ref_logprobs=torch.full((4, 5), -1.25))
    assert kl_per_completion(batch) == pytest.approx(0.25 * sum(COUNTS) / 4)


def test_gae_steps_over_what_was_not_sampled():
    """γ = λ = 1: a token's advantage is the reward minus the value before it, and a tool's token has none."""
    algorithm = replace(PPO, advantage=Gae(discount=1.0, decay=1.0), shape=None)
    assembled = assemble(groups(), [], learner(algorithm), 8)
    batch = assembled.batch
    assert batch.values is not None
    wanted = (batch.rewards.unsqueeze(1) - batch.values.double()) * batch.sampled
    assert torch.allclose(batch.advantages, wanted)
    assert assembled.earned is not None
    assert torch.equal(assembled.earned, batch.rewards.unsqueeze(1) * batch.sampled)


def stored(tmp_path, algorithm: Algorithm):
    trainer = learner(algorithm)
    assembled = assemble(groups(), [], trainer, 8)
    updates = list(trainer.updates(assembled.batch))
    table = rollout_table(assembled.everyone, SPELLING, trained=torch.arange(4), kept_groups=2, updates=updates)
    write_rollouts(table, tmp_path / "step.parquet")
    return updates[0], read_step(tmp_path / "step.parquet", 1)


@pytest.mark.parametrize("name", ["dapo", "gspo", "sapo"])
def test_the_lens_sees_the_same_loss_and_leaves_the_other_tokens_outside(tmp_path, name):
    update, step = stored(tmp_path, FIVE[name])
    config = RunConfig(
        algorithm=FIVE[name],
        sampling=SamplingOptions(max_tokens=8),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1),
    )
    assert step.batch.sampled_lengths.tolist() == COUNTS
    seen = look(step, FIVE[name], config)
    assert seen.losses[0] == pytest.approx(float(update.stats.totals["policy_loss"]), rel=1e-5)
    flat = torch.tensor([each for row in SAMPLED for each in row])
    assert torch.equal(seen.state != TokenState.OUTSIDE, flat)
    assert float(seen.weights.sum()) == pytest.approx(1.0)
    assert not seen.gradient[~flat].any()
    assert why(step, seen, 0, 2) == "the policy did not sample it: it is input only, and not trained on"


def test_advantages_computed_anew_are_of_sampled_tokens_alone(tmp_path):
    """REINFORCE++ gives each token the return after it, whitened over all sampled tokens: mean 0, deviation 1."""
    _, step = stored(tmp_path, DAPO)
    config = RunConfig(algorithm=DAPO, training=TrainingOptions(groups=2, group_size=2, minibatches=1))
    anew, _ = advantages_under(step, replace(REINFORCE_PP, kl=None), config)
    assert not anew[~step.batch.sampled].any()
    own = anew[step.batch.sampled]
    assert own.abs().min() > 0.1
    assert float(own.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(own.std()) == pytest.approx(1.0, rel=1e-3)


def test_a_file_without_the_column_was_sampled_whole(tmp_path):
    """As versions before 0.9 wrote it."""
    stored(tmp_path, DAPO)
    table = pq.read_table(tmp_path / "step.parquet")
    pq.write_table(table.drop_columns(["sampled"]), tmp_path / "old.parquet")
    seal(tmp_path / "old.parquet")
    step = read_step(tmp_path / "old.parquet", 1)
    assert step.batch.sampled.all()
    assert step.batch.sampled_lengths.tolist() == [5, 3, 4, 2]


def test_a_checkpoint_s_answers_keep_what_was_sampled():
    task = Arithmetic()
    completion = groups()[0].rollouts[0].completion
    plain = plain_answer(Answered(task.problem(0, "held_out", 0), completion, Grade(1.0)))
    [answer] = read_answers([plain], task, 0)
    assert answer.completion == completion
    del plain["sampled"]
    assert read_answers([plain], task, 0)[0].completion.sampled == ()
