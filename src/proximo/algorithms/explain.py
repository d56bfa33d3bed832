"""Says what an algorithm is: its formula, each of its eleven choices, their sources, and its peers' names for them.

What is said of a piece stands on the piece (`Description`); what is said of a named algorithm, on its card (papers.py).
"""

import math
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

from proximo.algorithms import Algorithm
from proximo.algorithms.papers import CARDS, GRPO_CARD, Card, card
from proximo.config.plugins import place_of
from proximo.losses.pieces.filters import KeepAll
from proximo.losses.pieces.protocols import AdvantageTraits, Description, GateTraits, Peers, RatioTraits, formula_of

__all__ = [
    "CARDS",
    "STAGES",
    "TABLE_HEAD",
    "Card",
    "card",
    "changed_fields",
    "changes",
    "choice",
    "differences",
    "in_words",
    "nearest",
    "objective",
    "own_words",
    "same_as",
    "source",
    "stages",
    "table",
    "what_the_band_means",
]

STAGES = tuple(field.name for field in fields(Algorithm))


def choice(piece: Any) -> str:
    """A piece as one would write it, without the fields that say nothing."""
    if piece is None:
        return "–"
    if isinstance(piece, tuple):
        return ", ".join(choice(each) for each in piece)
    if not is_dataclass(piece):
        return f"{piece:g}" if isinstance(piece, float) else str(piece)
    values = ((field.name, getattr(piece, field.name)) for field in fields(piece))
    shown = ", ".join(f"{name}={choice(value)}" for name, value in values if value is not None)
    return f"{type(piece).__name__}({shown})"


def changed_fields(piece: Any) -> list[str]:
    """The fields of a piece whose values are not their defaults, with these values."""
    values = ((field, getattr(piece, field.name)) for field in fields(piece))
    return [f"{field.name} {choice(value)}" for field, value in values if value != _default(field)]


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def objective(algorithm: Algorithm) -> list[str]:
    """The objective to be maximised, and what its letters stand for."""
    core = formula_of(algorithm.gate)
    if algorithm.correct is not None:
        core = f"w_μ · {core}"
    if algorithm.kl is not None:
        core = f"[ {core} − {algorithm.kl.coefficient:g} · KL ]"
    extras = "".join(f"  {formula_of(extra, '− ')}" for extra in algorithm.extras)
    lines = [f"J(θ) = {formula_of(algorithm.weights)} {core}{extras}"]
    if ratio := formula_of(algorithm.ratio):
        lines.append(f"ρ = {ratio.replace('π_anchor', formula_of(algorithm.anchor))}")
    lines.append(f"A = {formula_of(algorithm.advantage)}")
    if algorithm.shapes:
        lines.append(f"R = task score {' '.join(formula_of(shape, '+ ') for shape in algorithm.shapes)}")
    if algorithm.correct is not None:
        lines.append(f"w_μ = {formula_of(algorithm.correct)}")
    if algorithm.kl is not None:
        lines.append(f"KL = {formula_of(algorithm.kl.estimator)}")
    if algorithm.select is not None:
        lines.append(f"without {formula_of(algorithm.select)}")
    if algorithm.keep != KeepAll():
        lines.append(f"over {formula_of(algorithm.keep)}")
    return lines


NOISE = 0.05
"""Standard deviation of one token's log-ratio, to give an example with: some updates away from the old policy."""
LENGTHS = (3, 100, 10_000)


