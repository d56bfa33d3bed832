"""Checkpoints: each is a Hugging Face folder that also holds the run's state. It is written completely or not at all.

In `state/`: run_state.json and random.safetensors (see state.py), optimizer.safetensors (moments and float32 masters),
value.safetensors (the value model's own parameters), reference.safetensors (only if it was reset),
sampler.safetensors (older weights that later steps sample with) and ahead.json (rollouts of later steps). Ranks write
folders in the place of the first three, such as optimizer/, with a file for each rank.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from proximo.learner.named_tensors import STATE
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.runs.files import CHECKPOINTS
from proximo.runs.options import CheckpointOptions
from proximo.runs.state import naming_io
from proximo.system.folders import complaints, remove_folder, set_aside, write_folder
from proximo.system.opening import make_folder, names

MAX_FAILURES = 3
"""Number of failed saves in a row after which the run stops."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def saved(folder: Path, max_step: int | None = None) -> list[Path]:
    """All folders named like a checkpoint, highest step first; those of later steps than `most` are left out."""

    folders = [folder / name for name in names(folder) if re.fullmatch(r"step-[0-9]{1,18}", name)]
    return sorted(
        (path for path in folders if max_step is None or step_of(path) <= max_step), key=lambda path: -step_of(path)
    )


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_valid(
    folder: Path, complaint: Callable[[Path], str | None] = lambda _: None
) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and what is wrong with newer ones; `complaint` is an additional check."""
    passed_over = []
    for path in saved(folder):
        if wrong := complaints(path):
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            passed_over.append(f"{path} is damaged ({'; '.join(wrong[:3])}{more})")
        elif (refused := complaint(path)) is not None:
            passed_over.append(f"{path} cannot be resumed from: {refused}")
        else:
            return path, passed_over
    return None, passed_over


def set_aside_newer(folder: Path, resume_from: Path | None) -> None:
    """Set aside checkpoints newer than the one we resume from."""
    for path in saved(folder):
        if resume_from is None or step_of(path) > step_of(resume_from):
            set_aside(path)


def save(
    folder: Path,
    step: int,
    save_model: Callable[[Path], object],
    tokenizer: PreTrainedTokenizerBase,
    write_state: Callable[[Path], None] | None = None,
    more: Mapping[str, object] | None = None,
) -> Path:
    """Write the run's `checkpoints/step-N`, with the model that `save_model` writes. If that fails, raises OSError and
    changes nothing."""
    target = checkpoint_path(folder / CHECKPOINTS, step)
    write_checkpoint(target, save_model, tokenizer, write_state, more)
    return target


def write_checkpoint(
    target: Path,
    save_model: Callable[[Path], object],
    tokenizer: PreTrainedTokenizerBase,
    write_state: Callable[[Path], None] | None = None,
    more: Mapping[str, object] | None = None,
) -> None:
    def fill(path: Path) -> None:
        with naming_io(target):
            save_model(path)
            tokenizer.save_pretrained(path)
            if write_state is not None:
                make_folder(path / STATE)
                write_state(path / STATE)

    write_folder(target, fill, more)


def retain(folder: Path, options: CheckpointOptions, step: int, best: int | None) -> None:
    """Remove old checkpoints: the newest `keep` up to this step stay, and the best one if `keep_best`."""
    for path in saved(folder / CHECKPOINTS, step)[options.keep :]:
        if not (options.keep_best and step_of(path) == best):
            remove_folder(path)


class Saver:
    """Saves checkpoints and tolerates failures such as a full disk, up to MAX_FAILURES in a row."""

    def __init__(self, log: Callable[[int, str, str], None], say: Callable[[int, str], None]) -> None:
        """`log` takes the step, the kind and the message of an event."""
        self._log, self._say, self._failures = log, say, 0

    def save(self, step: int, write: Callable[[], object], *, last: bool = False, again: bool = True) -> bool:
        """Save by calling `write`; returns whether that worked. Raises OSError if the last save of a run fails, or too
        many in a row did. `again`: whether there will be another save."""
        try:
            write()
        except OSError as error:
            self._failures += 1
            message = f"no checkpoint after step {step}: {error}; older ones are unchanged"
            self._log(step, "save_failed", message)
            if last or (again and self._failures >= MAX_FAILURES):
                raise OSError(
                    f"{message}. {self._failures} saves in a row have failed: free disk space or make the folder "
                    "writable, then run the same command again"
                ) from error
            self._say(step, f"{message}{'; trying again at the next one' if again else ''}")
            return False
        self._failures = 0
        return True
