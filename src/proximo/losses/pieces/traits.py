"""Optional members of pieces beyond their protocol, and their defaults.

Every field here is an optional member of a piece, with the same name. They are read only by `GateTraits.read(gate)` and
the like, so that a piece defines only what differs from the default.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Self, get_args, get_origin

from torch import Tensor

from proximo.losses.records import Credit, Feedback


@dataclass(frozen=True)
class Traits:
    @classmethod
    def read(cls, piece: object) -> Self:
        """The piece's members, with defaults for those that it lacks. ValueError if a member has another type: the
        piece then means something else by that name."""
        found = {}
        for each in fields(cls):
            if not hasattr(piece, each.name):
                continue
            value = found[each.name] = getattr(piece, each.name)
            if not _fits(value, each.type):
                shown = "a method" if callable(value) else repr(value)
                raise ValueError(
                    f"{type(piece).__name__}.{each.name} is {shown}, but a piece's {each.name} must be "
                    f"{_in_words(each.type)}: give that, or rename the member"
                )
        return cls(**found)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of the type that a field of `Traits` is declared with."""
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
    plain = {bool: "True or False", float: "a number", NoneType: "None"}
    return "a function" if origin is Callable else plain[kind]


def _nothing(_: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Rules(Traits):
    """Checks of the algorithm that a piece is used in; each takes the `Algorithm`."""

    contradictions: Callable[[Any], Iterable[str]] = _nothing
    """Reasons why the algorithm is invalid with this piece; the first is raised as a ValueError."""
    remarks: Callable[[Any], Iterable[str]] = _nothing
    """Reasons why the algorithm is unusual with this piece; each is an `UnusualChoice` warning."""


@dataclass(frozen=True)
class ShapeTraits(Traits):
    per_token: bool = False
    """Whether it rewards single tokens by their distance to the reference, with the call signature of `KlReward`."""
    is_off: bool = False
    """Whether it adds nothing and may be left out."""
    coefficient: float | None = None
    """Factor of a reward of single tokens, for the metrics; a field, where `controller` changes it."""
    controller: Callable[[float, float, int], float] | None = None
    """The next step's coefficient from (coefficient, KL per completion, completions), as `AdaptiveKl` has it."""


@dataclass(frozen=True)
class KeepTraits(Traits):
    truncated: bool = True
    """Whether completions cut at the limit are in the loss."""
    refills: bool = False
    """Whether other prompts are sampled in place of the groups that are dropped."""
    compares: bool = False
    """Whether it compares siblings, so that a group needs two at least."""
    reads_outcome: bool = True
    """Whether it drops rows by their outcome."""


OtherModel = Literal["ref_logprobs", "teacher_logprobs"]


@dataclass(frozen=True)
class AdvantageTraits(Traits):
    per_token: bool = False
    """Whether tokens of a row differ. If not, it may read only `rewards`, `group` and sums over a row: `totals()` and
    those of `gap_to`."""
    needs_logprobs: tuple[OtherModel, ...] = ()
    """Log-probs of other models that it reads: of the reference, of a teacher."""
    compares: bool = True
    """Whether, if tokens of a row do not differ, it compares siblings, so that a group needs at least two."""
    needs_values: bool = False
    """Whether a value model must be trained."""
    needs_step_rewards: bool = False
    """Whether it needs a reward for each reasoning step, which no task of a run provides."""
    by_group_std: bool = False
    """Whether it divides by the standard deviation of the group."""
    discount: float = 1.0
    """Discount factor per token."""
    of: Any = None
    """Advantage that this one transforms."""
    over: Callable[[Sequence[Feedback]], list[Credit]] | None = None
    """The same for a batch in parts. Required if it differs by token and compares rows."""

    @property
    def all_needs(self) -> frozenset[OtherModel]:
        """Its own needs, and those of the advantage that it transforms."""
        inner = frozenset() if self.of is None else AdvantageTraits.read(self.of).all_needs
        return inner | frozenset(self.needs_logprobs)


@dataclass(frozen=True)
class AnchorTraits(Traits):
    needs_sampler_logprobs: bool = False
    """Whether it reads `sampler`; the ratio then corrects the sampler's mismatch."""
    on_policy: bool = False
    """Whether it is the current policy, so that every ratio is 1."""


@dataclass(frozen=True)
class RatioTraits(Traits):
    spans_row: bool = False
    """Whether its value is one for the whole completion, repeated at every token."""
    pools: bool = False
    """Whether its gradient, too, is that of the whole completion."""
    length_normalised: bool = False
    """Whether its log is a mean over the completion's tokens, so that its spread shrinks with length."""
    is_constant: bool = False
    """Whether it is always 1: no importance weight."""


@dataclass(frozen=True)
class GateTraits(Traits):
    score_form: bool = False
    """Whether it differentiates log π and holds the ratio constant."""
    band: tuple[float, float] = (1.0, 1.0)
    """Clip range: the two ratios outside which it acts; (1, 1): none."""
    width: float = 0.2
    """Smallest log-ratio that matters to it; PPO's clip width if it has no clip range."""
    fades: bool = False
    """Whether its share fades smoothly: a share that underflows to 0 then does not count as blocked."""
    ignores_ratio: bool = False
    """Whether it reads no ratio, and so may be used with a constant one."""
    weighs_rows: bool = False
    """Whether it is in score form and takes a ratio of the whole completion."""
    pools: bool = False
    """Whether it averages over a row itself, and so needs token ratios and one advantage per row."""
    lens_edge: Callable[[float, float], tuple[float, str] | None] | None = None
    """The edge, and its name, that blocks a token with this ratio and advantage. Default: from `band`."""
    lens_manner: Callable[[float], str] | None = None
    """A few words on how a token with this advantage is held back."""
    statistics: Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]] | None = None
    """Additional statistics per token from (log_ratio, advantages, mask), logged as means under their names."""

    @property
    def clips(self) -> bool:
        return self.fades or self.score_form or self.band != (1.0, 1.0)


@dataclass(frozen=True)
class SelectionTraits(Traits):
    teaches_alone: bool = False
    """Whether selected tokens stay in the loss and get an additional gradient, even if their advantage is 0."""
    needs_entropy: bool = False


@dataclass(frozen=True)
class CorrectionTraits(Traits):
    reads: Literal["token", "product", "mean"] = "token"
    """For the lens: whether it decides by a token's own weight, or by the completion's product or geometric mean."""


@dataclass(frozen=True)
class DivergenceTraits(Traits):
    pulls: bool = True
    """Whether its expected gradient is not 0, so that it can be used as a loss."""


@dataclass(frozen=True)
class WeightsTraits(Traits):
    by_token: bool = False
    """Whether every token of the step counts the same, so that a long completion counts for more."""
    with_limit: Callable[[int], Any] | None = None
    """The same weights with the run's completion limit filled in."""


Need = Literal["entropy", "outcome", "values", "router_logits"]


@dataclass(frozen=True)
class ExtraTraits(Traits):
    needs: tuple[Need, ...] = ()
    """Inputs needed in addition to log-probs. With values or router logits the learner computes it: see
    `of_learner`."""
    term: Callable[[Any], Tensor] | None = None
    """Its loss of each token, from the rows; None if the learner computes it."""
    row_weights: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None
    """Weight of a sampled token of each row, from (counts, outcome, group) of all rows of an optimizer step.
    Default: the algorithm's own weights."""

    @property
    def of_learner(self) -> bool:
        """Whether the learner computes its term, as for `ValueLoss` and `RouterBalance`."""
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
"""What a piece of each stage may say of itself; the estimator of `kl` has `DivergenceTraits`."""
