"""Decodes the completions that clients wait for, as many at once as there are slots, on a thread of its own.

Completions are decoded in slices of `SLICE` tokens. After each slice those that are not finished go to the end of the
queue, so that new requests need not wait until long ones are done. A batch holds completions that are drawn in the same
way (temperature, top-p, top-k, min-p). Each slice reads the text so far again, which is fast compared to sampling it.
Between two slices the log-probs of one prompt are computed, where they are asked for.
Slices end at the same places whatever else is decoded, so that a seed gives the same random numbers under any load.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from proximo.models.context_length import reach_of
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.stop_tokens import end_tokens
from proximo.models.tokens.tokenizing import ReplyReader
from proximo.samplers.embedded import local_sampler
from proximo.samplers.partial import PartialCompletion
from proximo.samplers.rng import turn_key
from proximo.serving.logprobs import prompt_logprobs, token_logprobs
from proximo.serving.queue import CompletionJob, CompletionPiece, Finish
from proximo.serving.text import TextStream
from proximo.types import Completion, Request

SLICE = 128
"""Tokens of a completion that are decoded before others have their turn."""
STOPPING = "the server is stopping"


class ServingEngine:
    """Completes jobs with one model; `close` ends it.

    Example:
        engine = ServingEngine(model, tokenizer)
        engine.submit(CompletionJob(request, print))
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, slots: int = 128, slice_tokens: int = SLICE
    ) -> None:
        self.tokenizer = tokenizer
        reach = reach_of(model.config)
        self.context = None if reach is None else reach.tokens
        """Maximum tokens of prompt and completion together; None: no limit."""
        self._model, self._slots, self._slice = model, slots, slice_tokens
        self._sampler = local_sampler(model, tokenizer, slots=slots)
        self._read, self._ends = ReplyReader(tokenizer), end_tokens(model, tokenizer)
        self._waiting: deque[CompletionJob] = deque()
        self._streams: dict[CompletionJob, TextStream] = {}
        """Text of each unfinished job."""
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="proximo-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that are in no batch now."""
        return len(self._waiting)

    def submit(self, *jobs: CompletionJob) -> None:
        """Queue jobs; their pieces are delivered from the engine's thread."""
        with self._changed:
            for job in jobs:
                self._streams[job] = TextStream(self._read, job.request.prompt, job.request.stop)
            self._waiting.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """End all jobs with an error, and wait for the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                unread, batch = self._next()
                taken = list(self._waiting) if self._closed else [*unread, *batch]
                for job in taken:
                    self._waiting.remove(job)
            if self._closed:
                self._fail(taken, STOPPING)
                return
            self._turn(self._score_prompt, unread)
            self._turn(self._decode, batch)

    def _next(self) -> tuple[list[CompletionJob], list[CompletionJob]]:
        """A job whose prompt is scored next, and those of which a slice is decoded then."""
        unread: list[CompletionJob] = []
        ready: list[CompletionJob] = []
        for job in self._waiting:
            (unread if job.waits_for_prompt else ready).append(job)
        return unread[:1], next_batch(ready, self._slots, self._room) if ready else []

    def _turn(
        self, turn: Callable[[Sequence[CompletionJob]], list[CompletionJob]], jobs: Sequence[CompletionJob]
    ) -> None:
        """Do the next part of some jobs; those that are not finished wait again."""
        try:
            unfinished = turn(jobs)
        except Exception as error:  # of these alone: others are served
            self._fail([job for job in jobs if job in self._streams], str(error) or type(error).__name__)
            return
        with self._changed:
            self._waiting.extend(unfinished)

    def _room(self, job: CompletionJob) -> tuple[int, int]:
        """Tokens of the job's next slice, and the longest slice that its context has room for."""
        free = self._slice if self.context is None else self.context - len(job.request.prompt) - len(job.tokens)
        return min(self._slice, job.left), min(self._slice, free)

    def _score_prompt(self, jobs: Sequence[CompletionJob]) -> list[CompletionJob]:
        """The log-probs of their prompts."""
        for job in jobs:
            job.deliver(
                CompletionPiece(logprobs=prompt_logprobs(self._model, job.request.prompt, job.request.top or 0))
            )
            job.is_prompt_scored = True
        return list(jobs)

    def _decode(self, batch: Sequence[CompletionJob]) -> list[CompletionJob]:
        """One slice of each job; those that are not finished."""
        jobs = [job for job in batch if job.request.max_tokens and not job.cancelled]
        for job in batch:
            if job not in jobs:
                self._finish(job, "length")
        if not jobs:
            return []
        requests = [_request(job) for job in jobs]
        options = replace(jobs[0].request.options, max_tokens=min(self._room(job)[1] for job in jobs), stop=())
        names = {(turn_key(job.request.key, job.slices), job.request.sample): job for job in jobs}

        def heard(partial: PartialCompletion) -> bool:
            job = names[partial.key, partial.sample]
            self._take(job, partial.tokens[-1])
            return not (self._closed or job.cancelled or job.finish)

        unfinished = []
        for number, (completion,) in self._sampler.stream(requests, options, seed=0, step=0, listener=heard):
            if not self._end_slice(jobs[number], completion, len(requests[number].prompt_tokens)):
                unfinished.append(jobs[number])
        return unfinished

    def _take(self, job: CompletionJob, token: int) -> None:
        """A new token of a job, which may be its last."""
        stream = self._streams[job]
        job.tokens.append(token)
        stream.add(token)
        if token in self._ends or token in job.request.end_tokens or stream.stopped:
            job.finish = "stop"
        elif job.left == 0:
            job.finish = "length"
        elif job.request.top is None and (text := stream.take()):  # log-probs, and the text with them, come at the end
            job.deliver(CompletionPiece(text))

    def _end_slice(self, job: CompletionJob, completion: Completion, start: int) -> bool:
        """End a slice; True if the job is finished. `start` is the number of tokens that the slice began with."""
        known = len(job.request.prompt) + len(job.tokens) - start
        for token in completion.tokens[known:]:  # the last one ends the slice, and was not heard
            self._take(job, token)
        job.slices += 1
        if self._closed:
            self._fail([job], STOPPING)
            return True
        if job.request.top is not None:
            whole = (*job.request.prompt, *job.tokens)
            [logprobs] = token_logprobs(self._model, [(whole[:start], whole[start:])], job.request.top)
            job.deliver(CompletionPiece(self._streams[job].take(), logprobs))
        if job.cancelled or job.finish is not None:
            self._finish(job, job.finish or "length")
            return True
        return False

    def _finish(self, job: CompletionJob, finish: Finish) -> None:
        job.deliver(CompletionPiece(self._streams.pop(job).take(end=True), finish=finish))

    def _fail(self, jobs: Sequence[CompletionJob], why: str) -> None:
        for job in jobs:
            self._streams.pop(job, None)
            job.deliver(CompletionPiece(error=why))


def _request(job: CompletionJob) -> Request:
    return Request(
        job.request.key,
        (*job.request.prompt, *job.tokens),
        num_samples=1,
        turn=job.slices,
        first_sample=job.request.sample,
    )


def next_batch(
    waiting: Sequence[CompletionJob], slots: int, room: Callable[[CompletionJob], tuple[int, int]]
) -> list[CompletionJob]:
    """The first job, and others that can be decoded together with it: drawn alike, with random numbers of their own,
    and with room for as many tokens as each needs in this slice."""
    first, *_ = waiting
    batch, names, needed, free = [], set(), 0, room(first)[1]
    for job in waiting:
        if job.request.options != first.request.options or job.name in names:
            continue
        needs, fits = room(job)
        if max(needed, needs) <= min(free, fits):
            batch.append(job)
            names.add(job.name)
            needed, free = max(needed, needs), min(free, fits)
        if len(batch) == slots:
            break
    return batch
