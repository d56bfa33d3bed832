"""Any Python function as a reward, with the parameters that users of TRL, verl and verifiers already have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from proximo.config.plugins import place_of
from proximo.rewards.grading import grading
from proximo.rewards.protocol import Waiting
from proximo.rewards.scoring import Answer, ask, groups, noted
from proximo.rewards.workers import FunctionJob, WorkerPool, check_at_once, check_seconds
from proximo.types import Completion, Problem


class _TakesFunctions(type):
    """A function in the place of its path becomes its path, which is what a config and another process can hold."""

    def __call__(cls, *arguments: Any, **fields: Any) -> Any:
        path, *rest = arguments or [fields.pop("path", "")]
        return super().__call__(_place_of(path) if callable(path) else path, *rest, **fields)


@dataclass(frozen=True)
class PythonFunction(metaclass=_TakesFunctions):
    """Calls `f(prompts, completions, **columns)` and takes its list of floats; None means "not my task", as in TRL: the
    reward is the sum of the other rewards, and without any the completion is unscored. Functions of verl
    (`compute_score(data_source, solution_str, ground_truth, extra_info)`) and verifiers (`f(completion, answer,
    **kwargs)`, or a Rubric) are known by their parameters and called as there; any may be `async def`.

    Columns are the data set's, the answer and the completions' token ids (`completion_ids`), as in TRL.
    Completions are strings, or lists of messages where the prompt is a conversation. A call has one group's
    completions, and runs in a process of its own: whatever it does there, the run continues, and what it leaves
    unscored takes no part in training. A process may be replaced or get company at any time, so a function that keeps
    a state of its own does not repeat. Random numbers that it draws are: they are seeded with what it is asked.
    """

    path: str
    """Function to call: package.module:function, or path/to/file.py:function.
    In Python, the function itself may be given if it is defined at the top level of a file."""
    seconds: float = 10.0
    """Time limit for one call in seconds; after it each completion is tried alone with the same limit."""
    memory_mb: int = 4096
    """Memory limit for the function's own data, above which it gets a MemoryError. Shared memory is not counted.
    If the machine itself runs out of memory, the kernel kills this process before the trainer."""
    siblings: bool = False
    """True if the function compares the completions of a group. If it fails, the whole group is unscored, since
    completions cannot be tried alone."""
    at_once: int = 64
    """Maximum calls at the same time, each in a process of its own. Only functions that mostly wait, for a server or a
    disk, get more than one process, and together these use at most memory_mb. 1: one group after the other."""
    reward_range: tuple[float, float] | None = None
    """Rewards of a wrong and of a right answer, such as 0 and 1; the unit of length penalties is half their distance.
    None: not known, and length penalties assume -1 and 1."""

    needs_answer = False

    def __post_init__(self) -> None:
        module, _, function = self.path.rpartition(":") if isinstance(self.path, str) else ("", "", "")
        if not module or not function.isidentifier():
            raise ValueError(
                f"reward.path is {self.path!r}: give a function, package.module:function or file.py:function"
            )
        check_seconds(self.seconds)
        if self.memory_mb < 64:
            raise ValueError(f"reward.memory_mb is {self.memory_mb}: Python itself needs 64")
        check_at_once(self.at_once)
        check_range(self.reward_range)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        with grading() as active:
            calls = self._calls(active.workers(self._job, self.at_once), problems, completions)
            if len(calls) == 1:  # on this thread, so that an interrupt ends the call too
                [(call, siblings)] = calls
                return noted(call(), siblings, grader=self.path)
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[float | None]]:
        """Begin one call for each group, as far as calls may run at once."""
        with grading() as active:
            pool = active.workers(self._job, self.at_once)
            begun = [(pool.begin(work), siblings) for work, siblings in self._calls(pool, problems, completions)]

        def finish() -> list[float | None]:
            return [score for answer, siblings in begun for score in noted(answer(), siblings, grader=self.path)]

        return finish

    def _calls(
        self, pool: WorkerPool, problems: Sequence[Problem], completions: Sequence[Completion]
    ) -> list[tuple[Waiting[Answer], Sequence[Completion]]]:
        """One call for each group, and the completions that it is about."""
        call = partial(ask, pool, alone=not self.siblings)
        grouped = groups(problems, completions)
        return [(partial(call, columns_of(asked, siblings)), siblings) for asked, siblings in grouped]

    @property
    def _job(self) -> FunctionJob:
        return FunctionJob(self.path, self.seconds, self.memory_mb, is_users=True)

    @property
    def label(self) -> str:
        """Name of its part of the reward."""
        return self.path.rpartition(":")[2]

    def reference(self, problem: Problem) -> str | None:
        """Return None: only the function knows what it likes."""
        return None


def check_range(declared: tuple[float, float] | None, of: str = "reward") -> None:
    """Check the field `reward_range`."""
    if declared is not None and not -math.inf < declared[0] < declared[1] < math.inf:
        raise ValueError(
            f"{of}.reward_range is {declared}: give what a wrong answer earns and then what a right one earns, which "
            "is more"
        )


def _place_of(function: object) -> str:
    path = place_of(function)
    if path is None:
        raise ValueError(
            f"reward.path is {function!r}, which another process cannot find: write it as a function of its own into a "
            "file and give 'path/to/file.py:function'"
        )
    return path


def columns_of(problems: Sequence[Problem], completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """The keyword arguments of a reward function, each with one entry for each completion."""
    names = dict.fromkeys(name for problem in problems for name in problem.data)
    columns: dict[str, list[Any]] = {name: [problem.data.get(name) for problem in problems] for name in names}
    return columns | {
        "answer": [problem.answer for problem in problems],
        "prompts": [
            problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
            for problem in problems
        ],
        "completions": [
            completion.text if isinstance(problem.prompt, str) else completion.messages
            for problem, completion in zip(problems, completions, strict=True)
        ],
        "completion_ids": [list(completion.tokens) for completion in completions],
    }
