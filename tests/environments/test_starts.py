"""Problems that are the starts of an environment."""

from dataclasses import dataclass

import pytest

from proximo.environments.kinds import Starts


@dataclass
class Dice:
    """An environment that begins with a seed's number."""

    sides: int = 6

    def start(self, seed: int) -> str:
        return f"rolled {seed % self.sides}"


PATH = f"{__name__}:Dice"


def test_starts_are_drawn_for_each_place_and_held_out_ones_are_those_of_every_seed():
    task = Starts(PATH, {"sides": 1000}, instruction="A game.", held_out=3)
    drawn = [task.problem(index, "train", seed) for seed in (0, 1) for index in range(4)]
    assert len({problem.data["start"] for problem in drawn}) == 8
    assert task.problem(2, "train", 0) == drawn[2]
    held_out = [task.problem(index, "held_out", 0) for index in range(3)]
    assert [task.problem(index, "held_out", 7) for index in range(3, 6)] == held_out
    assert (task.size("train"), task.size("held_out")) == (None, 3)
    [message] = drawn[0].prompt
    assert message == {"role": "user", "content": f"A game.\n\nrolled {drawn[0].data['start'] % 1000}"}
    assert Starts(PATH, chat=False).problem(0, "train", 0).prompt == f"rolled {drawn[0].data['start'] % 6}"


def test_a_start_has_no_verdict_and_none_held_out_are_refused():
    with pytest.raises(ValueError, match="task.held_out is 0: give at least 1"):
        Starts(PATH, held_out=0)
    with pytest.raises(ValueError, match="task Starts has no verdict: set environment.path"):
        Starts(PATH).grade([], [])
