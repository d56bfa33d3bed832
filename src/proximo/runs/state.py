"""The state of a run between two steps, and how it is stored: numbers and texts as JSON, tensors as safetensors.

The JSON is Python's, which has NaN.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from proximo.learner.named_tensors import read_tensors, write_tensors
from proximo.runs.files import NUMBERS
from proximo.runs.records import Active, Answered, Collected, DataCursor, Evaluation, Pending
from proximo.runs.rollout_json import (
    ProblemLookup,
    plain_active,
    plain_answer,
    plain_collected,
    plain_group,
    read_active,
    read_answers,
    read_collected,
    read_group,
)
from proximo.system.opening import as_written, read_json, write_new
from proximo.system.safe_text import quoted
from proximo.tasks import Task
from proximo.types import Group

FORMAT = 2
"""Format of a checkpoint's state. 1 numbered its tensors, and is still read."""
RUN_STATE, OLD_RUN_STATE = "run_state.json", "standing.json"
MAX_STATE = 4 << 30
"""Maximum bytes of such a file: rollouts of later steps have all their tokens in it."""
AHEAD, ACTIVE = "ahead", "active"
"""Names of the files with rollouts of later steps, and with groups in flight; which of those are finished when a
checkpoint is written differs between equal runs, so they have files of their own."""


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best result on held-out problems."""

    step: int
    value: float
    """Value of the evaluation.metric."""
    evaluation: Evaluation | None = None
    """Evaluation at that step; None, like no answers, from a checkpoint of an earlier version."""
    answers: Sequence[Answered] = ()


@dataclass(frozen=True)
class RunState:
    """State of a run between two steps: everything except weights and optimizer moments."""

    step: int
    """Number of steps done, which is also the index of the next step."""
    before: Evaluation
    """Evaluation before training."""
    answers: Sequence[Answered]
    """Answers in that evaluation."""
    cursor: DataCursor = field(default_factory=DataCursor)
    pending: Pending = field(default_factory=Pending)
    generated: int = 0
    """Number of tokens sampled for training."""
    evaluated: bool = True
    """False while an evaluation that is due after the last step is not done."""
    best: Best | None = None
    former_best: Best | None = None
    """The best before the last evaluation of this process; not stored."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of metrics and ledger in bytes."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """State of the run's parts, by name, as plain values."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """States of random number generators."""
    seconds: float = 0.0
    """Time spent so far; the only field that differs between runs with the same seed."""
    run: str = ""
    """Identity of the run."""

    def after_step(self, collected: Collected) -> "RunState":
        """The state one step later."""
        return replace(
            self,
            step=self.step + 1,
            cursor=collected.cursor,
            generated=self.generated + collected.sampled_tokens,
            evaluated=False,
        )

    def after_evaluation(self, evaluation: Evaluation, answers: Sequence[Answered], metric: str) -> "RunState":
        """The state after an evaluation between two steps; `metric` decides whether it is the best."""
        best, value = self.best, evaluation.value(metric)
        if best is None or value > best.value:  # NaN is not better than anything
            best = best if math.isnan(value) else Best(self.step, value, evaluation, answers)
        return replace(self, evaluated=True, best=best, former_best=self.best)

    def best_before(self, metric: str) -> Best:
        """The best evaluation so far; step 0 is before training."""
        start = Best(0, self.before.value(metric), self.before, self.answers)
        return start if self.best is None or start.value > self.best.value else self.best


# Files


@contextmanager
def naming_io(path: Path) -> Iterator[None]:
    """Turn system errors of Rust libraries, which raise their own types, into OSError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or re.search(r"\(os error \d+\)", str(error)) is None:
            raise
        raise OSError(f"{path}: {error}") from error


def write_run_state(folder: Path, state: RunState) -> None:
    routes: dict[str, Tensor] = {}
    values = {
        "format": FORMAT,
        "run": state.run,
        "step": state.step,
        "before": asdict(state.before),
        "answers": [plain_answer(each) for each in state.answers],
        "next_problem": state.cursor.next_problem,
        "carried": [plain_group(each, routes) for each in state.cursor.carried],
        "rates": dict(state.cursor.rates),
        "kept_share": state.cursor.kept_share,
        "generated": state.generated,
        "evaluated": state.evaluated,
        "best": state.best and {"step": state.best.step, "value": state.best.value},
        "best_evaluation": state.best and _plain_evaluation(state.best),
        "sizes": dict(state.sizes),
        "parts": dict(state.parts),
        "seconds": state.seconds,
    }
    write_json(folder / RUN_STATE, values)
    write_tensors(folder / "random.safetensors", state.tensors)
    write_tensors(folder / "carried.safetensors", routes)
    if state.pending.ahead:
        routes = {}
        later = [plain_collected(each, routes, f"{number}.") for number, each in enumerate(state.pending.ahead)]
        write_json(folder / f"{AHEAD}.json", later)
        write_tensors(folder / f"{AHEAD}.safetensors", routes)
    if state.pending.active:
        routes = {}
        slots = [plain_active(each, routes) for each in state.pending.active]
        write_json(folder / f"{ACTIVE}.json", slots)
        write_tensors(folder / f"{ACTIVE}.safetensors", routes)


