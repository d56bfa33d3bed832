"""Random batches for laws, and every named algorithm ready to run on them."""

from dataclasses import dataclass, fields, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import proximo
from proximo import Algorithm, Stats, algorithms
from proximo.losses import ConstantLength, Plan

NAMED = {
    name: replace(value, weights=ConstantLength(16)) if isinstance(value.weights, ConstantLength) else value
    for name, value in vars(algorithms).items()
    if isinstance(value, Algorithm)
}


@dataclass(frozen=True)
class Batch:
    """Everything `policy_loss` may read, for B rows."""

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    mask: Tensor
    group: Tensor
    outcome: Tensor

    def rows(self, index) -> "Batch":
        return Batch(**{each.name: getattr(self, each.name)[index] for each in fields(self)})

    def padded(self, left: int, right: int, filler: float) -> "Batch":
        """More columns that nobody sampled, with something unpleasant in them."""

        def pad(tensor: Tensor) -> Tensor:
            if tensor.ndim == 1:
                return tensor
            value = False if tensor.dtype == torch.bool else filler
            return torch.nn.functional.pad(tensor, (left, right), value=value)

        return Batch(**{each.name: pad(getattr(self, each.name)) for each in fields(self)})

    def tensors(self) -> dict[str, Tensor]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


def make(seed: int, num_groups: int, group_size: int, width: int, spread: float) -> Batch:
    random = torch.Generator().manual_seed(seed)
    num_rows = num_groups * group_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    lengths = torch.randint(1, width + 1, (num_rows,), generator=random)
    old = -normal(num_rows, width).abs()
    return Batch(
        logprobs=old + spread * normal(num_rows, width),
        old_logprobs=old,
        ref_logprobs=old + 0.3 * normal(num_rows, width),
        rollout_logprobs=old + 0.1 * normal(num_rows, width),
        advantages=normal(num_rows, 1).expand(num_rows, width).clone(),
        entropy=normal(num_rows, width).abs(),
        mask=torch.arange(width) < lengths.unsqueeze(1),
        group=torch.arange(num_groups).repeat_interleave(group_size),
        outcome=torch.randint(0, 2, (num_rows,), generator=random).double(),
    )


def batches(max_rows_per_group: int = 4) -> st.SearchStrategy[Batch]:
    return st.builds(
        make,
        seed=st.integers(0, 2**31),
        num_groups=st.integers(1, 3),
        group_size=st.integers(1, max_rows_per_group),
        width=st.integers(1, 6),
        spread=st.sampled_from([0.0, 1e-4, 0.1, 0.5, 2.0]),
    )


def run(
    algorithm: Algorithm, batch: Batch, weights: Tensor | Plan | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Stats]:
    """Loss, gradient with respect to log-probs, statistics."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, stats = proximo.policy_loss(
        algorithm,
        **(batch.tensors() | {"logprobs": logprobs}),
        weights=weights,
        generator=torch.Generator().manual_seed(seed),
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, stats
