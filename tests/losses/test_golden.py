"""Loss and gradient of every algorithm on the fixture, against numbers computed by an independent program.

Its gradients are central finite differences, good to about 1e-10; they are compared at 1e-8.
"""

import warnings
from dataclasses import replace

import pytest
import torch

from proximo import algorithms as named
from proximo.algorithms import (
    CISPO,
    DAPO,
    DR_GRPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    GSPO_PRODUCT,
    GSPO_TOKEN,
    KL_COV,
    LUSPO,
    PPO,
    RLOO,
    SAPO,
    VESPO,
    Algorithm,
    UnusualChoice,
)
from proximo.losses import (
    CappedScore,
    Clip,
    ConstantLength,
    GeometricClip,
    GroupNormalized,
    IcePop,
    KlCovariance,
    OldPolicy,
    SequenceMean,
    SequenceProductRatio,
    SequenceSum,
    TokenMean,
    TokenTruncated,
)
from tests import ROOT
from tests.fixture import (
    ADVANTAGES,
    GOLDEN,
    GOLDEN_LOSSES,
    LOG_RATIO,
    MASK,
    SMALL_LOG_RATIO,
    assert_close,
    golden,
    run,
)


def unusual(algorithm: Algorithm, **changes) -> Algorithm:
    """A combination that warns, made on purpose."""
    with pytest.warns(UnusualChoice):
        return replace(algorithm, **changes)


def cases() -> dict[str, Algorithm]:
    return {
        "grpo_without_kl": replace(GRPO, kl=None),
        "grpo": GRPO,
        "clip_token_mean": PPO,
        "dapo": DAPO,
        "dapo_dual_clip_3": replace(DAPO, gate=Clip(0.2, 0.28, dual=3.0)),
        "constant_length_8_with_std": replace(DR_GRPO, weights=ConstantLength(8)),
        "gspo_clip_0.2": unusual(GSPO, gate=Clip(0.2, 0.2)),
        "gspo_token_clip_0.2": unusual(GSPO_TOKEN, gate=Clip(0.2, 0.2)),
        "gspo_product": GSPO_PRODUCT,
        "sapo": SAPO,
        "cispo_0.28": replace(CISPO, gate=CappedScore(high=0.28)),
        "cispo_two_sided_0.2": replace(CISPO, gate=CappedScore(high=0.2, low=0.2)),
        "gmpo": GMPO,
        "gmpo_0.2": replace(GMPO, gate=GeometricClip(0.2, 0.2)),
        "reinforce_token_mean": GPG,
        "reinforce_sequence_sum": replace(GPG, weights=SequenceSum()),
        "vespo": VESPO,
        "luspo_clip_0.2": unusual(LUSPO, gate=Clip(0.2, 0.2)),
        "gspo_ratio_token_mean": unusual(GSPO, gate=Clip(0.2, 0.2), weights=TokenMean()),
        "dapo_token_truncated_2": replace(DAPO, correct=TokenTruncated(2.0)),
        "dapo_icepop": replace(DAPO, correct=IcePop(0.5, 5.0)),
        "kl_cov_one_token": replace(KL_COV, select=KlCovariance(share=1e-9, coefficient=1.0)),
        "unclipped_token_mean": replace(KL_COV, select=None),
    }


@pytest.mark.parametrize("name", sorted(GOLDEN_LOSSES.keys() - {"rloo", "rloo_product_clip_0.2", "gspo_small"}))
def test_loss_and_gradient(name: str):
    loss, gradient, _ = run(cases()[name])
    expected = GOLDEN_LOSSES[name]
    assert_close(loss, expected["loss"])
    if "gradient" in expected:
        assert_close(gradient, expected["gradient"], tolerance=1e-8)


def test_gspo_with_the_papers_clip():
    loss, gradient, stats = run(GSPO, log_ratio=SMALL_LOG_RATIO)
    assert_close(loss, GOLDEN_LOSSES["gspo_small"]["loss"])
    assert_close(gradient, GOLDEN_LOSSES["gspo_small"]["gradient"], tolerance=1e-8)
    # Rows 1 and 3 are outside the clip, whole: 2 + 1 of the 10 tokens.
    assert stats.floats()["blocked"] == pytest.approx(0.3)


