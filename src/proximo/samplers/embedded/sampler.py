"""The embedded sampler: the learner's own module decodes, so there are no weights to synchronise.

Each distinct prompt is read once. All live rows are decoded in one batch; when a row ends, a waiting row takes its
slot. On a GPU the steps are replayed as graphs, tokens are drawn and ends are found there, and the host looks every few
steps.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proximo.models.context_length import check_requests
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.packing.attention import uses_our_attention
from proximo.models.routing import needed_routers
from proximo.models.sampled import evaluating
from proximo.models.stop_tokens import end_tokens
from proximo.samplers.embedded.buffers import BufferPool, plan_for, roomy
from proximo.samplers.embedded.cuda_graphs import compiled_states
from proximo.samplers.embedded.decoding import Decoding
from proximo.samplers.partial import Listener, PartialCompletion, TokenWriter, partials_of
from proximo.samplers.plain import PlainSampler
from proximo.samplers.sampler import More, RunSamplers, SampledPolicy, SamplingOptions, Stream, gathered
from proximo.system.phases import phase
from proximo.types import Completion, Request


@dataclass(frozen=True)
class Embedded:
    """The policy's own module samples, in this process: there are no weights to keep in step."""

    copies: ClassVar[int] = 0
    on_every_rank: ClassVar[bool] = True
    """True: where a run has several processes, each of them samples some of the requests."""

    def build(
        self, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        """One sampler for training and evaluation, so that they share buffers and captured steps; two where routes are
        recorded, which evaluation has no use for."""
        evaluation = local_sampler(policy.model, tokenizer, slots=slots)
        if not record_routes:
            return RunSamplers(evaluation, evaluation)
        return RunSamplers(local_sampler(policy.model, tokenizer, slots=slots, record_routes=True), evaluation)


def local_sampler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, slots: int = 128, record_routes: bool = False
) -> "EmbeddedSampler | PlainSampler":
    """The engine of this process that fits the model."""
    fits = EmbeddedSampler if uses_our_attention(model) else PlainSampler
    return fits(model, tokenizer, slots=slots, record_routes=record_routes)


class EmbeddedSampler:
    """Samples from a model of this process, which may be in training.

    Equal calls give bit-equal tokens. A row among other rows draws the same random numbers, and its logits
    differ only by the rounding of a matrix product of another size.

    Example:
        sampler = EmbeddedSampler(model, tokenizer)
        [completions] = sampler.sample([Request(0, (17, 12), 8)], SamplingOptions(max_tokens=64), seed=0, step=0)
    """

    takes_more: ClassVar[bool] = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        slots: int = 128,
        record_routes: bool = False,
        shared_prefix: bool | None = None,
        graphs: bool = True,
    ) -> None:
        """`slots` is the number of rows decoded at a time, at most.

        `record_routes`: whether completions carry the experts that each token went to, for a learner that replays them.
        `shared_prefix`: whether a prompt's keys are read once for several of its samples; None: where that is faster,
        which is on a GPU.
        `graphs`: whether decode steps on a GPU are captured as graphs and replayed.
        """
        if not uses_our_attention(model):
            raise ValueError(f"model is a {type(model).__name__} outside the fast path: sample with PlainSampler")
        if slots < 1:
            raise ValueError(f"slots is {slots}: give at least 1")
        if record_routes:
            needed_routers(model, "record_routes is on")
        self._record_routes = record_routes
        self._model = model
        self._tokenizer = tokenizer
        self._slots = slots
        # Routes are collected by the host, step by step.
        self._ends = end_tokens(model, tokenizer)
        self._buffers = BufferPool(model, self._ends, shared_prefix=shared_prefix, graphs=graphs and not record_routes)

    @property
    def repeats(self) -> bool:
        return True

    @property
    def pages(self) -> int:
        """Pages of keys and values kept for the next call; 0 where none are."""
        return self._buffers.pages

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        """Do nothing: it decodes with the policy's own module."""
        assert policy.model is self._model, "the policy is another module than the one that is sampled"
        return version

    def sample(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> list[tuple[Completion, ...]]:
        return gathered(self.stream(requests, options, seed=seed, step=step, version=version), len(requests))

    def stream(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        *,
        seed: int,
        step: int,
        version: int = 0,
        listener: Listener | None = None,
        more: More | None = None,
    ) -> Stream:
        """Yield requests as they end. Rows of requests that come meanwhile, from `more`, wait behind the others."""
        asked, writer = Asked(), TokenWriter(self._tokenizer, self._ends, options, seed, step, listener)
        self._add(asked, requests, options)
        compiled = compiled_states(self._model)  # first: weights may move, and kept buffers are for where they lie
        while asked.waiting:
            plan = plan_for(asked.prompts(), options.max_tokens, self._slots)
            with self._buffers.borrow(plan if more is None else roomy(plan, self._slots), seed, step) as buffers:
                room, rows = buffers.plan.max_prompt_tokens, asked.take(buffers.plan.max_prompt_tokens)
                decoding = Decoding(self._model, writer, rows, buffers, self._record_routes, compiled)
                while not decoding.done:
                    # The caller may use the model between two groups, so it must not find it in our mode.
                    with evaluating(self._model):
                        ended = decoding.until_some_end()
                    for number in asked.whole(ended):
                        with phase("completions to text"):
                            completions = tuple(writer.completion(each, version) for each in asked.partials[number])
                        yield number, completions
                    if more is not None:
                        self._add(asked, more(), options)
                        decoding.add(asked.take(room))

    def _add(self, asked: "Asked", requests: Sequence[Request], options: SamplingOptions) -> None:
        partials = partials_of(requests)
        check_requests(self._model, requests, options.max_tokens)
        asked.add(partials)


class Asked:
    """The samples of a call's requests: those that wait for room, and those of each request that have not ended."""

    def __init__(self) -> None:
        self.partials: list[list[PartialCompletion]] = []
        self.waiting: deque[list[PartialCompletion]] = deque()
        """Requests that no decoding has taken yet."""
        self._numbers: dict[int, int] = {}
        """Number of the request of each partial, by its identity."""
        self._left: Counter[int] = Counter()

    def add(self, partials: Sequence[list[PartialCompletion]]) -> None:
        for number, siblings in enumerate(partials, start=len(self.partials)):
            self._numbers |= {id(partial): number for partial in siblings}
            self._left[number] = len(siblings)
        self.partials += partials
        self.waiting.extend(partials)

    def prompts(self) -> Counter[tuple[int, ...]]:
        """Number of waiting samples of each prompt."""
        return Counter(partial.prompt for siblings in self.waiting for partial in siblings)

    def take(self, room: int) -> list[PartialCompletion]:
        """Samples that wait, in turn, up to a prompt that is longer than there is room for."""
        rows: list[PartialCompletion] = []
        while self.waiting and len(self.waiting[0][0].prompt) <= room:
            rows += self.waiting.popleft()
        return rows

    def whole(self, ended: Iterable[PartialCompletion]) -> Iterable[int]:
        """Numbers of the requests whose last sample is among those that have ended."""
        for partial in ended:
            number = self._numbers[id(partial)]
            self._left[number] -= 1
            if not self._left[number]:
                yield number
