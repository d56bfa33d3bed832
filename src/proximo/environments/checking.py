"""Checks what samplers and environments return, where it enters the loop."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, NoReturn

from proximo.samplers.sampler import Stream
from proximo.types import Completion, Request

Drawn = dict[tuple[int, int], list[tuple[int, ...]]]
"""Tokens that a sampler returned, by the key of the request and the sample's number, in the order they were asked."""
SHOWN = 100
"""Characters of a returned object that an error shows at most."""


@dataclass(frozen=True)
class Promise:
    """The requests that a sampler or an environment answers, and the rules for its completions."""

    source: str
    """Name of the sampler or environment by its class, for errors."""
    requests: Sequence[Request]
    """The prompts and the number of completions of each. More may be added while the stream is checked."""
    max_tokens: int
    """Length limit of a completion; tokens that were not sampled count."""
    version: int
    """Version of the policy, which every completion carries."""
    vocabulary: int
    """Number of token ids of the tokenizer."""
    drawn: Drawn | None = None
    """Tokens that the sampler returned, for what an environment returns; None: they come from the sampler itself."""

    def check(self, stream: Stream) -> Stream:
        """Pass on the stream; ValueError at the first entry that breaks the promise."""
        answered = set[int]()
        if not isinstance(stream, Iterable):
            self._refuse(_shown(stream), "it must return an iterator of (number of the prompt, its completions)")
        for entry in stream:
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], tuple | list)):
                self._refuse(_shown(entry), "each entry must be (number of the prompt, its completions)")
            number, completions = entry
            if number not in range(len(self.requests)) or number in answered:
                self._refuse(f"prompt {number}", f"it must return each number from 0 to {len(self.requests) - 1} once")
            answered.add(number)
            request = self.requests[number]
            if len(completions) != request.num_samples:
                wanted = f"num_samples is {request.num_samples}"
                self._refuse(f"{len(completions)} completions of prompt {number}", wanted)
            for sample, completion in enumerate(completions, start=request.first_sample):
                self._check(completion, f"of prompt {number}", request.limit(self.max_tokens))
                self._check_drawn(completion, f"of prompt {number}", (request.key, sample))
            yield number, tuple(completions)
        if missing := set(range(len(self.requests))) - answered:
            self._refuse(f"no completions of prompt {min(missing)}", f"it must answer all {len(self.requests)} prompts")

    def _check(self, completion: Any, prompt: str, max_tokens: int) -> None:
        if not isinstance(completion, Completion):
            self._refuse(_shown(completion), "it must return objects of proximo.types.Completion")
        count = len(completion.tokens)
        if count > max_tokens:
            self._refuse(
                f"a completion {prompt} of {count} tokens",
                f"max_tokens is {max_tokens}, and tokens that were not sampled count",
            )
        if len(completion.logprobs) != count:  # a completion without any is one that no policy sampled
            self._refuse(
                f"a completion {prompt} of {count} tokens without log-probs",
                "give one for each token, 0 where it was not sampled",
            )
        if completion.version != self.version:
            self._refuse(
                f"a completion {prompt} of version {completion.version}",
                f"completions must carry the version that the sampler was asked for, which is {self.version}",
            )
        written = list(compress(completion.tokens, (not is_sampled for is_sampled in completion.sampled)))
        if any(not 0 <= token < self.vocabulary for token in written):
            self._refuse(
                f"a completion {prompt} with token ids from {min(written)} to {max(written)} that were not sampled",
                f"the tokenizer has 0 to {self.vocabulary - 1}",
            )

    def _check_drawn(self, completion: Completion, prompt: str, key: tuple[int, int]) -> None:
        """Refuse tokens that claim to be sampled and are not, token by token, what the sampler returned."""
        if self.drawn is None:
            return
        sampled = tuple(compress(completion.tokens, completion.sampled or (True,) * len(completion.tokens)))
        if sampled != tuple(chain.from_iterable(self.drawn.get(key, ()))):
            self._refuse(
                f"a completion {prompt} whose sampled tokens are not those that the sampler returned",
                "use its tokens as they are, never those of a text that was tokenised again",
            )

    def _refuse(self, returned: str, promised: str) -> NoReturn:
        raise ValueError(f"{self.source} returned {returned}: {promised}")


def check_continued(requests: Sequence[Request], read: Mapping[tuple[int, int], tuple[int, ...]]) -> None:
    """Refuse a later turn whose prompt does not begin with the tokens of the turn before it, as they were sampled."""
    for request in requests:
        for sample in range(request.first_sample, request.first_sample + request.num_samples) if request.turn else ():
            before = read.get((request.key, sample), ())
            if request.prompt_tokens[: len(before)] != before:
                raise ValueError(
                    f"turn {request.turn} of sample {sample} was asked with a prompt that does not begin with the "
                    "tokens of the turn before it: add to them, never tokenise a text again"
                )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
