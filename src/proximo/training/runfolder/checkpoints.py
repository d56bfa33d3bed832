"""Checkpoints: a Hugging Face folder each, with the run's state beside the weights; complete, or not there.

In `state/`: run_state.json and random.safetensors (see state.py), optimizer.safetensors (moments and float32 masters),
value.safetensors (the value model's own parameters), reference.safetensors (only where it was reset) and
sampler.safetensors (older weights of a sampler that lags).
"""

import re
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from proximo.storage.folders import complaints, remove_folder, set_aside, write_folder
from proximo.training.config import CheckpointOptions
from proximo.training.runfolder.state import (
    naming_io,
)

CHECKPOINTS = "checkpoints"
STATE = "state"
MAX_FAILURES = 3
"""Saves in a row that may fail."""


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def saved(folder: Path, most: int | None = None) -> list[Path]:
    """Everything that has a checkpoint's name, the newest first, by step, not by time; none of a later step than
    `most`."""
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name)] if folder.is_dir() else []
    return sorted((path for path in found if most is None or step_of(path) <= most), key=lambda path: -step_of(path))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_valid(
    folder: Path, complaint: Callable[[Path], str | None] = lambda _: None
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones; `complaint` may find something, too."""
    passed_over = []
    for path in saved(folder):
        if wrong := complaints(path):
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            passed_over.append(f"{path} is damaged ({'; '.join(wrong[:3])}{more})")
        elif (found := complaint(path)) is not None:
            passed_over.append(f"{path} cannot be gone on from: {found}")
        else:
            return path, passed_over
    return None, passed_over


def pass_over(folder: Path, point: Path | None) -> None:
    """Checkpoints after the one that is gone on from are none any more: nobody is to take one for the newest."""
    for path in saved(folder):
        if point is None or step_of(path) > step_of(point):
            set_aside(path)


def save(
    folder: Path,
    step: int,
    save_model: Callable[[Path], object],
    tokenizer: PreTrainedTokenizerBase,
    write_state: Callable[[Path], None] | None = None,
) -> Path:
    """Into the run's `checkpoints/step-N`, with the model that `save_model` writes; raises OSError, and leaves all as
    it was, where that cannot be."""
    target = place(folder / CHECKPOINTS, step)
    write_checkpoint(target, save_model, tokenizer, write_state)
    return target


def write_checkpoint(
    target: Path,
    save_model: Callable[[Path], object],
    tokenizer: PreTrainedTokenizerBase,
    write_state: Callable[[Path], None] | None = None,
) -> None:
    def fill(path: Path) -> None:
        with naming_io(target):
            save_model(path)
            tokenizer.save_pretrained(path)
            if write_state is not None:
                (path / STATE).mkdir()
                write_state(path / STATE)

    write_folder(target, fill)


def retain(folder: Path, options: CheckpointOptions, step: int, best: int | None) -> None:
    """Remove all but the newest ones up to this step and the best."""
    for path in saved(folder / CHECKPOINTS, step)[options.keep :]:
        if not (options.keep_best and step_of(path) == best):
            remove_folder(path)


class Saver:
    """Saves that may fail: a full disk is no reason to stop, until it has been full for long."""

    def __init__(self, log: Callable[[int, str, str], None], say: Callable[[int, str], None]) -> None:
        """`log` takes the step, the kind and the message of an event."""
        self._log, self._say, self._failures = log, say, 0

    def save(self, step: int, write: Callable[[], None], *, last: bool = False, again: bool = True) -> bool:
        """Whether it worked; raises OSError where the last save of a run fails, or too many in a row have. `again`:
        whether there will be another."""
        try:
            write()
        except OSError as error:
            self._failures += 1
            message = f"no checkpoint after step {step}: {error}; older ones are as they were"
            self._log(step, "save_failed", message)
            if last or (again and self._failures >= MAX_FAILURES):
                raise OSError(
                    f"{message}. {self._failures} saves in a row have failed: make room or the folder writable, then "
                    "give the same command again"
                ) from error
            self._say(step, f"{message}{'; trying again at the next one' if again else ''}")
            return False
        self._failures = 0
        return True
