"""What each stage asks of its piece: one protocol for each kind.

A stage asks the piece, never its class, so a frozen dataclass from anywhere will do. What a piece may say beyond this,
and what is assumed where it does not, is in `traits`.

Example, a gate in a file of its own:

    @dataclass(frozen=True)
    class Ceiling:
        most: float = 2.0

        def __call__(self, log_ratio, logprobs, advantages, mask):
            return -log_ratio.exp().clamp(max=self.most) * advantages

        def through(self, log_ratio, advantages):
            return (log_ratio.exp() <= self.most).to(log_ratio.dtype)
"""

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from proximo.maths.records import Candidates, Credit, Feedback, Rows
from proximo.tensor_types import Bool, Float, Int


@runtime_checkable
class Piece(Protocol):
    """A dataclass, so that it can be written down and changed by `replace`; frozen, so that it stays what it is."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# 1. Shape


@runtime_checkable
class ShapeProtocol(Piece, Protocol):
    def __call__(self, lengths: Int[Tensor, " B"], completion_limit: int, unit: float) -> Float[Tensor, " B"]:
        """Added to each row's reward. `unit`: half the distance between what a right and a wrong answer earn."""
        ...


# 2. Keep


@runtime_checkable
class KeepProtocol(Piece, Protocol):
    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """The rows that train; a group without any leaves the step. NaN: unscored, which never trains."""
        ...


# 3. Advantage


@runtime_checkable
class AdvantageProtocol(Piece, Protocol):
    def __call__(self, feedback: Feedback) -> Tensor | Credit:
        """One advantage for each row, [B], or a `Credit` of single tokens."""
        ...


# 4. Anchor


@runtime_checkable
class AnchorProtocol(Piece, Protocol):
    def __call__(
        self, current: Float[Tensor, "B T"], old: Float[Tensor, "B T"], sampler: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T"]:
        """The log-probs that ratios are measured against. None of the three has a gradient."""
        ...


# 5. Ratio


@runtime_checkable
class RatioProtocol(Piece, Protocol):
    def __call__(self, log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """What the gate sees, as a logarithm, from each token's own log-ratio."""
        ...


# 6. Gate


@runtime_checkable
class GateProtocol(Piece, Protocol):
    def __call__(
        self,
        log_ratio: Float[Tensor, "B T"],
        logprobs: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """The loss of each token, minimised."""
        ...

    def through(self, log_ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The share of the importance-weighted gradient r·A that passes: 1 untouched, 0 blocked."""
        ...


# 7. Selection


@runtime_checkable
class SelectionProtocol(Piece, Protocol):
    step_wide: ClassVar[bool]
    """Whether it ranks tokens of different rows. It then chooses once for an update, among all its tokens as one row;
    otherwise it chooses in each micro-batch, whose rows it sees."""

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Bool[Tensor, "B T"]:
        """The tokens to act on."""
        ...

    def apply(
        self, losses: Float[Tensor, "B T"], log_ratio: Float[Tensor, "B T"], chosen: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """The losses after acting on the chosen tokens."""
        ...


# 8. Correction


@runtime_checkable
class CorrectionProtocol(Piece, Protocol):
    def __call__(self, log_weight: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """A constant factor for each token's policy loss, from log π_old − log μ; 0 rejects it."""
        ...


# 9. Divergence


@runtime_checkable
class DivergenceProtocol(Piece, Protocol):
    def __call__(
        self, logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], log_ratio: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """An estimate of each token's distance to the reference."""
        ...


# 10. Weights


@runtime_checkable
class WeightsProtocol(Piece, Protocol):
    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """The weight of each sampled token of a row, from how many the rows of an optimizer step have."""
        ...


# 11. Extra


@runtime_checkable
class ExtraProtocol(Piece, Protocol):
    def term(self, rows: Rows) -> Float[Tensor, "B T"]:
        """The loss that each token adds, coefficient included, before weights."""
        ...
