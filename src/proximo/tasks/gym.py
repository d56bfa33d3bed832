"""The tasks of reasoning-gym, each with its own scorer."""

import difflib
import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from proximo.data import stable_hash
from proximo.rewards.scoring import groups, score
from proximo.rewards.workers import FunctionJob
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Problem

_BLOCK = 500
"""Problems per seed; some of reasoning-gym's tasks prepare a whole block at once."""
_PATIENCE = 100
"""Blocks searched for a problem that is new."""
_SECONDS = 30.0
"""Time to score one group; then the scorer is killed, and its completions are tried one by one, each as long."""
_MEMORY_MB = 4096


@dataclass(frozen=True)
class Gym:
    """Any task of reasoning-gym, by name; endless. Its scorer gives the task score, often with partial credit.

    If a completion contains <answer>...</answer>, that part is scored, otherwise all of it. Some scorers evaluate the
    text as Python, so scoring runs in a separate process. On Linux that process cannot write files, start programs or
    open sockets; on a kernel without seccomp or Landlock it has no such restrictions.
    """

    name: str
    """Name of the task in reasoning-gym: chain_sum, countdown, sudoku, ..."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of that task, for example min_terms."""
    held_out: int = 100
    """Number of held-out problems, never used in training."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.held_out < 1:
            raise ValueError(f"task.held_out is {self.held_out}: give at least 1")
        taken = {"seed", "size"} & self.config.keys()
        if taken:
            raise ValueError(f"task.config has {sorted(taken)}: leave it out, the run decides it")

    def size(self, split: Split) -> int | None:
        return None if split == "train" else self.held_out

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        if split == "held_out":
            return self._held_out[index % self.held_out]
        held_out = {problem.prompt for problem in self._held_out}
        for attempt in range(_PATIENCE):
            problem = self._made(index, "train", seed, attempt)
            if problem.prompt not in held_out:
                return problem
        raise ValueError(f"task.held_out is {self.held_out}: it leaves {self.name} nothing to train on, give less")

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        job = FunctionJob(f"{Path(__file__).with_name('gym_scoring.py')}:scored", _SECONDS, _MEMORY_MB)
        constants = {"name": self.name, "config": self._settings}
        scores = []
        for asked, siblings in groups(problems, completions):
            answers = [_answer(completion.text) for completion in siblings]
            entries = [_entry(problem) for problem in asked]
            scores += score(job, siblings, {"answers": answers, "entries": entries}, constants, grader=self.name)
        return [Grade(outcome) for outcome in scores]

    def reference(self, problem: Problem) -> str | None:
        return None if problem.answer is None else str(problem.answer)

    @cached_property
    def _held_out(self) -> tuple[Problem, ...]:
        problems: dict[str, Problem] = {}
        for index in range(_PATIENCE * self.held_out):
            problem = self._made(index, "held_out", 0, 0)
            problems.setdefault(problem.id, problem)
            if len(problems) == self.held_out:
                return tuple(problems.values())
        raise ValueError(
            f"task.held_out is {self.held_out}: {self.name} has only about {len(problems)} problems, give less"
        )

    def _made(self, index: int, *chance: object) -> Problem:
        block, position = divmod(index, _BLOCK)
        entry = self._dataset(stable_hash(block, *chance) % 2**31)[position]
        question = str(entry["question"])
        return Problem(
            id=f"{self.name}-{stable_hash(question):016x}",
            prompt=question,
            answer=entry["answer"],
            data={"metadata": entry["metadata"]},
        )

    @property
    def _settings(self) -> str:
        return json.dumps(dict(self.config), sort_keys=True)

    def _dataset(self, seed: int) -> Any:
        return _dataset(self.name, self._settings, seed)


def _answer(text: str) -> str:
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return (tagged[-1] if tagged else text).strip()


def _entry(problem: Problem) -> str:
    """The problem's entry as a Python literal, which distinguishes tuples from lists and keeps numbers as keys."""
    return repr(_plain({"question": problem.prompt, "answer": problem.answer, **problem.data}))


def _plain(value: Any) -> Any:
    """The value with anything that has no Python literal turned into text; scorers do not read those parts."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    literal = value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))
    return value if literal else str(value)


@lru_cache(maxsize=8)
def _dataset(name: str, config: str, seed: int) -> Any:
    try:
        # Imported late and by name: it is an optional extra, and importing it takes seconds.
        gym = importlib.import_module("reasoning_gym")
    except ImportError:
        raise ValueError(f'task Gym("{name}") needs reasoning-gym: pip install "proximo[gym]"') from None
    known = gym.factory.DATASETS
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.4)) or ", ".join(sorted(known))
        raise ValueError(f"task.name is {name!r}: reasoning-gym has no such task; the nearest are {near}")
    try:
        return gym.create_dataset(name, size=_BLOCK, seed=seed, **json.loads(config))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task.config is {config}: {name} refuses it, {error}") from None
