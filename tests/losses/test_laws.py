"""Laws that hold for any batch: identities between algorithms, and invariances of the loss."""

import math
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import proximo
from proximo.algorithms import CISPO, DAPO, DR_GRPO, GRPO, GSPO, GSPO_TOKEN, KL_COV, PPO, RLOO, SAPO, Algorithm
from proximo.losses import (
    K2,
    K3,
    CappedScore,
    Clip,
    Feedback,
    Gae,
    GeometricRejection,
    GroupCentred,
    GroupNormalized,
    IcePop,
    LeaveOneOut,
    LossInputs,
    ReturnToGo,
    SequenceMasked,
    SequenceMean,
    SequenceTruncated,
    SoftGate,
    TokenTruncated,
    UnbiasedK3,
    ValueLoss,
    plan_step,
    rows_of,
    token_weights,
)
from proximo.losses.pieces.protocols import AdvantageTraits
from tests.batches import NAMED, Batch, batches, run
from tests.fixture import assert_close

ALL = pytest.mark.parametrize("algorithm", [pytest.param(value, id=name) for name, value in NAMED.items()])
FIVE = pytest.mark.parametrize("algorithm", [PPO, GRPO, DAPO, GSPO, SAPO], ids=["ppo", "grpo", "dapo", "gspo", "sapo"])


# Identities between algorithms, by their number in the list the project started from


