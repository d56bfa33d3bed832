"""Draws the diagrams of the algorithms' pages into docs/images: `make diagrams`. A second.

Curves and the chain's changes are computed from the algorithms' own values, so that they cannot say anything else.
"""

import math
from pathlib import Path

import torch
from drawing import Panel, Point, arrow, box, picture, words

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm
from proximo.losses.pieces.protocols import GateProtocol

IMAGES = Path(__file__).resolve().parents[1] / "images"
WIDTH = 860
SPREAD = 0.05
"""Standard deviation of a token's log-ratio in the picture of lengths: an update or two of a usual run."""


def models() -> str:
    """Which models PPO, GRPO and DPO hold, and what flows between them."""
    parts = []
    for column, (title, held) in enumerate((("PPO", "four models"), ("GRPO", "two models"), ("DPO", "two models"))):
        left = 20 + 285 * column
        parts += [words(left, 34, title, "head"), words(left + 60, 34, held, "small muted")]
    parts += [*_online(20, value=True), *_online(305, value=False), *_offline(590)]
    parts.append(
        words(
            20,
            372,
            "Blue boxes are trained, grey ones stay as they are. A rule or a test takes the reward",
            "small muted",
        )
    )
    parts.append(
        words(
            20, 388, "model's place where the answer can be checked; without a KL there is no reference.", "small muted"
        )
    )
    label = (
        "PPO holds policy, value model, reference and reward model; GRPO policy and reference; DPO policy and reference"
    )
    return picture(WIDTH, 402, label, parts)


def _online(left: float, *, value: bool) -> list[str]:
    """PPO's or GRPO's column: sampled, graded, compared, updated."""
    middle = left + 60
    parts = [
        box(left, 52, 120, ["policy", "samples"], "trained"),
        arrow((middle, 96), (middle, 132)),
        words(middle + 8, 118, "completions" if value else "G completions", "small muted"),
        box(left, 134, 120, ["reward model" if value else "rule or model", "one reward each"]),
        box(left + 140, 134, 110, ["reference", "KL per token"]),
        arrow((left + 120, 74), (left + 195, 74), (left + 195, 132)),
        arrow((middle, 178), (middle, 234)),
    ]
    if value:
        parts += [
            arrow((left + 195, 178), (left + 195, 205), (left + 130, 205), (left + 105, 234)),
            box(left + 140, 236, 110, ["value model", "V per token"], "trained"),
            arrow((left + 138, 258), (left + 122, 258)),
            box(left, 236, 120, ["GAE", "A per token"]),
        ]
    else:
        parts += [
            box(left, 236, 120, ["group", "(r − mean) / std"]),
            arrow((left + 195, 178), (left + 195, 326), (left + 122, 326)),
            words(left + 202, 262, "KL in", "small muted"),
            words(left + 202, 277, "the loss", "small muted"),
        ]
    return [*parts, arrow((middle, 280), (middle, 306)), box(left, 308, 120, ["clipped update"], height=36)]


def _offline(left: float) -> list[str]:
    """DPO's column: pairs that are there already."""
    middle = left + 125
    return [
        box(left + 40, 52, 170, ["pairs", "chosen and rejected"]),
        arrow((left + 80, 96), (left + 60, 132)),
        arrow((left + 170, 96), (left + 195, 132)),
        box(left, 134, 120, ["policy", "log-probs"], "trained"),
        box(left + 140, 134, 110, ["reference", "log-probs"]),
        arrow((left + 60, 178), (left + 100, 234)),
        arrow((left + 195, 178), (left + 155, 234)),
        box(left + 40, 236, 170, ["log σ of the margin", "no samples, no rewards"]),
        arrow((middle, 280), (middle, 306)),
        box(left + 65, 308, 120, ["update"], height=36),
    ]


def gates() -> str:
    """What a token's gradient is multiplied by, against its ratio, for both signs of the advantage."""
    named = (("GRPO", GRPO), ("DAPO", DAPO), ("SAPO", SAPO))
    parts = []
    for column, (sign, title) in enumerate(((1.0, "A > 0: what was good"), (-1.0, "A < 0: what was bad"))):
        panel = Panel(60 + 420 * column, 56, 350, 210, (0.0, 2.5), (0.0, 2.5))
        parts += panel.frame(
            title, [(x, f"{x:g}") for x in (0, 0.5, 1, 1.5, 2, 2.5)], [(y, f"{y:g}") for y in (0, 1, 2)]
        )
        for number, (_, algorithm) in enumerate(named):
            parts.append(panel.curve(_pull(algorithm.gate, sign), number))
        parts.append(words(panel.left + 175, 302, "ratio of the new to the old probability", "middle small muted"))
    for number, (name, algorithm) in enumerate(named):
        parts.append(
            f'<line class="curve c{number}" x1="{64 + 265 * number}" x2="{92 + 265 * number}" y1="326" y2="326"/>'
        )
        parts.append(words(100 + 265 * number, 331, f"{name}  {_call(algorithm.gate)}", f"code t{number}"))
    label = "Gradient against ratio: the clips cut to zero at an edge on one side, SAPO's gate fades on both"
    return picture(WIDTH, 346, label, parts)


