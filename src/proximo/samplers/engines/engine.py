"""Engines: processes, or threads, that complete prompts with weights of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from proximo.samplers.in_progress import Begun, digest
from proximo.samplers.partial import PartialCompletion
from proximo.samplers.sampler import SamplingOptions
from proximo.types.tensor_types import Int

PauseMode = Literal["keep", "wait", "abort"]
"""Handling of requests in flight: `keep` continues them after the pause, with the new weights; `wait` ends them first;
`abort` returns what they have."""


class EngineLost(Exception):
    """An engine does not answer, or answered that it failed: it is not used again."""


@dataclass(frozen=True)
class Draw:
    """Names the random numbers of one sample: equal draws of equal prompts are equal, on any engine of one kind."""

    seed: int
    step: int
    key: int
    sample: int
    start: int = 0
    """Position of the first token that is drawn; more than 0 where a completion is continued."""

    @property
    def number(self) -> int:
        """63 bits of a hash of all five, for engines that take one number for a request and count from there."""
        words = f"{self.seed}/{self.step}/{self.key}/{self.sample}/{self.start}"
        return int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` (exclusive) of a completion were sampled with these weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Generated:
    """Result of an engine for one sample."""

    tokens: tuple[int, ...]
    """Token ids without prompt and prefix; the token that ended the completion is the last of them."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under the distribution that it was drawn from."""
    finish: Literal["stop", "length", "abort"]
    spans: tuple[Span, ...]
    """Versions of the weights that sampled the tokens, in order; positions count from the first of `tokens`."""
    routes: Int[Tensor, "N L K"] | None = field(default=None, compare=False, repr=False)
    """Experts that tokens went to when they were first read: those of the prompt, and all of the completion's but the
    last; None where that is not known."""

    @property
    def version(self) -> int:
        """Version of the oldest span."""
        return min(span.version for span in self.spans)

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each token."""
        return tuple(span.version for span in self.spans for _ in range(span.start, span.end))

    @classmethod
    def of(cls, begun: Begun | None) -> "Generated":
        """Known part of a sample; None: nothing."""
        if begun is None:
            return cls((), (), "abort", ())
        spans = tuple(Span(version, index, index + 1) for index, version in enumerate(begun.versions))
        return cls(begun.tokens, begun.logprobs, begun.finish, spans)

    def begun(self, partial: PartialCompletion) -> Begun:
        """Known part of the sample."""
        asked = partial.key, partial.sample, digest(partial.prompt)
        return Begun(*asked, self.tokens, self.logprobs, self.versions, self.finish)

    def continued(self, rest: "Generated") -> "Generated":
        """Join this one, which was interrupted, and what followed."""
        start = len(self.tokens)
        spans = [Span(each.version, start + each.start, start + each.end) for each in rest.spans if each.end]
        tokens, finish = self.tokens + rest.tokens, rest.finish
        routes = rest.routes if rest.tokens else self.routes  # one that was interrupted at once says none
        if self.routes is not None and rest.routes is not None and rest.tokens:
            routes = torch.cat([self.routes, rest.routes[len(self.routes) :]])
        return Generated(tokens, self.logprobs + rest.logprobs, finish, (*self.spans, *spans), routes)


@dataclass(frozen=True)
class Health:
    """Health of an engine: whether it generated a token within a deadline."""

    alive: bool
    seconds: float
    reason: str = ""
    """Reason why it is not alive."""


class Engine(Protocol):
    """An engine. Every method raises EngineLost where the engine is gone, or failed; `stop` and `alive` never raise.

    Methods may be called from several threads. Weights arrive between `pause` and `resume`: `begin_update`, `update`
    once or several times, `finish_update`. An engine in which one of them failed is never resumed.
    """

    @property
    def name(self) -> str:
        """Names the engine in messages."""
        ...

    @property
    def repeats(self) -> bool:
        """True if equal calls give equal tokens and log-probs, to the bit."""
        ...

    def start(self, deadline: float) -> None:
        """Wait until it answers, and start it first where it is not running."""
        ...

    def generate(
        self, prompt: tuple[int, ...], options: SamplingOptions, draw: Draw, prefix: tuple[int, ...] = ()
    ) -> Generated:
        """One completion. `prefix`: tokens that it begins with, which count towards `options.max_tokens`;
        `draw.start` is their number. Returns when it has ended, or raises when the engine is stopped."""
        ...

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """Stop generating until `resume`, and forget keys and values of prompts."""
        ...

    def resume(self, deadline: float) -> None: ...

    def workers(self) -> int:
        """Number of processes that receive weights."""
        ...

    def join(self, info: Mapping[str, Any], deadline: float) -> None:
        """Connect to the side that sends weights."""
        ...

    def begin_update(self, deadline: float) -> None: ...

    def update(self, info: Mapping[str, Any], deadline: float) -> None:
        """Receive some of the weights."""
        ...

    def finish_update(self, version: int, deadline: float) -> None:
        """All weights have arrived, and are of this version."""
        ...

    def version(self) -> int | None:
        """Version of its weights, as it says; None before the first push. The probe decides whether it is true."""
        ...

    def alive(self, deadline: float) -> Health:
        """Ask for one token: an engine that hangs may still answer other questions."""
        ...

    def stop(self) -> None:
        """End it, and every call that waits for it."""
        ...
