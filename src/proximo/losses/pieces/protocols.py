"""The interface of each stage's pieces: one protocol per stage.

Stages call these methods and never check a piece's class, so any frozen dataclass will do. Optional members, and their
defaults, are in `traits`.

Example, a gate in a separate file:

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

from proximo.losses.records import Candidates, Credit, Feedback, Rows
from proximo.types.tensor_types import Bool, Float, Int


@runtime_checkable
class Piece(Protocol):
    """A frozen dataclass, so that it can be written to TOML and changed by `replace`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# 1. Shape


@runtime_checkable
class ShapeProtocol(Piece, Protocol):
    def __call__(self, lengths: Int[Tensor, " B"], completion_limit: int, unit: float) -> Float[Tensor, " B"]:
        """Added to each row's reward. `unit`: half the difference between the rewards of a right and a wrong answer."""
        ...


# 2. Keep


@runtime_checkable
class KeepProtocol(Piece, Protocol):
    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """The rows that train; a group without any is dropped. An outcome of NaN is unscored and never trains."""
        ...


# 3. Advantage


@runtime_checkable
class AdvantageProtocol(Piece, Protocol):
    def __call__(self, feedback: Feedback) -> Tensor | Credit:
        """One advantage per row, [B], or a `Credit` with one per token."""
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
        """The log-ratio for the gate, from each token's own log-ratio."""
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
    """Whether it ranks tokens of different rows. If so, it is called once per update with all tokens as one row;
    otherwise once per micro-batch, with its rows."""

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Bool[Tensor, "B T"]:
        """The tokens to act on."""
        ...

    def apply(
        self, losses: Float[Tensor, "B T"], log_ratio: Float[Tensor, "B T"], chosen: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """The losses after acting on the selected tokens."""
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
        """Weight of each sampled token of a row, from the rows' counts of sampled tokens in an optimizer step."""
        ...


# 11. Extra


@runtime_checkable
class ExtraProtocol(Piece, Protocol):
    def term(self, rows: Rows) -> Float[Tensor, "B T"]:
        """Each token's additional loss, coefficient included, before weights."""
        ...
