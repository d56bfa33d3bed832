"""The protocol of environments: what one is given and what it returns."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from proximo.environments.checking import Drawn, Promise, check_continued
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.samplers.sampler import Sampler, SamplingOptions, Stream, streamed, takes_more
from proximo.types import Problem, Request

AGAIN = 2**20
"""Added to a request's turn, for its random numbers, each time that the same turn of a sample is asked again."""


@dataclass(frozen=True)
class Question:
    """A problem of a round, and the request that asks for its completions."""

    problem: Problem
    request: Request
    """The first turn: the key of its random numbers, the problem's prompt as tokens, and how many samples are wanted.

    A later turn is `replace(request, prompt_tokens=..., num_samples=1, turn=1, first_sample=n)` for sample n.
    """


class LaterQuestions:
    """Questions that come while others are sampled. An environment may take them as it goes; those that it leaves are
    asked in another call."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.requests = [question.request for question in questions]
        """Requests of the first questions and of those that were taken; their indices are the numbers of a stream."""
        self._waiting: deque[Question] = deque()

    def add(self, questions: Sequence[Question]) -> None:
        self._waiting.extend(questions)

    def take(self) -> list[Question]:
        """The questions that came since the last call."""
        taken = list(self._waiting)
        self._waiting.clear()
        self.requests += [question.request for question in taken]
        return taken


@dataclass(frozen=True)
class Ask:
    """Asks the sampler, with everything that is the same for all turns of a round."""

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    options: SamplingOptions
    """Options of sampling. `max_tokens` is the limit of a whole completion, all turns together."""
    seed: int
    step: int
    version: int
    """The version of the policy, as the sampler's `refresh` returned it; completions carry it."""
    later: LaterQuestions | None = field(default=None, compare=False, repr=False)
    """Questions that come while others are sampled; None: there are none."""
    drawn: Drawn = field(default_factory=dict, init=False, compare=False, repr=False)
    """Tokens that the sampler has returned, by key and sample, one entry for each time that it was asked."""
    read: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Prompt and reply of the last time that the sampler was asked, by key and sample."""
    asked: dict[tuple[int, int, int], int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Number of times that each turn of a sample was asked, by key, turn and sample."""

    def __post_init__(self) -> None:
        if not isinstance(self.version, int):
            name = type(self.sampler).__name__
            raise ValueError(f"sampler {name}.refresh returned {self.version!r}: it must return the policy's version")

    def __call__(self, requests: Sequence[Request], options: SamplingOptions | None = None) -> Stream:
        """Yield the number of each request and its completions, as they end. `options` are the run's, unless others
        are given, such as fewer tokens for a later turn. A turn that is asked again has random numbers of its own."""
        yield from self._stream(list(requests), self.options if options is None else options)

    def growing(self, requests: Sequence[Request]) -> Stream:
        """The same for first turns, with those of questions that come later where the sampler takes requests as it
        goes."""
        if self.later is None or not takes_more(self.sampler):
            return self._stream(list(requests), self.options)
        return self._stream(list(requests), self.options, self.later)

    def _stream(self, requests: list[Request], options: SamplingOptions, later: LaterQuestions | None = None) -> Stream:
        check_continued(requests, self.read)
        fresh = [self._fresh(request) for request in requests]

        def more() -> list[Request]:
            assert later is not None
            taken = [question.request for question in later.take()]
            requests.extend(taken)
            return [self._fresh(request) for request in taken]

        stream = streamed(
            self.sampler,
            fresh,
            options,
            seed=self.seed,
            step=self.step,
            version=self.version,
            more=None if later is None else more,
        )
        promise = Promise(
            f"sampler {type(self.sampler).__name__}", requests, options.max_tokens, self.version, len(self.tokenizer)
        )
        for number, completions in promise.check(stream):
            request = requests[number]
            for sample, completion in enumerate(completions, start=request.first_sample):
                self.drawn.setdefault((request.key, sample), []).append(completion.tokens)
                self.read[request.key, sample] = request.prompt_tokens + completion.tokens
            yield number, completions

    def _fresh(self, request: Request) -> Request:
        """The request, with random numbers that no earlier one had."""
        samples = range(request.first_sample, request.first_sample + request.num_samples)
        turns = [(request.key, request.turn, sample) for sample in samples]
        times = max((self.asked.get(turn, 0) for turn in turns), default=0)
        self.asked.update(dict.fromkeys(turns, times + 1))
        return replace(request, turn=request.turn + AGAIN * times) if times else request

    def played(self, source: str, requests: Sequence[Request], stream: Stream) -> Stream:
        """Pass on the stream; ValueError names the source where it is not what was asked for, and where a token is said
        to be sampled that the sampler has not returned: such as one of a text that was tokenised again."""
        promise = Promise(
            source, requests, self.options.max_tokens, self.version, len(self.tokenizer), drawn=self.drawn
        )
        return promise.check(stream)


@runtime_checkable
class Interaction(Protocol):
    """Turns problems into completions by asking the sampler, as often as it likes: a frozen dataclass.

    Training and evaluation both go through it; the task grades what it returns.
    """

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        """The number of each question and its completions, `request.num_samples` of them, in order of their samples.

        Questions may come out in any order, but in the same one for equal calls; each is graded while others are still
        sampled. A completion of several turns holds everything after the first prompt, and its `sampled` is False for
        tokens that the policy did not write, such as a tool's answer. Its log-probs and entropies have a value for
        every token, 0 where it was not sampled, and it is no longer than `ask.options.max_tokens`.
        """
        ...


def play(environment: Interaction, questions: Sequence[Question], ask: Ask) -> Stream:
    """Play the questions; what the environment returns is checked before anything is graded or trained on."""
    requests = [question.request for question in questions] if ask.later is None else ask.later.requests
    source = f"environment {type(environment).__name__}"
    return ask.played(source, requests, environment.play(questions, ask))


@runtime_checkable
class Acting(Protocol):
    """An interaction that has a say in what is asked and in what is earned."""

    @property
    def scores(self) -> bool:
        """True if it gives the task score of completions; otherwise the task grades them."""
        ...

    def check(self) -> None:
        """Raise ValueError where it cannot be played at all."""
        ...

    def prepared(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> Problem:
        """The problem as the policy is asked it, such as with the tools that it may call."""
        ...
