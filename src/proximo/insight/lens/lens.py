"""A stored step under an algorithm, the run's own or another, token by token, computed by the code of training.

Completions are processed in parts of similar length, so that memory is proportional to the number of tokens;
quantities that training computes over all completions of an update are computed over all of them here, too.

Log-probs and grades are used as stored, and so are advantages in the cases that `advantages_under` describes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.insight.lens.crediting import advantages_under
from proximo.insight.lens.layout import TokenLayout
from proximo.insight.lens.states import TokenState, is_blocked, states_of
from proximo.insight.lens.steps import StoredStep
from proximo.insight.lens.threads import Made, computed
from proximo.losses.arithmetic import bounded_exp, siblings
from proximo.losses.objective import Plan, entropy_readers, plan_parts, rows_of, token_terms
from proximo.losses.pieces.filters import trained_mask
from proximo.losses.pieces.protocols import KeepTraits
from proximo.losses.records import LossInputs, Rows
from proximo.rl.config import RunConfig
from proximo.types.tensor_types import Bool, Float, Int

SOME = 64
"""Stride of the tokens that are compared before all of them are."""

NEUTRAL = {
    "weights": 0.0,
    "gradient": 0.0,
    "kl_gradient": 0.0,
    "extra_gradient": 0.0,
    "token_ratio": 1.0,
    "ratio": 1.0,
    "through": 1.0,
    "correction": 1.0,
}
"""Numbers of a token that is not trained on."""


@dataclass(frozen=True)
class StepView:
    """One pass over a step's data under an algorithm, for all N tokens. For tokens that are not trained on, ratios and
    shares are 1 and the rest 0, except advantages."""

    algorithm: Algorithm
    """The algorithm, without terms whose inputs were not stored."""
    notes: tuple[str, ...]
    """Assumptions and omissions, in words."""
    layout: TokenLayout
    """Positions of each row's tokens."""
    state: Int[Tensor, " N"]
    """TokenState of each token."""
    advantages: Float[Tensor, " N"]
    weights: Float[Tensor, " N"]
    """Weight of the token in its update's loss."""
    token_ratio: Float[Tensor, " N"]
    ratio: Float[Tensor, " N"]
    """Ratio as the gate gets it: of the whole completion for sequence-level algorithms."""
    through: Float[Tensor, " N"]
    """Share of r·A that passes the gate."""
    gradient: Float[Tensor, " N"]
    """Gradient of the update's policy loss with respect to the token's log-prob; negative values raise the token."""
    kl_gradient: Float[Tensor, " N"]
    extra_gradient: Float[Tensor, " N"]
    """Gradient of the other terms of the loss with respect to the token's log-prob."""
    correction: Float[Tensor, " N"]
    """Correction factor for the sampler's mismatch; 1 without one."""
    losses: dict[int, float]
    """Policy loss of each update of the pass."""

    @property
    def takes_part(self) -> Bool[Tensor, " N"]:
        return self.state > TokenState.IDLE

    @property
    def blocked(self) -> Bool[Tensor, " N"]:
        return is_blocked(self.state)


def look(step: StoredStep, algorithm: Algorithm, config: RunConfig, *, number: int = -1) -> StepView:
    """A step of this config's run under an algorithm. `number` is the pass over the data, by default the last.

    Example: look(run.step(40), GSPO, run.config).blocked.sum()
    """
    algorithm, notes = usable(algorithm.with_length_limit(config.sampling.max_tokens), step)
    credit, more = advantages_under(step, algorithm, config)
    state, losses = torch.full_like(step.batch.old_logprobs, TokenState.IDLE, dtype=torch.int8), {}
    numbers = _Numbers(step)
    for update, index in _updates(step, algorithm, number):
        indices = list(step.layout.parts(index))
        parts: Sequence[Rows] = Made(partial(_part, step, algorithm, credit, number), indices)
        if step.layout.is_small:
            parts = list(parts)  # they are asked for twice
        seed = config.seed + step.metadata["updates"][update]["version"]
        places = [] if algorithm.select is None else [step.layout.grid(rows)[0] for rows in indices]
        plans = plan_parts(algorithm, parts, places, torch.Generator().manual_seed(seed))
        planned = zip(range(len(indices)), plans, strict=True)
        shown = computed(partial(_shown, algorithm, parts), planned, threads=not step.layout.is_small)
        losses[update] = 0.0
        for rows_index, (tensors, loss) in zip(indices, shown, strict=True):
            losses[update] += loss
            step.layout.write(state, rows_index, tensors.pop("state"))
            numbers.write(rows_index, tensors)
    if not KeepTraits.read(algorithm.keep).truncated:
        state[step.batch.truncated[step.layout.row]] = TokenState.OUTSIDE
    state[~step.batch.sampled] = TokenState.OUTSIDE
    credit = credit.nan_to_num(0.0) if bool(credit.isnan().any()) else credit
    notes = (*notes, *more, *_assumed(step, algorithm, credit, number))
    return StepView(algorithm, notes, step.layout, state, credit, losses=losses, **numbers.tensors())


