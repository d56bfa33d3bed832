"""The mathematics: functions of tensors, independent of models, text and files.

Every piece is a frozen dataclass that can be called. All are exported here:
`from proximo.losses import Clip, TokenMean`.
"""

from proximo.losses.advantage_inputs import advantages
from proximo.losses.inputs import rows_of
from proximo.losses.objective import policy_loss, token_terms
from proximo.losses.pairwise import BradleyTerry, Dpo, Ipo
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
from proximo.losses.pieces.corrections import (
    GeometricRejection,
    IcePop,
    SequenceMasked,
    SequenceTruncated,
    TokenTruncated,
)
from proximo.losses.pieces.credit import (
    Gae,
    ProcessNormalized,
    ReturnToGo,
    SequenceWhitened,
    SignScaled,
    TeacherKl,
    TokenWhitened,
)
from proximo.losses.pieces.divergences import K1, K2, K3, KlLoss, UnbiasedK3
from proximo.losses.pieces.extras import EntropyBonus, PositiveNll, RouterBalance, ValueLoss, supervised_loss
from proximo.losses.pieces.filters import KeepAll, KeepCorrect, KeepMixed, trained_mask
from proximo.losses.pieces.gates import CappedScore, Clip, GammaScore, GeometricClip, Reinforce, SoftGate, Unclipped
from proximo.losses.pieces.protocols import (
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
from proximo.losses.pieces.ratios import (
    CurrentPolicy,
    NoRatio,
    OldPolicy,
    SamplerPolicy,
    SequenceProductRatio,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from proximo.losses.pieces.selection import ClipCovariance, KlCovariance, OffPolicyMask, TopEntropy
from proximo.losses.pieces.shaping import AdaptiveKl, KlReward, LinearOverlong, SoftOverlong
from proximo.losses.pieces.weights import (
    ConstantLength,
    PromptMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
    token_weights,
)
from proximo.losses.records import Candidates, Credit, Feedback, LossInputs, Rows
from proximo.losses.token_weights import Plan, plan_step

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
