"""Progress output of a run."""

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from proximo.runs.pace import Pace
from proximo.runs.records import Collected, Evaluation
from proximo.system.safe_text import MAX_SHOWN, counted, visible
from proximo.types import Problem

BARS = "▁▂▃▄▅▆▇█"
MEASURED, PART = "user/", "rewards/"
"""Beginnings of the names of a user's own metrics, and of a reward's parts."""
NAMED, NAME = 3, 12
"""Metrics of these that are in a step's line, and characters of their names."""
ALL_KEPT = 0.9995
"""Share of the gradient that is shown as 100 %."""


@runtime_checkable
class Progress(Protocol):
    def start(self, steps: int, before: Evaluation) -> None: ...
    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...
    def warned(self, step: int, message: str) -> None: ...
    def stop(self) -> None: ...


class ProgressLines:
    """One line per step, for logs and pipes."""

    def __init__(self) -> None:
        self.steps, self._pace = 0, Pace()

    def start(self, steps: int, before: Evaluation) -> None:
        self.steps = steps
        self._pace.start(steps)
        if before.problems:
            self._say(f"held-out {measure(before)} before: {share(before)}")

    def stepped(
        self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], collected: Collected
    ) -> None:
        took, left = speed(seconds, collected), self._pace.left(step)
        self._say("  ".join(filter(None, [f"step {step}/{self.steps}", summary(metrics), took, left])))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._say(f"held-out {measure(evaluation)} after step {step}: {share(evaluation)}")

    def warned(self, step: int, message: str) -> None:
        self._say(f"warning at step {step}: {message}")

    def stop(self) -> None:
        """Do nothing: there is nothing to clean up."""

    def _say(self, line: str) -> None:
        with suppress(OSError):  # a closed pipe should not stop training
            print(visible(line, MAX_SHOWN), file=sys.stderr, flush=True)


def summary(metrics: Mapping[str, float]) -> str:
    """The most important metrics of a step in one line."""
    parts = [f"task score {metrics['outcome']:.3f}", *_named(metrics), f"length {metrics['length']:.1f}"]
    if "entropy" in metrics:
        parts.append(f"entropy {metrics['entropy']:.3f}")
    if "clip_low" in metrics:
        parts += [*_held_back(metrics), f"norm {metrics['gradient_norm']:.2f}"]
    if metrics["dead_groups"]:
        parts.append(f"no-signal groups {metrics['dead_groups']:.0%}")
    if "learning_rate" in metrics:
        parts.append(f"lr {metrics['learning_rate']:.3g}")
    return "  ".join(parts)


def _named(metrics: Mapping[str, float]) -> list[str]:
    """The first of the user's own metrics, and of the parts of a reward that has several."""
    measured = [name for name in metrics if name.startswith(MEASURED)]
    parts = [name for name in metrics if name.startswith(PART)]
    shown = [*measured, *(parts if len(parts) > 1 else [])][:NAMED]
    return [f"{_short(name.partition('/')[2])} {metrics[name]:.3g}" for name in shown]


def _short(name: str) -> str:
    """A name that a user's file gives, in few characters."""
    plain = visible(name).replace("\n", " ")
    return plain if len(plain) <= NAME else f"{plain[: NAME - 1]}…"


def _held_back(metrics: Mapping[str, float]) -> list[str]:
    """Share of the gradient that the gate takes; nothing where it takes nothing."""
    low, high = metrics["clip_low"], metrics["clip_high"]
    if low or high:
        return [f"clipped low {low:.1%} high {high:.1%}"]
    return [f"gradient kept {metrics['gate']:.1%}"] if metrics["gate"] < ALL_KEPT else []


def speed(seconds: Mapping[str, float], collected: Collected) -> str:
    """Seconds of a step, and the tokens that were sampled in each of them."""
    took = sum(seconds.values())
    rate = f"{collected.sampled_tokens / took:,.0f} tokens/s  " if took else ""
    return f"{rate}{took:.1f} s"


def best_sample(collected: Collected) -> tuple[str, float] | None:
    """Prompt and best completion of a step's first group, and its task score; None where there was no group."""
    if not collected.groups:
        return None
    group = collected.groups[0]
    best = max(group.rollouts, key=lambda rollout: rollout.grade.reward)
    return visible(f"{prompt_text(group.problem)}{best.completion.text}".strip(), 200), best.grade.outcome


def prompt_text(problem: Problem) -> str:
    """The prompt, or the last turn of a conversation."""
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]


def measure(*evaluations: Evaluation) -> str:
    """Name of the number that `share` begins with: task scores that are not 0 or 1 have a mean and no accuracy."""
    return "accuracy" if _are_shares(*evaluations) else "task score"


def _are_shares(*evaluations: Evaluation) -> bool:
    """Tell whether all that are known have task scores of right and wrong alone."""
    known = [evaluation for evaluation in evaluations if not math.isnan(evaluation.outcome)]
    return bool(known) and all(evaluation.is_share for evaluation in known)


def share(evaluation: Evaluation, *others: Evaluation) -> str:
    """An evaluation in one line; "unknown" if no answer could be scored. `others` are those it stands beside: where one
    of them has task scores between right and wrong, this one is written as they are, though all of its own may be 0 or
    1."""
    unscored = f", {evaluation.unscored} unscored" if evaluation.unscored else ""
    problems = f"{counted(evaluation.problems, 'problem')}{unscored}"
    if math.isnan(evaluation.outcome):
        text = f"unknown ({problems})"
    elif _are_shares(evaluation, *others):
        text = f"{evaluation.accuracy:.1%} ({evaluation.low:.1%} to {evaluation.high:.1%}, {problems})"
    else:
        text = f"{evaluation.outcome:.3f} ({evaluation.accuracy:.1%} at least 1, {problems})"
    if evaluation.sources:
        shares = (f"{name} {scores['accuracy']:.1%}" for name, scores in evaluation.sources.items())
        text += f"; {', '.join(shares)}"
    if evaluation.mean_at_k is not None:
        text += f"; {_of_samples(evaluation, evaluation.mean_at_k)}"
    if evaluation.parts:
        parts = ", ".join(f"{name} {_number(value)}" for name, value in evaluation.parts.items())
        text += f"; reward {_number(evaluation.reward)} ({parts})"
    return text


def gain(before: Evaluation, after: Evaluation) -> str:
    """The change between two evaluations, as text; empty if one of them is unknown."""
    if before.is_share and after.is_share:
        return f"   {100 * (after.accuracy - before.accuracy):+.1f} points"
    more = after.outcome - before.outcome
    return "" if math.isnan(more) else f"   {more:+.3f}"


def _of_samples(evaluation: Evaluation, mean: float) -> str:
    """mean@k and pass@k."""
    if math.isnan(mean):
        return f"mean@{evaluation.k} unknown, pass@{evaluation.k} unknown"
    width = evaluation.mean_half_width
    around = "" if width is None or math.isnan(width) else f" ± {width:.1%}"
    return (
        f"mean@{evaluation.k} {mean:.1%}{around}, pass@{evaluation.k} {evaluation.pass_at_k:.1%} "
        f"({evaluation.pass_low:.1%} to {evaluation.pass_high:.1%})"
    )


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def sparkline(values: list[float], width: int = 60) -> str:
    """The last values, one character each, on a scale from 0 to 1, or from minimum to maximum if they exceed it."""
    known = [value for value in values[-width:] if value == value]
    low, high = min([0.0, *known]), max([1.0, *known])
    known = [(value - low) / (high - low) for value in known]
    return "".join(BARS[min(int(value * len(BARS)), len(BARS) - 1)] for value in known)
