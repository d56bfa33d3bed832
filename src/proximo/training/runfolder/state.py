"""The state of a run between two steps, and how it is stored: numbers and texts as JSON, tensors as safetensors.

The JSON is Python's, which has NaN. Problems are not stored: the task gives them again, and their ids are compared.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from proximo.samplers import Snapshot
from proximo.tasks import Split, Task
from proximo.training.records import Answered, DataCursor, Evaluation
from proximo.types import Completion, Grade, Group, Problem, Rollout

FORMAT = 2
"""Format of a checkpoint's state. 1 numbered its tensors, and is still read."""
RUN_STATE, OLD_RUN_STATE = "run_state.json", "standing.json"


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best result on held-out problems."""

    step: int
    value: float
    """Its evaluation.metric."""


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
    generated: int = 0
    """Number of tokens sampled for training."""
    evaluated: bool = True
    """Whether the evaluation after the last step, if one was due, is done."""
    best: Best | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of metrics and ledger in bytes."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """State of the run's parts, by name, as plain values."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """States of random number generators."""
    snapshots: Sequence[Snapshot] = ()
    """Older weights for a sampler that lags; references, saved in a separate file."""
    seconds: float = 0.0
    """Time spent so far; the only field that differs between runs with the same seed."""
    run: str = ""
    """Identity of the run."""


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
    facts = {
        "format": FORMAT,
        "run": state.run,
        "step": state.step,
        "before": asdict(state.before),
        "answers": [plain_answer(each) for each in state.answers],
        "next_problem": state.cursor.next_problem,
        "carried": [_group(each, routes) for each in state.cursor.carried],
        "rates": dict(state.cursor.rates),
        "generated": state.generated,
        "evaluated": state.evaluated,
        "best": None if state.best is None else asdict(state.best),
        "sizes": dict(state.sizes),
        "parts": dict(state.parts),
        "seconds": state.seconds,
    }
    (folder / RUN_STATE).write_text(json.dumps(facts) + "\n")
    write_tensors(folder / "random.safetensors", state.tensors)
    write_tensors(folder / "carried.safetensors", routes)


def read_run_state(folder: Path, task: Task, seed: int) -> RunState:
    facts = read_facts(folder)
    if facts["format"] not in (1, FORMAT):
        raise ValueError(
            f"{folder} has the format {facts['format']}, this version reads 1 and {FORMAT}: use the other version"
        )
    asked = _Asked(task, seed)
    routes = read_tensors(folder / "carried.safetensors")
    groups = tuple(_read_group(each, asked, routes) for each in facts["carried"])
    return RunState(
        step=facts["step"],
        before=Evaluation(**facts["before"]),
        answers=read_answers(facts["answers"], task, seed),
        cursor=DataCursor(facts["next_problem"], groups, facts.get("rates", {})),  # earlier versions had none
        generated=facts["generated"],
        evaluated=facts["evaluated"],
        best=None if facts["best"] is None else Best(*facts["best"].values()),  # earlier versions: step and outcome
        sizes=facts["sizes"],
        parts=facts["parts"],
        tensors=read_tensors(folder / "random.safetensors"),
        seconds=facts["seconds"],
        run=facts["run"],
    )


def read_facts(folder: Path) -> dict[str, Any]:
    """A checkpoint's plain values; also reads the file name that earlier versions used."""
    file = folder / RUN_STATE
    return json.loads((file if file.exists() else folder / OLD_RUN_STATE).read_text())


def read_origin(folder: Path) -> tuple[str, dict[str, int]]:
    """Identity of the run that a checkpoint belongs to, and the recorded sizes of metrics and ledger."""
    facts = read_facts(folder)
    return facts["run"], facts["sizes"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, if there are any. They are copied, since safetensors refuses tensors that share memory."""
    if tensors:
        save_file({name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.exists() else {}


# Rollouts


@dataclass(frozen=True)
class _Asked:
    task: Task
    seed: int

    def __call__(self, index: int, split: Split, known: str) -> Problem:
        problem = self.task.problem(index, split, self.seed)
        if problem.id != known:
            raise ValueError(
                f"the task's problem {index} ({split}) was {known!r} when the run was saved and is {problem.id!r} now: "
                "its data has changed; restore the old data, or start a new run"
            )
        return problem


def _rollout(completion: Completion, grade: Grade) -> dict[str, Any]:
    facts = asdict(replace(completion, routes=None, prompt_routes=None))
    del facts["routes"], facts["prompt_routes"]
    return facts | {"outcome": grade.outcome, "parts": dict(grade.parts)}


def _read_rollout(facts: Mapping[str, Any], **routes: Tensor | None) -> Rollout:
    completion = Completion(
        tokens=tuple(facts["tokens"]),
        logprobs=tuple(facts["logprobs"]),
        text=facts["text"],
        finish=facts["finish"],
        version=facts["version"],
        entropies=tuple(facts.get("entropies", ())),  # earlier versions did not keep them
        sampled=tuple(facts.get("sampled", ())),  # earlier versions knew sampled tokens only
        **routes,
    )
    return Rollout(completion, Grade(facts["outcome"], facts["parts"]))


def read_answers(facts: Sequence[Mapping[str, Any]], task: Task, seed: int) -> list[Answered]:
    """An evaluation's answers from the plain values of `plain_answer`."""
    return [_read_answer(index, each, _Asked(task, seed)) for index, each in enumerate(facts)]


def plain_answer(answered: Answered) -> dict[str, Any]:
    return {"problem": answered.problem.id, **_rollout(answered.completion, answered.grade)}


def _read_answer(index: int, facts: Mapping[str, Any], asked: _Asked) -> Answered:
    rollout = _read_rollout(facts)
    return Answered(asked(index, "held_out", facts["problem"]), rollout.completion, rollout.grade)


def _group(group: Group, routes: dict[str, Tensor]) -> dict[str, Any]:
    for number, rollout in enumerate(group.rollouts):
        for name in ("routes", "prompt_routes"):
            if (tensor := getattr(rollout.completion, name)) is not None:
                routes[f"{group.ordinal}.{number}.{name}"] = tensor
    return {
        "ordinal": group.ordinal,
        "problem": group.problem.id,
        "prompt_tokens": list(group.prompt_tokens),
        "rollouts": [_rollout(each.completion, each.grade) for each in group.rollouts],
    }


def _read_group(facts: Mapping[str, Any], asked: _Asked, routes: Mapping[str, Tensor]) -> Group:
    ordinal = facts["ordinal"]
    rollouts = [
        _read_rollout(
            each,
            routes=routes.get(f"{ordinal}.{number}.routes"),
            prompt_routes=routes.get(f"{ordinal}.{number}.prompt_routes"),
        )
        for number, each in enumerate(facts["rollouts"])
    ]
    problem = asked(ordinal, "train", facts["problem"])
    return Group(problem, tuple(facts["prompt_tokens"]), tuple(rollouts), ordinal=ordinal)
