"""Judges whose server hangs, talks nonsense, is busy or dies, in whole runs: a failure is unscored, and nothing is lost
with a server that dies."""

import os
import signal
import socket
import time
import zlib
from pathlib import Path
from typing import Any

from tests.rewards.judge_server import JudgeServer, case_of, verdict

from proximo.algorithms import GRPO
from proximo.rewards import Judge
from proximo.rl.config import EvaluationOptions
from proximo.system.lines import JsonLines
from proximo.tasks import File
from proximo_lab.faults.cases import Findings, NotRun
from proximo_lab.faults.processes import Child
from proximo_lab.faults.runs import RunSet, rows_file, small

EVERY = 4
"""Number of completions of which about one makes the judge fail."""
PATIENCE = 15.0


def run(folder: Path) -> Findings:
    findings = Findings(figures={"unscored": 0, "kept": 0})
    judges = Judges(folder, findings)
    try:
        for mode in ("hangs", "talks nonsense"):
            findings.attempt(f"in a run, a judge that {mode}", mode, "C", lambda m=mode: judges.unscored(m))
        findings.attempt("in a run, a judge that answers 429", "429", "C", judges.busy)
        findings.attempt("a judge that dies and comes back", "SIGKILL", "C", judges.restarted)
        findings.attempt("a judge that dies and stays away", "SIGKILL", "R", judges.gone)
    finally:
        judges.stop()
    return findings


def serve(port: int, mode: Path) -> None:
    """A judge that does what a file says, until it is killed. Its scores follow from what it is asked."""

    def answer(body: dict[str, Any]) -> Any:
        number = zlib.crc32(case_of(body)["completion"].encode())
        guilty = number % EVERY == 0
        match mode.read_text():
            case "hangs" if guilty:
                time.sleep(600)
            case "talks nonsense" if guilty:
                return "As a language model I like both."
            case "answers 429" if number % 2 and len(server.bodies) % 2:
                return 429, "slow down", ("Retry_After", "0.02")
        return verdict(number % 11)

    server = JudgeServer(answer, port=port)
    signal.pause()


class Judges:
    """Runs with a judge whose server is a process of its own."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.findings, self.mode, self.folder = findings, folder / "mode", folder
        self.mode.write_text("well")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._started = 0
        self.start()
        reward = Judge(
            f"http://127.0.0.1:{self.port}/v1", "judge", "Is it right?", seconds=1.0, retries=0, patience=PATIENCE
        )
        task = File(str(rows_file(folder)), reward=reward, held_out=0.3)
        self.runs = RunSet(folder / "run", small(GRPO, task=task, steps=4, evaluation=EvaluationOptions(problems=3)))
        self.runs.golden()

    def start(self) -> None:
        self._started += 1
        self.server = Child(lambda: serve(self.port, self.mode), self.folder / f"server-{self._started}.txt")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as asking:
                if asking.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise NotRun("no server could be started")

    def stop(self) -> None:
        if self.server.send(signal.SIGKILL):
            self.server.wait()

    def unscored(self, mode: str) -> str | None:
        name = mode.replace(" ", "-")
        self.mode.write_text(mode)
        try:
            ended = self.runs.finish(name)
        finally:
            self.mode.write_text("well")
        if ended.complaint or ended.code:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        unscored = sum(row.get("unscored", 0) for row in JsonLines(self.runs.folder / name / "metrics.jsonl"))
        self.findings.figures["unscored"] += unscored
        if not unscored:
            raise NotRun("no completion was at fault")
        is_told = "unscored" in (self.runs.folder / name / "events.jsonl").read_text()
        return None if is_told else "no event says so"

    def busy(self) -> str | None:
        self.mode.write_text("answers 429")
        try:
            ended = self.runs.finish("busy")
        finally:
            self.mode.write_text("well")
        waits = sum(row.get("judge_waits", 0) for row in JsonLines(self.runs.folder / "busy" / "timings.jsonl"))
        if not waits:
            raise NotRun("the judge was never busy")
        return ended.complaint or self.runs.difference("busy")

    def restarted(self) -> str | None:
        """A run waits for its judge, and then is as if nothing had been."""
        child = self._struck("restarted")
        time.sleep(1.0)
        self.start()
        ended = child.wait(120)
        return ended.complaint or (
            f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else self.runs.difference("restarted")
        )

    def gone(self) -> str | None:
        """A run ends before it trains on what was not judged, and a resume has all that was."""
        child = self._struck("gone")
        ended = child.wait(120)
        if ended.complaint or ended.code != 1:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        if "could not be reached" not in ended.printed:
            return f"no word of the judge: {ended.printed[-300:]}"
        self.start()
        kept = [row for file in (self.runs.folder / "gone" / "verdicts").iterdir() for row in JsonLines(file)]
        self.findings.figures["kept"] += len(kept)
        ended = self.runs.finish("gone")
        if ended.complaint or ended.code:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        rows = [row for file in (self.runs.folder / "gone" / "verdicts").iterdir() for row in JsonLines(file)]
        twice = len(rows) - len({row["key"] for row in rows})
        return f"{twice} verdicts were asked for twice" if twice else self.runs.difference("gone")

    def _struck(self, name: str) -> Child:
        """A run whose judge is killed after its first step."""
        child = self.runs.start(name)
        if not child.wait_for(lambda: "step 1/" in child.printed):
            raise AssertionError(f"it ended early: {child.printed[-300:]}")
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.wait()
        return child
