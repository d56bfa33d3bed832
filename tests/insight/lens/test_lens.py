"""A stored step under any algorithm: states, numbers and words by hand, and equal to what training computes."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import proximo
from proximo.algorithms import DAPO, GMPO, GRPO, GSPO, KL_COV, PPO, REINFORCE_PP, RLOO, SAPO, VAPO, Algorithm
from proximo.insight.lens.crediting import advantages_under
from proximo.insight.lens.explanations import why
from proximo.insight.lens.lens import look, policy_loss
from proximo.insight.lens.replay import chosen, compared
from proximo.insight.lens.states import BLOCKED, TokenState
from proximo.insight.lens.steps import StoredStep
from proximo.insight.page import reader
from proximo.losses import (
    BatchScaled,
    CappedScore,
    Clip,
    ClipCovariance,
    Gae,
    GeometricRejection,
    GroupCentred,
    GroupNormalized,
    IcePop,
    KeepAll,
    KlReward,
    LeaveOneOut,
    LiveScaled,
    OffPolicyMask,
    ReturnToGo,
    SequenceMasked,
    SequenceWhitened,
    SignScaled,
    SoftOverlong,
    TokenTruncated,
    TokenWhitened,
    Unclipped,
    ValueLoss,
)
from proximo.losses.pieces.protocols import AdvantageTraits, GateTraits
from proximo.rl.config import RunConfig
from proximo.runs.rollouts import write_rollouts
from tests import batches, fixture
from tests.batches import NAMED
from tests.fixture import ADVANTAGES, LOG_RATIO, MASK, OLD, REF, SMALL_LOG_RATIO, assert_close, matrix
from tests.steps import batch_of, config, fixture_batch, fixture_step, padded, rows_seen, stored, update
from tests.stored import Asked, Said, store

OPEN, HIGH, LOW, SOFT, OUTSIDE = (
    TokenState.OPEN,
    TokenState.HIGH,
    TokenState.LOW,
    TokenState.SOFT,
    TokenState.OUTSIDE,
)
A = math.sqrt(3) / 2


def states(*rows: list[TokenState]) -> list[list[int]]:
    return [[*map(int, row), *[0] * (4 - len(row))] for row in rows]


# The fixture, by hand


def test_grpo_clips_above_for_good_and_below_for_bad_tokens(tmp_path):
    seen = rows_seen(fixture_step(tmp_path), GRPO, config(GRPO))
    assert seen.state.tolist() == states([HIGH, OPEN, OPEN, OPEN], [OPEN, LOW], [LOW, OPEN, OPEN], [HIGH])
    weights = matrix([[1 / 16] * 4, [1 / 8] * 2 + [0] * 2, [1 / 12] * 3 + [0], [1 / 4, 0, 0, 0]])
    ratio = torch.where(MASK, LOG_RATIO.exp(), 1.0)
    through = matrix([[0, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])
    assert_close(seen.weights, weights)
    assert_close(seen.ratio, ratio)
    assert_close(seen.token_ratio, ratio)
    assert_close(seen.through, through)
    assert_close(seen.gradient, -ADVANTAGES * ratio * weights * through)
    assert_close(seen.advantages, torch.where(MASK, ADVANTAGES, 0.0))
    # k3: 0.04 · (1 − e^(ref − π)), weighted
    assert_close(seen.kl_gradient, 0.04 * (1 - (REF - OLD - LOG_RATIO).exp()) * weights)
    assert seen.notes == ()
    assert seen.blocked.sum() == 4
    assert torch.equal(seen.takes_part, MASK)


def test_dapo_has_more_room_above_and_weighs_tokens_alike(tmp_path):
    seen = rows_seen(fixture_step(tmp_path), DAPO, config(DAPO))
    assert seen.state.tolist() == states([HIGH, OPEN, OPEN, OPEN], [OPEN, LOW], [LOW, OPEN, OPEN], [OPEN])
    assert_close(seen.weights, MASK / 10)
    assert_close(seen.gradient[3, 0], -A * math.exp(0.22) / 10)
    assert not seen.kl_gradient.any()


def test_ppo_weighs_tokens_alike_in_the_narrow_band(tmp_path):
    seen = rows_seen(fixture_step(tmp_path), PPO, config(PPO))
    assert seen.state.tolist() == states([HIGH, OPEN, OPEN, OPEN], [OPEN, LOW], [LOW, OPEN, OPEN], [HIGH])
    assert_close(seen.gradient[2, 2], A * math.exp(1.3) / 10)


def test_gspo_clips_whole_completions(tmp_path):
    seen = rows_seen(fixture_step(tmp_path), GSPO, config(GSPO))
    assert seen.state.tolist() == states([OPEN] * 4, [LOW] * 2, [OPEN] * 3, [HIGH])
    means = [-0.0375, -0.05, 1.1 / 3, 0.22]
    assert_close(seen.ratio, torch.where(MASK, torch.tensor(means).exp().unsqueeze(1), 1.0))
    assert_close(seen.token_ratio[0, 0], math.exp(0.3))
    # A completion's ratio belongs to all of its tokens: each moves it by 1/|y|, and all |y| losses of 1/(4|y|) with it.
    assert_close(seen.gradient[0], torch.full((4,), -A * math.exp(-0.0375) / 16))
    assert_close(seen.gradient[2], [A * math.exp(1.1 / 3) / 12] * 3 + [0.0])
    assert not seen.gradient[1].any()


def test_sapo_lets_through_a_part(tmp_path):
    seen = rows_seen(fixture_step(tmp_path), SAPO, config(SAPO))
    assert seen.state.tolist() == states([SOFT, OPEN, OPEN, SOFT], [SOFT, SOFT], [SOFT, OPEN, SOFT], [SOFT])
    tau = torch.where(ADVANTAGES > 0, 1.0, 1.05)
    through = 1 / torch.cosh(tau * (LOG_RATIO.exp() - 1) / 2) ** 2
    assert_close(seen.through[MASK], through[MASK])
    assert_close(seen.gradient[MASK], (-ADVANTAGES * LOG_RATIO.exp() * through * seen.weights)[MASK])
    assert not seen.blocked.any()


def test_a_soft_gate_that_is_nearly_shut_is_no_clip(tmp_path):
    """Its share is too small for a number, with A > 0 and with A < 0."""
    far = torch.where(MASK, 5.0, 0.0)
    seen = rows_seen(fixture_step(tmp_path, far), SAPO, config(SAPO))
    assert not seen.through[MASK].any()
    assert set(seen.state[MASK].tolist()) == {SOFT}
    assert sentence(fixture_step(tmp_path, far), SAPO, 0, 0) == (
        "A > 0 and ratio 148.4132: the gate keeps 0.0% of the gradient at temperature 1"
    )


def test_states_are_those_of_the_edges_on_both_sides(tmp_path):
    """GSPO's band, with ratios a little inside and a little outside of it."""
    seen = rows_seen(fixture_step(tmp_path, SMALL_LOG_RATIO), GSPO, config(GSPO))
    # Means 3.75e-4 (inside), −4e-4 (below), 1e-4 (inside), 9e-4 (above)
    assert seen.state.tolist() == states([OPEN] * 4, [LOW] * 2, [OPEN] * 3, [HIGH])


