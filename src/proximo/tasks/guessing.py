"""Problems of guessing games: the prompt is always the same, and the answer is a secret that an environment knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from proximo.tasks.draws import check_held_out, numbered
from proximo.tasks.protocol import Split
from proximo.types import Completion, Grade, Problem

LETTERS = "abc"
PROMPTS = {
    "number": "Guess a number from 1 to 9.",
    "word": "Guess a word of three letters, each a, b or c.",
}


@dataclass(frozen=True)
class Guessing:
    """Guess a secret number or word; give it an environment that answers guesses, such as
    `proximo.environments.examples:NumberGuessing`. Without one, the first reply is the only guess."""

    secret: Literal["number", "word"] = "number"
    """Secret to guess: a number from 1 to 9, or a word of three letters, each a, b or c."""
    held_out: int = 200
    """Number of held-out problems; their secrets are drawn separately from those of training."""

    while_sampling = True
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_held_out(self.held_out)

    def size(self, split: Split) -> int | None:
        return None if split == "train" else self.held_out

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        position, drawn = numbered("guessing", index, split, seed, self.held_out)
        random = Random(drawn)
        number = self.secret == "number"
        answer = str(random.randint(1, 9)) if number else "".join(random.choice(LETTERS) for _ in range(3))
        prompt = ({"role": "user", "content": PROMPTS[self.secret]},)
        return Problem(id=f"guess-{self.secret}-{split}-{position}", prompt=prompt, answer=answer)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return [Grade(float(c.text.strip() == p.answer)) for p, c in zip(problems, completions, strict=True)]

    def final_answer(self, completion: Completion) -> str:
        return completion.text.strip()

    def reference(self, problem: Problem) -> str:
        return str(problem.answer)
