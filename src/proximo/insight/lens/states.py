"""States of tokens: what happens to the gradient of each."""

from enum import IntEnum

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.losses.arithmetic import bounded_exp
from proximo.losses.objective import Terms
from proximo.losses.pieces.protocols import GateTraits, SelectionTraits
from proximo.losses.records import Rows
from proximo.types.tensor_types import Bool, Float, Int

SOFT = 0.005
"""A gate that stops less than this share counts as open."""


class TokenState(IntEnum):
    """State of a token: what happens to its gradient. If several states apply, the last one is shown."""

    OUTSIDE = 0
    """Token that was not sampled, or is left out of the loss."""
    IDLE = 1
    """Token of a completion that is not trained on: dropped, unscored, or in no update."""
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
    """Token whose advantage is 0."""
    HELD = 8
    """Held near the old policy by `select`."""
    DROPPED = 9
    """Left out by `select`."""
    REJECTED = 10
    """Left out by `correct`: sampler and learner differ too much."""


BLOCKED = (TokenState.HIGH, TokenState.LOW, TokenState.DUAL, TokenState.DROPPED, TokenState.REJECTED)
"""States in which a gradient is blocked completely."""


def is_blocked(state: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    blocked = torch.zeros_like(state, dtype=torch.bool)
    for each in BLOCKED:  # a tenth of the time of torch.isin
        blocked |= state == each
    return blocked


def states_of(algorithm: Algorithm, rows: Rows, terms: Terms, through: Float[Tensor, "M T"]) -> Int[Tensor, "M T"]:
    """State of each token; if several apply, the last."""
    gate, advantages = GateTraits.read(algorithm.gate), rows.advantages
    conditions = [((through - 1).abs() > SOFT, TokenState.SOFT)]
    blocked = through == 0
    if not gate.fades and bool(blocked.any()):
        _, highest = gate.band
        low = blocked & (advantages < 0)
        dual = low & (bounded_exp(terms.log_ratio.detach()) > highest)
        conditions += [(blocked & (advantages > 0), TokenState.HIGH), (low, TokenState.LOW), (dual, TokenState.DUAL)]
    conditions.append((advantages == 0, TokenState.DEAD))
    if terms.selected is not None:
        is_held = SelectionTraits.read(algorithm.select).teaches_alone
        conditions.append((terms.selected, TokenState.HELD if is_held else TokenState.DROPPED))
    if terms.correction is not None:
        conditions.append((terms.correction == 0, TokenState.REJECTED))
    if not bool(rows.scored.all()):
        conditions.append((~rows.scored.unsqueeze(1).expand_as(rows.mask), TokenState.IDLE))
    state = torch.full_like(rows.mask, TokenState.OPEN, dtype=torch.int8)
    for where, what in conditions:
        state.masked_fill_(where, what)
    return state
