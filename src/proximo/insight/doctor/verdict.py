"""One sentence about a run: whether it learns, by how much, and how many findings there are. Doctor, report, page and
`proximo watch` show the same."""

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proximo.insight.folder import RunFolder, State
from proximo.losses.intervals import half_width
from proximo.runs.health import ENOUGH, Finding
from proximo.runs.health.history import EARLY, mean, number
from proximo.system.safe_text import counted

Row = dict[str, Any]
Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True)
class Change:
    """The change of a number over a run, with its 95 % interval."""

    measure: str
    before: float
    after: float
    low: float
    high: float
    """Interval of the difference; NaN if not known."""
    steps: int
    is_share: bool

    def __str__(self) -> str:
        """Example: "+12.3 points (10.1 to 14.4) of held-out accuracy in 40 steps"."""
        if math.isnan(self.low):
            return f"{self.measure} {self.before:.3g} → {self.after:.3g} in {counted(self.steps, 'step')}"
        scale, digits, unit = (100, 1, " points") if self.is_share else (1, 3, "")
        change, low, high = (
            f"{scale * value:.{digits}f}".replace("-", "−") for value in (self.after - self.before, self.low, self.high)
        )
        sign = "" if self.after < self.before else "+"
        return f"{sign}{change}{unit} ({low} to {high}) of {self.measure} in {counted(self.steps, 'step')}"


@dataclass(frozen=True)
class Verdict:
    word: str
    """Example: "learning"."""
    tone: Tone
    sentence: str
    note: str
    """Reason why held-out accuracy and the task score in training differ; empty if one of them is missing."""


def judge(run: RunFolder, rows: Sequence[Row], steps: int, standing: Sequence[Finding]) -> Verdict:
    """The verdict on a run's rows of metrics. `standing` are its current findings."""
    sampled = sampled_change(rows) if _setting(run, "evaluation", "metric", "") == "mean_at_k" else None
    change = sampled or held_out_change(rows) or training_change(rows)
    word, tone = _word(change, steps, standing, run.state)
    parts = [word] if change is None else [word, str(change)]
    summary = _counted(standing) or ("too few steps for most rules" if steps < ENOUGH else "no warnings")
    sentence = f"{', '.join(part for part in parts if part)}; {summary}"
    return Verdict(word, tone, sentence + _result(run), _note(run, rows))


def _result(run: RunFolder) -> str:
    """Clause on the checkpoint that is the result or should be, where that is not the last; empty where it is."""
    result = run.result or {}
    better, name = result.get("better"), result.get("checkpoint")
    if "last" in result and "best_step" not in result and _is_checkpoint(name):  # a stage's is always the best
        return f"; it ended because it collapsed, and its result is the best checkpoint, {name}"
    name = better.get("checkpoint") if isinstance(better, dict) else None
    return f"; {name} is better than the last checkpoint by more than chance" if _is_checkpoint(name) else ""


def _is_checkpoint(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"step-\d{1,9}", name) is not None


def held_out_change(rows: Sequence[Row]) -> Change | None:
    """Change from the first evaluation to the last; by task scores where answers are not just right or wrong."""
    known = [row for row in rows if not math.isnan(number(row, "held_out/outcome"))]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    is_right_or_wrong = all(_is_right_or_wrong(row) for row in (first, last))
    name, title = ("accuracy", "accuracy") if is_right_or_wrong else ("outcome", "task score")
    before, after = (number(row, f"held_out/{name}") for row in (first, last))
    low, high = _newcombe(first, last) if is_right_or_wrong else _of_outcomes(first, last)
    steps = int(number(last, "step") - number(first, "step"))
    return Change(f"held-out {title}", before, after, low, high, steps, _is_share(before, after))


def sampled_change(rows: Sequence[Row]) -> Change | None:
    """Change from the first evaluation to the last, of several samples for each problem: what a run is judged by
    whose `evaluation.metric` is mean_at_k, since its greedy answers may be right from the start."""
    known = [row for row in rows if not math.isnan(number(row, "held_out/mean_half_width"))]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    before, after = (number(row, "held_out/mean_at_k") for row in (first, last))
    half = math.hypot(*(number(row, "held_out/mean_half_width") for row in (first, last)))
    steps, gain = int(number(last, "step") - number(first, "step")), after - before
    measure = f"held-out mean of {number(last, 'held_out/k'):.0f} samples"
    return Change(measure, before, after, gain - half, gain + half, steps, _is_share(before, after))


def training_change(rows: Sequence[Row]) -> Change | None:
    """Change from the first steps to the last; of stages without task scores the loss, which has no interval."""
    known = [row for row in rows if not math.isnan(number(row, "outcome"))]
    if len(known) < 2 * EARLY:
        return None if known else _loss_change(rows)
    first, last = ([number(row, "outcome") for row in part] for part in (known[:EARLY], known[-EARLY:]))
    before, after, half = mean(first), mean(last), math.hypot(half_width(first), half_width(last))
    steps, gain = int(number(known[-1], "step")), after - before
    measure, is_share = "the task score in training", _is_share(*first, *last)
    return Change(measure, before, after, gain - half, gain + half, steps, is_share)


