"""Why a token is pushed, clipped, gated or ignored, in words."""

import math
from collections.abc import Callable

from proximo.insight.lens.lens import StepView, TokenState
from proximo.insight.lens.steps import Step
from proximo.maths.pieces.corrections import IcePop, SequenceMasked
from proximo.maths.pieces.gates import Clip, GeometricClip, Reinforce, SoftGate, Unclipped

ROW_STATES = {
    "unscored": "its completion is unscored: the grader failed, so it is in no term and no denominator",
    "dropped": "its group was dropped before the update: all outcomes are the same",
}


def why(step: Step, seen: StepView, row: int, token: int) -> str:
    """One sentence on one token.

    Example: why(step, look(step, DAPO, config), 0, 3)
    -> "A > 0 and ratio 1.31 > 1.28, the gate's upper edge: no gradient"
    """
    if token >= int(step.batch.lengths[row]):
        return "nothing was sampled here"
    return _SENTENCES[TokenState(int(seen.state[step.layout.place(row, token)]))](step, seen, row, token)


def _outside(step: Step, seen: StepView, row: int, token: int) -> str:
    return "its completion was cut at the limit, and this algorithm leaves such completions out of the loss"


def _idle(step: Step, seen: StepView, row: int, token: int) -> str:
    if step.is_value_only:
        return "this step trained the value model alone"
    if step.state[row] in ROW_STATES:
        return ROW_STATES[step.state[row]]
    if bool((step.updates[:, row] >= 0).any()):
        return "all outcomes of its group are the same: this algorithm leaves it out, and out of the denominator"
    return "its completion is in no update"


def _dead(step: Step, seen: StepView, row: int, token: int) -> str:
    group = step.batch.group == step.batch.group[row]
    rewards = step.batch.rewards[group & ~step.batch.rewards.isnan()]
    alike = not seen.algorithm.advantage.per_token and len(rewards.unique()) == 1
    since = ", since all siblings earned the same" if alike else ""
    return f"its advantage is 0{since}: no gradient, but it counts in the denominator"


def _high(step: Step, seen: StepView, row: int, token: int) -> str:
    _, highest = seen.algorithm.gate.band
    return f"A > 0 and {_ratio(seen, row, token, highest)} > {_number(highest)}, the gate's upper edge: no gradient"


def _low(step: Step, seen: StepView, row: int, token: int) -> str:
    lowest, _ = seen.algorithm.gate.band
    return f"A < 0 and {_ratio(seen, row, token, lowest)} < {_number(lowest)}, the gate's lower edge: no gradient"


def _dual(step: Step, seen: StepView, row: int, token: int) -> str:
    gate = seen.algorithm.gate
    edge = gate.dual if isinstance(gate, Clip) and gate.dual is not None else math.inf
    return f"A < 0 and {_ratio(seen, row, token, edge)} > {_number(edge)}, the dual clip: no gradient"


def _soft(step: Step, seen: StepView, row: int, token: int) -> str:
    gate, place = seen.algorithm.gate, seen.layout.place(row, token)
    advantage, through = float(seen.advantages[place]), float(seen.through[place])
    side = ">" if advantage > 0 else "<"
    tau = ""
    if isinstance(gate, SoftGate):
        tau = f" at temperature {gate.tau_pos if advantage > 0 else gate.tau_neg:g}"
    said = f"A {side} 0 and {_ratio(seen, row, token)}: the gate lets {through:.1%} of the gradient through{tau}"
    return said + _corrected(seen, row, token)


def _open(step: Step, seen: StepView, row: int, token: int) -> str:
    lowest, highest = seen.algorithm.gate.band
    where = seen.layout.place(row, token)
    ratio, advantage = float(seen.ratio[where]), float(seen.advantages[where])
    verb = "raises" if advantage > 0 else "lowers"
    if isinstance(seen.algorithm.gate, Unclipped | Reinforce):
        said = f"{_ratio(seen, row, token)}, and nothing is clipped: the gradient passes whole"
    elif isinstance(seen.algorithm.gate, Clip | GeometricClip) and not lowest <= ratio <= highest:
        edge = highest if ratio > highest else lowest
        side, back = (">", "A < 0 pulls it back") if ratio > highest else ("<", "A > 0 pulls it back")
        said = f"{_ratio(seen, row, token, edge)} {side} {_number(edge)}, but {back}: the gradient passes whole"
    else:
        place = "within bounds" if lowest < highest else "near 1"
        said = f"{_ratio(seen, row, token)} is {place}: the gradient passes whole"
    return f"{said}, and {verb} this token's probability{_corrected(seen, row, token)}"


def _held(step: Step, seen: StepView, row: int, token: int) -> str:
    return "advantage and log-prob vary together here more than at nearly all tokens: it is held near the old policy"


def _dropped(step: Step, seen: StepView, row: int, token: int) -> str:
    kind = type(seen.algorithm.select).__name__
    return f"{kind} leaves it out: no gradient, but it counts in the denominator"


def _rejected(step: Step, seen: StepView, row: int, token: int) -> str:
    own = step.layout.of(row)
    log_weight = step.batch.old_logprobs[own] - step.batch.rollout_logprobs[own]
    correct = seen.algorithm.correct
    if isinstance(correct, IcePop):
        weight, where = log_weight[token], "here"
    elif isinstance(correct, SequenceMasked):
        weight, where = log_weight.sum(), "over the completion"
    else:
        weight, where = log_weight.mean(), "over the completion, in the mean"
    factor = _number(math.exp(min(float(weight), 80.0)), 1.0)
    return f"{type(correct).__name__} rejects it, old policy over sampler is {factor} {where}: no gradient"


_SENTENCES: dict[TokenState, Callable[[Step, StepView, int, int], str]] = {
    TokenState.OUTSIDE: _outside,
    TokenState.IDLE: _idle,
    TokenState.OPEN: _open,
    TokenState.SOFT: _soft,
    TokenState.HIGH: _high,
    TokenState.LOW: _low,
    TokenState.DUAL: _dual,
    TokenState.DEAD: _dead,
    TokenState.HELD: _held,
    TokenState.DROPPED: _dropped,
    TokenState.REJECTED: _rejected,
}


def _ratio(seen: StepView, row: int, token: int, edge: float | None = None) -> str:
    """With as many digits as tell it from the edge."""
    place = seen.layout.place(row, token)
    ratio, own = float(seen.ratio[place]), float(seen.token_ratio[place])
    said = f"ratio {_number(ratio, edge)}"
    return said if ratio == own else f"the completion's {said} (this token's own {_number(own)})"


def _corrected(seen: StepView, row: int, token: int) -> str:
    correction = float(seen.correction[seen.layout.place(row, token)])
    return "" if correction == 1 else f"; times {_number(correction)} for the sampler's mismatch"


def _number(value: float, edge: float | None = None) -> str:
    """Around 1 by its distance from 1, so that GSPO's edges can be read."""
    digits = 4 if edge is None or value == edge else 1 - math.floor(math.log10(max(abs(value - edge), 1e-12)))
    return f"{value:.{min(max(digits, 4), 9)}f}".rstrip("0").rstrip(".") if abs(value) < 1e4 else f"{value:.3g}"
