"""The small model that comes with the package, so that a first run needs no download."""

from pathlib import Path

FOLDER = Path(__file__).parent / "weights"


def resolve(name: str) -> str:
    """A shipped model's folder by its name; anything else is a folder or hub id already."""
    shipped = FOLDER / name
    return str(shipped) if shipped.is_dir() else name
