"""Engines that decode: from the lengths of requests to the times at which they end.

Requests in flight are spread evenly over the engines at every moment, and each gets one token per decode step. So all
share one clock that counts decode steps, and a request ends when the clock has moved by its length. The seconds of a
decode step grow linearly with the context that it reads, so the time between two events has a closed form: there are
no ticks, and all events up to the next push are computed at once.
"""

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Engines:
    """Identical engines, and what a decode step of one costs."""

    number: int
    slots: int
    """Requests that one engine decodes at a time; others wait."""
    base: float
    """Seconds of a decode step whatever it holds: reading the weights, launching kernels."""
    per_request: float
    """Seconds that each request adds: its arithmetic."""
    per_token: float
    """Seconds that each token of context adds: reading its keys and values."""
    prefill: float = 0.0
    """Seconds for each token of a prompt, or of a context that is read again after a push."""

    def __post_init__(self) -> None:
        if self.number < 1 or self.slots < 1:
            raise ValueError(f"{self.number} engines with {self.slots} slots: give at least one of each")
        assert self.base > 0


@dataclass
class Requests:
    """Requests that have not ended, in the order in which they were issued."""

    group: np.ndarray
    left: np.ndarray
    """Tokens until the end."""
    context: np.ndarray
    """Tokens read in each decode step: the prompt's and its own."""
    live: np.ndarray
    """True if it has begun."""

    @classmethod
    def none(cls) -> "Requests":
        return cls(np.zeros(0, int), np.zeros(0), np.zeros(0), np.zeros(0, bool))

    def __len__(self) -> int:
        return len(self.group)


class Pool:
    """Engines at the time `now`, with what they hold and what waits for them.

    All share one clock, whose seconds follow the mean of the contexts. So where requests wait for slots, a long one
    that begins earlier on one more engine slows all others, too, and the whole may seem slower, by half a per cent in
    the worst case that was found.
    """

    def __init__(self, engines: Engines, prompt_tokens: int, groups: int, *, drained: bool) -> None:
        self.engines, self.prompt_tokens = engines, prompt_tokens
        self.batch = groups if drained else None
        """Groups that begin only when all earlier ones have ended; None: whenever a slot is free."""
        self.now = 0.0
        self.held = Requests.none()
        self.stall = 0.0
        """Seconds until decoding continues."""
        self.last_read = -1
        """The last group whose prompt was read; groups begin in order."""

    def issue(self, groups: range, lengths: np.ndarray) -> None:
        """Add requests [groups, group_size], and foresee when everything ends."""
        new, held = lengths[groups.start : groups.stop].reshape(-1), self.held
        self.held = Requests(
            np.concatenate([held.group, np.repeat(np.array(groups, int), lengths.shape[1])]),
            np.concatenate([held.left, new]),
            np.concatenate([held.context, np.full(len(new), float(self.prompt_tokens))]),
            np.concatenate([held.live, np.zeros(len(new), bool)]),
        )
        self._foresee()

    def _begins(self) -> np.ndarray:
        """Clock at which each request begins, from now on: as soon as a slot is free, in the order of issue."""
        held, room = self.held, self.engines.slots * self.engines.number
        begins, floor, ends = np.zeros(len(held)), 0.0, held.left[held.live].tolist()
        for part, is_new in self._parts():
            if is_new:
                floor, ends = max(ends, default=floor), []
            now, later = part[: room - len(ends)], part[room - len(ends) :]
            begins[now] = floor
            ends += (floor + held.left[now]).tolist()
            heapq.heapify(ends)
            for request, left in zip(later.tolist(), held.left[later].tolist(), strict=True):
                begins[request] = ends[0]
                heapq.heapreplace(ends, ends[0] + left)
        return begins

    def _parts(self) -> list[tuple[np.ndarray, bool]]:
        """Requests that wait, and whether they wait for all before them to end."""
        held, waiting = self.held, np.flatnonzero(~self.held.live)
        if self.batch is None or not len(waiting):
            return [(waiting, False)]
        batches = held.group[waiting] // self.batch
        running = held.group[held.live] // self.batch
        return [(waiting[batches == each], each not in running) for each in np.unique(batches).tolist()]

    def _foresee(self) -> None:
        """All events: begins and ends of requests, with the time of each."""
        held, engines, count = self.held, self.engines, len(self.held)
        self.begin = self._begins()
        later = ~held.live
        # A group's prompt is read with its first request.
        first = np.zeros(count, bool)
        first[np.unique(held.group, return_index=True)[1]] = True
        first &= later & (held.group > self.last_read)
        clock = np.concatenate([self.begin + held.left, self.begin[later]])
        # A slot is left before it is taken, and nothing ends where it begins.
        order = np.lexsort((np.concatenate([np.zeros(count), np.ones(later.sum())]), clock))
        live = np.concatenate([np.full(count, -1.0), np.ones(later.sum())])
        read = np.concatenate([-(held.context + held.left), held.context[later]])
        pause = np.concatenate([np.zeros(count), first[later] * self.prompt_tokens]) * engines.prefill / engines.number
        self.clock = np.concatenate([[0.0], clock[order]])
        self.live = np.concatenate([[float(held.live.sum())], live[order]]).cumsum()
        moved = np.diff(self.clock, append=self.clock[-1])
        jumps = np.concatenate([[held.context[held.live].sum()], read[order]]).cumsum()
        grown = np.concatenate([[0.0], (self.live * moved)[:-1].cumsum()])
        shared = np.clip(self.live, 1, engines.number)
        self.each = engines.base + (engines.per_request * self.live + engines.per_token * (jumps + grown)) / shared
        self.growth = engines.per_token * self.live / shared
        self.pause = np.concatenate([[self.stall], pause[order]])
        spent = self.pause + moved * (self.each + self.growth * moved / 2)
        self.at = self.now + np.concatenate([[0.0], spent[:-1].cumsum()])
        self.event = np.empty(len(order), int)
        self.event[order] = np.arange(1, len(order) + 1)

    @property
    def ends(self) -> np.ndarray:
        """The time at which each held request will end."""
        return self.at[self.event[: len(self.held)]]

    def advance(self, to: float) -> tuple[np.ndarray, float, float]:
        """Go to this time. The groups that have begun, and the seconds times engines in use, and times requests."""
        last = int(np.searchsorted(self.at, to, side="right")) - 1
        seconds = to - self.at[last] - self.pause[last]
        self.stall = max(0.0, -float(seconds))  # what is left of a prefill
        each, growth = self.each[last], self.growth[last]
        steps = 2 * seconds / (each + np.sqrt(each**2 + 2 * growth * seconds)) if seconds > 0 else 0.0
        clock = self.clock[last] + (steps if self.live[last] else 0.0)
        spent = np.diff(self.at[: last + 1], append=to)
        live = self.live[: last + 1]
        used = float((spent * np.minimum(live, self.engines.number)).sum()), float((spent * live).sum())
        held = self.held
        began = held.live.copy()
        began[~held.live] = self.event[len(held) :] <= last
        stays = self.event[: len(held)] > last
        done = np.where(began, clock - self.begin, 0.0)
        begun = np.unique(held.group[began])
        self.held = Requests(held.group[stays], (held.left - done)[stays], (held.context + done)[stays], began[stays])
        self.now, self.last_read = to, max([self.last_read, *begun[-1:].tolist()])
        return begun, *used

    def push(self, seconds: float, *, recompute: bool) -> None:
        """Stand still for new weights, then read again what requests in flight have so far."""
        again = self.held.context[self.held.live].sum() if recompute else 0.0
        self.stall += seconds + again * self.engines.prefill / self.engines.number
