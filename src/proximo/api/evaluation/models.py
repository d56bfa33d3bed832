"""Models and checkpoints that an evaluation compares."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate."""

    name: str
    """Folder, hub id or model name, as it is opened."""
    label: str
    """Name that tables and files show."""


def candidates(names: Sequence[str], checkpoints: str | None = None) -> list[Candidate]:
    """The models by name; with `checkpoints`, these checkpoints of every run instead of its newest: `all`, or steps
    such as `20,40`. ValueError where one is missing, or a model is named twice."""
    if twice := [name for name in dict.fromkeys(names) if list(names).count(name) > 1]:
        raise ValueError(f"{twice[0]} is given twice: give each model once")
    if checkpoints is None:
        return [Candidate(name, name) for name in names]
    return [each for name in names for each in _checkpoints(name, checkpoints)]


def _checkpoints(name: str, wanted: str) -> list[Candidate]:
    known = {step_of(path): path for path in reversed(saved(Path(name) / CHECKPOINTS))}
    if not known:
        raise ValueError(f"checkpoints is {wanted!r}, but {name} has none: give the folder of a run that saved some")
    steps = list(known) if wanted == "all" else [_step(part, wanted) for part in wanted.split(",")]
    if missing := [step for step in steps if step not in known]:
        raise ValueError(f"checkpoints: {name} has none of step {missing[0]}; it has {', '.join(map(str, known))}")
    return [Candidate(str(known[step]), f"{name} step {step}") for step in steps]


def _step(part: str, wanted: str) -> int:
    if not part.strip().isdigit():
        raise ValueError(f"checkpoints is {wanted!r}: give all, or steps such as 20,40")
    return int(part)
