"""Ratios, weights, divergences, corrections, selection, shaping, keeping, pairs and extras: values by hand."""

import math
from dataclasses import replace

import pytest
import torch

from proximo.algorithms import GRPO, PPO
from proximo.losses import (
    K1,
    K2,
    K3,
    AdaptiveKl,
    BradleyTerry,
    ClipCovariance,
    ConstantLength,
    Dpo,
    GeometricRejection,
    IcePop,
    Ipo,
    KeepAll,
    KeepMixed,
    KlCovariance,
    KlReward,
    LinearOverlong,
    NoRatio,
    OffPolicyMask,
    PositiveNll,
    PromptMean,
    SequenceMasked,
    SequenceMean,
    SequenceProductRatio,
    SequenceRatio,
    SequenceSum,
    SequenceTokenRatio,
    SequenceTruncated,
    SoftOverlong,
    TokenMean,
    TokenRatio,
    TokenTruncated,
    TopEntropy,
    UnbiasedK3,
    ValueLoss,
    supervised_loss,
    trained_mask,
)
from proximo.losses.pieces.divergences import Divergence, KlLoss
from proximo.losses.pieces.selection import Candidates, token_covariance
from tests.fixture import (
    ADVANTAGES,
    GOLDEN,
    GROUP,
    LOG_RATIO,
    MASK,
    OLD,
    REF,
    ROLLOUT,
    SMALL_LOG_RATIO,
    assert_close,
    golden,
)

# Ratios


def test_ratios_of_the_fixture():
    assert_close(TokenRatio()(LOG_RATIO, MASK), LOG_RATIO)
    assert_close(NoRatio()(LOG_RATIO, MASK), torch.zeros(4, 4))
    for ratio in (SequenceRatio(), SequenceTokenRatio()):
        assert_close(ratio(LOG_RATIO, MASK).exp()[:, 0], golden("ratios.seq_geo"))
        assert_close(ratio(SMALL_LOG_RATIO, MASK).exp()[:, 0], golden("gspo.small.s"))
    assert_close(SequenceProductRatio()(LOG_RATIO, MASK).exp()[:, 0], golden("ratios.seq_prod"))


def test_a_sequence_ratio_counts_sampled_tokens_only():
    noisy = torch.where(MASK, LOG_RATIO, 7.0)
    assert_close(SequenceRatio()(noisy, MASK).exp()[:, 0], golden("ratios.seq_geo"))
    assert_close(SequenceProductRatio()(noisy, MASK).exp()[:, 0], golden("ratios.seq_prod"))


def test_the_product_ratio_clamps_its_sum():
    far = torch.full((1, 4), 30.0).double()
    assert SequenceProductRatio()(far, torch.ones(1, 4).bool())[0, 0] == 20
    assert SequenceProductRatio()(-far, torch.ones(1, 4).bool())[0, 0] == -20
    with pytest.raises(ValueError, match="ratio.max_log is 0"):
        SequenceProductRatio(max_log=0.0)


# Weights: lengths [[4, 2, 3, 1], [1, 1, 2, 1]], every token of a row losing the same

LENGTHS = torch.tensor([4, 2, 3, 1, 1, 1, 2, 1])
ROWS = torch.arange(4) < LENGTHS.unsqueeze(1)
TWO = torch.arange(8) // 4
LOSSES = torch.arange(1.0, 9.0).double().unsqueeze(1)


@pytest.mark.parametrize(
    ("weights", "loss"),
    [
        (TokenMean(), 3.6),
        (PromptMean(), 4.35),
        (SequenceMean(), 4.5),
        (SequenceSum(), 6.75),
        (ConstantLength(8), 0.84375),
    ],
)
def test_weights_by_hand(weights, loss):
    assert_close((LOSSES * weights(ROWS, TWO)).sum(), loss)


