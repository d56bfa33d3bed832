"""A measurement in progress: its machine, its clock and its peers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from proximo.planning.roofline import DeviceLimits, machine_of
from proximo.planning.workloads import Workload
from proximo.system.machine import beside_gpu, machine_for
from proximo_lab.bench.memory import release
from proximo_lab.bench.options import VLLM, BenchOptions
from proximo_lab.bench.sides import trl
from proximo_lab.bench.sides.numerics import TOLERANCE, Agreement, Learned
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.sides.trl import Settings, Trl
from proximo_lab.bench.sides.vllm import Vllm
from proximo_lab.bench.timing import Clock, Phases, Say, Side, interleaved


@dataclass(frozen=True)
class Turn:
    """A side given by one function."""

    name: str
    turn: Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Failed:
    """A peer that failed."""

    name: str
    why: str


@dataclass(frozen=True)
class Session:
    options: BenchOptions
    device: str
    clock: Clock
    say: Say
    known: DeviceLimits | None = None
    """The machine's limits. None: measured on first use, which can take seconds."""

    @cached_property
    def machine(self) -> DeviceLimits:
        return self.known or machine_of(self.device)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def begin(self, side: Side) -> Mapping[str, float]:
        """Seconds of the first turn, in which things are compiled and captured."""
        self.say(f"  {side.name}: first turn")
        return side.turn()

    def measure(self, sides: Sequence[Side], *, begun: int = 0) -> list[Phases]:
        """Measure all sides. The last `begun` have had their first turn."""
        for side in sides[: len(sides) - begun]:
            self.begin(side)
        return interleaved(sides, steps=self.options.steps, warmup=self.options.warmup, say=self.say)

    def ours(self, workload: Workload, **changes: Any) -> Ours:
        """Our side; the machine is set up for the model as in a run, for the peers too."""
        budget, shape = self.options.token_budget, workload.shape
        if self.on_gpu:
            beside_gpu().apply()
        else:
            replace(machine_for(shape.body + shape.head), threads=self.options.threads).apply()
        return Ours(workload, self.device, self.clock, token_budget=budget, **changes)

    def settings(self, workload: Workload, *wanted: str) -> list[Settings]:
        """Settings of the requested peers that make sense here; none if TRL is not installed."""
        made = {"best": trl.best(workload), "default": trl.DEFAULT, "compiled": trl.compiled(workload)}
        if self.on_gpu:
            made["static"] = trl.static(workload)
        if not trl.is_there():
            return []
        if (rows := self.options.peer_rows) is not None:
            made = {name: each if each == trl.DEFAULT else replace(each, rows=rows) for name, each in made.items()}
        return [made[name] for name in wanted if name in made and name in self.options.peers]

    def opened(self, workload: Workload, settings: Settings, first: Callable[[Trl], object]) -> Trl | Failed:
        """The trainer after its first turn, with the largest micro-batch that memory allows."""
        while True:
            peer = Trl(workload, settings, device=self.device, clock=self.clock)
            try:
                first(peer)
                return peer
            except torch.OutOfMemoryError:
                in_rollout = peer.generating
            peer.close()
            release(self.device)
            if in_rollout or settings.rows == 1:
                return Failed(settings.name, f"out of memory in {'the rollout' if in_rollout else 'training'}")
            settings = replace(settings, rows=workload.even_part(settings.rows // 2))
            self.say(f"  {settings.name}: out of memory, now with {settings.rows} rows in a micro-batch")

    def engines(self, ours: Ours) -> list[Vllm]:
        """Peers that make rollouts alone, with the weights of `ours`."""
        wanted = VLLM in self.options.peers
        return [Vllm(ours, self.options.vllm_python, self.options.threads)] if wanted else []

    def agreement(self, ours: Learned, peer: Trl) -> Agreement:
        """Compare both sides after the same update."""
        tolerance = TOLERANCE[torch.bfloat16 if self.on_gpu else torch.float32]
        agreement = Agreement(ours, Learned(*peer.loss_and_norm(), scale=ours.scale), tolerance)
        self.say(f"  ours and {peer.settings.name}: {agreement}")
        return agreement


def seconds_of(phases: Phases) -> dict[str, list[float]]:
    return {name: list(times.seconds) for name, times in phases.items()}
