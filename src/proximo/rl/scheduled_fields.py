"""Fields of a run's config that a schedule can change in the middle of the run."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from proximo.config.unions import classes, union_members, walk
from proximo.config.vocabulary import field_of, foreign
from proximo.rl.schedules import Schedule

CHANGING = (
    "training.learning_rate",
    "training.max_gradient_norm",
    "training.skip_spikes",
    "value.learning_rate",
    "sampling.temperature",
)
"""Fields that the loop reads anew at each step, besides the algorithm's."""
ALGORITHM, KEEP = "algorithm.", "algorithm.keep."
"""Numbers of the algorithm's pieces can change, but for those that decide on groups while later ones are sampled."""
RATE, TEMPERATURE = CHANGING[0], CHANGING[-1]


def check_fields(config: object, schedules: Mapping[str, Schedule], rate_schedule: str) -> None:
    """Refuse schedules of what is no number of this config, or cannot change in the middle of a run. `rate_schedule`:
    the config's own schedule of the learning rate."""
    known = dict(changing(config)) if schedules else {}
    for name, schedule in schedules.items():
        if name not in known:
            reason = _reason(config, name, known)
            raise ValueError(f"schedules has {name}, {reason}; those that can: {', '.join(known)}")
        if type(schedule) not in classes(Schedule):
            raise ValueError(f"schedules.{name} is {schedule!r}: give proximo.linear(...) or another schedule")
    if RATE in schedules and rate_schedule != "constant":
        raise ValueError(
            f"schedules has {RATE}, and training.learning_rate_schedule is {rate_schedule!r}: leave one of them out"
        )


def _reason(config: object, name: str, known: Collection[str]) -> str:
    """Reason why a name can have no schedule."""
    if name in {path for path, _, _ in walk(config)}:
        return "which cannot change in the middle of a run"
    if (answer := foreign(name, "train")) is not None and answer.ours:
        return f"which here is {field_of('train', answer.ours) or answer.ours}{answer.remark and ', ' + answer.remark}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"which this run does not have{f', perhaps {close[0]}' if close else ''}"


def changing(config: object) -> Iterator[tuple[str, Any]]:
    """Fields that a schedule can change, with their types."""
    for name, kind, _ in walk(config):
        changes = name in CHANGING or (name.startswith(ALGORITHM) and not name.startswith(KEEP))
        if changes and {*union_members(kind)} - {type(None)} in ({int}, {float}, {int, float}):
            yield name, kind
