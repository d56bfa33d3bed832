"""Rollouts whose completions end at random: our side, compared with the limit for the lengths that were drawn."""

from dataclasses import dataclass
from statistics import median

from proximo.bench.report import Row, Verdict, short
from proximo.bench.roofline import rollout_seconds
from proximo.bench.session import Session, Turn, seconds_of
from proximo.bench.tables.comparing import ALONE, FIRST, described
from proximo.bench.workloads import Workload


@dataclass(frozen=True)
class RandomEnds:
    """Lengths differ from turn to turn, so rates and limits are computed for each turn."""

    workload: Workload
    rate: float | None = None
    """Required tokens per second."""
    share: float | None = None
    """Required share of the limit."""

    @property
    def name(self) -> str:
        return self.workload.name

    def run(self, session: Session) -> list[Row]:
        workload = self.workload
        ours = session.ours(workload)
        side = Turn("ours", ours.rollout)
        first = session.begin(side)
        [phases] = session.measure([side], begun=1)
        seconds = phases["rollout"].seconds
        drawn = ours.drawn[-len(seconds) :]
        limits = [rollout_seconds(workload, session.machine, lengths) for lengths in drawn]
        rate = median(sum(lengths) / taken for lengths, taken in zip(drawn, seconds, strict=True))
        share = median(limit / taken for limit, taken in zip(limits, seconds, strict=True))
        verdicts = [] if self.rate is None else [Verdict("tok/s", rate, self.rate)]
        verdicts += [] if self.share is None else [Verdict("share of the limit", share, self.share)]
        return [
            Row(
                self.name,
                figures={
                    "ours tok/s": short(rate),
                    "of the limit": f"{share:.0%}",
                    FIRST: short(first["rollout"]),
                    "pages": short(ours.sampler.pages),
                },
                verdicts=tuple(verdicts),
                note=ALONE,
                details={
                    "workload": described(workload),
                    "seconds": seconds_of(phases),
                    "first turn": first,
                    "drawn": [{"tokens": sum(lengths), "longest": max(lengths)} for lengths in drawn],
                    "limit seconds": limits,
                    "pages": ours.sampler.pages,
                    "peaks": dict(ours.watch.peaks),
                    "machine": vars(session.machine),
                },
            )
        ]
