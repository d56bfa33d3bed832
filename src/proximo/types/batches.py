"""Tensors that the learner computes with: a batch of rows, and what was measured on it."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from proximo.types import Group


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device. A copy to a GPU starts and is not waited for: from ordinary memory it would stop all work
    there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Batch:
    """Completions as tensors, aligned with their tokens; prompts are kept once per group.

    Rows hold completions only. What is None has not been computed, because nothing needs it.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: Tensor
    """[B, T]; 0 beyond a row's length."""
    lengths: Tensor
    """[B]: tokens of each row, sampled or not."""
    sampled: Tensor
    """[B, T]: tokens the policy sampled; padding and a tool's or an environment's tokens are not."""
    mask: Tensor
    """[B, T]: sampled tokens that take part in the loss."""
    group: Tensor
    """[B]: which prompt."""
    outcome: Tensor
    """[B]; NaN: unscored."""
    rewards: Tensor
    """[B], shaped; NaN: unscored."""
    truncated: Tensor
    """[B]"""
    version: Tensor
    """[B]: number of updates that the policy had seen when it generated the row."""
    rollout_logprobs: Tensor
    """[B, T]: the sampler's own."""
    old_logprobs: Tensor
    """[B, T]: of the policy that sampled; the sampler's own where those are trusted."""
    advantages: Tensor
    """[B, T]"""
    rollout_entropy: Tensor | None = None
    """[B, T]: the sampling policy's, before each token; NaN in rows whose sampler does not say."""
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    groups: tuple[Group, ...] = ()
    """Groups that the rows come from, one for each prompt; empty where they were made of tensors alone."""
    sibling: Tensor | None = None
    """[B]: which of its group's rollouts."""
    routes: Tensor | None = None
    """[B, T, L, K]: the experts that completion tokens are sent to; -1: unknown. None: where their routers say."""
    prompt_routes: tuple[Tensor, ...] = ()
    """The same of each prompt."""
    turn_rewards: Tensor | None = None
    """[B, T]: what each turn earned, at its last token; None where turns earned nothing."""
    step_rewards: Tensor | None = None
    """[B, T]: reward of each graded step at its last token, NaN elsewhere; None where no completion has any."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sampled_lengths(self) -> Tensor:
        """[B]: sampled tokens of each row, which is the length that is shown and penalised."""
        return self.sampled.sum(dim=1)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device, without waiting for what that is doing."""
        return self._each(lambda tensor: to_device(tensor, device))

    def rows(self, index: Tensor) -> "Batch":
        """Some of the rows; prompts are shared, so their numbers stay."""
        return self._each(lambda tensor: tensor[index.to(tensor.device)])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        picked = {
            each.name: change(value) for each in fields(self) if isinstance(value := getattr(self, each.name), Tensor)
        }
        return replace(self, **picked)


@dataclass(frozen=True)
class Stats:
    """Statistics of one loss call, as numbers that add up exactly over micro-batches.

    Tensors stay on their device until `floats` is called, so that counting costs no synchronisation.

    Example: stats = stats_of_first_half + stats_of_second_half; stats.floats()["blocked"] -> 0.031
    """

    totals: dict[str, Tensor] = field(default_factory=dict)
    """Losses and counts: added as they are."""
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over sampled tokens: read as means over `totals["tokens"]`."""
    peaks: dict[str, Tensor] = field(default_factory=dict)
    """Largest values."""

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(
            totals=_merged(self.totals, other.totals, torch.add),
            token_sums=_merged(self.token_sums, other.token_sums, torch.add),
            peaks=_merged(self.peaks, other.peaks, torch.maximum),
        )

    def double(self) -> "Stats":
        """Statistics in float64, to be added up without rounding."""
        kinds = (self.totals, self.token_sums, self.peaks)
        return Stats(*({name: value.double() for name, value in each.items()} for each in kinds))

    def floats(self) -> dict[str, float]:
        """Every statistic by name; shares and means are over the sampled tokens."""
        tokens = max(float(self.totals.get("tokens", 0)), 1.0)
        return (
            {name: float(value) for name, value in self.totals.items()}
            | {name: float(value) / tokens for name, value in self.token_sums.items()}
            | {name: float(value) for name, value in self.peaks.items()}
        )


def _merged(ours: dict[str, Tensor], theirs: dict[str, Tensor], how) -> dict[str, Tensor]:
    both = {name: how(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    return ours | theirs | both
