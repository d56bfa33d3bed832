"""Stage 3, for single tokens: returns, GAE, process rewards, and transformations of any advantage.

Only sampled tokens count as time steps. Prompt, tool and environment tokens are skipped: they earn
nothing, their value is not read, and they are not discounted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens, answer_of, sampled, siblings
from proximo.losses.pieces.advantages import GroupNormalized, SequenceAdvantage
from proximo.losses.pieces.protocols import AdvantageProtocol, AdvantageTraits, OtherModel, Peers, formula_of
from proximo.losses.records import Credit, Feedback
from proximo.types.tensor_types import Float

__all__ = ["Gae", "ProcessNormalized", "ReturnToGo", "SequenceWhitened", "SignScaled", "TeacherKl", "TokenWhitened"]


def earned(feedback: Feedback) -> Tokens:
    """Token rewards with the task score on the last sampled token of each row."""
    order = feedback.mask.cumsum(dim=1)
    is_last = feedback.mask & (order == order[:, -1:])
    return feedback.step_rewards() + sampled(feedback.rewards.unsqueeze(1).expand(is_last.shape), is_last)


def backward_sums(values: Tokens, factor: Float[Tensor, " B"], mask: Mask) -> Tokens:
    """x_t + factor · (the sum at the next sampled token); 0 outside the mask."""
    total = torch.zeros_like(factor)
    sums = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        total = torch.where(mask[:, t], values[:, t] + factor * total, total)
        sums[:, t] = total
    return sampled(sums, mask)


def next_sampled(values: Tokens, mask: Mask) -> Tokens:
    """The value at the next sampled token of the row; 0 after the last one."""
    upcoming = torch.zeros_like(values[:, 0]) if values.shape[1] else values.new_zeros(len(values))
    following = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        following[:, t] = upcoming
        upcoming = torch.where(mask[:, t], values[:, t], upcoming)
    return following


def whiten(values: Float[Tensor, " N"], epsilon: float) -> Float[Tensor, " N"]:
    """Mean 0 and unbiased variance 1; exactly 0 if all values are equal."""
    if len(values) < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.mean()) * torch.rsqrt(values.var(correction=1) + epsilon)


def scattered(values: Sequence[Tensor], where: Sequence[Tensor], flat: Float[Tensor, " N"]) -> list[Tensor]:
    """Parts of a batch, [B, T] each, with the values `flat` over all parts written to the positions `where`."""
    pieces = flat.split([int(each.sum()) for each in where])
    return [each.masked_scatter(*into) for each, *into in zip(values, where, pieces, strict=True)]


@dataclass(frozen=True)
class ReturnToGo:
    """The discounted sum of the rewards from this token on. REINFORCE++."""

    discount: float = 1.0
    """Discount γ per token. 1: no discount."""
    per_token: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers("none", "adv_estimator reinforce_plus_plus (always whitened)")

    def __post_init__(self) -> None:
        _check_unit("advantage.discount", self.discount)

    @property
    def formula(self) -> str:
        return f"R_t + R_t+1 + …,  discount {self.discount:g}"

    def __call__(self, feedback: Feedback) -> Credit:
        rewards = earned(feedback)
        returns = backward_sums(rewards, rewards.new_full((len(rewards),), self.discount), feedback.mask)
        return Credit(returns, returns)


@dataclass(frozen=True)
class Gae:
    """Generalised advantage estimation: Σ_l (γλ)^l δ_{t+l}, δ_t = R_t + γV_{t+1} − V_t, terminal value 0.

    decay 0 is the one-step TD error, decay 1 the Monte-Carlo return minus the value.
    """

    discount: float = 1.0
    """Discount γ per token. 1: no discount."""
    decay: float = 0.95
    """λ of the policy's advantages, from 0 to 1."""
    length_adaptive: float | None = None
    """VAPO's α: λ = 1 − 1/(α·length) for each completion, 0 for short ones, instead of `decay`."""
    critic_decay: float | None = None
    """λ of the value model's targets, if different from the policy's. VAPO: 1."""
    per_token: ClassVar[bool] = True
    needs_values: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers(
        "none: PPOTrainer was removed", "adv_estimator gae: gamma 1, lam 1.0 where PPO has 0.95"
    )

    def __post_init__(self) -> None:
        _check_unit("advantage.discount", self.discount)
        _check_unit("advantage.decay", self.decay)
        if self.critic_decay is not None:
            _check_unit("advantage.critic_decay", self.critic_decay)
        if self.length_adaptive is not None and self.length_adaptive <= 0:
            raise ValueError(f"advantage.length_adaptive is {self.length_adaptive}: give α > 0, say 0.05, or None")

    @property
    def formula(self) -> str:
        decay = f"{self.decay:g}" if self.length_adaptive is None else f"1 − 1/({self.length_adaptive:g}·|y|)"
        critic = "" if self.critic_decay is None else f" (critic {self.critic_decay:g})"
        return f"Σ_l (γλ)^l δ_t+l,  δ_t = R_t + γ·V_t+1 − V_t,  γ = {self.discount:g}, λ = {decay}{critic}"

    def __call__(self, feedback: Feedback) -> Credit:
        if feedback.values is None:
            raise ValueError("values is None: Gae needs the value model's estimates, one per token")
        mask = feedback.mask
        rewards = earned(feedback)
        values = sampled(feedback.values.to(rewards.dtype), mask)
        errors = sampled(rewards + self.discount * next_sampled(values, mask) - values, mask)

        advantages = backward_sums(errors, self.discount * self.decays(mask).to(errors.dtype), mask)
        critic = advantages
        if self.critic_decay is not None:
            decays = errors.new_full((len(errors),), self.critic_decay)
            critic = backward_sums(errors, self.discount * decays, mask)
        return Credit(advantages, critic + values)

    def decays(self, mask: Mask) -> Float[Tensor, " B"]:
        """λ of each row's advantages."""
        lengths = mask.sum(dim=1).double()
        if self.length_adaptive is None:
            return torch.full_like(lengths, self.decay)
        return 1 - 1 / (self.length_adaptive * lengths).clamp(min=1)


