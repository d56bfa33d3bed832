"""Resume points of a stage that trains on files; removed when it is finished."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proximo.runs.checkpoints import STATE, checkpoint_path, saved
from proximo.runs.files import POINTS
from proximo.runs.session import RunSession, open_session
from proximo.runs.state import RUN_STATE, naming_io, read_values, write_json
from proximo.supervised.limits import Encoded
from proximo.supervised.schedule import FitOptions
from proximo.supervised.stage_model import StageModel
from proximo.system.folders import remove_folder, write_folder
from proximo.system.opening import make_folder, remove

KEPT = 2
"""Resume points kept: if one is damaged, the one before it is used."""


@dataclass(frozen=True)
class BestStep:
    """The best held-out result so far; without held-out data the last step is the best."""

    step: int
    metrics: dict[str, float]
    misses: int = 0
    """Evaluations since then that were not better."""

    def after(self, step: int, metrics: dict[str, float], options: FitOptions) -> "BestStep":
        """The best one after another evaluation, by the metric that the options name."""
        if not metrics or options.is_better(metrics[options.metric], self.metrics[options.metric]):
            return BestStep(step, metrics)
        return replace(self, misses=self.misses + 1)


def write_point(folder: Path, values: Mapping[str, Any], held: StageModel, more: Mapping[str, object]) -> None:
    """Write a resume point. `values` include the next `step` and the `sizes` of the log; `more` is for its manifest."""

    def fill(path: Path) -> None:
        state = path / STATE
        make_folder(state)
        with naming_io(path):
            write_json(state / RUN_STATE, values)
            held.write(state)

    write_folder(checkpoint_path(folder / POINTS, values["step"]), fill, more)
    for old in saved(folder / POINTS, values["step"])[KEPT:]:
        remove_folder(old)


def read_point(point: Path, held: StageModel) -> dict[str, Any]:
    """Restore a stage's model and optimizer; returns the other values."""
    held.read(point / STATE)
    return read_values(point / STATE)


def refuse_other_items(session: RunSession, train: Sequence[Encoded]) -> None:
    """Refuse to go on where an earlier version made other items of the same rows: some would be trained on twice and
    others never. Versions that noted no number of items made one of each reply of a conversation."""
    before, joined = session.recorded("items"), sum(item.trained is not None for item in train)
    is_early = before is None and session.recorded("steps") is None
    if not session.goes_on or before == len(train) or (before is None and not (is_early and joined)):
        return
    began = f"{joined} conversations row by row, each reply for itself" if before is None else f"{before} items of data"
    raise ValueError(
        f"`run={session.folder}` began with {began}, and this version reads {len(train)} items there: choose another "
        "name for a new run, or finish it with the version that began it"
    )


def once(
    folder: Path,
    config_toml: str,
    session: RunSession | None,
    work: Callable[[RunSession], dict[str, Any]],
) -> dict[str, Any]:
    """A stage's result: that of `work`, or the stored one if the stage is already finished. Without a `session` from
    the caller, the folder is locked here."""
    with ExitStack() as until:
        session = session or until.enter_context(open_session(folder, config_toml, points=POINTS))
        if session.result is None:
            session.result = work(session)
            session.finish(session.result)
            with suppress(OSError):
                remove(folder / POINTS)
        return session.result
