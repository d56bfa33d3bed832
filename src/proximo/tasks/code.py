"""Problems whose answers are programs, graded by tests."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from proximo.data import Row, stable_hash
from proximo.data.locating import data_name
from proximo.data.rows import check_share
from proximo.data.splits import prompt_key
from proximo.processes.failures import Failure
from proximo.processes.sandbox import Limits, Sandbox, SandboxFailed
from proximo.rewards.grading import note_failure
from proximo.tasks.protocol import Complaints, Split
from proximo.tasks.reading import FileProblems
from proximo.tasks.row_index import CheckedPrompt
from proximo.tasks.sources.prompting import row_prompt
from proximo.tasks.stored import LargeFile, StoredProblems, problems_of
from proximo.tasks.testing import Conversations, FunctionTests, extract_program, read_tests
from proximo.types import Completion, Grade, Problem


@dataclass(frozen=True)
class Code:
    """Programming problems from a file, a prompt and tests per row. Task score 1 if all tests pass, else 0.

    The program is the last Python block of the completion, or the whole completion. It runs in a sandbox, which this
    machine must support, with Python and its standard library only.
    """

    path: str
    """A data file, a pattern of files, a folder or a hub id."""
    prompt_column: str = "prompt"
    """Column with the prompt."""
    tests_column: str = "tests"
    """Column with the tests: a list of objects, or its JSON.
    An object has input and output (stdin and stdout); or arguments and result, if the row names a function."""
    held_out: float | str = 0.1
    """Held-out data: a share of the prompts, chosen by hash, or the path of a separate file."""
    skip_bad: bool = False
    """Skip and count bad rows instead of refusing the file."""
    limits: Limits = field(default_factory=Limits)
    """Limits of a script for one test, or of all calls of a function together."""
    workers: int | None = None
    """Programs run in parallel. None: one per core."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_share(self.held_out, "task.held_out")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"task.workers is {self.workers}: give at least 1, or leave it out")

    def size(self, split: Split) -> int:
        return self._problems.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self._problems.problem(index, split, seed)

    def check(self, complaints: Complaints) -> list[str]:
        """Refuse a machine without a sandbox and problems that the run cannot use; with skip_bad those are left out
        and returned."""
        _ = self._sandbox
        return self._problems.check(complaints)

    @property
    def remarks(self) -> list[str]:
        """Lines for a person: prompts that occur more than once."""
        return [line for line in (self._problems.repeated_line,) if line is not None]

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        """1 if all tests pass, else 0. A program that fails, hangs or exceeds its limits is wrong; one that could not
        be run is unscored."""
        asked = [
            (problem, extract_program(completion.text))
            for problem, completion in zip(problems, completions, strict=True)
        ]
        different = {(problem.id, program): (problem, program) for problem, program in asked}  # siblings often agree
        verdicts = dict(zip(different, self._sandbox.each(self._verdict, different.values()), strict=True))
        return [self._grade(verdicts[problem.id, program]) for problem, program in asked]

    def reference(self, problem: Problem) -> str | None:
        """The row's solution, if it has one."""
        solution = problem.answer
        return solution if solution is None or "```" in solution else f"```python\n{solution}\n```"

    def _verdict(self, asked: tuple[Problem, str]) -> bool | SandboxFailed:
        problem, program = asked
        try:
            return self._tests(problem.data).passed(program, self._sandbox)
        except SandboxFailed as failure:
            return failure

    def _grade(self, verdict: bool | SandboxFailed) -> Grade:
        if isinstance(verdict, SandboxFailed):
            note_failure("Code", Failure("sandbox", str(verdict)))
            return Grade(math.nan)
        return Grade(float(verdict))

    @property
    def storage_words(self) -> str:
        """Place of the rows, and what of them was checked, for a person."""
        return self._problems.storage_words

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.limits, self.workers)

    @cached_property
    def _problems(self) -> FileProblems | StoredProblems:
        settings = f"Code {self.prompt_column} {self.tests_column} {self.limits}"
        return problems_of(
            LargeFile(self.path, self.held_out, self.skip_bad, self._problem, self._checked, settings, needed={})
        )

    def _checked(self, row: Row) -> CheckedPrompt:
        """The prompt of a row from which a problem can be made."""
        return CheckedPrompt(self._problem(row).prompt)

    def _problem(self, row: Row) -> Problem:
        prompt = row_prompt(row, self.prompt_column)
        if self.tests_column not in row.values:
            raise ValueError(f"no column {self.tests_column!r}, only {', '.join(row.values)}: set task.tests_column")
        data = {column: value for column, value in row.values.items() if column != self.prompt_column}
        tests, solution = self._tests(data), data.get("solution")
        if isinstance(tests, Conversations):
            limit = self.limits.output_kb * 1024
            longest = max(len(expected.encode()) for _, expected in tests.pairs)
            if longest > limit:
                raise ValueError(
                    f"an expected output has {longest} bytes: set task.limits.output_kb above {limit // 1024}"
                )
        if solution is not None and not isinstance(solution, str):
            raise ValueError("the solution is not a text: give a program")
        asked = [data[self.tests_column], data.get("function")]
        name = stable_hash(prompt_key(prompt), json.dumps(asked, default=str))
        return Problem(id=f"{data_name(self.path)}-{name:016x}", prompt=prompt, answer=solution, data=data)

    def _tests(self, data: Mapping[str, Any]) -> Conversations | FunctionTests:
        return read_tests(data[self.tests_column], data.get("function"))
