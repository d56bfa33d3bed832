"""A workload of the user's own: any shape, number of completions, prompt and lengths."""

from dataclasses import dataclass, replace

from proximo.planning.published_shapes import POSITIONS, shape_of
from proximo.planning.workloads import Ends, Workload

PEER_TOKENS = 32_768
"""Tokens of TRL's micro-batch at its best settings: the first to be tried, halved while memory runs out."""


@dataclass(frozen=True)
class OwnRow:
    """Row that `--shape` and its companions describe."""

    shape: str
    """A name, or the sizes written out: see `shape_of`."""
    groups: int = 16
    siblings: int = 16
    prompt: int = 512
    """Tokens of each prompt."""
    lengths: str = "512"
    """Tokens of each completion, or MEAN:LIMIT for completions that end at random."""

    def __post_init__(self) -> None:
        self.workload()  # so that a wrong value is found before anything is measured

    def workload(self) -> Workload:
        shape, completion = shape_of(self.shape), lengths_of(self.lengths)
        for name, value in (("groups", self.groups), ("siblings", self.siblings), ("prompt", self.prompt)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give at least 1")
        if isinstance(completion, Ends) and not 2 <= completion.mean <= shape.vocabulary:
            raise ValueError(
                f"lengths has mean {completion.mean}: give 2 to {shape.vocabulary}, the vocabulary, since "
                "one token in `mean` ends a completion"
            )
        name = f"{shape.name}-{self.groups}x{self.siblings}-p{self.prompt}-r{self.lengths}"
        workload = Workload(name, shape, self.groups, self.siblings, self.prompt, completion, 1)
        if self.prompt + workload.limit > POSITIONS:
            raise ValueError(
                f"prompt is {self.prompt} and lengths {self.lengths}: together give at most {POSITIONS} tokens"
            )
        max_rows = max(1, PEER_TOKENS // (self.prompt + workload.longest))
        return replace(workload, peer_rows=workload.even_part(max_rows))


def lengths_of(text: str) -> int | Ends:
    """`700`, or `1000:4096` for ends at random."""
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"lengths is {text!r}: give tokens, such as 512, or MEAN:LIMIT, such as 1000:4096")
    return int(text) if len(numbers) == 1 else Ends(int(numbers[0]), int(numbers[1]))
