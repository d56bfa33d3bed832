"""A stored step under an algorithm, the run's own or another, token by token, computed by the code of training.

Completions are processed in parts of similar length, so that memory is proportional to the number of tokens;
quantities that training computes over all completions of an update are computed over all of them here, too.

Log-probs and grades are used as stored, and so are advantages in the cases that `advantages_under` describes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.insight.lens.crediting import advantages_under
from proximo.insight.lens.layout import Layout
from proximo.insight.lens.steps import Step
from proximo.maths.arithmetic import bounded_exp
from proximo.maths.groups import siblings
from proximo.maths.objective import Terms, token_terms
from proximo.maths.pieces.keeping import trained_mask
from proximo.maths.pieces.traits import GateTraits, KeepTraits, SelectionTraits
from proximo.maths.plans import Plan, plan_parts
from proximo.maths.records import LossInputs, Rows
from proximo.maths.rows import entropy_readers, rows_of
from proximo.tensor_types import Bool, Float, Int
from proximo.training.config import RunConfig

SOFT = 0.005
"""A gate that stops less than this share counts as open."""


class TokenState(IntEnum):
    """What happens to a token's gradient. If several states apply, the last one is shown."""

    OUTSIDE = 0
    """Not sampled, or left out of the loss."""
    IDLE = 1
    """Its completion is not trained on: dropped, unscored, or in no update."""
    OPEN = 2
    SOFT = 3
    """The gate passes a part of the gradient, or amplifies it."""
    HIGH = 4
    """Clipped: the ratio is above the clip range and the advantage pushes it further up."""
    LOW = 5
    """Clipped: the ratio is below the clip range and the advantage pushes it further down."""
    DUAL = 6
    """Clipped: the ratio is very large, and the dual clip bounds the loss."""
    DEAD = 7
    """Its advantage is 0."""
    HELD = 8
    """Held near the old policy by `select`."""
    DROPPED = 9
    """Left out by `select`."""
    REJECTED = 10
    """Left out by `correct`: sampler and learner differ too much."""


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
BLOCKED = (TokenState.HIGH, TokenState.LOW, TokenState.DUAL, TokenState.DROPPED, TokenState.REJECTED)
"""States in which a gradient is blocked completely."""


@dataclass(frozen=True)
class StepView:
    """One pass over a step's data under an algorithm, for all N tokens. For tokens that are not trained on, ratios and
    shares are 1 and the rest 0, except advantages."""

    algorithm: Algorithm
    """The algorithm, without terms whose inputs were not stored."""
    notes: tuple[str, ...]
    """Assumptions and omissions, in words."""
    layout: Layout
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


def is_blocked(state: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    return torch.isin(state, torch.tensor(BLOCKED, dtype=state.dtype))


def look(step: Step, algorithm: Algorithm, config: RunConfig, *, number: int = -1) -> StepView:
    """A step of this config's run under an algorithm. `number` is the pass over the data, by default the last.

    Example: look(run.step(40), GSPO, run.config).blocked.sum()
    """
    algorithm, notes = usable(algorithm.with_length_limit(config.sampling.max_tokens), step)
    credit, more = advantages_under(step, algorithm, config)
    state, losses = torch.full_like(step.batch.old_logprobs, TokenState.IDLE, dtype=torch.int8), {}
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in NEUTRAL}
    for update, index in _updates(step, algorithm, number):
        indices = list(step.layout.parts(index))
        parts = [_part(step, algorithm, credit, rows, number) for rows in indices]
        seed = config.seed + step.facts["updates"][update]["version"]
        places = [] if algorithm.select is None else [step.layout.grid(rows)[0] for rows in indices]
        plans = plan_parts(algorithm, parts, places, torch.Generator().manual_seed(seed))
        losses[update] = 0.0
        for rows_index in indices:
            plan, rows = next(plans), parts.pop(0)  # not kept: together they are as large as what is found
            found, loss = _numbers(algorithm, rows, plan)
            losses[update] += loss
            step.layout.write(state, rows_index, found.pop("state"))
            values = {
                name: torch.where(rows.mask, each, NEUTRAL[name]).to(credit.dtype) for name, each in found.items()
            }
            if torch.equal(values["ratio"], values["token_ratio"]):
                values["token_ratio"] = values["ratio"]  # kept once
            for name, each in values.items():
                if bool((each != NEUTRAL[name]).any()):  # most algorithms have no use for some of them
                    pieces[name].append((rows_index, each))
    one, other = ([id(each) for _, each in pieces[name]] for name in ("ratio", "token_ratio"))
    if one == other:
        del pieces["token_ratio"]
    tensors = {name: _joined(step, NEUTRAL[name], pieces.pop(name)) for name in NEUTRAL if name in pieces}
    tensors.setdefault("token_ratio", tensors["ratio"])
    if not KeepTraits.read(algorithm.keep).truncated:
        state[step.batch.truncated[step.layout.row]] = TokenState.OUTSIDE
    state[~step.batch.sampled] = TokenState.OUTSIDE
    credit = credit.nan_to_num(0.0) if bool(credit.isnan().any()) else credit
    notes = (*notes, *more, *_assumed(step, algorithm, credit, number))
    return StepView(algorithm, notes, step.layout, state, credit, losses=losses, **tensors)