def what_the_band_means(algorithm: Algorithm) -> list[str]:
    """Lines on the lengths for which the band is meant; none where the length does not matter to it."""
    low, high = GateTraits.read(algorithm.gate).band
    width = max(1 - low, high - 1)
    if not RatioTraits.read(algorithm.ratio).length_normalised or width <= 0:
        return []
    length = float(f"{(NOISE / width) ** 2:.3g}")
    spreads = ", ".join(f"{NOISE / math.sqrt(length):.2g} at {length:,} tokens" for length in LENGTHS)
    lines = [
        "log ρ is a mean over |y| tokens: with a spread of σ at each token it spreads by about σ/√|y|, so the same "
        "band is wide for long completions and narrow for short ones",
        f"with σ = {NOISE:g} that is {spreads}",
    ]
    if length < 1:  # no completion is as short
        return lines
    lines[-1] += (
        f"; the band −{1 - low:.2g} / +{high - 1:.2g} is as wide at about "
        f"{length:,.0f} tokens. Much shorter completions are mostly blocked: widen "
        "gate.low and gate.high to a few times ratio_spread in metrics.jsonl"
    )
    return lines


UNUSED: dict[str, Peers] = {
    "shape": Peers("no shaping; a penalty is one more reward function", "no shaping by default"),
    "select": Peers(
        "off_policy_mask_threshold None, top_entropy_quantile 1.0", "none, unless loss_mode is clip_cov or kl_cov"
    ),
    "correct": Peers("vllm_importance_sampling_correction True with vLLM", "rollout_correction.rollout_is null"),
    "kl": Peers("beta 0.0", "use_kl_loss False"),
    "extra": Peers("entropy_coef 0.0", "entropy_coeff 0"),
}
"""The peers' choice at a stage that the algorithm leaves empty."""


def stages(algorithm: Algorithm) -> list[tuple[str, str, list[Peers]]]:
    """Each stage: its name, the choice, and what the peers call it."""
    rows = []
    for stage in STAGES:
        piece = getattr(algorithm, stage)
        pieces = piece if isinstance(piece, tuple) else (piece,)
        peers = [UNUSED[stage]] if piece is None else [peer for each in pieces for peer in _peers(each, algorithm)]
        rows.append((stage, choice(piece), peers))
    return rows


def _peers(piece: Any, algorithm: Algorithm) -> list[Peers]:
    """The peers' names for a piece, and for the piece it wraps."""
    description, inner = Description.read(piece), _wrapped(piece)
    peers = description.peers if description.peers_in is None else description.peers_in(algorithm)
    return [Peers(*peers), *([] if inner is None else _peers(inner, algorithm))]


def _wrapped(piece: Any) -> Any:
    return AdvantageTraits.read(piece).of


def source(named: Card, stage: str) -> str:
    """Reason why the named algorithm chooses so at this stage; "" where its paper leaves the stage empty."""
    if stage in named.sources:
        return named.sources[stage]
    same = getattr(named.value, stage) == getattr(GRPO_CARD.value, stage)
    return "as GRPO" if same and stage in GRPO_CARD.sources else ""


def changes(named: Card, algorithm: Algorithm) -> list[str]:
    """Lines on what of `algorithm` is no longer the named one, stage by stage, with the default's source."""
    lines = []
    for stage in STAGES:
        differences = _differences(stage, getattr(named.value, stage), getattr(algorithm, stage))
        if differences:
            choices = ", ".join(
                f"{path} is {choice(value)}, not {choice(default)}" for path, default, value in differences
            )
            why = source(named, stage)
            lines.append(choices + (f" ({why})" if why else ""))
    return lines


def differences(named: Card, algorithm: Algorithm) -> list[tuple[str, str, str]]:
    """Each field in which `algorithm` is not the named one: (path, its choice, the named one's)."""
    differing = [
        difference
        for stage in STAGES
        for difference in _differences(stage, getattr(named.value, stage), getattr(algorithm, stage))
    ]
    return [(path, choice(value), choice(default)) for path, default, value in differing]


def nearest(algorithm: Algorithm) -> Card:
    """The named algorithm that differs from this value in the fewest fields; of several the first of the cards."""
    return min(CARDS, key=lambda card: len(differences(card, algorithm)))


