"""A completion that a client waits for: what it asks, how far it is, and what is delivered of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from proximo.samplers.sampler import SamplingOptions
from proximo.serving.logprobs import TokenLogprob

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class CompletionPiece:
    """A part of a completion, as it is delivered."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probs of the new tokens, where they were asked for."""
    finish: Finish | None = None
    """Set in the last piece."""
    error: str | None = None
    """Reason why there is no completion; then this is the last piece."""


@dataclass(frozen=True)
class CompletionRequest:
    """A client's request for one completion of one prompt."""

    prompt: tuple[int, ...]
    options: SamplingOptions
    """Options of drawing tokens; the `max_tokens` and `stop` in them are not used."""
    max_tokens: int
    """Maximum tokens of the completion; 0: none, for the log-probs of the prompt alone."""
    key: int
    """Names its random numbers; equal keys, prompts and samples give equal tokens."""
    sample: int = 0
    """Number of the completion among those of its prompt."""
    stop: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end it, besides those of the model."""
    top: int | None = None
    """Number of alternatives with the log-probs of each token; None: no log-probs."""
    prompt_logprobs: bool = False
    """True if the first piece has the log-probs of the prompt."""


@dataclass(eq=False)
class CompletionJob:
    """One completion in the making. Two of them are never equal, even if they ask for the same."""

    request: CompletionRequest
    deliver: Callable[[CompletionPiece], None]
    """Called from the engine's thread with each piece, in order."""
    tokens: list[int] = field(default_factory=list)
    slices: int = 0
    """Number of slices that are done."""
    is_prompt_scored: bool = False
    """True once the log-probs of its prompt, if they are wanted, are delivered."""
    finish: Finish | None = None
    """Reason why its last token was the last."""
    cancelled: bool = False
    """Set by the server when the client has gone."""

    @property
    def left(self) -> int:
        return self.request.max_tokens - len(self.tokens)

    @property
    def waits_for_prompt(self) -> bool:
        """True if the log-probs of its prompt must come first."""
        return self.request.prompt_logprobs and not self.is_prompt_scored and not self.cancelled

    @property
    def name(self) -> tuple[int, int]:
        """Two jobs of one batch must differ in it: their random numbers would be the same."""
        return self.request.key, self.request.sample
