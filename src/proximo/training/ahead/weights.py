"""Weights for a sampler that works while the policy is trained: a second module, and snapshots to load into it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from proximo.models import frozen_copy
from proximo.models.adapters.lora import merged_weights
from proximo.samplers import SampledPolicy, Snapshot


class PolicyCopy:
    """A second module of the policy's, for samplers: it has the weights of the snapshot that was loaded last."""

    def __init__(self, policy: SampledPolicy) -> None:
        self.model = frozen_copy(policy.model)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.model)

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        for own, weight in zip(self.model.parameters(), snapshot.weights, strict=True):
            own.copy_(weight)
        _finish(self.model.device)


@torch.no_grad()
def snapshot(policy: SampledPolicy, version: int) -> Snapshot:
    """A copy of the policy's weights as they are now, which another thread may read."""
    # Parameters, not a state dict: weights that are tied are kept once.
    found = Snapshot(version, [each.detach().clone() for each in policy.model.parameters()])
    _finish(policy.model.device)
    return found


def _finish(device: torch.device) -> None:
    """Wait until this thread's copies are done: another stream reads them, or frees what they were made from."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
