"""What a piece may say of itself beyond its protocol, and what is assumed of a piece that does not.

Every field here is an optional member of a piece, by the same name. They are read by `GateTraits.read(gate)` and its
like, and in no other way, so that a piece writes only what differs from the default.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Self, get_args, get_origin

from torch import Tensor

from proximo.maths.records import Credit, Feedback


@dataclass(frozen=True)
class Traits:
    @classmethod
    def read(cls, piece: object) -> Self:
        """The members that the piece has, and defaults for the others. ValueError where a member is of another type:
        the piece then means something else by that name."""
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
    """What a piece has to say about the algorithm that it is put into; each takes the `Algorithm`."""

    contradictions: Callable[[Any], Iterable[str]] = _nothing
    """Why the algorithm cannot mean anything with this piece: the first is raised as a ValueError."""
    remarks: Callable[[Any], Iterable[str]] = _nothing
    """Why the algorithm is unusual with this piece: each is an `UnusualChoice` warning."""


@dataclass(frozen=True)
class ShapeTraits(Traits):
    per_token: bool = False
    """Whether it rewards single tokens by their distance to the reference, as `KlReward` does, and is called so."""
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
    """Whether it drops rows by the task's verdict."""


@dataclass(frozen=True)
class AdvantageTraits(Traits):
    per_token: bool = False
    """Whether the tokens of a row differ. Where not, `rewards`, `group` and `totals()` are all it may read."""
    needs_values: bool = False
    """Whether a value model must be trained."""
    needs_step_rewards: bool = False
    """Whether it needs a reward for each reasoning step, which no run's task gives."""
    by_group_std: bool = False
    """Whether it divides by the standard deviation of the group."""
    discount: float = 1.0
    """What a reward loses with each token that it is away."""
    of: Any = None
    """The advantage that it is made from."""
    over: Callable[[Sequence[Feedback]], list[Credit]] | None = None
    """The same of a batch that comes in parts. Needed where it differs by token and compares rows."""


@dataclass(frozen=True)
class AnchorTraits(Traits):
    needs_sampler_logprobs: bool = False
    """Whether it reads `sampler`; the ratio then repairs the sampler's mismatch itself."""
    on_policy: bool = False
    """Whether it is the current policy, so that every ratio is 1."""


@dataclass(frozen=True)
class RatioTraits(Traits):
    spans_row: bool = False
    """Whether its value is of the whole completion, repeated at every token."""
    pools: bool = False
    """Whether its gradient is of the whole completion, too."""
    length_normalised: bool = False
    """Whether its log is a mean over the completion's tokens, so that its spread shrinks with length."""
    is_constant: bool = False
    """Whether it is always 1: no importance weight."""


@dataclass(frozen=True)
class GateTraits(Traits):
    score_form: bool = False
    """Whether log π carries the gradient and the ratio is held constant."""
    band: tuple[float, float] = (1.0, 1.0)
    """The pair of ratios outside which it acts; (1, 1): it has no edge."""
    width: float = 0.2
    """The smallest log-ratio that matters to it; PPO's clip where it has no edge."""
    fades: bool = False
    """Whether its share fades smoothly: one too small for a number has crossed no edge, and is not blocked."""
    ignores_ratio: bool = False
    """Whether it reads no ratio at all, and goes with a ratio that is constant."""
    weighs_rows: bool = False
    """Whether, in score form, it takes a ratio of the whole completion."""
    pools: bool = False
    """Whether it takes the mean over a row itself, and so needs token ratios and one advantage per row."""
    lens_edge: Callable[[float, float], tuple[float, str] | None] | None = None
    """The edge, and its name, that blocks a token of this ratio and advantage. Default: from `band`."""
    lens_manner: Callable[[float], str] | None = None
    """A few words on how a token of this advantage is held back."""
    statistics: Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]] | None = None
    """Further numbers of each token from (log_ratio, advantages, mask), logged as means by their names."""

    @property
    def clips(self) -> bool:
        return self.fades or self.score_form or self.band != (1.0, 1.0)


@dataclass(frozen=True)
class SelectionTraits(Traits):
    teaches_alone: bool = False
    """Whether chosen tokens stay in and get a gradient of their own, also where their advantage is 0."""
    needs_entropy: bool = False


@dataclass(frozen=True)
class CorrectionTraits(Traits):
    reads: Literal["token", "product", "mean"] = "token"
    """For the lens: what it decides by, a token's own weight or the completion's product or geometric mean."""


@dataclass(frozen=True)
class DivergenceTraits(Traits):
    pulls: bool = True
    """Whether its expected gradient is not 0, so that it can be a loss."""


@dataclass(frozen=True)
class WeightsTraits(Traits):
    by_token: bool = False
    """Whether every token of the step counts the same, so that a long completion counts for more."""
    with_limit: Callable[[int], Any] | None = None
    """The same weights with a length that was left to the run filled in."""


Need = Literal["entropy", "outcome", "values", "router_logits"]


@dataclass(frozen=True)
class ExtraTraits(Traits):
    needs: tuple[Need, ...] = ()
    """What must be there beyond log-probs. With values or router logits the learner computes it: see `of_learner`."""
    term: Callable[[Any], Tensor] | None = None
    """Its loss of each token, from the rows; None where the learner computes it."""
    row_weights: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None
    """What a sampled token of each row counts for, from (counts, outcome, group) of all rows of an optimizer step.
    Default: the algorithm's own weights."""

    @property
    def of_learner(self) -> bool:
        """Whether its term is computed where the models are, as `ValueLoss` and `RouterBalance` have it."""
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
