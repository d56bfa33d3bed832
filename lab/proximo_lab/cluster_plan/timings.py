"""Differences of a run's own timings from what was predicted for it, so that a plan can take them over."""

from dataclasses import dataclass, replace

from proximo.insight.folder import RunFolder
from proximo.insight.reading import COSTS, is_number
from proximo.planning.cards import DeviceCard
from proximo.planning.plan import make_plan
from proximo.runs.files import TIMINGS
from proximo_lab.cluster_plan.pool import Engines
from proximo_lab.cluster_plan.simulate import Learner

LATEST = 20
"""Steps of a run whose timings are used: the last ones; the first compiles."""
NOT_LEARNING = ("step", "tokens", "rollout", "grade", "write", "evaluate", "checkpoint")
"""Columns of a row of timings that are not the learner's."""


@dataclass(frozen=True)
class Timings:
    """Measured seconds over predicted ones."""

    sampling: float
    learning: float
    remark: str

    def engines(self, engines: Engines) -> Engines:
        each = {
            name: getattr(engines, name) * self.sampling for name in ("base", "per_request", "per_token", "prefill")
        }
        return replace(engines, **each)

    def learner(self, learner: Learner) -> Learner:
        return replace(learner, fixed=learner.fixed * self.learning, per_token=learner.per_token * self.learning)


PREDICTED = Timings(1.0, 1.0, "seconds are predicted from the card's limits")


def timings_of(run: RunFolder, card: DeviceCard, *, prompt_tokens: int, mean_tokens: int) -> Timings:
    """Timings of a run on one `card`, whose completions had this length on average. ValueError if it has no timings
    yet, or if it does not fit by the plan."""
    rows = [row for row in run.rows(TIMINGS) if is_number(row.get("rollout")) and is_number(row.get("update"))]
    if len(rows) < 2:
        raise ValueError(f"{run.path} has timings of {len(rows)} steps: give a run of at least 2, or no --timed-on")
    rows = rows[1:][-LATEST:]
    plan = make_plan(run.config, card, prompt_tokens=prompt_tokens, mean_tokens=mean_tokens)
    time = (plan.full if run.config.adapter is None else plan.lora).time
    if time is None:
        raise ValueError(f"{run.path} would not fit on {card.name} by the plan: give the card that it ran on")
    rollout = sum(row["rollout"] for row in rows) / len(rows)
    rest = [value for row in rows for name, value in row.items() if _is_learning(name) and is_number(value)]
    sampling, learning = rollout / time.rollout.total, sum(rest) / len(rows) / (time.scoring + time.update)
    remark = (
        f"seconds are scaled by what {run.name} took on {card.name}: {sampling:.2f} times the predicted ones for "
        f"sampling, {learning:.2f} times for learning"
    )
    return Timings(sampling, learning, remark)


def _is_learning(name: str) -> bool:
    return name not in NOT_LEARNING and not name.startswith(COSTS)
