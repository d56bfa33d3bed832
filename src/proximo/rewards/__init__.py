"""Graders of one completion each, given its problem.

A reward is a frozen value that is called with a batch, `scores = reward(problems, completions)`, and returns
one float per completion. A completion that it cannot judge is NaN: unscored, which is not 0. What could hang or break
on what a model writes runs in a process of its own (workers.py); how it failed is in the
active `Grading`.
"""

from proximo.processes.failures import GraderFailed
from proximo.rewards.function import PythonFunction
from proximo.rewards.judges.judge import Judge
from proximo.rewards.mathematics import MathVerify
from proximo.rewards.notebook_function import GivenFunction
from proximo.rewards.protocol import Grader
from proximo.rewards.text import ExactMatch, FormatReward

Reward = ExactMatch | FormatReward | MathVerify | PythonFunction | Judge | GivenFunction | Grader
"""Rewards that a config may name: one of ours, or any Grader from a file, type = "my_file.py:MyReward"."""

WITHOUT_OPTIONS = (ExactMatch, MathVerify)
"""Rewards that need no more than their name."""


def reward_named(name: str) -> Reward:
    """The reward of a function, FILE.py:FUNCTION or MODULE:FUNCTION, or one of ours by its name.

    Example: reward_named("ExactMatch") == ExactMatch()
    """
    if ":" in name:
        return PythonFunction(name)
    known = {kind.__name__: kind for kind in WITHOUT_OPTIONS}
    if name not in known:
        raise ValueError(f"no reward is called {name!r}: give FILE.py:FUNCTION, or one of {', '.join(known)}")
    return known[name]()


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