# The same as training


@pytest.mark.slow("replays steps of many algorithms")
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("log_ratio", [LOG_RATIO, SMALL_LOG_RATIO], ids=["far", "near"])
def test_loss_and_gradient_are_those_of_policy_loss(name, log_ratio, tmp_path):
    algorithm = replace(
        NAMED[name], extra=ValueLoss() if AdvantageTraits.read(NAMED[name].advantage).needs_values else None
    )
    if name == "RFT":  # policy_loss is given the rows that were kept: here all
        algorithm = replace(algorithm, keep=KeepAll())
    settings = config(algorithm, seed=3)
    seen = rows_seen(fixture_step(tmp_path, log_ratio), algorithm, settings)
    more = {"outcome": fixture.REWARDS, "entropy": -(OLD + log_ratio), "generator": torch.Generator().manual_seed(3)}
    _, gradient, stats = fixture.run(algorithm, log_ratio, **more)
    assert_close(seen.gradient + seen.kl_gradient, gradient)
    assert_close(seen.losses[0], float(stats.totals["policy_loss"]))
    assert_close(seen.through[MASK].sum(), float(stats.token_sums["gate"]))
    assert_close(seen.ratio[MASK].sum(), float(stats.token_sums["ratio"]))


# Words: each state has its sentence


def sentence(step: StoredStep, algorithm: Algorithm, row: int, token: int, own: Algorithm | None = None) -> str:
    return why(step, look(step, algorithm, config(own or algorithm)), row, token)


