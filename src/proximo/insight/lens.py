"""A stored step as an algorithm sees it, its own or another: the same code as training's, token by token.

What the policy and the graders said is taken as it is stored. Advantages stay the run's own, unless the other
algorithm's can be had from what is stored: see `advantages_under`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.insight.steps import Step
from proximo.maths.arithmetic import bounded_exp
from proximo.maths.credit import advantages
from proximo.maths.gates import Clip, GeometricClip
from proximo.maths.keeping import trained_mask
from proximo.maths.objective import Terms, plan_step, token_terms
from proximo.maths.rows import Rows, rows_of
from proximo.maths.selection import KlCovariance
from proximo.shapes import Bool, Float, Int
from proximo.training.assemble import shaped_rewards
from proximo.training.config import RunConfig

SOFT = 0.005
"""A gate that lets all but this through is called open."""


class TokenState(IntEnum):
    """What becomes of a token's gradient. In order: a later one is said rather than an earlier one."""

    OUTSIDE = 0
    """Nothing was sampled here, or the loss leaves it out."""
    IDLE = 1
    """Its completion takes no part: dropped, unscored, or in no update."""
    OPEN = 2
    SOFT = 3
    """The gate lets a part of it through, or more than all."""
    HIGH = 4
    """Clipped: the ratio is above the band and the advantage pushes it further."""
    LOW = 5
    """Clipped: below the band, and pushed further down."""
    DUAL = 6
    """Clipped: its ratio exploded, and the dual clip bounds what it can do."""
    DEAD = 7
    """Its advantage is 0."""
    HELD = 8
    """Left in, and held near the old policy by `select`."""
    DROPPED = 9
    """Left out by `select`."""
    REJECTED = 10
    """Left out by `correct`: sampler and learner disagree too much."""


BLOCKED = (TokenState.HIGH, TokenState.LOW, TokenState.DUAL, TokenState.DROPPED, TokenState.REJECTED)
"""States of a token that would push, and may not."""


