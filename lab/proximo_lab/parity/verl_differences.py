# pyright: reportMissingImports=false
"""Differences of verl and proximo on purpose, or where verl's numbers run out, measured on the same batches."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig

from proximo import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm
from proximo.algorithms import CISPO, DR_GRPO, GMPO, GPG, KL_COV, REINFORCE_PP, RLOO
from proximo.losses import Clip, ConstantLength, GeometricRejection, KlCovariance, LeaveOneOut, SoftOverlong, TokenMean
from proximo_lab.parity.batches import MAX_WIDTH, Batch, draw, pairs, such_that
from proximo_lab.parity.configured_verl import estimator, in_micro_batches, overlong, policy, rejected, with_kl
from proximo_lab.parity.measure import Report, our_credit, our_loss

PLAIN = replace(GRPO, kl=None)
BY_ROW: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
DECOUPLED: dict[str, Any] = {"clip_ratio_high": 0.28}

alone = partial(draw, singletons=True)
far = partial(draw, log_ratio_scale=15.0)


def measure(report: Report) -> None:
    defaults(report)
    objectives(report)
    denominators(report)
    micro_batches(report)
    lonely_groups(report)
    rewards(report)
    clamps(report)


def defaults(report: Report) -> None:
    report.differs(
        "dual clip",
        "DAPO: none, as in the papers",
        "on by default, c 3",
        our_loss(DAPO),
        policy(clip_ratio_c=3.0, **DECOUPLED),
        "It cuts tokens with A < 0 and a ratio above 3: few, but of the largest gradient. Clip(dual=3) is verl's.",
    )
    report.differs(
        "GRPO's default aggregation",
        "SequenceMean: each completion counts the same",
        "default loss_agg_mode is token-mean",
        our_loss(PLAIN),
        policy(),
        "The paper's 1/G Σ 1/|o|; GRPO out of the box in verl has DAPO's.",
    )
    report.differs(
        "one clip width, 0.1",
        "Clip(0.1, 0.1)",
        "clip_ratio 0.1 is not read: low and high stay 0.2",
        our_loss(replace(DAPO, gate=Clip(0.1, 0.1))),
        policy(clip_ratio=0.1),
        "verl's clip_ratio_low and clip_ratio_high have defaults of their own; set both.",
    )
    report.differs(
        "CISPO's bounds, at defaults",
        "CISPO: no lower bound, cap 5",
        "0.8 to 1.2, both sides",
        our_loss(CISPO),
        policy("cispo"),
        "The paper has no lower bound and does not state its cap; 5 is ScaleRL's.",
    )
    report.differs(
        "KL-Cov, at defaults",
        "KL_COV: coefficient 1, share 2e-3",
        "coefficient 0.1, share 2e-4",
        our_loss(KL_COV),
        policy("kl_cov"),
        "The paper's values. With so few tokens both choose one, so this is the coefficient alone.",
    )


def objectives(report: Report) -> None:
    report.differs(
        "PPO's λ, at defaults",
        "PPO: 0.95",
        "1.0",
        our_credit(PPO),
        estimator("gae", gamma=AlgoConfig().gamma, lam=AlgoConfig().lam),
        "A choice.",
        such_that(lambda batch: batch.tokens > 1, draw),
        leaf=None,
        of="advantage",
    )
    report.differs(
        "SAPO with another aggregation",
        "SAPO with TokenMean",
        "sapo ignores loss_agg_mode: always seq-mean-token-mean",
        our_loss(replace(SAPO, weights=TokenMean())),
        policy("sapo", loss_agg_mode="token-mean"),
        "Gate and weights are independent here. At the default aggregation they agree.",
    )
    report.differs(
        "RLOO's objective, off-policy",
        "RLOO: A·log π, summed over a completion",
        "rloo advantages in the vanilla loss: token ratio, clipped, token-mean",
        our_loss(RLOO),
        policy(clip_ratio_c=3.0),
        "The paper's is REINFORCE on whole completions. Most of this is scale: 1/rows against 1/tokens.",
    )


def denominators(report: Report) -> None:
    report.differs(
        "Dr. GRPO's constant length",
        f"ConstantLength({MAX_WIDTH}), the generation budget",
        "seq-mean-token-sum-norm without loss_scale_factor: the padded width",
        our_loss(replace(DR_GRPO, weights=ConstantLength(MAX_WIDTH))),
        policy(loss_agg_mode="seq-mean-token-sum-norm"),
        "A padded width changes with the longest completion of the micro-batch, which is what Dr. GRPO removes.",
    )
    report.differs(
        "rows wholly masked",
        "counted in the denominator",
        "left out, when global_batch_size is not given",
        our_loss(PLAIN),
        policy(**BY_ROW),
        "verl's trainer does give it, and then agrees (first table).",
        partial(draw, emptied=True),
    )
    ours = our_loss(replace(DAPO, correct=GeometricRejection(0.98, 1 / 0.98)))
    report.differs(
        "rejected rows",
        "GeometricRejection: keep their place in the denominator",
        "response_mask is rewritten, so the denominator shrinks",
        ours,
        rejected(f"0.98_{1 / 0.98}", keep_denominator=False, **DECOUPLED),
        "A step that rejects most rows should be a small step. verl's turns it into a full one on what is left.",
    )
    report.differs(
        "rejection with lopsided bounds, 0.98 to 1.2",
        "bounds on π_old/μ",
        "seq_mean_k1 compares them with μ/π_old",
        our_loss(replace(DAPO, correct=GeometricRejection(0.98, 1.2))),
        rejected("0.98_1.2", keep_denominator=True, **DECOUPLED),
        "verl's k1 is the negative log-ratio. Bounds that are each other's inverse agree.",
    )


def micro_batches(report: Report) -> None:
    report.differs(
        "GMPO in two micro-batches",
        "GMPO over the step",
        "a mean per micro-batch, and their losses are added",
        our_loss(GMPO),
        in_micro_batches("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
        "geo_mean does not read the sizes that verl's engine relies on: k micro-batches, k times the gradient.",
        pairs,
    )
    report.differs(
        "KL-Cov in two micro-batches, share 0.1",
        "the step's tokens of highest covariance",
        "those of each micro-batch",
        our_loss(replace(KL_COV, select=KlCovariance(0.1, 1.0))),
        in_micro_batches("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}),
        "proximo plans step-wide choices before the micro-batches.",
        pairs,
    )


def lonely_groups(report: Report) -> None:
    report.differs(
        "a group of one, GRPO",
        "advantage 0",
        "the raw reward over 1 + 1e-6",
        our_credit(GRPO),
        estimator("grpo"),
        "Without siblings there is nothing to compare with.",
        alone,
        leaf=None,
        of="advantage",
    )
    report.differs(
        "a group of one, RLOO",
        "advantage 0",
        "rloo: the raw reward; rloo_vectorized: 0",
        our_credit(Algorithm(advantage=LeaveOneOut())),
        estimator("rloo"),
        "As above; verl's two versions do not agree with each other.",
        alone,
        leaf=None,
        of="advantage",
    )


def rewards(report: Report) -> None:
    report.differs(
        "float32 inside an advantage",
        "GroupNormalized(): the caller's precision; a dead group is exactly 0",
        "grpo_vectorized: group statistics in float32",
        our_credit(GRPO),
        estimator("grpo_vectorized"),
        "A dead group whose reward float32 cannot hold gets a rounding error divided by 1e-6.",
        leaf=None,
        of="advantage",
    )
    report.differs(
        "GPG's α",
        "LiveScaled(): rows / rows in groups that differ",
        "rows / rows with a reward other than 0",
        our_credit(GPG),
        estimator("gpg"),
        "The paper's M counts samples of groups without a difference; a reward of 0 is not that.",
        leaf=None,
        of="advantage",
    )
    report.differs(
        "whitening equal numbers",
        "exactly 0",
        "a rounding term: the mean is divided by tokens + 1e-8, what is left by 1e-4",
        our_credit(REINFORCE_PP),
        estimator("reinforce_plus_plus", config=AlgoConfig()),
        "Relative to 0 anything is 100 %: in absolute terms it is 1e-4 divided by the number of tokens.",
        such_that(lambda batch: batch.tokens > 1, all_right),
        leaf=None,
        of="advantage",
    )
    report.differs(
        "overlong completions beyond the limit, lengths to 24 at limit 16",
        "SoftOverlong(16, 4): never below −1",
        "DAPORewardManager: the line runs on",
        penalty,
        overlong(16, 4),
        "The paper's equation 13 is capped. SoftOverlong(cap=None) is verl's.",
        leaf=None,
        of="penalty",
    )


def all_right(seed: int) -> Batch:
    batch = draw(seed)
    return replace(batch, rewards=torch.ones_like(batch.rewards))


def penalty(batch: Batch) -> Tensor:
    return SoftOverlong(16, 4)(batch.mask.sum(dim=1), completion_limit=16)


def clamps(report: Report) -> None:
    report.differs(
        "K3 above 10, log-ratios to ±6",
        "K3, bounded only where float32 ends",
        "low_var_kl: clamped to 10, gradient 0 beyond",
        our_loss(GRPO),
        with_kl("low_var_kl", 0.04, **BY_ROW),
        "A token that has drifted far loses the pull back exactly where it is needed.",
        partial(draw, log_ratio_scale=3.0),
    )
    report.differs(
        "log-ratios beyond ±20 (drawn to ±30)",
        "bounded at ±80",
        "clamped at ±20, gradient 0 beyond",
        our_loss(DAPO),
        policy(**DECOUPLED),
        "Never seen in a healthy run; a number to watch rather than to hide.",
        far,
    )
    report.differs(
        "GSPO's mean log-ratio above 10 (drawn to ±30)",
        "bounded at ±80",
        "clamped at 10, gradient 0 beyond",
        our_loss(GSPO),
        policy("gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4, **BY_ROW),
        "As above.",
        far,
    )
