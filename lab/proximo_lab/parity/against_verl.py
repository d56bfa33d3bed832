# pyright: reportMissingImports=false
"""The worker that runs where verl is installed: prints, as JSON, how its functions and ours compare."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from proximo import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm, advantages
from proximo.algorithms import (
    CISPO,
    CLIP_COV,
    DR_GRPO,
    GMPO,
    GPG,
    GSPO_TOKEN,
    KL_COV,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
)
from proximo.losses import (
    K1,
    K2,
    K3,
    CappedScore,
    Clip,
    ClipCovariance,
    ConstantLength,
    Gae,
    GeometricRejection,
    GroupCentred,
    IcePop,
    KlCovariance,
    KlLoss,
    KlReward,
    LeaveOneOut,
    LiveScaled,
    SamplerPolicy,
    SequenceMasked,
    SequenceMean,
    SequenceSum,
    SequenceTruncated,
    SoftOverlong,
    TokenMean,
    TokenTruncated,
    TokenWhitened,
    ValueLoss,
    supervised_loss,
)
from proximo_lab.parity import verl_differences
from proximo_lab.parity.batches import MAX_WIDTH, Batch, draw, pairs, such_that
from proximo_lab.parity.configured_verl import (
    corrected,
    estimated,
    estimator,
    in_micro_batches,
    overlong,
    policy,
    rejected,
    supervised,
    with_kl,
)
from proximo_lab.parity.measure import Measured, Report, our_credit, our_loss

PLAIN = replace(GRPO, kl=None)
GAE = replace(PPO, advantage=TokenWhitened(Gae(0.99, 0.9)))
BY_ROW: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
BY_TOKEN: dict[str, Any] = {"loss_agg_mode": "token-mean"}
DECOUPLED: dict[str, Any] = {"clip_ratio_high": 0.28}
VANILLA = "`compute_policy_loss_vanilla`"
FAR = "c out of reach"

by_token = partial(draw, token_advantages=True)
alone = partial(draw, singletons=True)
wide = such_that(lambda batch: batch.tokens > 1, draw)


def main() -> None:
    torch.set_num_threads(1)
    report = Report("verl", ("verl", "transformers", "torch"))
    vanilla(report)
    other_losses(report)
    corrections(report)
    all_advantages(report)
    parts(report)
    verl_differences.measure(report)
    report.print()


def vanilla(report: Report) -> None:
    report.agrees("PPO, advantages by token", f"{VANILLA}, token-mean, {FAR}", our_loss(PPO), policy(), by_token)
    report.agrees("DAPO", f"{VANILLA}, token-mean, 0.2/0.28, {FAR}", our_loss(DAPO), policy(**DECOUPLED))
    dual = our_loss(replace(DAPO, gate=Clip(0.2, 0.28, dual=3.0)))
    their_dual = policy(clip_ratio_c=3.0, **DECOUPLED)
    report.agrees("DAPO, Clip(0.2, 0.28, dual=3)", f"{VANILLA}, token-mean, c 3", dual, their_dual)
    by_row = policy(**BY_ROW)
    report.agrees("GRPO, no KL", f"{VANILLA}, seq-mean-token-mean, {FAR}", our_loss(PLAIN), by_row)
    their_kl = with_kl("low_var_kl", 0.04, **BY_ROW)
    report.agrees("GRPO, kl 0.04 · K3", f"{VANILLA} and `kl_penalty` low_var_kl", our_loss(GRPO), their_kl)
    k2 = our_loss(replace(GRPO, kl=KlLoss(0.04, K2())))
    report.agrees("GRPO, kl 0.04 · K2", f"{VANILLA} and `kl_penalty` k2", k2, with_kl("k2", 0.04, **BY_ROW))
    summed = our_loss(replace(PLAIN, weights=SequenceSum()))
    their_sum = policy(loss_agg_mode="seq-mean-token-sum")
    report.agrees("GRPO with SequenceSum", f"{VANILLA}, seq-mean-token-sum, {FAR}", summed, their_sum)
    dr_grpo = our_loss(replace(DR_GRPO, weights=ConstantLength(MAX_WIDTH)))
    sizes = {"loss_scale_factor": MAX_WIDTH}
    theirs = policy(loss_agg_mode="seq-mean-token-sum-norm", global_batch_info=sizes)
    report.agrees(
        f"Dr. GRPO, length {MAX_WIDTH}", f"{VANILLA}, seq-mean-token-sum-norm, factor {MAX_WIDTH}", dr_grpo, theirs
    )
    theirs = in_micro_batches("vanilla", **DECOUPLED)
    report.agrees("DAPO, the whole step", f"{VANILLA}, two micro-batches, sizes given", our_loss(DAPO), theirs, pairs)
    theirs = in_micro_batches("vanilla", **BY_ROW)
    emptied = such_that(lambda batch: len(batch.mask) % 2 == 0, partial(draw, emptied=True))
    name = "GRPO, the whole step, some rows wholly masked"
    report.agrees(name, f"{VANILLA}, two micro-batches, sizes given", our_loss(PLAIN), theirs, emptied)
    anchored = our_loss(replace(DAPO, anchor=SamplerPolicy()))
    report.agrees("DAPO, anchor SamplerPolicy", f"{VANILLA}, the sampler's log-probs as old", anchored, bypassing)


def bypassing(batch: Batch) -> Tensor:
    """Losses in what verl calls bypass mode."""
    return policy(**DECOUPLED)(replace(batch, old_logprobs=batch.rollout_logprobs))


def other_losses(report: Report) -> None:
    tight: dict[str, Any] = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, **BY_ROW}
    gspo, name = policy("gspo", **tight), "`compute_policy_loss_gspo`, 3e-4/4e-4"
    report.agrees("GSPO", name, our_loss(GSPO), gspo)
    report.agrees("GSPO-token, advantages by token", name, our_loss(GSPO_TOKEN), gspo, by_token)
    token_mean = our_loss(replace(GSPO, weights=TokenMean()))
    report.agrees("GSPO with TokenMean", f"{name}, token-mean", token_mean, policy("gspo", **tight | BY_TOKEN))
    report.agrees("SAPO", "`compute_policy_loss_sapo`", our_loss(SAPO), policy("sapo", **BY_ROW))
    name = "`compute_policy_loss_cispo`"
    capped = policy("cispo", clip_ratio_low=10.0, clip_ratio_high=4.0)
    report.agrees("CISPO", f"{name}, low 10, high 4", our_loss(CISPO), capped)
    two_sided = our_loss(replace(CISPO, gate=CappedScore(0.2, 0.2)))
    report.agrees("CISPO, CappedScore(0.2, low=0.2)", f"{name}, defaults", two_sided, policy("cispo"))
    theirs = policy("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    report.agrees("GMPO", "`compute_policy_loss_geo_mean`, 0.4/0.4", our_loss(GMPO), theirs)
    report.agrees("GPG", "`compute_policy_loss_gpg`", our_loss(GPG), policy("gpg"))
    settings = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
    ours = seeded(our_loss(replace(CLIP_COV, gate=Clip(0.2, 0.2), select=ClipCovariance(0.1, 0.1, 5.0))))
    name = "Clip-Cov, share 0.1, bounds 0.1 and 5, same seed"
    report.agrees(name, "`compute_policy_loss_clip_cov`", ours, seeded(policy("clip_cov", settings)))
    ours = our_loss(replace(KL_COV, select=KlCovariance(0.1, 1.0)))
    theirs = policy("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0})
    report.agrees("KL-Cov, share 0.1, coefficient 1", "`compute_policy_loss_kl_cov`", ours, theirs)


def seeded(measured: Measured) -> Measured:
    """Seed both sides, so that they draw the same tokens."""

    def from_seed(batch: Batch) -> Tensor:
        torch.manual_seed(0)
        return measured(batch)

    return from_seed


def corrections(report: Report) -> None:
    name = "`compute_rollout_correction_weights`"
    pieces = {
        "TokenTruncated(2)": (TokenTruncated(2.0), "token", 2.0),
        "SequenceTruncated(2)": (SequenceTruncated(2.0), "sequence", 2.0),
        "IcePop(0.5, 5)": (IcePop(0.5, 5.0), "token", "0.5_5.0"),
        "SequenceMasked(0.5, 2)": (SequenceMasked(0.5, 2.0), "sequence", "0.5_2.0"),
    }
    for words, (piece, level, threshold) in pieces.items():
        ours = our_loss(replace(DAPO, correct=piece))
        theirs = corrected(level, threshold, **DECOUPLED)
        report.agrees(f"DAPO, {words}", f"{name} {level} {threshold}, {VANILLA}", ours, theirs)
    ours = our_loss(replace(DAPO, correct=GeometricRejection(0.98, 1 / 0.98)))
    theirs = rejected(f"0.98_{1 / 0.98}", keep_denominator=True, **DECOUPLED)
    name = "`compute_rollout_rejection_mask` seq_mean_k1, tokens before rejection given"
    report.agrees("DAPO, GeometricRejection(0.98, 1/0.98)", name, ours, theirs)


def all_advantages(report: Report) -> None:
    """verl's whitening has nothing to divide by where all values are the same: see the differences."""
    varied = such_that(varies(sum_of_rewards), draw)
    varied_in_group = such_that(varies(our_credit(Algorithm(advantage=GroupCentred()))), draw)
    live = such_that(lambda batch: bool((batch.rewards != 0).all()), partial(draw, dead_groups=False))
    undiscounted = SimpleNamespace(gamma=1.0)
    plus_plus = "reinforce_plus_plus"
    rows = (
        ("GroupNormalized()", GRPO, "grpo", {}, draw),
        ("GroupCentred()", DR_GRPO, "grpo", {"norm_adv_by_std_in_grpo": False}, draw),
        ("LeaveOneOut()", Algorithm(advantage=LeaveOneOut()), "rloo", {}, draw),
        ("LeaveOneOut()", Algorithm(advantage=LeaveOneOut()), "rloo_vectorized", {}, draw),
        ("the same, with groups of one", Algorithm(advantage=LeaveOneOut()), "rloo_vectorized", {}, alone),
        ("REINFORCE++, KL in the reward", REINFORCE_PP, plus_plus, {"kl": 0.001, "config": undiscounted}, varied),
        ("REINFORCE++ baseline", REINFORCE_PP_BASELINE, f"{plus_plus}_baseline", {}, varied_in_group),
        ("LiveScaled(), α = 1 in both", Algorithm(advantage=LiveScaled()), "gpg", {}, live),
        ("PPO: whitened Gae(1, 0.95), KL in the reward", PPO, "gae", {"kl": 0.05, "gamma": 1.0, "lam": 0.95}, wide),
        ("PPO: whitened Gae(0.99, 0.9)", GAE, "gae", {"gamma": 0.99, "lam": 0.9}, wide),
    )
    for words, algorithm, name, settings, source in rows:
        kl = KlReward(settings["kl"]) if "kl" in settings else None
        stated = "".join(f", {key} {value}" for key, value in settings.items() if key != "config")
        theirs = f"advantage estimator {name}{stated}"
        report.agrees(words, theirs, our_credit(algorithm, kl), estimator(name, **settings), source, leaf=None)
    name = "advantage estimator gae, its returns"
    report.agrees("PPO's returns", name, our_returns, their_returns, wide, leaf=None)