def test_rloo_as_in_the_paper_and_as_a_clipped_product():
    advantages = ADVANTAGES / ADVANTAGES.abs() * 2 / 3
    loss, gradient, _ = run(RLOO, advantages=advantages)
    assert_close(loss, GOLDEN_LOSSES["rloo"]["loss"])
    assert_close(gradient, GOLDEN_LOSSES["rloo"]["gradient"], tolerance=1e-8)

    product = replace(
        RLOO, anchor=OldPolicy(), ratio=SequenceProductRatio(), gate=Clip(0.2, 0.2), weights=SequenceMean()
    )
    loss, gradient, _ = run(product, advantages=advantages)
    assert_close(loss, GOLDEN_LOSSES["rloo_product_clip_0.2"]["loss"])
    assert_close(gradient, GOLDEN_LOSSES["rloo_product_clip_0.2"]["gradient"], tolerance=1e-8)


def test_retelling_of_sapo():
    divided = torch.where(ADVANTAGES > 0, ADVANTAGES, 2 * ADVANTAGES)
    loss, _, _ = run(named.SAPO_SEQUENCE, advantages=divided)
    assert_close(loss, 0.35938116355844374)


def test_on_policy_values_and_gradients():
    on_policy = torch.zeros_like(LOG_RATIO)
    assert_close(run(replace(GRPO, kl=None), on_policy)[0], GOLDEN["loss.on_policy.grpo"])
    assert_close(run(SAPO, on_policy)[0], GOLDEN["loss.on_policy.sapo"])
    for algorithm in (replace(GRPO, kl=None), GSPO, GSPO_TOKEN, SAPO, GMPO):
        assert_close(run(algorithm, on_policy)[1], golden("grad.on_policy_all_seq_mean"))
    for algorithm in (PPO, DAPO, CISPO, GPG):
        assert_close(run(algorithm, on_policy)[1], golden("grad.on_policy_token_mean"))


def test_sequence_and_sequence_token_part_ways_on_token_advantages():
    advantages = ADVANTAGES.clone()
    advantages[0] = torch.tensor([1.0, 0.5, -0.5, 2.0])
    pooled = run(unusual(GSPO, gate=Clip(0.2, 0.2)), advantages=advantages)[1][0]
    own = run(unusual(GSPO_TOKEN, gate=Clip(0.2, 0.2)), advantages=advantages)[1][0]
    assert_close(pooled, golden("grad.row0[sequence, per-token A]"), tolerance=1e-8)
    assert_close(own, golden("grad.row0[sequence_token, per-token A]"), tolerance=1e-8)


def test_micro_batches_add_up_and_means_of_means_do_not():
    assert_close(run(DAPO)[0], GOLDEN["microbatch.global"])
    halves = [
        run(DAPO, mask=MASK & keep)[0]
        for keep in (torch.tensor([[1], [1], [0], [0]]) == 1, torch.tensor([[0], [0], [1], [1]]) == 1)
    ]
    assert_close(sum(halves) / 2, GOLDEN["microbatch.local_mean_of_means(bnpo, rows 01|23)"])


def test_rejected_tokens_keep_their_place_in_the_denominator():
    rejected = MASK.clone()
    rejected[1, 1] = False
    weights = TokenMean()(MASK, torch.zeros(4, dtype=torch.long))
    assert_close(run(DAPO, mask=rejected, weights=weights)[0], GOLDEN["reject.keep_denominator"])
    assert_close(run(DAPO, mask=rejected)[0], GOLDEN["reject.drop_denominator"])


def test_a_fully_masked_row_keeps_its_place_and_an_unscored_one_does_not():
    algorithm = replace(DAPO, weights=SequenceMean())
    masked = MASK & (torch.arange(4) != 3).unsqueeze(1)
    assert_close(run(algorithm, mask=masked)[0], GOLDEN["masked_row.count_all(TRL grpo / verl w/ global_batch_size)"])
    unscored = ADVANTAGES.masked_fill((torch.arange(4) == 3).unsqueeze(1), torch.nan)
    loss, gradient, stats = run(algorithm, advantages=unscored)
    assert_close(loss, GOLDEN["masked_row.exclude(verl no global)"])
    assert gradient[3].abs().sum() == 0
    assert stats.floats()["unscored"] == 1


def test_every_golden_number_is_read_by_some_test():
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in GOLDEN if name not in text] == []


def test_the_default_of_every_group_algorithm_is_ddof_1_and_epsilon_1e_6():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm in (GRPO, DAPO, GSPO, SAPO):
            assert algorithm.advantage == GroupNormalized(ddof=1, epsilon=1e-6)
