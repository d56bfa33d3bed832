"""The evaluation of one model, with every completion, and its difference from another model's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from proximo.api.evaluation.estimates import curve, majority, pass_at_k
from proximo.insight.compare.paired import Difference, answer_difference
from proximo.losses.intervals import half_width
from proximo.rewards.grading import grading
from proximo.rl.evaluate import Answers, summarised
from proximo.rl.progress import prompt_text
from proximo.runs.records import Evaluation
from proximo.system.lines import plain
from proximo.tasks.protocol import Task, final_answer, final_answers
from proximo.types import Problem, Rollout


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, with half the width of its 95 % interval (Student's t; NaN for fewer than two problems)."""

    mean: float
    half_width: float


@dataclass(frozen=True)
class ModelResult:
    """One model's graded completions."""

    model: str
    """Name that tables and files show."""
    answers: Answers
    task: Task
    """The task that graded them."""

    @cached_property
    def evaluation(self) -> Evaluation:
        return summarised(self.answers)

    @cached_property
    def pass_at(self) -> dict[int, Estimate]:
        """pass@k for several k, by the unbiased estimator. A problem with fewer scored completions than k counts with
        those; one without any does not count."""
        return {
            k: _estimate([pass_at_k(len(known), sum(known), min(k, len(known))) for known in self._known])
            for k in (curve(self.evaluation.k) if self.answers.sampled else [])
        }

    @cached_property
    def majority(self) -> Estimate | None:
        """maj@k; None where the task cannot compare answers or nothing was sampled."""
        if not any(answer is not None for votes, _ in self._votes for answer in votes):
            return None
        return _estimate([majority(votes, correct) for votes, correct in self._votes])

    @cached_property
    def _known(self) -> list[list[bool]]:
        """Correctness of the scored completions of each problem, without problems that have none."""
        outcomes = ([rollout.grade.outcome for rollout in siblings] for siblings in self.answers.sampled)
        known = ([outcome >= 1 for outcome in each if not math.isnan(outcome)] for each in outcomes)
        return [each for each in known if each]

    @cached_property
    def _votes(self) -> list[tuple[list[str | None], list[bool]]]:
        """Answers of each problem's scored completions, and whether they are correct."""
        rows = []
        with grading():  # so that all answers are compared by one process
            for siblings in self.answers.sampled:
                scored = [rollout for rollout in siblings if not math.isnan(rollout.grade.outcome)]
                if scored:
                    votes = final_answers(self.task, [rollout.completion for rollout in scored])
                    rows.append((votes, [rollout.grade.outcome >= 1 for rollout in scored]))
        return rows

    def difference(self, first: "ModelResult") -> Difference:
        """Difference of the greedy task scores from another model's, paired by problem."""
        return answer_difference(self.model, "outcome", {0: self._outcomes()}, {0: first._outcomes()})

    def _outcomes(self) -> dict[str, float]:
        pairs = zip(self.answers.problems, self.answers.greedy, strict=True)
        return {
            problem.id: rollout.grade.outcome for problem, rollout in pairs if not math.isnan(rollout.grade.outcome)
        }

    def to_dict(self, first: "ModelResult | None" = None) -> dict[str, Any]:
        """The numbers as plain values; with `first`, also the difference from it."""
        values: dict[str, Any] = {"model": self.model, **self.evaluation.floats()}
        for k, estimate in self.pass_at.items():
            values |= {f"held_out/pass@{k}": estimate.mean, f"held_out/pass@{k}_half_width": estimate.half_width}
        if self.majority is not None:
            name = f"held_out/maj@{self.evaluation.k}"
            values |= {name: self.majority.mean, f"{name}_half_width": self.majority.half_width}
        if first is not None:
            difference = self.difference(first)
            low, high = difference.interval or (None, None)
            values |= {"difference": difference.difference, "difference_low": low, "difference_high": high}
            values |= {"better": difference.wins, "worse": difference.losses, "verdict": difference.verdict}
        return plain(values)

    def rows(self) -> list[dict[str, Any]]:
        """A row for every completion: the greedy one of each problem first, then those that were sampled."""
        drawn = self.answers.sampled or [()] * len(self.answers.problems)
        rows = []
        for problem, greedy, siblings in zip(self.answers.problems, self.answers.greedy, drawn, strict=True):
            rows.append(self._row(problem, greedy, None))
            rows += [self._row(problem, rollout, number) for number, rollout in enumerate(siblings)]
        return rows

    def _row(self, problem: Problem, rollout: Rollout, sample: int | None) -> dict[str, Any]:
        completion, grade = rollout.completion, rollout.grade
        return {
            "model": self.model,
            "problem": problem.id,
            "prompt": prompt_text(problem),
            "reference": None if problem.answer is None else str(problem.answer),
            "kind": "greedy" if sample is None else "sampled",
            "sample": 0 if sample is None else sample,
            "completion": completion.text,
            "answer": final_answer(self.task, completion),
            "outcome": _known(grade.outcome),
            "reward": _known(grade.reward),
            "finish": completion.finish,
            "tokens": completion.num_sampled,
        }


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values) if values else math.nan, half_width(list(values)))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
