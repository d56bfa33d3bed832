# pyright: reportMissingImports=false
"""The worker that runs where TRL is installed: prints, as JSON, how its losses and ours compare."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.rewards import get_soft_overlong_punishment

from proximo import DAPO, GRPO, GSPO, SAPO, Algorithm
from proximo.algorithms import CISPO, DR_GRPO, GMPO, LUSPO, VESPO
from proximo.losses import (
    BatchScaled,
    BradleyTerry,
    CappedScore,
    Clip,
    ConstantLength,
    Dpo,
    EntropyBonus,
    GroupCentred,
    GroupNormalized,
    IcePop,
    Ipo,
    KlLoss,
    KlReward,
    LeaveOneOut,
    OffPolicyMask,
    SamplerPolicy,
    SequenceMasked,
    SequenceProductRatio,
    SequenceTruncated,
    SoftOverlong,
    TokenMean,
    TokenTruncated,
    TopEntropy,
    UnbiasedK3,
)
from proximo_lab.parity import trl_differences
from proximo_lab.parity.batches import MAX_WIDTH, Batch, draw, even, pairs, such_that
from proximo_lab.parity.bypassed_trl import (
    advantages,
    bypassed,
    corrected,
    grpo,
    in_micro_batches,
    loss,
    moved,
    preference,
    ranking,
)
from proximo_lab.parity.measure import Report, our_credit, our_loss

PLAIN = replace(GRPO, kl=None)
COMPUTE = "`GRPOTrainer._compute_loss`"
SCORE = "`GRPOTrainer._generate_and_score_completions`"
BIASED_KL = {"beta": 0.04, "use_bias_correction_kl": False}
BIASED_WORDS = "beta 0.04, use_bias_correction_kl off"


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    report = Report("TRL", ("trl", "transformers", "torch"))
    losses(report)
    corrections(report)
    sequence_losses(report)
    all_advantages(report)
    rewards_and_pairs(report)
    trl_differences.measure(report)
    report.print()


def losses(report: Report) -> None:
    report.agrees("GRPO, no KL", f"{COMPUTE}, loss_type grpo", our_loss(PLAIN), grpo(loss_type="grpo"))
    their_kl = grpo(loss_type="grpo", **BIASED_KL)
    report.agrees("GRPO, kl 0.04 · K3", f"{COMPUTE}, grpo, {BIASED_WORDS}", our_loss(GRPO), their_kl)
    unbiased = replace(GRPO, kl=KlLoss(0.04, UnbiasedK3()))
    their_kl = grpo(loss_type="grpo", beta=0.04)
    report.agrees("GRPO, kl 0.04 · UnbiasedK3", f"{COMPUTE}, grpo, beta 0.04", our_loss(unbiased), their_kl)
    emptied = partial(draw, emptied=True)
    wholly_masked = "GRPO, some rows wholly masked"
    report.agrees(wholly_masked, f"{COMPUTE}, grpo", our_loss(PLAIN), grpo(loss_type="grpo"), emptied)
    in_two = in_micro_batches(loss_type="grpo")
    report.agrees("GRPO, the whole step", f"{COMPUTE}, grpo, two micro-batches", our_loss(PLAIN), in_two, pairs)

    dapo = grpo(loss_type="dapo", epsilon_high=0.28)
    report.agrees("DAPO", f"{COMPUTE}, dapo, epsilon_high 0.28", our_loss(DAPO), dapo)
    in_two = in_micro_batches(loss_type="dapo", epsilon_high=0.28)
    report.agrees("DAPO, the whole step", f"{COMPUTE}, dapo, two micro-batches", our_loss(DAPO), in_two, pairs)
    dual = replace(DAPO, gate=Clip(0.2, 0.28, dual=3.0))
    their_dual = grpo(loss_type="dapo", epsilon_high=0.28, delta=3.0)
    report.agrees("DAPO, Clip(0.2, 0.28, dual=3)", f"{COMPUTE}, dapo, delta 3", our_loss(dual), their_dual)
    token_mean = replace(PLAIN, weights=TokenMean())
    bnpo = grpo(loss_type="bnpo")
    report.agrees("GRPO with TokenMean", f"{COMPUTE}, bnpo, one micro-batch", our_loss(token_mean), bnpo)
    dr_grpo = replace(DR_GRPO, weights=ConstantLength(MAX_WIDTH))
    their_dr_grpo = grpo(loss_type="dr_grpo", max_completion_length=MAX_WIDTH)
    report.agrees(f"Dr. GRPO, length {MAX_WIDTH}", f"{COMPUTE}, dr_grpo", our_loss(dr_grpo), their_dr_grpo)
    report.agrees("SAPO", f"{COMPUTE}, sapo", our_loss(SAPO), grpo(loss_type="sapo"))
    cispo = grpo(loss_type="cispo", epsilon_high=5.0)
    report.agrees("CISPO, CappedScore(high=4)", f"{COMPUTE}, cispo, epsilon_high 5", our_loss(CISPO), cispo)
    low_cap = replace(CISPO, gate=CappedScore(0.28))
    cispo = grpo(loss_type="cispo", epsilon_high=1.28)
    report.agrees("CISPO, CappedScore(high=0.28)", f"{COMPUTE}, cispo, epsilon_high 1.28", our_loss(low_cap), cispo)

    entropic = replace(DAPO, extra=EntropyBonus(0.01))
    their_entropic = grpo(loss_type="dapo", epsilon_high=0.28, entropy_coef=0.01)
    name = "DAPO, EntropyBonus(0.01), by entropy"
    report.agrees(name, f"{COMPUTE}, dapo, entropy_coef 0.01", our_loss(entropic), their_entropic, leaf="entropy")
    picked = replace(DAPO, select=TopEntropy(0.2))
    their_picked = grpo(loss_type="dapo", epsilon_high=0.28, top_entropy_quantile=0.2)
    fives = such_that(lambda batch: batch.tokens % 5 == 0, draw)
    name = "DAPO, TopEntropy(0.2), tokens a multiple of 5"
    report.agrees(name, f"{COMPUTE}, dapo, top_entropy_quantile 0.2", our_loss(picked), their_picked, fives)


def corrections(report: Report) -> None:
    """The sampler's mismatch: TRL's own ratio, then its own loss."""
    pieces = {
        "TokenTruncated(2)": (TokenTruncated(2.0), "token_truncate", 2.0, None),
        "SequenceTruncated(2)": (SequenceTruncated(2.0), "sequence_truncate", 2.0, None),
        "SequenceMasked(0.5, 2)": (SequenceMasked(0.5, 2.0), "sequence_mask", 2.0, 0.5),
        "IcePop(0.5, 5)": (IcePop(0.5, 5.0), "token_mask", 5.0, 0.5),
    }
    for name, (piece, mode, highest, lowest) in pieces.items():
        settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": highest}
        theirs = corrected(
            loss_type="dapo", epsilon_high=0.28, vllm_importance_sampling_clip_min=lowest, **settings, **BIASED_KL
        )
        ours = our_loss(replace(DAPO, correct=piece, kl=KlLoss(0.04)))
        report.agrees(f"DAPO with KL, {name}", f"{SCORE} and `_compute_loss`, {mode}", ours, theirs, even)
    masked = replace(PLAIN, select=OffPolicyMask(0.1))
    theirs = corrected(loss_type="grpo", off_policy_mask_threshold=0.1, vllm_importance_sampling_correction=True)
    # TRL corrects whenever it has the sampler's log-probs; by default a product up to 3 passes.
    ours = our_loss(replace(masked, correct=SequenceMasked(0.0, 3.0)))
    name = "GRPO, OffPolicyMask(0.1), SequenceMasked(0, 3)"
    report.agrees(name, f"{COMPUTE}, off_policy_mask_threshold 0.1, other defaults", ours, theirs, even)


def sequence_losses(report: Report) -> None:
    settings = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    report.agrees("GSPO", f"{COMPUTE}, grpo, sequence, 3e-4/4e-4", our_loss(GSPO), grpo(loss_type="grpo", **settings))
    with_kl = replace(GSPO, kl=KlLoss(0.04))
    their_kl = grpo(loss_type="grpo", **BIASED_KL, **settings)
    report.agrees("GSPO, kl 0.04 · K3", f"{COMPUTE}, grpo, sequence, {BIASED_WORDS}", our_loss(with_kl), their_kl)
    settings |= {"epsilon": 2e-3, "epsilon_high": 2.5e-3}
    report.agrees("LUSPO", f"{COMPUTE}, luspo, sequence", our_loss(LUSPO), grpo(loss_type="luspo", **settings))
    report.agrees("VESPO", f"{COMPUTE}, vespo", our_loss(VESPO), grpo(loss_type="vespo"))
    uncapped = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1e9}
    anchored = our_loss(replace(VESPO, anchor=SamplerPolicy()))
    theirs = corrected(loss_type="vespo", **uncapped)
    report.agrees("VESPO, anchor SamplerPolicy", f"{COMPUTE}, vespo, token_truncate, cap 1e9", anchored, theirs, even)

    gmpo = bypassed(GMPOTrainer, epsilon=0.4, epsilon_high=0.4)
    name = "`experimental.gmpo.GMPOTrainer._compute_loss`, 0.4/0.4"
    report.agrees("GMPO", name, our_loss(GMPO), lambda batch: loss(gmpo, batch))
    rloo = bypassed(RLOOTrainer)
    product = replace(PLAIN, ratio=SequenceProductRatio())
    name = "GRPO with SequenceProductRatio"
    report.agrees(name, "`RLOOTrainer._compute_loss`", our_loss(product), lambda batch: loss(rloo, batch))


def all_advantages(report: Report) -> None:
    """Compare with the advantages that TRL makes from given rewards."""
    unscored = partial(draw, even=True, unscored=True)
    group, batch_wide = GroupNormalized(epsilon=1e-4), BatchScaled(epsilon=1e-4)
    rows = (
        ("GroupNormalized(epsilon=1e-4)", group, GRPOTrainer, {}, even),
        ("the same, some rows unscored", group, GRPOTrainer, {}, unscored),
        ("GroupCentred()", GroupCentred(), GRPOTrainer, {"scale_rewards": "none"}, even),
        ("BatchScaled(epsilon=1e-4)", batch_wide, GRPOTrainer, {"scale_rewards": "batch"}, even),
        ("the same, some rows unscored", batch_wide, GRPOTrainer, {"scale_rewards": "batch"}, unscored),
        ("LeaveOneOut()", LeaveOneOut(), RLOOTrainer, {"beta": 0.0}, even),
        ("LeaveOneOut(), KlReward(0.05)", LeaveOneOut(), RLOOTrainer, {"beta": 0.05}, even),
    )
    for name, piece, trainer, settings, source in rows:
        words = "".join(f", {key} {value}" for key, value in settings.items())
        theirs = f"`{trainer.__name__}._generate_and_score_completions`{words}"
        ours = our_credit(Algorithm(advantage=piece), KlReward(0.05) if "KlReward" in name else None)
        report.agrees(name, theirs, ours, advantages(trainer, **settings), source, leaf=None)


def rewards_and_pairs(report: Report) -> None:
    punish = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    overlong = SoftOverlong(limit=20, cache=8)
    report.agrees(
        "SoftOverlong(20, 8), lengths 1 to 24",
        "`get_soft_overlong_punishment(20, 8)`",
        lambda batch: overlong(batch.mask.sum(dim=1), completion_limit=20),
        lambda batch: torch.tensor(punish([[1] * int(length) for length in batch.mask.sum(dim=1)])),
        leaf=None,
    )
    name = "`DPOTrainer._compute_loss`"
    report.agrees("Dpo(0.1)", f"{name}, sigmoid", preferred, preference("sigmoid", beta=0.1), pairs)
    report.agrees("Ipo(0.1), of token means", f"{name}, ipo", identity_preferred, preference("ipo", beta=0.1), pairs)

    name = "`RewardTrainer.compute_loss`, margins, center_rewards_coefficient 0.01"
    report.agrees("BradleyTerry(0.01) with margins", name, ranked, ranking(center_rewards_coefficient=0.01), pairs)


def preferred(batch: Batch) -> Tensor:
    return Dpo(0.1)(*moved(batch).chunk(2)).mean()


def identity_preferred(batch: Batch) -> Tensor:
    return Ipo(0.1)(*(moved(batch) / batch.mask.sum(dim=1)).chunk(2)).mean()


def ranked(batch: Batch) -> Tensor:
    chosen, rejected = batch.logprobs[:, 0].chunk(2)
    return BradleyTerry(0.01)(chosen, rejected, batch.values[: len(chosen), 0]).mean()


if __name__ == "__main__":
    main()