WHOLE = "the full gradient passes, and"
DUAL = replace(GRPO, gate=Clip(0.2, 0.2, dual=3.0))
SENTENCES = [
    # algorithm, row, token, state, words
    (GRPO, 0, 0, HIGH, "A > 0 and ratio 1.3499 > 1.2, the upper clip bound: no gradient"),
    (GRPO, 1, 1, LOW, "A < 0 and ratio 0.7047 < 0.8, the lower clip bound: no gradient"),
    (GRPO, 0, 1, OPEN, f"ratio 0.9048 is within bounds: {WHOLE} raises this token's probability"),
    (GRPO, 2, 1, OPEN, f"ratio 1.1052 is within bounds: {WHOLE} lowers this token's probability"),
    (GRPO, 0, 3, OPEN, f"ratio 0.6703 < 0.8, but A > 0 pulls it back: {WHOLE} raises this token's probability"),
    (GRPO, 1, 0, OPEN, f"ratio 1.284 > 1.2, but A < 0 pulls it back: {WHOLE} lowers this token's probability"),
    (DUAL, 2, 2, TokenState.DUAL, "A < 0 and ratio 3.6693 > 3, the dual clip: no gradient"),
    (GMPO, 0, 2, OPEN, f"ratio 1.0513 is within bounds: {WHOLE} raises this token's probability"),
    (GMPO, 2, 2, OPEN, f"ratio 3.6693 > 1.4918, but A < 0 pulls it back: {WHOLE} lowers this token's probability"),
    (GSPO, 3, 0, HIGH, "A > 0 and ratio 1.2461 > 1.0004, the upper clip bound: no gradient"),
    (
        GSPO, 1, 0, LOW,
        "A < 0 and the completion's ratio 0.9512 (this token's own 1.284) < 0.9997, the lower clip bound: no gradient",
    ),
    (SAPO, 0, 0, SOFT, "A > 0 and ratio 1.3499: the gate keeps 97.0% of the gradient at temperature 1"),
    (SAPO, 1, 1, SOFT, "A < 0 and ratio 0.7047: the gate keeps 97.6% of the gradient at temperature 1.05"),
    (SAPO, 0, 1, OPEN, f"ratio 0.9048 is near 1: {WHOLE} raises this token's probability"),
    (
        replace(DAPO, gate=CappedScore(high=1.0)), 2, 2, SOFT,
        "A < 0 and ratio 3.6693: the gate keeps 54.5% of the gradient",
    ),
    (RLOO, 0, 0, OPEN, f"ratio 1, and nothing is clipped: {WHOLE} raises this token's probability"),
    # The highest of (A − mean)·(log π − mean): −0.866 · (−1.55 + 0.803) = 0.647
    (
        KL_COV, 1, 1, TokenState.HELD,
        "its covariance of advantage and log-prob is among the highest: it is held near the old policy",
    ),
    # mean(log μ − log π) = ((0 − 0.25) + (0.8 + 0.35)) / 2 = 0.45
    (
        replace(GRPO, select=OffPolicyMask(0.1)), 1, 0, TokenState.DROPPED,
        "OffPolicyMask leaves it out: no gradient, but it counts in the denominator",
    ),
    (
        replace(GRPO, correct=IcePop(0.5, 2.0)), 0, 2, TokenState.REJECTED,
        "IcePop rejects it, old policy over sampler is 2.4596 here: no gradient",
    ),
    (
        replace(GRPO, correct=SequenceMasked(0.5, 2.0)), 0, 1, TokenState.REJECTED,
        "SequenceMasked rejects it, old policy over sampler is 2.5345 over the completion: no gradient",
    ),
    (
        replace(GRPO, correct=GeometricRejection()), 3, 0, TokenState.REJECTED,
        "GeometricRejection rejects it, old policy over sampler is 1.0202 over the completion, in the mean: "
        "no gradient",
    ),
    (
        replace(GRPO, correct=TokenTruncated(2.0)), 0, 2, OPEN,
        f"ratio 1.0513 is within bounds: {WHOLE} raises this token's probability; times 2 for the sampler's mismatch",
    ),
    (GRPO, 3, 1, OUTSIDE, "nothing was sampled here"),
]  # fmt: skip


@pytest.mark.slow("replays steps of many algorithms")
@pytest.mark.parametrize(("algorithm", "row", "token", "state", "words"), SENTENCES)
def test_a_token_says_why(algorithm, row, token, state, words, tmp_path):
    step = fixture_step(tmp_path)
    seen = rows_seen(step, algorithm, config(algorithm))
    assert TokenState(int(seen.state[row, token])) == state
    assert sentence(step, algorithm, row, token) == words


def test_gspo_is_quoted_with_as_many_digits_as_tell_a_ratio_from_its_edge(tmp_path):
    barely = torch.zeros_like(OLD)
    barely[3, 0] = 4.0002e-4
    words = sentence(fixture_step(tmp_path, barely), GSPO, 3, 0)
    assert words == "A > 0 and ratio 1.0004001 > 1.0004, the upper clip bound: no gradient"


