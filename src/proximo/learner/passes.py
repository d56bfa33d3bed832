"""Passes of models over a batch: minibatches for the updates, micro-batches that fit into memory.

One rule of places: a batch lives on the CPU, and so does what is kept of a pass. A micro-batch is laid out there, and
goes to the model's device for its pass and its loss; nothing waits for the device between two micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from proximo.learner.options import LearnerOptions
from proximo.models import Scores, micro_batches, score_rows
from proximo.models.model_types import PreTrainedModel
from proximo.models.routing import UNKNOWN, Routes
from proximo.models.values import ValueModel
from proximo.types.batches import Batch
from proximo.types.tensor_types import Float, Int

RowTask = Literal["update", "values", "load"]
"""Work over rows that may be shared out: an update's gradient, the value model's alone, the load of experts."""
Rows = TypeVar("Rows", bound=Sized)
RowResult = TypeVar("RowResult")
Shards = list[tuple[Tensor, RowResult]]
"""Row numbers of each share of some rows, and its result."""


@dataclass(frozen=True)
class OldScores:
    """Scores of the policy before the first update."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None
    """Values of the tokens; None without a value model."""
    routes: Routes | None = None
    """Experts that the routers chose, if they are recorded."""


def directly(model: PreTrainedModel, work: Callable[[], Any]) -> Any:
    """Run a pass of a model that is whole in memory."""
    return work()


@dataclass(frozen=True)
class Passes:
    """Settings of forward passes over rows, the same for every purpose."""

    temperature: float
    token_budget: int
    entropy_gradient: bool = False
    router_logits: bool = False
    """True if the routers' logits are kept, for a loss on them."""
    is_planned: bool = False
    """True if the budget is for the memory of this machine."""
    checkpointed: int = 0
    """Number of layers, from the first on, that keep only what enters them and run again in the backward pass."""
    offloaded: bool = False
    """True if what checkpointed layers keep waits in the host's memory."""
    through: Callable[[PreTrainedModel, Callable[[], Any]], Any] = directly
    """Runs a pass of a model: directly, or where the model is in shards through the module that gathers them."""

    def with_token_limit(self, limit: int | None) -> "Passes":
        """The same with at most this many tokens per pass."""
        return self if limit is None or limit >= self.token_budget else replace(self, token_budget=max(limit, 1))

    def __str__(self) -> str:
        """Size in words, such as "the learner's passes have at most 28,672 tokens"."""
        kept = f", {self.checkpointed} layers run again in the backward pass" * bool(self.checkpointed)
        moved = ", and what they keep waits in the host's memory" * self.offloaded
        return f"the learner's passes have at most {self.token_budget:,} tokens{kept}{moved}"

    def parts(self, batch: Batch) -> Iterator[Int[Tensor, " M"]]:
        """Row numbers of each micro-batch: whole groups, but for those that are larger than the budget."""
        prompts, lengths = [len(prompt) for prompt in batch.prompts], batch.lengths.tolist()
        parts = micro_batches(prompts, lengths, batch.group.tolist(), self.token_budget, may_split=True)
        return map(torch.tensor, parts)

    def scores(
        self, model: PreTrainedModel, rows: Batch, *, record: bool = False, until: ExitStack | None = None
    ) -> Scores:
        """Routes that the rows bring are replayed, through a backward pass inside `until` too."""
        return score_rows(
            model,
            rows,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            routes=None if rows.routes is None else Routes(rows.prompt_routes, rows.routes),
            record=record,
            router_logits=self.router_logits,
            until=until,
        )

    def with_values(
        self,
        model: PreTrainedModel,
        value: ValueModel | None,
        rows: Batch,
        *,
        record: bool = False,
        until: ExitStack | None = None,
    ) -> tuple[Scores, Float[Tensor, "B T"] | None]:
        """The policy's scores and, from the same pass where that can be, the value before each token."""
        return self.through(model, lambda: self._with_values(model, value, rows, record=record, until=until))

    def _with_values(
        self,
        model: PreTrainedModel,
        value: ValueModel | None,
        rows: Batch,
        *,
        record: bool = False,
        until: ExitStack | None = None,
    ) -> tuple[Scores, Float[Tensor, "B T"] | None]:
        if value is None:
            return self.scores(model, rows, record=record, until=until), None
        with value.observing(model):
            scores = self.scores(model, rows, record=record, until=until)
        return scores, value.estimate(rows, scores.states)

    def values(self, model: PreTrainedModel, value: ValueModel, rows: Batch) -> Float[Tensor, "B T"]:
        """Values alone; a gradient reaches nothing of the policy's."""
        return self.through(model, lambda: self._values(model, value, rows))

    def _values(self, model: PreTrainedModel, value: ValueModel, rows: Batch) -> Float[Tensor, "B T"]:
        if not value.needs_policy:
            return value.estimate(rows, None)
        with torch.no_grad(), value.observing(model):
            scores = self.scores(model, rows)
        return value.estimate(rows, scores.states)

    @torch.no_grad()
    def without_gradient(
        self, model: PreTrainedModel, batch: Batch, value: ValueModel | None = None, *, record: bool = False
    ) -> OldScores:
        """Scores of all rows, on the CPU."""
        parts = list(self.parts(batch))
        # Of each pass only what is asked for: its states and its routers' logits are not to outlive it.
        scores = [self._scores_of(model, value, batch.rows(index), record) for index in parts]
        blank = torch.zeros_like(batch.rollout_logprobs)
        logprobs, entropy, values = blank.clone(), blank.clone(), None if value is None else blank
        for index, each in zip(parts, scores, strict=True):
            logprobs[index], entropy[index] = each.logprobs.to(blank.dtype).cpu(), each.entropy.to(blank.dtype).cpu()
            if values is not None:
                assert each.values is not None
                values[index] = each.values.to(blank.dtype).cpu()
        routes = [(index, each.routes) for index, each in zip(parts, scores, strict=True) if each.routes]
        return OldScores(logprobs, entropy, values, joined(routes, batch))

    def _scores_of(self, model: PreTrainedModel, value: ValueModel | None, rows: Batch, record: bool) -> OldScores:
        scores, values = self.with_values(model, value, rows, record=record)
        return OldScores(scores.logprobs, scores.entropy, values, scores.routes)


def minibatches(batch: Batch, options: LearnerOptions, random: torch.Generator) -> list[Int[Tensor, " M"]]:
    """Row numbers of whole groups, shuffled, in minibatches no smaller than a full step's."""
    groups = batch.group.unique()
    order = groups[torch.randperm(len(groups), generator=random)]
    size = max(1, options.groups // options.minibatches)
    count = min(options.minibatches, max(1, len(groups) // size))
    return [torch.isin(batch.group, part).nonzero().squeeze(1) for part in order.tensor_split(count) if len(part)]


def joined(parts: Sequence[tuple[Int[Tensor, " M"], Routes]], batch: Batch) -> Routes | None:
    """The routes of all rows from those of micro-batches. A prompt's are the same in each part of a split group."""
    if not parts:
        return None
    rows = parts[0][1].rows.new_full((len(batch), *parts[0][1].rows.shape[1:]), UNKNOWN)
    prompts = list(parts[0][1].prompts)
    for index, routes in parts:
        rows[index] = routes.rows
        for number in batch.group[index].unique().tolist():
            prompts[number] = routes.prompts[number]
    return Routes(tuple(prompts), rows)
