"""The loss of an algorithm: stages 4 to 11 in fixed order, from tensors to one number.

Only this file defines the order. An algorithm supplies the pieces; nothing here asks
which algorithm it is. The caller's tensors are checked and cleaned first (`rows_of`), choices over
the whole optimizer step are made next (`Plan`), and then every token gets its terms (`token_terms`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proximo.losses.arithmetic import answer_of, bounded_exp
from proximo.losses.inputs import Objective, rows_of
from proximo.losses.pieces.extras import terms_of
from proximo.losses.pieces.protocols import ExtraTraits, GateTraits
from proximo.losses.records import LossInputs, Rows
from proximo.losses.token_weights import Plan, candidates, plan_step
from proximo.types import Stats
from proximo.types.tensor_types import Bool, Float

Check = Callable[[str, object, Tensor, torch.Size], Tensor]
"""Called with a stage, its piece, what that returned and the shape it must have; returns it, or raises."""
FAR = 0.5
"""Distance of a ratio from 1 beyond which a token counts as far from the policy that sampled it."""


@dataclass(frozen=True)
class Terms:
    """Each token's terms of the loss, already weighted; the sum of `total` is the loss."""

    policy: Float[Tensor, "B T"]
    kl: Float[Tensor, "B T"]
    extra: Float[Tensor, "B T"]
    token_log_ratio: Float[Tensor, "B T"]
    log_ratio: Float[Tensor, "B T"]
    """Log-ratio after stage 5, as the gate gets it."""
    selected: Bool[Tensor, "B T"] | None
    """Tokens that `select` acts on; None without a `select`."""
    correction: Float[Tensor, "B T"] | None
    """Factor for the sampler's mismatch; None without a `correct`."""

    @property
    def total(self) -> Float[Tensor, "B T"]:
        return self.policy + self.kl + self.extra


def policy_loss(
    algorithm: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    group: Tensor,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    weights: Tensor | Plan | None = None,
    entropy: Tensor | None = None,
    outcome: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Stats]:
    """The loss of `algorithm` on these rows, to be minimised, and its statistics.

    Tensors are [B, T], aligned with tokens; `group` and `outcome` are [B]. `mask` is True on the tokens
    that the policy sampled; nothing else is read. A row whose advantages are NaN is unscored and is
    left out. `weights` None computes them from this call's rows; for micro-batches pass the slice of the
    step's weights, a tensor or a `Plan` (an algorithm that ranks tokens across the step needs the latter, from
    `plan_step`).
    """
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        group=group,
        ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs,
        entropy=entropy,
        outcome=outcome,
    )
    return loss_of(algorithm, inputs, weights, generator)


def loss_of(
    algorithm: Objective,
    inputs: LossInputs,
    weights: Tensor | Plan | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Stats]:
    """`policy_loss` of tensors in one record."""
    rows = rows_of(algorithm, inputs)
    if isinstance(weights, Tensor):
        plan = _plan_from_weights(algorithm, weights, rows)
    else:
        plan = plan_step(algorithm, rows, generator) if weights is None else weights
    terms = token_terms(algorithm, rows, plan)
    return terms.total.sum(), _stats(algorithm, rows, terms)


def _plan_from_weights(algorithm: Objective, weights: Float[Tensor, "B T"], rows: Rows) -> Plan:
    if weights.shape != rows.mask.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}, mask {tuple(rows.mask.shape)}: give one per token")
    planning = [extra for extra in terms_of(algorithm.extras) if ExtraTraits.read(extra).row_weights is not None]
    step_wide = [type(extra).__name__ for extra in planning]
    if algorithm.select is not None and algorithm.select.step_wide:
        step_wide.append(type(algorithm.select).__name__)
    if step_wide:
        raise ValueError(
            f"weights is a tensor, but {step_wide[-1]} looks at all rows of the step: "
            "pass plan_step(...).rows(index) instead, or weights=None for a step in one call"
        )
    own = tuple(None for _ in terms_of(algorithm.extras))
    return Plan(torch.where(rows.mask, weights, torch.zeros_like(weights)), extra_weights=own)


