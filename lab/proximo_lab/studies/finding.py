"""Findings of a study: its contrasts and controls with differences, intervals and verdicts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proximo.rl.evaluate import known_mean
from proximo_lab.studies.record import Record
from proximo_lab.studies.study import Contrast, Study
from proximo_lab.studies.verdict import Difference, Word, difference, share_difference, shows, verdict

Records = Mapping[tuple[str, int], Record]
"""Finished runs by arm and seed."""


@dataclass(frozen=True)
class ContrastResult:
    """A contrast and what was measured."""

    contrast: Contrast
    difference: Difference
    arm: float
    """Mean of the arm over the seeds that both have."""
    against: float

    @property
    def room(self) -> float:
        """Largest effect that there could have been: what happens in a quarter of the other's seeds cannot happen in
        half of them less often."""
        contrast = self.contrast
        if not contrast.measure.grain or contrast.against is None:
            return math.inf
        return self.against if contrast.counts < 0 else 1 - self.against

    @property
    def has_room(self) -> bool:
        return self.room >= abs(self.contrast.counts)

    @property
    def is_shown(self) -> bool:
        return shows(self.difference, self.contrast.counts)


@dataclass(frozen=True)
class Findings:
    study: Study
    records: Records
    contrasts: tuple[ContrastResult, ...]
    positive: tuple[ContrastResult, ...]
    negative: tuple[ContrastResult, ...]
    timed: tuple[ContrastResult, ...]

    @property
    def is_complete(self) -> bool:
        return len(self.records) == len(self.study.arms) * len(self.study.seeds)

    @property
    def failed(self) -> list[ContrastResult]:
        """Controls that did not come out as they must."""
        return [each for each in self.positive if not each.is_shown] + [
            each for each in self.negative if self._is_disturbed(each)
        ]

    def verdict(self, result: ContrastResult) -> Word:
        """Verdict on a contrast; "no verdict" before the last run, without an interval or without the controls."""
        controls = self.is_complete and not self.failed
        return verdict(result.difference, result.contrast.counts, controls=controls, room=result.room)

    def to_dict(self) -> dict[str, Any]:
        return {"complete": self.is_complete, "contrasts": [self._plain(each) for each in self.contrasts]}

    def _is_disturbed(self, result: ContrastResult) -> bool:
        """Tell whether an effect that counts is not excluded, in whatever direction: an interval that is merely wide
        has not shown that there is nothing."""
        counts, measured = abs(result.contrast.counts), result.difference
        return not (-counts < measured.low and measured.high < counts)

    def _plain(self, result: ContrastResult) -> dict[str, Any]:
        contrast, measured = result.contrast, result.difference
        return {
            "what": contrast.what,
            "claims": list(contrast.claims),
            "verdict": self.verdict(result),
            "mean": _short(measured.mean),
            "low": _short(measured.low),
            "high": _short(measured.high),
            "half": _short(measured.half),
            "visible": _short(measured.visible),
            **({} if math.isinf(result.room) else {"room": _short(result.room)}),
            "unit": contrast.measure.unit,
            "counts": contrast.counts,
            "seeds": len(measured.values),
        }


def findings(study: Study, records: Records) -> Findings:
    of = [tuple(_result(study, each, records) for each in part) for part in _parts(study)]
    return Findings(study, records, *of)


def _parts(study: Study) -> tuple[tuple[Contrast, ...], ...]:
    return study.contrasts, study.positive, study.negative, study.timed


def _result(study: Study, contrast: Contrast, records: Records) -> ContrastResult:
    measure = contrast.measure
    pairs = [
        (records[contrast.arm, seed], None if contrast.against is None else records[contrast.against, seed])
        for seed in study.seeds
        if all((arm, seed) in records for arm in contrast.arms)
    ]
    ours = [measure.of(mine) for mine, _ in pairs]
    theirs = None if contrast.against is None else [measure.of(other) for _, other in pairs if other is not None]
    measured = (
        share_difference(ours, theirs)
        if measure.grain
        else difference([measure.difference(mine, other) for mine, other in pairs])
    )
    return ContrastResult(contrast, measured, known_mean(ours), known_mean(theirs or ()))


def _short(value: float) -> float | None:
    return None if value != value else float(f"{value:.6g}")