def varies(measured: Measured) -> Callable[[Batch], bool]:
    """Tell whether there is anything to whiten."""
    return lambda batch: batch.tokens > 1 and bool(measured(batch)[batch.mask].unique().numel() > 1)


def sum_of_rewards(batch: Batch) -> Tensor:
    return batch.rewards.unsqueeze(1).expand(batch.mask.shape)


def our_returns(batch: Batch) -> Tensor:
    _, returns = advantages(PPO, rewards=batch.rewards, group=batch.group, mask=batch.mask, values=batch.values)
    assert returns is not None
    return returns


def their_returns(batch: Batch) -> Tensor:
    return estimated("gae", batch, gamma=1.0, lam=0.95)[1] * batch.mask


def parts(report: Report) -> None:
    for name, estimates in (("k1", K1()), ("k2", K2()), ("k3", K3())):
        report.agrees(
            f"{type(estimates).__name__}(), summed over tokens",
            f"`kl_penalty` {name}",
            lambda batch, ours=estimates: (ours(batch.logprobs, batch.ref_logprobs, batch.logprobs) * batch.mask).sum(),
            lambda batch, kind=name: (
                core_algos.kl_penalty(batch.logprobs, batch.ref_logprobs, kind) * batch.mask
            ).sum(),
        )
    modes = (
        (TokenMean(), "token-mean"),
        (SequenceMean(), "seq-mean-token-mean"),
        (SequenceSum(), "seq-mean-token-sum"),
        (ConstantLength(MAX_WIDTH), "seq-mean-token-sum-norm"),
    )
    for weights, mode in modes:
        report.agrees(
            f"{type(weights).__name__}, of any numbers",
            f"`agg_loss` {mode}",
            lambda batch, ours=weights: (ours(batch.mask, batch.group) * batch.logprobs).sum(),
            lambda batch, kind=mode: core_algos.agg_loss(
                batch.logprobs, batch.mask.double(), kind, loss_scale_factor=MAX_WIDTH
            ),
        )
    report.agrees("supervised_loss with TokenMean", "`sft_loss`", our_supervised, supervised)
    report.agrees("ValueLoss(clip=0.2), by value", "`compute_value_loss`, 0.2", valued, their_valued, leaf="values")
    up_to_limit = such_that(lambda batch: int(batch.mask.sum(dim=1).max()) <= 20, draw)
    name = "SoftOverlong(20, 8), lengths up to 20"
    report.agrees(name, "`DAPORewardManager`, overlong buffer 8", penalty, overlong(20, 8), up_to_limit, leaf=None)


def our_supervised(batch: Batch) -> Tensor:
    return (TokenMean()(batch.mask, batch.group) * supervised_loss(batch.logprobs)).sum()


def penalty(batch: Batch) -> Tensor:
    return SoftOverlong(20, 8)(batch.mask.sum(dim=1), completion_limit=20)


def valued(batch: Batch) -> Tensor:
    losses = ValueLoss(clip=0.2)(batch.values, batch.old_values, batch.ref_logprobs)
    return (TokenMean()(batch.mask, batch.group) * losses).sum()


def their_valued(batch: Batch) -> Tensor:
    return core_algos.compute_value_loss(
        vpreds=batch.values,
        returns=batch.ref_logprobs,
        values=batch.old_values,
        response_mask=batch.mask.double(),
        cliprange_value=0.2,
    )[0]


if __name__ == "__main__":
    main()