@dataclass(frozen=True)
class ProcessNormalized:
    """Step rewards normalised over all steps of the group; a token gets the sum over the steps that end at or after it.

    Steps are the tokens where `token_rewards` is a number: give NaN elsewhere, since a step may earn 0.
    DeepSeekMath, section 4.1.3. If all steps of a group earn the same, advantages are 0.
    """

    ddof: int = 1
    """Delta degrees of freedom of the standard deviation: 1 divides by n − 1, 0 by n."""
    epsilon: float = 1e-6
    """Small number added to the standard deviation."""
    per_token: ClassVar[bool] = True
    needs_step_rewards: ClassVar[bool] = True
    peers: ClassVar[Peers] = Peers("none", "none")

    @property
    def formula(self) -> str:
        normalised = f"(R_step − group mean) / (group std + {self.epsilon:g})"
        return f"Σ of the steps still to end of {normalised},  ddof {self.ddof}"

    def __call__(self, feedback: Feedback) -> Credit:
        return self.over([feedback])[0]

    def over(self, parts: Sequence[Feedback]) -> list[Credit]:
        """Credit of a batch in parts; groups are normalised over all parts."""
        where = [self._steps(part) for part in parts]
        rewards = torch.cat([part.step_rewards()[steps] for part, steps in zip(parts, where, strict=True)])
        groups = [part.group[steps.nonzero()[:, 0]] for part, steps in zip(parts, where, strict=True)]
        group = siblings(rewards, torch.cat(groups))
        std = (group.square_sum / (group.count - self.ddof).clamp(min=1)).sqrt()
        normalised = (group.deviation / (std + self.epsilon)).masked_fill(group.unanimous, 0.0)
        blanks = [torch.zeros_like(part.mask, dtype=rewards.dtype) for part in parts]
        return [
            Credit(backward_sums(steps, steps.new_ones(len(steps)), part.mask))
            for part, steps in zip(parts, scattered(blanks, where, normalised), strict=True)
        ]

    @staticmethod
    def _steps(feedback: Feedback) -> Mask:
        if feedback.token_rewards is None:
            raise ValueError("token_rewards is None: ProcessNormalized needs the reward of each step, NaN elsewhere")
        return feedback.mask & ~feedback.token_rewards.isnan() & feedback.scored.unsqueeze(1)


