"""How far a tracker has got in a run's files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from proximo.system.folders import write_file
from proximo.system.opening import UnsafeFile, read_json

NAME = "sent.json"


@dataclass(frozen=True)
class Place:
    """The end of the last row that was sent from a .jsonl file, and what that row looked like: a resumed run cuts
    files back and writes the same rows again, or others if its settings were changed."""

    offset: int = 0
    length: int = 0
    """Bytes of the last row."""
    digest: str = ""
    """SHA-256 of the last row."""
    step: int = -1
    """Highest step sent."""


@dataclass(frozen=True)
class Position:
    """Everything that a later process needs to continue."""

    key: str | None = None
    """What the tracker calls the run; None: never opened."""
    attempts: int = 0
    """Attempts at the run when this was stored."""
    places: Mapping[str, Place] = field(default_factory=dict)
    completions: int = -1
    """Highest step whose completions were sent."""
    is_closed: bool = False
    """Whether the end of a finished run was sent."""

    def place(self, name: str) -> Place:
        return self.places.get(name, Place())

    def at(self, name: str, place: Place) -> "Position":
        return replace(self, places={**self.places, name: place})

    def save(self, folder: Path) -> None:
        write_file(folder / NAME, (json.dumps(asdict(self)) + "\n").encode())


def read_position(folder: Path) -> Position:
    """The stored position; a new one where there is none. ValueError if it is damaged: sending everything again would
    double it."""
    path = folder / NAME
    try:
        data = read_json(path)
        places = {name: Place(**place) for name, place in data.pop("places").items()}
        return Position(places=places, **data)
    except FileNotFoundError:
        return Position()
    except UnsafeFile:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: remove its folder to send everything again, as a new run") from None
