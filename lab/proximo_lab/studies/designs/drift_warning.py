"""Study of whether drift shows before the reward falls: from the curves of runs that other studies have made."""

import math
import statistics
from collections.abc import Callable, Sequence

from proximo_lab.studies.designs.gates import CLIPS, FIRST_SAPO, MANY, ONES, SOFTS
from proximo_lab.studies.measures import ACCURACY, COLLAPSE, COLLAPSED
from proximo_lab.studies.record import Record
from proximo_lab.studies.study import Arm, Contrast, Measure, Study

EARLY, DEVIATIONS = 6, 4.0
"""First steps that say what is usual, and median absolute deviations from their median that raise an alarm."""
DRIFT = {"log_ratio_max": "largest log-ratio", "gradient_norm": "gradient norm", "entropy": "entropy"}


def alarm(values: Sequence[float], *, falls: bool = False) -> int | None:
    """The first step, counted from 0, whose value lies too far from the first ones; None if none does. `falls`: only
    one that is too low."""
    early = [value for value in values[:EARLY] if not math.isnan(value)]
    if not early:
        return None
    middle = statistics.median(early)
    limit = DEVIATIONS * statistics.median(abs(value - middle) for value in early)
    for step, value in enumerate(values[EARLY:], start=EARLY):
        if (middle - value if falls else abs(value - middle)) > limit:
            return step
    return None


def _lead(metric: str) -> Callable[[Record], float]:
    def of(run: Record) -> float:
        fallen = alarm(run.steps["outcome"], falls=True)
        if fallen is None:
            return math.nan
        warned = alarm(run.steps.get(metric, ()))
        return float(fallen - (len(run.steps["outcome"]) if warned is None else warned))

    return of


def lead(metric: str) -> Measure:
    """Steps by which a metric's alarm comes before the outcome's."""
    rule = f"beyond {DEVIATIONS:g} median absolute deviations from the median of the first {EARLY} steps"
    return Measure(
        f"lead of the {DRIFT[metric]}",
        "steps",
        f"first step at which `outcome` is {rule}, below it, minus the first at which `{metric}` is, either way; a "
        "metric that never is counts from the end of the run, a run whose outcome never is does not count",
        _lead(metric),
    )


def quiet(metric: str) -> Measure:
    """Share of runs in which a metric raises no alarm."""
    return Measure(
        f"no alarm of the {DRIFT[metric]}",
        "share of the seeds",
        f"1 if `{metric}` never lies beyond {DEVIATIONS:g} median absolute deviations from the median of the first "
        f"{EARLY} steps, else 0",
        lambda run: float(alarm(run.steps.get(metric, ())) is None),
        grain=1.0,
    )


_FALLING, _HEALTHY, _STILL = (Arm(each.name, each.config) for each in (CLIPS[2], CLIPS[0], ONES[0]))
_SOFT = Arm(SOFTS[2].name, SOFTS[2].config)

DRIFT_LEAD = Study(
    name="drift-lead",
    title="Drift before the fall",
    claim="Reward is a lagging signal: by the time it falls, the policy has long drifted.",
    source="a retelling of GSPO; no paper is cited for it",
    question="In runs that collapse, do ratios, gradients or entropy leave their usual range before the outcome does, "
    "and do they stay in it in runs that do not collapse?",
    arms=(_FALLING, _SOFT, _HEALTHY, _STILL),
    seeds=tuple(range(8)),
    contrasts=(
        *(
            Contrast(f"the {name} warns before the outcome falls", _FALLING.name, None, lead(metric), 3, (53,))
            for metric, name in DRIFT.items()
        ),
        *(
            Contrast(f"the {name} raises no alarm in a healthy run", _HEALTHY.name, None, quiet(metric), 0.9, (53,))
            for metric, name in DRIFT.items()
        ),
        Contrast("with a soft gate the largest log-ratio warns", _SOFT.name, None, lead("log_ratio_max"), 3),
    ),
    positive=(
        Contrast("the runs collapse", _FALLING.name, None, COLLAPSED, 0.5),
        Contrast("more often than the healthy ones", _FALLING.name, _HEALTHY.name, COLLAPSED, 0.5),
    ),
    negative=(
        Contrast("healthy runs do not collapse", _HEALTHY.name, None, COLLAPSED, MANY),
        Contrast(
            "with one update a step no ratio leaves 1, so none can warn",
            _STILL.name,
            None,
            Measure(
                "alarms of the largest log-ratio",
                "share of the seeds",
                "1 minus `no alarm of the largest log-ratio`",
                lambda run: 1 - quiet("log_ratio_max").of(run),
                grain=1.0,
            ),
            MANY,
        ),
    ),
    measures=(ACCURACY, COLLAPSED, *map(lead, DRIFT), *map(quiet, DRIFT)),
    curve="log_ratio_max",
    collapse=COLLAPSE,
    caveats=(
        "A model of 0.8 M parameters and answers of three tokens; the runs are those of `sapo`, and none is new.",
        "Collapses come from a high rate, and begin soon: what is usual is taken from six steps.",
        "A policy that learns changes its entropy and gradients too: that is what the healthy runs are for.",
    ),
    afterwards=(
        "Planned at first and not done: runs of the mixture with the drift of their routes, and ten steps that say "
        "what is usual, in the place of six.",
        FIRST_SAPO,
    ),
    later="everything (its runs are those of `sapo`)",
    change="runs of hundreds of steps that collapse late.",
    run_seconds=24,
    quick_steps=12,
)
