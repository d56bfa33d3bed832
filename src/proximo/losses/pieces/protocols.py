"""Protocols that the pieces of a stage must have, and traits that they may have.

Stages call a protocol's methods and never check a piece's class, so any frozen dataclass will do. Each field of a
`…Traits` is an optional member, with the same name. They are read only by `GateTraits.read(gate)` and the like, so that
a piece defines only what differs from the default.

Example, a gate in a separate file:

    @dataclass(frozen=True)
    class Ceiling:
        most: float = 2.0

        def __call__(self, log_ratio, logprobs, advantages, mask):
            return -log_ratio.exp().clamp(max=self.most) * advantages

        def through(self, log_ratio, advantages):
            return (log_ratio.exp() <= self.most).to(log_ratio.dtype)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_args, get_origin, runtime_checkable

import torch
from torch import Tensor

from proximo.losses.arithmetic import Mask, Tokens
from proximo.losses.records import Candidates, Credit, Feedback, Rows
from proximo.types.tensor_types import Bool, Float, Int

__all__ = [
    "AdvantageProtocol",
    "AnchorProtocol",
    "CorrectionProtocol",
    "DivergenceProtocol",
    "ExtraProtocol",
    "GateProtocol",
    "KeepProtocol",
    "RatioProtocol",
    "SelectionProtocol",
    "ShapeProtocol",
    "WeightsProtocol",
]


@runtime_checkable
class Piece(Protocol):
    """A frozen dataclass, so that it can be written to TOML and changed by `replace`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True)
class Traits:
    @classmethod
    def read(cls, piece: object) -> Self:
        """The piece's members, with defaults for those that it lacks. ValueError if a member has another type: the
        piece then means something else by that name."""
        members = {}
        for each in fields(cls):
            if not hasattr(piece, each.name):
                continue
            value = members[each.name] = getattr(piece, each.name)
            if not _fits(value, each.type):
                shown = "a method" if callable(value) else repr(value)
                raise ValueError(
                    f"{type(piece).__name__}.{each.name} is {shown}, but a piece's {each.name} must be "
                    f"{_in_words(each.type)}: give that, or rename the member"
                )
        return cls(**members)


