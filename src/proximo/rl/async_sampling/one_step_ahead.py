"""Sampling ahead: the next steps are sampled on a thread of their own while a step is trained.

    learner's thread                             the thread that samples, `SamplingThread`
    ────────────────                             ─────────────────────────────────
    begin_step  copy the weights as a snapshot,
                order step s + k with them ──▶   queue of jobs; a new one wakes it
    collect     wait for the order of step s     load the order's snapshot, sample in rounds,
                                         ◀──     grade, judge, refill; its result wakes the learner
    update …                                     next order: needs the cursor that the one before left
    evaluate    a job before all that wait ──▶   after the job it is at
                wait for it              ◀──     result

The learner waits for results alone; the thread waits for jobs alone, and where a job ran out of memory until the
learner waits too and does nothing else. `close` raises `Abandoned` in the middle of a job.

When step s begins, step s + k is ordered, to be sampled with the weights that step s begins with. So k + 1 steps are
active at most: each waits, is in flight, is graded, and leaves when it is trained. An order's result follows from its
step, its weights and the cursor that the order before it left; it depends on no time, and a run repeats to the last
bit.
"""

import ctypes
import gc
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from proximo.learner.guard import Notice
from proximo.models.adapters.lora import merged_weights
from proximo.models.out_of_memory import is_out_of_memory
from proximo.models.sampled import WholeModel
from proximo.rl.rollouts import Collector, Result, Rollouts
from proximo.runs.checkpointer import OlderWeights
from proximo.runs.records import Collected, DataCursor, Pending
from proximo.samplers.sampler import SampledPolicy, Sampler, Snapshot
from proximo.system.phases import phase
from proximo.system.timeline import Lanes
from proximo.types import Group

PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds to wait for the thread after each attempt to stop it: it may be in a call that cannot be interrupted, or on
its way out."""


class Collect(Protocol):
    """Samples and grades a step with the weights of a snapshot."""

    def __call__(self, cursor: DataCursor, step: int, weights: Snapshot) -> Collected: ...


@dataclass(frozen=True)
class Order:
    """A step that is sampled ahead."""

    step: int
    """Index of the step, from 0."""
    weights: Snapshot
    result: "Future[Collected]"

    @property
    def state(self) -> Literal["waiting", "in flight", "graded"]:
        return "graded" if self.result.done() else "in flight" if self.result.running() else "waiting"


class OneStepAhead(Rollouts):
    """Samples the next steps on a thread of its own while a step is trained. It also keeps the weights that active
    orders sample with, for checkpoints."""

    def __init__(
        self,
        collect: Collect,
        device: torch.device,
        *,
        staleness: int,
        steps: int,
        lanes: Lanes | None = None,
        copy: "PolicyCopy | None" = None,
    ) -> None:
        """`collect` is only called on the thread. `steps`: those of the run; nothing is ordered beyond them.
        `lanes` records when each step was sampled. `copy`: the module that samplers sample with."""
        assert staleness > 0, "without staleness nothing runs ahead"
        self._copy = copy
        self._collect, self._staleness, self._steps = collect, staleness, steps
        self._lanes = lanes or Lanes()
        self._worker = SamplingThread("ahead", device)
        self._orders: deque[Order] = deque()
        self._weights: deque[Snapshot] = deque(maxlen=staleness)
        """Weights of the next steps' orders, the oldest first, those of the next step's own excluded. At
        the start of a run there are fewer: the oldest then sample the steps before too."""
        self._restored: Sequence[Collected] = ()
        self._last: Callable[[], DataCursor] | None = None
        """The cursor that the newest order leaves; None before the first."""

    @classmethod
    def of(
        cls, collector: Collector, copy: "PolicyCopy", device: torch.device, *, staleness: int, steps: int, lanes: Lanes
    ) -> "OneStepAhead":
        """Rollouts of a run whose samplers sample with a copy of its policy."""

        def collect(cursor: DataCursor, step: int, weights: Snapshot) -> Collected:
            return collector.collect(cursor, step=step, version=copy.refresh(collector.sampler, weights))

        return cls(collect, device, staleness=staleness, steps=steps, lanes=lanes, copy=copy)

    @property
    def older_weights(self) -> OlderWeights:
        return "trained"

    def begin_step(self, policy: SampledPolicy, version: int, cursor: DataCursor, step: int) -> int:
        assert self._copy is not None
        return self.start_step(self._copy.snapshot(version), cursor, step)

    def start_step(self, newest: Snapshot, cursor: DataCursor, step: int) -> int:
        """Order what may be ordered when `step` begins with the weights `newest`; returns the version of the weights
        that sample it."""
        if self._last is None:  # the first step of this process
            self._last = lambda: cursor
            if not self._weights:  # the start of the run
                self._weights.append(newest)
            missing = self._staleness - len(self._weights)  # there are no older weights than the first
            for later, weights in enumerate([self._weights[0]] * missing + list(self._weights)):
                self._order(step + later, weights, self._restored[later : later + 1])
            self._restored = ()
        self._order(step + self._staleness, newest)
        self._weights.append(newest)
        assert self._orders[0].step == step
        return self._orders[0].weights.version

    def groups(self) -> Iterator[Group]:
        """All groups of the step, which were judged on the thread."""
        collected = self._worker.wait(self._orders[0].result)
        yield from (*collected.dropped, *collected.groups)

    def drop(self, group: Group, *, refill: bool) -> None:
        """Do nothing: it was dropped on the thread, and another sampled in its place."""

    def collected(self) -> Collected:
        """Wait for the rollouts of the step that has begun. Its order ends here; the others stay active."""
        collected = self._worker.wait(self._orders[0].result)
        self._orders.popleft()
        return replace(collected, grading_seconds=0.0)  # nobody waited for grades alone

    def evaluate(self, sampler: Sampler, policy: SampledPolicy, version: int, work: Callable[[int], Result]) -> Result:
        assert self._copy is not None
        copy, weights = self._copy, self._copy.snapshot(version)
        return self.now(lambda: work(copy.refresh(sampler, weights)))

    def now(self, work: Callable[[], Result]) -> Result:
        """Do something else that samples, such as an evaluation, on the thread: after the order that is in flight and
        before those that wait, so that the sampler never serves two at a time."""
        return self._worker.wait(self._worker.submit(work, first=True))

    def take_notices(self) -> list[Notice]:
        count, self._worker.repeated = self._worker.repeated, 0
        if not count:
            return []
        message = (
            f"sampling ahead ran out of memory next to the updates ({count} times) and was done again alone, with the "
            "same result: ahead.staleness = 0, or a smaller training.token_budget, leaves more room"
        )
        return [Notice("out_of_memory", message)]

    def close(self) -> None:
        """Stop sampling, in the middle of an order too."""
        self._worker.close()

    # State

    @property
    def active(self) -> tuple[Order, ...]:
        """All orders that are not trained yet, by step."""
        return tuple(self._orders)

    def graded(self) -> tuple[Collected, ...]:
        """Results of the next steps' orders, as far as they are known; the first belongs to the next step."""
        done = []
        for order in self._orders:
            if not order.result.done() or order.result.exception() is not None:
                break
            done.append(order.result.result())
        return tuple(done)

    def pending(self) -> Pending:
        """Steps that are graded, and the weights of the next steps' orders, the oldest first."""
        return Pending(ahead=self.graded(), older_weights=tuple(self._weights))

    def restore(self, pending: Pending) -> None:
        """Take over steps that are sampled and graded already, which are not sampled again."""
        self._weights.extend(pending.older_weights)
        self._restored = pending.ahead

    def queue(self) -> dict[str, object]:
        """Orders by their state, and by the version of their weights."""
        states = Counter(order.state for order in self._orders)
        versions = Counter(order.weights.version for order in self._orders)
        return {
            "waiting": states["waiting"],
            "in_flight": states["in flight"],
            "graded": states["graded"],
            "versions": versions,
        }

    def _sampled(self, cursor: DataCursor, step: int, weights: Snapshot) -> Collected:
        with self._lanes.during("sampler", "sample", step=step + 1, version=weights.version):
            return self._collect(cursor, step, weights)

    def _order(self, step: int, weights: Snapshot, known: Sequence[Collected] = ()) -> None:
        """Order a step; `known` has the result, if it is known."""
        if step >= self._steps:
            return
        before = self._last
        assert before is not None
        if known:
            result: Future[Collected] = Future()
            result.set_result(known[0])
        else:
            result = self._worker.submit(lambda: self._sampled(before(), step, weights))
        self._orders.append(Order(step, weights, result))
        self._last = lambda: result.result().cursor


# Weights for a sampler that works while the policy is trained: a second module, and snapshots to load into it


