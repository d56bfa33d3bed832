"""Sampling while weights change: groups are sampled all the time, and each step takes those that have ended.

    learner's thread                           a thread for each group
    ────────────────                           ───────────────────────
    begin_step   push weights, fill slots ──▶  sample and grade one group ◀── the sampler takes new weights meanwhile
    groups       wait for an end         ◀──   its slot's result, then its slot in the queue of ends
                 judge it: keep, or drop
                 and fill the slot again ──▶   another group
    collected    take the step's slots         (the others go on, or wait with their result)
    update …                                   (all go on with the old weights until the next begin_step)

The learner waits in one place, `_wait`, and only while its step is not full or a slot blocks it that `window` younger
ones have passed. A group's end wakes it, or `expire` seconds after the step could have been full. A group's thread
waits for its completions and for its turn to begin grading, which one has at a time and an evaluation takes from all.
An error on a group's thread is its result, and is raised where the learner reads it. `close` gives up the requests of
all that have not ended, which ends their threads.

The learner's thread draws groups, takes them and moves the data cursor. So between two steps the cursor and the slots
say all that a resumed run needs.

With at most (k + 1) · groups slots that are taken in the order in which they were drawn, no group is older than k steps
when it is trained: fewer than that come before it, and each step takes `groups` of them. Where `window` younger groups
may pass one that has not ended, there are as many slots fewer, and the bound holds again.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from proximo.learner.guard import Notice
from proximo.rl.config import AheadOptions, TrainingOptions
from proximo.rl.rollouts import Draws, DropRule, Result, Rollouts
from proximo.runs.records import Active, Collected, DataCursor, Pending, num_tokens
from proximo.samplers.in_progress import Begun, BegunRequests
from proximo.samplers.sampler import SampledPolicy, Sampler, WeightHistory
from proximo.system.phases import phase
from proximo.types import Group, Problem

LEAVING = 5.0
"""Seconds to wait for threads whose requests were given up."""


class GroupSource(DropRule, Protocol):
    """Draws problems, samples and grades one group at a time, and judges it."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def training(self) -> TrainingOptions: ...

    def chosen(self, first: int, count: int, rates: Mapping[str, float]) -> tuple[Draws, Draws]:
        """The next problems to sample, and those that a curriculum passes over."""
        ...

    def group(self, ordinal: int, problem: Problem, *, step: int, version: int, grading: threading.Lock) -> Group: ...

    def rates(self, rates: Mapping[str, float], groups: Sequence[Group]) -> Mapping[str, float]: ...


@dataclass(eq=False)
class GroupSlot:
    """A group that was drawn: sampled now, or graded and waiting to be trained."""

    ordinal: int
    problem: Problem
    step: int
    """Index of the step at which it was drawn; names its random numbers."""
    version: int
    """Version of the weights when sampling began."""
    passed: int = 0
    """Number of younger groups that were trained before it."""
    is_noted: bool = False
    """True if the ledger says that it was carried over."""
    is_dropped: bool = False
    """True if it is left out of the step that takes it, and not replaced."""
    begun: tuple[Begun, ...] = ()
    """Completions that it had begun before a resume."""
    result: "Future[Group]" = field(default_factory=Future)

    @property
    def has_ended(self) -> bool:
        return self.result.done()

    def to_active(self, begun: BegunRequests | None) -> Active:
        """The group as a checkpoint has it; `begun` knows what is sampled of it."""
        parts = () if begun is None else begun.of_group(self.step, self.ordinal)  # first: none once it has ended
        group = self.result.result() if self.has_ended and self.result.exception() is None else None
        parts = parts if group is None else ()
        return Active(self.ordinal, self.problem, self.step, self.version, self.passed, self.is_noted, group, parts)

    @classmethod
    def of(cls, active: Active) -> "GroupSlot":
        numbers = active.step, active.version, active.passed, active.is_noted
        slot = cls(active.ordinal, active.problem, *numbers, begun=active.begun)
        if active.group is not None:
            slot.result.set_result(active.group)
        return slot


def num_slots(groups: int, staleness: int, window: int) -> int:
    """Largest number of slots at a time; `window` is a number of groups."""
    return (staleness + 1) * groups - window


def choice(slots: Sequence[GroupSlot], count: int, window: int) -> tuple[list[GroupSlot], list[GroupSlot]]:
    """The first slots that have ended, `count` at most, and older ones that they would pass although `window` groups
    have passed those: the step has to wait for these."""
    chosen = [slot for slot in slots if slot.has_ended][:count]
    blocking = [
        slot
        for slot in slots
        if not slot.has_ended and (passing := num_passing(slot, chosen)) and slot.passed + passing > window
    ]
    return chosen, blocking


