"""One piece of each kind, as somebody outside the package would write it: frozen dataclasses that inherit nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from proximo.losses import Candidates, Credit, Feedback, Rows


@dataclass(frozen=True)
class Wall:
    """Nothing passes further than `far` from the old policy, whatever its advantage."""

    far: float = 0.28

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return -log_ratio.clamp(-self.far, self.far).exp() * advantages

    def through(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return (log_ratio.abs() <= self.far).to(log_ratio.dtype)


@dataclass(frozen=True)
class WholeScore:
    """min(s, most)·A·log π, s the ratio of the whole completion: a score form that spans a sequence."""

    most: float = 2.0
    score_form: ClassVar[bool] = True
    weighs_rows: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return -log_ratio.exp().clamp(max=self.most).detach() * advantages * logprobs

    def through(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return log_ratio.exp().clamp(max=self.most) / log_ratio.exp()


@dataclass(frozen=True)
class TokenScore(WholeScore):
    """The same for single tokens: it does not say that it weighs rows."""

    weighs_rows: ClassVar[bool] = False


@dataclass(frozen=True)
class KeepNone:
    """Nothing is worth training on."""

    def __call__(self, outcome: Tensor, group: Tensor) -> Tensor:
        return torch.zeros_like(outcome, dtype=torch.bool)


@dataclass(frozen=True)
class KeepRight:
    """Right answers alone train; groups without any are replaced."""

    refills: ClassVar[bool] = True

    def __call__(self, outcome: Tensor, group: Tensor) -> Tensor:
        return outcome > 0


@dataclass(frozen=True)
class Spring:
    """coefficient · (log π − log π_old)²."""

    coefficient: float = 1.0
    formula: ClassVar[str] = "− (log π − log π_old)²"

    def term(self, rows: Rows) -> Tensor:
        return self.coefficient * (rows.logprobs - rows.old_logprobs).square()


@dataclass(frozen=True)
class FirstRow:
    """−log π of the step's first row, each of its tokens alike."""

    needs: ClassVar[tuple[str, ...]] = ("outcome",)

    def row_weights(self, counts: Tensor, outcome: Tensor | None, group: Tensor) -> Tensor:
        assert outcome is not None
        return (torch.arange(len(counts)) == 0).double() / counts[0]

    def term(self, rows: Rows) -> Tensor:
        return -rows.logprobs


@dataclass(frozen=True)
class Between:
    """Half way between the old policy and the sampler."""

    needs_sampler_logprobs: ClassVar[bool] = True

    def __call__(self, current: Tensor, old: Tensor, sampler: Tensor | None) -> Tensor:
        assert sampler is not None
        return (old + sampler) / 2


@dataclass(frozen=True)
class Halved:
    """The square root of the token's ratio."""

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio / 2


@dataclass(frozen=True)
class NoFirst:
    """Drops the first token of each completion."""

    step_wide: ClassVar[bool] = False

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Tensor:
        return candidates.mask & (candidates.mask.cumsum(dim=1) == 1)

    def apply(self, losses: Tensor, log_ratio: Tensor, chosen: Tensor) -> Tensor:
        return losses.masked_fill(chosen, 0.0)


@dataclass(frozen=True)
class Rejecting:
    """Tokens that sampler and learner disagree on are left out."""

    def __call__(self, log_weight: Tensor, mask: Tensor) -> Tensor:
        return (log_weight.abs() < 0.5).to(log_weight.dtype)


@dataclass(frozen=True)
class RootMean:
    """A completion counts by the root of its length."""

    def of_rows(self, counts: Tensor, group: Tensor) -> Tensor:
        return counts.clamp(min=1).rsqrt() / counts.sqrt().sum()


@dataclass(frozen=True)
class Doubled:
    """Twice the reward."""

    def __call__(self, feedback: Feedback) -> Tensor:
        return 2 * feedback.totals()


@dataclass(frozen=True)
class Countdown:
    """The reward, less with every token before the end."""

    per_token: ClassVar[bool] = True
    discount: float = 0.5

    def __call__(self, feedback: Feedback) -> Credit:
        left = feedback.mask.flip(1).cumsum(dim=1).flip(1) - 1
        return Credit(feedback.rewards.unsqueeze(1) * self.discount**left)


@dataclass(frozen=True)
class Brevity:
    """−unit for each token."""

    def __call__(self, lengths: Tensor, completion_limit: int, unit: float) -> Tensor:
        return -unit * lengths.double()


@dataclass(frozen=True)
class Absolute:
    """|log π − log π_ref|."""

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor) -> Tensor:
        return (logprobs - ref_logprobs).abs()


@dataclass(frozen=True)
class Opinionated(Wall):
    """A gate with rules of its own."""

    def contradictions(self, algorithm: Any) -> Iterator[str]:
        if algorithm.kl is not None:
            yield "Opinionated wants no KL: use kl=None"

    def remarks(self, algorithm: Any) -> Iterator[str]:
        yield "Opinionated is unusual"