def two_groups(folder: Path, **changes) -> StoredStep:
    """A mixed group of lengths 2 and 1 and one of equal outcomes, lengths 3 and 2, in one update."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    advantages = matrix([[0.5] * 3, [-0.5] * 3, [0.0] * 3, [0.0] * 3])
    group = torch.tensor([0, 0, 1, 1])
    rewards = changes.pop("rewards", torch.tensor([1.0, 0.0, 1.0, 1.0]))
    batch = batch_of(mask, group, rewards, **({"advantages": advantages} | changes))
    return stored(folder, batch, [update(range(4), batch.old_logprobs)])


def test_a_dead_group_leaves_the_denominator_of_an_algorithm_that_would_drop_it(tmp_path):
    step = two_groups(tmp_path)
    own, other = rows_seen(step, GRPO, config(GRPO)), rows_seen(step, DAPO, config(GRPO))
    assert_close(own.weights, matrix([[1 / 8, 1 / 8, 0], [1 / 4, 0, 0], [1 / 12] * 3, [1 / 8, 1 / 8, 0]]))
    assert_close(other.weights, matrix([[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0] * 3, [0] * 3]))
    assert_close(other.gradient, matrix([[-1 / 6, -1 / 6, 0], [1 / 6, 0, 0], [0] * 3, [0] * 3]))
    since = "since all completions of its group have the same reward"
    dead = f"its advantage is 0, {since}: no gradient, but it counts in the denominator"
    assert TokenState(int(own.state[2, 1])) == TokenState.DEAD
    assert sentence(step, GRPO, 2, 1) == dead
    assert TokenState(int(other.state[2, 1])) == TokenState.IDLE
    assert sentence(step, DAPO, 2, 1, GRPO) == (
        "all task scores of its group are the same: this algorithm leaves it out, and out of the denominator"
    )
    assert own.notes == ("no reference was stored: its KL in the loss is left out",)
    assert other.notes == (
        "2 completions of groups with equal task scores are left out of the update and its denominator",
    )


def test_a_completion_that_earned_its_groups_mean_is_dead_for_another_reason(tmp_path):
    step = two_groups(tmp_path, rewards=torch.tensor([1.0, 0.0, 0.5, 0.7]), outcome=torch.tensor([1.0, 0.0, 1.0, 0.0]))
    said = sentence(step, GRPO, 2, 0)
    assert said == "its advantage is 0: no gradient, but it counts in the denominator"


def test_truncated_completions_leave_the_loss_where_keep_says_so(tmp_path):
    step = two_groups(tmp_path, truncated=torch.tensor([False, True, False, False]))
    strict = replace(GRPO, keep=KeepAll(truncated=False), kl=None)
    seen = rows_seen(step, strict, config(GRPO))
    assert seen.state[1].tolist() == [OUTSIDE] * 3
    assert sentence(step, strict, 1, 0, GRPO) == (
        "its completion was cut off at the limit, and this algorithm leaves such completions out of the loss"
    )
    # It keeps its place among the four completions.
    assert_close(seen.weights[0], [1 / 8, 1 / 8, 0.0])
    assert not seen.weights[1].any()


def test_rows_that_did_not_train_say_why(tmp_path):
    mask = torch.ones(6, 2).bool()
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    rewards = torch.tensor([1.0, 0.0, math.nan, 0.0, 1.0, 1.0])
    advantages = matrix([[1.0] * 2, [-1.0] * 2, [math.nan] * 2, [-1.0] * 2, [0.0] * 2, [0.0] * 2])
    batch = batch_of(mask, group, rewards, advantages=advantages)
    step = stored(tmp_path, batch, [update([0, 1], torch.zeros(2, 2))], trained=[0, 1, 3], kept_groups=1)
    seen = rows_seen(step, DAPO, config(DAPO))
    assert seen.state.tolist() == [[OPEN] * 2, [OPEN] * 2] + [[TokenState.IDLE] * 2] * 4
    assert sentence(step, DAPO, 2, 0) == (
        "its completion is unscored: the grader failed, so it is in no term and no denominator"
    )
    assert sentence(step, DAPO, 3, 0) == "its completion is in no update"
    assert sentence(step, DAPO, 5, 0) == "its group was dropped before the update: all task scores are the same"
    assert_close(seen.weights[:2], torch.full((2, 2), 1 / 4))
    assert seen.advantages[2].tolist() == [0.0, 0.0]


def test_a_row_that_no_update_ran_has_the_entropy_of_its_sampling(tmp_path):
    step = fixture_step(tmp_path)
    row, measured = step.layout.of(0), step.entropy.clone()
    measured[:, row] = math.nan
    sampled = torch.arange(measured.shape[1]).to(measured.dtype)
    found = replace(step, entropy=measured, batch=replace(step.batch, rollout_entropy=sampled)).entropy_in(0)
    assert found is not None
    assert torch.equal(found[row], sampled[row])
    assert torch.equal(found[row.stop :], step.entropy[0, row.stop :])


def test_a_step_of_the_value_model_alone_has_no_policy_loss(tmp_path):
    batch = fixture_batch(values=OLD, returns=OLD)
    blank = torch.full_like(OLD, math.nan)
    step = stored(tmp_path, batch, [update(range(4), blank), update(range(4), blank)], value_only=True)
    seen = rows_seen(step, PPO, config(PPO))
    assert step.is_value_only
    assert seen.losses == {}
    assert set(seen.state[MASK].tolist()) == {TokenState.IDLE}
    assert sentence(step, PPO, 0, 0) == "this step trained only the value model"
    assert policy_loss(step, PPO, config(PPO)) is None


def test_a_step_without_updates_is_idle(tmp_path):
    step = stored(tmp_path, fixture_batch(), [], trained=[], kept_groups=0)
    seen = rows_seen(step, DAPO, config(DAPO))
    assert step.passes == 0
    assert set(seen.state[MASK].tolist()) == {TokenState.IDLE}
    assert policy_loss(step, DAPO, config(DAPO)) is None


def test_every_state_is_spoken_of():
    spoken = {state for _, _, _, state, _ in SENTENCES}
    assert set(TokenState) - spoken == {TokenState.IDLE, TokenState.DEAD}  # those above
    assert {HIGH, LOW, TokenState.DUAL, TokenState.DROPPED, TokenState.REJECTED} == set(BLOCKED)


# Updates and passes


def test_each_update_has_weights_of_its_own_and_the_loss_is_their_mean(tmp_path):
    batch = fixture_batch()
    current = OLD + LOG_RATIO
    updates = [update([0, 1], current[[0, 1]]), update([2, 3], current[[2, 3]])]
    step = stored(tmp_path, batch, updates)
    seen = rows_seen(step, DAPO, config(DAPO))
    assert_close(seen.weights, MASK / matrix([[6.0], [6.0], [4.0], [4.0]]))
    assert list(seen.losses) == [0, 1]
    # Row 2: ratios 0.8 (clipped), e^0.1 and e^1.3 of −A; row 3: e^0.22 of A
    assert_close(seen.losses[1], A * (0.8 + math.exp(0.1) + math.exp(1.3) - math.exp(0.22)) / 4)
    assert_close(policy_loss(step, DAPO, config(DAPO)) or 0.0, sum(seen.losses.values()) / 2)


def test_passes_are_looked_at_one_by_one(tmp_path):
    batch, still = fixture_batch(), torch.zeros_like(OLD)
    updates = [update([2, 3, 0, 1], (OLD + still)[[2, 3, 0, 1]]), update(range(4), OLD + LOG_RATIO)]
    step = stored(tmp_path, batch, updates)
    assert step.passes == 2
    first, last = rows_seen(step, GRPO, config(GRPO), number=0), rows_seen(step, GRPO, config(GRPO))
    assert not first.blocked.any()
    assert_close(first.ratio, torch.ones_like(OLD))
    assert last.blocked.sum() == 4
    assert list(first.losses) == [0]
    assert list(last.losses) == [1]
    assert_close(policy_loss(step, GRPO, config(GRPO)) or 0.0, (first.losses[0] + last.losses[1]) / 2)


def test_an_update_that_was_skipped_is_not_in_the_steps_loss(tmp_path):
    batch, current = fixture_batch(), OLD + LOG_RATIO
    updates = [update([0, 1], current[[0, 1]]), update([2, 3], current[[2, 3]] * math.nan, skipped="not finite")]
    step = stored(tmp_path, batch, updates)
    seen = rows_seen(step, DAPO, config(DAPO))
    assert policy_loss(step, DAPO, config(DAPO)) == seen.losses[0]
    # What was not run stands where the old policy was, and that is said.
    assert_close(seen.ratio[2:], torch.ones(2, 4))
    assert seen.notes == ("2 completions were not run in this update: their ratios are assumed to be 1",)


def test_clip_covariance_draws_as_the_update_did(tmp_path):
    """Its random choice is of the run's seed and of how many updates there had been."""
    random = batches.make(seed=5, num_groups=3, group_size=4, width=6, spread=0.1)
    many = replace(NAMED["CLIP_COV"], select=ClipCovariance(share=0.2, low=-5.0))
    batch = batch_of(
        random.mask, random.group, torch.arange(12.0), advantages=random.advantages, old_logprobs=random.old_logprobs
    )
    step = stored(tmp_path, batch, [update(range(12), random.logprobs, version=7)])
    seen = rows_seen(step, many, config(many, seed=4))
    tensors = random.tensors() | {"ref_logprobs": None, "rollout_logprobs": batch.rollout_logprobs}
    _, stats = proximo.policy_loss(many, **tensors, generator=torch.Generator().manual_seed(4 + 7))
    assert (seen.state == TokenState.DROPPED).sum() == int(0.2 * int(random.mask.sum()))
    assert_close(seen.losses[0], float(stats.totals["policy_loss"]))
    other = rows_seen(step, many, config(many, seed=5))
    assert not torch.equal(other.state, seen.state)


