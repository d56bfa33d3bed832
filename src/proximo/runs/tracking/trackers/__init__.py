"""Trackers, one file for each, and how they are named: ours by their class's name in lower case, a user's own as
FILE.py:NAME.

A new one is a file of this folder, with its test, and an entry in TRACKERS; help, errors and `proximo doctor` read it
there. Its packages are an extra of that name in pyproject.toml.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from proximo.config.plugins import FORM, is_outside, load_class
from proximo.runs.tracking.tracker import Tracker
from proximo.runs.tracking.trackers.mlflow import MLflow
from proximo.runs.tracking.trackers.tensorboard import TensorBoard
from proximo.runs.tracking.trackers.trackio import Trackio
from proximo.runs.tracking.trackers.wandb import Wandb

TRACKERS = {kind.__name__.lower(): kind for kind in (Wandb, Trackio, TensorBoard, MLflow)}
CHOICES = f"{', '.join(TRACKERS)} or {FORM}"
"""Names of trackers, for help and errors."""
METHODS = [name for name in vars(Tracker) if not name.startswith("_")]


def tracker_class(name: str) -> type[Tracker]:
    """The class of a tracker whose packages are installed; ValueError says in one line what is missing."""
    if is_outside(name):
        chosen: Any = load_class(name)
        if missing := [each for each in METHODS if not callable(getattr(chosen, each, None))]:
            raise ValueError(f"{name} lacks {', '.join(missing)}, which a tracker has: add what is missing")
        return chosen
    if (kind := TRACKERS.get(name)) is None:
        raise ValueError(f"no tracker is called {name!r}: give {CHOICES}")
    if missing := [each for each in kind.needs if find_spec(each) is None]:
        raise ValueError(f'tracker {name} needs {", ".join(missing)}: pip install "proximo[{name}]"')
    return kind


def check_names(names: Sequence[str]) -> None:
    """Refuse trackers that cannot be used, or that would share a folder."""
    folders = [folder_name(name) for name in names]
    for name, folder in zip(names, folders, strict=True):
        tracker_class(name)
        if folders.count(folder) > 1:
            raise ValueError(f"tracker {name} is given twice, or another one has the same name: give each once")


def folder_name(name: str) -> str:
    """Name of the tracker's folder inside the run folder.

    Example: folder_name("mine.py:Mine") == "Mine"
    """
    return name.rpartition(":")[2]
