"""`rollout`: sampling in tokens per second, compared with TRL's `generate` and with the machine's limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from proximo.planning.published_shapes import QWEN_600M, Shape
from proximo.planning.roofline import decode_seconds, decode_step, limit_share, rollout_seconds
from proximo.planning.workloads import (
    C_135M_64,
    C_135M_256,
    C_TINY,
    C_TINY_ENDS,
    C_TINY_LORA,
    ENDS_1000,
    ENDS_2000,
    MEDIUM,
    SHARED,
    SMALL,
    UNTUNED,
    Workload,
)
from proximo_lab.bench.report import Row, Verdict, short
from proximo_lab.bench.session import Session, Turn, seconds_of
from proximo_lab.bench.sides.ablations import rollouts_without
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.tables.comparing import OF_LIMIT, Target, compared, described, refused_row, spread
from proximo_lab.bench.timing import Phases

STATIC = "TRL static"
EARLY, LATE = 64, 192
"""Tokens at which a rollout's clock is read; the time between is decoding alone."""


@dataclass(frozen=True)
class Beside:
    """Whole rollouts, ours and TRL's. Where completions end at random, rates and limits are those of each turn's own
    lengths, and ours is alone."""

    workload: Workload
    targets: tuple[Target, ...] = ()
    rate: float | None = None
    """Required tokens per second."""
    share: float | None = None
    """Required share of the limit."""

    @property
    def name(self) -> str:
        return self.workload.name

    def run(self, session: Session) -> list[Row]:
        workload, machine = self.workload, session.machine
        comparison = compared(
            session,
            workload,
            session.settings(workload, "best", "default", "static"),
            turn=lambda side: side.rollout,
            samples=True,
            learns=False,
        )
        if comparison.refused:
            return [refused_row(self.name, comparison)]
        turns, tokens = comparison.turns("rollout"), workload.completion_tokens
        rate = median(sum(lengths) / seconds for lengths, seconds in turns)
        share = limit_share(workload, machine, turns)
        verdicts = [] if self.rate is None else [Verdict("tok/s", rate, self.rate)]
        verdicts += [] if self.share is None else [Verdict("share of the limit", share, self.share)]
        figures = comparison.figures("rollout", "tok/s", lambda seconds: tokens / seconds) | {
            "ours tok/s": short(rate),
            "ours s": short(comparison.ours["rollout"].median),
            "ms a step": short(median(1000 * seconds / max(lengths) for lengths, seconds in turns)),
            OF_LIMIT: f"{share:.0%}",
        }
        limits = [rollout_seconds(workload, machine, lengths) for lengths, _ in turns]
        return [
            Row(
                self.name,
                figures=figures | comparison.first_turn("rollout") | comparison.peak(),
                ratios=comparison.ratios("rollout"),
                verdicts=(*comparison.verdicts(self.targets), *verdicts),
                note=comparison.note,
                details=comparison.details | {"limit seconds": limits, "machine": vars(machine)},
            )
        ]


@dataclass(frozen=True)
class DecodeShare:
    """Decode steps near the end of a context of `length`, compared with the machine's limit."""

    length: int
    bound: float
    rows: int = 256
    shape: Shape = QWEN_600M

    @property
    def name(self) -> str:
        return f"decode-{self.length}"

    def run(self, session: Session) -> list[Row]:
        workload = Workload(self.name, self.shape, self.rows, 1, self.length - LATE, LATE, 1)
        ours = session.ours(workload)
        early, late = session.measure(
            [Turn(f"first {EARLY}", partial(ours.rollout, EARLY)), Turn(f"first {LATE}", partial(ours.rollout, LATE))]
        )
        limit = sum(
            decode_step(workload, done, shared=False).seconds(workload.shape, session.machine)
            for done in range(EARLY, LATE)
        )
        seconds = late["rollout"].median - early["rollout"].median
        step = seconds / (LATE - EARLY)
        return [
            Row(
                self.name,
                figures={"ours tok/s": short(self.rows / step), "ms a step": short(1000 * step)},
                verdicts=(Verdict("share of the limit", limit / seconds, self.bound),),
                details={
                    "workload": described(workload),
                    "seconds": {"early": seconds_of(early), "late": seconds_of(late)},
                    "limit seconds": limit,
                    "machine": vars(session.machine),
                },
            )
        ]


