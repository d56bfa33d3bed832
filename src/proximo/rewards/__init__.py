"""Graders of one completion each, given its problem.

A reward is a frozen value that is called with a batch, `scores = reward(problems, completions)`, and returns
one float per completion. A completion that it cannot judge is NaN: unscored, which is not 0. It says whether it
may be called `while_sampling`: for one group at a time, on another thread, while other groups are being sampled.
"""

from proximo.rewards.function import PythonFunction, RewardFailed
from proximo.rewards.mathematics import MathVerify
from proximo.rewards.text import ExactMatch, FormatReward

Reward = ExactMatch | FormatReward | MathVerify | PythonFunction

__all__ = ["ExactMatch", "FormatReward", "MathVerify", "PythonFunction", "Reward", "RewardFailed"]
