"""Forking a run: a new folder with the run as it was after a step, which resumes there with another config.

The fork has the run's rows up to that step, its data cursor, random numbers and optimizer: with nothing changed, it
writes what the run wrote.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proximo.learner.named_tensors import read_tensors, write_tensors
from proximo.learner.optimizer import MASTER
from proximo.rewards.judges.judge import FOLDER as VERDICTS
from proximo.runs.checkpoints import CHECKPOINTS, STATE, checkpoint_path, saved, step_of
from proximo.runs.config_changes import differences
from proximo.runs.files import CONFIG, EVENTS, TIMELINE, TIMINGS, refuse_foreign_files
from proximo.runs.log import RunLog, files_of_steps, is_up_to, process_details
from proximo.runs.run_json import config_damage, lost_rows, other_code, read_record, refuse_format
from proximo.runs.state import read_origin
from proximo.system.folders import MANIFEST, complaints, new_folder, write_folder
from proximo.system.lines import JsonLines
from proximo.system.opening import copy_file, copy_folder, inside, make_folder, read_text, remove

FORK = "fork"
"""Field of run.json with the folder of the run that a fork comes from, relative to the fork's own, and the step."""
WEIGHTS = ("model", "adapter")
"""Fields that say which weights are trained: a fork has those of the run's checkpoint."""


def checkpoint_at(run: Path, step: int | None) -> Path:
    """The intact checkpoint of a run after a step, the newest without one; ValueError names those that there are."""
    refuse_foreign_files(run)
    if not run.is_dir() or (record := read_record(run)) is None:
        raise ValueError(f"{run} holds no run: give the folder of one, such as runs/demo")
    if damage := config_damage(run, record):
        raise ValueError(f"{run}: {damage}")
    wrong = {path: complaints(path) for path in saved(run / CHECKPOINTS)}
    steps = sorted(step_of(path) for path, faults in wrong.items() if not faults)
    if not steps:
        raise ValueError(f"{run} has no checkpoint to fork from: a run saves one every `checkpoints.every` steps")
    if step is not None and step not in steps:
        damaged = wrong.get(checkpoint_path(run / CHECKPOINTS, step))
        why = f"is damaged ({damaged[0]})" if damaged else "is not there"
        raise ValueError(
            f"the checkpoint after step {step} of {run} {why}; there are those after {', '.join(map(str, steps))}. "
            "More of them stay with `checkpoints.every` and `checkpoints.keep`"
        )
    return checkpoint_path(run / CHECKPOINTS, steps[-1] if step is None else step)


def fork(run: Path, folder: Path, checkpoint: Path, *, fresh_optimizer: bool = False) -> str | None:
    """Write the folder of a fork that begins at a run's checkpoint; one that is there already stays as it is.

    `fresh_optimizer`: without the optimizer's moments. Returns a message if Proximo's code has changed since the run.
    """
    record = read_record(run)
    assert record is not None
    refuse_format(run, record)
    whole = {"of": os.path.relpath(run, folder), "step": step_of(checkpoint), "fresh_optimizer": fresh_optimizer}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        there = read_record(folder) if folder.is_dir() else None
        if there is None or there.get(FORK) != whole:
            raise ValueError(f"`run={folder}` is not empty and not this fork: give another folder")
        return None
    if lost := lost_rows(run, checkpoint):
        raise ValueError(f"{run}/{lost[0]}: restore the complete file")
    with new_folder(folder) as partial:
        _copy_rows(run, partial, checkpoint)
        target = checkpoint_path(partial / CHECKPOINTS, step_of(checkpoint))
        log = RunLog(partial, identity=record["identity"])
        write_folder(target, lambda path: _copy_checkpoint(checkpoint, path, fresh_optimizer), log.standing())
        copy_file(run / CONFIG, partial / CONFIG)
        # The machine stays the run's: other numbers of threads would change the last digits.
        new_record = record | process_details() | {"machine": record["machine"], "attempts": [], FORK: whole}
        log.record(new_record)
    return other_code(record["attempts"])


def refuse_other_weights(run: Path, config_toml: str) -> None:
    """ValueError if a config names other weights than the run's: they would not be read."""
    changed = differences(read_text(run / CONFIG), config_toml)
    for field in changed:
        if (table := field.partition(".")[0]) in WEIGHTS:
            raise ValueError(
                f"{table} is not that of {run}: a fork continues the weights of the run's checkpoint, so leave it as "
                "it is, or train from that checkpoint with proximo train --model CHECKPOINT"
            )


def changes(folder: Path, config_toml: str) -> list[str] | None:
    """Fields in which a config differs from that of a run, or of a fork that has not begun. None of one that has begun:
    its config may not change any more."""
    record = read_record(folder)
    if record is not None and FORK in record and record["attempts"]:
        return None
    return list(differences(read_text(folder / CONFIG), config_toml))


def parent_of(folder: Path, record: Mapping[str, Any]) -> tuple[Path, int] | None:
    """The run that a fork comes from, and the step after which it begins; None of a run that is no fork."""
    origin = record.get(FORK)
    if not isinstance(origin, dict) or not isinstance(origin.get("of"), str) or not isinstance(origin.get("step"), int):
        return None
    return Path(os.path.normpath(folder / origin["of"])), origin["step"]


def _copy_rows(run: Path, target: Path, checkpoint: Path) -> None:
    """Copy the rows and files that were written up to a checkpoint."""
    _, sizes = read_origin(checkpoint / STATE)
    for name, size in sizes.items():
        if size:
            copy_file(inside(run, name), inside(target, name), size)
    last = step_of(checkpoint)
    for name in (EVENTS, TIMINGS, TIMELINE):
        if (run / name).exists():
            copy_file(run / name, target / name)
            JsonLines(target / name).keep(lambda row: isinstance(row.get("step"), int) and row["step"] <= last)
    if (run / VERDICTS).is_dir():  # of judges: what was asked once is not asked again
        copy_folder(run / VERDICTS, target / VERDICTS)
    for file in files_of_steps(run):
        if is_up_to(file, last):
            make_folder(target / file.parent.name)
            copy_file(file, target / file.parent.name / file.name)


def _copy_checkpoint(source: Path, target: Path, fresh_optimizer: bool) -> None:
    copy_folder(source, target, without=MANIFEST)
    if fresh_optimizer:
        file = target / STATE / "optimizer.safetensors"
        kept = {name: each for name, each in read_tensors(file).items() if name.endswith(f".{MASTER}")}
        remove(file)
        remove(file.with_suffix(""))  # shards of ranks
        write_tensors(file, kept)
