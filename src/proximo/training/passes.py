"""Passes of models over a batch, in micro-batches that fit into memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.models import Scores, micro_batches, score
from proximo.models.values import ValueModel
from proximo.shapes import Float, Int
from proximo.types import Batch


@dataclass(frozen=True)
class OldScores:
    """What the policy thought before the first update."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None
    """None without a value model."""


@dataclass(frozen=True)
class Passes:
    """How a model is run over rows: the same way for every purpose."""

    temperature: float
    token_budget: int
    entropy_gradient: bool = False

    def parts(self, batch: Batch) -> Iterator[Int[Tensor, " M"]]:
        """Row numbers of each micro-batch."""
        prompts, lengths = [len(prompt) for prompt in batch.prompts], batch.lengths.tolist()
        return map(torch.tensor, micro_batches(prompts, lengths, batch.group.tolist(), self.token_budget))

    def scores(self, model: PreTrainedModel, rows: Batch) -> Scores:
        return score(
            model,
            prompts=rows.prompts,
            tokens=rows.tokens,
            lengths=rows.lengths,
            group=rows.group,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
        )

    def with_values(
        self, model: PreTrainedModel, value: ValueModel | None, rows: Batch
    ) -> tuple[Scores, Float[Tensor, "B T"] | None]:
        """The policy's scores and, from the same pass where that can be, the value before each token."""
        if value is None:
            return self.scores(model, rows), None
        with value.beside(model):
            scores = self.scores(model, rows)
        return scores, value.estimate(rows, scores.states)

    def values(self, model: PreTrainedModel, value: ValueModel, rows: Batch) -> Float[Tensor, "B T"]:
        """Values alone; a gradient reaches nothing of the policy's."""
        if not value.needs_policy:
            return value.estimate(rows, None)
        with torch.no_grad(), value.beside(model):
            scores = self.scores(model, rows)
        return value.estimate(rows, scores.states)

    @torch.no_grad()
    def without_gradient(self, model: PreTrainedModel, batch: Batch, value: ValueModel | None = None) -> OldScores:
        logprobs, entropy = torch.zeros_like(batch.rollout_logprobs), torch.zeros_like(batch.rollout_logprobs)
        values = None if value is None else torch.zeros_like(logprobs)
        for index in self.parts(batch):
            scores, estimates = self.with_values(model, value, batch.rows(index))
            logprobs[index], entropy[index] = scores.logprobs.to(logprobs.dtype), scores.entropy.to(entropy.dtype)
            if values is not None:
                assert estimates is not None
                values[index] = estimates.to(values.dtype)
        return OldScores(logprobs, entropy, values)
