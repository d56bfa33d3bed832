"""Trackers by name: ours by their class's name in lower case, a user's own as FILE.py:NAME."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from proximo.config.plugins import FORM, is_outside, load_class
from proximo.runs.tracking.adapters.mlflow import MLflow
from proximo.runs.tracking.adapters.tensorboard import TensorBoard
from proximo.runs.tracking.adapters.trackio import Trackio
from proximo.runs.tracking.adapters.wandb import Wandb
from proximo.runs.tracking.tracker import Tracker

TRACKERS = (Wandb, Trackio, TensorBoard, MLflow)
METHODS = ("open", "metrics", "event", "completions", "flush", "close")


def tracker_class(name: str) -> type[Tracker]:
    """The class of a tracker whose packages are installed; ValueError says in one line what is missing."""
    if is_outside(name):
        found: Any = load_class(name)
        if missing := [each for each in METHODS if not callable(getattr(found, each, None))]:
            raise ValueError(f"{name} lacks {', '.join(missing)}, which a tracker has: add what is missing")
        return found
    kind = {each.__name__.lower(): each for each in TRACKERS}.get(name)
    if kind is None:
        names = ", ".join(each.__name__.lower() for each in TRACKERS)
        raise ValueError(f"no tracker is called {name!r}: give {names} or {FORM}")
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
