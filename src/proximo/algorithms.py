"""An algorithm is one frozen value: eleven stages, each answered by a small piece.

The names below are published algorithms with their published defaults; kinship is written as
`replace`. A contradiction fails when the value is made, an unusual choice warns (`UnusualChoice`).
Rules that concern a run rather than the value are in `check_run`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from proximo.maths.pieces.advantages import (
    BatchScaled,
    BetaNormalized,
    GroupCentred,
    GroupNormalized,
    LeaveOneOut,
    LiveScaled,
)
from proximo.maths.pieces.corrections import Correction
from proximo.maths.pieces.credit import Advantage, Gae, ProcessNormalized, ReturnToGo, SignScaled, TokenWhitened
from proximo.maths.pieces.divergences import K1, KlLoss
from proximo.maths.pieces.extras import Extra, PositiveNll, ValueLoss
from proximo.maths.pieces.gates import (
    CappedScore,
    Clip,
    GammaScore,
    Gate,
    GeometricClip,
    Reinforce,
    SoftGate,
    Unclipped,
)
from proximo.maths.pieces.keeping import Keep, KeepAll, KeepMixed
from proximo.maths.pieces.ratios import (
    Anchor,
    CurrentPolicy,
    NoRatio,
    OldPolicy,
    Ratio,
    SamplerPolicy,
    SequenceProductRatio,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from proximo.maths.pieces.selection import ClipCovariance, KlCovariance, Selection
from proximo.maths.pieces.shaping import KlReward, LinearOverlong, Shape, SoftOverlong
from proximo.maths.pieces.weights import ConstantLength, SequenceMean, SequenceSum, TokenMean, Weights

Piece = TypeVar("Piece")


class UnusualChoice(UserWarning):
    """A combination that runs but that no paper means; research is free to make it."""


@dataclass(frozen=True)
class Algorithm:
    """Eleven choices, in the order in which they act."""

    shape: Shape | tuple[Shape, ...] | None = None
    """1. Outcome to reward: length penalties, KL in the reward. A tuple applies several."""
    keep: Keep = field(default_factory=KeepAll)
    """2. Which groups and completions train."""
    advantage: Advantage = field(default_factory=GroupNormalized)
    """3. How much better than expected a token or completion was."""
    anchor: Anchor = field(default_factory=OldPolicy)
    """4. The policy a ratio is measured against."""
    ratio: Ratio = field(default_factory=TokenRatio)
    """5. Over which stretch of text."""
    gate: Gate = field(default_factory=Clip)
    """6. How far a token may push."""
    select: Selection | None = None
    """7. Tokens or completions left out of the update."""
    correct: Correction | None = None
    """8. The sampler's mismatch with the trainer."""
    kl: KlLoss | None = None
    """9. Distance to the reference, in the loss."""
    weights: Weights = field(default_factory=SequenceMean)
    """10. What a token counts for."""
    extra: Extra | tuple[Extra, ...] | None = None
    """11. Terms beside the policy's own. A tuple adds several."""

    def __post_init__(self) -> None:
        # A distance that counts for nothing is none: no piece of it is computed and no reference kept.
        if self.kl is not None and self.kl.coefficient == 0:
            object.__setattr__(self, "kl", None)
        kept = tuple(shape for shape in self.shapes if not (isinstance(shape, KlReward) and shape.coefficient == 0))
        if len(kept) < len(self.shapes):
            object.__setattr__(self, "shape", kept[0] if len(kept) == 1 else kept or None)
        for contradiction in _contradictions(self):
            raise ValueError(contradiction)
        for remark in _unusual(self):
            warnings.warn(remark, UnusualChoice, stacklevel=3)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return _several(self.shape)

    @property
    def extras(self) -> tuple[Extra, ...]:
        return _several(self.extra)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must be kept: for KL in the loss or in the reward."""
        return self.kl is not None or self.kl_reward is not None

    @property
    def kl_reward(self) -> KlReward | None:
        return next((shape for shape in self.shapes if isinstance(shape, KlReward)), None)

    @property
    def length_penalties(self) -> tuple[SoftOverlong | LinearOverlong, ...]:
        return tuple(shape for shape in self.shapes if not isinstance(shape, KlReward))

    def with_length_limit(self, completion_limit: int) -> "Algorithm":
        """The same algorithm with a length that was left to the run filled in."""
        open_length = isinstance(self.weights, ConstantLength) and self.weights.length is None
        return replace(self, weights=ConstantLength(completion_limit)) if open_length else self

    def check_run(self, *, group_size: int, updates_per_batch: int) -> None:
        """Refuse a run that this algorithm cannot learn from."""
        if group_size < 2 and isinstance(self.keep, KeepMixed):
            raise ValueError(f"group_size is {group_size}: KeepMixed needs at least 2 siblings to find a mixed group")
        if group_size < 2 and not self.advantage.per_token:
            raise ValueError(
                f"group_size is {group_size}: {type(self.advantage).__name__} compares siblings, and every "
                "advantage would be 0; use 2 or more"
            )
        if updates_per_batch > 1 and isinstance(self.anchor, CurrentPolicy):
            raise ValueError(
                f"training.minibatches × training.epochs is {updates_per_batch}: with anchor CurrentPolicy every "
                "update after the first would be off-policy without a ratio; make both 1, or use OldPolicy with a ratio"
            )


def _several(pieces: Piece | tuple[Piece, ...] | None) -> tuple[Piece, ...]:
    if pieces is None:
        return ()
    return pieces if isinstance(pieces, tuple) else (pieces,)


def _contradictions(algorithm: Algorithm) -> Iterator[str]:
    ratio, gate, advantage, anchor = algorithm.ratio, algorithm.gate, algorithm.advantage, algorithm.anchor
    pooled = isinstance(ratio, SequenceRatio | SequenceProductRatio)
    if gate.score_form and isinstance(ratio, SequenceRatio | SequenceTokenRatio | SequenceProductRatio):
        if not isinstance(gate, GammaScore):
            yield f"gate {gate} is a score form, ratio {ratio} spans a sequence: use TokenRatio()"
    if isinstance(gate, GammaScore) and not isinstance(ratio, SequenceProductRatio):
        yield f"gate {gate} weighs whole completions: use ratio=SequenceProductRatio(), not {ratio}"
    if isinstance(gate, Reinforce) != isinstance(ratio, NoRatio):
        yield f"gate {gate} with ratio {ratio}: Reinforce and NoRatio go together, any other gate needs a ratio"
    if isinstance(ratio, NoRatio) and not isinstance(anchor, CurrentPolicy):
        yield f"anchor is {anchor}, but without a ratio nothing is measured against it: use CurrentPolicy()"
    if pooled and advantage.per_token and not gate.score_form:
        yield f"ratio {ratio} pools a row, advantage {advantage} differs by token: use SequenceTokenRatio()"
    if isinstance(gate, GeometricClip) and (advantage.per_token or not isinstance(ratio, TokenRatio)):
        yield f"gate {gate} takes token ratios and one advantage per row: use TokenRatio() and a group advantage"
    if isinstance(anchor, SamplerPolicy) and algorithm.correct is not None:
        yield f"correct is {algorithm.correct}, but with anchor SamplerPolicy the ratio is the correction: use None"
    value_losses = [extra for extra in algorithm.extras if isinstance(extra, ValueLoss)]
    if advantage.needs_values and not value_losses:
        yield f"advantage {advantage} needs a value model, and nothing trains one: add extra=ValueLoss()"
    if value_losses and not advantage.needs_values:
        yield f"extra {value_losses[0]} trains a value model that advantage {advantage} never asks: leave it out"
    if algorithm.kl_reward is not None and isinstance(advantage, ProcessNormalized):
        yield f"shape {algorithm.kl_reward} would be normalised as if it were a process step: use kl=KlLoss() instead"
    for pieces in (algorithm.shapes, algorithm.extras):
        kinds = [type(piece).__name__ for piece in pieces]
        if len(set(kinds)) < len(kinds):
            yield f"{kinds} names one kind of piece twice: give each once"


def _unusual(algorithm: Algorithm) -> Iterator[str]:
    ratio, gate, weights = algorithm.ratio, algorithm.gate, algorithm.weights
    spans = ratio.length_normalised or isinstance(ratio, SequenceProductRatio)
    if spans and isinstance(weights, TokenMean) and not gate.score_form:
        yield f"ratio {ratio} with weights TokenMean(): long completions count for more; SequenceMean() is usual"
    if ratio.length_normalised and isinstance(gate, Clip) and max(gate.low, gate.high) > 0.05:
        yield f"gate {gate} on a length-normalised ratio hardly ever clips: GSPO uses Clip(3e-4, 4e-4)"
    if isinstance(gate, SoftGate) and gate.tau_neg < gate.tau_pos:
        yield f"gate {gate}: tau_neg below tau_pos lets negative tokens push further, which SAPO found unstable"
    if algorithm.kl is not None and isinstance(algorithm.kl.estimator, K1):
        yield "kl.estimator is K1(): its expected gradient is 0, it pulls nowhere; use K3(), K2() or UnbiasedK3()"
    if algorithm.kl is not None and algorithm.kl_reward is not None:
        yield "KL is in the reward and in the loss: the reference pulls twice"
    if isinstance(weights, ConstantLength) and isinstance(algorithm.advantage, GroupNormalized):
        yield "weights ConstantLength with advantage GroupNormalized: Dr. GRPO drops the std too, use GroupCentred()"
    if isinstance(algorithm.select, KlCovariance) and not isinstance(gate, Unclipped):
        yield f"select KlCovariance with gate {gate}: KL-Cov is defined without a clip, on Unclipped()"


# The five, in one line of descent from GRPO; PPO differs in where its advantages come from.

GRPO = Algorithm(
    advantage=GroupNormalized(), ratio=TokenRatio(), gate=Clip(0.2, 0.2), weights=SequenceMean(), kl=KlLoss(0.04)
)
PPO = Algorithm(
    shape=KlReward(0.05),
    advantage=TokenWhitened(Gae(discount=1.0, decay=0.95)),
    gate=Clip(0.2, 0.2),
    weights=TokenMean(),
    extra=ValueLoss(0.1, clip=0.2),
)
DAPO = replace(GRPO, gate=Clip(0.2, 0.28), weights=TokenMean(), kl=None, shape=SoftOverlong(), keep=KeepMixed())
GSPO = replace(GRPO, ratio=SequenceRatio(), gate=Clip(3e-4, 4e-4), kl=None)
GSPO_TOKEN = replace(GSPO, ratio=SequenceTokenRatio())
SAPO = replace(GRPO, gate=SoftGate(1.0, 1.05), kl=None)

# Their neighbours.

DR_GRPO = replace(GRPO, advantage=GroupCentred(), weights=ConstantLength(), kl=None)
RLOO = Algorithm(
    shape=KlReward(0.03),
    advantage=LeaveOneOut(),
    anchor=CurrentPolicy(),
    ratio=NoRatio(),
    gate=Reinforce(),
    weights=SequenceSum(),
)
REINFORCE_PP = Algorithm(shape=KlReward(0.001), advantage=TokenWhitened(ReturnToGo()))
REINFORCE_PP_BASELINE = Algorithm(advantage=TokenWhitened(GroupCentred()), weights=TokenMean())
CISPO = replace(DAPO, gate=CappedScore(high=4.0))
GMPO = replace(GRPO, gate=GeometricClip(0.4, 0.4), kl=None)
GPG = Algorithm(advantage=LiveScaled(), anchor=CurrentPolicy(), ratio=NoRatio(), gate=Reinforce(), weights=TokenMean())
BNPO = replace(GRPO, advantage=BetaNormalized(), kl=None)
VAPO = Algorithm(
    advantage=TokenWhitened(Gae(discount=1.0, length_adaptive=0.05, critic_decay=1.0)),
    gate=Clip(0.2, 0.28),
    weights=TokenMean(),
    extra=(ValueLoss(0.1, clip=0.2), PositiveNll(0.1)),
)
CLIP_COV = replace(GRPO, keep=KeepMixed(), select=ClipCovariance(), weights=TokenMean(), kl=None)
KL_COV = replace(CLIP_COV, gate=Unclipped(), select=KlCovariance())
LITE_PPO = replace(GRPO, advantage=BatchScaled(), weights=TokenMean(), kl=None)
LUSPO = replace(GSPO, gate=Clip(2e-3, 2.5e-3), weights=SequenceSum())
VESPO = replace(GRPO, ratio=SequenceProductRatio(), gate=GammaScore(), weights=TokenMean(), kl=None)

# Two forms that circulate in retellings of the papers, named so that they can be compared, not recommended.

GSPO_PRODUCT = replace(GSPO, ratio=SequenceProductRatio(), gate=Clip(0.2, 0.2))
SAPO_SEQUENCE = replace(
    SAPO,
    advantage=SignScaled(GroupNormalized(), positive=1.0, negative=2.0),
    ratio=SequenceProductRatio(),
    gate=SoftGate(5.0, 5.0, normalised=False),
)
