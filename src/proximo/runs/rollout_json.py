"""Rollouts as plain values for JSON, and back. Problems are not stored: the task gives them again, and their ids are
compared. Tensors are stored separately, under names that start with a prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from proximo.runs.records import Active, Answered, Collected, DataCursor
from proximo.samplers.in_progress import Begun
from proximo.tasks import Split, Task
from proximo.types import Completion, Grade, Group, Problem, Rollout, Turn


@dataclass(frozen=True)
class ProblemLookup:
    """Gives a stored rollout's problem; ValueError where it is no longer the same."""

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
    values = {name: value for name, value in vars(completion).items() if name not in ("routes", "prompt_routes")}
    values["turns"] = [asdict(turn) for turn in completion.turns]  # not of all: it would copy each token for itself
    for name in ("versions", "turns"):
        if not values[name]:
            del values[name]
    steps = {"steps": grade.steps} if grade.steps else {}
    logged = {"logged": dict(grade.logged)} if grade.logged else {}
    return values | {"outcome": grade.outcome, "parts": dict(grade.parts), **steps, **logged}


def _read_rollout(values: Mapping[str, Any], **routes: Tensor | None) -> Rollout:
    completion = Completion(
        tokens=tuple(values["tokens"]),
        logprobs=tuple(values["logprobs"]),
        text=values["text"],
        finish=values["finish"],
        version=values["version"],
        entropies=tuple(values.get("entropies", ())),  # earlier versions did not keep them
        sampled=tuple(values.get("sampled", ())),  # earlier versions knew sampled tokens only
        versions=tuple(values.get("versions", ())),
        turns=tuple(Turn(**each) for each in values.get("turns", ())),
        **routes,
    )
    steps = tuple((end, reward) for end, reward in values.get("steps", ()))
    grade = Grade(values["outcome"], values["parts"], steps=steps, logged=values.get("logged", {}))
    return Rollout(completion, grade, values.get("sample"))


def read_answers(answers: Sequence[Mapping[str, Any]], task: Task, seed: int) -> list[Answered]:
    """An evaluation's answers from the plain values of `plain_answer`."""
    return [_read_answer(index, each, ProblemLookup(task, seed)) for index, each in enumerate(answers)]


def plain_answer(answered: Answered) -> dict[str, Any]:
    return {"problem": answered.problem.id, **_rollout(answered.completion, answered.grade)}


def _read_answer(index: int, values: Mapping[str, Any], lookup: ProblemLookup) -> Answered:
    rollout = _read_rollout(values)
    return Answered(lookup(index, "held_out", values["problem"]), rollout.completion, rollout.grade)


def plain_group(group: Group, routes: dict[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """Plain values of a group; its routes, if it has any, are added to `routes`."""
    for number, rollout in enumerate(group.rollouts):
        for name in ("routes", "prompt_routes"):
            if (tensor := getattr(rollout.completion, name)) is not None:
                routes[f"{prefix}{group.ordinal}.{number}.{name}"] = tensor
    return {
        "ordinal": group.ordinal,
        "problem": group.problem.id,
        "prompt_tokens": list(group.prompt_tokens),
        "rollouts": [
            _rollout(each.completion, each.grade) | ({} if each.sample is None else {"sample": each.sample})
            for each in group.rollouts
        ],
    }


def read_group(
    values: Mapping[str, Any], lookup: ProblemLookup, routes: Mapping[str, Tensor], prefix: str = ""
) -> Group:
    ordinal = values["ordinal"]
    rollouts = [
        _read_rollout(
            each,
            routes=routes.get(f"{prefix}{ordinal}.{number}.routes"),
            prompt_routes=routes.get(f"{prefix}{ordinal}.{number}.prompt_routes"),
        )
        for number, each in enumerate(values["rollouts"])
    ]
    problem = lookup(ordinal, "train", values["problem"])
    return Group(problem, tuple(values["prompt_tokens"]), tuple(rollouts), ordinal=ordinal)


def plain_collected(collected: Collected, routes: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """Plain values of a step's rollouts. A prompt that was sampled again is among the dropped groups and the others,
    so that each list has a prefix of its own."""
    lists = {"groups": collected.groups, "dropped": collected.dropped, "carried": collected.cursor.carried}
    return {
        name: [plain_group(each, routes, f"{prefix}{name}.{index}.") for index, each in enumerate(groups)]
        for name, groups in lists.items()
    } | {
        "next_problem": collected.cursor.next_problem,
        "rates": dict(collected.cursor.rates),
        "kept_share": collected.cursor.kept_share,
        "unneeded": collected.unneeded,
        "passed_over": [[ordinal, problem.id] for ordinal, problem in collected.passed_over],
        "rounds": collected.rounds,
        "sampled_tokens": collected.sampled_tokens,
    }


def read_collected(
    values: Mapping[str, Any], lookup: ProblemLookup, routes: Mapping[str, Tensor], prefix: str
) -> Collected:
    """A step's rollouts from the plain values of `plain_collected`."""
    groups, dropped, carried = (
        tuple(read_group(each, lookup, routes, f"{prefix}{name}.{index}.") for index, each in enumerate(values[name]))
        for name in ("groups", "dropped", "carried")
    )
    return Collected(
        groups=groups,
        dropped=dropped,
        cursor=DataCursor(values["next_problem"], carried, values["rates"], values.get("kept_share", 1.0)),
        unneeded=values.get("unneeded", 0),
        passed_over=tuple((ordinal, lookup(ordinal, "train", known)) for ordinal, known in values["passed_over"]),
        rounds=values["rounds"],
        sampled_tokens=values["sampled_tokens"],
    )


def plain_active(active: Active, routes: dict[str, Tensor]) -> dict[str, Any]:
    """Plain values of a group in flight."""
    group = None if active.group is None else plain_group(active.group, routes)
    values = {name: getattr(active, name) for name in ("ordinal", "step", "version", "passed", "is_noted")}
    begun = [dict(vars(each)) for each in active.begun]
    return values | {"problem": active.problem.id, "group": group, **({"begun": begun} if begun else {})}


def read_active(values: Mapping[str, Any], lookup: ProblemLookup, routes: Mapping[str, Tensor]) -> Active:
    """A group in flight from the plain values of `plain_active`."""
    problem = lookup(values["ordinal"], "train", values["problem"])
    group = None if values["group"] is None else read_group(values["group"], lookup, routes)
    numbers = {name: values[name] for name in ("ordinal", "step", "version", "passed", "is_noted")}
    begun = tuple(_read_begun(each) for each in values.get("begun", ()))  # earlier versions sampled them again
    return Active(**numbers, problem=problem, group=group, begun=begun)


def _read_begun(values: Mapping[str, Any]) -> Begun:
    lists = {name: tuple(values[name]) for name in ("tokens", "logprobs", "versions")}
    return Begun(**{**values, **lists})