class _OfAnother:
    """Traits that an advantage made from another one takes from it."""

    of: Any
    """The other advantage; None where it may be left out."""

    @property
    def per_token(self) -> bool:
        return AdvantageTraits.read(self.of).per_token

    @property
    def needs_values(self) -> bool:
        return AdvantageTraits.read(self.of).needs_values

    @property
    def discount(self) -> float:
        return AdvantageTraits.read(self.of).discount


@dataclass(frozen=True)
class TokenWhitened(_OfAnother):
    """(A − mean) / sqrt(variance + epsilon) over all sampled tokens of the batch, so long completions count more."""

    of: "SequenceAdvantage | ReturnToGo | Gae" = field(default_factory=Gae)
    """Advantage that is whitened."""
    epsilon: float = 1e-8
    """Small number added to the variance."""
    peers: ClassVar[Peers] = Peers("none", "built into gae and reinforce_plus_plus*: unbiased, 1e-8, as here")

    @property
    def formula(self) -> str:
        return f"whitened over all sampled tokens: {formula_of(self.of)}"

    def __call__(self, feedback: Feedback) -> Credit:
        return self.over([feedback])[0]

    def over(self, parts: Sequence[Feedback]) -> list[Credit]:
        """Credit of a batch in parts; mean and variance are over all parts."""
        credits = assign_parts(self.of, parts)
        counted = [part.mask & part.scored.unsqueeze(1) for part in parts]
        known = torch.cat([credit.advantages[where] for credit, where in zip(credits, counted, strict=True)])
        whitened = scattered([credit.advantages for credit in credits], counted, whiten(known, self.epsilon))
        return [Credit(values, credit.returns) for values, credit in zip(whitened, credits, strict=True)]


@dataclass(frozen=True)
class SequenceWhitened:
    """(A − mean) / sqrt(variance + epsilon) over the rows of the batch, each counting once."""

    of: SequenceAdvantage = field(default_factory=GroupNormalized)
    """Advantage that is whitened."""
    epsilon: float = 1e-8
    """Small number added to the variance."""
    peers: ClassVar[Peers] = Peers("RLOOTrainer's normalize_advantages: epsilon 1e-4 on the std", "none")

    @property
    def formula(self) -> str:
        return f"whitened over all rows: {formula_of(self.of)}"

    def __call__(self, feedback: Feedback) -> Float[Tensor, " B"]:
        advantages = _of_rows(self.of, feedback)
        return advantages.masked_scatter(feedback.scored, whiten(advantages[feedback.scored], self.epsilon))


@dataclass(frozen=True)
class SignScaled(_OfAnother):
    """A · positive where A > 0, A · negative where A < 0. Some implementations of SAPO scale advantages this way."""

    of: "SequenceAdvantage | ReturnToGo | Gae" = field(default_factory=GroupNormalized)
    """Advantage that is scaled."""
    positive: float = 1.0
    """Factor for advantages above 0."""
    negative: float = 1.0
    """Factor for advantages below 0."""
    peers: ClassVar[Peers] = Peers("none", "none")

    @property
    def formula(self) -> str:
        return f"{formula_of(self.of)};  ·{self.positive:g} if A > 0, ·{self.negative:g} if A < 0"

    def __call__(self, feedback: Feedback) -> Credit:
        return self.over([feedback])[0]

    def over(self, parts: Sequence[Feedback]) -> list[Credit]:
        """Credit of a batch in parts."""
        return [
            Credit(torch.where(each.advantages > 0, self.positive, self.negative) * each.advantages, each.returns)
            for each in assign_parts(self.of, parts)
        ]


