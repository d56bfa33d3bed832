"""An algorithm is one frozen value: eleven stages, each answered by a small piece.

The names below are published algorithms with their published defaults; kinship is written as
`replace`. A contradiction fails when the value is made, an unusual choice warns (`UnusualChoice`).
Rules that concern a run rather than the value are in `check_run`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from proximo.losses.pieces.advantages import (
    BatchScaled,
    BestAgainstWorst,
    BetaNormalized,
    GroupCentred,
    GroupNormalized,
    Imitation,
    LeaveOneOut,
    LiveScaled,
)
from proximo.losses.pieces.corrections import Correction
from proximo.losses.pieces.credit import Advantage, Gae, ReturnToGo, SignScaled, TeacherKl, TokenWhitened
from proximo.losses.pieces.divergences import KlLoss
from proximo.losses.pieces.extras import Extra, PositiveNll, ValueLoss, unmet_needs, value_loss_of
from proximo.losses.pieces.filters import Keep, KeepAll, KeepCorrect, KeepMixed
from proximo.losses.pieces.gates import (
    CappedScore,
    Clip,
    GammaScore,
    Gate,
    GeometricClip,
    Reinforce,
    SoftGate,
    Unclipped,
)
from proximo.losses.pieces.protocols import (
    TRAITS,
    AdvantageTraits,
    AnchorTraits,
    DivergenceTraits,
    GateTraits,
    KeepTraits,
    RatioTraits,
    Rules,
    ShapeProtocol,
    ShapeTraits,
    WeightsTraits,
)
from proximo.losses.pieces.ratios import (
    Anchor,
    CurrentPolicy,
    NoRatio,
    OldPolicy,
    Ratio,
    SequenceProductRatio,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from proximo.losses.pieces.selection import ClipCovariance, KlCovariance, Selection
from proximo.losses.pieces.shaping import KlReward, Shape, SoftOverlong, kl_reward_of, penalties_of
from proximo.losses.pieces.weights import ConstantLength, SequenceMean, SequenceSum, TokenMean, Weights

Piece = TypeVar("Piece")


class UnusualChoice(UserWarning):
    """A combination that runs but that no paper means; research is free to make it."""


@dataclass(frozen=True)
class Algorithm:
    """Eleven choices, in the order in which they act."""

    shape: Shape | tuple[Shape, ...] | None = None
    """1. Task score to reward: length penalties, KL in the reward. A tuple applies several."""
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
    """11. Terms added to the policy's loss. A tuple adds several."""

    def __post_init__(self) -> None:
        for stage, traits in TRAITS.items():
            for piece in _several(getattr(self, stage)):
                traits.read(piece)  # refuses a member of the wrong type before anything is computed with it
        # A distance that counts for nothing is none: no piece of it is computed and no reference kept.
        if self.kl is not None and self.kl.coefficient == 0:
            object.__setattr__(self, "kl", None)
        kept = tuple(shape for shape in self.shapes if not ShapeTraits.read(shape).is_off)
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
    def pieces(self) -> tuple[object, ...]:
        """All that were chosen, in the order in which they act."""
        several = (_several(getattr(self, stage.name)) for stage in fields(self))
        return tuple(piece for pieces in several for piece in pieces)

    @property
    def needs_reference(self) -> bool:
        """True if a reference policy must be kept: for KL in the loss or in the reward, or for the advantage."""
        reads = "ref_logprobs" in AdvantageTraits.read(self.advantage).all_needs
        return self.kl is not None or self.kl_reward is not None or reads

    @property
    def kl_reward(self) -> KlReward | None:
        return kl_reward_of(self.shapes)

    @property
    def length_penalties(self) -> tuple[ShapeProtocol, ...]:
        return penalties_of(self.shapes)

    def with_length_limit(self, completion_limit: int) -> "Algorithm":
        """The same algorithm with a length that was left to the run filled in."""
        with_limit = WeightsTraits.read(self.weights).with_limit
        if with_limit is None or (weights := with_limit(completion_limit)) == self.weights:
            return self
        return replace(self, weights=weights)

    def check_run(self, *, group_size: int, updates_per_batch: int) -> None:
        """Refuse a run that this algorithm cannot learn from."""
        keep, advantage = KeepTraits.read(self.keep), AdvantageTraits.read(self.advantage)
        if group_size < 2 and keep.compares:
            name = type(self.keep).__name__
            raise ValueError(f"group_size is {group_size}: {name} needs at least 2 siblings to find a mixed group")
        if group_size < 2 and not advantage.per_token and advantage.compares:
            name = type(self.advantage).__name__
            raise ValueError(f"group_size is {group_size}: {name} compares siblings, all advantages would be 0; use 2")
        if updates_per_batch > 1 and AnchorTraits.read(self.anchor).on_policy:
            raise ValueError(
                f"training.minibatches × training.epochs is {updates_per_batch}: with anchor "
                f"{type(self.anchor).__name__} every "
                "update after the first would be off-policy without a ratio; make both 1, or use OldPolicy with a ratio"
            )


def _several(pieces: Piece | tuple[Piece, ...] | None) -> tuple[Piece, ...]:
    if pieces is None:
        return ()
    return pieces if isinstance(pieces, tuple) else (pieces,)


