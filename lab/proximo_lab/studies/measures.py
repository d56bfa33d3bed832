"""Measures of runs that studies share."""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from proximo.losses.arithmetic import count_of
from proximo.rl.evaluate import known_mean
from proximo_lab.studies.record import SECONDS, Record
from proximo_lab.studies.study import Measure

Curve = tuple[Sequence[float], Sequence[float]]
"""Values of x, and of y at each."""
LAST = 0.1
"""Share of a run's last steps that represent its end."""
LEVELS = 10
"""Accuracies at which two runs are compared."""
AROUND = 2
"""Steps before and after one over which its entropy is averaged."""


def at_end(metric: str, name: str, unit: str) -> Measure:
    """A metric at the end of training."""
    return Measure(name, unit, f"mean of `{metric}` over the last {LAST:.0%} of the steps", _at_end(metric))


def over_run(metric: str, name: str, unit: str) -> Measure:
    """A metric over the whole run."""
    return Measure(name, unit, f"mean of `{metric}` over all steps", lambda run: known_mean(run.known(metric)))


def largest(metric: str, name: str, unit: str) -> Measure:
    return Measure(name, unit, f"largest `{metric}` of a step", lambda run: max(run.known(metric), default=math.nan))


def final(held_out: str, name: str, unit: str) -> Measure:
    """A number of the last evaluation."""
    return Measure(name, unit, f"held-out `{held_out}` after the last step", lambda run: _last(run, held_out))


def _first(run: Record, name: str) -> float:
    values = run.held_out.get(name, ())
    return values[0] if values else math.nan


def _last(run: Record, name: str) -> float:
    values = run.held_out.get(name, ())
    return values[-1] if values else math.nan


def _at_end(metric: str) -> Callable[[Record], float]:
    def of(run: Record) -> float:
        values = run.steps.get(metric, ())
        return known_mean(values[len(values) - max(1, count_of(LAST, len(values))) :])

    return of


