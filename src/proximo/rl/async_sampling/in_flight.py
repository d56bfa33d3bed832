"""Running ahead while weights change: groups are sampled all the time, and each step takes those that have ended.

The learner's thread draws groups, takes them and moves the data cursor; every group is sampled on a thread of its own.
So between two steps the cursor and the slots say all that a resumed run needs.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from proximo.rl.async_sampling.slots import Slot, choice, num_passing, num_slots
from proximo.rl.config import AheadOptions, TrainingOptions
from proximo.runs.records import Active, Collected, DataCursor, num_tokens
from proximo.samplers.in_progress import BegunRequests
from proximo.types import Group, Problem

Result = TypeVar("Result")
Draws = list[tuple[int, Problem]]
LEAVING = 5.0
"""Seconds to wait for threads whose requests were given up."""


class Source(Protocol):
    """Draws problems, and samples and grades one group at a time."""

    @property
    def training(self) -> TrainingOptions: ...

    @property
    def refills(self) -> bool:
        """Whether dropped groups are replaced."""
        ...

    def chosen(self, first: int, count: int, rates: Mapping[str, float]) -> tuple[Draws, Draws]:
        """The next problems to sample, and those that a curriculum passes over."""
        ...

    def group(self, ordinal: int, problem: Problem, *, step: int, version: int, grading: threading.Lock) -> Group: ...

    def drops(self, group: Group) -> bool: ...

    def rates(self, rates: Mapping[str, float], groups: Sequence[Group]) -> Mapping[str, float]: ...


class InFlight:
    """Keeps slots filled with groups that are sampled, and gives each step its share of those that have ended."""

    def __init__(
        self,
        source: Source,
        drop: Callable[[int, int], None],
        options: AheadOptions,
        *,
        steps: int,
        begun: BegunRequests | None = None,
    ) -> None:
        """`drop` gives up the requests of a step's index and an ordinal. `steps`: those of the run; nothing is drawn
        beyond them. `begun` keeps what is sampled of each group; None: after a resume it is sampled again."""
        self._source, self._drop, self._steps, self._expire = source, drop, steps, options.expire
        self._begun = begun
        self._count = source.training.groups
        self._window = int(options.window * self._count)
        self._most = num_slots(self._count, options.staleness, self._window)
        self._slots: list[Slot] = []
        """In the order in which they were drawn."""
        self._taken: list[Slot] = []
        """Slots that were freed since the step began."""
        self._cursor: DataCursor | None = None
        """None before the first step of this process."""
        self._step = self._version = 0
        self._passed_over: Draws = []
        """By a curriculum, since the last step was collected."""
        self._ends: SimpleQueue[Slot] = SimpleQueue()
        self._grading = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._notices: list[tuple[str, str]] = []

    # Steps

    def start_step(self, version: int, cursor: DataCursor, step: int) -> int:
        """Draw what may be drawn when `step` begins and the sampler has this version; returns the version of the oldest
        weights that its groups may have begun with."""
        if self._cursor is None:
            for slot in self._slots:
                if not slot.has_ended:
                    if not any(each.tokens for each in slot.begun):
                        slot.version = version
                    self._start(slot)
        self._cursor, self._step, self._version, self._taken = cursor, step, version, []
        self._fill()
        return min(slot.version for slot in self._slots)

    def collect(self) -> Collected:
        """Wait for the groups of the step that has begun."""
        dropped: list[Slot] = []
        expired: list[Slot] = []
        full_since: float | None = None
        while True:
            dropped += self._take([slot for slot in self._slots if self._is_filtered(slot)])
            if may_refill := self._may_refill(dropped):
                self._fill()
            chosen, blocking = choice(self._slots, self._count, self._window)
            if any(self._is_filtered(slot) for slot in chosen):
                continue  # it has ended just now
            is_full = len(chosen) == self._count
            if not blocking and (is_full or not may_refill):
                break
            full_since = (full_since or time.monotonic()) if is_full else None
            left = None if full_since is None or self._expire is None else full_since + self._expire - time.monotonic()
            if left is not None and left <= 0:
                expired += self._give_up(blocking)
            else:
                self._wait(left)
        return self._collected(self._take(chosen), dropped, expired)

    def now(self, work: Callable[[], Result]) -> Result:
        """Do something else that samples and grades, such as an evaluation; no group is graded meanwhile."""
        with self._grading:
            return work()

    def take_notices(self) -> list[tuple[str, str]]:
        """Kind and message of what happened since the last call."""
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        """Give up all that is sampled."""
        for slot in self._slots:
            if not slot.has_ended:
                self._drop(slot.step, slot.ordinal)
        until = time.monotonic() + LEAVING
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    # State

    def active(self) -> tuple[Active, ...]:
        """Groups that are not trained yet, between two steps."""
        return tuple(slot.to_active(self._begun) for slot in self._slots)

    def newest(self, active: Sequence[Active], *, interrupt: bool) -> tuple[Active, ...]:
        """The same groups with all that is sampled of them by now. `interrupt`: first make the sampler say what it has
        sampled of those that have not ended; otherwise it is known up to their last interruption."""
        if interrupt and self._begun is not None and any(not slot.has_ended for slot in self._slots):
            self._begun.interrupt()
        now = {slot.ordinal: slot.to_active(self._begun) for slot in (*self._taken, *self._slots)}
        return tuple(
            replace(each, group=now[each.ordinal].group, begun=now[each.ordinal].begun)
            if each.group is None and each.ordinal in now
            else each
            for each in active
        )

    def queue(self) -> dict[str, object]:
        """Groups by their state, and those that are sampled by the version that they began with, for the time line."""
        open_slots = [slot for slot in self._slots if not slot.has_ended]
        versions = Counter(slot.version for slot in open_slots)
        return {"in_flight": len(open_slots), "graded": len(self._slots) - len(open_slots), "versions": versions}

    def restore(self, active: Sequence[Active]) -> None:
        """Put back what `active` returned, before the first step: groups that had not ended are continued."""
        self._slots = [Slot.of(each) for each in active]

    # Slots

    def _is_filtered(self, slot: Slot) -> bool:
        """Whether it was dropped and is replaced by another; raises what sampling or grading it raised."""
        return slot.has_ended and self._source.drops(slot.result.result()) and self._source.refills

    def _may_refill(self, dropped: Sequence[Slot]) -> bool:
        """Whether further groups may be drawn in this step in the place of dropped ones."""
        options = self._source.training
        tokens = sum(num_tokens(slot.result.result()) for slot in dropped)
        is_left = options.refill_tokens is None or tokens < options.refill_tokens
        return len(dropped) < options.refill_rounds * self._count and is_left

    def _fill(self) -> None:
        """Draw groups for all free slots, but none that no step would train on."""
        assert self._cursor is not None
        count = min(self._most, (self._steps - self._step) * self._count) - len(self._slots)
        if count <= 0:
            return
        drawn, skipped = self._source.chosen(self._cursor.next_problem, count, self._cursor.rates)
        self._passed_over += skipped
        self._cursor = DataCursor(self._cursor.next_problem + len(drawn) + len(skipped), rates=self._cursor.rates)
        for ordinal, problem in drawn:
            self._slots.append(Slot(ordinal, problem, self._step, self._version))
            self._start(self._slots[-1])

    def _start(self, slot: Slot) -> None:
        # A daemon: a call that never returns must not keep an interrupted program alive.
        thread = threading.Thread(target=copy_context().run, args=(self._sample, slot), name="group", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _sample(self, slot: Slot) -> None:
        """On the group's thread."""
        if self._begun is not None:
            self._begun.open(slot.step, slot.ordinal, slot.begun)
        try:
            found = self._source.group(
                slot.ordinal, slot.problem, step=slot.step, version=slot.version, grading=self._grading
            )
        except BaseException as error:  # raised again in the learner's thread
            slot.result.set_exception(error)
        else:
            slot.result.set_result(found)
        if self._begun is not None:
            self._begun.close(slot.step, slot.ordinal)
        self._ends.put(slot)

    def _wait(self, seconds: float | None) -> None:
        """Until a group ends, or for some seconds."""
        try:
            self._ends.get(timeout=seconds)
        except Empty:
            return

    def _take(self, slots: list[Slot]) -> list[Slot]:
        """Free these slots."""
        self._taken += slots
        self._slots = [slot for slot in self._slots if slot not in slots]
        return slots

    def _give_up(self, slots: list[Slot]) -> list[Slot]:
        for slot in self._take(slots):
            self._drop(slot.step, slot.ordinal)
            message = (
                f"group {slot.ordinal}, drawn {self._step - slot.step} steps ago, has not ended, and the step has "
                f"waited {self._expire:g} s for it: it is given up, and the ledger has it as expired"
            )
            self._notices.append(("expired", message))
        return slots

    def _collected(self, chosen: Sequence[Slot], dropped: Sequence[Slot], expired: Sequence[Slot]) -> Collected:
        assert self._cursor is not None
        groups = [slot.result.result() for slot in chosen]
        out = [slot.result.result() for slot in dropped] + [group for group in groups if self._source.drops(group)]
        kept = [group for group in groups if not self._source.drops(group)]
        passed_over, self._passed_over = self._passed_over, []
        ordinals = [slot.ordinal for slot in (*chosen, *dropped, *expired)] + [ordinal for ordinal, _ in passed_over]
        late = [slot for slot in self._slots if not slot.is_noted and slot.ordinal < max(ordinals, default=-1)]
        for slot in self._slots:
            slot.passed += num_passing(slot, chosen)
            slot.is_noted |= slot in late
        everything = [*groups, *(slot.result.result() for slot in dropped)]
        self._cursor = DataCursor(self._cursor.next_problem, rates=self._source.rates(self._cursor.rates, everything))
        return Collected(
            groups=tuple(kept),
            dropped=tuple(out),
            cursor=self._cursor,
            passed_over=tuple(passed_over),
            late=tuple((slot.ordinal, slot.problem) for slot in late),
            expired=tuple((slot.ordinal, slot.problem) for slot in expired),
            rounds=1,
            sampled_tokens=sum(num_tokens(group) for group in everything),
        )
