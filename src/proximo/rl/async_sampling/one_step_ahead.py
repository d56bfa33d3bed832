"""Orders: which steps are sampled ahead, with which weights, and what is known of them.

When step s begins, step s + k is ordered, to be sampled with the weights that step s begins with. So k + 1 steps are
active at most: each waits, is in flight, is graded, and leaves when it is trained. An order's result follows from its
step, its weights and the cursor that the order before it left; it depends on no time, and a run repeats to the last
bit.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

from proximo.rl.async_sampling.worker import Worker
from proximo.runs.records import Collected, DataCursor
from proximo.samplers.sampler import Snapshot
from proximo.system.timeline import Lanes

Result = TypeVar("Result")


class Collect(Protocol):
    """Samples and grades a step with the weights of a snapshot."""

    def __call__(self, cursor: DataCursor, step: int, weights: Snapshot) -> Collected: ...


@dataclass(frozen=True)
class Order:
    """A step that is sampled ahead."""

    step: int
    """Its index, from 0."""
    weights: Snapshot
    result: "Future[Collected]"

    @property
    def state(self) -> Literal["waiting", "in flight", "graded"]:
        return "graded" if self.result.done() else "in flight" if self.result.running() else "waiting"


class Ahead:
    """Samples the next steps on a thread of its own while a step is trained. It also keeps the weights that active
    orders sample with, for checkpoints."""

    def __init__(
        self, collect: Collect, device: torch.device, *, staleness: int, steps: int, lanes: Lanes | None = None
    ) -> None:
        """`collect` is only called on the thread. `steps`: those of the run; nothing is ordered beyond them.
        `lanes` records when each step was sampled."""
        assert staleness > 0, "without staleness nothing runs ahead"
        self._collect, self._staleness, self._steps = collect, staleness, steps
        self._lanes = lanes or Lanes()
        self._worker = Worker("ahead", device)
        self._orders: deque[Order] = deque()
        self._weights: deque[Snapshot] = deque(maxlen=staleness)
        """Weights of the next steps' orders, the oldest first, those of the next step's own excluded. At
        the start of a run there are fewer: the oldest then sample the steps before too."""
        self._restored: Sequence[Collected] = ()
        self._last: Callable[[], DataCursor] | None = None
        """The cursor that the newest order leaves; None before the first."""

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

    def collect(self) -> Collected:
        """Wait for the rollouts of the step that has begun. Its order ends here; the others stay active."""
        collected = self._worker.wait(self._orders[0].result)
        self._orders.popleft()
        return collected

    def now(self, work: Callable[[], Result]) -> Result:
        """Do something else that samples, such as an evaluation, on the thread: after the order that is in flight and
        before those that wait, so that the sampler never serves two at a time."""
        return self._worker.wait(self._worker.submit(work, first=True))

    def take_notices(self) -> list[tuple[str, str]]:
        """Kind and message of what happened on the thread since the last call."""
        count, self._worker.repeated = self._worker.repeated, 0
        if not count:
            return []
        message = (
            f"sampling ahead ran out of memory next to the updates ({count} times) and was done again alone, with the "
            "same result: ahead.staleness = 0, or a smaller training.token_budget, leaves more room"
        )
        return [("out_of_memory", message)]

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

    def kept(self) -> list[Snapshot]:
        """Weights of the next steps' orders, the oldest first."""
        return list(self._weights)

    def load(self, kept: Sequence[Snapshot]) -> None:
        """Put back what `kept` returned, before the first step."""
        self._weights.extend(kept)

    def restore(self, graded: Sequence[Collected]) -> None:
        """Put back what `graded` returned, before the first step: these orders are not sampled again."""
        self._restored = graded

    def queue(self) -> dict[str, object]:
        """Orders by their state, and by the version of their weights, for the time line."""
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
        """`known` has the result, if it is known."""
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