def test_a_fully_masked_row_is_counted_by_sequence_and_prompt_means():
    empty = ROWS & (torch.arange(8) != 0).unsqueeze(1)
    assert_close(TokenMean()(empty, TWO).sum(), 1.0)
    assert_close(SequenceMean()(empty, TWO).sum(), 7 / 8)
    assert_close(SequenceSum()(empty, TWO).sum(), 11 / 8)
    first_group_empty = ROWS & (torch.arange(8) > 3).unsqueeze(1)
    assert_close(PromptMean()(first_group_empty, TWO).sum(), 1 / 2)


@pytest.mark.parametrize("weights", [TokenMean(), PromptMean(), SequenceMean(), SequenceSum(), ConstantLength(8)])
def test_weights_of_an_empty_mask_are_zero(weights):
    assert weights(torch.zeros(2, 3).bool(), torch.tensor([0, 1])).abs().sum() == 0


def test_constant_length_needs_one():
    with pytest.raises(ValueError, match="weights.length is None"):
        ConstantLength()(ROWS, TWO)
    with pytest.raises(ValueError, match="weights.length is 0"):
        ConstantLength(0)


# Divergences


@pytest.mark.parametrize(
    ("policy", "reference", "kl", "spread_1", "spread_3"),
    [((0.7, 0.2, 0.1), (0.5, 0.3, 0.2), 0.085, 0.391, 0.076), ((0.98, 0.01, 0.01), (0.1, 0.1, 0.8), 2.17, 0.80, 7.34)],
)
def test_k3_spreads_less_than_k1_near_the_reference_and_more_far_from_it(policy, reference, kl, spread_1, spread_3):
    """Both are unbiased; enumerated over three symbols."""
    chances, logprobs, other = torch.tensor(policy), torch.tensor([policy]).log(), torch.tensor([reference]).log()
    for estimator, spread in ((K1(), spread_1), (K3(), spread_3)):
        values = estimator(logprobs, other, torch.zeros_like(logprobs))[0]
        mean = (chances * values).sum()
        assert float(mean) == pytest.approx(kl, rel=0.01)
        assert float((chances * (values - mean) ** 2).sum().sqrt()) == pytest.approx(spread, rel=0.01)


@pytest.mark.parametrize(("estimator", "name"), [(K1(), "kl.k1"), (K2(), "kl.k2"), (K3(), "kl.k3")])
def test_divergence_values_and_derivatives(estimator: Divergence, name: str):
    # Read as 'kl.k1.dlogp', 'kl.k2.dlogp', 'kl.k3.dlogp'.
    logprobs = (OLD + LOG_RATIO).requires_grad_()
    value = estimator(logprobs, REF, LOG_RATIO)
    assert_close(value.detach() * MASK, golden(name))
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert_close(slope * MASK, golden(f"{name}.dlogp"))


def test_unbiased_k3_is_the_ratio_times_k3():
    logprobs = OLD + LOG_RATIO
    expected = LOG_RATIO.exp() * K3()(logprobs, REF, LOG_RATIO)
    assert_close(UnbiasedK3()(logprobs, REF, LOG_RATIO), expected)