# Whose advantages


VALUES = matrix([[0.5, 0.25, 0.75, 0.5], [0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0], [0.9, 0, 0, 0]])
PLAIN_GAE = replace(PPO, shape=None, advantage=Gae(discount=1.0, decay=0.0))
TO_GO = replace(REINFORCE_PP, shape=KlReward(0.5), advantage=ReturnToGo())


def rows_under(step: StoredStep, algorithm: Algorithm, settings: RunConfig) -> tuple[Tensor, list[str]]:
    found, notes = advantages_under(step, algorithm, settings)
    return padded(step.layout, found), notes


def test_the_same_advantage_is_the_stored_one(tmp_path):
    assert_stored(fixture_step(tmp_path), GSPO, GRPO, [])


def test_siblings_are_compared_as_the_run_did(tmp_path):
    assert_stored(fixture_step(tmp_path), RLOO, GRPO, ["the advantages are the run's own"])


def test_without_values_a_value_models_advantages_are_not_made_up(tmp_path):
    assert_stored(fixture_step(tmp_path), PPO, GRPO, ["no values were stored: the advantages are the run's own"])


def assert_stored(step: StoredStep, algorithm: Algorithm, own: Algorithm, notes: list[str]) -> None:
    found, said = rows_under(step, algorithm, config(own))
    assert torch.equal(found, torch.where(MASK, ADVANTAGES, 0.0))
    assert said == notes


