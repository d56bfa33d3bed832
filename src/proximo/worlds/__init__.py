"""Environments and tools that come with the package; `tiny-agent`, `tiny-words` and `tiny-python` can learn them in
minutes."""

from proximo.worlds.calculator import calculate
from proximo.worlds.guessing import NumberGuessing, WordGuessing
from proximo.worlds.python import run_python

__all__ = ["NumberGuessing", "WordGuessing", "calculate", "run_python"]
