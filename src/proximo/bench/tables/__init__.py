"""The tables there are, each a list of rows for a CPU and one for a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from proximo.bench.report import Row
from proximo.bench.session import Session
from proximo.bench.tables import growth, memory, rollout, step, train


@runtime_checkable
class Line(Protocol):
    """Something to be measured."""

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
    """With our techniques off one by one."""

    def lines(self, session: Session) -> list[Line]:
        """The rows of this device, or those that were asked for by name."""
        options = session.options
        cpu, gpu = (self.cpu_without, self.gpu_without) if options.ablate else (self.cpu, self.gpu)
        here = gpu if session.on_gpu else cpu
        if not here:
            raise ValueError(
                f"--ablate: table {self.name} has nothing to switch off here; there is train, and on a GPU rollout"
            )
        if not options.only:
            return list(here)
        # Those of this device win where both have a row of a name.
        known = {line.name: line for line in (*cpu, *gpu, *here)}
        missing = [name for name in options.only if name not in known]
        if missing:
            raise ValueError(f"--only {missing[0]}: there is no such row; there are {', '.join(known)}")
        return [known[name] for name in options.only]


TABLES = (
    BenchTable(
        "rollout",
        "sampling, beside TRL's generate and the machine's limit",
        rollout.CPU,
        rollout.GPU,
        gpu_without=rollout.GPU_WITHOUT,
    ),
    BenchTable(
        "train",
        "the training phase on fixed completions",
        train.CPU,
        train.GPU,
        cpu_without=train.CPU_WITHOUT,
        gpu_without=train.GPU_WITHOUT,
    ),
    BenchTable("step", "sample, grade, learn", step.CPU, step.GPU),
    BenchTable("memory", "the log-prob phase, and a step's peaks", memory.CPU, memory.GPU),
    BenchTable("growth", "training time by siblings and by prompt, as exponents", growth.CPU, growth.GPU),
)
