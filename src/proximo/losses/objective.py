"""The loss of an algorithm: stages 4 to 11 in fixed order, from tensors to one number.

Only this file defines the order. An algorithm supplies the pieces; nothing here asks
which algorithm it is. The caller's tensors are checked and cleaned first (`rows_of`), choices over
the whole optimizer step are made next (`Plan`), and then every token gets its terms (`token_terms`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from proximo.losses.arithmetic import (
    Mask,
    Tokens,
    answer_of,
    at_least_float32,
    bounded_exp,
    check_shape,
    sampled,
    sampled_mask,
)
from proximo.losses.pieces.corrections import Correction
from proximo.losses.pieces.divergences import KlLoss
from proximo.losses.pieces.extras import Extra, needing, terms_of
from proximo.losses.pieces.gates import Gate
from proximo.losses.pieces.protocols import AnchorTraits, ExtraTraits, GateTraits, SelectionTraits
from proximo.losses.pieces.ratios import Anchor, Ratio
from proximo.losses.pieces.selection import Selection
from proximo.losses.pieces.weights import Weights
from proximo.losses.records import Candidates, LossInputs, Rows
from proximo.types.batches import Stats, to_device
from proximo.types.tensor_types import Float, Int

__all__ = ["Plan", "plan_step", "policy_loss", "rows_of", "token_terms"]


@runtime_checkable
class Objective(Protocol):
    """The part of an algorithm that the loss reads."""

    @property
    def anchor(self) -> Anchor: ...
    @property
    def ratio(self) -> Ratio: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def select(self) -> Selection | None: ...
    @property
    def correct(self) -> Correction | None: ...
    @property
    def kl(self) -> KlLoss | None: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def extras(self) -> tuple[Extra, ...]: ...


# The caller's tensors

PER_ROW = ("group", "outcome")


def rows_of(algorithm: Objective, inputs: LossInputs) -> Rows:
    """Check the caller's tensors against what the algorithm needs, and clean them."""
    _check_needs(algorithm, inputs)
    mask = sampled_mask(inputs.mask)
    for name, tensor in vars(inputs).items():
        if tensor is not None:
            check_shape(name, tensor, mask.shape[:1] if name in PER_ROW else mask.shape)

    unknown = inputs.advantages.isnan()
    scored = ~((unknown & mask).any(dim=1) | unknown.all(dim=1))
    mask = mask & scored.unsqueeze(1)
    current = sampled(at_least_float32(inputs.logprobs), mask)

    def constant(tensor: Tensor) -> Tensor:
        return sampled(tensor.detach().to(current.dtype), mask)

    old = constant(inputs.old_logprobs)
    given = inputs.rollout_logprobs
    sampler = None if given is None else old if given is inputs.old_logprobs else constant(given)
    return Rows(
        logprobs=current,
        anchor_logprobs=algorithm.anchor(current.detach(), old, sampler),
        old_logprobs=old,
        rollout_logprobs=sampler,
        ref_logprobs=None if inputs.ref_logprobs is None else constant(inputs.ref_logprobs),
        advantages=constant(inputs.advantages),
        entropy=None if inputs.entropy is None else sampled(inputs.entropy.to(current.dtype), mask),
        outcome=None if inputs.outcome is None else inputs.outcome.detach(),
        mask=mask,
        scored=scored,
        group=inputs.group,
    )


def entropy_readers(algorithm: Objective) -> list[str]:
    """Names of the pieces that read the entropy."""
    selects_by_it = SelectionTraits.read(algorithm.select).needs_entropy
    return needing(algorithm.extras, "entropy") + ([type(algorithm.select).__name__] if selects_by_it else [])


def _check_needs(algorithm: Objective, inputs: LossInputs) -> None:
    if algorithm.kl is not None and inputs.ref_logprobs is None:
        raise ValueError(f"ref_logprobs is None, but {algorithm.kl} needs them; or use replace(algorithm, kl=None)")
    if inputs.rollout_logprobs is None and algorithm.correct is not None:
        raise ValueError(f"rollout_logprobs is None, but {algorithm.correct} needs the sampler's log-probs")
    if inputs.rollout_logprobs is None and AnchorTraits.read(algorithm.anchor).needs_sampler_logprobs:
        name = type(algorithm.anchor).__name__
        raise ValueError(f"rollout_logprobs is None, but the anchor is {name}: pass the sampler's log-probs")
    if inputs.entropy is None and (wants := entropy_readers(algorithm)):
        raise ValueError(f"entropy is None, but {' and '.join(wants)} read it: pass it per token")
    if inputs.outcome is None and (wants := needing(algorithm.extras, "outcome")):
        raise ValueError(f"outcome is None, but {wants[0]} must know which completions are correct: pass it per row")


