"""Graders of one completion each, given its problem.

A reward is a frozen value that is called with a batch, `scores = reward(problems, completions)`, and returns
one float per completion. A completion that it cannot judge is NaN: unscored, which is not 0. What could hang or break
on what a model writes runs in a process of its own (workers.py); how it failed is in the
active `Grading`.
"""

import ast
from pathlib import Path

from proximo.processes.failures import GraderFailed
from proximo.rewards.function import PythonFunction
from proximo.rewards.judges.judge import Judge
from proximo.rewards.mathematics import MathVerify
from proximo.rewards.notebook_function import GivenFunction
from proximo.rewards.protocol import Grader
from proximo.rewards.text import ExactMatch, FormatReward
from proximo.system.opening import read_file, without_links

Reward = ExactMatch | FormatReward | MathVerify | PythonFunction | Judge | GivenFunction | Grader
"""Rewards that a config may name: one of ours, or any Grader from a file, type = "my_file.py:MyReward"."""

MAX_SOURCE = 1_000_000
"""Bytes of a file of functions that is looked into."""
WITHOUT_OPTIONS = (ExactMatch, MathVerify)
"""Rewards that need no more than their name."""


def reward_named(name: str) -> Reward:
    """The reward of a function, FILE.py:FUNCTION or MODULE:FUNCTION, or one of ours by its name.

    Example: reward_named("ExactMatch") == ExactMatch()
    """
    if ":" in name:
        return PythonFunction(name)
    known = {kind.__name__: kind for kind in WITHOUT_OPTIONS}
    if name.endswith(".py") and (functions := _functions(name)):
        raise ValueError(
            f"{name} is a file: give one of its functions, {', '.join(f'{name}:{each}' for each in functions)}"
        )
    if name not in known:
        raise ValueError(f"no reward is called {name!r}: give FILE.py:FUNCTION, or one of {', '.join(known)}")
    return known[name]()


def _functions(file: str) -> list[str]:
    """Functions that a file defines, read without executing it; none of one that cannot be read."""
    try:
        tree = ast.parse(read_file(without_links(Path(file)), MAX_SOURCE))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []
    defined = (each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return [each.name for each in defined if not each.name.startswith("_")]


__all__ = [
    "ExactMatch",
    "FormatReward",
    "GivenFunction",
    "Grader",
    "GraderFailed",
    "Judge",
    "MathVerify",
    "PythonFunction",
    "Reward",
    "reward_named",
]