class _Numbers:
    """All tokens' numbers, from those of some rows at a time. What is neutral for all tokens takes no memory, nor does
    the ratio of tokens where it is the one of the gate."""

    def __init__(self, step: StoredStep) -> None:
        self._every, self._layout = step.batch.old_logprobs, step.layout
        self._known: dict[str, Tensor] = {}

    def write(self, index: Int[Tensor, " M"], tensors: Mapping[str, Tensor]) -> None:
        if "token_ratio" in tensors and "token_ratio" not in self._known and "ratio" in self._known:
            self._known["token_ratio"] = self._known["ratio"].clone()  # so far they were the same
        if "token_ratio" in self._known and "ratio" in tensors:
            tensors = {"token_ratio": tensors["ratio"], **tensors}
        for name, values in tensors.items():
            if name not in self._known:
                self._known[name] = torch.full_like(self._every, NEUTRAL[name])
            self._layout.write(self._known[name], index, values)

    def tensors(self) -> dict[str, Tensor]:
        every = self._every
        neutral = {name: every.new_full((), value).expand(every.shape) for name, value in NEUTRAL.items()}
        return neutral | {"token_ratio": self._known.get("ratio", neutral["ratio"])} | self._known


def _differs(values: Float[Tensor, "M T"], neutral: float) -> bool:
    """True if any of them is not neutral; some are looked at first, since mostly one of these is not."""
    return bool((values[:, ::SOME] != neutral).any()) or bool((values != neutral).any())


def policy_loss(step: StoredStep, algorithm: Algorithm, config: RunConfig) -> float | None:
    """The step's policy loss under an algorithm, as in the metrics."""
    return step_loss(step, [look(step, algorithm, config, number=number) for number in range(step.passes)])


def step_loss(step: StoredStep, passes: Iterable[StepView]) -> float | None:
    """The mean policy loss over the applied updates of all passes of a step.

    None if none was applied, or only the value model was trained.
    """
    applied = [update["skipped"] is None and not update["value_only"] for update in step.metadata["updates"]]
    losses = [loss for seen in passes for update, loss in seen.losses.items() if applied[update]]
    return sum(losses) / len(losses) if losses else None


def usable(algorithm: Algorithm, step: StoredStep) -> tuple[Algorithm, list[str]]:
    """The algorithm without terms whose inputs were not stored, with a note on each."""
    if algorithm.kl is None or step.batch.ref_logprobs is not None:
        return algorithm, []
    return replace(algorithm, kl=None), ["no reference was stored: its KL in the loss is left out"]


def _assumed(step: StoredStep, algorithm: Algorithm, credit: Float[Tensor, " N"], number: int) -> list[str]:
    """Notes on what the algorithm would have done differently, or what is assumed for it."""
    if not step.passes or step.is_value_only:
        return []
    used, kept = step.updates[number] >= 0, algorithm.keep(step.batch.outcome, step.batch.group)
    was_run, pushes = step.layout.any(~step.current[number].isnan()), step.layout.any(credit != 0)
    not_run = used & kept & ~was_run & pushes
    notes = []
    if left := int((used & ~kept).sum()):
        unanimous = siblings(step.batch.outcome, step.batch.group).unanimous[used & ~kept]
        which = " of groups with equal task scores" if unanimous.all() else ""
        notes.append(f"{left} completions{which} are left out of the update and its denominator")
    if count := int(not_run.sum()):
        notes.append(f"{count} completions were not run in this update: their ratios are assumed to be 1")
    return notes


