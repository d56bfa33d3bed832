"""The tables, each with rows for a CPU and rows for a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from proximo_lab.bench.own import OwnRow
from proximo_lab.bench.report import Row
from proximo_lab.bench.session import Session
from proximo_lab.bench.tables import growth, memory, rollout, start, step, train


@runtime_checkable
class Line(Protocol):
    """A row to measure."""

    @property
    def name(self) -> str: ...

    def run(self, session: Session) -> list[Row]: ...


@dataclass(frozen=True)
class BenchTable:
    name: str
    what: str
    cpu: Sequence[Line]
    gpu: Sequence[Line]
    cpu_without: Sequence[Line] = ()
    gpu_without: Sequence[Line] = ()
    """Rows with our techniques switched off one by one."""
    own_row: Callable[[OwnRow], Line] | None = None
    """The row of a workload of the user's own."""
    absolute: bool = False
    """True if seconds are printed for a CPU too."""

    def lines(self, session: Session) -> list[Line]:
        """The rows for this device, or those requested by name."""
        options = session.options
        if options.own is not None:
            if self.own_row is None:
                raise ValueError(
                    f"--shape: table {self.name} takes no row of your own; rollout, train, step and start do"
                )
            return [self.own_row(options.own)]
        cpu, gpu = (self.cpu_without, self.gpu_without) if options.ablate else (self.cpu, self.gpu)
        here = gpu if session.on_gpu else cpu
        if not here:
            raise ValueError(
                f"--ablate: table {self.name} has nothing to switch off here; there is train, and on a GPU rollout"
            )
        if not options.only:
            return list(here)
        # If both devices have a row of that name, this device's is used.
        known = {line.name: line for line in (*cpu, *gpu, *here)}
        missing = [name for name in options.only if name not in known]
        if missing:
            raise ValueError(f"--only {missing[0]}: there is no such row; there are {', '.join(known)}")
        return [known[name] for name in options.only]


TABLES = (
    BenchTable(
        "rollout",
        "sampling, compared with TRL's generate and the machine's limit",
        rollout.CPU,
        rollout.GPU,
        gpu_without=rollout.GPU_WITHOUT,
        own_row=lambda row: rollout.Beside(row.workload()),
    ),
    BenchTable(
        "train",
        "the training phase on fixed completions",
        train.CPU,
        train.GPU,
        cpu_without=train.CPU_WITHOUT,
        gpu_without=train.GPU_WITHOUT,
        own_row=lambda row: train.Beside(row.workload()),
    ),
    BenchTable(
        "step",
        "a whole step: sample, grade, learn",
        step.CPU,
        step.GPU,
        own_row=lambda row: step.Beside(row.workload()),
    ),
    BenchTable("memory", "memory of the log-prob phase, and a step's peaks", memory.CPU, memory.GPU),
    BenchTable(
        "growth", "growth of training time with group size and prompt length, as exponents", growth.CPU, growth.GPU
    ),
    BenchTable(
        "start",
        "seconds from the command to the first update, with an empty and with a filled compile cache",
        start.CPU,
        start.GPU,
        own_row=start.Start,
        absolute=True,
    ),
)
