"""An algorithm's objective in mathematical notation, built from its pieces, so that it is never out of date.

ρ is the ratio the gate sees, A the advantage, w a token's weight. Sums run over sampled tokens.
"""

import math
from dataclasses import dataclass

from proximo.algorithms import Algorithm
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
    Correction,
    GeometricRejection,
    IcePop,
    SequenceMasked,
    SequenceTruncated,
    TokenTruncated,
)
from proximo.losses.pieces.credit import (
    Advantage,
    Gae,
    ProcessNormalized,
    ReturnToGo,
    SequenceWhitened,
    SignScaled,
    TeacherKl,
    TokenWhitened,
)
from proximo.losses.pieces.divergences import K1, K2, K3, Divergence, UnbiasedK3
from proximo.losses.pieces.extras import EntropyBonus, Extra, PositiveNll, RouterBalance, ValueLoss
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
from proximo.losses.pieces.ratios import (
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
from proximo.losses.pieces.selection import ClipCovariance, KlCovariance, OffPolicyMask, Selection, TopEntropy
from proximo.losses.pieces.shaping import KlReward, LinearOverlong, Shape, SoftOverlong
from proximo.losses.pieces.traits import KeepTraits, Traits
from proximo.losses.pieces.weights import ConstantLength, PromptMean, SequenceMean, SequenceSum, TokenMean, Weights


@dataclass(frozen=True)
class Formula(Traits):
    """How a piece from outside is written down, where it says so."""

    formula: str | None = None
    """In the letters of this file; of an extra or a shape with the sign that it has in the objective."""


def given(piece: object, sign: str = "") -> str:
    """A piece's own formula; else its name, behind the sign that it has in the objective."""
    return Formula.read(piece).formula or f"{sign}{type(piece).__name__} (formula not given)"


def objective(algorithm: Algorithm) -> list[str]:
    """The objective to be maximised, and what its letters stand for."""
    core = of_gate(algorithm.gate)
    if algorithm.correct is not None:
        core = f"w_μ · {core}"
    if algorithm.kl is not None:
        core = f"[ {core} − {algorithm.kl.coefficient:g} · KL ]"
    extras = "".join(of_extra(extra) for extra in algorithm.extras)
    lines = [f"J(θ) = {of_weights(algorithm.weights)} {core}{extras}"]
    ratio = of_ratio(algorithm.ratio, algorithm.anchor)
    if ratio:
        lines.append(f"ρ = {ratio}")
    lines.append(f"A = {of_advantage(algorithm.advantage)}")
    if algorithm.shapes:
        lines.append(f"R = outcome {' '.join(of_shape(shape) for shape in algorithm.shapes)}")
    if algorithm.correct is not None:
        lines.append(f"w_μ = {of_correction(algorithm.correct)}")
    if algorithm.kl is not None:
        lines.append(f"KL = {of_divergence(algorithm.kl.estimator)}")
    if algorithm.select is not None:
        lines.append(f"without {of_selection(algorithm.select)}")
    if algorithm.keep != KeepAll():
        lines.append(f"over {of_keep(algorithm.keep)}")
    return lines


def of_gate(gate: Gate) -> str:
    match gate:
        case Clip(low, high, None):
            return f"min( ρ·A, clip(ρ, {1 - low:g}, {1 + high:g})·A )"
        case Clip(low, high, dual):
            return f"max( min( ρ·A, clip(ρ, {1 - low:g}, {1 + high:g})·A ), {dual:g}·A if A < 0 )"
        case SoftGate(tau_pos, tau_neg, normalised):
            return f"{'(4/τ)·' if normalised else ''}σ( τ(ρ − 1) ) · A,  τ = {tau_pos:g} if A > 0 else {tau_neg:g}"
        case Unclipped():
            return "ρ · A"
        case GeometricClip(low, high):
            return f"( Π_t ρ clipped at {math.exp(high):.4g} if A > 0, at {math.exp(-low):.4g} else )^(1/|y|) · A"
        case Reinforce():
            return "A · log π"
        case CappedScore(high, low):
            return f"sg[ clip(ρ, {0 if low is None else 1 - low:g}, {1 + high:g}) ] · A · log π"
        case GammaScore(k_pos, l_pos, k_neg, l_neg):
            pairs = f"({k_pos:g}, {l_pos:g}) if A ≥ 0 else ({k_neg:g}, {l_neg:g})"
            return f"sg[ e^λ·ρ^k·e^(−λρ) ] · A · log π,  (k, λ) = {pairs}"
    return given(gate)


def of_ratio(ratio: Ratio, anchor: Anchor) -> str:
    below = of_anchor(anchor)
    match ratio:
        case NoRatio():
            return ""
        case TokenRatio():
            return f"π(y_t) / {below}(y_t)"
        case SequenceRatio():
            return f"( Π_t π(y_t) / {below}(y_t) )^(1/|y|)"
        case SequenceTokenRatio():
            return f"sg[ ( Π_t π(y_t) / {below}(y_t) )^(1/|y|) ] · π(y_t) / sg[π(y_t)]"
        case SequenceProductRatio(max_log):
            return f"Π_t π(y_t) / {below}(y_t),  its log within ±{max_log:g}"
    return given(ratio)


def of_anchor(anchor: Anchor) -> str:
    match anchor:
        case OldPolicy():
            return "π_old"
        case SamplerPolicy():
            return "μ"
        case CurrentPolicy():
            return "sg[π]"
    return given(anchor)


def of_advantage(advantage: Advantage) -> str:
    match advantage:
        case GroupNormalized(ddof, epsilon):
            return f"(R − group mean) / (group std + {epsilon:g}),  ddof {ddof};  0 if all R are equal"
        case GroupCentred():
            return "R − group mean"
        case LeaveOneOut():
            return "R − mean of the other siblings"
        case BatchScaled(ddof, epsilon):
            return f"(R − group mean) / (batch std of R + {epsilon:g}),  ddof {ddof}"
        case LiveScaled():
            return "(R − group mean) · rows / rows in groups whose R differ"
        case BetaNormalized():
            return "(R − p) / Beta density(p),  p the group's mean"
        case Imitation():
            return "1"
        case BestAgainstWorst(beta):
            margin = "log π/π_ref of the best − of the worst"
            return f"±n·{beta:g}·σ( −{beta:g}·({margin}) ) on the best and the worst of a group of n, else 0"
        case TeacherKl(coefficient, discount, of):
            later = "" if discount == 0 else f", and later tokens' by {discount:g}"
            rewarded = "" if of is None else f" + {of_advantage(of)}"
            return f"{coefficient:g} · (log π_teacher − log π_old){later}{rewarded}"
        case ReturnToGo(discount):
            return f"R_t + R_t+1 + …,  discount {discount:g}"
        case Gae():
            decay = (
                f"{advantage.decay:g}"
                if advantage.length_adaptive is None
                else f"1 − 1/({advantage.length_adaptive:g}·|y|)"
            )
            critic = "" if advantage.critic_decay is None else f" (critic {advantage.critic_decay:g})"
            return f"Σ_l (γλ)^l δ_t+l,  δ_t = R_t + γ·V_t+1 − V_t,  γ = {advantage.discount:g}, λ = {decay}{critic}"
        case ProcessNormalized(ddof, epsilon):
            return f"Σ of the steps still to end of (R_step − group mean) / (group std + {epsilon:g}),  ddof {ddof}"
        case TokenWhitened(of, _):
            return f"whitened over all sampled tokens: {of_advantage(of)}"
        case SequenceWhitened(of, _):
            return f"whitened over all rows: {of_advantage(of)}"
        case SignScaled(of, positive, negative):
            return f"{of_advantage(of)};  ·{positive:g} if A > 0, ·{negative:g} if A < 0"
    return given(advantage)


def of_weights(weights: Weights) -> str:
    match weights:
        case TokenMean():
            return "(1/N) Σ_i Σ_t"
        case SequenceMean():
            return "(1/B) Σ_i (1/|y_i|) Σ_t"
        case PromptMean():
            return "(1/P) Σ_prompts (1/tokens of the group) Σ_i Σ_t"
        case SequenceSum():
            return "(1/B) Σ_i Σ_t"
        case ConstantLength(length):
            return f"(1/B) Σ_i (1/{'L' if length is None else length}) Σ_t"
    return given(weights)


UNIT = "u = half of what a right answer earns more than a wrong one"
"""1 where rewards are ±1, as in DAPO's paper; 0.5 where they are 0 and 1."""


def of_shape(shape: Shape) -> str:
    match shape:
        case SoftOverlong(limit, cache, cap):
            most = "" if cap is None else f", at most {cap:g}"
            lengths = f"L = {limit or 'completion limit'}, C = {cache or 'L/5'}"
            return f"− u · (|y| − L + C)/C where positive{most};  {lengths}, {UNIT}"
        case LinearOverlong(coefficient, limit):
            return f"− u · {coefficient:g} · tokens beyond {limit or 'the completion limit'};  {UNIT}"
        case KlReward(coefficient, estimator):
            return f"− {coefficient:g} · ({of_divergence(estimator)}) at every token"
    return given(shape, "+ ")


def of_divergence(divergence: Divergence) -> str:
    match divergence:
        case K1():
            return "log π − log π_ref"
        case K2():
            return "½ (log π − log π_ref)²"
        case K3():
            return "π_ref/π − log(π_ref/π) − 1"
        case UnbiasedK3():
            return "π/π_old · ( π_ref/π − log(π_ref/π) − 1 )"
    return given(divergence)


def of_correction(correction: Correction) -> str:
    match correction:
        case TokenTruncated(cap):
            return f"min( π_old/μ, {cap:g} )"
        case SequenceTruncated(cap):
            return f"min( Π_t π_old/μ, {cap:g} )"
        case SequenceMasked(low, high):
            return f"Π_t π_old/μ within [{low:g}, {high:g}], else 0"
        case IcePop(low, high):
            return f"π_old/μ within [{low:g}, {high:g}], else 0"
        case GeometricRejection(low, high):
            return f"1 if ( Π_t π_old/μ )^(1/|y|) is within [{low:g}, {high:g}], else 0"
    return given(correction)


def of_selection(selection: Selection) -> str:
    match selection:
        case ClipCovariance(share, low, high):
            return f"{share:g} of the tokens, drawn from those with covariance of A and log π in ({low:g}, {high:g})"
        case KlCovariance(share, coefficient):
            where = f"the {share:g} of tokens with the highest covariance of A and log π"
            return f"freedom for {where}: − {coefficient:g}·|log ρ| there"
        case TopEntropy(share):
            return f"all but the {share:g} of tokens with the highest entropy"
        case OffPolicyMask(threshold):
            return f"completions with A < 0 and mean log μ/π above {threshold:g}"
    return given(selection)


def of_keep(keep: Keep) -> str:
    cut = "" if KeepTraits.read(keep).truncated else ", truncated completions masked"
    match keep:
        case KeepAll():
            return f"all groups{cut}"
        case KeepMixed():
            return f"groups with both right and wrong outcomes{cut}"
        case KeepCorrect(above):
            return f"completions with an outcome above {above:g}{cut}"
    return given(keep)


def of_extra(extra: Extra) -> str:
    match extra:
        case ValueLoss(coefficient, clip):
            clipped = "" if clip is None else f", V within ±{clip:g} of V_old"
            return f"  − {coefficient:g} · ½(V − return)²{clipped}"
        case EntropyBonus(coefficient):
            return f"  + {coefficient:g} · entropy"
        case PositiveNll(coefficient):
            return f"  + {coefficient:g} · mean log π of correct completions"
        case RouterBalance(coefficient):
            return (
                f"  − {coefficient:g} · X Σ_i f_i·P_i over X experts, f an expert's share of tokens, P its mean weight"
            )
    return f"  {given(extra, '− ')}"