def num_passing(slot: GroupSlot, others: Sequence[GroupSlot]) -> int:
    """Number of slots that are younger than one."""
    return sum(other.ordinal > slot.ordinal for other in others)


class InFlight(Rollouts):
    """Keeps slots filled with groups that are sampled, and gives each step its share of those that have ended."""

    def __init__(
        self,
        source: GroupSource,
        drop: Callable[[int, int], None],
        options: AheadOptions,
        *,
        steps: int,
        begun: BegunRequests | None = None,
        history: WeightHistory | None = None,
    ) -> None:
        """`drop` gives up the requests of a step's index and an ordinal. `steps`: those of the run; nothing is drawn
        beyond them. `begun` keeps what is sampled of each group; None: after a resume it is sampled again."""
        self._source, self._drop, self._steps, self._expire = source, drop, steps, options.expire
        self._begun, self.history = begun, history
        self._count = source.training.groups
        self._window = int(options.window * self._count)
        self._max_slots = num_slots(self._count, options.staleness, self._window)
        self._slots: list[GroupSlot] = []
        """In the order in which they were drawn."""
        self._taken: list[GroupSlot] = []
        """Slots that were freed since the step began."""
        self._chosen: list[GroupSlot] = []
        self._dropped: list[GroupSlot] = []
        self._expired: list[GroupSlot] = []
        """Slots that the step takes, that are replaced, and that are given up."""
        self._cursor: DataCursor | None = None
        """None before the first step of this process."""
        self._step = self._version = 0
        self._passed_over: Draws = []
        """By a curriculum, since the last step was collected."""
        self._ends: SimpleQueue[GroupSlot] = SimpleQueue()
        self._grading = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._notices: list[Notice] = []

    # Steps

    def begin_step(self, policy: SampledPolicy, version: int, cursor: DataCursor, step: int) -> int:
        return self.start_step(self._source.sampler.refresh(policy, version), cursor, step)

    def start_step(self, version: int, cursor: DataCursor, step: int) -> int:
        """Draw what may be drawn when `step` begins and the sampler has this version; returns the version of the oldest
        weights that its groups may have begun with."""
        if self._cursor is None:
            for slot in self._slots:
                if not slot.has_ended:
                    if not any(part.tokens for part in slot.begun):
                        slot.version = version
                    self._start(slot)
        self._cursor, self._step, self._version, self._taken = cursor, step, version, []
        self._fill()
        return min(slot.version for slot in self._slots)

    def groups(self) -> Iterator[Group]:
        """All groups that have ended, as they end; the step takes the first of them, and the others stay."""
        self._dropped, self._expired, seen = [], [], set[int]()
        full_since: float | None = None
        while True:
            for slot in [slot for slot in self._slots if slot.has_ended and slot.ordinal not in seen]:
                seen.add(slot.ordinal)
                yield slot.result.result()
            if may_refill := self._may_refill(self._dropped):
                self._fill()
            chosen, blocking = choice(self._slots, self._count, self._window)
            if any(slot.ordinal not in seen for slot in chosen):
                continue  # it has ended just now
            is_full = len(chosen) == self._count
            if not blocking and (is_full or not may_refill):
                break
            full_since = (full_since or time.monotonic()) if is_full else None
            left = None if full_since is None or self._expire is None else full_since + self._expire - time.monotonic()
            if left is not None and left <= 0:
                self._expired += self._give_up(blocking)
            else:
                self._wait(left)
        self._chosen = self._take(chosen)

    def drop(self, group: Group, *, refill: bool) -> None:
        [slot] = [slot for slot in self._slots if slot.ordinal == group.ordinal]
        slot.is_dropped = True
        if refill:
            self._dropped += self._take([slot])

    def collected(self) -> Collected:
        assert self._cursor is not None
        chosen, dropped, expired = self._chosen, self._dropped, self._expired
        out = [*dropped, *(slot for slot in chosen if slot.is_dropped)]
        passed_over, self._passed_over = self._passed_over, []
        ordinals = [slot.ordinal for slot in (*chosen, *dropped, *expired)] + [ordinal for ordinal, _ in passed_over]
        late = [slot for slot in self._slots if not slot.is_noted and slot.ordinal < max(ordinals, default=-1)]
        for slot in self._slots:
            slot.passed += num_passing(slot, chosen)
            slot.is_noted |= slot in late
        everything = [slot.result.result() for slot in (*chosen, *dropped)]
        self._cursor = DataCursor(self._cursor.next_problem, rates=self._source.rates(self._cursor.rates, everything))
        return Collected(
            groups=tuple(slot.result.result() for slot in chosen if not slot.is_dropped),
            dropped=tuple(slot.result.result() for slot in out),
            cursor=self._cursor,
            passed_over=tuple(passed_over),
            late=tuple((slot.ordinal, slot.problem) for slot in late),
            expired=tuple((slot.ordinal, slot.problem) for slot in expired),
            rounds=1,
            sampled_tokens=sum(num_tokens(group) for group in everything),
        )

    def evaluate(self, sampler: Sampler, policy: SampledPolicy, version: int, work: Callable[[int], Result]) -> Result:
        """Do the work while no group is graded."""
        sampled = sampler.refresh(policy, version)
        with self._grading:
            return work(sampled)

    def take_notices(self) -> list[Notice]:
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        for slot in self._slots:
            if not slot.has_ended:
                self._drop(slot.step, slot.ordinal)
        until = time.monotonic() + LEAVING
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    # State

    def pending(self) -> Pending:
        return replace(super().pending(), active=tuple(slot.to_active(self._begun) for slot in self._slots))

    def newest(self, pending: Pending, *, interrupt: bool) -> Pending:
        """Add what was sampled since then; of groups that have not ended, up to their last interruption."""
        if interrupt and self._begun is not None and any(not slot.has_ended for slot in self._slots):
            self._begun.interrupt()
        now = {slot.ordinal: slot.to_active(self._begun) for slot in (*self._taken, *self._slots)}
        active = [
            replace(entry, group=now[entry.ordinal].group, begun=now[entry.ordinal].begun)
            if entry.group is None and entry.ordinal in now
            else entry
            for entry in pending.active
        ]
        return replace(pending, active=tuple(active))

    def queue(self) -> dict[str, object]:
        """Groups by their state, and those that are sampled by the version that they began with."""
        open_slots = [slot for slot in self._slots if not slot.has_ended]
        versions = Counter(slot.version for slot in open_slots)
        return {"in_flight": len(open_slots), "graded": len(self._slots) - len(open_slots), "versions": versions}

    def refuse(self, pending: Pending, checkpoint: Path) -> None:
        """Do nothing: groups that were being sampled are continued."""

    def restore(self, pending: Pending) -> None:
        super().restore(pending)
        self._slots = [GroupSlot.of(active) for active in pending.active]

    # Slots

    def _may_refill(self, dropped: Sequence[GroupSlot]) -> bool:
        """Tell whether further groups may be drawn in this step in the place of dropped ones."""
        options = self._source.training
        tokens = sum(num_tokens(slot.result.result()) for slot in dropped)
        is_left = options.refill_tokens is None or tokens < options.refill_tokens
        return len(dropped) < options.refill_rounds * self._count and is_left

    def _fill(self) -> None:
        """Draw groups for all free slots, but none that no step would train on."""
        assert self._cursor is not None
        count = min(self._max_slots, (self._steps - self._step) * self._count) - len(self._slots)
        if count <= 0:
            return
        drawn, skipped = self._source.chosen(self._cursor.next_problem, count, self._cursor.rates)
        self._passed_over += skipped
        self._cursor = DataCursor(self._cursor.next_problem + len(drawn) + len(skipped), rates=self._cursor.rates)
        for ordinal, problem in drawn:
            self._slots.append(GroupSlot(ordinal, problem, self._step, self._version))
            self._start(self._slots[-1])

    def _start(self, slot: GroupSlot) -> None:
        # A daemon: a call that never returns must not keep an interrupted program alive.
        thread = threading.Thread(target=copy_context().run, args=(self._sample, slot), name="group", daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def _sample(self, slot: GroupSlot) -> None:
        """Sample and grade a group, on its own thread."""
        if self._begun is not None:
            self._begun.open(slot.step, slot.ordinal, slot.begun)
        try:
            group = self._source.group(
                slot.ordinal, slot.problem, step=slot.step, version=slot.version, grading=self._grading
            )
        except BaseException as error:  # raised again in the learner's thread
            slot.result.set_exception(error)
        else:
            slot.result.set_result(group)
        if self._begun is not None:
            self._begun.close(slot.step, slot.ordinal)
        self._ends.put(slot)

    def _wait(self, seconds: float | None) -> None:
        """Wait until a group ends, or for some seconds."""
        try:
            with phase("waiting for the sampler"):
                self._ends.get(timeout=seconds)
        except Empty:
            return

    def _take(self, slots: list[GroupSlot]) -> list[GroupSlot]:
        """Free these slots."""
        self._taken += slots
        self._slots = [slot for slot in self._slots if slot not in slots]
        return slots

    def _give_up(self, slots: list[GroupSlot]) -> list[GroupSlot]:
        for slot in self._take(slots):
            self._drop(slot.step, slot.ordinal)
            message = (
                f"group {slot.ordinal}, drawn {self._step - slot.step} steps ago, has not ended, and the step has "
                f"waited {self._expire:g} s for it: it is given up, and the ledger has it as expired"
            )
            self._notices.append(Notice("expired", message))
        return slots
