"""SIGTERM and SIGINT, once or twice or with SIGKILL behind it, at moments over the whole of a run."""

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from proximo.algorithms import DAPO
from proximo.runs.options import CheckpointOptions
from proximo_lab.faults.cases import Findings, NotRun
from proximo_lab.faults.processes import Child, Ended
from proximo_lab.faults.runs import RunSet, ledger_faults, small

GRACE = 0.5
"""Seconds between SIGTERM and the SIGKILL of who has no more patience."""
MOMENTS = (0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Moments of a run (RunSet.moment): start-up, first evaluation, steps, saves, the evaluation midway, the last one."""


def run(folder: Path, moments: Sequence[float] = MOMENTS, kinds: Sequence[str] = ()) -> Findings:
    """Try these kinds of signals, or all."""
    findings, seconds = Findings(), list[float]()
    runs = RunSet(folder / "run", small(DAPO, checkpoints=CheckpointOptions(every=3))).golden()
    runs.timed("again")  # the first has warmed things up
    for kind in kinds or STRIKES:
        strike, codes = STRIKES[kind]
        for moment in moments:

            def struck(kind: str = kind, strike=strike, codes=codes, moment: float = moment) -> str | None:
                name = f"{kind}-{moment}".replace(" ", "-").replace(",", "")
                for again in range(4):  # a machine that is busy for a while ends some runs early
                    child = runs.start(f"{name}-{again}")
                    at = time.monotonic() + runs.moment(moment * 0.9**again)
                    child.wait_for(lambda at=at: time.monotonic() > at)
                    asked = time.monotonic()
                    ended = strike(child)
                    if ended is not None and ended.code != 0:  # 0: it had just finished
                        if kind == TERM:
                            seconds.append(time.monotonic() - asked)
                        return _wrong(runs, f"{name}-{again}", ended, codes)
                raise NotRun("the run was over before the signal came")

            findings.attempt(kind, f"at {moment:.0%} of the run", "R", struck)
    findings.figures = (
        {"median_seconds": statistics.median(seconds), "longest_seconds": max(seconds)} if seconds else {}
    )
    findings.controls.append("each process was running when its signal was sent, and ended with that signal's code")
    return findings


def _wrong(runs: RunSet, name: str, ended: Ended, codes: tuple[int, ...]) -> str | None:
    if ended.complaint or ended.code not in codes:
        return ended.complaint or f"exit {ended.code}, not {codes}: {ended.printed[-300:]}"
    again = runs.finish(name)
    if again.complaint or again.code:
        return again.complaint or f"resuming ended with {again.code}: {again.printed[-300:]}"
    faults = ledger_faults(runs.folder / name)[1]
    return runs.difference(name) or (faults[0] if faults else None)


def _once(number: signal.Signals) -> Callable[[Child], Ended | None]:
    def strike(child: Child) -> Ended | None:
        return child.wait(60) if child.send(number) else None

    return strike


def _twice(number: signal.Signals) -> Callable[[Child], Ended | None]:
    def strike(child: Child) -> Ended | None:
        if not child.send(number):
            return None
        time.sleep(0.05)  # two that come together are one
        child.send(number)
        return child.wait(60)

    return strike


def _impatient(child: Child) -> Ended | None:
    if not child.send(signal.SIGTERM):
        return None
    until = time.monotonic() + GRACE
    child.wait_for(lambda: time.monotonic() > until)
    child.send(signal.SIGKILL)
    return child.wait(60)


TERM = "SIGTERM"
STRIKES: dict[str, tuple[Callable[[Child], Ended | None], tuple[int, ...]]] = {
    TERM: (_once(signal.SIGTERM), (143,)),
    "SIGINT": (_once(signal.SIGINT), (130,)),
    "SIGINT twice": (_twice(signal.SIGINT), (130,)),
    "SIGTERM twice": (_twice(signal.SIGTERM), (143,)),
    "SIGTERM, SIGKILL half a second later": (_impatient, (143, -signal.SIGKILL)),
}
