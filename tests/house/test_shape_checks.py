"""Shapes in signatures are really checked while tests run, and only there where they are named."""

import sys
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from proximo.losses.pieces.weights import SequenceMean
from proximo.runs.records import Assembled
from tests.shape_checks import _Loader, with_checks

SOURCE = """
from dataclasses import dataclass
from torch import Tensor
from proximo.types.tensor_types import Float

class Piece:
    @property
    def own(self) -> Float[Tensor, "B"]:
        return self.value

    def inner(self, rows: Float[Tensor, "B T"], more: Float[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        return rows[0]

def plain(rows: Tensor) -> Tensor:
    return rows

@dataclass(frozen=True)
class Record:
    rows: Float[Tensor, "B T"]
"""


def test_what_names_a_shape_is_checked_and_nothing_else():
    made: dict[str, Any] = {"__name__": "made"}
    exec(compile(with_checks(SOURCE), "made", "exec"), made)
    piece, square, long = made["Piece"](), torch.zeros(2, 2), torch.zeros(2, 3)
    assert [piece.inner(square).shape for _ in range(2)] == [(2,), (2,)]
    with pytest.raises(BeartypeCallHintViolation):
        piece.inner(long)  # gives back [3] where [2] is promised
    with pytest.raises(BeartypeCallHintViolation):
        piece.inner(square, torch.zeros(3))
    piece.value = square[0]
    assert [piece.own.shape for _ in range(2)] == [(2,), (2,)]
    piece.value = square
    with pytest.raises(BeartypeCallHintViolation):
        _ = piece.own
    for _ in range(2):
        made["Record"](square)
    with pytest.raises(TypeCheckError):
        made["Record"](torch.zeros(2))
    assert not hasattr(made["plain"], "__wrapped__")


def test_inside_compiled_code_nobody_looks():
    """A GPU's layers are compiled without a break, and checks cannot be part of that."""
    made: dict[str, Any] = {"__name__": "made"}
    exec(compile(with_checks(SOURCE), "made", "exec"), made)

    piece = made["Piece"]()
    compiled = torch.compile(lambda rows: piece.inner(rows), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 2)), torch.ones(2))


def test_a_result_is_looked_at_without_a_second_call_when_it_is_another():
    made: dict[str, Any] = {"__name__": "made"}
    exec(compile(with_checks(SOURCE), "made", "exec"), made)

    class Counting(made["Piece"]):
        def __getattr__(self, name: str) -> torch.Tensor:
            calls.append(name)
            return torch.zeros(sizes[len(calls) - 1])

    calls: list[str] = []
    sizes = [(2,), (3,), (3,), (4,), (2, 2)]
    piece = Counting()
    assert [tuple(piece.own.shape) for _ in range(4)] == sizes[:4]
    with pytest.raises(BeartypeCallHintViolation, match="own"):
        _ = piece.own
    assert len(calls) == 5


def test_a_result_that_was_looked_at_is_not_kept():
    made: dict[str, Any] = {"__name__": "made"}
    exec(compile(with_checks(SOURCE), "made", "exec"), made)
    piece = made["Piece"]()
    for size in (2, 3, 4):
        piece.value = torch.zeros(size)
        kept = weakref.ref(piece.own)
        del piece.value
        assert kept() is None


def test_checked_code_that_was_kept_is_compiled_anew_when_its_source_changes(tmp_path):
    path, (before, after) = tmp_path / "made.py", (SOURCE, SOURCE.replace("rows[0]", "rows[:, 0]"))
    rows = torch.zeros(2, 3)
    for source, fits in [(before, False), (before, False), (after, True), (after, True)]:
        path.write_text(source)
        made: dict[str, Any] = {"__name__": "made"}
        code = _Loader("made", str(path)).get_code("made")
        assert code is not None
        exec(code, made)
        with nullcontext() if fits else pytest.raises(BeartypeCallHintViolation):
            made["Piece"]().inner(rows)
    kept = [] if sys.dont_write_bytecode else [f"made.{sys.implementation.cache_tag}.opt-checked.pyc"]
    assert [each.name for each in tmp_path.glob("__pycache__/*")] == kept


def test_the_package_is_checked():
    with pytest.raises(BeartypeCallHintViolation):
        SequenceMean()(torch.ones(2, 3, dtype=torch.bool), torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeCheckError):
        Assembled(None, None, torch.zeros(2, 2, dtype=torch.long), 0, 0, None, None)  # pyright: ignore[reportArgumentType]
