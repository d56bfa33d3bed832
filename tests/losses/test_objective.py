"""The door of the loss, its numerical safety, its statistics and its extra terms."""

import math
from dataclasses import replace

import pytest
import torch

import proximo
from proximo.algorithms import CLIP_COV, DAPO, GRPO, GSPO, KL_COV, PPO, SAPO, VAPO, Algorithm
from proximo.losses import (
    K3,
    Clip,
    ClipCovariance,
    CurrentPolicy,
    EntropyBonus,
    GeometricRejection,
    IcePop,
    KlLoss,
    LossInputs,
    OffPolicyMask,
    PositiveNll,
    SamplerPolicy,
    SequenceMasked,
    SequenceTruncated,
    TokenMean,
    TokenTruncated,
    TopEntropy,
    UnbiasedK3,
    plan_step,
    rows_of,
)
from proximo.losses.arithmetic import count_below, count_of
from proximo.losses.pieces.selection import Candidates, KlCovariance
from tests import batches
from tests.batches import NAMED
from tests.fixture import ADVANTAGES, GROUP, LOG_RATIO, MASK, OLD, REF, ROLLOUT, assert_close, golden, run

ALL = pytest.mark.parametrize("algorithm", [pytest.param(value, id=name) for name, value in NAMED.items()])


# Numerical safety


@ALL
@pytest.mark.parametrize("size", [80.0, -80.0])
def test_no_infinity_at_log_ratios_of_80_in_float32(algorithm: Algorithm, size: float):
    batch = batches.make(seed=5, num_groups=2, group_size=3, width=4, spread=0.0)
    for sign in (1.0, -1.0):
        tensors = {name: tensor.float() for name, tensor in batch.tensors().items() if tensor.is_floating_point()}
        tensors["logprobs"] = tensors["old_logprobs"] + size
        tensors["ref_logprobs"] = tensors["logprobs"] + sign * 80.0
        tensors["rollout_logprobs"] = tensors["old_logprobs"] - sign * 80.0
        extreme = replace(batch, **tensors)
        for changes in (
            {},
            {"kl": KlLoss(0.04, K3()), "shape": None},
            {"kl": KlLoss(0.04, UnbiasedK3()), "shape": None},
        ):
            loss, gradient, stats = batches.run(replace(algorithm, **changes), extreme)
            assert loss.isfinite()
            assert loss.dtype == torch.float32
            assert gradient.isfinite().all()
            assert all(math.isfinite(value) for value in stats.floats().values())


@pytest.mark.parametrize(
    "correction", [TokenTruncated(), SequenceTruncated(), SequenceMasked(), IcePop(), GeometricRejection()]
)
@pytest.mark.parametrize("gap", [80.0, -80.0])
def test_no_infinity_from_a_sampler_that_is_far_off(correction, gap: float):
    far = ROLLOUT.float() - gap
    loss, gradient, _ = run(replace(DAPO, correct=correction), rollout_logprobs=far)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@ALL
def test_an_empty_mask_is_a_loss_of_zero(algorithm: Algorithm):
    batch = batches.make(seed=1, num_groups=1, group_size=3, width=4, spread=0.1)
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    loss, gradient, stats = batches.run(algorithm, empty)
    assert loss == 0
    assert gradient.abs().sum() == 0
    assert all(math.isfinite(value) for value in stats.floats().values())


@ALL
def test_one_row_of_one_token(algorithm: Algorithm):
    batch = batches.make(seed=2, num_groups=1, group_size=1, width=1, spread=0.1)
    loss, gradient, _ = batches.run(algorithm, batch)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@ALL
def test_bf16_is_read_as_float32(algorithm: Algorithm):
    batch = batches.make(seed=3, num_groups=2, group_size=2, width=4, spread=0.3)
    tensors = {name: tensor for name, tensor in batch.tensors().items() if tensor.ndim == 2 and name != "mask"}
    half = replace(batch, **{name: tensor.bfloat16() for name, tensor in tensors.items()})
    single = replace(batch, **{name: tensor.bfloat16().float() for name, tensor in tensors.items()})
    loss, gradient, _ = batches.run(algorithm, half)
    expected, expected_gradient, _ = batches.run(algorithm, single)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert loss == expected
    assert_close(gradient.float(), expected_gradient, tolerance=5e-3)


