"""What a piece from a user's own file says about itself, for explain, page and report."""

from typing import Any, Protocol, runtime_checkable

from proximo.algorithms.peers import PEERS
from proximo.config.plugins import place_of

NOT_GIVEN = "not given"


@runtime_checkable
class Cites(Protocol):
    """A piece that names the papers it comes from."""

    @property
    def papers(self) -> str | tuple[str, ...]: ...


def own_words(piece: Any) -> list[tuple[str, str]]:
    """Label and text of what a user's own piece says about itself; nothing of one of ours.

    Example: [("from", "my_gate.py:MyGate"), ("what", "Blocks far ratios."), ("paper", "not given")]
    """
    if piece is None or type(piece) in PEERS:
        return []
    return [("from", place_of(type(piece)) or NOT_GIVEN), ("what", _first_line(type(piece))), ("paper", _papers(piece))]


def _first_line(kind: type) -> str:
    lines = (vars(kind).get("__doc__") or "").strip().splitlines()
    is_made = bool(lines) and lines[0].startswith(f"{kind.__name__}(")  # by dataclass, where nothing is written
    return NOT_GIVEN if not lines or is_made else lines[0].strip()


def _papers(piece: Any) -> str:
    papers = piece.papers if isinstance(piece, Cites) else ()
    return (papers if isinstance(papers, str) else "; ".join(map(str, papers))) or NOT_GIVEN