# What is decided over a whole optimizer step


@dataclass(frozen=True)
class Plan:
    """Weights and selections over all rows of an optimizer step, so that micro-batches add up exactly."""

    weights: Tokens
    selected: Mask | None = None
    """Tokens that a step-wide `select` acts on."""
    extra_weights: tuple[Tokens | None, ...] = ()
    """Weights of each extra term, in order; None: it uses `weights`."""

    def rows(self, index: Int[Tensor, " M"] | slice) -> "Plan":
        """The slice that belongs to some rows of the step."""
        return Plan(
            weights=self.weights[index],
            selected=None if self.selected is None else self.selected[index],
            extra_weights=tuple(None if each is None else each[index] for each in self.extra_weights),
        )

    def to(self, device: torch.device) -> "Plan":
        return Plan(
            weights=to_device(self.weights, device),
            selected=None if self.selected is None else to_device(self.selected, device),
            extra_weights=tuple(None if each is None else to_device(each, device) for each in self.extra_weights),
        )


def plan_step(algorithm: Objective, rows: Rows, generator: torch.Generator | None = None) -> Plan:
    """Weights and selections over all rows of an optimizer step, before its micro-batches."""
    places = torch.arange(rows.mask.numel(), device=rows.mask.device).view_as(rows.mask)
    return next(plan_parts(algorithm, [rows], [places], generator))


@torch.no_grad()
def plan_parts(
    algorithm: Objective, parts: Sequence[Rows], places: Sequence[Tensor], generator: torch.Generator | None = None
) -> Iterator[Plan]:
    """The plan of each part of a step, as `plan_step` makes it of all rows at once. `parts` may be made when they are
    asked for: of each only its mask and what its rows have is kept, unless the selection is of the whole step.

    `places`, aligned with each part's tokens, number the step's tokens in order, so that a random selection takes
    the same tokens.
    """
    known = [(rows.mask, rows.scored, rows.group, rows.outcome) for rows in parts]
    masks = [mask for mask, *_ in known]
    counts = torch.cat([mask.sum(dim=1) for mask in masks]).double()
    scored, group = torch.cat([each for _, each, _, _ in known]), torch.cat([each for _, _, each, _ in known])
    outcomes = [outcome for *_, outcome in known if outcome is not None]
    outcome = torch.cat(outcomes) if outcomes else None
    weights = torch.zeros_like(counts)
    scored_weights = algorithm.weights.of_rows(counts[scored], group[scored])
    weights[scored] = answer_of("weights", algorithm.weights, scored_weights, counts[scored].shape)
    selected: Sequence[Tensor | None] = [None] * len(parts)
    if algorithm.select is not None and algorithm.select.step_wide:
        selected = _selected(algorithm, list(parts), places, generator)
    extra_weights: list[Sequence[Tensor | None]] = []
    for extra in terms_of(algorithm.extras):
        weigh = ExtraTraits.read(extra).row_weights
        extra_weights.append(
            [None] * len(parts) if weigh is None else [*_at_tokens(weigh(counts, outcome, group), masks)]
        )
    for number, spread in enumerate(_at_tokens(weights, masks)):
        yield Plan(spread, selected[number], tuple(each[number] for each in extra_weights))


@torch.no_grad()
def candidates(algorithm: Objective, rows: Rows) -> Candidates:
    """Candidates of these rows: all that stage 7 may read."""
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


def _at_tokens(of_rows: Float[Tensor, " B"], masks: Sequence[Tensor]) -> Iterator[Tensor]:
    """One part after the other: those of a large step together would be twice as large as its log-probs."""
    for mask, piece in zip(masks, of_rows.split([len(mask) for mask in masks]), strict=True):
        yield mask.double() * piece.unsqueeze(1)


