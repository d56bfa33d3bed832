"""`step`: sample, grade and learn once, compared with TRL's loop; both phases are reported too."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from proximo.planning.roofline import DeviceLimits, Drawn, arithmetic_share, limit_share
from proximo.planning.workloads import (
    C_135M_64,
    C_135M_256,
    C_TINY,
    C_TINY_ENDS,
    C_TINY_LORA,
    ENDS_1000,
    ENDS_2000,
    LONG_PROMPT,
    MEDIUM,
    SMALL,
    UNTUNED,
    Workload,
)
from proximo_lab.bench.memory import release
from proximo_lab.bench.report import Row, Verdict, short
from proximo_lab.bench.session import Failed, Session, Turn, seconds_of
from proximo_lab.bench.sides.trl import Trl
from proximo_lab.bench.tables.comparing import (
    FIRST,
    GIB,
    OF_ARITHMETIC,
    OF_LIMIT,
    Target,
    compared,
    described,
    refused_row,
)
from proximo_lab.bench.timing import TOTAL

PHASES = ("rollout", "train", TOTAL)


def first_step(peer: Trl) -> None:
    """Make an update on fixed completions, to compare numbers, and a whole step, to see whether memory suffices."""
    peer.training()
    learned = peer.losses, peer.gradient_norm
    peer.fixed = False
    peer.step()
    peer.losses, peer.gradient_norm = learned


@dataclass(frozen=True)
class Beside:
    workload: Workload
    targets: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        return self.workload.name

    def run(self, session: Session) -> list[Row]:
        workload = self.workload
        comparison = compared(
            session,
            workload,
            session.settings(workload, "best", "default", "compiled"),
            turn=lambda side: side.step,
            first=first_step,
            samples=True,
            learns=True,
        )
        if comparison.refused:
            return [refused_row(self.name, comparison)]
        shares = shares_of(workload, session.machine, {phase: comparison.turns(phase) for phase in PHASES})
        rows = [
            Row(
                f"{self.name} {phase}",
                figures=comparison.figures(phase, "s", lambda seconds: seconds)
                | shares[phase]
                | comparison.first_turn(phase),
                ratios=comparison.ratios(phase),
                verdicts=comparison.verdicts([target for target in self.targets if target.phase == phase]),
            )
            for phase in PHASES
        ]
        whole = replace(
            rows[-1], figures=rows[-1].figures | comparison.peak(), note=comparison.note, details=comparison.details
        )
        return [*rows[:-1], whole]


def shares_of(workload: Workload, machine: DeviceLimits, turns: Mapping[str, Drawn]) -> dict[str, dict[str, str]]:
    """Shares that the phases reached: the rollout of its limit, training of the arithmetic."""
    rolled = limit_share(workload, machine, turns["rollout"])
    trained = arithmetic_share(workload, machine, turns["train"])
    return {"rollout": {OF_LIMIT: f"{rolled:.0%}"}, "train": {OF_ARITHMETIC: f"{trained:.0%}"}, TOTAL: {}}


@dataclass(frozen=True)
class Fits:
    """A step that needs much memory: TRL is tried first and alone, then ours."""

    workload: Workload
    limit: float
    """Maximum GiB of our side."""

    @property
    def name(self) -> str:
        return self.workload.name

    def run(self, session: Session) -> list[Row]:
        notes = []
        for settings in session.settings(self.workload, "best"):
            peer = session.opened(self.workload, settings, first_step)
            notes.append(f"{settings.name} {peer.why if isinstance(peer, Failed) else 'runs too'}")
            if isinstance(peer, Trl):
                peer.close()
        release(session.device)
        ours = session.ours(self.workload)
        side = Turn("ours", ours.step)
        first = session.begin(side)
        [phases] = session.measure([side], begun=1)
        peak = max(ours.watch.peaks.values()) / GIB
        drawn = ours.drawn[-session.options.steps :]
        turns = {phase: [*zip(drawn, phases[phase].seconds, strict=True)] for phase in PHASES}
        shares = shares_of(self.workload, session.machine, turns)
        rows = [
            Row(
                f"{self.name} {phase}",
                figures={"ours s": short(phases[phase].median)} | shares[phase] | {FIRST: short(first[phase])},
            )
            for phase in PHASES
        ]
        whole = replace(
            rows[-1],
            figures=rows[-1].figures | {"ours GiB": f"{peak:.1f}"},
            verdicts=(Verdict("peak GiB", peak, self.limit, at_least=False),),
            note="; ".join(notes),
            details={
                "seconds": seconds_of(phases),
                "first turn": first,
                "peaks": dict(ours.watch.peaks),
                "workload": described(self.workload),
            },
        )
        return [*rows[:-1], whole]


CPU = (
    Beside(C_TINY),
    Beside(C_TINY_ENDS),
    Beside(C_TINY_LORA),
    Beside(C_135M_64, (Target(TOTAL, 3.0),)),
    Beside(C_135M_256, (Target(TOTAL, 4.0),)),
)
GPU = (
    Beside(SMALL, (Target("rollout", 14.0),)),
    Beside(MEDIUM, (Target(TOTAL, 8.0), Target("rollout", 6.0), Target("train", 3.0))),
    Fits(LONG_PROMPT, 60.0),
    *(Beside(workload) for workload in (ENDS_1000, ENDS_2000, *UNTUNED)),
)
