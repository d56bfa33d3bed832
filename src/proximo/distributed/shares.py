"""Shares of rows for the ranks: whole groups, and equally many passes on each rank.

Every pass of a sharded model is made by all ranks together. So a rank with fewer micro-batches than others makes up for
them with passes over one short row, whose weights are 0 and whose results are dropped.
"""

from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from proximo.learner.gradients import UpdateRows
from proximo.learner.guard import GradientPass
from proximo.learner.passes import Passes, Rows
from proximo.learner.ranks import deal
from proximo.models.routing import Agreement
from proximo.types.batches import Batch, Stats
from proximo.types.tensor_types import Int


@dataclass(frozen=True)
class Share(Generic[Rows]):
    """Share of one rank in some work over rows."""

    index: Int[Tensor, " M"]
    """Row numbers among all rows."""
    rows: Rows | None
    """Rows of the rank; None: there are none for it."""
    idle_rows: Rows
    """One row without weight, to make a pass with."""
    idle: int
    """Number of passes to make with it."""


def row_shares(batch: Batch, ranks: int) -> list[Int[Tensor, " M"]]:
    """Row numbers for each rank; a group is never split, so that each of its prompts is computed once."""
    lengths, sizes = batch.lengths.tolist(), dict[int, int]()
    for number, length in zip(batch.group.tolist(), lengths, strict=True):
        sizes[number] = sizes.get(number, len(batch.prompts[number])) + length
    dealt = deal(sizes, ranks)
    return [torch.isin(batch.group, torch.tensor(numbers, dtype=torch.long)).nonzero().squeeze(1) for numbers in dealt]


def batch_shares(batch: Batch, passes: Passes, ranks: int) -> list[Share[Batch]]:
    """The shares of work that has no weights."""
    return [
        Share(index, trimmed(batch.rows(index)) if len(index) else None, trimmed(batch.rows(short)), idle)
        for index, short, idle in _dealt(batch, passes, ranks)
    ]


def update_shares(update: UpdateRows, passes: Passes, ranks: int) -> list[Share[UpdateRows]]:
    """The shares of an update's rows."""

    def part(index: Int[Tensor, " M"]) -> UpdateRows:
        rows = update.rows(index)
        return replace(rows, batch=trimmed(rows.batch))

    return [
        Share(index, part(index) if len(index) else None, without_weight(part(short)), idle)
        for index, short, idle in _dealt(update.batch, passes, ranks)
    ]


def _dealt(batch: Batch, passes: Passes, ranks: int) -> list[tuple[Tensor, Tensor, int]]:
    """Rows of each rank, the shortest row of all, and the number of passes that the rank makes with that one."""
    indices = row_shares(batch, ranks)
    counts = [len(list(passes.parts(batch.rows(index)))) if len(index) else 0 for index in indices]
    short = (batch.lengths + torch.tensor([len(batch.prompts[number]) for number in batch.group.tolist()])).argmin()
    return [(index, short.reshape(1), max(counts) - count) for index, count in zip(indices, counts, strict=True)]


def trimmed(batch: Batch) -> Batch:
    """The batch without what its rows do not need: other groups' prompts and routes, and where the rows come from.
    Groups keep their numbers."""
    kept = set(batch.group.tolist())
    prompts = tuple(prompt if number in kept else () for number, prompt in enumerate(batch.prompts))
    routes = tuple(each if number in kept else each[:0] for number, each in enumerate(batch.prompt_routes))
    return replace(batch, prompts=prompts, prompt_routes=routes, groups=())


def without_weight(update: UpdateRows) -> UpdateRows:
    """The same rows with every weight 0: they pass through the model, and add nothing to gradient or loss."""
    plan = update.plan
    if plan is not None:
        others = tuple(None if each is None else torch.zeros_like(each) for each in plan.extra_weights)
        plan = replace(plan, weights=torch.zeros_like(plan.weights), extra_weights=others)
    return replace(update, weights=torch.zeros_like(update.weights), plan=plan)


def on_cpu(result: GradientPass) -> GradientPass:
    """To be sent to another process."""
    stats = Stats(*({name: each.cpu() for name, each in kind.items()} for kind in vars(result.stats).values()))
    agreements = [part and tuple(map(_agreement_on_cpu, part)) for part in result.agreements]
    parts, entropies = ([(index, each.cpu()) for index, each in kind] for kind in (result.parts, result.entropies))
    return replace(result, stats=stats, parts=parts, entropies=entropies, agreements=agreements)


def _agreement_on_cpu(agreement: Agreement) -> Agreement:
    return Agreement(agreement.positions.cpu(), agreement.equal.cpu(), agreement.changed.cpu())
