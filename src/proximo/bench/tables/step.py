"""`step`: sample, grade and learn once, compared with TRL's loop; both phases are reported too."""

from dataclasses import dataclass, replace

from proximo.bench.memory import release
from proximo.bench.report import Row, Verdict, short
from proximo.bench.session import Failed, Session, Turn, seconds_of
from proximo.bench.sides.trl import Trl
from proximo.bench.tables.comparing import FIRST, GIB, Target, compared, described, refused_row
from proximo.bench.timing import TOTAL
from proximo.bench.workloads import C_135M_64, C_135M_256, C_TINY, LONG_PROMPT, MEDIUM, SMALL, Workload

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
        found = compared(
            session,
            workload,
            session.settings(workload, "best", "default", "compiled"),
            turn=lambda side: side.step,
            first=first_step,
            samples=True,
            learns=True,
        )
        if found.refused:
            return [refused_row(self.name, found)]
        rows = [
            Row(
                f"{self.name} {phase}",
                figures=found.figures(phase, "s", lambda seconds: seconds) | found.first_turn(phase),
                ratios=found.ratios(phase),
                verdicts=found.verdicts([target for target in self.targets if target.phase == phase]),
            )
            for phase in PHASES
        ]
        whole = replace(rows[-1], figures=rows[-1].figures | found.peak(), note=found.note, details=found.details)
        return [*rows[:-1], whole]


@dataclass(frozen=True)
class Fits:
    """A step that needs much memory: TRL is tried first and alone, then ours."""

    workload: Workload
    most: float
    """Maximum GiB of our side."""

    @property
    def name(self) -> str:
        return self.workload.name

    def run(self, session: Session) -> list[Row]:
        said = []
        for settings in session.settings(self.workload, "best"):
            peer = session.opened(self.workload, settings, first_step)
            said.append(f"{settings.name} {peer.why if isinstance(peer, Failed) else 'runs too'}")
            if isinstance(peer, Trl):
                peer.close()
        release(session.device)
        ours = session.ours(self.workload)
        side = Turn("ours", ours.step)
        first = session.begin(side)
        [phases] = session.measure([side], begun=1)
        peak = max(ours.watch.peaks.values()) / GIB
        rows = [
            Row(f"{self.name} {phase}", figures={"ours s": short(phases[phase].median), FIRST: short(first[phase])})
            for phase in PHASES
        ]
        whole = replace(
            rows[-1],
            figures=rows[-1].figures | {"ours GiB": f"{peak:.1f}"},
            verdicts=(Verdict("peak GiB", peak, self.most, at_least=False),),
            note="; ".join(said),
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
    Beside(C_135M_64, (Target(TOTAL, 2.2),)),
    Beside(C_135M_256, (Target(TOTAL, 4.0),)),
)
GPU = (
    Beside(SMALL, (Target("rollout", 14.0),)),
    Beside(MEDIUM, (Target(TOTAL, 6.0), Target("rollout", 6.0), Target("train", 3.0))),
    Fits(LONG_PROMPT, 60.0),
)