def _nothing(_: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Rules(Traits):
    """Checks of the algorithm that a piece is used in; each takes the `Algorithm`."""

    contradictions: Callable[[Any], Iterable[str]] = _nothing
    """Reasons why the algorithm is invalid with this piece; the first is raised as a ValueError."""
    remarks: Callable[[Any], Iterable[str]] = _nothing
    """Reasons why the algorithm is unusual with this piece; each is an `UnusualChoice` warning."""


class Peers(NamedTuple):
    """Names of the same knob in TRL 1.16 and verl 0.9, and where their defaults differ from ours.

    Read in their released sources; `make parity` runs many of them against ours.
    """

    trl: str
    verl: str


@dataclass(frozen=True)
class Description(Traits):
    """Description of a piece, for `explain`, the page and the report. The pieces of the package have all of it."""

    formula: str | None = None
    """Formula in mathematical notation: ρ is the ratio the gate sees, A the advantage, R the reward. Sums run over
    sampled tokens. Of a ratio, π_anchor is the policy it is measured against; an extra or a shape begins with the sign
    that it has in the objective."""
    peers: tuple[str, str] = Peers("not given", "not given")
    """Names of it in TRL and verl, and where their defaults differ."""
    peers_in: Callable[[Any], tuple[str, str]] | None = None
    """The same in an `Algorithm`, where the peers treat it otherwise with some other piece."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Meaning of the statistics that it logs, by their names."""


def formula_of(piece: object, sign: str = "") -> str:
    """Formula of a piece; of one that has none its name, behind the sign that it has in the objective."""
    formula = Description.read(piece).formula
    return f"{sign}{type(piece).__name__} (formula not given)" if formula is None else formula


# 1. Shape


@runtime_checkable
class ShapeProtocol(Piece, Protocol):
    def __call__(self, lengths: Int[Tensor, " B"], completion_limit: int, unit: float) -> Float[Tensor, " B"]:
        """Added to each row's reward. `unit`: half the difference between the rewards of a right and a wrong answer."""
        ...


@dataclass(frozen=True)
class ShapeTraits(Traits):
    per_token: bool = False
    """True if it rewards single tokens by their distance to the reference, with the call signature of `KlReward`."""
    is_off: bool = False
    """True if it adds nothing and may be left out."""
    coefficient: float | None = None
    """Factor of a reward of single tokens, for the metrics; a field, where `controller` changes it."""
    controller: Callable[[float, float, int], float] | None = None
    """The next step's coefficient from (coefficient, KL per completion, completions), as `AdaptiveKl` has it."""


# 2. Keep


@runtime_checkable
class KeepProtocol(Piece, Protocol):
    def __call__(self, outcome: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """The rows that train; a group without any is dropped. A task score of NaN is unscored and never trains."""
        ...


@dataclass(frozen=True)
class KeepTraits(Traits):
    truncated: bool = True
    """True if completions cut at the limit are in the loss."""
    refills: bool = False
    """True if other prompts are sampled in place of the groups that are dropped."""
    compares: bool = False
    """True if it compares siblings, so that a group needs two at least."""
    reads_outcome: bool = True
    """True if it drops rows by their task score."""


# 3. Advantage


@runtime_checkable
class AdvantageProtocol(Piece, Protocol):
    def __call__(self, feedback: Feedback) -> Tensor | Credit:
        """One advantage per row, [B], or a `Credit` with one per token."""
        ...


OtherModel = Literal["ref_logprobs", "teacher_logprobs"]


@dataclass(frozen=True)
class AdvantageTraits(Traits):
    per_token: bool = False
    """True if tokens of a row differ. If not, it may read only `rewards`, `group` and sums over a row: `totals()` and
    those of `gap_to`."""
    needs_logprobs: tuple[OtherModel, ...] = ()
    """Log-probs of other models that it reads: of the reference, of a teacher."""
    compares: bool = True
    """True if it compares siblings where tokens of a row do not differ, so that a group needs at least two."""
    needs_values: bool = False
    """True if a value model must be trained."""
    needs_step_rewards: bool = False
    """True if it needs a reward for each reasoning step, which no task of a run provides."""
    by_group_std: bool = False
    """True if it divides by the standard deviation of the group."""
    discount: float = 1.0
    """Discount factor per token."""
    of: Any = None
    """Advantage that this one transforms."""
    over: Callable[[Sequence[Feedback]], list[Credit]] | None = None
    """The same for a batch in parts. Required if it differs by token and compares rows."""

    @property
    def all_needs(self) -> frozenset[OtherModel]:
        """Needs of its own, and those of the advantage that it transforms."""
        inner = frozenset() if self.of is None else AdvantageTraits.read(self.of).all_needs
        return inner | frozenset(self.needs_logprobs)


# 4. Anchor


@runtime_checkable
class AnchorProtocol(Piece, Protocol):
    def __call__(self, current: Tokens, old: Tokens, sampler: Tokens | None) -> Tokens:
        """The log-probs that ratios are measured against. None of the three has a gradient."""
        ...


@dataclass(frozen=True)
class AnchorTraits(Traits):
    needs_sampler_logprobs: bool = False
    """True if it reads `sampler`; the ratio then corrects the sampler's mismatch."""
    on_policy: bool = False
    """True if it is the current policy, so that every ratio is 1."""


# 5. Ratio


@runtime_checkable
class RatioProtocol(Piece, Protocol):
    def __call__(self, log_ratio: Tokens, mask: Mask) -> Tokens:
        """The log-ratio for the gate, from each token's own log-ratio."""
        ...


@dataclass(frozen=True)
class RatioTraits(Traits):
    spans_row: bool = False
    """True if its value is one for the whole completion, repeated at every token."""
    pools: bool = False
    """True if its gradient, too, is that of the whole completion."""
    length_normalised: bool = False
    """True if its log is a mean over the completion's tokens, so that its spread shrinks with length."""
    is_constant: bool = False
    """True if it is always 1: no importance weight."""


# 6. Gate


@runtime_checkable
class GateProtocol(Piece, Protocol):
    def __call__(self, log_ratio: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
        """The loss of each token, minimised."""
        ...

    def through(self, log_ratio: Tokens, advantages: Tokens) -> Tokens:
        """The share of the importance-weighted gradient r·A that passes: 1 untouched, 0 blocked."""
        ...


@dataclass(frozen=True)
class GateTraits(Traits):
    score_form: bool = False
    """True if it differentiates log π and holds the ratio constant."""
    band: tuple[float, float] = (1.0, 1.0)
    """Clip range: the two ratios outside which it acts; (1, 1): none."""
    width: float = 0.2
    """Smallest log-ratio that matters to it; PPO's clip width if it has no clip range."""
    fades: bool = False
    """True if its share fades smoothly: a share that underflows to 0 then does not count as blocked."""
    ignores_ratio: bool = False
    """True if it reads no ratio, and so may be used with a constant one."""
    weighs_rows: bool = False
    """True if it is in score form and takes a ratio of the whole completion."""
    pools: bool = False
    """True if it averages over a row itself, and so needs token ratios and one advantage per row."""
    lens_edge: Callable[[float, float], tuple[float, str] | None] | None = None
    """The edge, and its name, that blocks a token with this ratio and advantage. Default: from `band`."""
    lens_manner: Callable[[float], str] | None = None
    """A few words on how a token with this advantage is held back."""
    statistics: Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]] | None = None
    """Additional statistics per token from (log_ratio, advantages, mask), logged as means under their names."""

    @property
    def clips(self) -> bool:
        return self.fades or self.score_form or self.band != (1.0, 1.0)


# 7. Selection


@runtime_checkable
class SelectionProtocol(Piece, Protocol):
    step_wide: ClassVar[bool]
    """True if it ranks tokens of different rows. If so, it is called once per update with all tokens as one row;
    otherwise once per micro-batch, with its rows."""

    def choose(self, candidates: Candidates, generator: torch.Generator | None) -> Mask:
        """The tokens to act on."""
        ...

    def apply(self, losses: Tokens, log_ratio: Tokens, chosen: Mask) -> Tokens:
        """The losses after acting on the selected tokens."""
        ...


@dataclass(frozen=True)
class SelectionTraits(Traits):
    teaches_alone: bool = False
    """True if selected tokens stay in the loss and get an additional gradient, even if their advantage is 0."""
    needs_entropy: bool = False


# 8. Correction


@runtime_checkable
class CorrectionProtocol(Piece, Protocol):
    def __call__(self, log_weight: Tokens, mask: Mask) -> Tokens:
        """A constant factor for each token's policy loss, from log π_old − log μ; 0 rejects it."""
        ...


@dataclass(frozen=True)
class CorrectionTraits(Traits):
    reads: Literal["token", "product", "mean"] = "token"
    """Weight that decides, for the lens: a token's own, or the completion's product or geometric mean."""


# 9. Divergence


@runtime_checkable
class DivergenceProtocol(Piece, Protocol):
    def __call__(self, logprobs: Tokens, ref_logprobs: Tokens, log_ratio: Tokens) -> Tokens:
        """An estimate of each token's distance to the reference."""
        ...


@dataclass(frozen=True)
class DivergenceTraits(Traits):
    pulls: bool = True
    """True if its expected gradient is not 0, so that it can be used as a loss."""


# 10. Weights


@runtime_checkable
class WeightsProtocol(Piece, Protocol):
    def of_rows(self, counts: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Weight of each sampled token of a row, from the rows' counts of sampled tokens in an optimizer step."""
        ...


@dataclass(frozen=True)
class WeightsTraits(Traits):
    by_token: bool = False
    """True if every token of the step counts the same, so that a long completion counts for more."""
    with_limit: Callable[[int], Any] | None = None
    """The same weights with the run's completion limit filled in."""


# 11. Extra


@runtime_checkable
class ExtraProtocol(Piece, Protocol):
    def term(self, rows: Rows) -> Tokens:
        """Each token's additional loss, coefficient included, before weights."""
        ...


Need = Literal["entropy", "outcome", "values", "router_logits"]


@dataclass(frozen=True)
class ExtraTraits(Traits):
    needs: tuple[Need, ...] = ()
    """Inputs needed in addition to log-probs. With values or router logits the learner computes it: see
    `of_learner`."""
    term: Callable[[Any], Tensor] | None = None
    """Loss of each token, from the rows; None if the learner computes it."""
    row_weights: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None
    """Weight of a sampled token of each row, from (counts, outcome, group) of all rows of an optimizer step.
    Default: the algorithm's own weights."""

    @property
    def of_learner(self) -> bool:
        """True if the learner computes its term, as for `ValueLoss` and `RouterBalance`."""
        return "values" in self.needs or "router_logits" in self.needs


TRAITS: Mapping[str, type[Traits]] = {
    "shape": ShapeTraits,
    "keep": KeepTraits,
    "advantage": AdvantageTraits,
    "anchor": AnchorTraits,
    "ratio": RatioTraits,
    "gate": GateTraits,
    "select": SelectionTraits,
    "correct": CorrectionTraits,
    "weights": WeightsTraits,
    "extra": ExtraTraits,
}
"""Traits of the pieces of each stage; the estimator of `kl` has `DivergenceTraits`."""


def _fits(value: object, kind: Any) -> bool:
    """True if a value is of the type that a field of `Traits` is declared with."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is Callable:
        return callable(value)
    if origin is tuple:
        wanted = parts[:1] * len(value) if isinstance(value, tuple) and parts[-1] is ... else parts
        return isinstance(value, tuple) and len(value) == len(wanted) and all(map(_fits, value, wanted))
    if origin is Mapping:
        return isinstance(value, Mapping)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def _in_words(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return " or ".join(map(_in_words, parts))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple:
        return f"a tuple of {_in_words(parts[0])}" if parts[-1] is ... else f"({', '.join(map(_in_words, parts))})"
    if origin is Mapping:
        return "a mapping"
    plain = {bool: "True or False", float: "a number", NoneType: "None"}
    return "a function" if origin is Callable else plain[kind]
