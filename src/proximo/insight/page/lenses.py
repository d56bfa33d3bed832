"""A step under the algorithm and pass that a query names, computed once and cached."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from proximo.algorithms import explain
from proximo.insight.folder import RunFolder
from proximo.insight.lens.lens import StepView, look
from proximo.insight.lens.replay import OWN_ALGORITHM, chosen, own_name
from proximo.insight.lens.steps import StoredStep
from proximo.losses.arithmetic import bounded_exp
from proximo.losses.pieces.protocols import GateTraits

CURVE = 121
"""Number of points of a gate's curve."""
MAX_TOKENS = 5_000_000
"""Tokens whose values are kept, each about a hundred bytes; a single larger step is kept, too."""
Kind = TypeVar("Kind")


class Kept(Generic[Kind]):
    """A small cache of things computed from steps. Two tabs that ask at once do not compute the same twice."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._made: OrderedDict[tuple[int, Hashable], tuple[StoredStep | None, Kind]] = OrderedDict()

    @property
    def _tokens(self) -> int:
        return sum(0 if step is None else len(step.batch.tokens) for step, _ in self._made.values())

    def get(self, step: StoredStep | None, key: Hashable, make: Callable[[], Kind]) -> Kind:
        """The cached value. A step is identified as an object and therefore kept alive here; None if the key identifies
        it and only the value is to be kept."""
        with self._lock:
            entry = self._made.pop((id(step), key), None) or (step, make())
            self._made[id(step), key] = entry
            while len(self._made) > (1 if self._tokens > MAX_TOKENS else self._limit):
                self._made.popitem(last=False)
        return entry[1]


_looks: Kept["Look"] = Kept(4)


@dataclass(frozen=True)
class Look:
    """A step as the page shows it: under which algorithm, and in which pass over the data."""

    run: RunFolder
    step: StoredStep
    name: str
    number: int
    seen: StepView

    @property
    def is_own(self) -> bool:
        return self.name == own_name(self.run.config)

    def tokens(self, part: slice = slice(None)) -> dict[str, Tensor]:
        """All known values of a range of the step's tokens, by name; by default of all tokens."""
        step, seen, batch = self.step, self.seen, self.step.batch
        given = {
            "token": batch.tokens,
            "state": seen.state,
            "advantage": seen.advantages,
            "weight": seen.weights,
            "ratio": seen.ratio,
            "token_ratio": seen.token_ratio,
            "through": seen.through,
            "gradient": seen.gradient,
            "kl_gradient": None if seen.algorithm.kl is None else seen.kl_gradient,
            "correction": None if seen.algorithm.correct is None else seen.correction,
            "sampler": batch.rollout_logprobs,
            "old": batch.old_logprobs,
            "reference": batch.ref_logprobs,
            "value": batch.values,
            "return": batch.returns,
        }
        values = {name: tensor[part] for name, tensor in given.items() if tensor is not None}
        if (entropy := step.entropy_in(self.number, part)) is not None:
            values["entropy"] = entropy
        before = step.current[self.number, part] if step.passes else values["old"]
        # A row that was skipped for its zero advantage has the old policy's log-probs.
        values["current"] = torch.where(before.isnan(), values["old"], before)
        values["gap"] = values["old"] - values["sampler"]
        if step.passes and step.old_is_sampler:
            # The sampler's log-probs are the old ones, and only the first update saw the policy that sampled.
            first, gap = step.updates[0] == 0, step.current[0, part] - values["sampler"]
            values["gap"] = gap if bool(first.all()) else torch.where(first[step.layout.row[part]], gap, math.nan)
        if "reference" in values:
            gap = values["reference"] - values["current"]
            values["kl"] = bounded_exp(gap) - gap - 1  # k3
        sampled = batch.sampled[part]
        for name in values.keys() & {"entropy", "gap", "kl"}:  # of the policy's own tokens
            values[name] = torch.where(sampled, values[name], math.nan)
        return values


def looked(run: RunFolder, query: Mapping[str, str], *, as_run: bool = False) -> Look:
    """The step, algorithm and pass that a query names; with `as_run`, the run's own algorithm."""
    step, number = named_pass(run, query)
    config = run.config_at(step.number)
    mine = own_name(config)
    name = mine if as_run else query.get("as", mine)
    algorithms = chosen(config, [] if name == OWN_ALGORITHM else [name])
    name, algorithm = list(algorithms.items())[-1]
    return _looks.get(
        step, (name, number), lambda: Look(run, step, name, number, look(step, algorithm, config, number=number))
    )


def named_pass(run: RunFolder, query: Mapping[str, str]) -> tuple[StoredStep, int]:
    """The step that a query names, and the pass over its data, by default the last."""
    step = run.step(whole(query, "step"))
    number = whole(query, "pass", max(step.passes - 1, 0))
    if number >= max(step.passes, 1):
        raise ValueError(f"pass is {number}, but step {step.number} has {step.passes}: they count from 0")
    return step, number


def shown_algorithm(look: Look) -> dict[str, Any]:
    """Description of the chosen algorithm for the page."""
    seen, (title, idea) = look.seen, introduced(look.run, look.name)
    return {
        "name": look.name,
        "label": label(look.name),
        "own": look.is_own,
        "title": title,
        "idea": idea,
        "formula": explain.objective(seen.algorithm),
        "notes": list(seen.notes),
        "band": None if (band := GateTraits.read(seen.algorithm.gate).band) == (1.0, 1.0) else list(band),
        "curve": _curve(look),
    }


def introduced(run: RunFolder, name: str) -> tuple[str, str]:
    """A title, and the idea in a sentence; for an unnamed algorithm, how it differs from the nearest named one."""
    card = explain.card(name)
    if card is not None:
        return card.title, card.idea
    nearest = explain.nearest(run.config.algorithm)
    changed = explain.differences(nearest, run.config.algorithm)
    words = ", ".join(f"{path} {value} instead of {default}" for path, value, default in changed)
    return f"{label(nearest.name)}, changed", words


def label(name: str) -> str:
    return "OWN" if name == OWN_ALGORITHM else name.upper()


def _curve(look: Look) -> dict[str, list[float]]:
    """The gate as a function of the log-ratio, wide enough for its clip range and for the step's values."""
    gate, ratio = look.seen.algorithm.gate, look.seen.ratio
    ratio = torch.where(look.seen.takes_part & ~ratio.isnan(), ratio, 1.0)  # aminmax of one NaN would be NaN
    edges = [math.log(edge) for edge in GateTraits.read(gate).band if edge > 0]
    seen = max(abs(math.log(float(each))) if each > 0 else math.inf for each in ratio.aminmax()) if len(ratio) else 0.0
    widest = max(2.0 * max(map(abs, edges), default=0.0), min(1.1 * seen, 3.0)) or 1.0
    sharp = [edge + side for edge in edges for side in (-1e-9, 1e-9)]  # so that an edge is drawn sharply
    evenly = torch.linspace(-widest, widest, CURVE, dtype=torch.float64)
    places = torch.cat([evenly, torch.tensor(sharp, dtype=torch.float64)]).sort().values.unsqueeze(0)
    sides = {"positive": torch.ones_like(places), "negative": -torch.ones_like(places)}
    curves = {side: gate.through(places, advantages) for side, advantages in sides.items()}
    return {name: numbers(tensor.squeeze(0)) for name, tensor in ({"log_ratio": places} | curves).items()}


def numbers(tensor: Tensor) -> list[Any]:
    """Numbers for JSON: None for NaN and infinities, with six digits."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in tensor.double().tolist()]


def whole(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number from a query."""
    text = query.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"{name} is {text!r}: give a whole number")
    return int(text)
