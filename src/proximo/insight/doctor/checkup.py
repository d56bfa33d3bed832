"""A run looked over from its folder alone: what its metrics show, what happened on the way, which files are damaged."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from proximo.health import ENOUGH, Finding, Severity, Spell, watched, worst_first
from proximo.insight.doctor.damage import damage
from proximo.insight.folder import RunFolder, State
from proximo.training.runfolder.log import EVENTS, METRICS


@dataclass(frozen=True)
class Happened:
    """A kind of event."""

    kind: str
    times: int
    step: int
    """Of the last."""
    message: str
    """Of the last."""


@dataclass(frozen=True)
class Checkup:
    """What a run's folder says about its health."""

    name: str
    state: State
    steps: int
    """That are done, by the number of the last row of metrics: rows before it may be lost."""
    held_out: Sequence[float]
    """Outcomes of its evaluations."""
    standing: Sequence[Spell]
    """Findings that are not over, with what is wrong with files, worst first."""
    passed: Sequence[Spell]
    """Those that were over again."""
    events: Sequence[Happened]

    @property
    def severity(self) -> Severity | None:
        """Of the worst that stands; None: healthy."""
        return self.standing[0].finding.severity if self.standing else None

    @property
    def is_short(self) -> bool:
        """Then that nothing is found says little: most rules need more steps."""
        return self.steps < ENOUGH

    def link(self, finding: Finding) -> str:
        """The address in the page of `proximo view`; of what no step shows, the run's."""
        where = f"&step={finding.step}&show={finding.show}" if finding.show else ""
        return f"#run={quote(self.name, safe='')}{where}"

    def to_dict(self) -> dict[str, Any]:

        def plain(spell: Spell) -> dict[str, Any]:
            more = {"last": spell.last, "latest": spell.latest, "link": self.link(spell.finding)}
            return asdict(spell.finding) | more

        return {
            "run": self.name,
            "state": self.state,
            "steps": self.steps,
            "enough_steps": ENOUGH,
            "severity": self.severity,
            "held_out": list(self.held_out),
            "findings": [plain(each) for each in self.standing],
            "passed": [plain(each) for each in self.passed],
            "events": [asdict(each) for each in self.events],
        }


def check_up(run: RunFolder) -> Checkup:
    """The findings of doctor, report and page alike. Reads checkpoints and rollouts to their last byte."""
    rows = run.rows(METRICS)
    watch = watched(rows)
    damaged = [Spell(each, each.step, each.message) for each in damage(run)]
    return Checkup(
        name=run.name,
        state=run.state,
        steps=rows[-1]["step"] + (run.format == 1) if rows else 0,  # format 1 counted from 0
        held_out=[each.outcome for each in watch.history.evaluations],
        standing=worst_first([*(spell for spell in watch.spells if not spell.is_over), *damaged]),
        passed=[spell for spell in watch.spells if spell.is_over],
        events=list(_events(run)),
    )


def standing(folder: Path) -> list[Finding]:
    """What a run's metrics show to be wrong at their end, worst first; nothing where there is no run."""
    try:
        return watched(RunFolder(folder).rows(METRICS)).standing()
    except ValueError:
        return []


def summary(folder: Path, most: int = 3) -> list[str]:
    """Lines for the end of a run: the worst findings that stand, and how to see them all; none where all is well."""
    found = standing(folder)
    lines = [f"{each.severity}, {each.rule} since step {each.step}: {each.message}" for each in found[:most]]
    more = f"{len(found) - most} more, and w" if len(found) > most else "w"
    return [*lines, f"{more}hat to do first: proximo doctor {folder}"] if lines else []


def _events(run: RunFolder) -> Iterator[Happened]:
    """What is not a finding, by kind, in the order of their first."""
    rows = [row for row in run.rows(EVENTS) if row.get("kind") != "finding"]
    for kind, times in Counter(str(row.get("kind")) for row in rows).items():
        last = next(row for row in reversed(rows) if str(row.get("kind")) == kind)
        step = last.get("step")
        yield Happened(kind, times, step if isinstance(step, int) else 0, str(last.get("message", "")))
