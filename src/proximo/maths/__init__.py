"""The mathematics: functions of tensors, independent of models, text and files.

Every piece is a frozen dataclass that can be called. All are exported here:
`from proximo.maths import Clip, TokenMean`.
"""

from proximo.maths.crediting import advantages
from proximo.maths.objective import policy_loss, token_terms
from proximo.maths.pairwise import BradleyTerry, Dpo, Ipo
from proximo.maths.pieces.advantages import (
    BatchScaled,
    BestAgainstWorst,
    BetaNormalized,
    GroupCentred,
    GroupNormalized,
    Imitation,
    LeaveOneOut,
    LiveScaled,
)
from proximo.maths.pieces.corrections import (
    GeometricRejection,
    IcePop,
    SequenceMasked,
    SequenceTruncated,
    TokenTruncated,
)
from proximo.maths.pieces.credit import (
    Gae,
    ProcessNormalized,
    ReturnToGo,
    SequenceWhitened,
    SignScaled,
    TeacherKl,
    TokenWhitened,
)
from proximo.maths.pieces.divergences import K1, K2, K3, KlLoss, UnbiasedK3
from proximo.maths.pieces.extras import EntropyBonus, PositiveNll, RouterBalance, ValueLoss, supervised_loss
from proximo.maths.pieces.gates import CappedScore, Clip, GammaScore, GeometricClip, Reinforce, SoftGate, Unclipped
from proximo.maths.pieces.keeping import KeepAll, KeepCorrect, KeepMixed, trained_mask
from proximo.maths.pieces.protocols import (
    AdvantageProtocol,
    AnchorProtocol,
    CorrectionProtocol,
    DivergenceProtocol,
    ExtraProtocol,
    GateProtocol,
    KeepProtocol,
    RatioProtocol,
    SelectionProtocol,
    ShapeProtocol,
    WeightsProtocol,
)
from proximo.maths.pieces.ratios import (
    CurrentPolicy,
    NoRatio,
    OldPolicy,
    SamplerPolicy,
    SequenceProductRatio,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from proximo.maths.pieces.selection import ClipCovariance, KlCovariance, OffPolicyMask, TopEntropy
from proximo.maths.pieces.shaping import AdaptiveKl, KlReward, LinearOverlong, SoftOverlong
from proximo.maths.pieces.weights import (
    ConstantLength,
    PromptMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
    token_weights,
)
from proximo.maths.plans import Plan, plan_step
from proximo.maths.records import Candidates, Credit, Feedback, LossInputs, Rows
from proximo.maths.rows import rows_of

__all__ = [
    "K1",
    "K2",
    "K3",
    "AdaptiveKl",
    "AdvantageProtocol",
    "AnchorProtocol",
    "BatchScaled",
    "BestAgainstWorst",
    "BetaNormalized",
    "BradleyTerry",
    "Candidates",
    "CappedScore",
    "Clip",
    "ClipCovariance",
    "ConstantLength",
    "CorrectionProtocol",
    "Credit",
    "CurrentPolicy",
    "DivergenceProtocol",
    "Dpo",
    "EntropyBonus",
    "ExtraProtocol",
    "Feedback",
    "Gae",
    "GammaScore",
    "GateProtocol",
    "GeometricClip",
    "GeometricRejection",
    "GroupCentred",
    "GroupNormalized",
    "IcePop",
    "Imitation",
    "Ipo",
    "KeepAll",
    "KeepCorrect",
    "KeepMixed",
    "KeepProtocol",
    "KlCovariance",
    "KlLoss",
    "KlReward",
    "LeaveOneOut",
    "LinearOverlong",
    "LiveScaled",
    "LossInputs",
    "NoRatio",
    "OffPolicyMask",
    "OldPolicy",
    "Plan",
    "PositiveNll",
    "ProcessNormalized",
    "PromptMean",
    "RatioProtocol",
    "Reinforce",
    "ReturnToGo",
    "RouterBalance",
    "Rows",
    "SamplerPolicy",
    "SelectionProtocol",
    "SequenceMasked",
    "SequenceMean",
    "SequenceProductRatio",
    "SequenceRatio",
    "SequenceSum",
    "SequenceTokenRatio",
    "SequenceTruncated",
    "SequenceWhitened",
    "ShapeProtocol",
    "SignScaled",
    "SoftGate",
    "SoftOverlong",
    "TeacherKl",
    "TokenMean",
    "TokenRatio",
    "TokenTruncated",
    "TokenWhitened",
    "TopEntropy",
    "UnbiasedK3",
    "Unclipped",
    "ValueLoss",
    "WeightsProtocol",
    "advantages",
    "plan_step",
    "policy_loss",
    "rows_of",
    "supervised_loss",
    "token_terms",
    "token_weights",
    "trained_mask",
]