def _selected(
    algorithm: Objective, parts: Sequence[Rows], places: Sequence[Tensor], generator: torch.Generator | None
) -> list[Tensor]:
    """The selection among all sampled tokens of the step, in order, as one row."""
    assert algorithm.select is not None
    offered = [candidates(algorithm, rows) for rows in parts]
    order = torch.cat([numbers[rows.mask] for numbers, rows in zip(places, parts, strict=True)]).argsort()

    def in_order(tensors: Sequence[Tensor]) -> Float[Tensor, "1 N"]:
        flat = torch.cat([tensor[rows.mask] for tensor, rows in zip(tensors, parts, strict=True)])
        return flat[order].unsqueeze(0)

    together = Candidates(
        logprobs=in_order([each.logprobs for each in offered]),
        rollout_logprobs=in_order([each.rollout_logprobs for each in offered]),
        advantages=in_order([each.advantages for each in offered]),
        through=in_order([each.through for each in offered]),
        entropy=None
        if offered[0].entropy is None
        else in_order([each.entropy for each in offered if each.entropy is not None]),
        mask=torch.ones(1, len(order), dtype=torch.bool, device=order.device),
    )
    choice = torch.zeros(len(order), dtype=torch.bool, device=order.device)
    choice[order] = algorithm.select.choose(together, generator).squeeze(0)
    pieces = choice.split([int(rows.mask.sum()) for rows in parts])
    return [
        torch.zeros_like(rows.mask).masked_scatter(rows.mask, piece) for rows, piece in zip(parts, pieces, strict=True)
    ]


# The loss

Check = Callable[[str, object, Tensor, torch.Size], Tensor]
"""Called with a stage, its piece, what that returned and the shape it must have; returns it, or raises."""
FAR = 0.5
"""Distance of a ratio from 1 beyond which a token counts as far from the policy that sampled it."""


@dataclass(frozen=True)
class Terms:
    """Each token's terms of the loss, already weighted; the sum of `total` is the loss."""

    policy: Tokens
    kl: Tokens
    extra: Tokens
    token_log_ratio: Tokens
    log_ratio: Tokens
    """Log-ratio after stage 5, as the gate gets it."""
    selected: Mask | None
    """Tokens that `select` acts on; None without a `select`."""
    correction: Tokens | None
    """Factor for the sampler's mismatch; None without a `correct`."""

    @property
    def total(self) -> Tokens:
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


def _plan_from_weights(algorithm: Objective, weights: Tokens, rows: Rows) -> Plan:
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
    extra_weights = tuple(None for _ in terms_of(algorithm.extras))
    return Plan(torch.where(rows.mask, weights, torch.zeros_like(weights)), extra_weights=extra_weights)


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


def _extra_terms(algorithm: Objective, rows: Rows, plan: Plan, check: Check) -> Tokens:
    """Stage 11; the learner adds terms that need a value model or routers."""
    extra_terms = torch.zeros_like(rows.logprobs)
    for extra, extra_weights in zip(terms_of(algorithm.extras), plan.extra_weights, strict=True):
        weights = plan.weights if extra_weights is None else extra_weights
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
        gate_stats = gate.statistics(terms.log_ratio, rows.advantages, mask)
        seen |= {name: answer_of("gate", algorithm.gate, value, mask.shape) for name, value in gate_stats.items()}
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


# Where a number is not finite


@torch.enable_grad()
def piece_at_fault(algorithm: Objective, inputs: LossInputs, plan: Plan) -> str | None:
    """The first piece that returns a number that is not finite, or has a gradient that is not; None where all are
    finite. The tensors of `inputs` are taken to be finite."""
    logprobs = inputs.logprobs.detach().requires_grad_()
    rows = rows_of(algorithm, replace(inputs, logprobs=logprobs))
    faults: list[str] = []

    def check(stage: str, piece: object, answer: Tensor, shape: torch.Size | None = None) -> Tensor:
        name = f"{stage} {type(piece).__name__}"
        if not answer.isfinite().all():
            faults.append(f"{name} returned a number that is not finite")
        elif answer.requires_grad:
            (gradient,) = torch.autograd.grad(answer.sum(), logprobs, retain_graph=True, allow_unused=True)
            if gradient is not None and not gradient.isfinite().all():
                faults.append(f"{name} has a gradient that is not finite")
        return answer

    check("anchor", algorithm.anchor, rows.anchor_logprobs)
    check("weights", algorithm.weights, plan.weights)
    terms = token_terms(algorithm, rows, plan, check)
    log_ratio, statistics = terms.log_ratio.detach(), GateTraits.read(algorithm.gate).statistics
    check("gate.through of", algorithm.gate, algorithm.gate.through(log_ratio, rows.advantages))
    for value in {} if statistics is None else statistics(log_ratio, rows.advantages, rows.mask).values():
        check("gate.statistics of", algorithm.gate, value)
    return faults[0] if faults else None