def token_terms(algorithm: Objective, rows: Rows, plan: Plan, check: Check = answer_of) -> Terms:
    """Stages 4 to 11 for every token, weighted by the plan. `check` is given what each piece returned."""
    weights = plan.weights.to(rows.logprobs.dtype)
    token_log_ratio = rows.logprobs - rows.anchor_logprobs
    log_ratio = algorithm.ratio(token_log_ratio, rows.mask)
    policy = algorithm.gate(log_ratio, rows.logprobs, rows.advantages, rows.mask)
    shape = check("ratio", algorithm.ratio, log_ratio, rows.mask.shape).shape
    check("gate", algorithm.gate, policy, shape)

    selected = plan.selected
    if algorithm.select is not None:
        if not algorithm.select.step_wide:
            selected = algorithm.select.choose(candidates(algorithm, rows), None)
        assert selected is not None
        policy = algorithm.select.apply(policy, token_log_ratio, selected)
        check("select", algorithm.select, policy, shape)

    correction = None
    if algorithm.correct is not None:
        assert rows.rollout_logprobs is not None
        correction = algorithm.correct(rows.old_logprobs - rows.rollout_logprobs, rows.mask)
        policy = policy * correction
        check("correct", algorithm.correct, correction, shape)

    kl = torch.zeros_like(policy)
    if algorithm.kl is not None:
        assert rows.ref_logprobs is not None
        kl = algorithm.kl(rows.logprobs, rows.ref_logprobs, token_log_ratio) * weights
        check("kl", algorithm.kl.estimator, kl, shape)

    return Terms(
        policy=policy * weights,
        kl=kl,
        extra=_extra_terms(algorithm, rows, plan, check),
        token_log_ratio=token_log_ratio,
        log_ratio=log_ratio,
        selected=selected,
        correction=correction,
    )


def _extra_terms(algorithm: Objective, rows: Rows, plan: Plan, check: Check) -> Float[Tensor, "B T"]:
    """Stage 11; the learner adds terms that need a value model or routers."""
    extra_terms = torch.zeros_like(rows.logprobs)
    for extra, own in zip(terms_of(algorithm.extras), plan.extra_weights, strict=True):
        weights = plan.weights if own is None else own
        # Entropy has a gradient if an extra declares that it needs it; other extras do not get it.
        shown = rows if "entropy" in ExtraTraits.read(extra).needs else replace(rows, entropy=None)
        term = check("extra", extra, extra.term(shown), rows.mask.shape)
        extra_terms = extra_terms + term * weights.to(extra_terms.dtype)
    return extra_terms


@torch.no_grad()
def _stats(algorithm: Objective, rows: Rows, terms: Terms) -> Stats:
    mask = rows.mask
    through = algorithm.gate.through(terms.log_ratio, rows.advantages)
    ratio = bounded_exp(terms.log_ratio)
    gate = GateTraits.read(algorithm.gate)
    lowest, highest = gate.band
    positive, negative = rows.advantages > 0, rows.advantages < 0
    seen = {
        "ratio": ratio,
        "ratio_squared": ratio.double().square(),
        "ratio_far": (ratio - 1).abs() > FAR,
        "log_ratio": terms.token_log_ratio,
        "old_kl": bounded_exp(terms.token_log_ratio) - 1 - terms.token_log_ratio,
        "gate": through,
        "blocked": through == 0,
        "blocked_positive": positive & (through == 0),
        "blocked_negative": negative & (through == 0),
        "positive_above": positive & (ratio > highest),
        "positive_below": positive & (ratio < lowest),
        "negative_above": negative & (ratio > highest),
        "negative_below": negative & (ratio < lowest),
    }
    peaks = {"ratio_max": ratio, "log_ratio_max": terms.log_ratio.abs()}
    if gate.statistics is not None:
        own = gate.statistics(terms.log_ratio, rows.advantages, mask)
        seen |= {name: answer_of("gate", algorithm.gate, value, mask.shape) for name, value in own.items()}
    if rows.entropy is not None:
        seen["entropy"] = rows.entropy
    if rows.ref_logprobs is not None:
        gap = rows.ref_logprobs - rows.logprobs
        seen["ref_kl"] = bounded_exp(gap) - gap - 1
    if terms.selected is not None:
        seen["selected"] = terms.selected
    if terms.correction is not None:
        seen["correction"] = terms.correction
        seen["correction_squared"] = terms.correction.double().square()
        seen["rejected"] = terms.correction == 0
        peaks["correction_max"] = terms.correction
    return Stats(
        totals={
            "loss": terms.total.sum(),
            "policy_loss": terms.policy.sum(),
            "kl_loss": terms.kl.sum(),
            "extra_loss": terms.extra.sum(),
            "tokens": mask.sum(),
            "rows": rows.scored.sum(),
            "unscored": (~rows.scored).sum(),
        },
        token_sums={name: (value * mask).sum() for name, value in seen.items()},
        peaks={name: value.masked_fill(~mask, 0.0).amax() for name, value in peaks.items() if mask.numel()},
    )
