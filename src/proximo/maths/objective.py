"""The loss of an algorithm: stages 4 to 11 in their fixed order, from tensors to one number.

This is where the order is written down, once. An algorithm supplies the pieces; nothing here asks
which algorithm it is. The caller's tensors are checked and cleaned first (`rows_of`), choices over
the whole optimizer step are made next (`Plan`), and then every token gets its terms (`token_terms`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proximo.maths.arithmetic import bounded_exp
from proximo.maths.pieces.extras import EntropyBonus, PositiveNll
from proximo.maths.pieces.gates import SoftGate
from proximo.maths.pieces.selection import Candidates
from proximo.maths.rows import Objective, Rows, rows_of
from proximo.tensor_types import Bool, Float, Int
from proximo.types import Stats, to_device


@dataclass(frozen=True)
class Plan:
    """What is decided once over all rows of an optimizer step, so that micro-batches add up exactly."""

    weights: Float[Tensor, "B T"]
    chosen: Bool[Tensor, "B T"] | None = None
    """The tokens that a step-wide `select` acts on."""
    nll_weights: Float[Tensor, "B T"] | None = None
    """Weights of the correct completions' NLL, where the algorithm has one."""

    def rows(self, index: Int[Tensor, " M"] | slice) -> "Plan":
        """The slice that belongs to some rows of the step."""
        return Plan(
            weights=self.weights[index],
            chosen=None if self.chosen is None else self.chosen[index],
            nll_weights=None if self.nll_weights is None else self.nll_weights[index],
        )

    def to(self, device: torch.device) -> "Plan":
        return Plan(
            weights=to_device(self.weights, device),
            chosen=None if self.chosen is None else to_device(self.chosen, device),
            nll_weights=None if self.nll_weights is None else to_device(self.nll_weights, device),
        )


@dataclass(frozen=True)
class Terms:
    """Every token's part of the loss, each already weighted; `total` sums to the loss."""

    policy: Float[Tensor, "B T"]
    kl: Float[Tensor, "B T"]
    extra: Float[Tensor, "B T"]
    token_log_ratio: Float[Tensor, "B T"]
    log_ratio: Float[Tensor, "B T"]
    """After stage 5: what the gate saw."""
    chosen: Bool[Tensor, "B T"] | None
    correction: Float[Tensor, "B T"] | None

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
    """The loss of `algorithm` on these rows, to be minimised, and what it saw.

    Tensors are [B, T], aligned with tokens; `group` and `outcome` are [B]. `mask` is True on the tokens
    the policy sampled and nothing off it is read. A row whose advantages are NaN is unscored and takes no
    part at all. `weights` None computes them from this call's rows; for micro-batches pass the step's own
    slice, a tensor or a `Plan` (an algorithm that ranks tokens across the step needs the latter, from
    `plan_step`).
    """
    rows = rows_of(
        algorithm,
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
    if isinstance(weights, Tensor):
        plan = _plan_from_weights(algorithm, weights, rows)
    else:
        plan = plan_step(algorithm, rows, generator) if weights is None else weights
    terms = token_terms(algorithm, rows, plan)
    return terms.total.sum(), _stats(algorithm, rows, terms)


@torch.no_grad()
def plan_step(algorithm: Objective, rows: Rows, generator: torch.Generator | None = None) -> Plan:
    """Weights and choices over all rows of an optimizer step, before its micro-batches."""
    weights = torch.zeros_like(rows.mask, dtype=torch.float64)
    weights[rows.scored] = algorithm.weights(rows.mask[rows.scored], rows.group[rows.scored])
    plan = Plan(weights)
    if algorithm.select is not None and algorithm.select.step_wide:
        plan = replace(plan, chosen=_choose(algorithm, rows, generator))
    for extra in algorithm.extras:
        if isinstance(extra, PositiveNll):
            assert rows.outcome is not None
            plan = replace(plan, nll_weights=extra.weights(rows.mask, rows.outcome))
    return plan


def _plan_from_weights(algorithm: Objective, weights: Float[Tensor, "B T"], rows: Rows) -> Plan:
    if weights.shape != rows.mask.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}, mask {tuple(rows.mask.shape)}: give one per token")
    step_wide = [type(extra).__name__ for extra in algorithm.extras if isinstance(extra, PositiveNll)]
    if algorithm.select is not None and algorithm.select.step_wide:
        step_wide.append(type(algorithm.select).__name__)
    if step_wide:
        raise ValueError(
            f"weights is a tensor, but {step_wide[-1]} looks at all rows of the step: "
            "pass plan_step(...).rows(index) instead, or weights=None for a step in one call"
        )
    return Plan(torch.where(rows.mask, weights, torch.zeros_like(weights)))


