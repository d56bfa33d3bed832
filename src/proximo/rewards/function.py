"""Any Python function as a reward, with the parameters that users of TRL, verl and verifiers already have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proximo.outside import place_of
from proximo.rewards.processes import Job
from proximo.rewards.scoring import groups, score_or_pass
from proximo.rewards.workers import check_seconds
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
    unscored takes no part in training. It may be replaced at any time, so a function that keeps a state of its own
    is not the same after a resume. Random numbers that it draws are: they are seeded with what it is asked.
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
    """Whether the function compares the completions of a group. If it fails, the whole group is unscored, since
    completions cannot be tried alone."""
    reward_range: tuple[float, float] | None = None
    """Rewards of a wrong and of a right answer, such as 0 and 1; the unit of length penalties is half their distance.
    None: not known, and length penalties assume -1 and 1."""

    needs_answer = False

    def __post_init__(self) -> None:
        place, _, function = self.path.rpartition(":")
        if not place or not function.isidentifier():
            raise ValueError(f"reward.path is {self.path!r}: give package.module:function or file.py:function")
        check_seconds(self.seconds)
        if self.memory_mb < 64:
            raise ValueError(f"reward.memory_mb is {self.memory_mb}: Python itself needs 64")
        check_range(self.reward_range)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        job = Job(self.path, self.seconds, self.memory_mb, is_users=True)
        scores = []
        for asked, said in groups(problems, completions):
            scores += score_or_pass(job, said, columns_of(asked, said), grader=self.path, alone=not self.siblings)
        return scores

    @property
    def label(self) -> str:
        """Names its part of the reward."""
        return self.path.rpartition(":")[2]

    def reference(self, problem: Problem) -> str | None:
        """None: only the function knows what it likes."""
        return None


def check_range(declared: tuple[float, float] | None) -> None:
    """Of a reward's field `reward_range`."""
    if declared is not None and not -math.inf < declared[0] < declared[1] < math.inf:
        raise ValueError(
            f"reward.reward_range is {declared}: give what a wrong answer earns and then what a right one earns, which "
            "is more"
        )


def _place_of(function: object) -> str:
    place = place_of(function)
    if place is None:
        raise ValueError(
            f"reward.path is {function!r}, which another process cannot find: write it as a function of its own into a "
            "file and give 'path/to/file.py:function'"
        )
    return place


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
            completion.text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": completion.text}]
            for problem, completion in zip(problems, completions, strict=True)
        ],
        "completion_ids": [list(completion.tokens) for completion in completions],
    }
