"""Problems that are the starts of an environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from proximo.config.plugins import load_class
from proximo.environments.seeded_start import Starting
from proximo.tasks import Split
from proximo.tasks.draws import check_held_out, numbered
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class Starts:
    """Prompts are what an environment shows first, each drawn with a seed of its own.

    For environments that have `start(seed)`, as those of other libraries in proximo.environments.adapters do. Give
    the same path and arguments to environment, which plays and rewards the episodes.
    """

    path: str
    """Environment with start(seed): package.module:Class or path/to/file.py:Class."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments with which the environment's class is called."""
    instruction: str = ""
    """Text before each start, such as the rules."""
    held_out: int = 100
    """Number of held-out starts; their seeds are drawn separately from those of training."""
    chat: bool = True
    """True: a prompt is a user's message. False: a text."""

    while_sampling = True

    def __post_init__(self) -> None:
        check_held_out(self.held_out)

    def size(self, split: Split) -> int | None:
        return None if split == "train" else self.held_out

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        start, number = numbered("starts", index, split, seed, self.held_out)
        drawn = number % 2**31
        text = "\n\n".join(filter(None, (self.instruction, self._environment.start(drawn))))
        prompt = ({"role": "user", "content": text},) if self.chat else text
        return Problem(f"start-{split}-{start}", prompt, None, {"start": drawn})

    @cached_property
    def _environment(self) -> Starting:
        return load_class(self.path)(**self.arguments)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        raise ValueError("task Starts has no verdict: set environment.path to the same environment, which has")

    def reference(self, problem: Problem) -> str | None:
        return None
