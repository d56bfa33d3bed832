# pyright: reportMissingImports=false
"""Differences of TRL and proximo on purpose, measured on the same batches."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from proximo import DAPO, GRPO, GSPO
from proximo.algorithms import CISPO, DR_GRPO, GSPO_TOKEN, REINFORCE_PP_BASELINE, RLOO
from proximo.losses import (
    CappedScore,
    ConstantLength,
    Dpo,
    EntropyBonus,
    KlLoss,
    PromptMean,
    SequenceMasked,
    TokenMean,
    TopEntropy,
    UnbiasedK3,
)
from proximo_lab.parity.batches import Batch, draw, even, pairs
from proximo_lab.parity.bypassed_trl import (
    advantages,
    bypassed,
    corrected,
    grpo,
    in_micro_batches,
    loss,
    moved,
    preference,
    scored,
)
from proximo_lab.parity.measure import Report, our_credit, our_loss

PLAIN = replace(GRPO, kl=None)
SEQUENCE: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
}
DECOUPLED: dict[str, Any] = {"loss_type": "dapo", "epsilon_high": 0.28}


def measure(report: Report) -> None:
    denominators(report)
    rewards(report)
    terms(report)
    sequences(report)


def denominators(report: Report) -> None:
    report.differs(
        "GRPO's default aggregation",
        "SequenceMean: each completion counts the same",
        "default loss_type is dapo: each token counts the same",
        our_loss(PLAIN),
        grpo(),
        "The paper's 1/G Σ 1/|o|; GRPO out of the box in TRL has DAPO's.",
    )
    report.differs(
        "DAPO's denominator, read literally",
        "DAPO with PromptMean",
        "loss_type dapo: tokens of the batch",
        our_loss(replace(DAPO, weights=PromptMean())),
        grpo(**DECOUPLED),
        "The paper's 1/Σ|o| stands inside the expectation over prompts. Our DAPO is TokenMean, as everyone's code.",
    )
    two_steps = bypassed(GRPOTrainer, gradient_accumulation_steps=1, steps_per_generation=2, **DECOUPLED)
    report.differs(
        "DAPO's denominator, two optimizer steps per generation batch",
        "TokenMean over the step's own tokens",
        "tokens of the generation batch / its number of steps",
        lambda batch: our_loss(DAPO)(batch.halves()[0]),
        lambda batch: loss(two_steps, batch.halves()[0], tokens=batch.tokens),
        "TRL 1.16 divides every step by the average token count of the steps; exact when there is one.",
        pairs,
    )
    report.differs(
        'TRL\'s "bnpo" in two micro-batches',
        "TokenMean over the step",
        "token mean of each micro-batch, then their mean",
        our_loss(replace(PLAIN, weights=TokenMean())),
        in_micro_batches(loss_type="bnpo"),
        "Depends on how the step is split. It is not the BNPO paper either, which normalises by a Beta density.",
        pairs,
    )
    report.differs(
        "unscored completions",
        "out of every term and of the denominator",
        "advantage 0, counted in the denominator",
        our_loss(PLAIN),
        grpo(loss_type="grpo"),
        "A grader that failed says nothing; it should not shrink the others' gradient.",
        partial(draw, unscored=True),
    )


def rewards(report: Report) -> None:
    report.differs(
        "epsilon added to the std",
        "GroupNormalized(): 1e-6",
        "1e-4",
        our_credit(GRPO),
        advantages(GRPOTrainer),
        "No paper states one. GroupNormalized(epsilon=1e-4) is TRL's.",
        even,
        leaf=None,
        of="advantage",
    )
    dr_grpo = replace(DR_GRPO, weights=ConstantLength(256))
    trainer = bypassed(GRPOTrainer, loss_type="dr_grpo")
    report.differs(
        "Dr. GRPO's advantage",
        "GroupCentred(): no std",
        "loss_type dr_grpo keeps the std unless scale_rewards is none",
        lambda batch: our_loss(dr_grpo)(replace(batch, advantages=our_credit(dr_grpo)(batch))),
        lambda batch: loss(trainer, batch, advantages=scored(trainer, batch)["advantages"]),
        "The paper removes the std as a bias; in TRL it is a second switch.",
        even,
    )
    report.differs(
        "REINFORCE++ with a baseline",
        "TokenWhitened(GroupCentred())",
        "its approximation: RLOOTrainer, normalize_advantages",
        our_credit(REINFORCE_PP_BASELINE),
        advantages(RLOOTrainer, beta=0.0, normalize_advantages=True),
        "Ours (and verl's) counts tokens, TRL's counts rows, so lengths shift the mean and the scale.",
        even,
        leaf=None,
        of="advantage",
    )


def terms(report: Report) -> None:
    report.differs(
        "the gradient of GRPO's KL term",
        "K3, the paper's estimator",
        "r·K3: use_bias_correction_kl is on by default",
        our_loss(GRPO),
        grpo(loss_type="grpo", beta=0.04),
        "K3 pulls on the forward divergence, r·K3 on the reverse one. UnbiasedK3() is TRL's default here.",
    )
    report.differs(
        "CISPO's cap, given the same number 0.28",
        "CappedScore(high=0.28): cap 1.28",
        "epsilon_high 0.28: cap 0.28",
        our_loss(replace(CISPO, gate=CappedScore(0.28))),
        grpo(loss_type="cispo", epsilon_high=0.28),
        "The paper measures ε from 1; TRL's epsilon_high is the cap itself, so add 1 when porting.",
    )
    report.differs(
        "the sampler's mismatch, at defaults",
        "SequenceMasked(0.5, 2)",
        "sequence_mask with no lower bound, up to 3",
        our_loss(replace(DAPO, correct=SequenceMasked())),
        corrected(**DECOUPLED),
        "Bounds are a choice. TRL corrects whenever vLLM samples; proximo only when asked to.",
        even,
    )
    report.differs(
        "top-entropy tokens when the share is not a whole number of them",
        "TopEntropy(0.2): rounds to the nearest, at least one",
        "top_entropy_quantile 0.2: an interpolated quantile, which rounds up",
        our_loss(replace(DAPO, select=TopEntropy(0.2))),
        grpo(top_entropy_quantile=0.2, **DECOUPLED),
        "One token more or less; it fades with the number of tokens.",
    )
    report.differs(
        "the entropy bonus under GRPO, by entropy",
        "EntropyBonus weighted like the policy term",
        "entropy_coef times a token mean, whatever the loss_type",
        our_loss(replace(PLAIN, extra=EntropyBonus(0.01))),
        grpo(loss_type="grpo", entropy_coef=0.01),
        "One set of weights for all terms; the two agree under TokenMean.",
        leaf="entropy",
    )
    report.differs(
        "DPO's label smoothing 0.1",
        "Dpo(0.1, label_smoothing=0.1): the conservative form",
        "robust; sigmoid does not read it",
        smoothed,
        preference("robust", beta=0.1, label_smoothing=0.1),
        "The robust form is unbiased under noise and divides by 1 − 2ε; the conservative one adds both terms.",
        pairs,
    )


def sequences(report: Report) -> None:
    report.differs(
        "unbiased KL under GSPO",
        "UnbiasedK3: the token's own ratio",
        "the sequence ratio on every token's K3",
        our_loss(replace(GSPO, kl=KlLoss(0.04, UnbiasedK3()))),
        grpo(beta=0.04, **SEQUENCE),
        "The estimator is unbiased per token; a sequence ratio in its place has no such property.",
    )
    sequence = bypassed(GRPOTrainer, **SEQUENCE)
    report.differs(
        "GSPO with an advantage per token",
        "SequenceTokenRatio",
        "importance_sampling_level sequence, gradient through the mean",
        our_loss(GSPO_TOKEN),
        lambda batch: loss(sequence, batch, advantages=batch.advantages),
        "Through the mean, each token gets the row's average. proximo refuses SequenceRatio with such advantages.",
        partial(draw, token_advantages=True),
    )
    rloo = bypassed(RLOOTrainer)
    report.differs(
        "RLOO's objective, off-policy",
        "RLOO: A·log π, no ratio, no clip",
        "RLOOTrainer: product ratio, clipped at 0.2",
        our_loss(RLOO),
        lambda batch: loss(rloo, batch),
        "The paper's is REINFORCE on one update per batch; on-policy the two gradients are equal.",
    )


def smoothed(batch: Batch) -> Tensor:
    return Dpo(0.1, label_smoothing=0.1)(*moved(batch).chunk(2)).mean()
