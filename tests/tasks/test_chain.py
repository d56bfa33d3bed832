"""Running sums whose steps are written out."""

import pytest

from proximo.tasks import Chain
from proximo.tasks.chain import solution
from proximo.types import Completion, Problem

PROBLEM = Problem("chain-a3b4c9", "a3b4c9=", "6", source="steps-02")


def said(text: str) -> Completion:
    return Completion((1,), (0.0,), text, "stop")


def test_the_work_by_hand():
    assert solution(PROBLEM) == ["3", "b4=7", "c9=6"]


def test_the_last_number_is_graded():
    texts = ["3 b4=7 c9=6", "3 b4=5 c9=6", "3 b4=7 c9=5", "", "6"]
    assert [grade.outcome for grade in Chain().grade([PROBLEM] * 5, [*map(said, texts)])] == [1, 1, 0, 0, 1]


def test_problems_have_the_steps_that_their_source_says():
    task = Chain(steps=(1, 4, 16), held_out=30)
    problems = [task.problem(index, "train", 0) for index in range(60)]
    assert {problem.source for problem in problems} == {"steps-01", "steps-04", "steps-16"}
    for problem in problems:
        work = solution(problem)
        assert len(work) == 1 + int(problem.source.removeprefix("steps-"))
        assert work[-1].endswith(f"={problem.answer}")


@pytest.mark.parametrize("steps", [(), (0,), (26,), (2, 2)])
def test_impossible_steps_are_refused(steps):
    with pytest.raises(ValueError, match="task.steps is .*: give numbers from 1 to 25"):
        Chain(steps=steps)
