"""SIGKILL at random moments, again and again within a run; then it must be the run that nobody disturbed."""

import json
import random
import re
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from proximo.runs.checkpoints import CHECKPOINTS, newest_valid, step_of
from proximo_lab.faults.cases import Case, Findings
from proximo_lab.faults.processes import Child, side_by_side
from proximo_lab.faults.runs import RunSet, five, ledger_faults

KILLS = 50
"""Number of kills for each algorithm; those that came too late do not count."""
SEED = 20
STARTING = 0.25
"""Share of the kills that come before an attempt's first step has ended; the others come after one."""


NUMBERED = ("metrics.jsonl", "ledger.jsonl")
"""Logs that a resume cuts back to the checkpoint."""
NUMBERS = ("kills", "bit_equal", "prompts", "skipped_or_repeated", "rows", "rows_lost", "past_a_step")


def run(folder: Path, kills: int = KILLS, names: Sequence[str] = ("ppo", "grpo", "dapo", "gspo", "sapo")) -> Findings:
    findings = Findings()
    configs = five(folder)
    works = {name: partial(_swept, RunSet(folder / name, configs[name]), kills) for name in names}
    results = side_by_side(works, folder / "sweeps")
    for result in results.values():
        findings.cases += [Case(**case) for case in result["cases"]]
        findings.controls += result["controls"]
    redone = [steps for result in results.values() for steps in result["redone"]]
    findings.figures = {name: sum(result[name] for result in results.values()) for name in NUMBERS}
    findings.figures |= {"redone_median": statistics.median(redone), "redone_most": max(redone)}
    findings.controls.append(f"all {findings.figures['kills']} attempts that count ended by signal 9")
    return findings


def _swept(runs: RunSet, kills: int) -> dict[str, Any]:
    """Sweep over one algorithm's runs."""
    findings, name = Findings(), runs.folder.name
    sweep = Sweep(runs.golden(), f"SIGKILL at a random moment, {name}", kills)
    sweep.until_enough(findings)
    _check_reach(name, runs.folder / "golden", findings)
    numbers = {each: getattr(sweep, each) for each in (*NUMBERS, "redone")}
    return numbers | {"cases": [asdict(case) for case in findings.cases], "controls": findings.controls}


class Sweep:
    """Runs of one config, each killed until it ends."""

    def __init__(self, runs: RunSet, kind: str, wanted: int) -> None:
        self.runs, self.kind, self.wanted = runs, kind, wanted
        self.chance = random.Random(f"{SEED} {kind}")
        self.kills = self.past_a_step = self.bit_equal = self.prompts = self.skipped_or_repeated = 0
        self.rows = self.rows_lost = 0
        self.redone: list[int] = []

    def until_enough(self, findings: Findings) -> None:
        for number in range(10 * self.wanted):
            if self.kills >= self.wanted:
                return
            self._one(f"run-{number}", findings)

    def _one(self, name: str, findings: Findings) -> None:
        """Run, killed until it has finished or there were enough kills; each kill is a case."""
        folder, before = self.runs.folder / name, self.kills
        rows: dict[str, set[bytes]] = {file: set() for file in NUMBERED}
        ended = None
        while self.kills < self.wanted and ended is None:
            length = len(self._printed(name))
            child = self.runs.start(name)
            self._wait(child, name, length)
            seen = _rows(folder)
            child.send(signal.SIGKILL)
            ended = child.wait()
            if ended.code == -signal.SIGKILL:  # else it came to its end before
                ended = None
                self._count(folder, seen)
                self.past_a_step += self._steps(name, length) > 0
                for file in rows:
                    rows[file] |= {*seen.get(file, ()), *_rows(folder).get(file, ())}
        ended = ended or self.runs.finish(name)
        wrong = self._wrong(name, ended.code, ended.complaint, rows)
        for number in range(self.kills - before):
            findings.judge(self.kind, f"{name}, kill {number}", "R", wrong)
        self.bit_equal += (self.kills - before) * (wrong is None)

    def _count(self, folder: Path, seen: dict[str, list[bytes]]) -> None:
        """A kill that came in time. Events and times that could be read before it are to be there after it; rows of
        numbers are looked for in the end, for those behind the checkpoint are made again."""
        self.kills += 1
        after = _rows(folder)
        for file in seen.keys() - set(NUMBERED):
            self.rows += len(seen[file])
            self.rows_lost += sum(a != b for a, b in zip(seen[file], after[file], strict=False))
            self.rows_lost += max(len(seen[file]) - len(after[file]), 0)
        self.redone.append(_redone(folder))

    def _printed(self, name: str) -> str:
        file = self.runs.folder / f"{name}.txt"
        return file.read_text() if file.exists() else ""

    def _wrong(self, name: str, code: int, complaint: str | None, rows: dict[str, set[bytes]]) -> str | None:
        folder = self.runs.folder / name
        if complaint or code != 0:
            return complaint or f"exit {code}: {self._printed(name)[-300:]}"
        drawn, faults = ledger_faults(folder)
        self.prompts += drawn
        self.skipped_or_repeated += len(faults)
        final = _rows(folder)
        for file, known in rows.items():
            self.rows += len(known)
            self.rows_lost += len(known - set(final[file]))
        return self.runs.difference(name) or (faults[0] if faults else None)

    def _wait(self, child: Child, name: str, length: int) -> None:
        """Wait until a random moment of the start-up or of what follows a step: a save, evaluation, the next one."""
        if self.chance.random() < STARTING:
            moment = time.monotonic() + self.chance.random() * self.runs.start_up
        else:
            steps = self.chance.choice((1, 1, 2, 3))
            child.wait_for(lambda: self._steps(name, length) >= steps)
            moment = time.monotonic() + self.chance.random() * 1.5 * self.runs.step
        child.wait_for(lambda: time.monotonic() > moment)

    def _steps(self, name: str, length: int) -> int:
        """Number of steps that an attempt has done, by what it has printed since."""
        return len(re.findall(r"(?m)^step \d+/", self._printed(name)[length:]))


def _rows(folder: Path) -> dict[str, list[bytes]]:
    """Whole rows of each log."""
    return {file.name: file.read_bytes().split(b"\n")[:-1] for file in folder.glob("*.jsonl")}


def _redone(folder: Path) -> int:
    """Steps that a resume has to do again."""
    point, _ = newest_valid(folder / CHECKPOINTS)
    rows = _rows(folder).get("ledger.jsonl", [])
    last = max((json.loads(row)["step"] for row in rows), default=0)
    return last - (0 if point is None else step_of(point))


def _check_reach(name: str, golden: Path, findings: Findings) -> None:
    """Check that there was something to lose."""
    states = {json.loads(row)["state"] for row in _rows(golden)["ledger.jsonl"]}
    wanted = {"dapo": {"trained", "filtered"}}.get(name, {"trained"})
    if not wanted <= states:
        findings.add("reach", name, "failed", f"its ledger knows only {', '.join(sorted(states))}")
    if name == "dapo":
        findings.controls.append("the DAPO run filters prompts")