def _contradictions(algorithm: Algorithm) -> Iterator[str]:
    for piece in algorithm.pieces:
        yield from Rules.read(piece).contradictions(algorithm)
    ratio, gate = RatioTraits.read(algorithm.ratio), GateTraits.read(algorithm.gate)
    advantage, anchor = AdvantageTraits.read(algorithm.advantage), AnchorTraits.read(algorithm.anchor)
    if gate.score_form and ratio.spans_row and not gate.weighs_rows:
        yield f"gate {algorithm.gate} is a score form, ratio {algorithm.ratio} spans a sequence: use TokenRatio()"
    if gate.ignores_ratio != ratio.is_constant:
        yield (
            f"gate {algorithm.gate} with ratio {algorithm.ratio}: Reinforce and NoRatio go together, any other gate "
            "needs a ratio"
        )
    if ratio.is_constant and not anchor.on_policy:
        yield f"anchor is {algorithm.anchor}, but without a ratio nothing is measured against it: use CurrentPolicy()"
    if ratio.pools and advantage.per_token and not gate.score_form:
        yield (
            f"ratio {algorithm.ratio} pools a row, advantage {algorithm.advantage} differs by token: use "
            "SequenceTokenRatio()"
        )
    if gate.pools and (advantage.per_token or ratio.spans_row or ratio.is_constant):
        yield (
            f"gate {algorithm.gate} takes token ratios and one advantage per row: use TokenRatio() and a group "
            "advantage"
        )
    if anchor.needs_sampler_logprobs and algorithm.correct is not None:
        name = type(algorithm.anchor).__name__
        yield f"correct is {algorithm.correct}, but with anchor {name} the ratio is the correction: use None"
    yield from unmet_needs(algorithm.extras)
    yield from _about_rewards(algorithm, advantage)
    for pieces in (algorithm.shapes, algorithm.extras):
        kinds = [type(piece).__name__ for piece in pieces]
        if len(set(kinds)) < len(kinds):
            yield f"{kinds} names one kind of piece twice: give each once"


def _about_rewards(algorithm: Algorithm, advantage: AdvantageTraits) -> Iterator[str]:
    value_loss = value_loss_of(algorithm.extras)
    if advantage.needs_values and value_loss is None:
        yield f"advantage {algorithm.advantage} needs a value model, and nothing trains one: add extra=ValueLoss()"
    if value_loss is not None and not advantage.needs_values:
        yield f"extra {value_loss} trains a value model that advantage {algorithm.advantage} never asks: leave it out"
    if algorithm.kl_reward is not None and advantage.needs_step_rewards:
        yield f"shape {algorithm.kl_reward} would be normalised as if it were a process step: use kl=KlLoss() instead"


def _unusual(algorithm: Algorithm) -> Iterator[str]:
    for piece in algorithm.pieces:
        yield from Rules.read(piece).remarks(algorithm)
    ratio, gate = RatioTraits.read(algorithm.ratio), GateTraits.read(algorithm.gate)
    if ratio.spans_row and WeightsTraits.read(algorithm.weights).by_token and not gate.score_form:
        yield (
            f"ratio {algorithm.ratio} with weights {algorithm.weights}: long completions count for more; "
            "SequenceMean() is usual"
        )
    # Rounding: 1 − (1 − 0.05) is above 0.05.
    if ratio.length_normalised and max(1 - gate.band[0], gate.band[1] - 1) > 0.05 + 1e-9:
        yield f"gate {algorithm.gate} on a length-normalised ratio hardly ever clips: GSPO uses Clip(3e-4, 4e-4)"
    if algorithm.kl is not None and not DivergenceTraits.read(algorithm.kl.estimator).pulls:
        yield (
            f"kl.estimator is {algorithm.kl.estimator}: its expected gradient is 0, it pulls nowhere; use K3(), K2() "
            "or UnbiasedK3()"
        )
    if algorithm.kl is not None and algorithm.kl_reward is not None:
        yield "KL is in the reward and in the loss: the reference pulls twice"


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
CLIP_COV = replace(GRPO, keep=KeepMixed(), gate=Clip(1.0, 1.0), select=ClipCovariance(), weights=TokenMean(), kl=None)
KL_COV = replace(CLIP_COV, gate=Unclipped(), select=KlCovariance())
LITE_PPO = replace(GRPO, advantage=BatchScaled(), weights=TokenMean(), kl=None)
LUSPO = replace(GSPO, gate=Clip(2e-3, 2.5e-3), weights=SequenceSum())
VESPO = replace(GRPO, ratio=SequenceProductRatio(), gate=GammaScore(), weights=TokenMean(), kl=None)

# Other signals on the same loop: a teacher's log-probs, the correct completions alone, pairs of completions.

DISTILL = replace(GRPO, advantage=TeacherKl(), weights=TokenMean(), kl=None)
RFT = replace(GPG, keep=KeepCorrect(), advantage=Imitation())
ONLINE_DPO = replace(RLOO, shape=None, keep=KeepMixed(), advantage=BestAgainstWorst())

# Two forms that circulate in blog posts on the papers, named so that they can be compared, not recommended.

GSPO_PRODUCT = replace(GSPO, ratio=SequenceProductRatio(), gate=Clip(0.2, 0.2))
SAPO_SEQUENCE = replace(
    SAPO,
    advantage=SignScaled(GroupNormalized(), positive=1.0, negative=2.0),
    ratio=SequenceProductRatio(),
    gate=SoftGate(5.0, 5.0, normalised=False),
)