def _call(piece: object) -> str:
    """Clip(0.2, 0.28), without what is the default of the rest."""
    values = [getattr(piece, name) for name in list(vars(piece))[:2]]
    return f"{type(piece).__name__}({', '.join(f'{each:g}' for each in values)})"


def _pull(gate: GateProtocol, sign: float) -> list[Point]:
    """The gate's gradient in the log-prob, over the advantage, which is 1 at a ratio of 1 for all."""
    # No point is on a clip's edge, where the last digit decides and each torch has another.
    ratio = (torch.arange(625, dtype=torch.float64) + 0.5)[None] / 250
    advantages = torch.full_like(ratio, sign)
    log_ratio = ratio.log().requires_grad_()
    loss = gate(log_ratio, log_ratio, advantages, torch.ones_like(ratio, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    return [(float(x), float(y)) for x, y in zip(ratio[0], -gradient[0] * sign, strict=True)]


def chain() -> str:
    """The five, and which pieces each changed."""
    five = (("PPO", PPO), ("GRPO", GRPO), ("DAPO", DAPO), ("GSPO", GSPO), ("SAPO", SAPO))
    from_whom = (None, PPO, GRPO, GRPO, GRPO)
    parts = []
    for place, ((name, algorithm), parent) in enumerate(zip(five, from_whom, strict=True)):
        left = 16 + 168 * place
        parts.append(box(left, 40, 132, [name], "trained", height=36))
        if place:
            parts.append(arrow((left - 34, 58), (left - 3, 58)))
        lines = _changes(parent, algorithm) if parent else ["value model", "GAE", "clip at 1 ± 0.2", "KL in the reward"]
        parts += [words(left, 104 + 19 * row, line, "small") for row, line in enumerate(lines)]
    parts.append(words(16, 24, "What each changed; DAPO, GSPO and SAPO each begin at GRPO", "small muted"))
    return picture(WIDTH, 214, "The chain PPO, GRPO, DAPO, GSPO, SAPO, and the pieces that each changed", parts)


STAGES = ("shape", "keep", "advantage", "ratio", "gate", "kl", "weights", "extra")


def _changes(parent: Algorithm, child: Algorithm) -> list[str]:
    """Pieces that are gone, and those that are new, in the stages' order."""
    lines = []
    for stage in STAGES:
        before, after = getattr(parent, stage), getattr(child, stage)
        if before != after:
            lines += [f"− {each}" for each in _pieces(before) if not after]
            lines += [f"+ {each}" for each in _pieces(after)]
    return lines


def _pieces(held: object) -> list[str]:
    """A stage's pieces by name, the gates with their numbers."""
    pieces = held if isinstance(held, tuple) else (held,) if held else ()
    return [_call(each) if type(each).__name__ in ("Clip", "SoftGate") else type(each).__name__ for each in pieces]


def lengths() -> str:
    """GSPO's ratio against the length of a completion: what the root does, and what it leaves of the band."""
    panel = Panel(70, 56, 350, 210, (2, 12), (-4, 1))
    across = [(power, f"{2**power:,}") for power in (2, 4, 6, 8, 10, 12)]
    up = [(power, f"{10.0**power:g}") for power in range(-4, 2)]
    parts = panel.frame("spread of the log-ratio of a completion", across, up)
    tokens = [2 + 10 * step / 60 for step in range(61)]
    parts.append(panel.curve([(t, math.log10(SPREAD * 2 ** (t / 2))) for t in tokens], 1))
    parts.append(panel.curve([(t, math.log10(SPREAD * 2 ** (-t / 2))) for t in tokens], 0))
    _, band_y = panel.place(2, math.log10(GSPO.gate.width))
    parts.append(f'<line class="curve c3" x1="70" x2="420" y1="{band_y:.1f}" y2="{band_y:.1f}"/>')
    parts += [words(270, 100, "product of the ratios", "small t1 end"), words(290, 190, "GSPO: its root", "small t0")]
    parts.append(words(76, band_y - 6, f"GSPO's band, {GSPO.gate.width:g}", "small t3"))
    share = Panel(500, 56, 330, 210, (2, 12), (0, 1))
    parts += share.frame("completions outside the band", across, [(y, f"{y:.0%}") for y in (0, 0.5, 1)])
    parts.append(share.curve([(t, _outside(2**t)) for t in tokens], 0))
    parts += [words(245, 302, "tokens", "middle small muted"), words(665, 302, "tokens", "middle small muted")]
    parts.append(
        words(70, 326, f"Token log-ratios drawn independently with a standard deviation of {SPREAD:g}.", "small muted")
    )
    label = "With length the product of ratios spreads, GSPO's root of it narrows, and its band stops less"
    return picture(WIDTH, 342, label, parts)


def _outside(tokens: float) -> float:
    """Share of completions whose ratio leaves GSPO's band, if token log-ratios are normal."""
    low, high = (math.log(edge) / (SPREAD / math.sqrt(tokens)) for edge in GSPO.gate.band)
    return 1 - 0.5 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))


if __name__ == "__main__":
    for each in (models, gates, chain, lengths):
        (IMAGES / f"{each.__name__}.svg").write_text(each())
