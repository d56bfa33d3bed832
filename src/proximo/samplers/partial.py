"""A completion in the making, and when it ends: the same for every engine that draws its own tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.routing import UNKNOWN
from proximo.models.tokens.tokenizing import ReplyReader
from proximo.samplers.rng import draw, signed, turn_key, uniforms
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Completion, Request
from proximo.types.tensor_types import Float, Int

DIVERGED = "the model's logits are NaN: its weights have diverged, go back to a checkpoint"


@dataclass
class PartialCompletion:
    """One sample, as far as it has been drawn."""

    key: int
    """Key of its random numbers: the request's, with its turn mixed in."""
    sample: int
    """Number among its prompt's samples."""
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    """Reason of the end; None while tokens are still sampled."""
    routes: list[Int[Tensor, "L K"]] = field(default_factory=list)
    """Routes of tokens when they were read back; empty where that is not recorded."""
    prompt_routes: Int[Tensor, "S L K"] | None = None
    max_tokens: int | None = None
    """The request's own limit; None: the options' alone."""

    @property
    def length(self) -> int:
        """Prompt and completion."""
        return len(self.prompt) + len(self.tokens)


def partials_of(requests: Sequence[Request]) -> list[list[PartialCompletion]]:
    """An empty partial for each sample of each request."""
    for number, request in enumerate(requests):
        if not request.prompt_tokens:
            raise ValueError(f"requests[{number}].prompt_tokens is empty: give at least one token, such as the BOS")
        if request.num_samples < 1:
            raise ValueError(f"requests[{number}].num_samples is {request.num_samples}: give at least 1")
        if request.turn < 0 or request.first_sample < 0:
            raise ValueError(
                f"requests[{number}]: turn {request.turn}, first_sample {request.first_sample}: both count from 0"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise ValueError(f"requests[{number}].max_tokens is {request.max_tokens}: give at least 1, or None")
    return [
        [
            PartialCompletion(
                turn_key(request.key, request.turn),
                request.first_sample + sample,
                request.prompt_tokens,
                max_tokens=request.max_tokens,
            )
            for sample in range(request.num_samples)
        ]
        for request in requests
    ]


Listener = Callable[[PartialCompletion], bool]
"""Told of each new token that does not end its partial; False ends it, so that its slot is free."""


@dataclass(frozen=True)
class TokenWriter:
    """Writes the next token of partials: draws it, and sees whether it was the last."""

    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    options: SamplingOptions
    seed: int
    step: int
    listener: Listener | None = None

    def __post_init__(self) -> None:
        # Special tokens are no part of the text, so such a string would never be found.
        special = [text for text in self.options.stop if text in self.tokenizer.all_special_tokens]
        if special:
            raise ValueError(f"stop has {special[0]!r}, a special token: leave it out, end-of-sequence always ends")

    @property
    def reads(self) -> bool:
        """True if each token is read as soon as it is drawn, and not only when a partial has ended."""
        return bool(self.options.stop) or self.listener is not None

    def write(self, partials: Sequence[PartialCompletion], logits: Float[Tensor, "R V"]) -> None:
        """One token for each unfinished partial, from the row of logits in its place."""
        counters = [[signed(partial.key), partial.sample, len(partial.tokens)] for partial in partials]
        keys, samples, positions = torch.tensor(counters, device=logits.device).unbind(dim=1)
        drawn = draw(logits, uniforms(self.seed, self.step, keys, samples, positions), self.options)
        for partial, token, logprob, entropy in zip(partials, *(each.tolist() for each in drawn), strict=True):
            if logprob != logprob:
                raise ValueError(DIVERGED)
            partial.tokens.append(token)
            partial.logprobs.append(logprob)
            partial.entropies.append(entropy)
            self._end(partial)

    def take(
        self, partial: PartialCompletion, tokens: list[int], logprobs: list[float], entropies: list[float]
    ) -> None:
        """The tokens of a row so far, drawn elsewhere; those after its end do not count."""
        for count in range(len(partial.tokens) + 1, len(tokens) + 1) if self.reads else (len(tokens),):
            partial.tokens, partial.logprobs, partial.entropies = tokens[:count], logprobs[:count], entropies[:count]
            self._end(partial)
            if partial.finish is not None:
                return

    def _end(self, partial: PartialCompletion) -> None:
        """End it if its newest token was its last."""
        if partial.tokens[-1] in self.end_tokens or self._stopped(partial):
            partial.finish = "stop"
        elif len(partial.tokens) in (self.options.max_tokens, partial.max_tokens):
            partial.finish = "length"
        elif self.listener is not None and not self.listener(partial):
            partial.finish = "stop"

    def completion(self, partial: PartialCompletion, version: int) -> Completion:
        assert partial.finish is not None
        text = self._text(partial, partial.tokens)
        return Completion(
            tokens=tuple(partial.tokens),
            logprobs=tuple(partial.logprobs),
            entropies=tuple(partial.entropies),
            text=text[: min((text.find(stop) for stop in self.options.stop if stop in text), default=len(text))],
            finish=partial.finish,
            version=version,
            routes=_routes(partial),
            prompt_routes=partial.prompt_routes,
        )

    def _stopped(self, partial: PartialCompletion) -> bool:
        for stop in self.options.stop:
            # A token of text has at least one byte; a few more keep the tail's first characters whole.
            tail = self._tail(partial.tokens, len(stop.encode()) + 4)
            if stop in self._text(partial, tail) and stop in self._text(partial, partial.tokens):
                return True
        return False

    def _tail(self, tokens: list[int], count: int) -> list[int]:
        """The last tokens that are part of the text: any number of special ones may lie between them."""
        spoken = (token for token in reversed(tokens) if token not in self._read.special)
        return [*islice(spoken, count)][::-1]

    def _text(self, partial: PartialCompletion, tokens: list[int]) -> str:
        return self._read(partial.prompt, tokens)

    @cached_property
    def _read(self) -> ReplyReader:
        return ReplyReader(self.tokenizer)


def _routes(partial: PartialCompletion) -> Int[Tensor, "T L K"] | None:
    """Routes; None where they were not recorded. The last token was not read back."""
    if partial.prompt_routes is None:
        return None
    assert len(partial.routes) == len(partial.tokens) - 1
    return torch.stack([*partial.routes, torch.full_like(partial.prompt_routes[0], UNKNOWN)])