def test_constants_carry_no_gradient():
    logprobs = (OLD + LOG_RATIO).requires_grad_()
    constants = {"old_logprobs": OLD, "ref_logprobs": REF, "advantages": ADVANTAGES}
    watched = {name: tensor.clone().requires_grad_() for name, tensor in constants.items()}
    loss, _ = proximo.policy_loss(
        GRPO,
        logprobs=logprobs,
        old_logprobs=watched["old_logprobs"],
        ref_logprobs=watched["ref_logprobs"],
        advantages=watched["advantages"],
        mask=MASK,
        group=GROUP,
    )
    loss.backward()
    assert all(tensor.grad is None for tensor in watched.values())


def test_the_same_tensor_as_old_and_new_still_learns():
    logprobs = OLD.clone().requires_grad_()
    loss, _ = proximo.policy_loss(
        SAPO, logprobs=logprobs, old_logprobs=logprobs, advantages=ADVANTAGES, mask=MASK, group=GROUP
    )
    loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad[MASK] != 0).all()


# Unscored rows


@ALL
def test_an_unscored_row_is_as_if_it_were_not_there(algorithm: Algorithm):
    batch = batches.make(seed=4, num_groups=2, group_size=3, width=5, spread=0.4)
    advantages = batch.advantages.clone()
    advantages[[1, 4]] = math.nan
    kept = torch.tensor([0, 2, 3, 5])
    loss, gradient, stats = batches.run(algorithm, replace(batch, advantages=advantages))
    expected, expected_gradient, _ = batches.run(algorithm, batch.rows(kept))
    assert_close(loss, expected)
    assert_close(gradient[kept], expected_gradient)
    assert gradient[[1, 4]].abs().sum() == 0
    assert stats.floats()["unscored"] == 2
    assert stats.floats()["rows"] == 4


def test_unscored_rows_from_rewards_to_loss():
    rewards = torch.tensor([1.0, math.nan, 0.0, 1.0])
    advantages, _ = proximo.advantages(GRPO, rewards=rewards, group=GROUP, mask=MASK)
    loss, _, _ = run(GRPO, advantages=advantages)
    kept = torch.tensor([0, 2, 3])
    part, _ = proximo.advantages(GRPO, rewards=rewards[kept], group=GROUP[kept], mask=MASK[kept])
    expected, _ = proximo.policy_loss(
        GRPO,
        logprobs=(OLD + LOG_RATIO)[kept],
        old_logprobs=OLD[kept],
        advantages=part,
        mask=MASK[kept],
        group=GROUP[kept],
        ref_logprobs=REF[kept],
    )
    assert_close(loss, expected)


# Statistics


def test_quadrants_and_blocked_share_of_the_fixture():
    stats = run(replace(GRPO, kl=None))[2].floats()
    # Of ten tokens: 0.30 and 0.22 are good and above 1.2; −0.40 good and below 0.8; 0.25 and 1.30 bad and above;
    # −0.35 and −0.30 bad and below. Good above and bad below are blocked.
    assert stats["positive_above"] == pytest.approx(0.2)
    assert stats["positive_below"] == pytest.approx(0.1)
    assert stats["negative_above"] == pytest.approx(0.2)
    assert stats["negative_below"] == pytest.approx(0.2)
    assert stats["blocked"] == pytest.approx(0.4)
    assert stats["gate"] == pytest.approx(0.6)
    assert stats["ratio_max"] == pytest.approx(math.exp(1.3))
    assert stats["log_ratio_max"] == pytest.approx(1.3)
    assert stats["tokens"] == 10
    assert stats["log_ratio"] == pytest.approx(LOG_RATIO.sum().item() / 10)
    assert stats["old_kl"] == pytest.approx(((LOG_RATIO.exp() - 1 - LOG_RATIO) * MASK).sum().item() / 10)


def test_a_soft_gate_reports_its_opening_not_a_clip_share():
    stats = run(SAPO)[2].floats()
    ratio = LOG_RATIO.exp()
    tau = torch.where(ADVANTAGES > 0, 1.0, 1.05)
    opening = 1 / (tau * (ratio - 1) / 2).cosh().square()
    assert stats["gate"] == pytest.approx((opening * MASK).sum().item() / 10)
    assert stats["blocked"] == 0


def test_loss_parts_add_up():
    stats = run(replace(VAPO, kl=KlLoss(0.04)), outcome=torch.tensor([1.0, 0, 0, 1]))[2].floats()
    assert stats["loss"] == pytest.approx(stats["policy_loss"] + stats["kl_loss"] + stats["extra_loss"])
    assert stats["kl_loss"] > 0
    assert stats["extra_loss"] > 0


