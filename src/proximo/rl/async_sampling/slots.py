"""Slots: the groups that are drawn and not trained yet, and which of them a step takes.

With at most (k + 1) · groups slots that are taken in the order in which they were drawn, no group is older than k steps
when it is trained: fewer than that come before it, and each step takes `groups` of them. Where `window` younger groups
may pass one that has not ended, there are as many slots fewer, and the bound holds again.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from proximo.runs.records import Active
from proximo.samplers.in_progress import Begun, BegunRequests
from proximo.types import Group, Problem


@dataclass(eq=False)
class Slot:
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
    """Whether the ledger says that it was carried over."""
    begun: tuple[Begun, ...] = ()
    """What it had sampled before a resume."""
    result: "Future[Group]" = field(default_factory=Future)

    @property
    def has_ended(self) -> bool:
        return self.result.done()

    def to_active(self, begun: BegunRequests | None) -> Active:
        """For a checkpoint; `begun` knows what is sampled of it."""
        parts = () if begun is None else begun.of_group(self.step, self.ordinal)  # first: none once it has ended
        group = self.result.result() if self.has_ended and self.result.exception() is None else None
        parts = parts if group is None else ()
        return Active(self.ordinal, self.problem, self.step, self.version, self.passed, self.is_noted, group, parts)

    @classmethod
    def of(cls, active: Active) -> "Slot":
        numbers = active.step, active.version, active.passed, active.is_noted
        slot = cls(active.ordinal, active.problem, *numbers, begun=active.begun)
        if active.group is not None:
            slot.result.set_result(active.group)
        return slot


def num_slots(groups: int, staleness: int, window: int) -> int:
    """Most slots at a time; `window` is a number of groups."""
    return (staleness + 1) * groups - window


def choice(slots: Sequence[Slot], count: int, window: int) -> tuple[list[Slot], list[Slot]]:
    """The first slots that have ended, `count` at most, and older ones that they would pass although `window` groups
    have passed those: the step has to wait for these."""
    chosen = [slot for slot in slots if slot.has_ended][:count]
    blocking = [
        slot
        for slot in slots
        if not slot.has_ended and (passing := num_passing(slot, chosen)) and slot.passed + passing > window
    ]
    return chosen, blocking


def num_passing(slot: Slot, others: Sequence[Slot]) -> int:
    """Number of slots that are younger than one."""
    return sum(each.ordinal > slot.ordinal for each in others)