def _is_share(*values: float) -> bool:
    return 0 <= min(values) <= max(values) <= 1


def _loss_change(rows: Sequence[Row]) -> Change | None:
    for name, measure in (("held_out/loss", "held-out loss"), ("loss", "loss")):
        known = [row for row in rows if not math.isnan(number(row, name))]
        if len(known) > 1:
            before, after = number(known[0], name), number(known[-1], name)
            return Change(measure, before, after, math.nan, math.nan, int(number(known[-1], "step")), False)
    return None


def _is_right_or_wrong(row: Row) -> bool:
    return number(row, "held_out/accuracy") == number(row, "held_out/outcome") and not math.isnan(
        number(row, "held_out/low") + number(row, "held_out/high")
    )


def _newcombe(first: Row, last: Row) -> tuple[float, float]:
    """Newcombe's interval of a difference of shares, from the interval of each. It leaves out that both evaluations
    have the same problems, so it is rather too wide."""
    (p, low, high), (q, lower, higher) = (
        [number(row, f"held_out/{name}") for name in ("accuracy", "low", "high")] for row in (first, last)
    )
    return q - p - math.hypot(q - lower, high - p), q - p + math.hypot(higher - q, p - low)


def _of_outcomes(first: Row, last: Row) -> tuple[float, float]:
    """Interval of a difference of means, from that of each; it leaves out that both evaluations have the same
    problems, too. Earlier versions did not write it: a mean of task scores from 0 to 1 is then taken to be accurate to
    1/√problems, as the health rules assume, and of others nothing is known."""
    means = [number(row, "held_out/outcome") for row in (first, last)]
    halves = [_half(row) for row in (first, last)]
    if any(map(math.isnan, halves)):
        sizes = [number(row, "held_out/problems") for row in (first, last)]
        halves = [1 / math.sqrt(size) if size > 0 and _is_share(*means) else math.nan for size in sizes]
    half, gain = math.hypot(*halves), means[1] - means[0]
    return gain - half, gain + half


def _half(row: Row) -> float:
    """Half the width of the interval of a mean task score; NaN if not known. Graded answers may be all wrong, too."""
    p, low, high = (number(row, f"held_out/{name}") for name in ("accuracy", "low", "high"))
    return max(high - p, p - low) if _is_right_or_wrong(row) else number(row, "held_out/outcome_half_width")


def _word(change: Change | None, steps: int, standing: Sequence[Finding], state: State) -> tuple[str, Tone]:
    is_running = state == "running"
    if any(finding.severity == "failing" for finding in standing):
        return "failing", "bad"
    if steps == 0:
        return "not started", "plain"
    if change is None:
        return "too early to tell", "plain"
    if math.isnan(change.low):
        return "", "plain"
    if change.low > 0:
        return "learning" if is_running else "learned", "good"
    if change.high < 0:
        return "getting worse" if is_running else "got worse", "bad"
    return "no clear change" + " yet" * is_running, "plain"


NOUNS = (("failing", "failure"), ("warning", "warning"))


def _counted(standing: Sequence[Finding]) -> str:
    """Example: "one failure and 2 warnings"."""
    counts = [(sum(each.severity == kind for each in standing), noun) for kind, noun in NOUNS]
    return " and ".join(f"{number} {noun}s" if number > 1 else f"one {noun}" for number, noun in counts if number)


def _note(run: RunFolder, rows: Sequence[Row]) -> str:
    evaluations = [row for row in rows if not math.isnan(number(row, "held_out/accuracy"))]
    outcomes = [value for row in rows if not math.isnan(value := number(row, "outcome"))]
    if not evaluations or not outcomes:
        return ""
    last = evaluations[-1]
    problems = number(last, "held_out/problems")
    held = f"Held-out {number(last, 'held_out/accuracy'):.1%} is greedy: the most likely token each time, on "
    held += f"{problems:.0f} problems that are not trained on." if problems > 0 else "problems that are not trained on."
    recent = outcomes[-EARLY:]
    over = f"mean of the last {len(recent)} steps" if len(recent) > 1 else "the last step"
    temperature = _temperature(run)
    at = "" if temperature is None else f" at temperature {temperature:g}"
    return (
        f"{held} Task score {mean(recent):.3g} ({over}) is sampled{at} from the training problems, so it contains the "
        "mistakes of exploring: a gap between the two is normal."
    )


def _temperature(run: RunFolder) -> float | None:
    """Temperature from the config, by default 1; None if it cannot be read or is no number."""
    value = _setting(run, "sampling", "temperature", 1.0)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _setting(run: RunFolder, table: str, name: str, default: object) -> object:
    """A value of the run's config; None where it cannot be read."""
    try:
        settings = tomllib.loads(run.config_text).get(table, {})
    except (ValueError, RecursionError):
        return None
    return settings.get(name, default) if isinstance(settings, dict) else None
