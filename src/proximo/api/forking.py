"""`proximo.fork`: continue a run from one of its checkpoints, in a folder of its own, with something changed."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from proximo.algorithms import Algorithm, explain
from proximo.api.folders import PathLike
from proximo.api.messages import keep_quiet, say
from proximo.api.progress import OnStep
from proximo.api.run import OpenedRun, TrainedRun, algorithm_of
from proximo.api.training import train_in
from proximo.api.validate import refuse_kind, unwritable
from proximo.config import toml
from proximo.insight.folder import RunFolder
from proximo.recipes.presets import with_algorithm, with_values
from proximo.rl.config import RunConfig
from proximo.runs.checkpoints import step_of
from proximo.runs.config_changes import differences
from proximo.runs.forking import changes, checkpoint_at, refuse_other_weights
from proximo.runs.forking import fork as write_fork
from proximo.runs.webhook import webhook_at
from proximo.system.opening import read_text, without_links


def fork(
    run: PathLike | OpenedRun,
    at: int | None = None,
    folder: PathLike | None = None,
    *,
    algorithm: Algorithm | str | None = None,
    fresh_optimizer: bool = False,
    on_step: OnStep | None = None,
    track: Sequence[str] = (),
    notify: str | None = None,
    quiet: bool = False,
    load_code: bool = False,
    **changed: Any,
) -> TrainedRun:
    """Continue a run from one of its checkpoints in another folder with something changed; what `proximo fork` does.

    A fork begins with the run's weights, optimizer, data cursor and random numbers, so that its next prompts and draws
    are those of the run; with nothing changed it writes the same bytes. The same call again resumes it.
    `proximo.compare([run, fork])` compares the two from there on.

    run              folder of the run, or the run as `train` and `open_run` return it; it stays as it is
    at               the checkpoint to begin from, by the number of steps done; None: the newest
    folder           folder of the fork; None: next to the run, named RUN-at-STEP, with the algorithm's name where that
                     changes
    algorithm        a name, such as "gspo", or a value; None: the run's own
    fresh_optimizer  begin without the optimizer's moments
    changed          fields of RunConfig and their new values, such as steps=200
    on_step, track, notify, quiet   as in `proximo.train`
    load_code        load code that the run's config names, although you have not run it with this run before

    Example:
        other = proximo.fork("runs/mine", at=40, algorithm="gspo")
        slower = replace(other.config.training, learning_rate=1e-6)
        proximo.fork("runs/mine", at=40, folder="runs/slower", training=slower)
    """
    webhook = webhook_at(notify)
    parent = run.path if isinstance(run, OpenedRun) else without_links(run)
    point = checkpoint_at(parent, at)
    config = _changed(RunFolder(parent, load_code=load_code, own_code=True).config, algorithm, changed)
    step, text = step_of(point), toml.dumps(config)
    refuse_no_steps(config, step)
    refuse_scheduled(parent, config)
    refuse_other_weights(parent, text)
    path = folder_of(parent, step, config.algorithm, text) if folder is None else without_links(folder)
    try:
        other = write_fork(parent, path, point, fresh_optimizer=fresh_optimizer)
    except OSError as error:
        raise unwritable(path, error) from error
    if other is not None:
        (keep_quiet if quiet else say)(f"warning: {other}")
    return train_in(path, config, (), on_step, quiet, allow_change=changes(path, text), track=track, webhook=webhook)


def refuse_no_steps(config: RunConfig, step: int) -> None:
    """Raise ValueError for a fork that has nothing left to do."""
    if step >= config.steps:
        more = f"give more, such as `steps={step + 100}`"
        raise ValueError(f"steps is {config.steps}, and the fork begins after step {step}: {more}")


def refuse_scheduled(parent: Path, config: RunConfig) -> None:
    """Raise ValueError for a new value of a field whose schedule stays as it was: it would have no effect."""
    changed = differences(read_text(parent / "config.toml"), toml.dumps(config))
    for field in config.schedules or {}:
        if field in changed and not any(each.startswith(f"schedules.{field}.") for each in changed):
            raise ValueError(
                f"{field} {changed[field]}, but it follows a schedule, which stays: give another, such as "
                f"--schedule {field}=constant:{changed[field].rpartition('now ')[2]}"
            )


def folder_of(parent: Path, step: int, algorithm: Algorithm, config_toml: str) -> Path:
    """Folder of a fork, next to the run and named by the step, and by the algorithm where it changes."""
    changed = differences(read_text(parent / "config.toml"), config_toml)
    other = any(field.startswith("algorithm") for field in changed)
    return parent.with_name(f"{parent.name}-at-{step}{f'-{explain.nearest(algorithm).name}' if other else ''}")


def _changed(config: RunConfig, algorithm: Algorithm | str | None, changed: dict[str, Any]) -> RunConfig:
    known = [each.name for each in fields(RunConfig)]
    if wrong := [name for name in changed if name not in known]:
        raise TypeError(f"{wrong[0]} is no field of RunConfig; there are {', '.join(known)}")
    if algorithm is not None:
        refuse_kind("algorithm", algorithm, (Algorithm, str), "a name such as 'gspo', or a value such as proximo.GSPO")
        config = with_algorithm(config, algorithm_of(algorithm))
    return with_values(replace(config, **changed))