def test_with_values_they_are_computed_anew(tmp_path):
    step = fixture_step(tmp_path, values=VALUES)
    found, notes = rows_under(step, PLAIN_GAE, config(GRPO))
    # One-step errors: the next value minus this one, and the reward minus the last.
    expected = [[-0.25, 0.5, -0.25, 0.5], [0.0, -0.5, 0, 0], [0.1, 0.1, -0.3, 0], [0.1, 0, 0, 0]]
    assert_close(found, matrix(expected))
    assert notes == ["the advantages are computed again by Gae from the stored data"]
    assert_close(rows_seen(step, PLAIN_GAE, config(GRPO)).advantages, matrix(expected))


def test_returns_are_computed_anew_with_the_kl_in_the_reward(tmp_path):
    found, notes = rows_under(fixture_step(tmp_path), TO_GO, config(GRPO))
    # old − ref is −(0.1, −0.2, 0, 0.3): each token pays half of what is still to come, and the last earns the outcome.
    assert_close(found[0], [1 + 0.1, 1 + 0.05, 1 + 0.15, 1 + 0.15])
    assert_close(found[3], [1 + 0.025, 0, 0, 0])
    assert notes == ["the advantages are computed again by ReturnToGo from the stored data"]


def test_without_a_reference_that_kl_is_left_out_and_said(tmp_path):
    found, notes = rows_under(fixture_step(tmp_path, ref_logprobs=None), TO_GO, config(GRPO))
    assert_close(found, torch.where(MASK, fixture.REWARDS.unsqueeze(1), 0.0))
    assert notes[0] == "no reference was stored: its KL in the reward is left out"


def test_a_run_that_compared_no_siblings_has_them_compared_anew(tmp_path):
    step = fixture_step(tmp_path, values=VALUES, advantages=VALUES)
    found, notes = rows_under(step, GRPO, config(PPO))
    assert_close(found, torch.where(MASK, ADVANTAGES, 0.0), 1e-5)  # an epsilon of 1e-6 in the denominator
    assert notes == ["the advantages are computed again by GroupNormalized from the stored data"]


def test_two_value_models_differ_in_what_they_make_of_the_same_values(tmp_path):
    step = fixture_step(tmp_path, values=VALUES, advantages=VALUES)
    own, notes = rows_under(step, PPO, config(PPO))
    other, more = rows_under(step, VAPO, config(PPO))
    assert torch.equal(own, torch.where(MASK, VALUES, 0.0))
    assert notes == []
    assert not torch.allclose(own, other)
    assert more == ["the advantages are computed again by TokenWhitened from the stored data"]


def test_a_length_penalty_that_the_run_did_not_have_is_said(tmp_path):
    tight = replace(DAPO, shape=SoftOverlong(limit=4, cache=2))
    note = "its length penalty differs: rewards are as the run shaped them"
    assert rows_under(fixture_step(tmp_path), tight, config(GRPO))[1] == [note]
    assert rows_under(fixture_step(tmp_path), GRPO, config(tight))[1] == [note]
    assert rows_under(fixture_step(tmp_path), tight, config(tight))[1] == []
    # With the run's limit of 16 nothing here is long.
    assert rows_under(fixture_step(tmp_path), DAPO, config(GRPO))[1] == []


def test_an_unscored_completion_stays_unscored(tmp_path):
    rewards = fixture.REWARDS.clone()
    rewards[1] = math.nan
    batch = replace(fixture_batch(values=VALUES), rewards=rewards, outcome=rewards)
    step = stored(tmp_path, batch, [update([0, 1, 2], (OLD + LOG_RATIO)[[0, 2, 3]])], trained=[0, 2, 3])
    found, _ = rows_under(step, PLAIN_GAE, config(GRPO))
    assert found[1, :2].isnan().all()
    seen = rows_seen(step, PLAIN_GAE, config(GRPO))
    assert set(seen.state[1, :2].tolist()) == {TokenState.IDLE}
    assert not seen.gradient[1].any()
    assert_close(seen.weights[0], torch.full((4,), 1 / 8))  # of eight tokens, not of ten


