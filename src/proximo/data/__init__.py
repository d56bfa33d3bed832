"""Texts from files, checked row by row: all mistakes are found before training starts."""

from proximo.data.examples import Example, read_examples
from proximo.data.rankings import Ranking, read_rankings
from proximo.data.rows import DataFile, Mistakes, Prompt, Row, read_completion, read_prompt, read_rows
from proximo.data.splits import read_splits, stable_hash

__all__ = [
    "DataFile",
    "Example",
    "Mistakes",
    "Prompt",
    "Ranking",
    "Row",
    "read_completion",
    "read_examples",
    "read_prompt",
    "read_rankings",
    "read_rows",
    "read_splits",
    "stable_hash",
]
