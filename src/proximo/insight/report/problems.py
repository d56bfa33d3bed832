"""Problems and answers: held-out problems before and after, and rollouts of the first and the last step."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proximo.insight.lens.steps import StoredStep
from proximo.insight.lens.turns import transcript
from proximo.insight.reading import Row, is_number, real
from proximo.rl.config import RunConfig
from proximo.rl.progress import prompt_text
from proximo.types import Problem


@dataclass(frozen=True)
class ShownCompletion:
    """A completion and its grade."""

    text: str
    outcome: float
    reward: float
    tokens: int
    """Number of sampled tokens."""
    truncated: bool
    parts: Mapping[str, float]
    note: str = ""
    """Row and state of a rollout; empty for a held-out answer."""


@dataclass(frozen=True)
class ShownProblem:
    """A problem, as far as the run's files and its task still have it."""

    id: str
    prompt: str
    wanted: str


@dataclass(frozen=True)
class Pair:
    """A held-out problem with its answers before and after training."""

    problem: ShownProblem
    before: ShownCompletion
    after: ShownCompletion


def held_out_pairs(result: Row | None, config: RunConfig | None) -> list[Pair]:
    """Pairs of a finished run that are scored both times."""
    examples = result.get("examples") if result else None
    pairs = [pair for pair in examples if _is_pair(pair)] if isinstance(examples, list) else []
    known = {} if config is None or not pairs else _problems(config, len(pairs))
    answered = [Pair(_problem(before, known), _completion(before), _completion(after)) for before, after in pairs]
    return [pair for pair in answered if math.isfinite(pair.before.outcome) and math.isfinite(pair.after.outcome)]


def _problems(config: RunConfig, count: int) -> dict[str, Problem]:
    """Problems by id, from the task if it still works: its file may have moved, or its package be missing."""
    try:
        size = config.task.size("held_out")
        # Twice as many, since some may have been skipped because they did not fit.
        wanted = range(min(2 * count, size or 2 * count))
        problems = [config.task.problem(index, "held_out", config.seed) for index in wanted]
    except (ValueError, OSError, ImportError):
        return {}
    return {problem.id: problem for problem in problems}


def _is_pair(pair: Any) -> bool:
    sides = pair if isinstance(pair, list) and len(pair) == 2 else [None]
    return all(isinstance(each, dict) and "text" in each and "problem" in each for each in sides)


def _problem(example: Mapping[str, Any], known: Mapping[str, Problem]) -> ShownProblem:
    name = str(example["problem"])
    problem = known.get(name)
    if problem is None:
        return ShownProblem(name, "", "")
    return ShownProblem(name, prompt_text(problem), "" if problem.answer is None else str(problem.answer))


def _completion(example: Mapping[str, Any]) -> ShownCompletion:
    parts, outcome = example.get("parts"), example.get("outcome")
    return ShownCompletion(
        text=str(example["text"]),
        outcome=real(outcome),
        reward=math.nan,
        tokens=_num_sampled(example.get("tokens"), example.get("sampled")),
        truncated=example.get("finish") == "length",
        parts=_numbers(parts) if isinstance(parts, dict) else {},
    )


def _num_sampled(tokens: Any, sampled: Any) -> int:
    """The length of a completion; a file without `sampled`, or with an empty one, says that all were."""
    counted = [each for each in sampled if each is True] if isinstance(sampled, list) and sampled else tokens
    return len(counted) if isinstance(counted, list) else 0


def extremes(
    step: StoredStep, count: int
) -> tuple[list[tuple[ShownProblem, ShownCompletion]], list[tuple[ShownProblem, ShownCompletion]]]:
    """The best and the worst completions of a step by reward, without overlap."""
    best = _ranked(step, -1)[:count]
    worst = [row for row in _ranked(step, 1) if row not in best][:count]
    return [_row(step, row) for row in best], [_row(step, row) for row in worst]


def _ranked(step: StoredStep, sign: int) -> list[int]:
    """Scored rows by sign · reward, lowest first. Among equal ones, one per problem before others of the same; equal
    answers to a problem are listed once."""
    keys, seen, times = [], set[tuple[str, str]](), Counter[tuple[str, float]]()
    for row, reward in enumerate(step.batch.rewards.tolist()):
        problem, answer = step.problem[row], _completion_text(step, row)
        if math.isfinite(reward) and (problem, answer) not in seen:
            seen.add((problem, answer))
            keys.append((sign * reward, times[problem, reward], row))
            times[problem, reward] += 1
    return [row for *_, row in sorted(keys)]


def _completion_text(step: StoredStep, row: int) -> str:
    """A completion; all turns of an episode."""
    return transcript(step.turns[row]) or step.text[row]


def _row(step: StoredStep, row: int) -> tuple[ShownProblem, ShownCompletion]:
    batch = step.batch
    completion = ShownCompletion(
        text=_completion_text(step, row),
        outcome=float(batch.outcome[row]),
        reward=float(batch.rewards[row]),
        tokens=int(batch.sampled[step.layout.of(row)].sum()),
        truncated=bool(batch.truncated[row]),
        parts=_numbers(step.parts[row]),
        note=f"row {row}, {step.state[row]}",
    )
    return ShownProblem(step.problem[row], step.prompt[row], step.answer[row]), completion


def _numbers(parts: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in parts.items() if is_number(value)}
