"""Record of a finished run: curves of the metrics that studies read and the held-out results, as one small file. All
else of the run is deleted."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from proximo.insight.compare.plan import RunJob
from proximo.insight.folder import RunFolder
from proximo.insight.reading import is_number, phases
from proximo.insight.report.run_details import Row, gather
from proximo.rl.config import RunConfig
from proximo.system.folders import write_file
from proximo.system.machine import Machine
from proximo.system.opening import make_folder, read_json

FORMAT = 1
DIGITS = 6
"""Significant digits that are kept."""
KEPT = (
    "outcome", "reward", "entropy", "length", "length_right", "length_wrong", "truncated", "duplicates", "dead_groups",
    "dead_solved", "solved_by_any", "gradient_norm", "gradient_norm_max", "gate", "measured", "blocked", "clip_high",
    "clip_low", "positive_above", "negative_above", "ratio_spread", "log_ratio_max", "old_kl", "ess", "kl",
    "reference_kl", "sapo_gap", "explained_variance", "value_error/quarter_1", "value_error/quarter_2",
    "value_error/quarter_3", "value_error/quarter_4", "baseline_error/value", "baseline_error/group",
    "sampled_tokens", "wasted_tokens", "updates", "skipped_updates", "routing_changed", "routing_overlap",
    "routing_drift", "routing_drift_tokens", "loops", "clip_high/rare", "clip_high/unlikely", "clip_high/likely",
    "clip_high/sure", "ratio_far",
)  # fmt: skip
"""Metrics of a step that are kept."""
SECONDS = "step_seconds"
"""Seconds of each training step, without evaluations: of a machine, so of no table that can be repeated."""
EVALUATED = ("step", "accuracy", "outcome", "mean_at_k", "pass_at_k")
"""Numbers of an evaluation that are kept; those of a task's sources too."""


@dataclass(frozen=True)
class Record:
    """The numbers of one run."""

    steps: Mapping[str, Sequence[float]]
    """Values by metric, one for each step; NaN where a step has none."""
    held_out: Mapping[str, Sequence[float]]
    """Values by name, one for each evaluation; `step` is the number of steps done before it."""
    seconds: float

    def known(self, metric: str) -> list[float]:
        return [value for value in self.steps.get(metric, ()) if not math.isnan(value)]


class Course(Protocol):
    """Course of a run that is more than training by its config: a frozen dataclass."""

    def run(self, config: RunConfig, folder: Path, machine: Machine) -> Record: ...


@dataclass(frozen=True)
class StudyJob(RunJob):
    """A run of a study."""

    course: Course | None = None
    """Course of the run; None: train by its config."""


def job(config: RunConfig, seed: int, course: Course | None = None) -> StudyJob:
    """The run of a config with a seed. Its name is made from the config, so that arms and studies share equal runs, and
    a changed config never meets an earlier result."""
    plain = essence(replace(config, seed=0))
    made_from = plain if course is None else {"config": plain, "course": essence(course)}
    return StudyJob(digest(made_from)[:16], replace(config, seed=seed), course)


def essence(value: Any) -> Any:
    """A config as plain values, without fields that have their defaults: a field that is added to the package later
    changes nothing."""
    if not is_dataclass(value):
        return list(map(essence, value)) if isinstance(value, tuple) else value
    chosen = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    usual = {each.name: _default(each) for each in fields(value)}
    kept = {name: essence(given) for name, given in chosen.items() if given != usual[name]}
    return {"type": type(value).__name__, **kept}


def digest(plain: Any) -> str:
    """SHA-256 of plain values as canonical JSON."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def recorded(folder: Path) -> Record:
    """The record of a finished run folder."""
    gathered = gather(RunFolder(folder))
    assert gathered.result is not None, "it is finished"
    names = [name for name in KEPT if any(name in row for row in gathered.training)]
    tested = [name for name in _names(gathered.evaluations) if name.rpartition("/")[2] in EVALUATED]
    spent = {row.get("step"): math.fsum(phases(row).values()) for row in gathered.timings}
    return Record(
        {name: [_number(row.get(name)) for row in gathered.training] for name in names}
        | {SECONDS: [spent.get(row["step"], math.nan) for row in gathered.training]},
        {name: [_number(row.get(name)) for row in gathered.evaluations] for name in tested},
        float(gathered.result["seconds"]),
    )


def write(path: Path, record: Record) -> None:
    content = {
        "format": FORMAT,
        "seconds": round(record.seconds, 1),
        "held_out": {name: [_short(value) for value in values] for name, values in record.held_out.items()},
        "steps": {name: [_short(value) for value in values] for name, values in record.steps.items()},
    }
    make_folder(path.parent)
    write_file(path, (json.dumps(content, separators=(",", ":")) + "\n").encode())


def read(path: Path) -> Record | None:
    """Read a record; None if there is none, or it is damaged or of another version: then the run is done again."""
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            return None
        return Record(_curves(content["steps"]), _curves(content["held_out"]), float(content["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _curves(stored: Mapping[str, Sequence[float | None]]) -> dict[str, list[float]]:
    return {name: [_number(value) for value in values] for name, values in stored.items()}


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _number(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def _short(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.{DIGITS}g}")