def _area(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Mean of a curve over x, by the trapezoid rule; NaN without a curve, as of a run that was not evaluated."""
    if len(ys) < 2 or len(xs) < 2 or xs[-1] == xs[0]:
        return math.nan
    points = zip(xs, ys, strict=True)
    return math.fsum((b - a) * (left + right) / 2 for (a, left), (b, right) in pairwise(points)) / (xs[-1] - xs[0])


def _area_by_steps(name: str) -> Callable[[Record], float]:
    return lambda run: _area(run.held_out.get("step", ()), run.held_out.get(name, ()))


def _over(spent: str) -> Callable[[Record], Curve]:
    """Held-out accuracies of samples over what the steps before have spent: tokens, or seconds."""

    def curve(run: Record) -> Curve:
        each = run.steps.get(spent, ())
        before = [math.fsum(each[: int(step)]) for step in run.held_out.get("step", ())]
        return before, run.held_out.get("mean_at_k", ())

    return curve


def _outcomes_by_tokens(run: Record) -> Curve:
    """Outcomes of the steps over the tokens sampled up to each."""
    return list(accumulate(run.steps.get("sampled_tokens", ()))), run.steps.get("outcome", ())


def _gap(curve: Callable[[Record], Curve]) -> Callable[[Record, Record], float]:
    """The difference of the areas up to where both curves go."""

    def between(ours: Record, theirs: Record) -> float:
        curves = [curve(run) for run in (ours, theirs)]
        if not all(xs and ys and not any(map(math.isnan, xs)) for xs, ys in curves):
            return math.nan
        end = min(xs[-1] for xs, _ in curves)
        mine, others = (_area(*_until(xs, ys, end)) for xs, ys in curves)
        return mine - others

    return between


def _under(curve: Callable[[Record], Curve]) -> Callable[[Record], float]:
    return lambda run: _area(*curve(run))


def _until(xs: Sequence[float], ys: Sequence[float], end: float) -> tuple[list[float], list[float]]:
    """A curve up to an x between two of its points."""
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if x <= end]
    if len(kept) < len(xs) and kept[-1][0] < end:
        (a, low), (b, high) = kept[-1], (xs[len(kept)], ys[len(kept)])
        kept.append((end, low + (high - low) * (end - a) / (b - a)))
    return [x for x, _ in kept], [y for _, y in kept]


ACCURACY = final("outcome", "held-out accuracy", "share")
PASS_AT_K = final("pass_at_k", "held-out pass@8", "share")
AREA = Measure(
    "held-out accuracy over the run",
    "share",
    "area under the curve of held-out outcomes, by the trapezoid rule over the evaluations, divided by the steps",
    _area_by_steps("outcome"),
)
SAMPLED_ACCURACY = final("mean_at_k", "held-out accuracy of samples", "share")
SAMPLED_AREA = Measure(
    "held-out accuracy of samples over the run",
    "share",
    "area under the curve of held-out `mean_at_k`, by the trapezoid rule over the evaluations, divided by the steps",
    _area_by_steps("mean_at_k"),
)
AREA_BY_TOKENS = Measure(
    "the same by sampled tokens",
    "share",
    "area under the curve of held-out `mean_at_k` over the tokens sampled, up to the number that both runs have "
    "sampled, divided by that number",
    _under(_over("sampled_tokens")),
    _gap(_over("sampled_tokens")),
)
AREA_BY_SECONDS = Measure(
    "the same by seconds",
    "share",
    "area under the curve of held-out `mean_at_k` over the seconds of the steps, up to the number that both runs have "
    "spent, divided by that number",
    _under(_over(SECONDS)),
    _gap(_over(SECONDS)),
)
OUTCOMES = over_run("outcome", "outcome over the run", "share")
"""Outcome of the samples that a run trains on: where problems are endless, each is met for the first time."""
OUTCOMES_BY_TOKENS = Measure(
    "outcome by sampled tokens",
    "share",
    "area under the curve of `outcome` over the tokens sampled, up to the number that both runs have sampled, divided "
    "by that number",
    _under(_outcomes_by_tokens),
    _gap(_outcomes_by_tokens),
)
ENTROPY = at_end("entropy", "entropy at the end", "nats a token")
CLIPPED_ABOVE = over_run("clip_high", "blocked with positive advantage", "share of the tokens")
CLIPPED_BELOW = over_run("clip_low", "blocked with negative advantage", "share of the tokens")


def reached(run: Record, level: float) -> float | None:
    """The step at which the held-out outcome first reaches a level, between evaluations on a straight line; None if it
    never does."""
    points = list(zip(run.held_out["step"], run.held_out["outcome"], strict=True))
    if points and points[0][1] >= level:
        return points[0][0]
    for (a, low), (b, high) in pairwise(points):
        if low < level <= high:
            return a + (b - a) * (level - low) / (high - low)
    return None


def entropy_near(entropy: Sequence[float], done: float) -> float:
    """Entropy of the policy after so many steps: a mean over the steps around. Step i samples with i steps done."""
    middle = min(round(done), len(entropy) - 1)
    return known_mean(entropy[max(middle - AROUND, 0) : middle + AROUND + 1])


def _entropy_gap(ours: Record, theirs: Record) -> float:
    """The difference in entropy when both are equally accurate."""
    if not all(run.held_out.get("outcome") and run.steps.get("entropy") for run in (ours, theirs)):
        return math.nan
    best = min(max(run.held_out["outcome"]) for run in (ours, theirs))
    start = max(run.held_out["outcome"][0] for run in (ours, theirs))
    gaps = []
    for index in range(LEVELS):
        level = best - (best - start) / 2 * index / LEVELS
        steps = [reached(run, level) for run in (ours, theirs)]
        if steps[0] is not None and steps[1] is not None:
            gaps.append(entropy_near(ours.steps["entropy"], steps[0]) - entropy_near(theirs.steps["entropy"], steps[1]))
    return known_mean(gaps)


EQUAL_ENTROPY = Measure(
    "entropy at equal accuracy",
    "nats a token",
    f"entropy of the sampled tokens (a mean over {2 * AROUND + 1} steps) when a run first reaches an accuracy, minus "
    f"the other run's when it reaches the same, averaged over {LEVELS} accuracies in the upper half between the start "
    "and the lower of the two runs' best",
    ENTROPY.of,
    _entropy_gap,
)

WINDOW, COLLAPSED_SHARE = 10, 0.5


def _collapsed(run: Record) -> float:
    outcomes = run.known("outcome")
    if not outcomes:
        return math.nan
    starts = range(max(1, len(outcomes) - WINDOW + 1))
    best = max(known_mean(outcomes[start : start + WINDOW]) for start in starts)
    return float(known_mean(outcomes[-WINDOW:]) < COLLAPSED_SHARE * best)


COLLAPSE = f"the mean outcome of the last {WINDOW} steps is below half of that of the best {WINDOW} in a row"
"""Definition of a collapse."""
COLLAPSED = Measure("collapsed", "share of the seeds", f"1 if {COLLAPSE}, else 0", _collapsed, grain=1.0)
BEFORE = Measure(
    "accuracy before training",
    "share",
    "held-out `outcome` before the first step",
    lambda run: _first(run, "outcome"),
)
BLOCKED = over_run("blocked", "blocked", "share of the tokens")
RATIO_SPREAD = over_run("ratio_spread", "spread of the ratio", "standard deviation")
GRADIENT_NORM = over_run("gradient_norm", "gradient norm", "mean over the run")
LARGEST_NORM = largest("gradient_norm_max", "largest gradient norm", "of an update")
GAIN = Measure(
    "gain",
    "share",
    "held-out `outcome` after the last step minus that before the first",
    lambda run: _last(run, "outcome") - _first(run, "outcome"),
)


def _part(metric: str, start: float, end: float) -> Callable[[Record], float]:
    def of(run: Record) -> float:
        values = run.steps.get(metric, ())
        return known_mean(values[int(start * len(values)) : max(int(end * len(values)), 1)])

    return of


def rise(metric: str, name: str, unit: str) -> Measure:
    """Rise of a metric from the first tenth of the steps to the last."""
    first, last = _part(metric, 0, LAST), _part(metric, 1 - LAST, 1)
    what = f"mean of `{metric}` over the last tenth of the steps minus that over the first"
    return Measure(name, unit, what, lambda run: last(run) - first(run))


def growth(metric: str, name: str) -> Measure:
    """Growth of a metric over a run, as a share of where it began."""
    first, last = _part(metric, 0, LAST), _part(metric, 1 - LAST, 1)
    what = f"mean of `{metric}` over the last tenth of the steps, divided by that over the first, minus 1"
    return Measure(name, "of the start", what, lambda run: last(run) / first(run) - 1 if first(run) else math.nan)


def _unsteady(run: Record) -> float:
    norms = run.known("gradient_norm")
    return statistics.stdev(norms) / statistics.mean(norms) if len(norms) > 1 and any(norms) else math.nan


UNSTEADY = Measure(
    "unsteadiness of the gradient",
    "of its mean",
    "standard deviation of `gradient_norm` over the steps divided by its mean",
    _unsteady,
)
