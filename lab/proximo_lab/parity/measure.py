"""Runs two implementations of one thing on the same batches and keeps how far they are apart."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from statistics import median

import torch
from torch import Tensor

from proximo import Algorithm, advantages, policy_loss
from proximo.losses import KlReward
from proximo_lab.parity.batches import Batch, Draw, draw

BATCHES = 200
FIRST_SEED = 20_260
TOLERANCE = 1e-6

Measured = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Agreement:
    """Two that ought to be the same: the largest absolute differences over all batches."""

    ours: str
    theirs: str
    batches: int
    value: float
    gradient: float | None


@dataclass(frozen=True)
class Difference:
    """Two that differ on purpose: how much, relative to the larger of the two norms."""

    topic: str
    ours: str
    theirs: str
    why: str
    of: str
    """Quantity that was compared: gradient, advantage, penalty."""
    share: float
    """Share of batches in which they differ by more than the tolerance."""
    median: float
    """Median difference over those batches."""
    largest: float


@dataclass
class Report:
    """Findings of one worker."""

    system: str
    packages: tuple[str, ...]
    agreements: list[Agreement] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def agrees(
        self, ours: str, theirs: str, us: Measured, them: Measured, source: Draw = draw, leaf: str | None = "logprobs"
    ) -> None:
        """Hold `us` against `them`; `leaf` is the field of the batch whose gradient is compared, None for none."""
        values, gradients = [], []
        for batch in _batches(source):
            our_value, our_gradient = _differentiated(us, batch, leaf)
            their_value, their_gradient = _differentiated(them, batch, leaf)
            values.append(float((our_value - their_value).abs().max()))
            gradients.append(float((our_gradient - their_gradient).abs().max()))
        worst_gradient = None if leaf is None else _worst(gradients)
        self.agreements.append(Agreement(ours, theirs, len(values), _worst(values), worst_gradient))

    def differs(
        self,
        topic: str,
        ours: str,
        theirs: str,
        us: Measured,
        them: Measured,
        why: str,
        source: Draw = draw,
        leaf: str | None = "logprobs",
        of: str = "gradient",
    ) -> None:
        """Measure a difference that is known and meant."""
        sizes = []
        for batch in _batches(source):
            # Without a gradient to compare, the values themselves are.
            pair = [_differentiated(one, batch, leaf)[0 if leaf is None else 1] for one in (us, them)]
            largest = max(float(pair[0].norm()), float(pair[1].norm()))
            sizes.append(float((pair[0] - pair[1]).norm()) / largest if largest > TOLERANCE else 0.0)
        apart = [size for size in sizes if not size <= TOLERANCE] or [0.0]
        share = sum(not size <= TOLERANCE for size in sizes) / len(sizes)
        self.differences.append(Difference(topic, ours, theirs, why, of, share, median(apart), _worst(apart)))

    def print(self) -> None:
        versions = {name: version(name) for name in self.packages}
        print(json.dumps({**asdict(self), "packages": versions}))


def our_loss(algorithm: Algorithm) -> Measured:
    """`proximo.policy_loss` with everything the batch has."""

    def loss(batch: Batch) -> Tensor:
        return policy_loss(
            algorithm,
            logprobs=batch.logprobs,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            entropy=batch.entropy,
            mask=batch.mask,
            group=batch.group,
        )[0]

    return loss


def our_credit(algorithm: Algorithm, kl: KlReward | None = None) -> Measured:
    """`proximo.advantages`, with an unscored row's NaN as TRL has it: 0."""

    def credit(batch: Batch) -> Tensor:
        token_rewards = None if kl is None else kl(batch.old_logprobs, batch.ref_logprobs, batch.mask)
        return advantages(
            algorithm,
            rewards=batch.rewards,
            group=batch.group,
            mask=batch.mask,
            values=batch.values,
            token_rewards=token_rewards,
        )[0].nan_to_num(nan=0.0)

    return credit


def _batches(source: Draw):
    return (source(FIRST_SEED + number) for number in range(BATCHES))


def _differentiated(measured: Measured, batch: Batch, leaf: str | None) -> tuple[Tensor, Tensor]:
    """The value, and its gradient by one field of the batch (0 where there is none to take)."""
    if leaf is None:
        return measured(batch).detach(), torch.zeros(())
    variable = getattr(batch, leaf).clone().requires_grad_()
    value = measured(replace(batch, **{leaf: variable}))
    (gradient,) = torch.autograd.grad(value, variable)
    return value.detach(), gradient


def _worst(sizes: list[float]) -> float:
    """The maximum, which NaN must not slip through."""
    return max(sizes, key=lambda size: float("inf") if size != size else size)