def _joined(step: Step, neutral: float, pieces: list[tuple[Tensor, Tensor]]) -> Float[Tensor, " N"]:
    """All tokens' numbers, from those of some rows."""
    every = step.batch.old_logprobs
    if not pieces:
        return every.new_full((), neutral).expand(every.shape)
    found = torch.full_like(every, neutral)
    for index, values in pieces:
        step.layout.write(found, index, values)
    return found


def policy_loss(step: Step, algorithm: Algorithm, config: RunConfig) -> float | None:
    """The step's policy loss under an algorithm, as in the metrics."""
    return step_loss(step, [look(step, algorithm, config, number=number) for number in range(step.passes)])


def step_loss(step: Step, passes: Iterable[StepView]) -> float | None:
    """The mean policy loss over the applied updates of all passes of a step.

    None if none was applied, or only the value model was trained.
    """
    applied = [update["skipped"] is None and not update["value_only"] for update in step.facts["updates"]]
    found = [loss for seen in passes for update, loss in seen.losses.items() if applied[update]]
    return sum(found) / len(found) if found else None


def usable(algorithm: Algorithm, step: Step) -> tuple[Algorithm, list[str]]:
    """The algorithm without terms whose inputs were not stored, with a note on each."""
    if algorithm.kl is None or step.batch.ref_logprobs is not None:
        return algorithm, []
    return replace(algorithm, kl=None), ["no reference was stored: its KL in the loss is left out"]


def _assumed(step: Step, algorithm: Algorithm, credit: Float[Tensor, " N"], number: int) -> list[str]:
    """Notes on what the algorithm would have done differently, or what is assumed for it."""
    if not step.passes or step.is_value_only:
        return []
    used, kept = step.updates[number] >= 0, algorithm.keep(step.batch.outcome, step.batch.group)
    was_run, pushes = step.layout.any(~step.current[number].isnan()), step.layout.any(credit != 0)
    not_run = used & kept & ~was_run & pushes
    notes = []
    if left := int((used & ~kept).sum()):
        unanimous = siblings(step.batch.outcome, step.batch.group).unanimous[used & ~kept]
        which = " of groups with equal outcomes" if unanimous.all() else ""
        notes.append(f"{left} completions{which} are left out of the update and its denominator")
    if count := int(not_run.sum()):
        notes.append(f"{count} completions were not run in this update: their ratios are assumed to be 1")
    return notes


def _updates(step: Step, algorithm: Algorithm, number: int) -> Iterator[tuple[int, Int[Tensor, " M"]]]:
    """Each update of a pass and its rows, without groups that the algorithm would not keep."""
    if not step.passes:
        return
    kept = algorithm.keep(step.batch.outcome, step.batch.group)
    for update in step.updates[number].unique().tolist():
        if update >= 0 and not step.facts["updates"][update]["value_only"]:
            index = ((step.updates[number] == update) & kept).nonzero().squeeze(1)
            if len(index):
                yield update, index


def _part(step: Step, algorithm: Algorithm, credit: Float[Tensor, " N"], index: Int[Tensor, " M"], number: int) -> Rows:
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


def _numbers(algorithm: Algorithm, rows: Rows, plan: Plan) -> tuple[dict[str, Tensor], float]:
    """The numbers shown for each token, and these rows' part of the policy loss."""
    terms = token_terms(algorithm, rows, plan)
    gradients = [_gradient(term, rows.logprobs) for term in (terms.policy, terms.kl, terms.extra)]
    through = algorithm.gate.through(terms.log_ratio, rows.advantages).detach()
    found = {
        "weights": plan.weights,
        "gradient": gradients[0],
        "kl_gradient": gradients[1],
        "extra_gradient": gradients[2],
        "token_ratio": bounded_exp(terms.token_log_ratio.detach()),
        "ratio": bounded_exp(terms.log_ratio.detach()),
        "through": through,
        "correction": torch.ones_like(through) if terms.correction is None else terms.correction,
        "state": _states(algorithm, rows, terms, through),
    }
    return found, float(terms.policy.detach().sum())


def _gradient(term: Float[Tensor, "M T"], logprobs: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
    if not term.requires_grad:
        return torch.zeros_like(logprobs)
    (gradient,) = torch.autograd.grad(term.sum(), logprobs, retain_graph=True)
    return gradient


def _states(algorithm: Algorithm, rows: Rows, terms: Terms, through: Float[Tensor, "M T"]) -> Int[Tensor, "M T"]:
    """State of each token; if several apply, the last."""
    gate = GateTraits.read(algorithm.gate)
    _, highest = gate.band
    blocked = (through == 0) & (not gate.fades)
    above = bounded_exp(terms.log_ratio.detach()) > highest
    state = torch.full_like(rows.mask, TokenState.OPEN, dtype=torch.int8)
    nothing = torch.zeros_like(rows.mask)
    selected = nothing if terms.selected is None else terms.selected
    rejected = nothing if terms.correction is None else terms.correction == 0
    is_held = SelectionTraits.read(algorithm.select).teaches_alone
    for where, what in (
        ((through - 1).abs() > SOFT, TokenState.SOFT),
        (blocked & (rows.advantages > 0), TokenState.HIGH),
        (blocked & (rows.advantages < 0), TokenState.LOW),
        (blocked & (rows.advantages < 0) & above, TokenState.DUAL),
        (rows.advantages == 0, TokenState.DEAD),
        (selected, TokenState.HELD if is_held else TokenState.DROPPED),
        (rejected, TokenState.REJECTED),
        (~rows.scored.unsqueeze(1).expand_as(rows.mask), TokenState.IDLE),
    ):
        state.masked_fill_(where, what)
    return state
