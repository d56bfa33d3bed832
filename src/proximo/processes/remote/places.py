"""Where workers run."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from proximo.processes.failures import GraderFailed
from proximo.processes.remote.frames import PLACE, WORKERS

FOLDER = Path(__file__).parent


class NoPlace(GraderFailed):
    """No node of the cluster answers."""


@dataclass(frozen=True)
class Place:
    """A core of a node, where a listener waits for relays."""

    address: str
    """host:port of the listener."""
    token: str
    """What a relay says to be let in."""
    cores: float = 1.0


class Places(Protocol):
    """The places of a cluster."""

    @property
    def size(self) -> int:
        """Number of places: so many workers may compute at the same time."""
        ...

    def take(self) -> Place:
        """The next one in turn, on a node that answers. NoPlace if there is none."""
        ...

    def close(self) -> None: ...


def command_of(script: Path, place: Place | None) -> tuple[list[str], Mapping[str, str]]:
    """What is started on this machine, and its environment: the script, or a relay to it."""
    if place is None:
        return [sys.executable, "-P", "-X", "faulthandler", str(script)], os.environ
    # Not an argument: those of a process are for everybody on this machine to read.
    said = {PLACE: f"{place.address} {place.token} {WORKERS.index(script.parent.name)}"}
    return [sys.executable, "-I", "-S", str(FOLDER / "relay.py")], os.environ | said
