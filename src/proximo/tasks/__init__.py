"""Tasks: where problems come from and how completions are graded.

A task is a frozen dataclass. Its problems are pure functions of (index, split, seed), so there is no state to save.
The held-out split is disjoint from training and does not depend on the seed, so runs can be compared.
"""

from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.chain import Chain
from proximo.tasks.code import Code
from proximo.tasks.countdown import Countdown
from proximo.tasks.echo import Echo
from proximo.tasks.file import File
from proximo.tasks.guessing import Guessing
from proximo.tasks.gym import Gym
from proximo.tasks.protocol import RewardRange, Split, Task, reward_range
from proximo.tasks.sorting import Sorting
from proximo.tasks.sources.mixture import Mixture, Source

TaskOptions = Arithmetic | Countdown | Echo | Sorting | Chain | Guessing | Gym | File | Code | Mixture | Task
"""Tasks that a config may name: one of ours, or any Task from a file, type = "my_file.py:MyTask"."""

__all__ = [
    "Arithmetic",
    "Chain",
    "Code",
    "Countdown",
    "Echo",
    "File",
    "Guessing",
    "Gym",
    "Mixture",
    "RewardRange",
    "Sorting",
    "Source",
    "Split",
    "Task",
    "TaskOptions",
    "reward_range",
]