@dataclass(frozen=True)
class SharedGain:
    """Decoding with each prompt's keys and values read once per group, and without."""

    workload: Workload
    bound: float

    @property
    def name(self) -> str:
        return f"prefix-{self.workload.prompt}"

    def run(self, session: Session) -> list[Row]:
        ours = session.ours(self.workload)
        off = replace(ours, switches={"shared_prefix": False}, policy=ours.model)
        sides = [("shared", ours), ("repeated", off)]
        turns = [Turn(name, side.rollout) for name, side in sides]
        turns += [Turn(f"{name}, prompts alone", partial(side.rollout, 1)) for name, side in sides]
        comparison = session.measure(turns)
        shared, repeated = (
            whole["rollout"].median - prompts["rollout"].median
            for whole, prompts in zip(comparison[:2], comparison[2:], strict=True)
        )
        limit, steps = decode_seconds(self.workload, session.machine, shared=True), self.workload.longest - 1
        return [
            Row(
                self.name,
                figures={"ms a step": short(1000 * shared / steps), OF_LIMIT: f"{limit / shared:.0%}"},
                verdicts=(Verdict("decode vs repeated prompts", repeated / shared, self.bound),),
                details=_seconds(self.workload, turns, comparison),
            )
        ]


@dataclass(frozen=True)
class Without:
    """A phase with one technique switched off at a time."""

    workload: Workload
    phase: str
    turns: Callable[[Ours], Sequence[Turn]]
    """The turns: ours first, then the variants."""

    @property
    def name(self) -> str:
        return self.workload.name

    def run(self, session: Session) -> list[Row]:
        turns = self.turns(session.ours(self.workload))
        return _without_rows(self.workload, turns, session.measure(turns), self.phase)


def _rollouts(ours: Ours) -> list[Turn]:
    return [Turn("ours", ours.rollout), *rollouts_without(ours)]


def _without_rows(workload: Workload, turns: Sequence[Turn], comparison: Sequence[Phases], phase: str) -> list[Row]:
    """Rows with the slow-down of each variant."""
    whole, details = comparison[0][phase], _seconds(workload, turns, comparison)
    rows = [Row(f"{workload.name}, with everything", figures={"seconds": short(whole.median)}, details=details)]
    for turn, phases in zip(turns[1:], comparison[1:], strict=True):
        figures, ratios = {"seconds": short(phases[phase].median)}, {"times as long": spread(phases[phase] / whole)}
        rows.append(Row(f"{workload.name}, {turn.name}", figures=figures, ratios=ratios))
    return rows


def _seconds(workload: Workload, turns: Sequence[Turn], comparison: Sequence[Phases]) -> dict[str, object]:
    measured = {turn.name: seconds_of(phases) for turn, phases in zip(turns, comparison, strict=True)}
    return {"workload": described(workload), "seconds": measured}


CPU = (Beside(C_TINY), Beside(C_TINY_LORA), Beside(C_135M_64), Beside(C_135M_256), Beside(C_TINY_ENDS))
GPU = (
    Beside(SMALL, (Target("rollout", 14.0),)),
    Beside(MEDIUM, (Target("rollout", 6.0), Target("rollout", 3.0, STATIC))),
    DecodeShare(512, 0.50),
    DecodeShare(2048, 0.75),
    SharedGain(SHARED, 1.7),
    SharedGain(MEDIUM, 1.0),
    Beside(ENDS_1000, rate=21_000, share=0.7),
    Beside(ENDS_2000, rate=12_500, share=0.7),
    *(Beside(workload) for workload in UNTUNED),
)
GPU_WITHOUT = (Without(MEDIUM, "rollout", _rollouts), Without(SHARED, "rollout", _rollouts))
