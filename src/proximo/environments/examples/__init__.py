"""Environments and tools that come with the package; `tiny-agent`, `tiny-words` and `tiny-python` can learn them in
minutes."""

from proximo.environments.examples.calculator import calculate
from proximo.environments.examples.guessing import NumberGuessing, WordGuessing
from proximo.environments.examples.python import run_python

__all__ = ["NumberGuessing", "WordGuessing", "calculate", "run_python"]
