"""Explains in words why a token is pushed, clipped, gated or ignored."""

import math
from collections.abc import Callable

from proximo.insight.lens.lens import StepView
from proximo.insight.lens.states import TokenState
from proximo.insight.lens.steps import StoredStep
from proximo.insight.lens.turns import place_in_words
from proximo.losses.pieces.protocols import AdvantageTraits, CorrectionTraits, GateTraits

UNSCORED = "its completion is unscored: the grader failed, so it is in no term and no denominator"


def why(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    """One sentence on one token.

    Example: why(step, look(step, DAPO, config), 0, 3)
    -> "A > 0 and ratio 1.31 > 1.28, the upper clip bound: no gradient"
    """
    if token >= int(step.batch.lengths[row]):
        return "nothing was sampled here"
    return _SENTENCES[TokenState(int(seen.state[step.layout.position(row, token)]))](step, seen, row, token)


def _outside(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    if not step.batch.sampled[step.layout.position(row, token)]:
        answer = place_in_words(step.turns[row], token)
        return f"{answer or 'the policy did not sample it'}: it is input only, and not trained on"
    return "its completion was cut off at the limit, and this algorithm leaves such completions out of the loss"


def _idle(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    if step.is_value_only:
        return "this step trained only the value model"
    if step.state[row] == "unscored":
        return UNSCORED
    outcomes = step.batch.outcome[step.batch.group == step.batch.group[row]]
    alike = len(outcomes[~outcomes.isnan()].unique()) == 1
    if step.state[row] == "dropped":
        return (
            "its group was dropped before the update: all task scores are the same"
            if alike
            else "it was dropped before the update"
        )
    if bool((step.updates[:, row] >= 0).any()):
        reason = "all task scores of its group are the same" if alike else type(seen.algorithm.keep).__name__
        return f"{reason}: this algorithm leaves it out, and out of the denominator"
    return "its completion is in no update"


def _dead(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    group = step.batch.group == step.batch.group[row]
    rewards = step.batch.rewards[group & ~step.batch.rewards.isnan()]
    alike = not AdvantageTraits.read(seen.algorithm.advantage).per_token and len(rewards.unique()) == 1
    since = ", since all completions of its group have the same reward" if alike else ""
    return f"its advantage is 0{since}: no gradient, but it counts in the denominator"


def _blocked(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    where = seen.layout.position(row, token)
    ratio, advantage = float(seen.ratio[where]), float(seen.advantages[where])
    sign = ">" if advantage > 0 else "<"
    crossed = _edge(GateTraits.read(seen.algorithm.gate), ratio, advantage)
    if crossed is None:
        return (
            f"A {sign} 0 and {_ratio(seen, row, token)}, which {type(seen.algorithm.gate).__name__} blocks: no gradient"
        )
    edge, name = crossed
    side = ">" if ratio > edge else "<"
    return f"A {sign} 0 and {_ratio(seen, row, token, edge)} {side} {_number(edge)}, {name}: no gradient"


def _edge(gate: GateTraits, ratio: float, advantage: float) -> tuple[float, str] | None:
    """The edge that a blocked token has crossed, and its name; None if the gate has none there."""
    if gate.lens_edge is not None:
        return gate.lens_edge(ratio, advantage)
    lowest, highest = gate.band
    if lowest < highest and advantage > 0 and ratio > highest:
        return highest, "the upper clip bound"
    if lowest < highest and advantage < 0 and ratio < lowest:
        return lowest, "the lower clip bound"
    return None


def _soft(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    position = seen.layout.position(row, token)
    advantage, through = float(seen.advantages[position]), float(seen.through[position])
    side, manner = ">" if advantage > 0 else "<", GateTraits.read(seen.algorithm.gate).lens_manner
    how = "" if manner is None else f" {manner(advantage)}"
    text = f"A {side} 0 and {_ratio(seen, row, token)}: the gate keeps {through:.1%} of the gradient{how}"
    return text + _corrected(seen, row, token)


def _open(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    gate = GateTraits.read(seen.algorithm.gate)
    lowest, highest = gate.band
    where = seen.layout.position(row, token)
    ratio, advantage = float(seen.ratio[where]), float(seen.advantages[where])
    verb = "raises" if advantage > 0 else "lowers"
    pulled_back = ratio < lowest if advantage > 0 else ratio > highest
    if gate.ignores_ratio or not gate.clips:
        text = f"{_ratio(seen, row, token)}, and nothing is clipped: the full gradient passes"
    elif lowest < highest and pulled_back:
        edge = highest if ratio > highest else lowest
        side, back = (">", "A < 0 pulls it back") if ratio > highest else ("<", "A > 0 pulls it back")
        text = f"{_ratio(seen, row, token, edge)} {side} {_number(edge)}, but {back}: the full gradient passes"
    else:
        closeness = "within bounds" if lowest < highest else "near 1"
        text = f"{_ratio(seen, row, token)} is {closeness}: the full gradient passes"
    return f"{text}, and {verb} this token's probability{_corrected(seen, row, token)}"


def _held(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    return "its covariance of advantage and log-prob is among the highest: it is held near the old policy"


def _dropped(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    kind = type(seen.algorithm.select).__name__
    return f"{kind} leaves it out: no gradient, but it counts in the denominator"


def _rejected(step: StoredStep, seen: StepView, row: int, token: int) -> str:
    positions = step.layout.of(row)
    sampled = step.batch.sampled[positions]
    log_weight = (step.batch.old_logprobs[positions] - step.batch.rollout_logprobs[positions]) * sampled
    correct = seen.algorithm.correct
    weight, where = {
        "token": (log_weight[token], "here"),
        "product": (log_weight.sum(), "over the completion"),
        "mean": (log_weight.sum() / sampled.sum(), "over the completion, in the mean"),
    }[CorrectionTraits.read(correct).reads]
    factor = _number(math.exp(min(float(weight), 80.0)), 1.0)
    return f"{type(correct).__name__} rejects it, old policy over sampler is {factor} {where}: no gradient"


_SENTENCES: dict[TokenState, Callable[[StoredStep, StepView, int, int], str]] = {
    TokenState.OUTSIDE: _outside,
    TokenState.IDLE: _idle,
    TokenState.OPEN: _open,
    TokenState.SOFT: _soft,
    TokenState.HIGH: _blocked,
    TokenState.LOW: _blocked,
    TokenState.DUAL: _blocked,
    TokenState.DEAD: _dead,
    TokenState.HELD: _held,
    TokenState.DROPPED: _dropped,
    TokenState.REJECTED: _rejected,
}


def _ratio(seen: StepView, row: int, token: int, edge: float | None = None) -> str:
    """The ratio, with enough digits to tell it from the edge."""
    position = seen.layout.position(row, token)
    ratio, token_ratio = float(seen.ratio[position]), float(seen.token_ratio[position])
    text = f"ratio {_number(ratio, edge)}"
    return text if ratio == token_ratio else f"the completion's {text} (this token's own {_number(token_ratio)})"


def _corrected(seen: StepView, row: int, token: int) -> str:
    correction = float(seen.correction[seen.layout.position(row, token)])
    return "" if correction == 1 else f"; times {_number(correction)} for the sampler's mismatch"


def _number(value: float, edge: float | None = None) -> str:
    """A number with enough digits to tell it from the edge, also for GSPO's narrow clip range."""
    digits = 4 if edge is None or value == edge else 1 - math.floor(math.log10(max(abs(value - edge), 1e-12)))
    return f"{value:.{min(max(digits, 4), 9)}f}".rstrip("0").rstrip(".") if abs(value) < 1e4 else f"{value:.3g}"
