"""The mathematics: tensors in, tensors out. It knows of no model, no text and no file.

Every piece is a frozen value that is also a function, and all of them can be had from here:
`from proximo.maths import Clip, TokenMean`.
"""

from proximo.maths.objective import Plan, plan_step, policy_loss, token_terms
from proximo.maths.pairwise import BradleyTerry, Dpo, Ipo
from proximo.maths.pieces.advantages import (
    BatchScaled,
    BetaNormalized,
    Feedback,
    GroupCentred,
    GroupNormalized,
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
    TokenWhitened,
    advantages,
)
from proximo.maths.pieces.divergences import K1, K2, K3, KlLoss, UnbiasedK3
from proximo.maths.pieces.extras import EntropyBonus, PositiveNll, RouterBalance, ValueLoss, supervised_loss
from proximo.maths.pieces.gates import CappedScore, Clip, GammaScore, GeometricClip, Reinforce, SoftGate, Unclipped
from proximo.maths.pieces.keeping import KeepAll, KeepMixed, trained_mask
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
from proximo.maths.pieces.weights import ConstantLength, PromptMean, SequenceMean, SequenceSum, TokenMean
from proximo.maths.rows import Rows, rows_of

__all__ = [
    "K1",
    "K2",
    "K3",
    "AdaptiveKl",
    "BatchScaled",
    "BetaNormalized",
    "BradleyTerry",
    "CappedScore",
    "Clip",
    "ClipCovariance",
    "ConstantLength",
    "CurrentPolicy",
    "Dpo",
    "EntropyBonus",
    "Feedback",
    "Gae",
    "GammaScore",
    "GeometricClip",
    "GeometricRejection",
    "GroupCentred",
    "GroupNormalized",
    "IcePop",
    "Ipo",
    "KeepAll",
    "KeepMixed",
    "KlCovariance",
    "KlLoss",
    "KlReward",
    "LeaveOneOut",
    "LinearOverlong",
    "LiveScaled",
    "NoRatio",
    "OffPolicyMask",
    "OldPolicy",
    "Plan",
    "PositiveNll",
    "ProcessNormalized",
    "PromptMean",
    "Reinforce",
    "ReturnToGo",
    "RouterBalance",
    "Rows",
    "SamplerPolicy",
    "SequenceMasked",
    "SequenceMean",
    "SequenceProductRatio",
    "SequenceRatio",
    "SequenceSum",
    "SequenceTokenRatio",
    "SequenceTruncated",
    "SequenceWhitened",
    "SignScaled",
    "SoftGate",
    "SoftOverlong",
    "TokenMean",
    "TokenRatio",
    "TokenTruncated",
    "TokenWhitened",
    "TopEntropy",
    "UnbiasedK3",
    "Unclipped",
    "ValueLoss",
    "advantages",
    "plan_step",
    "policy_loss",
    "rows_of",
    "supervised_loss",
    "token_terms",
    "trained_mask",
]
