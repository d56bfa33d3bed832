"""Held-out accuracy, with a confidence interval."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from proximo.environments import Ask, Environment, Question, SingleTurn, play
from proximo.maths.intervals import half_width
from proximo.models import problem_tokens
from proximo.samplers import Sampler, SamplingOptions
from proximo.tasks import Task
from proximo.training.config import EvaluationOptions
from proximo.training.records import Answered, Evaluation
from proximo.training.rl.grading import graded
from proximo.types import Problem, Request, Rollout

SINGLE_TURN = SingleTurn()


def evaluate(
    task: Task,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    seed: int,
    *,
    environment: Environment = SINGLE_TURN,
    version: int = 0,
) -> tuple[Evaluation, list[Answered]]:
    """Greedy accuracy and reward on the first held-out problems, and mean@k and pass@k if requested.

    `version` is the number of updates that the sampled weights have seen.
    """
    # Step −1 belongs to no training step, so evaluation shares no random number with it.
    ask = Ask(sampler, tokenizer, sampling, seed=seed, step=-1, version=version)
    size = task.size("held_out")
    if size == 0:
        raise ValueError("task.held_out leaves no problem to evaluate on: keep some")
    # Each problem counts once, even if more are requested than there are.
    number = options.problems if size is None else min(options.problems, size)
    problems = [task.problem(index, "held_out", seed) for index in range(number)]
    greedy = _answers(task, environment, replace(ask, options=replace(sampling, temperature=0.0)), problems, 1)
    answered = [
        Answered(problem, said.completion, said.grade) for problem, (said,) in zip(problems, greedy, strict=True)
    ]
    sources = dict.fromkeys(problem.source for problem in problems)
    result = Evaluation(
        **_shares(answered),
        reward=known_mean(answer.grade.reward for answer in answered),
        parts={
            name: known_mean(answer.grade.parts.get(name, math.nan) for answer in answered)
            for name in dict.fromkeys(name for answer in answered for name in answer.grade.parts)
        },
        sources={
            name: _shares([answer for answer in answered if answer.problem.source == name])
            for name in sources
            if len(sources) > 1
        },
    )
    if options.samples:
        result = _with_samples(result, _answers(task, environment, ask, problems, options.samples), options.samples)
    return result, answered


def _shares(answered: Sequence[Answered]) -> dict[str, Any]:
    """Accuracy with its interval, mean outcome and counts."""
    scored = [answer.outcome for answer in answered if not math.isnan(answer.outcome)]
    right = sum(outcome >= 1 for outcome in scored)
    low, high = wilson(right, len(scored))
    return {
        "accuracy": right / len(scored) if scored else math.nan,
        "low": low,
        "high": high,
        "problems": len(answered),
        "unscored": len(answered) - len(scored),
        "outcome": known_mean(scored),
    }


def _with_samples(result: Evaluation, drawn: list[tuple[Rollout, ...]], samples: int) -> Evaluation:
    """Add mean@k and pass@k of completions sampled at the sampling temperature."""
    outcomes = [[rollout.grade.outcome for rollout in siblings] for siblings in drawn]
    known = [[outcome >= 1 for outcome in siblings if not math.isnan(outcome)] for siblings in outcomes]
    shares = [share for share in known if share]
    means = [sum(share) / len(share) for share in shares]
    solved = sum(map(any, shares))
    pass_low, pass_high = wilson(solved, len(shares))
    return replace(
        result,
        k=samples,
        mean_at_k=known_mean(means),
        mean_half_width=half_width(means),
        pass_at_k=solved / len(shares) if shares else math.nan,
        pass_low=pass_low,
        pass_high=pass_high,
    )


def _answers(
    task: Task, environment: Environment, ask: Ask, problems: list[Problem], num_samples: int
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