def test_correction_statistics():
    stats = run(replace(DAPO, correct=IcePop(0.5, 5.0)))[2].floats()
    assert stats["rejected"] == pytest.approx(0.1)
    assert stats["correction_max"] == pytest.approx(math.exp(0.9))


# Terms of single stages


def test_a_correction_touches_the_policy_term_and_not_the_kl():
    plain, corrected = run(GRPO)[2].floats(), run(replace(GRPO, correct=TokenTruncated(2.0)))[2].floats()
    assert corrected["kl_loss"] == plain["kl_loss"]
    assert corrected["policy_loss"] != plain["policy_loss"]


def test_the_sampler_as_anchor_measures_the_ratio_against_it():
    bypass = replace(DAPO, anchor=SamplerPolicy())
    direct, _ = proximo.policy_loss(
        DAPO, logprobs=OLD + LOG_RATIO, old_logprobs=ROLLOUT, advantages=ADVANTAGES, mask=MASK, group=GROUP
    )
    assert_close(run(bypass)[0], direct)


def test_the_current_policy_as_anchor_holds_every_ratio_at_1_and_still_learns():
    loss, gradient, stats = run(replace(GRPO, kl=None, anchor=CurrentPolicy()))
    assert_close(gradient, golden("grad.on_policy_all_seq_mean"))
    assert_close(loss, 0.0)
    assert stats.floats()["ratio_max"] == 1


def test_clip_cov_drops_one_token_of_the_fixture():
    dropped = replace(CLIP_COV, gate=Clip(0.2, 0.28), select=ClipCovariance(share=1.0, low=0.3, high=5.0))
    loss, gradient, stats = run(dropped)
    assert_close(loss, 0.324938312335, tolerance=1e-11)
    assert gradient[3, 0] == 0
    assert stats.floats()["selected"] == pytest.approx(0.1)


def test_off_policy_mask_drops_a_row_and_keeps_the_denominator():
    loss, gradient, _ = run(replace(DAPO, select=OffPolicyMask(0.1)))
    assert gradient[1].abs().sum() == 0
    kept = MASK & (torch.arange(4) != 1).unsqueeze(1)
    assert_close(loss, run(DAPO, mask=kept, weights=TokenMean()(MASK, GROUP))[0])


def test_top_entropy_trains_on_the_uncertain_tokens_alone():
    entropy = torch.arange(16.0).reshape(4, 4)
    gradient = run(replace(DAPO, gate=Clip(9.0, 9.0), select=TopEntropy(share=0.3)), entropy=entropy)[1]
    assert gradient.nonzero().tolist() == [[2, 1], [2, 2], [3, 0]]


def test_entropy_bonus_and_positive_nll():
    entropy = torch.full((4, 4), 2.0)
    bonus = run(replace(DAPO, extra=EntropyBonus(0.01)), entropy=entropy)[0]
    assert_close(bonus, run(DAPO)[0] - 0.01 * 2.0)
    correct = torch.tensor([1.0, 0, 0, 1])
    nll = run(replace(DAPO, extra=PositiveNll(0.1)), outcome=correct)[0]
    chosen = (OLD + LOG_RATIO)[MASK & (correct > 0).unsqueeze(1)]
    assert_close(nll, run(DAPO)[0] - 0.1 * chosen.mean())


def test_the_entropy_bonus_reaches_the_entropys_own_gradient():
    entropy = torch.full((4, 4), 2.0, requires_grad=True)
    loss, _ = proximo.policy_loss(
        replace(DAPO, extra=EntropyBonus(0.01)),
        logprobs=OLD,
        old_logprobs=OLD,
        advantages=ADVANTAGES,
        mask=MASK,
        group=GROUP,
        entropy=entropy,
    )
    loss.backward()
    assert entropy.grad is not None
    assert_close(entropy.grad, -0.01 * MASK / 10)


