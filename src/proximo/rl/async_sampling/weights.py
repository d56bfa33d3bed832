"""Weights for a sampler that works while the policy is trained: a second module, and snapshots to load into it."""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from proximo.models.adapters.lora import merged_weights
from proximo.models.sampled import WholeModel
from proximo.samplers.sampler import SampledPolicy, Snapshot


class PolicyCopy(WholeModel):
    """A second module of a policy's, for samplers: it has the weights of the snapshot that was loaded last.

    A snapshot holds the weights that are trained; the others are those of the start.
    """

    def __init__(self, policy: SampledPolicy) -> None:
        self._policy = policy
        # Not frozen: from that a sampler sees how much memory training will take.
        self.model = deepcopy(policy.model).eval()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.model)

    @torch.no_grad()
    def snapshot(self, version: int) -> Snapshot:
        """The policy's weights as they are now, after `version` updates; another thread may read them."""
        found = Snapshot(version, [trained.clone() for _, trained in self._trained()])
        _finish(self.model.device)
        return found

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        for (own, _), weight in zip(self._trained(), snapshot.weights, strict=True):
            own.copy_(weight)
        _finish(self.model.device)

    def _trained(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters of this module and of the policy's, where the policy's are trained; tied ones come once."""
        pairs = zip(self.model.parameters(), self._policy.model.parameters(), strict=True)
        return [(own, policy) for own, policy in pairs if policy.requires_grad]


def _finish(device: torch.device) -> None:
    """Wait until this thread's copies are done: another stream reads them, or frees what they were made from."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
