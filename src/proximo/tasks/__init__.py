"""Where problems come from and how answers are judged.

A task is a frozen value. Its problems are pure functions of (index, split, seed): nothing to save, nothing to
resume. The held-out split never meets training and does not depend on the seed, so that runs can be compared.
"""

from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.code import Code
from proximo.tasks.countdown import Countdown
from proximo.tasks.echo import Echo
from proximo.tasks.file import File
from proximo.tasks.gym import Gym
from proximo.tasks.protocol import RewardRange, Split, Task, reward_range
from proximo.tasks.sorting import Sorting

TaskOptions = Arithmetic | Countdown | Echo | Sorting | Gym | File | Code | Task
"""What a config may name: one of ours, or any Task from a file, type = "my_file.py:MyTask"."""

__all__ = [
    "Arithmetic",
    "Code",
    "Countdown",
    "Echo",
    "File",
    "Gym",
    "RewardRange",
    "Sorting",
    "Split",
    "Task",
    "TaskOptions",
    "reward_range",
]
