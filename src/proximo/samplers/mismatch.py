"""A sampler that is not quite the policy, on purpose: to study what that does to learning, and what repairs it.

Engines differ from learners by accident: another precision, another kernel, weights that arrived late. Here the
difference is known and of a chosen size, and a run that has it repeats to the last bit.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.models import frozen_copy
from proximo.models.routing import needed_routers
from proximo.samplers import SamplingOptions, gathered
from proximo.samplers.drawing import signed
from proximo.samplers.embedded import local_sampler
from proximo.types import Completion, Request


@dataclass(frozen=True)
class Mismatch:
    """How the sampler differs from the policy. As it stands, in nothing: the control of a study.

    Example: Mismatch(precision="bfloat16", lag=1)
    """

    precision: Literal["bfloat16", "float16"] | None = None
    """The weights are rounded to it; the arithmetic stays float32, so that the weights are all that differs."""
    router_noise: float = 0.0
    """Standard deviation of what is added to the weights of a mixture's routers, drawn anew for each round. Untrained
    routers have weights of about 0.02."""
    lag: int = 0
    """The weights are those of so many training steps ago; those of the start, while there is no such step."""

    def __post_init__(self) -> None:
        if not 0 <= self.router_noise < float("inf"):
            raise ValueError(f"mismatch.router_noise is {self.router_noise}: give a standard deviation, 0 or more")
        if self.lag < 0:
            raise ValueError(f"mismatch.lag is {self.lag}: give a number of steps, 0 or more")

    @property
    def dtype(self) -> torch.dtype | None:
        return {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.precision]


@dataclass(frozen=True)
class Snapshot:
    """A policy's weights, as they were after so many updates."""

    version: int
    weights: list[Tensor]


class MismatchedSampler:
    """Samples from a copy of the policy that differs from it as `mismatch` says.

    The loop calls `refresh` once a training step, before its rollouts. Completions carry the log-probs that they
    were really drawn with, and the version of the weights they were really drawn from, not the caller's.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        mismatch: Mismatch,
        *,
        slots: int = 128,
        record_routes: bool = False,
    ) -> None:
        self._policy = policy
        self._mismatch = mismatch
        self._copy = frozen_copy(policy)
        noise = mismatch.router_noise
        self._routers = needed_routers(self._copy, f"mismatch.router_noise is {noise}") if noise else []
        self._sampler = local_sampler(self._copy, tokenizer, slots=slots, record_routes=record_routes)
        self._snapshots: deque[Snapshot] = deque(maxlen=mismatch.lag + 1)
        self.refresh(0)

    @property
    def version(self) -> int:
        """Of the weights it samples with."""
        return self._snapshots[0].version

    @torch.no_grad()
    def refresh(self, version: int) -> int:
        """Take the policy's weights, which have seen `version` updates; the version it samples with from now on."""
        # Parameters, not a state dict: weights that are tied are kept once.
        self._snapshots.append(Snapshot(version, [self._rounded(each) for each in self._policy.parameters()]))
        return self.version

    def kept(self) -> list[Snapshot]:
        """The weights that later steps sample with, the oldest first; none without a lag."""
        return list(self._snapshots)[-self._mismatch.lag :] if self._mismatch.lag else []

    def load(self, kept: Sequence[Snapshot]) -> None:
        """What `kept` gave."""
        if kept:
            self._snapshots.clear()
            self._snapshots.extend(kept)

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        """One at a time: streams share the copy, and each loads its own weights into it."""
        self._load(seed, step)
        yield from self._sampler.stream(requests, options, seed=seed, step=step, version=self.version)

    def sample(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> list[tuple[Completion, ...]]:
        return gathered(self.stream(requests, options, seed=seed, step=step, version=version), len(requests))

    def _rounded(self, weight: Tensor) -> Tensor:
        dtype = self._mismatch.dtype
        return weight.clone() if dtype is None else weight.to(dtype).to(weight.dtype)

    @torch.no_grad()
    def _load(self, seed: int, step: int) -> None:
        """The oldest snapshot, and on it the noise of this seed and step: no call depends on an earlier one."""
        for own, weight in zip(self._copy.parameters(), self._snapshots[0].weights, strict=True):
            own.copy_(weight)
        if self._mismatch.router_noise:
            random = torch.Generator().manual_seed(signed((seed << 32) + step))
            for router in self._routers:
                noise = torch.randn(router.weight.shape, generator=random, dtype=torch.float32)
                router.weight.add_(self._mismatch.router_noise * noise.to(router.weight))
