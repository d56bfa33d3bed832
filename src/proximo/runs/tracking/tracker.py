"""The protocol of a tracker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Completion = Mapping[str, str | float | None]
"""A row of the table of completions; every row has the same columns."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run, which a tracker gets before anything else."""

    name: str
    """Name of the run folder."""
    folder: Path
    """The run folder, an absolute path."""
    place: Path
    """The tracker's own folder inside the run folder, for local files."""
    config: Mapping[str, Any]
    """config.toml as nested dictionaries."""
    facts: Mapping[str, Any]
    """Versions, machine and command line, from run.json."""


class Tracker(Protocol):
    """A service that a run is sent to. The class is created without arguments. All calls come from one process, in
    order; what has been accepted is not sent again, and what raises an exception is tried again later."""

    def open(self, run: TrackedRun, key: str | None) -> str:
        """Begin, or continue what `key` names. Returns the key, which is stored and given to later calls; None means
        that this run was never opened before."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step, all finite. Several calls may have the same step."""
        ...

    def event(self, step: int, severity: str, text: str) -> None:
        """A finding about the run's health ("warning" or "failing"), or another event ("info")."""
        ...

    def completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Some completions of one step."""
        ...

    def flush(self) -> None:
        """Return when everything accepted so far is stored."""
        ...

    def close(self, summary: Mapping[str, float], finished: bool) -> None:
        """End of the run's data for now. `finished`: whether the run has reached its end; it may still be resumed."""
        ...