def read_run_state(folder: Path, task: Task, seed: int) -> RunState:
    values = read_values(folder)
    if values.get("format") not in (1, FORMAT):
        raise ValueError(
            f"{folder} has the format {quoted(values.get('format'))}, this version reads 1 and {FORMAT}: use the other "
            "version"
        )
    with as_written(folder / RUN_STATE):
        return _run_state(folder, values, task, seed)


def _cursor(values: Mapping[str, Any], carried: tuple[Group, ...]) -> DataCursor:
    """The place in the data; earlier versions had no rates and no share."""
    return DataCursor(values["next_problem"], carried, values.get("rates", {}), values.get("kept_share", 1.0))


def _run_state(folder: Path, values: Mapping[str, Any], task: Task, seed: int) -> RunState:
    lookup = ProblemLookup(task, seed)
    routes = read_tensors(folder / "carried.safetensors")
    groups = tuple(read_group(each, lookup, routes) for each in values["carried"])
    return RunState(
        step=values["step"],
        before=Evaluation(**values["before"]),
        answers=read_answers(values["answers"], task, seed),
        cursor=_cursor(values, groups),
        pending=Pending(_read_ahead(folder, lookup), _read_active(folder, lookup)),
        generated=values["generated"],
        evaluated=values["evaluated"],
        best=_read_best(values, task, seed),
        sizes=values["sizes"],
        parts=values["parts"],
        tensors=read_tensors(folder / "random.safetensors"),
        seconds=values["seconds"],
        run=values["run"],
    )


def _plain_evaluation(best: Best) -> dict[str, Any]:
    evaluation = None if best.evaluation is None else asdict(best.evaluation)
    return {"evaluation": evaluation, "answers": [plain_answer(each) for each in best.answers]}


def _read_best(stored: Mapping[str, Any], task: Task, seed: int) -> Best | None:
    if stored["best"] is None:
        return None
    known = stored.get("best_evaluation") or {"evaluation": None, "answers": ()}  # earlier versions had none
    evaluation = known["evaluation"] and Evaluation(**known["evaluation"])
    step, value = stored["best"].values()  # earlier versions: step and outcome
    return Best(step, value, evaluation, read_answers(known["answers"], task, seed))


def _read_ahead(folder: Path, lookup: ProblemLookup) -> list[Collected]:
    file = folder / f"{AHEAD}.json"
    stored = read_json(file, MAX_STATE) if file.exists() else []
    routes = read_tensors(folder / f"{AHEAD}.safetensors")
    return [read_collected(each, lookup, routes, f"{number}.") for number, each in enumerate(stored)]


def _read_active(folder: Path, lookup: ProblemLookup) -> list[Active]:
    file = folder / f"{ACTIVE}.json"
    stored = read_json(file, MAX_STATE) if file.exists() else []
    routes = read_tensors(folder / f"{ACTIVE}.safetensors")
    return [read_active(each, lookup, routes) for each in stored]


def write_json(path: Path, value: object) -> None:
    write_new(path, (json.dumps(value) + "\n").encode())


def read_values(folder: Path) -> dict[str, Any]:
    """A checkpoint's plain values; also reads the file name that earlier versions used. ValueError if they are not as
    they were written: of a stranger's run they may be anything."""
    file = folder / RUN_STATE
    values = read_json(file if file.exists() else folder / OLD_RUN_STATE, MAX_STATE)
    sizes = values.get("sizes", {}) if isinstance(values, dict) else None
    if not isinstance(sizes, dict) or not all(type(each) is int and each >= 0 for each in sizes.values()):
        raise ValueError(f"{file} is not as it was written: it has no sizes of logs")
    if others := sizes.keys() - set(NUMBERS):
        raise ValueError(f"{file} names {quoted(min(others))}, which is no log of a run: do not use this checkpoint")
    return values


def read_origin(folder: Path) -> tuple[str, dict[str, int]]:
    """Identity of the run that a checkpoint belongs to, and the recorded sizes of metrics and ledger."""
    values = read_values(folder)
    if not isinstance(run := values.get("run"), str) or "sizes" not in values:
        raise ValueError(f"{folder / RUN_STATE} does not say whose it is")
    step, named = values.get("step"), folder.parent.name.removeprefix("step-")
    if named.isdecimal() and step is not None and (type(step) is not int or step != int(named)):
        raise ValueError(f"{folder / RUN_STATE} is of step {quoted(step)}, and its folder of another")
    return run, values["sizes"]
