"""A run looked over from its folder alone: what its metrics show, what happened on the way, which files are damaged."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from proximo.health import ENOUGH, Finding, Severity, Spell, watched, worst_first
from proximo.insight.folder import RunFolder, State
from proximo.storage.folders import complaints
from proximo.training.checkpoints import CHECKPOINTS, saved, step_of
from proximo.training.runlog import EVENTS, METRICS

MAGIC = b"PAR1"
"""How a whole Parquet file ends."""


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
    """Whose metrics are there."""
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
    """Reads every checkpoint to its last byte: of large models that takes a while."""
    rows = run.rows(METRICS)
    watch = watched(rows)
    damage = [Spell(each, each.step, each.message) for each in _damage(run)]
    return Checkup(
        name=run.name,
        state=run.state,
        steps=sum(not any(name.startswith("held_out/") for name in row) for row in rows),
        held_out=[each.outcome for each in watch.history.evaluations],
        standing=worst_first([*(spell for spell in watch.spells if not spell.is_over), *damage]),
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


def _damage(run: RunFolder) -> Iterator[Finding]:
    yield from _damaged_checkpoints(run)
    yield from _damaged_files(run)
    yield from _ending(run)


def _events(run: RunFolder) -> Iterator[Happened]:
    """What is not a finding, by kind, in the order of their first."""
    rows = [row for row in run.rows(EVENTS) if row.get("kind") != "finding"]
    for kind, times in Counter(str(row.get("kind")) for row in rows).items():
        last = next(row for row in reversed(rows) if str(row.get("kind")) == kind)
        step = last.get("step")
        yield Happened(kind, times, step if isinstance(step, int) else -1, str(last.get("message", "")))


def _damaged_checkpoints(run: RunFolder) -> Iterator[Finding]:
    found = saved(run.path / CHECKPOINTS)
    damaged = {path: wrong for path in found if (wrong := complaints(path)) and path.is_dir()}
    for path, wrong in damaged.items():
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        whole = next((other for other in found if other not in damaged), None)
        yield Finding(
            rule="damaged-checkpoint",
            severity="warning" if whole else "failing",
            step=step_of(path) - 1,
            message=f"{CHECKPOINTS}/{path.name} is not as it was written ({wrong[0]}{more})",
            remedy=f"use {CHECKPOINTS}/{whole.name}, the newest that is whole"
            if whole
            else "train again: none is whole",
            show="",
        )
    last = (run.result or {}).get("checkpoint")
    if isinstance(last, str) and last not in {path.name for path in found}:
        remedy = "put it back, or give the command of the run again, which makes it anew"
        message = f"{CHECKPOINTS}/{last}, which the run ended with, is not there"
        yield Finding("missing-checkpoint", "warning", -1, message, remedy, "")


def _damaged_files(run: RunFolder) -> Iterator[Finding]:
    for name in (METRICS, EVENTS):
        lines = _read(run.path / name).count(b"\n")
        if (lost := lines - len(run.rows(name))) > 0:
            message = f"{lost} of the {lines} rows of {name} cannot be read"
            yield Finding("damaged-file", "warning", -1, message, "what is made of them lacks those rows", "")
    torn = [number for number in run.steps() if not _read(run.step_file(number), last=len(MAGIC)).endswith(MAGIC)]
    if torn:
        message = f"the rollouts of {len(torn)} steps are not whole, the first of step {torn[0]}"
        yield Finding("damaged-file", "warning", torn[0], message, "remove them: nothing else needs them", "")


def _ending(run: RunFolder) -> Iterator[Finding]:
    """An attempt that failed, and that no other has followed."""
    attempts = run.record.get("attempts")
    last = attempts[-1] if isinstance(attempts, list) and attempts else None
    how = last.get("ended") if isinstance(last, dict) else None
    if run.state == "stopped" and isinstance(how, str) and how.startswith("failed"):
        remedy = "put right what it names, then give the same command again"
        step = max(run.steps(), default=-1)
        yield Finding("failed", "failing", step, f"the run ended early: {how.removeprefix('failed: ')}", remedy, "")


def _read(path: Path, last: int | None = None) -> bytes:
    """A file, or its last bytes; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(file.seek(0, 2) - last, 0))
            return file.read()
    except OSError:
        return b""
