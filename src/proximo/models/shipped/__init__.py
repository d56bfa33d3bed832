"""Models that have a name here: the small one that comes with the package, and one that pip installs."""

import json
import re
import warnings
from functools import cache
from pathlib import Path

from proximo.models.shipped import smollm
from proximo.system.folders import MANIFEST, complaints
from proximo.system.opening import names, without_links

FOLDER = Path(__file__).parents[1] / "weights"
MAX_RESULT = 200_000_000
"""Bytes of a run's result.json; it holds the answers to all held-out problems."""


class DamagedCheckpoint(UserWarning):
    """The newest checkpoint of a run was passed over."""


def resolve(name: str) -> str:
    """A model's folder by the name it has here, or of a run's folder the checkpoint that is its result: the newest, or
    the best of a run that collapsed.

    Anything else is a folder or hub id already.
    """
    if name == smollm.NAME:
        return str(smollm.converted())
    checkpoints = without_links(name) / "checkpoints"
    if checkpoints.is_dir():
        return str(_best_of_collapsed(checkpoints) or _newest(checkpoints))
    shipped = {path.name: path for path in FOLDER.iterdir()}
    return str(shipped.get(name, name))


def _best_of_collapsed(checkpoints: Path) -> Path | None:
    """The checkpoint that the result of a run names instead of its last one; None where there is no such result, or
    that checkpoint is missing or damaged."""
    result = checkpoints.parent / "result.json"
    try:
        if result.is_symlink() or not result.is_file() or result.stat().st_size > MAX_RESULT:
            return None
        stored = json.loads(result.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    name = stored.get("checkpoint") if isinstance(stored, dict) and "last" in stored else None
    if not isinstance(name, str) or re.fullmatch(r"step-\d+", name) is None:
        return None
    point = checkpoints / name
    return point if point.is_dir() and not point.is_symlink() and not _complaints(point) else None


def _newest(checkpoints: Path) -> Path:
    """The newest that is intact. A checkpoint has its name only when it is complete; damage can still come later."""
    matches = (re.fullmatch(r"step-([0-9]{1,18})", name) for name in names(checkpoints))
    steps = {int(match[1]): checkpoints / match[0] for match in matches if match}
    damaged = []
    for step in sorted(steps, reverse=True):
        complaints = _complaints(steps[step])
        if not complaints:
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}; {steps[step]} is used", DamagedCheckpoint, stacklevel=3)
            return steps[step]
        damaged.append(f"{steps[step]} is damaged ({complaints[0]})")
    reason = "; ".join(damaged) or "it holds no finished checkpoint"
    raise ValueError(f"{str(checkpoints)!r}: {reason}: let the run save one first")


def _complaints(checkpoint: Path) -> list[str]:
    """Complaints by its hashes, where it has any: a folder made elsewhere has none."""
    try:
        written = (checkpoint / MANIFEST).lstat().st_mtime_ns
    except OSError:
        return []
    return _known_complaints(checkpoint, written)


@cache
def _known_complaints(checkpoint: Path, written: int) -> list[str]:
    """Read once for each time it was written: a run asks for its model several times, and hashes take a while."""
    return complaints(checkpoint)