def _updates(step: StoredStep, algorithm: Algorithm, number: int) -> Iterator[tuple[int, Int[Tensor, " M"]]]:
    """Each update of a pass and its rows, without groups that the algorithm would not keep."""
    if not step.passes:
        return
    kept = algorithm.keep(step.batch.outcome, step.batch.group)
    for update in step.updates[number].unique().tolist():
        if update >= 0 and not step.metadata["updates"][update]["value_only"]:
            index = ((step.updates[number] == update) & kept).nonzero().squeeze(1)
            if len(index):
                yield update, index


def _part(
    step: StoredStep, algorithm: Algorithm, credit: Float[Tensor, " N"], number: int, index: Int[Tensor, " M"]
) -> Rows:
    """The loss inputs of some rows of an update, padded to one width. A row that was not run, because it was dead, gets
    the old policy's log-probs."""
    batch, layout = step.batch, step.layout
    old, current = layout.padded(batch.old_logprobs, index), layout.padded(step.current[number], index)
    sampler = batch.rollout_logprobs
    entropy = step.entropy_in(number) if entropy_readers(algorithm) else None
    inputs = LossInputs(
        logprobs=torch.where(current.isnan(), old, current).requires_grad_(),
        old_logprobs=old,
        advantages=layout.padded(credit, index),
        mask=trained_mask(algorithm.keep, layout.padded(batch.sampled, index), batch.truncated[index]),
        group=batch.group[index],
        ref_logprobs=None if batch.ref_logprobs is None else layout.padded(batch.ref_logprobs, index),
        rollout_logprobs=old if sampler is batch.old_logprobs else layout.padded(sampler, index),
        entropy=None if entropy is None else layout.padded(entropy, index).nan_to_num(0.0),
        outcome=batch.outcome[index],
    )
    return rows_of(algorithm, inputs)


def _shown(algorithm: Algorithm, parts: Sequence[Rows], planned: tuple[int, Plan]) -> tuple[dict[str, Tensor], float]:
    """Part of `_numbers` that is kept: tokens that are not trained on are neutral, and numbers that are neutral for all
    tokens are left out, since most algorithms have no use for some of them, and so is a tokens' ratio that is the
    gate's."""
    index, plan = planned
    rows = parts[index]
    numbers, loss = _numbers(algorithm, rows, plan)
    state, dtype = numbers.pop("state"), rows.advantages.dtype
    if not bool(rows.mask.all()):
        numbers = {name: torch.where(rows.mask, each, NEUTRAL[name]) for name, each in numbers.items()}
    numbers = {name: each.to(dtype) for name, each in numbers.items()}
    if torch.equal(numbers["ratio"], numbers["token_ratio"]):
        del numbers["token_ratio"]  # kept once
    left = [name for name, each in numbers.items() if name != "token_ratio" and not _differs(each, NEUTRAL[name])]
    return {name: each for name, each in numbers.items() if name not in left} | {"state": state}, loss


def _numbers(algorithm: Algorithm, rows: Rows, plan: Plan) -> tuple[dict[str, Tensor], float]:
    """The numbers shown for each token, without those that are all neutral because the algorithm has no such term, and
    these rows' part of the policy loss."""
    terms = token_terms(algorithm, rows, plan)
    through = algorithm.gate.through(terms.log_ratio, rows.advantages).detach()
    through = through.expand_as(rows.mask)  # training lets a gate answer with one number for all, too
    numbers = {
        "weights": plan.weights,
        "token_ratio": bounded_exp(terms.token_log_ratio.detach()),
        "ratio": bounded_exp(terms.log_ratio.detach()),
        "through": through,
        "state": states_of(algorithm, rows, terms, through),
    }
    if terms.correction is not None:
        numbers["correction"] = terms.correction
    for name, term in (("gradient", terms.policy), ("kl_gradient", terms.kl), ("extra_gradient", terms.extra)):
        if term.requires_grad:
            (numbers[name],) = torch.autograd.grad(term.sum(), rows.logprobs, retain_graph=True)
    return numbers, float(terms.policy.detach().sum())
