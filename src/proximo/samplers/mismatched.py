"""A sampler that is not quite the policy, on purpose: to study what that does to learning, and what repairs it.

Engines differ from learners by accident: another precision, another kernel, weights that arrived late. Here the
difference is known and of a chosen size, and a run that has it repeats to the last bit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from proximo.models import frozen_copy
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.routing import needed_routers
from proximo.samplers.embedded import local_sampler
from proximo.samplers.rng import signed
from proximo.samplers.sampler import (
    More,
    RunSamplers,
    SampledPolicy,
    SamplingOptions,
    Snapshot,
    Stream,
    gathered,
    streamed,
    takes_more,
)
from proximo.types import Completion, Request


@dataclass(frozen=True)
class Mismatched:
    """A copy of the policy that differs from it in a chosen way samples the rollouts; evaluation is of the policy
    itself. With the defaults it differs in nothing: the control of a study.

    Example: Mismatched(precision="bfloat16", lag=1)
    """

    precision: Literal["bfloat16", "float16"] | None = None
    """Precision that the sampler's weights are rounded to; the arithmetic stays float32, so that only the weights
    differ. None: they are not rounded."""
    router_noise: float = 0.0
    """Standard deviation of Gaussian noise on the weights of a mixture's routers, drawn anew for each round. Untrained
    routers have weights of about 0.02."""
    lag: int = 0
    """Age of the sampler's weights, in training steps; the first steps sample with the weights of the start."""

    keeps_older_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.router_noise < float("inf"):
            raise ValueError(f"sampler.router_noise is {self.router_noise}: give a standard deviation, 0 or more")
        if self.lag < 0:
            raise ValueError(f"sampler.lag is {self.lag}: give a number of steps, 0 or more")

    @property
    def dtype(self) -> torch.dtype | None:
        return {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.precision]

    @property
    def copies(self) -> int:
        """The copy that samples, the newest snapshot, and one for each step of the lag."""
        return self.lag + 2

    def build(
        self, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        evaluation = local_sampler(policy.model, tokenizer, slots=slots)
        training = MismatchedSampler(policy, tokenizer, self, slots=slots, record_routes=record_routes)
        return RunSamplers(training, evaluation, differs=True, history=training)


class MismatchedSampler:
    """Samples from a copy of the policy that differs from it as `options` say.

    Completions carry the log-probs that they were really drawn with, and the version of the weights they were really
    drawn from, whatever the caller names.
    """

    def __init__(
        self,
        policy: SampledPolicy,
        tokenizer: PreTrainedTokenizerBase,
        options: Mismatched,
        *,
        slots: int = 128,
        record_routes: bool = False,
    ) -> None:
        self._options = options
        self._copy = frozen_copy(policy.model)
        noise = options.router_noise
        self._routers = needed_routers(self._copy, f"sampler.router_noise is {noise}") if noise else []
        self._sampler = local_sampler(self._copy, tokenizer, slots=slots, record_routes=record_routes)
        self._snapshots: deque[Snapshot] = deque(maxlen=options.lag + 1)
        self.refresh(policy, 0)

    @property
    def repeats(self) -> bool:
        return True

    @property
    def version(self) -> int:
        """Version of the weights it samples with."""
        return self._snapshots[0].version

    @torch.no_grad()
    def refresh(self, policy: SampledPolicy, version: int) -> int:
        """Take the weights, once a training step before its rollouts: the lag counts these calls."""
        # Parameters, not a state dict: weights that are tied are kept once.
        self._snapshots.append(Snapshot(version, [self._rounded(each) for each in policy.model.parameters()]))
        return self.version

    def kept(self) -> list[Snapshot]:
        """The weights that later steps sample with, the oldest first; none without a lag."""
        return list(self._snapshots)[-self._options.lag :] if self._options.lag else []

    def load(self, kept: Sequence[Snapshot]) -> None:
        """Put back what `kept` returned."""
        if kept:
            self._snapshots.clear()
            self._snapshots.extend(kept)

    @property
    def takes_more(self) -> bool:
        return takes_more(self._sampler)

    def stream(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        *,
        seed: int,
        step: int,
        version: int = 0,
        more: More | None = None,
    ) -> Stream:
        """One at a time: streams share the copy, and each loads its own weights into it."""
        self._load(seed, step)
        version = self.version
        yield from streamed(self._sampler, requests, options, seed=seed, step=step, version=version, more=more)

    def sample(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> list[tuple[Completion, ...]]:
        return gathered(self.stream(requests, options, seed=seed, step=step, version=version), len(requests))

    def _rounded(self, weight: Tensor) -> Tensor:
        dtype = self._options.dtype
        return weight.clone() if dtype is None else weight.to(dtype).to(weight.dtype)

    @torch.no_grad()
    def _load(self, seed: int, step: int) -> None:
        """The oldest snapshot, and on it the noise of this seed and step: no call depends on an earlier one."""
        for parameter, weight in zip(self._copy.parameters(), self._snapshots[0].weights, strict=True):
            parameter.copy_(weight)
        if self._options.router_noise:
            random = torch.Generator().manual_seed(signed((seed << 32) + step))
            for router in self._routers:
                noise = torch.randn(router.weight.shape, generator=random, dtype=torch.float32)
                router.weight.add_(self._options.router_noise * noise.to(router.weight))
