"""The named values say what the papers say, and contradictions fail when a value is made."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from proximo import algorithms
from proximo.algorithms import (
    BNPO,
    CISPO,
    CLIP_COV,
    DAPO,
    DR_GRPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    GSPO_PRODUCT,
    GSPO_TOKEN,
    KL_COV,
    LITE_PPO,
    LUSPO,
    PPO,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    RLOO,
    SAPO,
    SAPO_SEQUENCE,
    VAPO,
    VESPO,
    Algorithm,
    UnusualChoice,
)
from proximo.losses import (
    K1,
    BatchScaled,
    BestAgainstWorst,
    BetaNormalized,
    CappedScore,
    Clip,
    ClipCovariance,
    ConstantLength,
    CurrentPolicy,
    Gae,
    GammaScore,
    GeometricClip,
    GroupCentred,
    GroupNormalized,
    Imitation,
    KeepAll,
    KeepCorrect,
    KeepMixed,
    KlCovariance,
    KlLoss,
    KlReward,
    LeaveOneOut,
    LiveScaled,
    NoRatio,
    OldPolicy,
    PositiveNll,
    ProcessNormalized,
    PromptMean,
    Reinforce,
    ReturnToGo,
    SamplerPolicy,
    SequenceMean,
    SequenceProductRatio,
    SequenceRatio,
    SequenceSum,
    SequenceTokenRatio,
    SignScaled,
    SoftGate,
    SoftOverlong,
    TeacherKl,
    TokenMean,
    TokenRatio,
    TokenTruncated,
    TokenWhitened,
    Unclipped,
    ValueLoss,
)

# shape, keep, advantage, anchor, ratio, gate, select, correct, kl, weights, extra
STD = GroupNormalized(ddof=1, epsilon=1e-6)
OLD = OldPolicy()
ALL, MIXED = KeepAll(), KeepMixed()
TOKEN = TokenRatio()
TABLE = {
    "PPO": (KlReward(0.05, K1()), ALL, TokenWhitened(Gae(1.0, 0.95)), OLD, TOKEN, Clip(0.2, 0.2), None, None, None, TokenMean(), ValueLoss(0.1, 0.2)),
    "GRPO": (None, ALL, STD, OLD, TOKEN, Clip(0.2, 0.2), None, None, KlLoss(0.04), SequenceMean(), None),
    "DAPO": (SoftOverlong(), MIXED, STD, OLD, TOKEN, Clip(0.2, 0.28), None, None, None, TokenMean(), None),
    "GSPO": (None, ALL, STD, OLD, SequenceRatio(), Clip(3e-4, 4e-4), None, None, None, SequenceMean(), None),
    "GSPO_TOKEN": (None, ALL, STD, OLD, SequenceTokenRatio(), Clip(3e-4, 4e-4), None, None, None, SequenceMean(), None),
    "SAPO": (None, ALL, STD, OLD, TOKEN, SoftGate(1.0, 1.05), None, None, None, SequenceMean(), None),
    "DR_GRPO": (None, ALL, GroupCentred(), OLD, TOKEN, Clip(0.2, 0.2), None, None, None, ConstantLength(), None),
    "RLOO": (KlReward(0.03, K1()), ALL, LeaveOneOut(), CurrentPolicy(), NoRatio(), Reinforce(), None, None, None, SequenceSum(), None),
    "REINFORCE_PP": (KlReward(0.001, K1()), ALL, TokenWhitened(ReturnToGo(1.0)), OLD, TOKEN, Clip(0.2, 0.2), None, None, None, SequenceMean(), None),
    "REINFORCE_PP_BASELINE": (None, ALL, TokenWhitened(GroupCentred()), OLD, TOKEN, Clip(0.2, 0.2), None, None, None, TokenMean(), None),
    "CISPO": (SoftOverlong(), MIXED, STD, OLD, TOKEN, CappedScore(4.0, None), None, None, None, TokenMean(), None),
    "GMPO": (None, ALL, STD, OLD, TOKEN, GeometricClip(0.4, 0.4), None, None, None, SequenceMean(), None),
    "GPG": (None, ALL, LiveScaled(), CurrentPolicy(), NoRatio(), Reinforce(), None, None, None, TokenMean(), None),
    "BNPO": (None, ALL, BetaNormalized(), OLD, TOKEN, Clip(0.2, 0.2), None, None, None, SequenceMean(), None),
    "VAPO": (None, ALL, TokenWhitened(Gae(1.0, length_adaptive=0.05, critic_decay=1.0)), OLD, TOKEN, Clip(0.2, 0.28), None, None, None, TokenMean(), (ValueLoss(0.1, 0.2), PositiveNll(0.1))),
    "CLIP_COV": (None, MIXED, STD, OLD, TOKEN, Clip(1.0, 1.0), ClipCovariance(2e-4, 1.0, 5.0), None, None, TokenMean(), None),
    "KL_COV": (None, MIXED, STD, OLD, TOKEN, Unclipped(), KlCovariance(2e-3, 1.0), None, None, TokenMean(), None),
    "LITE_PPO": (None, ALL, BatchScaled(), OLD, TOKEN, Clip(0.2, 0.2), None, None, None, TokenMean(), None),
    "LUSPO": (None, ALL, STD, OLD, SequenceRatio(), Clip(2e-3, 2.5e-3), None, None, None, SequenceSum(), None),
    "VESPO": (None, ALL, STD, OLD, SequenceProductRatio(), GammaScore(2.0, 3.0, 3.0, 2.0), None, None, None, TokenMean(), None),
    "GSPO_PRODUCT": (None, ALL, STD, OLD, SequenceProductRatio(), Clip(0.2, 0.2), None, None, None, SequenceMean(), None),
    "DISTILL": (None, ALL, TeacherKl(1.0, 0.0, None), OLD, TOKEN, Clip(0.2, 0.2), None, None, None, TokenMean(), None),
    "RFT": (None, KeepCorrect(0.0), Imitation(), CurrentPolicy(), NoRatio(), Reinforce(), None, None, None, TokenMean(), None),
    "ONLINE_DPO": (None, MIXED, BestAgainstWorst(0.1), CurrentPolicy(), NoRatio(), Reinforce(), None, None, None, SequenceSum(), None),
    "SAPO_SEQUENCE": (None, ALL, SignScaled(STD, 1.0, 2.0), OLD, SequenceProductRatio(), SoftGate(5.0, 5.0, False), None, None, None, SequenceMean(), None),
}  # fmt: skip


def test_every_named_value_is_in_the_table():
    assert {name for name, value in vars(algorithms).items() if isinstance(value, Algorithm)} == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_named_value(name: str):
    assert getattr(algorithms, name) == Algorithm(*TABLE[name])


def test_eleven_stages_in_order():
    stages = "shape keep advantage anchor ratio gate select correct kl weights extra"
    assert [field.name for field in fields(Algorithm)] == stages.split()


def test_an_algorithm_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        GRPO.gate = Clip(0.1, 0.1)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (CISPO, {"ratio": SequenceRatio()}, "is a score form"),
        (VESPO, {"ratio": SequenceRatio()}, "use ratio=SequenceProductRatio"),
        (GRPO, {"ratio": NoRatio()}, "Reinforce and NoRatio go together"),
        (GPG, {"ratio": TokenRatio()}, "Reinforce and NoRatio go together"),
        (GPG, {"anchor": OldPolicy()}, "nothing is measured against it"),
        (GSPO, {"advantage": TokenWhitened(ReturnToGo())}, "use SequenceTokenRatio"),
        (GSPO_PRODUCT, {"advantage": ProcessNormalized()}, "use SequenceTokenRatio"),
        (GMPO, {"advantage": ReturnToGo()}, "one advantage per row"),
        (GMPO, {"ratio": SequenceRatio()}, "takes token ratios"),
        (DAPO, {"anchor": SamplerPolicy(), "correct": TokenTruncated()}, "the ratio is the correction"),
        (PPO, {"extra": None}, r"add extra=ValueLoss\(\)"),
        (GRPO, {"extra": ValueLoss()}, "never asks"),
        (GRPO, {"shape": KlReward(), "advantage": ProcessNormalized()}, "as if it were a process step"),
        (GRPO, {"shape": (SoftOverlong(), SoftOverlong())}, "names one kind of piece twice"),
    ],
)
def test_a_contradiction_fails_when_the_value_is_made(algorithm: Algorithm, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(algorithm, **changes)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (GSPO, {"weights": TokenMean()}, "long completions count for more"),
        (GSPO_TOKEN, {"weights": TokenMean()}, "long completions count for more"),
        (GSPO, {"gate": Clip(0.2, 0.2)}, "GSPO uses"),
        (SAPO, {"gate": SoftGate(1.0, 0.95)}, "tau_neg below tau_pos"),
        (GRPO, {"kl": KlLoss(0.04, K1())}, "expected gradient is 0"),
        (GRPO, {"shape": KlReward()}, "pulls twice"),
        (DR_GRPO, {"advantage": GroupNormalized()}, "Dr. GRPO drops the std too"),
        (KL_COV, {"gate": Clip(0.2, 0.2)}, "KL-Cov is defined without a clip"),
    ],
)
def test_an_unusual_choice_warns(algorithm: Algorithm, changes: dict, message: str):
    with pytest.warns(UnusualChoice, match=message):
        replace(algorithm, **changes)


def test_sensible_neighbours_are_silent():
    replace(DAPO, weights=PromptMean())
    replace(PPO, shape=(KlReward(), SoftOverlong()))
    replace(GPG, weights=SequenceMean())
    replace(PPO, advantage=Gae(decay=0.0))
    replace(PPO, advantage=Gae(decay=1.0))
    replace(GSPO_TOKEN, advantage=ProcessNormalized())
    replace(GRPO, correct=TokenTruncated())


def test_rules_of_a_run():
    GRPO.check_run(group_size=2, updates_per_batch=4)
    PPO.check_run(group_size=1, updates_per_batch=4)
    GPG.check_run(group_size=8, updates_per_batch=1)
    with pytest.raises(ValueError, match="group_size is 1: KeepMixed needs at least 2"):
        DAPO.check_run(group_size=1, updates_per_batch=1)
    with pytest.raises(ValueError, match="group_size is 1: GroupNormalized compares siblings"):
        GRPO.check_run(group_size=1, updates_per_batch=1)
    with pytest.raises(ValueError, match="training.epochs is 2: with anchor CurrentPolicy"):
        RLOO.check_run(group_size=4, updates_per_batch=2)


def test_kinship():
    assert replace(DAPO, gate=GRPO.gate, weights=GRPO.weights, kl=GRPO.kl, shape=None, keep=KeepAll()) == GRPO
    assert replace(GSPO_TOKEN, ratio=SequenceRatio()) == GSPO
    assert replace(LUSPO, gate=GSPO.gate, weights=SequenceMean()) == GSPO
    assert replace(LITE_PPO, advantage=GroupNormalized()) == replace(GRPO, kl=None, weights=TokenMean())
    assert CLIP_COV.select != KL_COV.select
    assert {BNPO.kl, GMPO.kl, VAPO.kl, REINFORCE_PP.kl, REINFORCE_PP_BASELINE.kl, SAPO_SEQUENCE.kl} == {None}