@dataclass(frozen=True)
class Seen:
    """One pass over a step's data under an algorithm, all rows, [B, T]. Where a token takes no part, ratios and shares
    are 1, the rest 0; advantages are there as they are."""

    algorithm: Algorithm
    """As it was used, without what nothing stored could answer."""
    notes: tuple[str, ...]
    """What was assumed, or left out."""
    state: Int[Tensor, "B T"]
    """Of TokenState."""
    advantages: Float[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    """What a token counts for in its update's loss."""
    token_ratio: Float[Tensor, "B T"]
    ratio: Float[Tensor, "B T"]
    """As the gate sees it: over a whole completion, where the algorithm says so."""
    through: Float[Tensor, "B T"]
    """The share of r·A that the gate lets pass."""
    gradient: Float[Tensor, "B T"]
    """Of the update's policy loss with respect to the token's log-prob: minus it is where the token is pushed."""
    kl_gradient: Float[Tensor, "B T"]
    correction: Float[Tensor, "B T"]
    """The factor for the sampler's mismatch; 1 without one."""
    losses: dict[int, float]
    """The policy loss of each update of the pass."""

    @property
    def takes_part(self) -> Bool[Tensor, "B T"]:
        return self.state > TokenState.IDLE

    @property
    def blocked(self) -> Bool[Tensor, "B T"]:
        return torch.isin(self.state, torch.tensor(BLOCKED))


def look(step: Step, algorithm: Algorithm, config: RunConfig, *, number: int = -1) -> Seen:
    """A step of the run of this config under an algorithm. `number`: which pass over the data, the last unless given.

    Example: look(run.step(40), GSPO, run.config).blocked.sum()
    """
    algorithm, notes = usable(algorithm.within(config.sampling.max_tokens), step)
    credit, more = advantages_under(step, algorithm, config)
    blank = torch.zeros_like(step.batch.old_logprobs)
    inside = step.inside
    mask = trained_mask(algorithm.keep, inside, step.batch.truncated)
    neutral: dict[str, float] = dict.fromkeys(("weights", "gradient", "kl_gradient"), 0.0)
    neutral |= dict.fromkeys(("token_ratio", "ratio", "through", "correction"), 1.0)
    tensors = {name: torch.full_like(blank, value) for name, value in neutral.items()}
    state, losses = torch.where(inside, TokenState.IDLE, TokenState.OUTSIDE), {}
    for update, index in _updates(step, algorithm, number):
        rows = _rows(step, algorithm, credit, mask, index, number)
        found, losses[update] = _update(algorithm, rows, config.seed + step.facts["updates"][update]["version"])
        for name, tensor in tensors.items():
            tensor[index] = torch.where(rows.mask, found[name].to(tensor.dtype), neutral[name])
        state[index] = found["state"].long()
    state = torch.where(mask, state, TokenState.OUTSIDE)
    credit = torch.where(inside, credit, 0.0).nan_to_num(0.0)
    notes = (*notes, *more, *_assumed(step, algorithm, credit, number))
    return Seen(algorithm, notes, state, credit, losses=losses, **tensors)


def policy_loss(step: Step, algorithm: Algorithm, config: RunConfig) -> float | None:
    """The step's policy loss under an algorithm, as the metrics have it."""
    return step_loss(step, [look(step, algorithm, config, number=number) for number in range(step.passes)])


def step_loss(step: Step, passes: Iterable[Seen]) -> float | None:
    """From all passes of a step: the mean over the updates that were applied.

    None where none was, or where the value model alone was trained.
    """
    applied = [update["skipped"] is None and not update["value_only"] for update in step.facts["updates"]]
    found = [loss for seen in passes for update, loss in seen.losses.items() if applied[update]]
    return sum(found) / len(found) if found else None


def usable(algorithm: Algorithm, step: Step) -> tuple[Algorithm, list[str]]:
    """Without the terms that nothing stored can answer, and a note of each."""
    if algorithm.kl is None or step.batch.ref_logprobs is not None:
        return algorithm, []
    return replace(algorithm, kl=None), ["no reference was stored: its KL in the loss is left out"]


def advantages_under(step: Step, algorithm: Algorithm, config: RunConfig) -> tuple[Float[Tensor, "B T"], list[str]]:
    """The stored ones where both compare siblings, whatever their normalisation: what differs is then the update alone.

    Advantages of single tokens are computed anew, a value model's only where values were stored; and so are those
    between siblings, where the run compared none. Rewards stay as the run shaped them.
    """
    own, batch = config.algorithm.advantage, step.batch
    notes, limit, unit = [], config.sampling.max_tokens, config.penalty_unit
    penalties = [shaped_rewards(batch, each, limit, unit) - batch.rewards for each in (algorithm, config.algorithm)]
    if not torch.equal(*(penalty.nan_to_num(0.0) for penalty in penalties)):
        notes.append("its length penalty differs: rewards are as the run shaped them")
    if algorithm.advantage == own:
        return batch.advantages, notes
    if algorithm.advantage.needs_values and batch.values is None:
        return batch.advantages, [*notes, "no values were stored: the advantages are the run's own"]
    if not own.per_token and not algorithm.advantage.per_token:
        return batch.advantages, [*notes, "the advantages are the run's own"]
    token_rewards = None
    if algorithm.kl_reward is not None:
        if batch.ref_logprobs is None:
            notes.append("no reference was stored: its KL in the reward is left out")
        else:
            token_rewards = algorithm.kl_reward(batch.old_logprobs, batch.ref_logprobs, step.inside)
    credit, _ = advantages(
        algorithm,
        rewards=batch.rewards,
        group=batch.group,
        mask=step.inside,
        values=batch.values,
        token_rewards=token_rewards,
    )
    kind = type(algorithm.advantage).__name__
    notes.append(f"the advantages are computed anew by {kind} from what was stored")
    return credit.to(batch.advantages.dtype), notes


def _assumed(step: Step, algorithm: Algorithm, credit: Float[Tensor, "B T"], number: int) -> list[str]:
    """What the other algorithm would have done otherwise, or could not have known."""
    if not step.passes or step.is_value_only:
        return []
    used, kept = step.updates[number] >= 0, algorithm.keep(step.batch.outcome, step.batch.group)
    not_run = used & kept & step.current[number].isnan().all(dim=1) & (credit != 0).any(dim=1)
    notes = []
    if left := int((used & ~kept).sum()):
        notes.append(f"{left} completions of groups with equal outcomes leave the update and its denominator")
    if count := int(not_run.sum()):
        notes.append(f"{count} completions were not run in this update: their ratios are taken to be 1")
    return notes


def _updates(step: Step, algorithm: Algorithm, number: int) -> Iterator[tuple[int, Int[Tensor, " M"]]]:
    """Each update of a pass and the rows in it; groups that the algorithm would not keep leave it."""
    if not step.passes:
        return
    kept = algorithm.keep(step.batch.outcome, step.batch.group)
    for update in step.updates[number].unique().tolist():
        if update >= 0 and not step.facts["updates"][update]["value_only"]:
            index = ((step.updates[number] == update) & kept).nonzero().squeeze(1)
            if len(index):
                yield update, index


def _rows(
    step: Step,
    algorithm: Algorithm,
    credit: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    index: Int[Tensor, " M"],
    number: int,
) -> Rows:
    """What one update reads. A row that was not run, since it was dead, stands where the old policy was."""
    batch, current = step.batch.rows(index), step.current[number][index]
    current = torch.where(current.isnan(), batch.old_logprobs, current).requires_grad_()
    entropy = step.entropy_in(number)
    assert entropy is not None, "a pass has one"
    return rows_of(
        algorithm,
        logprobs=current,
        old_logprobs=batch.old_logprobs,
        advantages=credit[index],
        mask=mask[index],
        group=batch.group,
        ref_logprobs=batch.ref_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        entropy=entropy[index].nan_to_num(0.0),
        outcome=batch.outcome,
    )


def _update(algorithm: Algorithm, rows: Rows, seed: int) -> tuple[dict[str, Tensor], float]:
    plan = plan_step(algorithm, rows, torch.Generator().manual_seed(seed))
    terms = token_terms(algorithm, rows, plan)
    gradients = [_gradient(term, rows.logprobs) for term in (terms.policy, terms.kl)]
    through = algorithm.gate.through(terms.log_ratio, rows.advantages).detach()
    found = {
        "weights": plan.weights,
        "gradient": gradients[0],
        "kl_gradient": gradients[1],
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
    """The last that applies is said."""
    _, highest = algorithm.gate.band
    # A soft gate's share may be too small for a number: then it is still no edge that was crossed.
    blocked = (through == 0) & isinstance(algorithm.gate, Clip | GeometricClip)
    above = bounded_exp(terms.log_ratio.detach()) > highest
    state = torch.full_like(rows.mask, TokenState.OPEN, dtype=torch.long)
    nothing = torch.zeros_like(rows.mask)
    chosen = nothing if terms.chosen is None else terms.chosen
    rejected = nothing if terms.correction is None else terms.correction == 0
    is_held = isinstance(algorithm.select, KlCovariance)
    for where, what in (
        ((through - 1).abs() > SOFT, TokenState.SOFT),
        (blocked & (rows.advantages > 0), TokenState.HIGH),
        (blocked & (rows.advantages < 0), TokenState.LOW),
        (blocked & (rows.advantages < 0) & above, TokenState.DUAL),
        (rows.advantages == 0, TokenState.DEAD),
        (chosen, TokenState.HELD if is_held else TokenState.DROPPED),
        (rejected, TokenState.REJECTED),
        (~rows.scored.unsqueeze(1).expand_as(rows.mask), TokenState.IDLE),
    ):
        state = torch.where(where, what, state)
    return state
