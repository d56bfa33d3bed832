"""Sends what is new in a run folder to one tracker, and stores how far it got."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from proximo.runs.files import TRACKING, refuse_foreign_files
from proximo.runs.tracking.source import Position, RunSource, read_position
from proximo.runs.tracking.tracker import Tracker
from proximo.runs.tracking.trackers import check_names, folder_name, tracker_class
from proximo.system.locks import FolderLock
from proximo.system.opening import without_links

BATCH = 100
"""Items after which the position is stored."""


class Sender:
    """One tracker and one run. The caller holds the lock of the tracker's folder."""

    def __init__(self, run: Path, folder: Path, kind: type[Tracker]) -> None:
        self.source, self.folder, self._kind = RunSource(run), folder, kind
        self.position = read_position(folder)
        self._tracker: Tracker | None = None
        self.sent = 0
        """Items sent by this object."""

    def send(self, *, is_over: bool) -> None:
        """Send everything new; with `is_over` also the end, after which nothing is left to send. Whatever the tracker
        raises is raised here; what it had accepted is not sent again."""
        is_finished = self.source.is_finished  # asked first: rows that are written meanwhile are sent below or later
        while self._send_batch(is_over):
            pass
        if is_over and (self._tracker is not None or (is_finished and not self.position.is_closed)):
            self._opened().close(self.source.summary(), is_finished)
            self._tracker = None
            self._save(replace(self.position, is_closed=is_finished))

    def _send_batch(self, is_over: bool) -> bool:
        """Send a batch of items; True if there may be more."""
        count, position = 0, self.position
        items = self.source.items(position, is_over=is_over)
        try:
            for item, after in islice(items, BATCH):
                if item is not None:
                    item.give(self._opened())
                    self.sent += 1
                count, position = count + 1, replace(after, key=self.position.key, is_closed=False)
            if self._tracker is not None:
                self._tracker.flush()
        except BaseException:
            tracker, self._tracker = self._tracker, None  # opened again by the next try
            with suppress(Exception):  # what cannot be stored now is sent again
                if tracker is not None:
                    tracker.flush()
                    self._keep(position, count)
            raise
        self._keep(position, count)
        return count == BATCH

    def _keep(self, position: Position, count: int) -> None:
        if count:
            self._save(replace(position, key=self.position.key))

    def _opened(self) -> Tracker:
        if self._tracker is None:
            tracker = self._kind()
            key = tracker.open(self.source.about(self.folder), self.position.key)
            self._tracker = tracker
            self._save(replace(self.position, key=key))
        return self._tracker

    def _save(self, position: Position) -> None:
        self.position = position
        position.save(self.folder)


@dataclass(frozen=True)
class Sent:
    """Record of what one tracker was sent."""

    tracker: str
    items: int
    """Rows of metrics, events and tables; 0 if it had everything already."""
    folder: Path
    """The tracker's folder inside the run folder."""


def track(run: str | Path, to: Sequence[str]) -> list[Sent]:
    """Send a run to experiment trackers; what `proximo track` does.

    run  a run folder, finished or not. What was sent before, also while the run was running, is not sent again.
    to   names: "wandb", "trackio", "tensorboard", "mlflow", or "file.py:Name", a class of your own

    Example:
        proximo.track("runs/mine", to=["tensorboard"])
    """
    path = without_links(run)
    refuse_foreign_files(path)
    source = RunSource(path)
    if not source.is_run:
        raise ValueError(f"{path} is no run: give a run folder, which `proximo train` or a stage wrote")
    if not to:
        raise ValueError("to is empty: name at least one tracker, such as tensorboard")
    check_names(to)
    return [_track(source, name) for name in to]


def _track(source: RunSource, name: str) -> Sent:
    folder = source.run / TRACKING / folder_name(name)
    with FolderLock(folder):
        sender = Sender(source.run, folder, tracker_class(name))
        try:
            sender.send(is_over=not source.is_running)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"tracker {name} failed after {sender.sent} items, {type(error).__name__}: {reason}; the same command "
                "continues where it stopped"
            ) from error
    return Sent(name, sender.sent, folder)