def named(algorithm: Algorithm) -> str:
    """The nearest named algorithm, and which of its fields are others.

    Example: named(replace(DAPO, gate=Clip(0.2, 0.2))) == "dapo, changed: gate.high"
    """
    card = nearest(algorithm)
    changed = ", ".join(path for path, _, _ in differences(card, algorithm))
    return f"{card.name}, changed: {changed}" if changed else card.name


def in_words(algorithm: Algorithm) -> str:
    """Name and idea of an algorithm in a line, its bound of an update, and its KL.

    Example: in_words(GRPO).endswith("ratios clipped to 0.8 to 1.2; KL 0.04 in the loss")
    """
    low, high = GateTraits.read(algorithm.gate).band
    bound = f"gate {choice(algorithm.gate)}" if low == high else f"ratios clipped to {low:.5g} to {high:.5g}"
    if algorithm.kl is not None:
        kl = f"KL {algorithm.kl.coefficient:g} in the loss"
    elif algorithm.kl_reward is not None:
        kl = f"KL {algorithm.kl_reward.coefficient:g} in the reward"
    else:
        kl = "no KL"
    idea = nearest(algorithm).idea.rstrip(".")
    return f"{named(algorithm)}; {idea}; {bound}; {kl}"


def _differences(path: str, default: Any, value: Any) -> list[tuple[str, Any, Any]]:
    if default == value:
        return []
    if type(default) is not type(value) or not is_dataclass(default):
        return [(path, default, value)]
    return [
        difference
        for field in fields(default)
        for difference in _differences(f"{path}.{field.name}", getattr(default, field.name), getattr(value, field.name))
    ]


def same_as(algorithm: Algorithm) -> Card | None:
    """The named algorithm that this value is, if any."""
    return next((each for each in CARDS if each.value == algorithm), None)


TABLE_HEAD = ("algorithm", "advantage", "ratio", "gate", "weights", "and")


def table() -> list[tuple[str, ...]]:
    """One row per algorithm, as in TABLE_HEAD; the last cell has what differs from a plain algorithm."""
    plain = Algorithm()
    rows = []
    for each in CARDS:
        value = each.value
        rest = [getattr(value, stage) for stage in ("shape", "keep", "anchor", "select", "correct", "kl", "extra")]
        usual = (plain.shape, plain.keep, plain.anchor, plain.select, plain.correct, plain.kl, plain.extra)
        others = " ".join(_short(piece) for piece, default in zip(rest, usual, strict=True) if piece != default)
        rows.append(
            (each.name, _short(value.advantage), _short(value.ratio), choice(value.gate), _short(value.weights), others)
        )
    return rows


def _short(piece: Any) -> str:
    """The names of its classes alone."""
    if isinstance(piece, tuple):
        return " ".join(_short(each) for each in piece)
    inner = _wrapped(piece)
    return type(piece).__name__ + ("" if inner is None else f"({_short(inner)})")


NOT_GIVEN = "not given"


@runtime_checkable
class Cites(Protocol):
    """A piece that names the papers it comes from."""

    @property
    def papers(self) -> str | tuple[str, ...]: ...


def own_words(piece: Any) -> list[tuple[str, str]]:
    """Label and text of what a user's own piece says about itself; nothing of one of ours.

    Example: [("from", "my_gate.py:MyGate"), ("what", "Blocks far ratios."), ("paper", "not given")]
    """
    if piece is None or type(piece).__module__.startswith("proximo."):
        return []
    return [("from", place_of(type(piece)) or NOT_GIVEN), ("what", _first_line(type(piece))), ("paper", _papers(piece))]


def _first_line(kind: type) -> str:
    lines = (vars(kind).get("__doc__") or "").strip().splitlines()
    is_made = bool(lines) and lines[0].startswith(f"{kind.__name__}(")  # by dataclass, where nothing is written
    return NOT_GIVEN if not lines or is_made else lines[0].strip()


def _papers(piece: Any) -> str:
    papers = piece.papers if isinstance(piece, Cites) else ()
    return (papers if isinstance(papers, str) else "; ".join(map(str, papers))) or NOT_GIVEN
