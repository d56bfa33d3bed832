"""Runs studies: tuning first, then every arm with every seed, in processes of one thread; what is finished is kept."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from proximo.insight.compare import RunFailure, RunJob, run_jobs
from proximo.rl.config import RunConfig
from proximo.rl.evaluate import known_mean
from proximo.system.machine import Machine
from proximo_lab.studies.folder import Laboratory
from proximo_lab.studies.record import Record, StudyJob, job
from proximo_lab.studies.study import Arm, Study

MACHINE = Machine(threads=1, onednn=False)
"""One thread and no library that chooses by processor: the same everywhere, so that a study can be repeated."""
WORKER = "proximo_lab.studies.worker"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Amount:
    """Amount of work that is left."""

    runs: int
    """Runs, those of tuning included; one that several studies share counts once."""
    left: int
    seconds: float
    """Processor seconds that are left, roughly."""


def with_rate(config: RunConfig, rate: float) -> RunConfig:
    return replace(config, training=replace(config.training, learning_rate=rate))


def tuning_jobs(study: Study) -> list[StudyJob]:
    if study.tuning is None:
        return []
    tuned = [arm for arm in study.arms if arm.tuned]
    return [
        job(with_rate(arm.config, rate), seed, arm.course)
        for seed in study.tuning.seeds
        for arm in tuned
        for rate in study.tuning.rates
    ]


def chosen_rate(study: Study, arm: Arm, lab: Laboratory) -> float | None:
    """The arm's learning rate: its own, or the best of the tuning, the smaller of two that are equal, the smallest if
    no rate has a number; None as long as a run of its tuning is missing."""
    if study.tuning is None or not arm.tuned:
        return arm.config.training.learning_rate
    best, best_mean = min(study.tuning.rates), -math.inf
    for rate in sorted(study.tuning.rates):
        records = [lab.record(job(with_rate(arm.config, rate), seed, arm.course)) for seed in study.tuning.seeds]
        if any(record is None for record in records):
            return None
        mean = known_mean(study.tuning.measure.of(record) for record in records if record is not None)
        if mean > best_mean:
            best, best_mean = rate, mean
    return best


def arm_jobs(study: Study, lab: Laboratory) -> dict[tuple[str, int], StudyJob]:
    """The runs of the study by arm and seed, all arms of a seed before the next; arms not tuned yet are missing."""
    rates = {arm.name: chosen_rate(study, arm, lab) for arm in study.arms}
    return {
        (arm.name, seed): job(with_rate(arm.config, rate), seed, arm.course)
        for seed in study.seeds
        for arm in study.arms
        if (rate := rates[arm.name]) is not None
    }


def records(study: Study, lab: Laboratory) -> dict[tuple[str, int], Record]:
    """The finished runs by arm and seed."""
    read = {key: lab.record(job) for key, job in arm_jobs(study, lab).items()}
    return {key: record for key, record in read.items() if record is not None}


def amount(studies: Sequence[Study], lab: Laboratory) -> Amount:
    """Amount of work that the studies need together."""
    seconds: dict[str, float] = {}
    done: set[str] = set()
    for study in studies:
        every = _every(study, lab)
        seconds |= {each.name: study.run_seconds for each in every}
        done |= {each.name for each in every if lab.record(each) is not None}
        for arm in study.arms:  # not tuned yet: which runs these will be is not known
            if chosen_rate(study, arm, lab) is None:
                seconds |= {f"{study.name} {arm.name} {seed}": study.run_seconds for seed in study.seeds}
    left = seconds.keys() - done
    return Amount(len(seconds), len(left), math.fsum(seconds[name] for name in left))


def run(
    studies: Sequence[Study], out: Path, processes: int, say: Say, minutes: float | None = None
) -> list[RunFailure]:
    """Do what is left of the studies; ValueError if a stored design differs from the study's.

    A study's runs come before the tuning of the next, which fills processes that would wait for the last of them: where
    time ends first, some studies are whole, rather than all tuned.
    """
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    lab = Laboratory(out)
    for study in studies:
        lab.settle(study, len({each.name for each in _every(study, lab) if lab.record(each) is not None}))
    failures = []
    for study, following in pairwise((None, *studies, None)):
        every, names = [], dict[str, str]()
        if following is not None:
            every = tuning_jobs(following)
            names = {each.name: f"{following.label}, tuning, seed {each.config.seed}" for each in every}
        if study is not None:
            of_study = arm_jobs(study, lab)
            every = [*of_study.values(), *every]
            names |= {each.name: f"{study.label}, {arm}, seed {seed}" for (arm, seed), each in of_study.items()}
        left = [each for each in _unique(every) if lab.record(each) is None]
        lab.prepare(left)
        failures += _run(left, names, lab, processes, say, until)
    return failures


def _every(study: Study, lab: Laboratory) -> list[StudyJob]:
    return [*tuning_jobs(study), *arm_jobs(study, lab).values()]


def _run(
    jobs: list[StudyJob], names: Mapping[str, str], lab: Laboratory, processes: int, say: Say, until: float
) -> list[RunFailure]:
    done, began = 0, time.monotonic()

    def ended(each: RunJob, failure: RunFailure | None) -> None:
        nonlocal done
        done += 1
        minutes = (time.monotonic() - began) / done * (len(jobs) - done) / 60
        left = f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"
        how = "finished" if failure is None else f"FAILED, {failure.message} (run {each.name})"
        say(f"{names[each.name]}: {how} ({done} of {len(jobs)}, {left})")

    return run_jobs(
        jobs,
        lab.layout,
        {each.contender: MACHINE for each in jobs},
        processes,
        started=lambda _: None,
        ended=ended,
        worker=WORKER,
        until=until,
    )


def _unique(jobs: Iterable[StudyJob]) -> list[StudyJob]:
    return list({each.name: each for each in jobs}.values())