@torch.no_grad()
def _choose(algorithm: Objective, rows: Rows, generator: torch.Generator | None) -> Bool[Tensor, "B T"]:
    assert algorithm.select is not None
    return algorithm.select.choose(candidates(algorithm, rows), generator)


@torch.no_grad()
def candidates(algorithm: Objective, rows: Rows) -> Candidates:
    """What stage 7 may look at in these rows."""
    log_ratio = algorithm.ratio(rows.logprobs - rows.anchor_logprobs, rows.mask)
    sampler = rows.anchor_logprobs if rows.rollout_logprobs is None else rows.rollout_logprobs
    return Candidates(
        logprobs=rows.logprobs,
        rollout_logprobs=sampler,
        advantages=rows.advantages,
        through=algorithm.gate.through(log_ratio, rows.advantages),
        entropy=rows.entropy,
        mask=rows.mask,
    )


def token_terms(algorithm: Objective, rows: Rows, plan: Plan) -> Terms:
    """Stages 4 to 11 for every token, weighted by the plan."""
    weights = plan.weights.to(rows.logprobs.dtype)
    token_log_ratio = rows.logprobs - rows.anchor_logprobs
    log_ratio = algorithm.ratio(token_log_ratio, rows.mask)
    policy = algorithm.gate(log_ratio, rows.logprobs, rows.advantages, rows.mask)

    chosen = plan.chosen
    if algorithm.select is not None:
        if not algorithm.select.step_wide:
            chosen = _choose(algorithm, rows, generator=None)
        assert chosen is not None
        policy = algorithm.select.apply(policy, token_log_ratio, chosen)

    correction = None
    if algorithm.correct is not None:
        assert rows.rollout_logprobs is not None
        correction = algorithm.correct(rows.old_logprobs - rows.rollout_logprobs, rows.mask)
        policy = policy * correction

    kl = torch.zeros_like(policy)
    if algorithm.kl is not None:
        assert rows.ref_logprobs is not None
        kl = algorithm.kl(rows.logprobs, rows.ref_logprobs, token_log_ratio) * weights

    return Terms(
        policy=policy * weights,
        kl=kl,
        extra=_extra_terms(algorithm, rows, plan),
        token_log_ratio=token_log_ratio,
        log_ratio=log_ratio,
        chosen=chosen,
        correction=correction,
    )


def _extra_terms(algorithm: Objective, rows: Rows, plan: Plan) -> Float[Tensor, "B T"]:
    """Stage 11, as far as log-probs know it; value loss and router balance are the learner's to add."""
    extra_terms = torch.zeros_like(rows.logprobs)
    for extra in algorithm.extras:
        if isinstance(extra, EntropyBonus):
            assert rows.entropy is not None
            extra_terms = extra_terms + extra(rows.entropy) * plan.weights.to(extra_terms.dtype)
        elif isinstance(extra, PositiveNll):
            assert plan.nll_weights is not None
            extra_terms = extra_terms + extra(rows.logprobs) * plan.nll_weights.to(extra_terms.dtype)
    return extra_terms


@torch.no_grad()
def _stats(algorithm: Objective, rows: Rows, terms: Terms) -> Stats:
    mask = rows.mask
    through = algorithm.gate.through(terms.log_ratio, rows.advantages)
    ratio = bounded_exp(terms.log_ratio)
    lowest, highest = algorithm.gate.band
    positive, negative = rows.advantages > 0, rows.advantages < 0
    seen = {
        "ratio": ratio,
        "ratio_squared": ratio.double().square(),
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
    if isinstance(algorithm.gate, SoftGate):
        seen["sapo_gap"] = algorithm.gate.sequence_gap(terms.log_ratio, rows.advantages, mask)
    if rows.entropy is not None:
        seen["entropy"] = rows.entropy
    if rows.ref_logprobs is not None:
        gap = rows.ref_logprobs - rows.logprobs
        seen["ref_kl"] = bounded_exp(gap) - gap - 1
    if terms.chosen is not None:
        seen["selected"] = terms.chosen
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
