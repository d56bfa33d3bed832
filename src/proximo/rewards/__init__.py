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
]
