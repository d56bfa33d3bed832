"""Stage 3, for completions graded as a whole: one advantage per row.

Each piece turns `Feedback` into a number per row, relative to its siblings. Edge cases are the same
for all: an unscored row (NaN reward) is left out and stays NaN, and a group whose
scored rewards are all equal gets exactly 0, which covers a group of one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proximo.losses.arithmetic import group_index, siblings
from proximo.losses.pieces.protocols import AdvantageProtocol, OtherModel, Peers
from proximo.losses.records import Feedback
from proximo.types.tensor_types import Bool, Float

__all__ = [
    "BatchScaled",
    "BestAgainstWorst",
    "BetaNormalized",
    "GroupCentred",
    "GroupNormalized",
    "Imitation",
    "LeaveOneOut",
    "LiveScaled",
]


@dataclass(frozen=True)
class GroupNormalized:
    """(R − mean of the group) / (std of the group + epsilon). GRPO, DAPO, GSPO, SAPO.

    The papers fix neither ddof nor epsilon; the reference systems use ddof 1.
    """

    ddof: int = 1
    """Delta degrees of freedom of the standard deviation: 1 divides by n − 1, 0 by n."""
    epsilon: float = 1e-6
    """Small number added to the standard deviation."""
    by_group_std: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers(
        'scale_rewards "group": ddof 1, epsilon 1e-4',
        "adv_estimator grpo: ddof 1, epsilon 1e-6; a group of one gets its raw reward",
    )

    def __post_init__(self) -> None:
        _check_scale(self.ddof, self.epsilon)

    @property
    def formula(self) -> str:
        return f"(R − group mean) / (group std + {self.epsilon:g}),  ddof {self.ddof};  0 if all R are equal"

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        group = siblings(feedback.totals(), feedback.group)
        std = (group.square_sum / (group.count - self.ddof).clamp(min=1)).sqrt()
        return _settled(group.deviation / (std + self.epsilon), group.unanimous, feedback)


@dataclass(frozen=True)
class GroupCentred:
    """R − mean of the group, not divided by anything. Dr. GRPO."""

    formula: ClassVar[str] = "R − group mean"
    peers: ClassVar[Peers] = Peers('scale_rewards "none"', "norm_adv_by_std_in_grpo False (default True)")

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        group = siblings(feedback.totals(), feedback.group)
        return _settled(group.deviation, group.unanimous, feedback)


@dataclass(frozen=True)
class LeaveOneOut:
    """R − mean of the siblings without this row, which is G/(G−1) times GroupCentred. RLOO."""

    formula: ClassVar[str] = "R − mean of the other siblings"
    peers: ClassVar[Peers] = Peers("RLOOTrainer", "adv_estimator rloo: a group of one gets its raw reward")

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        group = siblings(feedback.totals(), feedback.group)
        others = group.count / (group.count - 1).clamp(min=1)
        return _settled(group.deviation * others, group.unanimous, feedback)


@dataclass(frozen=True)
class BatchScaled:
    """(R − mean of the group) / (std of all rewards in the batch + epsilon). Lite PPO."""

    ddof: int = 1
    """Delta degrees of freedom of the standard deviation: 1 divides by n − 1, 0 by n."""
    epsilon: float = 1e-6
    """Small number added to the standard deviation."""
    peers: ClassVar[Peers] = Peers('scale_rewards "batch": epsilon 1e-4', "none")

    def __post_init__(self) -> None:
        _check_scale(self.ddof, self.epsilon)

    @property
    def formula(self) -> str:
        return f"(R − group mean) / (batch std of R + {self.epsilon:g}),  ddof {self.ddof}"

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        totals = feedback.totals()
        group = siblings(totals, feedback.group)
        batch = siblings(totals, torch.zeros_like(feedback.group))
        std = (batch.square_sum / (batch.count - self.ddof).clamp(min=1)).sqrt()
        return _settled(group.deviation / (std + self.epsilon), group.unanimous, feedback)


@dataclass(frozen=True)
class LiveScaled:
    """(R − mean of the group) · scored rows / rows in groups whose rewards differ. GPG's α.

    Compensates for groups without gradient; computed over the rollout batch, before any are filtered out.
    """

    formula: ClassVar[str] = "(R − group mean) · rows / rows in groups whose R differ"
    peers: ClassVar[Peers] = Peers("none", "adv_estimator gpg: rows / rows with non-zero reward, another quantity")

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        group = siblings(feedback.totals(), feedback.group)
        live = feedback.scored & ~group.unanimous
        scale = feedback.scored.sum() / live.sum().clamp(min=1)
        return _settled(group.deviation * scale, group.unanimous, feedback)


@dataclass(frozen=True)
class BetaNormalized:
    """(R − p) / f(p; α, β): p the group's success rate, f a Beta density fitted to the batch's rates. BNPO.

    α = 1 + a/3 and β = 1 + b/3, with (a, b) the Beta law of the batch's p by moments: among all Beta densities the
    one with which the gradient's variance, E[p(1 − p) / f(p)²], is least. Where the rates of the batch are all equal
    there is nothing to fit, and α = β = 1 leaves R − p unchanged.
    """

    formula: ClassVar[str] = "(R − p) / Beta density(p),  p the group's mean"
    peers: ClassVar[Peers] = Peers('none: loss_type "bnpo" is a token mean per micro-batch, unrelated', "none")

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        totals = feedback.totals()
        known = totals[feedback.scored]
        if len(known) and (known.min() < 0 or known.max() > 1):
            raise ValueError(
                f"rewards run from {known.min().item():g} to {known.max().item():g}: BetaNormalized takes "
                "rewards from 0 to 1; rescale them or choose GroupNormalized"
            )
        group = siblings(totals, feedback.group)
        alpha, beta = self.fit(group.mean, feedback)
        rate = group.mean.clamp(1e-12, 1 - 1e-12)
        log_density = (alpha - 1) * rate.log() + (beta - 1) * (1 - rate).log() - _log_beta(alpha, beta)
        return _settled(group.deviation / log_density.exp(), group.unanimous, feedback)

    @staticmethod
    def fit(rate_of_row: Float[Tensor, " B"], feedback: Feedback) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """α and β from the success rates of the groups that have a scored row."""
        index, num_groups = group_index(feedback.group)
        rates = rate_of_row.new_full((num_groups,), torch.nan)
        rates[index[feedback.scored]] = rate_of_row[feedback.scored]
        rates = rates[~torch.isnan(rates)]
        one = rate_of_row.new_ones(())
        if len(rates) < 2 or rates.max() == rates.min():
            return one, one
        mean, variance = rates.mean(), rates.var(correction=1)
        concentration = (mean * (1 - mean) / variance - 1).clamp(min=0)
        return 1 + mean * concentration / 3, 1 + (1 - mean) * concentration / 3


@dataclass(frozen=True)
class Imitation:
    """1 for every scored row: the log-probs of all rows that train are raised alike. Rejection-sampling fine-tuning."""

    compares: ClassVar[bool] = False
    formula: ClassVar[str] = "1"
    peers: ClassVar[Peers] = Peers("none on the loop; SFTTrainer on the kept completions", "none on the loop")

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        return torch.ones_like(feedback.rewards).where(feedback.scored, torch.nan)


@dataclass(frozen=True)
class BestAgainstWorst:
    """±n·beta·σ(−beta·margin) on the best and the worst of a group of n, 0 on the others: the gradient of DPO's loss.

    The margin is how much more the policy moved towards the best than towards the worst, in log π − log π_ref of whole
    completions. Of equals the first counts. n makes up for the other rows in a mean over rows.
    """

    beta: float = 0.1
    """Strength of the implicit KL to the reference: smaller values let the policy move further."""
    needs_logprobs: ClassVar[tuple[OtherModel, ...]] = ("ref_logprobs",)
    peers: ClassVar[Peers] = Peers(
        "experimental OnlineDPOTrainer: beta 0.1, two completions and a judge or reward", "none"
    )

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"advantage.beta is {self.beta}: it must be positive, say 0.1")

    @property
    def formula(self) -> str:
        margin = "log π/π_ref of the best − of the worst"
        push = f"n·{self.beta:g}·σ( −{self.beta:g}·({margin}) )"
        return f"±{push} on the best and the worst of a group of n, else 0"

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        rewards, moved = feedback.totals(), feedback.gap_to("ref_logprobs", self).sum(dim=1)
        group = siblings(rewards, feedback.group)
        advantages = torch.zeros_like(rewards)
        for number in feedback.group[feedback.scored & ~group.unanimous].unique():
            rows = (feedback.scored & (feedback.group == number)).nonzero().squeeze(1)
            best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
            push = len(rows) * self.beta * torch.sigmoid(-self.beta * (moved[best] - moved[worst]))
            advantages[best], advantages[worst] = push, -push
        return _settled(advantages, group.unanimous, feedback)


def _log_beta(alpha: Float[Tensor, ""], beta: Float[Tensor, ""]) -> Float[Tensor, ""]:
    return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)


def _settled(advantages: Float[Tensor, " B"], unanimous: Bool[Tensor, " B"], feedback: Feedback) -> Float[Tensor, " B"]:
    """Exactly 0 in a group without differences, NaN on unscored rows."""
    return advantages.masked_fill(unanimous, 0.0).masked_fill(~feedback.scored, torch.nan)


def _check_scale(ddof: int, epsilon: float) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"advantage.ddof is {ddof}: 0 divides by G, 1 by G − 1")
    if epsilon < 0:
        raise ValueError(f"advantage.epsilon is {epsilon}: it is added to the std and cannot be negative")


SequenceAdvantage = (
    GroupNormalized
    | GroupCentred
    | LeaveOneOut
    | BatchScaled
    | LiveScaled
    | BetaNormalized
    | Imitation
    | BestAgainstWorst
    | AdvantageProtocol
)
