"""What a sampler is asked and what it promises; the engines live in the files beside this one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from proximo.types import Completion, Request

__all__ = ["Sampler", "SamplingOptions", "gathered"]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn and when a completion ends.

    Example: SamplingOptions(temperature=0.7, top_p=0.95, max_tokens=512, stop=("</answer>",))
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy: the most likely token, whose log-prob is then 0."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens that holds this mass; 1 keeps all."""
    top_k: int | None = None
    """Draw from this many most likely tokens; None keeps all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one; 0 keeps all."""
    max_tokens: int = 256
    """A completion that has not ended by itself is cut here."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; its text is cut before them, its tokens are not. They are looked for in that text,
    which has no special tokens: one between the two halves of a stop string does not hide it."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: give 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a mass above 0, at most 1 (1 keeps every token)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: give at least 1, or None to keep every token")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: give a share from 0 to 1 (0 keeps every token)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: give at least 1")
        if "" in self.stop:
            raise ValueError(f"stop is {self.stop}: an empty string would end every completion, leave it out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True where top_p, top_k or min_p cut the distribution.

        The log-probs of a completion are then under the cut distribution, which the learner does not compute.
        """
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


@runtime_checkable
class Sampler(Protocol):
    """Anything that completes prompts."""

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        """The number of each request and its completions, as soon as all of them have ended: in any order, but in
        the same one for equal calls. Between two of them the model and torch's modes are as the caller left them.

        The random number behind a token depends on (seed, step, request.key, sample, position) and on nothing
        else, so two requests of a call that share a key share their draws. `step` is an index: 0 for the first training
        step, −1 for evaluations. `version` is passed through, except by a sampler with weights of its own, which knows
        better.
        """
        ...

    def sample(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> list[tuple[Completion, ...]]:
        """The completions of each request, in order: the whole stream, `gathered`."""
        ...


def gathered(stream: Iterable[tuple[int, tuple[Completion, ...]]], count: int) -> list[tuple[Completion, ...]]:
    """What a stream gave for `count` requests, in their order."""
    found = dict(stream)
    return [found[number] for number in range(count)]
