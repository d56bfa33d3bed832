"""Work of ranks above 0: wait for an order of rank 0, do their part of it, and give back what they found."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from proximo.distributed.mesh import Mesh
from proximo.system.phases import phase
from proximo.system.timeline import Interval, Lanes

END = "end"
KINDS = {
    "old": "score",
    "reference": "score",
    "map_rows": "update",
    "step": "update",
    "refill": "push",
    "write": "save",
    "sample_training": "sample",
    "sample_evaluation": "sample",
}
"""Names of jobs on the time line of a step; other jobs are short, and left out."""


class Crew:
    """The ranks of a run. Rank 0 asks for a job by name, and every rank, rank 0 too, does its own part of it.

    Each rank adds the same jobs. An order and its answers are one collective each, so ranks cannot get out of step
    unless one of them fails, and then all of them end.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._jobs: dict[str, Callable[..., Any]] = {}
        self.uninterrupted: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Held on rank 0 while ranks work together: a signal must not end it in the middle of that."""
        self._is_working = False
        self.lanes = Lanes()
        """On rank 0: when each rank did what."""

    @property
    def size(self) -> int:
        return self.mesh.size

    def add(self, **jobs: Callable[..., Any]) -> None:
        """Jobs that rank 0 may ask for, by name."""
        self._jobs |= jobs

    def ask(self, job: str, parts: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Results of each rank, on rank 0. `parts` are each rank's arguments; None: there are none."""
        assert self.mesh.rank == 0, "only rank 0 gives orders"
        arguments = [()] * self.size if parts is None else parts
        with self.uninterrupted():
            self._is_working = True
            start = time.perf_counter()
            with phase("orders to ranks"):
                order = self.mesh.scatter([(job, each) for each in arguments])
            answers = self._done(order)
            self._is_working = False
        if job in KINDS:
            for rank, (seconds, _) in enumerate(answers):  # of its own clock: those of nodes differ
                self.lanes.add(Interval(f"rank {rank}", KINDS[job], start, start + seconds))
        return [result for _, result in answers]

    def tell(self, job: str, *arguments: Any) -> list[Any]:
        """Ask with equal arguments for every rank, on rank 0."""
        return self.ask(job, [arguments] * self.size)

    def follow(self) -> None:
        """Do what is asked until rank 0 ends the run, on ranks above 0."""
        while (order := self.mesh.scatter(None))[0] != END:
            self._done(order)

    def dismiss(self) -> None:
        """End the run, on rank 0. After a job that failed here, others may still be in it: they end when this
        process does."""
        if not self._is_working:
            self.mesh.scatter([(END, ())] * self.size)

    def _done(self, order: tuple[str, tuple[Any, ...]]) -> list[tuple[float, Any]]:
        """Seconds and result of each rank, on rank 0."""
        job, arguments = order
        start = time.perf_counter()
        result = self._jobs[job](*arguments)
        seconds = time.perf_counter() - start
        with phase("waiting for ranks"):
            return self.mesh.gather((seconds, result))
