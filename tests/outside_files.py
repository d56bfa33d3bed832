"""Classes outside of the package, as a user would write them: written into files by tests."""

import sys

TASK = '''
from dataclasses import dataclass

from proximo.types import Grade, Problem


@dataclass(frozen=True)
class Parrot:
    """Says a letter after the other."""

    letters: str = "ab"
    """Which letters."""
    weight: float = 1.0
    limit: int | None = None

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self):
        if not self.letters:
            raise ValueError("task.letters is '': give at least one letter")

    def size(self, split):
        return None

    def problem(self, index, split, seed):
        letter = self.letters[index % len(self.letters)]
        return Problem(f"parrot-{index}", letter, letter)

    def grade(self, problems, completions):
        scores = [float(c.text == p.answer) for p, c in zip(problems, completions)]
        return [Grade(score) for score in scores]

    def reference(self, problem):
        return problem.answer
'''

REWARD = """
from dataclasses import dataclass


@dataclass(frozen=True)
class Short:
    most: int = 10
    needs_answer = False
    reward_range = (0.0, 1.0)

    def __call__(self, problems, completions):
        return [float(len(each.text) <= self.most) for each in completions]

    def reference(self, problem):
        return None
"""

GATE = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Ceiling:
    """Holds the ratio below a ceiling."""

    most: float = 2.0
    """The highest ratio that still pushes."""

    def __call__(self, log_ratio, logprobs, advantages, mask):
        return -log_ratio.exp().clamp(max=self.most) * advantages

    def through(self, log_ratio, advantages):
        return (log_ratio.exp() <= self.most).to(log_ratio.dtype)
'''

KEEP = '''
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class First:
    """Trains on the first so many groups."""

    groups: int = 1
    formula = "the first groups"
    papers = ("arXiv 1", "arXiv 2")
    peers = ("trl_first", "verl_first")

    def __call__(self, outcome, group):
        return (group < self.groups) & ~torch.isnan(outcome)
'''


def forget_package() -> None:
    """Remove the modules of a package called `package` that another test has imported from a folder of its own."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "package"]:
        del sys.modules[name]
