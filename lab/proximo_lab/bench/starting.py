"""python -m proximo_lab.bench.starting: the process whose start is measured, from the command to the first update.

It does what `proximo train` does, without the command line's dependencies, and stops after the first step.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from proximo.config import toml
from proximo.models import pick_device
from proximo.rl import train as loop
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.run import Run
from proximo.runs.records import Collected, Evaluation
from proximo.runs.session import open_session
from proximo.samplers.sampler import SamplingOptions
from proximo.system.machine import beside_gpu, machine_for
from proximo.tasks import Split
from proximo.types import Completion, Grade, Problem
from proximo_lab.bench.own import OwnRow
from proximo_lab.bench.sides.ours import ALGORITHM, LEARNING_RATE, FixedRewards

PHASES = ("imports", "load", "evaluation", "rollout", "update")
"""Phases until the first update is done. The evaluation before training is of one problem: on a GPU it compiles and
captures most of what the rollout needs."""
TOTAL = "first update"
REWARDS = 97
"""Number of rewards."""


@dataclass(frozen=True)
class RowTask:
    """The prompts of a row, as a task that a run folder can name; rewards differ from completion to completion."""

    row: OwnRow
    while_sampling = True

    @cached_property
    def fixed(self) -> FixedRewards:
        return FixedRewards(self.row.workload())

    def size(self, split: Split) -> int | None:
        return self.fixed.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self.fixed.problem(index, split, seed)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        return [Grade(sum(completion.tokens) % REWARDS / REWARDS) for completion in completions]

    def reference(self, problem: Problem) -> str | None:
        return None


class FirstStep(SystemExit):
    """Ends the process after its first step."""


@dataclass
class PhaseTimes:
    """Seconds of the phases, from the progress of a run."""

    last: float
    """Time at which the phase before ended, as time.time() says it."""
    seconds: dict[str, float]

    def ended(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase], self.last = now - self.last, now

    def start(self, steps: int, before: Evaluation) -> None:
        self.ended("evaluation")

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        self.seconds["rollout"] = seconds["rollout"] + seconds.get("grade", 0.0)
        self.seconds["update"] = seconds["assemble"] + seconds["update"]
        print(json.dumps(self.seconds | {TOTAL: sum(self.seconds.values())}))
        raise FirstStep(0)

    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...
    def warned(self, step: int, message: str) -> None: ...
    def stop(self) -> None: ...


def main(arguments: Sequence[str]) -> None:
    """`arguments`: when the command was given, the row as JSON, the model's folder, the run's folder, the device."""
    given, row, model, folder, device = arguments
    disable_progress_bar()
    phases = PhaseTimes(float(given), {})
    phases.ended("imports")
    task = RowTask(OwnRow(**json.loads(row)))
    workload = task.row.workload()
    config = RunConfig(
        algorithm=ALGORITHM,
        task=task,
        model=model,
        device=device,
        sampling=SamplingOptions(max_tokens=workload.limit),
        training=TrainingOptions(
            groups=workload.groups,
            group_size=workload.siblings,
            minibatches=1,
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
        ),
        evaluation=EvaluationOptions(problems=1),
        steps=2,
    )
    on_gpu = pick_device(device) != "cpu"
    (beside_gpu() if on_gpu else machine_for(workload.shape.body + workload.shape.head)).apply()
    with open_session(Path(folder), toml.dumps(config)) as attempt:
        run = Run(config, Path(folder), phases)
        phases.ended("load")
        loop.train(run, attempt)


if __name__ == "__main__":
    from proximo_lab.bench import starting  # so that the run's record names classes of this module, not of `__main__`

    starting.main(sys.argv[1:])