@cache
def with_plain_weights() -> dict[str, Algorithm]:
    """Every algorithm with nothing in its loss but its gate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: replace(
                algorithm,
                weights=SequenceMean(),
                kl=None,
                select=None,
                extra=ValueLoss() if AdvantageTraits.read(algorithm.advantage).needs_values else None,
            )
            for name, algorithm in NAMED.items()
        }


@pytest.mark.slow("draws many batches")
@given(batch=batches())
def test_i_on_policy_every_gate_has_the_plain_policy_gradient(batch: Batch):
    on_policy = replace(batch, old_logprobs=batch.logprobs)
    expected = -on_policy.advantages * SequenceMean()(on_policy.mask, on_policy.group)
    lengths = on_policy.mask.sum(dim=1, keepdim=True)
    for name, plain in with_plain_weights().items():
        # The retellings' product is not divided by the length, and the gate of one of them not normalised.
        scale = {"GSPO_PRODUCT": lengths, "SAPO_SEQUENCE": lengths * 5 / 4}.get(name, 1)
        assert_close(run(plain, on_policy)[1], expected * scale)


@given(batch=batches())
def test_ii_gspo_is_gspo_token_while_a_row_shares_one_advantage(batch: Batch):
    for gate in (Clip(3e-4, 4e-4), Clip(0.04, 0.05)):
        pooled, own = (run(replace(algorithm, gate=gate), batch) for algorithm in (GSPO, GSPO_TOKEN))
        assert_close(pooled[0], own[0])
        assert_close(pooled[1], own[1])


@given(batch=batches(), dual=st.floats(1.3, 5.0))
def test_iii_dual_clip_is_a_cap_on_the_ratio(batch: Batch, dual: float):
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    capped = torch.minimum(ratio.clamp(max=dual) * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
    weights = batch.mask / batch.mask.sum()
    assert_close(run(replace(DAPO, gate=Clip(0.2, 0.28, dual=dual)), batch)[0], -(capped * weights).sum())


@given(rewards=st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_iv_leave_one_out_is_the_centred_reward_rescaled(rewards: list[float]):
    size = len(rewards)
    group = Feedback(torch.tensor(rewards), torch.zeros(size, dtype=torch.long), torch.ones(size, 1).bool())
    centred, leave_one_out = GroupCentred()(group), LeaveOneOut()(group)
    assert_close(leave_one_out, size / (size - 1) * centred)
    assert_close(centred, (size - 1) / size * leave_one_out)
    for index in range(size):
        others = [reward for other, reward in enumerate(rewards) if other != index]
        assert_close(leave_one_out[index], rewards[index] - sum(others) / len(others))


@given(log_ratio=st.lists(st.floats(-3, 3), min_size=1, max_size=12), tau=st.floats(0.5, 2.0))
def test_v_soft_gate_is_sech_squared_and_its_mean_near_the_sequence_gate(log_ratio: list[float], tau: float):
    """|mean gate − sequence gate| ≤ τ²/4 · (Var(r) + |(r̄ − 1)² − z̄²|), z = log r: docs/algorithms/sapo.md proves it."""
    z = torch.tensor([log_ratio])
    gate, ones, r = SoftGate(tau, tau), torch.ones_like(z), z.exp()
    through = gate.through(z, ones)
    assert_close(through, 1 / (tau * (r - 1) / 2).cosh().square())
    sequence_gate = 1 / (tau * z.mean() / 2).cosh().square()
    gap = gate.sequence_gap(z, ones, ones.bool())[0, 0]
    assert_close(gap, (through.mean() - sequence_gate).abs())
    assert gap <= tau**2 / 4 * (r.var(correction=0) + ((r.mean() - 1) ** 2 - z.mean() ** 2).abs()) + 1e-12


def test_v_the_variance_of_the_log_ratios_bounds_no_distance_between_the_gates():
    # Two tokens with r = 2: their variance is 0, the gates are sech²(1/2) and sech²(log √2).
    z, ones = torch.full((1, 2), math.log(2)), torch.ones(1, 2)
    gap = SoftGate(1.0, 1.0).sequence_gap(z, ones, ones.bool())[0, 0]
    assert_close(gap, 1 / math.cosh(math.log(2) / 2) ** 2 - 1 / math.cosh(0.5) ** 2)
    assert gap > 0.1
    # Nor does it for rows as training has them: about half of a thousand exceed τ²/4 · Var(log r).
    z = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0)) * 0.05
    ones = torch.ones_like(z)
    gaps = SoftGate(1.0, 1.0).sequence_gap(z, ones, ones.bool())[:, 0]
    assert 0.45 < (gaps > z.var(dim=1, correction=0) / 4).double().mean() < 0.55


@given(batch=batches(), alpha=st.floats(0.5, 8.0))
def test_vi_an_unnormalised_gate_is_a_quarter_of_its_temperature(batch: Batch, alpha: float):
    plain = run(replace(SAPO, gate=SoftGate(alpha, alpha, normalised=False)), batch)
    paper = run(replace(SAPO, gate=SoftGate(alpha, alpha)), batch)
    assert_close(plain[0], alpha / 4 * paper[0])
    assert_close(plain[1], alpha / 4 * paper[1])


@given(batch=batches())
def test_vii_a_score_without_a_cap_has_the_importance_sampled_gradient(batch: Batch):
    unbounded = run(replace(CISPO, gate=CappedScore(high=1e9)), batch)
    assert_close(unbounded[1], run(replace(KL_COV, select=None), batch)[1])


@ALL
@settings(max_examples=15)
@given(batch=batches(), cut=st.integers(0, 12), seed=st.integers(0, 99))
def test_viii_micro_batches_add_up(algorithm: Algorithm, batch: Batch, cut: int, seed: int):
    loss, gradient, stats = run(algorithm, batch, seed=seed)
    plan = plan_step(algorithm, rows_of(algorithm, LossInputs(**batch.tensors())), torch.Generator().manual_seed(seed))
    order = torch.randperm(len(batch.group), generator=torch.Generator().manual_seed(seed))
    parts = [part for part in (order[:cut], order[cut:]) if len(part)]
    results = [run(algorithm, batch.rows(part), weights=plan.rows(part)) for part in parts]

    assert_close(sum(result[0] for result in results), loss)
    assert_close(torch.cat([result[1] for result in results]), gradient[torch.cat(parts)])
    merged = results[0][2]
    for result in results[1:]:
        merged = merged + result[2]
    assert merged.floats() == pytest.approx(stats.floats(), abs=1e-9)


@FIVE
@settings(max_examples=15)
@given(batch=batches(), cut=st.integers(0, 12))
def test_viii_micro_batches_add_up_with_plain_weights(algorithm: Algorithm, batch: Batch, cut: int):
    weights = token_weights(algorithm.weights, batch.mask, batch.group)
    halves = [slice(None, cut), slice(cut, None)]
    total = sum(run(algorithm, batch.rows(half), weights=weights[half])[0] for half in halves)
    assert_close(total, run(algorithm, batch)[0])


@pytest.mark.slow("draws many batches")
@ALL
@settings(max_examples=15)
@given(batch=batches(), left=st.integers(0, 3), right=st.integers(0, 3))
def test_ix_padding_changes_nothing_whatever_stands_in_it(algorithm: Algorithm, batch: Batch, left: int, right: int):
    loss, gradient, _ = run(algorithm, batch, seed=1)
    for filler in (0.0, math.nan, -math.inf):
        padded = batch.padded(left, right, filler)
        wide_loss, wide_gradient, _ = run(algorithm, padded, seed=1)
        assert_close(wide_loss, loss)
        assert_close(wide_gradient[:, left : left + gradient.shape[1]], gradient)
        assert wide_gradient.count_nonzero() == gradient.count_nonzero()


@pytest.mark.slow("draws many batches")
@FIVE
@given(batch=batches(), seed=st.integers(0, 99))
def test_x_the_order_of_rows_and_the_names_of_groups_do_not_matter(algorithm: Algorithm, batch: Batch, seed: int):
    order = torch.randperm(len(batch.group), generator=torch.Generator().manual_seed(seed))
    shuffled = replace(batch.rows(order), group=1000 - 7 * batch.group[order])
    loss, gradient, _ = run(algorithm, batch)
    shuffled_loss, shuffled_gradient, _ = run(algorithm, shuffled)
    assert_close(shuffled_loss, loss)
    assert_close(shuffled_gradient, gradient[order])


@given(batch=batches())
def test_xi_gae_with_decay_1_is_the_return_minus_the_value(batch: Batch):
    values = batch.entropy
    algorithm = replace(PPO, advantage=Gae(discount=1.0, decay=1.0))
    advantages, returns = proximo.advantages(
        algorithm, rewards=batch.outcome, group=batch.group, mask=batch.mask, values=values
    )
    outcome = batch.outcome.unsqueeze(1)
    assert returns is not None
    assert_close(advantages, (outcome - values) * batch.mask)
    assert_close(returns, outcome * batch.mask)
    token_rewards = batch.ref_logprobs
    feedback = Feedback(batch.outcome, batch.group, batch.mask, torch.zeros_like(values), token_rewards)
    assert_close(Gae(discount=0.9, decay=1.0)(feedback).advantages, ReturnToGo(discount=0.9)(feedback).advantages)


@pytest.mark.slow("draws many batches")
@given(batch=batches())
def test_xii_a_sampler_that_agrees_needs_no_correction(batch: Batch):
    agreeing = replace(batch, rollout_logprobs=batch.old_logprobs)
    plain = run(DAPO, agreeing)
    corrections = (TokenTruncated(), SequenceTruncated(), SequenceMasked(), IcePop(), GeometricRejection())
    for correction in corrections:
        corrected = run(replace(DAPO, correct=correction), agreeing)
        assert_close(corrected[0], plain[0])
        assert_close(corrected[1], plain[1])


@given(
    logits=st.lists(st.floats(-2, 2), min_size=2, max_size=5), shift=st.lists(st.floats(-2, 2), min_size=5, max_size=5)
)
def test_xiii_k2_and_unbiased_k3_pull_back_and_k3_pulls_forward(logits: list[float], shift: list[float]):
    policy_logits = torch.tensor(logits, requires_grad=True)
    reference = (torch.tensor(logits) + torch.tensor(shift[: len(logits)])).log_softmax(0).unsqueeze(0)
    logprobs = policy_logits.log_softmax(0).unsqueeze(0)
    probabilities = logprobs.detach().exp()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, policy_logits, retain_graph=True)[0]

    backward = gradient((logprobs.exp() * (logprobs - reference)).sum())
    forward = gradient((reference.exp() * (reference - logprobs)).sum())
    log_ratio = logprobs - logprobs.detach()
    assert_close(gradient((probabilities * K2()(logprobs, reference, log_ratio)).sum()), backward)
    assert_close(gradient((probabilities * UnbiasedK3()(logprobs, reference, log_ratio)).sum()), backward)
    assert_close(gradient((probabilities * K3()(logprobs, reference, log_ratio)).sum()), forward)


# Invariances


@given(batch=batches())
def test_weights_vanish_off_the_mask_and_are_not_negative(batch: Batch):
    for each in {algorithm.weights for algorithm in NAMED.values()}:
        weights = token_weights(each, batch.mask, batch.group)
        assert (weights[~batch.mask] == 0).all()
        assert (weights[batch.mask] > 0).all()


@given(batch=batches())
def test_weights_sum_to_their_closed_form(batch: Batch):
    lengths = batch.mask.sum(dim=1).double()
    sums = {name: token_weights(algorithm.weights, batch.mask, batch.group).sum() for name, algorithm in NAMED.items()}
    for name in ("DAPO", "PPO", "GRPO", "GSPO", "SAPO"):
        assert_close(sums[name], 1.0)
    assert_close(sums["RLOO"], lengths.mean())
    assert_close(sums["DR_GRPO"], lengths.mean() / 16)


@given(
    rewards=st.lists(st.integers(-4, 4), min_size=2, max_size=8),
    scale=st.sampled_from([1e-3, 0.5, 3.0, 1e4]),
    offset=st.floats(-10, 10),
)
def test_group_advantages_ignore_the_units_of_reward(rewards: list[int], scale: float, offset: float):
    advantage = GroupNormalized(epsilon=0.0)
    group, mask = torch.zeros(len(rewards), dtype=torch.long), torch.ones(len(rewards), 1).bool()
    plain = advantage(Feedback(torch.tensor(rewards).double(), group, mask))
    rescaled = advantage(Feedback(scale * (torch.tensor(rewards).double() + offset), group, mask))
    assume(rescaled.isfinite().all())
    assert_close(rescaled, plain, tolerance=1e-8)


@given(batch=batches())
def test_one_token_completions_make_sequence_and_token_ratios_equal(batch: Batch):
    single = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) == 0))
    token = run(replace(GRPO, kl=None, gate=Clip(3e-4, 4e-4)), single)
    sequence = run(GSPO, single)
    assert_close(token[0], sequence[0])
    assert_close(token[1], sequence[1])


@given(batch=batches())
def test_dr_grpo_and_rloo_differ_by_a_constant_on_policy(batch: Batch):
    on_policy = replace(batch, old_logprobs=batch.logprobs)
    dr_grpo = run(NAMED["DR_GRPO"], on_policy)[1]
    rloo = run(RLOO, on_policy)[1]
    assert_close(dr_grpo * 16, rloo)
    assert DR_GRPO.advantage == GroupCentred()
    assert RLOO.advantage == LeaveOneOut()
