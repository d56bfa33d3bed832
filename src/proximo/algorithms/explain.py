"""Says what an algorithm is: its formula, each of its eleven choices, their sources, and its peers' names for them."""

from dataclasses import fields, is_dataclass
from typing import Any

from proximo.algorithms import Algorithm
from proximo.algorithms.foreign import own_words
from proximo.algorithms.formula import objective
from proximo.algorithms.lengths import what_the_band_means
from proximo.algorithms.papers import CARDS, GRPO_CARD, Card, card
from proximo.algorithms.peers import COMBINED, UNUSED, Peers, peers_of
from proximo.losses.pieces.traits import AdvantageTraits

__all__ = [
    "CARDS",
    "STAGES",
    "TABLE_HEAD",
    "Card",
    "card",
    "changes",
    "choice",
    "differences",
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


def stages(algorithm: Algorithm) -> list[tuple[str, str, list[Peers]]]:
    """Each stage: its name, the choice, and what the peers call it."""
    rows = []
    for stage in STAGES:
        piece = getattr(algorithm, stage)
        pieces = piece if isinstance(piece, tuple) else (piece,)
        peers = [UNUSED[stage]] if piece is None else [peer for each in pieces for peer in _peers(each)]
        if stage == "gate":
            peers = [COMBINED.get((type(piece), type(algorithm.ratio)), peers[0])]
        rows.append((stage, choice(piece), peers))
    return rows


def _peers(piece: Any) -> list[Peers]:
    """Of a piece, and of the piece it wraps."""
    inner = _wrapped(piece)
    return [peers_of(piece), *([] if inner is None else _peers(inner))]


def _wrapped(piece: Any) -> Any:
    return AdvantageTraits.read(piece).of


def source(named: Card, stage: str) -> str:
    """Why the named algorithm chooses so at this stage; "" where its paper leaves the stage empty."""
    if stage in named.sources:
        return named.sources[stage]
    same = getattr(named.value, stage) == getattr(GRPO_CARD.value, stage)
    return "as GRPO" if same and stage in GRPO_CARD.sources else ""


def changes(named: Card, algorithm: Algorithm) -> list[str]:
    """What of `algorithm` is no longer the named one, stage by stage, with the default's source."""
    found = []
    for stage in STAGES:
        differences = _differences(stage, getattr(named.value, stage), getattr(algorithm, stage))
        if differences:
            facts = ", ".join(
                f"{path} is {choice(value)}, not {choice(default)}" for path, default, value in differences
            )
            why = source(named, stage)
            found.append(facts + (f" ({why})" if why else ""))
    return found


def differences(named: Card, algorithm: Algorithm) -> list[tuple[str, str, str]]:
    """Each field in which `algorithm` is not the named one: (path, its choice, the named one's)."""
    found = [
        difference
        for stage in STAGES
        for difference in _differences(stage, getattr(named.value, stage), getattr(algorithm, stage))
    ]
    return [(path, choice(value), choice(default)) for path, default, value in found]


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
