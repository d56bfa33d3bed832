"""The value model in training: its loss, and what it is worth."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.losses.arithmetic import sampled
from proximo.losses.diagnostics import compare_baselines, error_by_position, explained_variance
from proximo.losses.pieces.extras import ValueLoss, value_loss_of
from proximo.models.model_types import PreTrainedModel
from proximo.models.values import TrunkHead, ValueModel, value_model
from proximo.types.batches import Batch, Stats
from proximo.types.tensor_types import Float


@dataclass(frozen=True)
class Critic:
    """A value model and what it is trained by."""

    model: ValueModel
    loss: ValueLoss

    def term(
        self, values: Float[Tensor, "B T"], rows: Batch, weights: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, ""], Stats]:
        """Loss of these rows within an update's, coefficient included; the statistics are without it."""
        assert rows.values is not None
        assert rows.returns is not None
        weights = weights.to(values.dtype) * rows.mask
        # Cleaned before any arithmetic: what stands off the mask must reach neither the loss nor its gradient.
        old, returns = (sampled(each.to(values.dtype), rows.mask) for each in (rows.values, rows.returns))
        values = sampled(values, rows.mask)
        total = (self.loss(values, old, returns) * weights).sum()
        beyond = (values.detach() - old).abs() > (self.loss.clip or math.inf)
        stats = Stats(totals={"value_loss": total.detach(), "value_clip": (beyond * weights).sum()})
        return self.loss.coefficient * total, stats

    def unclipped(self) -> "Critic":
        """To learn from frozen returns: nothing it trains on depends on where its values were."""
        return replace(self, loss=replace(self.loss, clip=None))


def critic_for(algorithm: Algorithm, policy: PreTrainedModel, value: ValueModel | None) -> Critic | None:
    """The value model with its loss, where the algorithm asks for one."""
    loss = value_loss_of(algorithm.extras)
    if loss is None:
        assert value is None, "a value model that nothing asks"
        return None
    return Critic(value or value_model(TrunkHead(), policy), loss)


def value_metrics(batch: Batch, returns: Float[Tensor, "B T"]) -> dict[str, float]:
    """Metrics of the values before the updates; `returns` are what the tokens really went on to earn."""
    assert batch.values is not None
    values, mask = batch.values.to(returns.dtype), batch.mask
    if not mask.any():
        return {}
    errors = error_by_position(values, returns, mask).tolist()
    baselines = compare_baselines(values, returns, mask, batch.group)
    return {
        "value": float(values[mask].mean()),
        "value_std": float(values[mask].std(correction=0)),
        "return": float(returns[mask].mean()),
        "return_std": float(returns[mask].std(correction=0)),
        "explained_variance": float(explained_variance(values, returns, mask)),
        **{f"value_error/quarter_{number}": error for number, error in enumerate(errors, start=1)},
        "baseline_error/value": float(baselines.value),
        "baseline_error/group": float(baselines.group),
    }


def kl_per_completion(batch: Batch) -> float | None:
    """Nats between the policy that sampled and the reference, summed over a completion's sampled tokens; None without
    a reference."""
    if batch.ref_logprobs is None or not len(batch):
        return None
    # Of all that was sampled: a completion that the loss leaves out is as far from the reference as any other.
    return float(torch.where(batch.sampled, batch.old_logprobs - batch.ref_logprobs, 0.0).sum(dim=1).mean())
