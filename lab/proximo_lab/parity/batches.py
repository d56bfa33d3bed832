"""Random batches: everything a loss or an advantage may be made of, drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import count

import torch
from torch import Tensor

from proximo import GRPO
from proximo import advantages as advantages_of

MAX_ROWS, MAX_WIDTH = 16, 24
LARGEST_LOG_RATIO = 1.5


@dataclass(frozen=True)
class Batch:
    """Rows of one optimizer step, float64. Off the mask stand ordinary numbers that nobody may read."""

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    entropy: Tensor
    values: Tensor
    old_values: Tensor
    advantages: Tensor
    mask: Tensor
    group: Tensor
    rewards: Tensor

    def rows(self, index: slice) -> "Batch":
        return Batch(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def halves(self) -> tuple["Batch", "Batch"]:
        """Two micro-batches of the same number of rows."""
        middle = len(self.mask) // 2
        return self.rows(slice(0, middle)), self.rows(slice(middle, None))

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())


Draw = Callable[[int], Batch]


def draw(
    seed: int,
    *,
    even: bool = False,
    singletons: bool = False,
    unscored: bool = False,
    emptied: bool = False,
    token_advantages: bool = False,
    dead_groups: bool = True,
    log_ratio_scale: float | None = None,
) -> Batch:
    """A batch; `even` makes all groups the same size and neighbours, as TRL has them.

    `singletons` adds groups of one, `unscored` rewards that are NaN, `emptied` rows without a sampled token.
    """
    random = torch.Generator().manual_seed(seed)
    group = _even_groups(random) if even else _uneven_groups(random, singletons)
    mask = _mask(random, len(group), emptied)
    shape = mask.shape
    rewards = _rewards(random, group, dead_groups)
    if unscored:
        rewards[_uniform(random, group.shape) < 0.2] = torch.nan
    advantages, _ = advantages_of(GRPO, rewards=rewards, group=group, mask=mask)
    if token_advantages:
        advantages = _normal(random, shape)

    old = -_normal(random, shape).abs() - 0.1
    largest = LARGEST_LOG_RATIO if log_ratio_scale is None else 2 * log_ratio_scale
    scales = (0.0, 1e-4, 1e-2, 0.1, 0.6) if log_ratio_scale is None else (log_ratio_scale,)
    return Batch(
        logprobs=old + (_one_of(random, scales, shape) * _normal(random, shape)).clamp(-largest, largest),
        old_logprobs=old,
        ref_logprobs=old + (0.3 * _normal(random, shape)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO),
        rollout_logprobs=old - (_one_of(random, (0.0, 1e-3, 0.05, 0.5), shape) * _normal(random, shape)).clamp(-1, 1),
        # Entropies that float32 can hold: TRL ranks them in float32.
        entropy=(3 * _normal(random, shape).abs()).float().double(),
        values=_normal(random, shape),
        old_values=_normal(random, shape),
        advantages=advantages,
        mask=mask,
        group=group,
        rewards=rewards,
    )


def such_that(condition: Callable[[Batch], bool], source: Draw) -> Draw:
    """The first batch from `source` that fulfils a condition."""
    return lambda seed: next(batch for attempt in count() if condition(batch := source(seed + 1_000_003 * attempt)))


def even(seed: int) -> Batch:
    return draw(seed, even=True)


pairs = such_that(lambda batch: len(batch.mask) % 2 == 0, even)
"""Batches of an even number of rows, to be halved."""


def group_size(batch: Batch) -> int:
    return int((batch.group == batch.group[0]).sum())


def sparse_rewards(batch: Batch) -> Tensor:
    """Each row's reward on its last sampled token."""
    order = batch.mask.cumsum(dim=1)
    last = batch.mask & (order == order[:, -1:])
    return torch.where(last, batch.rewards.unsqueeze(1), torch.zeros(()).double())


def _normal(random: torch.Generator, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64)


def _uniform(random: torch.Generator, shape: torch.Size) -> Tensor:
    return torch.rand(shape, generator=random, dtype=torch.float64)


def _integer(random: torch.Generator, low: int, high: int) -> int:
    """Draw an integer from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=random))


def _one_of(random: torch.Generator, choices: tuple[float, ...], shape: torch.Size) -> Tensor:
    """One of the choices for each row."""
    index = torch.randint(len(choices), (shape[0], 1), generator=random)
    return torch.tensor(choices, dtype=torch.float64)[index]


def _even_groups(random: torch.Generator) -> Tensor:
    size = _integer(random, 2, 4)
    return torch.arange(_integer(random, 1, MAX_ROWS // size)).repeat_interleave(size)


def _uneven_groups(random: torch.Generator, singletons: bool) -> Tensor:
    """Groups of 2 to 5 in any order, and one to three of a single row if asked for."""
    room = _integer(random, 2, MAX_ROWS)
    sizes = [1] * _integer(random, 1, 3) if singletons else []
    while not sizes or sum(sizes) + 2 <= room:
        sizes.append(_integer(random, 2, max(2, min(5, room - sum(sizes)))))
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return labels[torch.randperm(len(labels), generator=random)]


def _mask(random: torch.Generator, rows: int, emptied: bool) -> Tensor:
    """Sampled tokens: from one to the whole width; in a third of the batches with tool tokens between them."""
    width = _integer(random, 1, MAX_WIDTH)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=random)
    mask = torch.arange(width).expand(rows, width) < lengths
    if _integer(random, 0, 2) == 0:
        sampled = _uniform(random, mask.shape) > 0.25
        sampled[:, 0] = True
        mask = mask & sampled
    if emptied:
        mask = mask & (_uniform(random, torch.Size([rows, 1])) > 0.25)
        mask[0, 0] = True
    return mask


def _rewards(random: torch.Generator, group: Tensor, dead_groups: bool) -> Tensor:
    """Right or wrong, or any number; about a quarter of the groups dead unless told otherwise."""
    rewards = _normal(random, group.shape)
    if _integer(random, 0, 1):
        rewards = (rewards > 0).double()
    for label in group.unique():
        if dead_groups and _integer(random, 0, 3) == 0:
            rewards[group == label] = rewards[group == label][0].clone()
        elif not dead_groups:
            rewards[group == label] = _normal(random, rewards[group == label].shape)
    return rewards
