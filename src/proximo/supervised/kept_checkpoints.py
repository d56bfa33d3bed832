"""Checkpoints of a stage that are written while it runs, beside the one that is its result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of
from proximo.runs.files import RESULT
from proximo.system.folders import remove_folder
from proximo.system.opening import read_file, without_links


@dataclass(frozen=True)
class KeptCheckpoints:
    """Times at which a stage writes its model, and how many of them are kept; its results do not depend on them."""

    every: int = 100
    """Steps between checkpoints. The last step has one, too, and so have the best weights at the end."""
    keep: int = 2
    """Number of newest checkpoints kept, beside the best."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"checkpoints.every is {self.every}, checkpoints.keep {self.keep}: both are at least 1")


def remove_later(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, which an attempt that goes on from this step writes again."""
    for path in saved(folder / CHECKPOINTS):
        if step_of(path) > step:
            remove_folder(path)


def retain(folder: Path, newest: int, *others: Path) -> Sequence[Path]:
    """Remove all checkpoints but this number of newest ones, and `others`; returns those that are left, newest
    first."""
    kept = [path for number, path in enumerate(saved(folder / CHECKPOINTS)) if number < newest or path in others]
    for path in saved(folder / CHECKPOINTS):
        if path not in kept:
            remove_folder(path)
    return kept


def is_start(result: Mapping[str, Any]) -> bool:
    """Tell whether a stage's result is the model that it began with, as no held-out evaluation was better."""
    return bool(result.get("before")) and result.get("best_step") == 0


def is_untrained(model: str) -> bool:
    """Tell whether a model is a stage's run, or the checkpoint of one, that kept what it began with; False where that
    is not known."""
    folder = without_links(model)
    is_checkpoint = folder.match(f"{CHECKPOINTS}/*")
    try:
        result = json.loads(read_file((folder.parents[1] if is_checkpoint else folder) / RESULT))
    except (OSError, ValueError, RecursionError):
        return False
    is_meant = isinstance(result, dict) and (not is_checkpoint or result.get("checkpoint") == folder.name)
    return is_meant and is_start(result)
