"""Held-out accuracy, with a confidence interval."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proximo.environments.kinds import Ask, Interaction, Question, SingleTurn, play
from proximo.losses.intervals import half_width
from proximo.models import problem_tokens
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.rl.config import EvaluationOptions
from proximo.rl.grading import graded
from proximo.runs.records import Answered, Evaluation
from proximo.samplers.sampler import Sampler, SamplingOptions
from proximo.tasks import Split, Task
from proximo.types import Grade, Problem, Request, Rollout

SINGLE_TURN = SingleTurn()


@dataclass(frozen=True)
class Answers:
    """Completions of held-out problems, graded."""

    problems: list[Problem]
    greedy: list[Rollout]
    """The greedy completion of each problem."""
    sampled: list[tuple[Rollout, ...]]
    """Completions of each problem at the sampling temperature; empty if none were requested."""


def evaluate(
    task: Task,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    seed: int,
    *,
    environment: Interaction = SINGLE_TURN,
    version: int = 0,
) -> tuple[Evaluation, list[Answered]]:
    """Greedy accuracy and reward on the first held-out problems, and mean@k and pass@k if requested.

    `version` is the number of updates that the sampled weights have seen.
    """
    outputs = answers(task, sampler, tokenizer, sampling, options, seed, environment=environment, version=version)
    answered = [
        Answered(problem, rollout.completion, rollout.grade)
        for problem, rollout in zip(outputs.problems, outputs.greedy, strict=True)
    ]
    return summarised(outputs), answered


def since_best(best: Sequence[Answered], now: Sequence[Answered]) -> dict[str, float]:
    """Metrics of an evaluation beside the best one before it: the change of the mean task score over the problems that
    both could score, and its standard error, which is smaller than that of two evaluations of different problems."""
    before = {answer.problem.id: answer.outcome for answer in best}
    changes = [answer.outcome - before[answer.problem.id] for answer in now if answer.problem.id in before]
    known = [change for change in changes if not math.isnan(change)]
    if len(known) < 2:
        return {}
    error = statistics.stdev(known) / math.sqrt(len(known))
    return {"held_out/since_best": math.fsum(known) / len(known), "held_out/since_best_error": error}


def answers(
    task: Task,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    seed: int,
    *,
    environment: Interaction = SINGLE_TURN,
    version: int = 0,
    split: Split = "held_out",
) -> Answers:
    """Sample and grade completions of the first problems of a split, as `evaluate` does."""
    # Step −1 belongs to no training step, so evaluation shares no random number with it.
    ask = Ask(sampler, tokenizer, sampling, seed=seed, step=-1, version=version)
    size = task.size(split)
    if size == 0:
        raise ValueError(f"task.{split} leaves no problem to evaluate on: keep some")
    # Each problem counts once, even if more are requested than there are.
    number = options.problems if size is None else min(options.problems, size)
    problems = [task.problem(index, split, seed) for index in range(number)]
    greedy = _answers(task, environment, replace(ask, options=replace(sampling, temperature=0.0)), problems, 1)
    sampled = _answers(task, environment, ask, problems, options.samples) if options.samples else []
    return Answers(problems, [rollout for (rollout,) in greedy], sampled)


def summarised(outputs: Answers) -> Evaluation:
    """Accuracy, rewards and intervals of graded completions."""
    grades = [rollout.grade for rollout in outputs.greedy]
    sources = [problem.source for problem in outputs.problems]
    names = dict.fromkeys(sources)
    outcomes = _scored(grades)
    result = Evaluation(
        **_shares(grades),
        outcome_half_width=None if set(outcomes) <= {0, 1} else half_width(outcomes),
        reward=known_mean(grade.reward for grade in grades),
        parts={
            name: known_mean(grade.parts.get(name, math.nan) for grade in grades)
            for name in dict.fromkeys(name for grade in grades for name in grade.parts)
        },
        sources={
            name: _shares([grade for grade, source in zip(grades, sources, strict=True) if source == name])
            for name in names
            if len(names) > 1
        },
    )
    return _with_samples(result, outputs.sampled) if outputs.sampled else result


def _scored(grades: Sequence[Grade]) -> list[float]:
    """The task scores that are known."""
    return [grade.outcome for grade in grades if not math.isnan(grade.outcome)]


def _shares(grades: Sequence[Grade]) -> dict[str, Any]:
    """Accuracy with its interval, mean task score and counts."""
    scored = _scored(grades)
    right = sum(outcome >= 1 for outcome in scored)
    low, high = wilson(right, len(scored))
    return {
        "accuracy": right / len(scored) if scored else math.nan,
        "low": low,
        "high": high,
        "problems": len(grades),
        "unscored": len(grades) - len(scored),
        "outcome": known_mean(scored),
    }


def _with_samples(result: Evaluation, drawn: list[tuple[Rollout, ...]]) -> Evaluation:
    """Add mean@k and pass@k of completions sampled at the sampling temperature."""
    outcomes = [[rollout.grade.outcome for rollout in siblings] for siblings in drawn]
    known = [[outcome >= 1 for outcome in siblings if not math.isnan(outcome)] for siblings in outcomes]
    shares = [share for share in known if share]
    means = [sum(share) / len(share) for share in shares]
    solved = sum(map(any, shares))
    pass_low, pass_high = wilson(solved, len(shares))
    return replace(
        result,
        k=len(drawn[0]),
        mean_at_k=known_mean(means),
        mean_half_width=half_width(means),
        pass_at_k=solved / len(shares) if shares else math.nan,
        pass_low=pass_low,
        pass_high=pass_high,
    )


def _answers(
    task: Task, environment: Interaction, ask: Ask, problems: list[Problem], num_samples: int
) -> list[tuple[Rollout, ...]]:
    """Sample and grade the completions of each problem."""
    questions = [
        Question(
            problem,
            Request(key=index, prompt_tokens=problem_tokens(ask.tokenizer, problem), num_samples=num_samples),
        )
        for index, problem in enumerate(problems)
    ]
    return graded(task, problems, play(environment, questions, ask)).rollouts


def known_mean(values: Iterable[float]) -> float:
    """Mean of the known values, without NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share: stays within 0 and 1, and is valid for few problems."""
    if total == 0:
        return 0.0, 1.0
    share = right / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)