class PolicyCopy(WholeModel):
    """A second module of a policy's, for samplers: it has the weights of the snapshot that was loaded last.

    A snapshot holds the weights that are trained; the others are those of the start.
    """

    def __init__(self, policy: SampledPolicy) -> None:
        self._policy = policy
        # Not frozen: from that a sampler sees how much memory training will take.
        self.model = deepcopy(policy.model).eval()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.model)

    @torch.no_grad()
    def snapshot(self, version: int) -> Snapshot:
        """The policy's weights as they are now, after `version` updates; another thread may read them."""
        snapshot = Snapshot(version, [trained.clone() for _, trained in self._trained()])
        _finish(self.model.device)
        return snapshot

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        for (parameter, _), weight in zip(self._trained(), snapshot.weights, strict=True):
            parameter.copy_(weight)
        _finish(self.model.device)

    def refresh(self, sampler: Sampler, snapshot: Snapshot) -> int:
        """Give a snapshot to a sampler that works on this copy."""
        self.load(snapshot)
        return sampler.refresh(self, snapshot.version)

    def _trained(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters of this module and of the policy's, where the policy's are trained; tied ones come once."""
        pairs = zip(self.model.parameters(), self._policy.model.parameters(), strict=True)
        return [(parameter, policy) for parameter, policy in pairs if policy.requires_grad]


def _finish(device: torch.device) -> None:
    """Wait until this thread's copies are done: another stream reads them, or frees what they were made from."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# The thread


class Abandoned(BaseException):
    """Raised inside a job whose result is no longer needed."""


class SamplingThread:
    """Does jobs in order, on one thread. The thread starts with the first job, in the context of that call.

    A job that runs out of memory is done again when the caller waits for a result: it does nothing else then, and
    what it needed for its own work is free.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        """Prepare the thread; on a GPU it has its own stream, so that its kernels do not wait for the caller's."""
        self._name, self._device = name, device
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._caller_waits = self._closed = self._busy = False
        self._thread: threading.Thread | None = None
        self.repeated = 0
        """Number of jobs that ran out of memory and were done again."""

    def submit(self, job: Callable[[], Result], *, first: bool = False) -> "Future[Result]":
        """Queue a job; `first`: before all that wait."""
        future: Future[Result] = Future()
        with self._changed:
            assert not self._closed, "the worker is closed"
            (self._jobs.appendleft if first else self._jobs.append)((future, job))
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: a call that never returns must not keep an interrupted program alive.
            self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name=self._name, daemon=True)
            self._thread.start()
        return future

    def wait(self, future: "Future[Result]") -> Result:
        """The result of a job; raises what the job raised."""
        self._set_waiting(True)
        try:
            with phase("waiting for the sampler"):
                return future.result()
        finally:
            self._set_waiting(False)

    def close(self) -> None:
        """Drop all jobs and end the thread, also in the middle of a job."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        if (thread := self._thread) is None:
            return
        with _abandoning_quietly():
            for seconds in PATIENCE:
                with self._changed:  # a thread that is not in a job ends by itself
                    if self._busy:
                        _interrupt(thread)
                thread.join(seconds)
                if not thread.is_alive():
                    return

    def _set_waiting(self, waits: bool) -> None:
        with self._changed:
            self._caller_waits = waits
            self._changed.notify_all()

    def _work(self) -> None:
        on_gpu = self._device.type == "cuda"
        with (
            suppress(Abandoned),
            torch.cuda.stream(torch.cuda.Stream(self._device)) if on_gpu else nullcontext(),
        ):
            while (job := self._next()) is not None:
                self._do(*job)
                del job  # it holds weights, and the next job may come much later
        with suppress(Abandoned), self._changed:
            self._busy = False  # from here on the thread is Python's, which clears up: nothing may be raised in it

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._busy = not self._closed
            return None if self._closed else self._jobs.popleft()

    def _do(self, future: Future[Any], job: Callable[[], Any]) -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self._done(job))
        except Abandoned:
            raise
        except BaseException as error:  # raised again in the caller's thread
            future.set_exception(error)

    def _done(self, job: Callable[[], Result]) -> Result:
        try:
            return job()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        with self._changed:
            self._busy = False  # what follows ends by itself
        # Not in the clause above: while an error is handled, the frames it went through keep their tensors.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        with self._changed:
            self._changed.wait_for(lambda: self._caller_waits or self._closed)
            if self._closed:
                raise Abandoned
            self._busy = True
        self.repeated += 1
        return job()


@contextmanager
def _abandoning_quietly() -> Iterator[None]:
    """Print nothing where Abandoned is raised in a callback of Python's garbage collector, after which Python goes on:
    that is no fault, and the thread gets another one."""
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if unraisable.exc_type is not Abandoned:
            before(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt(thread: threading.Thread) -> None:
    """Raise Abandoned at the thread's next instruction, as a signal would in the main thread."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