# What the door refuses


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (GRPO, {"ref_logprobs": None}, r"ref_logprobs is None, but KlLoss.* replace\(algorithm, kl=None\)"),
        (replace(DAPO, correct=IcePop()), {"rollout_logprobs": None}, "rollout_logprobs is None, but IcePop"),
        (replace(DAPO, anchor=SamplerPolicy()), {"rollout_logprobs": None}, "the anchor is SamplerPolicy"),
        (replace(DAPO, extra=EntropyBonus()), {}, "entropy is None"),
        (replace(DAPO, select=TopEntropy()), {}, "entropy is None"),
        (VAPO, {}, "outcome is None, but PositiveNll"),
        (
            DAPO,
            {"advantages": ADVANTAGES[:, 0]},
            r"advantages has shape \(4,\).*advantages\[:, None\].expand_as\(mask\)",
        ),
        (DAPO, {"group": GROUP[:2]}, r"group has shape \(2,\), the mask requires \(4,\)"),
        (DAPO, {"old_logprobs": OLD[:, :2]}, r"old_logprobs has shape \(4, 2\)"),
        (DAPO, {"outcome": GROUP[:2].double()}, r"outcome has shape \(2,\)"),
        (DAPO, {"mask": MASK * 0.5}, "mask .* holds values other than 0 and 1"),
        (DAPO, {"mask": MASK[0]}, r"mask has shape \(4,\): it must be \[rows, positions\]"),
        (DAPO, {"weights": torch.ones(4, 3)}, r"weights has shape \(4, 3\)"),
        (KL_COV, {"weights": torch.ones(4, 4)}, "KlCovariance looks at all rows of the step"),
        (VAPO, {"weights": torch.ones(4, 4), "outcome": GROUP.double()}, "PositiveNll looks at all rows of the step"),
    ],
)
def test_bad_input_gets_one_clear_error(algorithm: Algorithm, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        run(algorithm, **changes)


def test_a_mask_of_zeros_and_ones_is_understood():
    for dtype in (torch.long, torch.float32, torch.float64):
        assert_close(run(DAPO, mask=MASK.to(dtype))[0], run(DAPO)[0])


def test_weights_off_the_mask_are_not_read():
    weights = TokenMean()(MASK, GROUP)
    noisy = torch.where(MASK, weights, 5.0)
    assert_close(run(GSPO, weights=noisy)[0], run(GSPO, weights=weights)[0])


def test_a_plan_is_sliced_by_rows():
    outcome = torch.tensor([1.0, 0, 0, 1])
    tensors = {"logprobs": OLD, "old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK, "group": GROUP}
    plan = plan_step(VAPO, rows_of(VAPO, LossInputs(**tensors, outcome=outcome)))
    part = plan.rows(slice(2, 4))
    (nll_weights,) = part.extra_weights
    assert nll_weights is not None
    assert_close(part.weights, MASK[2:] / 10)
    assert_close(nll_weights, torch.tensor([[0, 0, 0, 0], [0.2, 0, 0, 0]]))


def test_ppo_runs_without_reference_log_probs_since_its_kl_is_in_the_reward():
    assert run(PPO, ref_logprobs=None)[0].isfinite()


# Shares


@pytest.mark.parametrize(
    ("share", "total", "count"), [(0.29, 100, 29), (0.2, 8, 2), (0.145, 100, 14), (0.5, 5, 2), (0.2, 7, 1), (1.0, 8, 8)]
)
def test_a_share_of_a_count_is_the_nearest_whole_number(share, total, count):
    assert count_of(share, total) == count


@pytest.mark.parametrize(("share", "total", "count"), [(0.29, 100, 29), (0.2, 8, 1), (0.999, 1, 0), (1.0, 8, 8)])
def test_a_share_may_be_rounded_down_where_its_authors_do(share, total, count):
    assert count_below(share, total) == count


@pytest.mark.parametrize("select", [ClipCovariance(share=0.2, low=-9, high=9), KlCovariance(share=0.2)])
def test_covariance_picks_one_token_of_eight(select):
    """int(0.2 · 8), as in the authors' code."""
    numbers = torch.arange(8, dtype=torch.float64).view(1, 8)
    mask = torch.ones(1, 8, dtype=torch.bool)
    among = Candidates(numbers, numbers, numbers, torch.ones_like(numbers), None, mask)
    assert int(select.choose(among, None).sum()) == 1


def test_a_fifth_of_eight_tokens_keeps_two():
    entropy = torch.arange(8.0).reshape(2, 4)
    none = torch.zeros(2, 4)
    candidates = Candidates(none, none, none, none, entropy, torch.ones(2, 4, dtype=torch.bool))
    dropped = TopEntropy(share=0.2).choose(candidates, None)
    assert (~dropped).nonzero().tolist() == [[1, 2], [1, 3]]