@dataclass(frozen=True)
class TeacherKl(_OfAnother):
    """coefficient · (log π_teacher − log π_old) at each token: minus the reverse KL. On-policy distillation."""

    coefficient: float = 1.0
    """Strength of the teacher's part."""
    kl_discount: float = 0.0
    """Discount of later tokens' KL. 0: each token counts for itself; 1: the exact gradient of a completion's KL."""
    of: "SequenceAdvantage | ReturnToGo | Gae | None" = None
    """Advantage that the teacher's part is added to, from the rewards. None: rewards play no part."""
    needs_logprobs: ClassVar[tuple[OtherModel, ...]] = ("teacher_logprobs",)
    peers: ClassVar[Peers] = Peers(
        "none; GKDTrainer and GOLDTrainer minimise a divergence over the whole vocabulary",
        "distillation: other losses over the teacher's top tokens",
    )

    def __post_init__(self) -> None:
        _check_unit("advantage.kl_discount", self.kl_discount)
        if self.coefficient <= 0:
            raise ValueError(f"advantage.coefficient is {self.coefficient}: it must be positive, say 1")

    @property
    def formula(self) -> str:
        later = "" if self.kl_discount == 0 else f", and later tokens' by {self.kl_discount:g}"
        rewarded = "" if self.of is None else f" + {formula_of(self.of)}"
        return f"{self.coefficient:g} · (log π_teacher − log π_old){later}{rewarded}"

    @property
    def per_token(self) -> bool:
        return True

    def __call__(self, feedback: Feedback) -> Credit:
        return self.over([feedback])[0]

    def over(self, parts: Sequence[Feedback]) -> list[Credit]:
        """Credit of a batch in parts."""
        gains = [-self.coefficient * part.gap_to("teacher_logprobs", self) for part in parts]
        factors = [gain.new_full((len(gain),), self.kl_discount) for gain in gains]
        gains = list(map(backward_sums, gains, factors, [part.mask for part in parts]))
        if self.of is None:
            return [Credit(gain) for gain in gains]
        rewarded = assign_parts(self.of, parts)
        return [Credit(gain + each.advantages, each.returns) for gain, each in zip(gains, rewarded, strict=True)]


Advantage = (
    SequenceAdvantage | ReturnToGo | Gae | ProcessNormalized | TokenWhitened | SequenceWhitened | SignScaled | TeacherKl
)


def assign(advantage: Advantage, feedback: Feedback) -> Credit:
    """Any piece's answer per token: 0 off the mask, NaN all along an unscored row."""
    return _per_token(advantage, advantage(feedback), feedback)


def assign_parts(advantage: Advantage, parts: Sequence[Feedback]) -> list[Credit]:
    """The same of a batch whose rows come in parts of different widths: what compares rows sees all of them."""
    traits = AdvantageTraits.read(advantage)
    if traits.over is not None:
        answers = traits.over(parts)
    elif traits.per_token:
        answers = [advantage(part) for part in parts]
    else:
        answers = _of_rows(advantage, Feedback.summary(parts)).split([len(part.rewards) for part in parts])
    return [_per_token(advantage, answer, part) for answer, part in zip(answers, parts, strict=True)]


def _of_rows(advantage: AdvantageProtocol, feedback: Feedback) -> Float[Tensor, " B"]:
    """Answer of a piece that says it answers by row."""
    answer = advantage(feedback)
    if not isinstance(answer, Tensor):
        name = type(advantage).__name__
        raise ValueError(f"advantage {name} answers for single tokens, but per_token is False: set {name}.per_token")
    return answer_of("advantage", advantage, answer, feedback.rewards.shape)


def _per_token(advantage: Advantage, answer: Credit | Tensor, feedback: Feedback) -> Credit:
    if isinstance(answer, Tensor):
        answer = answer_of("advantage", advantage, answer, feedback.rewards.shape)
        answer = Credit(answer.unsqueeze(1).expand(feedback.mask.shape))
    answer_of("advantage", advantage, answer.advantages, feedback.mask.shape)
    unscored = ~feedback.scored.unsqueeze(1)
    returns = answer.returns
    return Credit(
        sampled(answer.advantages, feedback.mask).masked_fill(unscored, torch.nan),
        None if returns is None else sampled(returns, feedback.mask).masked_fill(unscored, torch.nan),
    )


def _check_unit(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}: it must lie from 0 to 1")