ADVANTAGES_ANEW = [
    ReturnToGo(0.9),
    Gae(decay=0.9),
    Gae(length_adaptive=0.5),
    TokenWhitened(Gae()),
    TokenWhitened(BatchScaled()),
    SequenceWhitened(GroupCentred()),
    SignScaled(ReturnToGo(), 2.0, 0.5),
    SignScaled(GroupNormalized(), 2.0, 0.5),
    LiveScaled(),
    LeaveOneOut(),
]


@pytest.mark.slow("replays steps of many algorithms")
@pytest.mark.parametrize("piece", ADVANTAGES_ANEW, ids=lambda piece: type(piece).__name__)
def test_advantages_computed_anew_are_over_all_rows_whatever_their_lengths(piece, tmp_path):
    """Rows of 1 to 24 tokens and one without any, which the lens reads in parts: as of all at once."""
    random = torch.Generator().manual_seed(7)
    lengths = torch.tensor([24, 1, 3, 11, 2, 0, 7, 5, 1, 12, 6, 4])
    mask, group = torch.arange(24) < lengths.unsqueeze(1), torch.arange(12) // 4
    old, ref, values = (torch.randn(12, 24, generator=random) for _ in range(3))
    rewards = torch.randn(12, generator=random)
    rewards[3] = math.nan
    batch = batch_of(mask, group, rewards, old_logprobs=old, ref_logprobs=ref, values=values)
    trained = [row for row in range(12) if row != 3]
    step = stored(tmp_path, batch, [update(range(11), old[trained])], trained=trained)
    own = replace(PPO, shape=KlReward(0.5), advantage=Gae(decay=0.5))
    algorithm = replace(own, advantage=piece, extra=ValueLoss() if AdvantageTraits.read(piece).needs_values else None)
    found, notes = rows_under(step, algorithm, config(own))
    assert notes == [f"the advantages are computed again by {type(piece).__name__} from the stored data"]
    token_rewards = torch.where(mask, -0.5 * (old - ref), 0.0)
    more = {"rewards": rewards, "group": group, "mask": mask, "values": values, "token_rewards": token_rewards}
    expected, _ = proximo.advantages(algorithm, **more)
    assert found[3, :11].isnan().all()
    assert_close(found.nan_to_num(0.0), torch.where(mask, expected, 0.0).nan_to_num(0.0))


# Memory