def expected_gradient(estimator: Divergence) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact on-policy expectation of an estimator and of its gradient, over a three-way softmax."""
    policy, reference = golden("klgrad.p"), torch.tensor([0.5, 0.2, 0.3]).double()
    logits = policy.log().requires_grad_()
    logprobs = logits.log_softmax(0).unsqueeze(0)
    log_ratio = logprobs - logprobs.detach()
    value = (policy * estimator(logprobs, reference.log().unsqueeze(0), log_ratio)[0]).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


def test_what_each_divergence_pulls_on():
    k1, k2, k3, unbiased = (expected_gradient(estimator) for estimator in (K1(), K2(), K3(), UnbiasedK3()))
    assert_close(torch.stack([k1[0], k2[0], k3[0], unbiased[0]]), golden("kl.values[E k1,E k2,E k3,true]"))
    assert_close(k1[1], golden("klgrad.E_grad_k1"))
    assert_close(k2[1], golden("klgrad.E_grad_k2"))
    assert_close(k3[1], golden("klgrad.E_grad_k3"))
    assert_close(unbiased[1], golden("klgrad.E_grad_r*k3(NeMo/V3.2)"))
    # Reverse KL by K2 and UnbiasedK3, forward KL by K3; the true gradients are finite differences.
    assert_close(k2[1], golden("klgrad.true_reverse_KL(pi||ref)"), tolerance=1e-8)
    assert_close(k3[1], golden("klgrad.true_forward_KL(ref||pi)"), tolerance=1e-8)


def test_a_kl_of_weight_0_is_no_kl():
    assert replace(GRPO, kl=KlLoss(0.0)) == replace(GRPO, kl=None)
    assert not replace(GRPO, kl=KlLoss(0.0)).needs_reference
    assert replace(PPO, shape=KlReward(0.0)) == replace(PPO, shape=None)
    assert replace(PPO, shape=(KlReward(0.0), SoftOverlong())) == replace(PPO, shape=SoftOverlong())
    for wrong in (lambda: KlLoss(-0.1), lambda: KlReward(-0.1)):
        with pytest.raises(ValueError, match=r"coefficient is -0.1: give 0 or more"):
            wrong()


def test_the_adaptive_coefficient():
    controller = AdaptiveKl(target=6.0, horizon=10_000)
    assert controller(0.2, kl=9.0, completions=256) == pytest.approx(0.201024, rel=1e-12)  # held at +20 %
    assert controller(0.2, kl=5.4, completions=1000) == pytest.approx(0.2 * (1 - 0.1 * 0.1), rel=1e-12)
    assert controller(0.2, kl=0.0, completions=5000) == pytest.approx(0.2 * (1 - 0.2 * 0.5), rel=1e-12)
    assert controller(0.2, kl=6.0, completions=256) == 0.2
    with pytest.raises(ValueError, match=r"target 0.0, horizon 10000"):
        AdaptiveKl(target=0.0)


# Corrections

MISMATCH = OLD - ROLLOUT


def test_corrections_of_the_fixture():
    assert_close(TokenTruncated(1e9)(MISMATCH, MASK) * MASK, golden("corr.w_token"))
    assert_close(TokenTruncated(2.0)(MISMATCH, MASK) * MASK, golden("corr.tis_cap2"))
    assert_close(IcePop(0.5, 5.0)(MISMATCH, MASK) * MASK, golden("corr.icepop_.5_5"))
    assert_close(SequenceTruncated(1e9)(MISMATCH, MASK)[:, 0], golden("corr.w_seq_prod"))
    assert_close(SequenceTruncated(2.0)(MISMATCH, MASK)[:, 0], golden("corr.seq_tis_cap2"))
    assert_close(SequenceMasked(0.5, 2.0)(MISMATCH, MASK)[:, 0], golden("corr.seq_mis_.5_2"))
    assert_close(SequenceMasked(0.0, 3.0)(MISMATCH, MASK)[:, 0], golden("corr.trl_sequence_mask_default_max3"))


def test_geometric_rejection_keeps_rows_by_their_mean():
    means = golden("corr.w_seq_geo")
    for low, high in ((0.999, 1.001), (1.0, 1.03), (0.6, 1.3), (1.02, 1.27)):
        kept = GeometricRejection(low, high)(MISMATCH, MASK)[:, 0]
        assert_close(kept, ((means >= low) & (means <= high)).double())


def test_bad_corrections_are_refused():
    with pytest.raises(ValueError, match="IcePop keeps weights from 5.0 to 1.0"):
        IcePop(5.0, 1.0)
    with pytest.raises(ValueError, match="correct.cap is 0"):
        TokenTruncated(0.0)


# Selection


def candidates(**changes) -> Candidates:
    return Candidates(
        **{
            "logprobs": OLD + LOG_RATIO,
            "rollout_logprobs": ROLLOUT,
            "advantages": ADVANTAGES * MASK,
            "through": torch.ones(4, 4).double(),
            "entropy": None,
            "mask": MASK,
            **changes,
        }
    )


def test_covariance_of_advantage_and_logprob():
    assert_close(token_covariance(candidates()), golden("cov")[MASK])


def test_kl_covariance_takes_the_highest():
    chosen = KlCovariance(share=0.1).choose(candidates(), None)
    assert chosen.nonzero().tolist() == [GOLDEN["klcov.index"]]
    two = KlCovariance(share=0.25).choose(candidates(), None)
    assert two.nonzero().tolist() == [[1, 1], [3, 0]]


def test_clip_covariance_drops_open_tokens_inside_the_band():
    inside = ClipCovariance(share=1.0, low=0.3, high=5.0)
    assert inside.choose(candidates(), None).nonzero().tolist() == [[1, 1], [2, 0], [3, 0]]
    # With the clip (0.2, 0.28) both tokens of rows 1 and 2 are blocked already.
    through = torch.ones(4, 4).double()
    through[1, 1] = through[2, 0] = 0
    assert inside.choose(candidates(through=through), None).nonzero().tolist() == [[3, 0]]
    assert ClipCovariance(share=1.0, low=0.3, high=0.36).choose(candidates(), None).nonzero().tolist() == [[2, 0]]


def test_clip_covariance_draws_at_random_but_repeatably():
    def draw(seed: int) -> list:
        generator = torch.Generator().manual_seed(seed)
        return ClipCovariance(share=0.1, low=0.3, high=5.0).choose(candidates(), generator).nonzero().tolist()

    assert draw(3) == draw(3)
    assert len({str(draw(seed)) for seed in range(20)}) == 3


def test_top_entropy_keeps_the_uncertain_tokens():
    entropy = torch.arange(16.0).reshape(4, 4)
    dropped = TopEntropy(share=0.3).choose(candidates(entropy=entropy), None)
    assert (MASK & ~dropped).nonzero().tolist() == [[2, 1], [2, 2], [3, 0]]


def test_off_policy_mask_drops_bad_completions_the_policy_has_left():
    dropped = OffPolicyMask(0.1).choose(candidates(), None)
    drift = (ROLLOUT - OLD - LOG_RATIO).sum(1) / MASK.sum(1)
    assert_close(drift, golden("opsm.seq_kl"))
    assert_close((~dropped).double()[:, 0], golden("opsm.mask_delta.1"))
    # The same drift on a good completion is kept.
    assert not OffPolicyMask(0.1).choose(candidates(advantages=-ADVANTAGES * MASK), None)[1].any()


def test_bad_selections_are_refused():
    with pytest.raises(ValueError, match="select.share is 0"):
        TopEntropy(share=0.0)
    with pytest.raises(ValueError, match="select.threshold is 0"):
        OffPolicyMask(0.0)
    with pytest.raises(ValueError, match="entropy is None"):
        TopEntropy().choose(candidates(), None)


# Shaping and keeping

OVERLONG = torch.tensor([16000, 16384, 18432, 20480, 21000])


def test_overlong_penalties():
    assert_close(SoftOverlong(20480, 4096)(OVERLONG, 1), golden("overlong.dapo"))
    assert_close(SoftOverlong(20480, 4096, cap=None)(OVERLONG, 1), golden("overlong.verl_uncapped"))
    assert_close(LinearOverlong(1e-4, 16384)(OVERLONG, 1), golden("overlong.linear(1e-4 beyond 16384)"))


def test_overlong_takes_the_runs_limit_and_a_fifth_of_it():
    assert_close(SoftOverlong()(torch.tensor([80, 90, 100]), completion_limit=100), [0, -0.5, -1])
    assert_close(LinearOverlong(0.1)(torch.tensor([90, 103]), completion_limit=100), [0, -0.3])
    with pytest.raises(ValueError, match="shape.cache is 30"):
        SoftOverlong(limit=20, cache=30)


def test_keep_mixed_looks_at_outcomes_not_at_shaped_rewards():
    outcome = torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0])
    group = torch.arange(12) // 4
    assert KeepMixed()(outcome, group)[::4].tolist() == GOLDEN["dapo.filter.acc_std>0"]
    shaped = outcome + torch.tensor([-0.5] + [0.0] * 11)
    assert KeepMixed()(shaped, group)[::4].tolist() == GOLDEN["dapo.filter.reward_std>0"]


def test_unscored_rows_never_train():
    outcome = torch.tensor([1.0, math.nan, 1, 1, math.nan, 0])
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    assert KeepAll()(outcome, group).tolist() == [True, False, True, True, False, True]
    assert KeepMixed()(outcome, group).tolist() == [False, False, False, True, False, True]


def test_truncated_completions_leave_the_loss_when_asked():
    truncated = torch.tensor([True, False, False, False])
    assert trained_mask(KeepAll(), MASK, truncated).equal(MASK)
    masked = trained_mask(KeepMixed(truncated=False), MASK, truncated)
    assert not masked[0].any()
    assert masked[1:].equal(MASK[1:])


# Pairs, values, supervised


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values).double()


def test_dpo_and_ipo():
    chosen, rejected = numbers(-12 + 12.5), numbers(-14 + 13)
    assert_close(Dpo(0.1)(chosen, rejected)[0], GOLDEN["dpo.sigmoid_beta.1"])
    assert_close(Dpo(0.1, label_smoothing=0.1)(chosen, rejected)[0], GOLDEN["dpo.ls.1"])
    assert_close(Ipo(0.1)(chosen, rejected)[0], GOLDEN["dpo.ipo_beta.1(unnormalised)"])
    for bad in (lambda: Dpo(0.0), lambda: Ipo(-1.0), lambda: Dpo(label_smoothing=0.5)):
        with pytest.raises(ValueError, match="is"):
            bad()


def test_bradley_terry():
    chosen, rejected = numbers(1.2, 0.3, -0.5), numbers(0.4, 0.7, -1.0)
    assert_close(BradleyTerry()(chosen, rejected).mean(), GOLDEN["bt"])
    assert_close(BradleyTerry()(chosen, rejected, numbers(1, 1 / 3, 0)).mean(), GOLDEN["bt.margin"])
    assert_close(BradleyTerry(centring=0.01)(chosen, rejected).mean(), GOLDEN["bt.center.01"])
    # Far apart: the log of a vanishing sigmoid is a line, not −inf.
    assert_close(BradleyTerry()(numbers(-1e4), numbers(1e4))[0], 2e4)


def test_value_loss_with_and_without_its_clip():
    values, old = numbers(0.5, 0.1, 0.9, 0.9, 0.2).unsqueeze(0), numbers(0.2, 0.4, 0.9, 0.5, 0.7).unsqueeze(0)
    returns = golden("gae.full.returns.l0.95").unsqueeze(0)
    assert_close(ValueLoss(clip=0.2)(values, old, returns).mean(), GOLDEN["vloss.clipped_half_mean"])
    assert_close(ValueLoss(clip=None)(values, old, returns).mean(), GOLDEN["vloss.unclipped_half_mean"])
    with pytest.raises(ValueError, match="extra.clip is 0"):
        ValueLoss(clip=0.0)


def test_supervised_loss_is_a_token_mean_over_the_step():
    losses = supervised_loss(OLD)
    assert_close((losses * TokenMean()(MASK, GROUP)).sum(), GOLDEN["sft.token_mean"])
    assert_close((losses * SequenceMean()(MASK, GROUP)).sum(), GOLDEN["sft.seq_mean"])
    logprobs = OLD.clone().requires_grad_()
    dynamic = (supervised_loss(logprobs, dynamic=True) * TokenMean()(MASK, GROUP)).sum()
    assert_close(dynamic.detach(), GOLDEN["sft.dft"])
    assert_close(torch.autograd.grad(dynamic, logprobs)[0], -OLD.exp() * MASK / 10)


def test_positive_nll_is_a_mean_over_the_correct_completions():
    counts, outcome = MASK.sum(dim=1).double(), torch.tensor([1.0, 0.0, -1.0, 1.0])
    assert_close(PositiveNll().row_weights(counts, outcome, GROUP), torch.tensor([0.2, 0, 0, 0.2]))
    assert_close(PositiveNll(0.1)(OLD), -0.1 * OLD)
