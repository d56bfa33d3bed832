"""Sampling through transformers' own forward pass and cache, for models outside the fast path.

Rows of equal prompt length share a batch, so nothing is ever padded: correct for any kind of attention or
position, at the price of smaller batches. The random numbers are those of the embedded engine.
"""

import inspect
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

import torch

from proximo.models.context_length import check_requests
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.packing.attention import uses_our_attention
from proximo.models.sampled import evaluating
from proximo.models.stop_tokens import end_tokens
from proximo.samplers.partial import Listener, PartialCompletion, TokenWriter, partials_of
from proximo.samplers.sampler import SampledPolicy, SamplingOptions, Stream, gathered
from proximo.system.phases import phase
from proximo.types import Completion, Request


class PlainSampler:
    """Samples from any causal language model of transformers that hands its cache to the caller and takes it back."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        slots: int = 128,
        record_routes: bool = False,
    ) -> None:
        """`slots` is the most rows decoded at a time. It cannot record routes, and says so when asked."""
        if record_routes:
            raise ValueError(
                f"record_routes is on, but a {type(model).__name__} with its own attention is sampled without: "
                'use routing_replay="old_policy", which the learner records itself'
            )
        if uses_our_attention(model):
            raise ValueError(f"model is a {type(model).__name__} with our attention: sample with EmbeddedSampler")
        if slots < 1:
            raise ValueError(f"slots is {slots}: give at least 1")
        self._model = model
        self._tokenizer = tokenizer
        self._slots = slots
        self._cache_name = cache_name(model)
        self._takes_positions = "position_ids" in forward_arguments(model)

    @property
    def repeats(self) -> bool:
        return True

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        """Do nothing: it decodes with the policy's own module."""
        assert policy.model is self._model, "the policy is another module than the one that is sampled"
        return version

    def stream(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        *,
        seed: int,
        step: int,
        version: int = 0,
        listener: Listener | None = None,
    ) -> Stream:
        partials = partials_of(requests)
        check_requests(self._model, requests, options.max_tokens)
        writer = TokenWriter(self._tokenizer, end_tokens(self._model, self._tokenizer), options, seed, step, listener)
        waiting = dict(enumerate(partials))
        for batch in self._batches([partial for siblings in partials for partial in siblings]):
            with evaluating(self._model):
                self._complete(batch, writer)
            ended = [number for number, siblings in waiting.items() if all(partial.finish for partial in siblings)]
            for number in ended:
                yield number, tuple(writer.completion(partial, version) for partial in waiting.pop(number))

    def sample(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> list[tuple[Completion, ...]]:
        return gathered(self.stream(requests, options, seed=seed, step=step, version=version), len(requests))

    def _batches(self, partials: list[PartialCompletion]) -> Iterator[list[PartialCompletion]]:
        def width(partial: PartialCompletion) -> int:
            return len(partial.prompt)

        for _, neighbours in groupby(sorted(partials, key=width), key=width):
            rows = list(neighbours)
            yield from (rows[start : start + self._slots] for start in range(0, len(rows), self._slots))

    def _complete(self, partials: list[PartialCompletion], writer: TokenWriter) -> None:
        """Decode until the last row has ended; the others are computed along and ignored."""
        inputs: list[Sequence[int]] = [partial.prompt for partial in partials]
        past, seen = None, 0
        while live := [row for row, partial in enumerate(partials) if partial.finish is None]:
            tokens = torch.tensor(inputs, device=self._model.device)
            arguments = {"input_ids": tokens, self._cache_name: past, "use_cache": True}
            if self._takes_positions:
                # Left to itself a model asks its cache how long it is, and a layer without keys answers 0.
                positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
                arguments["position_ids"] = positions.expand_as(tokens)
            with phase("decoding"):
                output = self._model(**arguments)
            past, seen = output.get(self._cache_name), seen + tokens.shape[1]
            if past is None:
                raise ValueError(_without_cache(self._model))
            with phase("draw and looks"):
                writer.write([partials[row] for row in live], output.logits[live, -1])
            inputs = [partial.tokens[-1:] for partial in partials]


def forward_arguments(model: PreTrainedModel) -> Collection[str]:
    """The names of the arguments of a model's forward pass."""
    return inspect.signature(type(model).forward).parameters


def cache_name(model: PreTrainedModel) -> str:
    """The argument and the output that hold a model's cache: state-space models have a name of their own for it."""
    known = [name for name in ("past_key_values", "cache_params") if name in forward_arguments(model)]
    if not known:
        raise ValueError(_without_cache(model))
    return known[0]


def _without_cache(model: PreTrainedModel) -> str:
    return (
        f"model is a {type(model).__name__}, whose forward pass does not take and return a cache (past_key_values or "
        "cache_params): it cannot be sampled here; use another model"
    )