class Largest(TorchDispatchMode):
    """The most entries that any tensor had."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, list | tuple) else [made]:
            if isinstance(each, Tensor):
                # A view of few numbers takes no room, however often it repeats them.
                held = each.numel() if each.is_contiguous() else each.untyped_storage().nbytes() // each.itemsize
                self.entries = max(self.entries, held)
        return made


@pytest.mark.slow("replays steps of many algorithms")
def test_memory_follows_the_tokens_and_not_the_longest_of_them(tmp_path):
    """One completion of 4,000 tokens among 500 of ten: padded to the longest they would be two million places."""
    long = Said(["x"] * 4_000, 1.0, log_ratio=[0.3] * 4_000)
    run = store(tmp_path, GRPO, [Asked([Said(["y"] * 10, 0.0, log_ratio=[0.3] * 10), long])])
    table = pq.read_table(run.step_file(0))
    write_rollouts(table.take([0] * 250 + [1] + [0] * 250), run.step_file(0))
    tokens = 500 * 10 + 4_000
    names = ["clip-cov", "reinforce-pp", "gspo"]  # chosen over all tokens; of each token; over each completion
    with Largest() as made:
        views = {view.name: view for view in compared(run.step(0), run.config, chosen(run.config, names))}
        rows = reader.step(run, {"step": "0", "as": "gspo"})["rows"]
        [row] = reader.group(run, {"step": "0", "group": "0", "row": "250"})["rows"]
    assert views["grpo"].tokens == tokens
    assert [len(rows), len(row["pieces"])] == [501, 4_000]
    assert (rows[250]["length"], rows[251]["length"]) == (4_000, 10)
    # GRPO's clip stops the one that is good: e^0.3 > 1.2. Each of the others weighs 1/501 and has the same advantage.
    assert views["grpo"].blocked == 4_000 / tokens
    layout = run.step(0).layout
    good, bad = (float(views["grpo"].seen.advantages[layout.position(row, 0)]) for row in (250, 0))
    assert_close(views["grpo"].policy_loss or 0.0, -(1.2 * good + 500 * math.exp(0.3) * bad) / 501, 1e-5)
    assert tokens < made.entries < 8 * tokens


# Laws


@pytest.mark.parametrize("order", [(1, 40), (40, 1)])
def test_a_tokens_ratio_is_kept_apart_from_its_completions_where_they_differ(order, tmp_path):
    """Completions of one token and of many are computed apart, and only of one token both ratios are the same."""
    mask = torch.arange(max(order)) < torch.tensor([order[0]] * 2 + [order[1]] * 2).unsqueeze(1)
    draw = torch.Generator().manual_seed(0)
    old, moves = -torch.rand(mask.shape, generator=draw) * mask, torch.randn(mask.shape, generator=draw) * mask
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])
    batch = batch_of(mask, torch.tensor([0, 0, 1, 1]), rewards, old_logprobs=old, advantages=torch.ones(mask.shape))
    step = stored(tmp_path, batch, [update(range(4), old + 0.1 * moves)])
    seen = rows_seen(step, GSPO, config(GSPO))
    mean = (0.1 * moves).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    assert_close(seen.token_ratio[mask], (0.1 * moves).exp()[mask], 1e-5)
    assert_close(seen.ratio[mask], mean.exp().expand(mask.shape)[mask], 1e-5)


def random_step(folder: Path, random: batches.Batch, split: int) -> StoredStep:
    """In `split` updates of whole groups."""
    rewards = random.outcome + 0.01 * torch.arange(len(random.outcome))
    batch = batch_of(
        random.mask,
        random.group,
        rewards,
        outcome=rewards,  # no two alike: nothing is dropped
        old_logprobs=random.old_logprobs,
        rollout_logprobs=random.rollout_logprobs,
        ref_logprobs=random.ref_logprobs,
        advantages=random.advantages,
    )
    parts = [(random.group % split == number).nonzero().squeeze(1) for number in range(split)]
    updates = [
        update(part.tolist(), random.logprobs[part], entropy=random.entropy[part]) for part in parts if len(part)
    ]
    return stored(folder, batch, updates)


HELD = {name for name, value in NAMED.items() if GateTraits.read(value.gate).score_form} - {"RLOO", "GPG"}
VALUED = {name: value for name, value in NAMED.items() if name not in HELD}
"""Those whose gradient is the slope of their value: a held ratio is not seen by a difference."""


@pytest.mark.slow("replays steps of many algorithms")
@given(random=batches.batches(), name=st.sampled_from(sorted(VALUED)), split=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_gradient_is_the_slope_of_the_loss(random, name, split, seed):
    algorithm = replace(VALUED[name], kl=None, keep=KeepAll())
    # The covariances of two tokens are the same: which of them is chosen may change between the ends of a difference.
    assume(
        algorithm.select is None
        or 2 not in [random.rows(random.group % split == part).mask.sum() for part in range(split)]
    )
    settings = config(algorithm)
    direction = torch.randn(random.mask.shape, generator=torch.Generator().manual_seed(seed))
    with tempfile.TemporaryDirectory() as folder:
        step = random_step(Path(folder), random, split)
        seen = rows_seen(step, algorithm, settings)
        slopes = []
        for part in (step.updates[0] == number for number in seen.losses):
            values = []
            for size in (1e-7, -1e-7):
                moved = replace(random, logprobs=random.logprobs + size * direction).rows(part)
                _, stats = proximo.policy_loss(
                    replace(
                        algorithm, extra=ValueLoss() if AdvantageTraits.read(algorithm.advantage).needs_values else None
                    ),
                    **moved.tensors(),
                    generator=torch.Generator().manual_seed(settings.seed),
                )
                values.append(float(stats.totals["policy_loss"]))
            slopes.append((values[0] - values[1]) / 2e-7)
    slope = float((seen.gradient * direction[:, : seen.gradient.shape[1]]).sum())  # the table has no empty columns
    assert slope == pytest.approx(sum(slopes), rel=1e-5, abs=1e-6)


@pytest.mark.slow("replays steps of many algorithms")
@given(random=batches.batches(), name=st.sampled_from(sorted(NAMED)))
def test_an_unchanged_policy_is_clipped_by_no_gate(random, name):
    algorithm = replace(NAMED[name], select=None)
    same = replace(random, logprobs=random.old_logprobs)
    with tempfile.TemporaryDirectory() as folder:
        seen = rows_seen(random_step(Path(folder), same, 1), algorithm, config(algorithm))
    assert not seen.blocked.any()
    assert not torch.isin(seen.state, torch.tensor([HIGH, LOW, TokenState.DUAL], dtype=seen.state.dtype)).any()
    assert_close(seen.ratio, torch.ones_like(seen.ratio))


class OneShare(Unclipped):
    """Says the same of every token, or of every row, in one number."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def through(self, log_ratio, advantages):
        return torch.full(self.shape, 0.5)


@pytest.mark.parametrize("shape", [(), (4, 1)])
@pytest.mark.parametrize("last", [4, 5])
def test_a_gate_of_one_s_own_may_say_one_number_of_all_tokens(shape, last, tmp_path):
    """Whether all rows are equally long, or one is shorter."""
    mask = torch.arange(5) < torch.tensor([5, 5, 5, last]).unsqueeze(1)
    batch = batch_of(mask, torch.zeros(4, dtype=torch.long), torch.tensor([1.0, 0.0, 1.0, 0.0]).double())
    step = stored(tmp_path, batch, [update(range(4), torch.full((4, 5), -0.1))])
    algorithm = replace(GRPO, gate=OneShare(*shape), kl=None)
    assert look(step, algorithm, config(algorithm)).through.tolist() == [0.5] * (15 + last)
