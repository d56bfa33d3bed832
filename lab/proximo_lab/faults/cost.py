"""Cost of safety: seconds inside the code for checkpoints, ledger, events and reward workers, in the demo."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proximo.cli import main
from proximo.processes.sandbox import NoSandbox, Sandbox, SandboxJob
from proximo.rewards import PythonFunction
from proximo.types import Completion, Problem
from proximo_lab.faults.cases import Findings
from proximo_lab.faults.processes import Child

MAX_SHARE = 0.02
"""The share of the demo's time that all of it may take."""
ROUNDS = 40


def run(folder: Path, arguments: tuple[str, ...] = ()) -> Findings:
    """Time the demo, which `arguments` make smaller."""
    findings = Findings()
    child = Child(lambda: _demo(folder, arguments), folder / "demo.txt")
    ended = child.wait(1800)
    assert ended.code == 0, ended.printed[-500:]
    known = json.loads((folder / "cost.json").read_text())
    parts = known["parts"]
    share = sum(parts.values()) / known["seconds"]
    shown = ", ".join(f"{name} {seconds / known['seconds']:.2%}" for name, seconds in parts.items())
    findings.figures = {
        "seconds": known["seconds"],
        "share": share,
        "parts": shown,
        "rollouts": known["rollouts"] / known["seconds"],
        "save_ms": 1e3 * known["save_seconds"] / max(known["saves"], 1),
        "fsync_ms": 1e3 * known["fsync_seconds"] / max(known["saves"], 1),
        "worker_ms": _worker_ms(),
        "sandbox_ms": _sandbox_ms(),
    }
    wrong = None if share < MAX_SHARE else f"{share:.2%} of the demo's time ({shown})"
    findings.judge("safety takes 2 % of the demo or more", "the demo", "C", wrong)
    findings.controls.append(f"the timed functions were called {known['calls']} times in the demo")
    return findings


class Clock:
    """Seconds inside functions that are wrapped from outside; one that is called by another counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls = 0
        self._depth = 0

    @contextmanager
    def inside(self, name: str):
        self._depth, start = self._depth + 1, time.perf_counter()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.calls += 1
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def wrap(self, holder: Any, function: str, name: str) -> None:
        real: Callable = getattr(holder, function)

        def timed(*arguments, **more):
            with self.inside(name):
                return real(*arguments, **more)

        setattr(holder, function, timed)


def watched() -> list[tuple[Any, str, str]]:
    """Functions that keep a run safe: where each is, its name, and what it is counted as."""
    from proximo.rewards import workers
    from proximo.rl import train as stepping
    from proximo.runs.checkpointer import Checkpointer
    from proximo.runs.log import RunLog
    from proximo.runs.session import RunSession

    saved = [(Checkpointer, name, "checkpoints") for name in ("save", "snapshot", "restore")]
    begun = [(RunSession, name, "checkpoints") for name in ("start", "finish")]
    logged = [(RunLog, "ledger", "ledger"), (RunLog, "event", "events"), (RunLog, "metrics", "log")]
    return [
        *saved,
        *begun,
        *logged,
        (RunLog, "timings", "log"),
        (stepping, "entries", "ledger"),
        (workers.Worker, "call", "reward workers"),
    ]


def _demo(folder: Path, arguments: tuple[str, ...]) -> int:
    """`proximo train` as it comes, with clocks around what keeps it safe."""
    from proximo.runs.checkpointer import Checkpointer
    from proximo.runs.log import RunLog

    clock, written, disk = Clock(), Clock(), Clock()
    for holder, function, name in watched():
        clock.wrap(holder, function, name)
    written.wrap(RunLog, "rollouts", "rollouts")
    saves = Clock()
    saves.wrap(Checkpointer, "_write", "saves")
    disk.wrap(os, "fsync", "fsync")
    start = time.perf_counter()
    code = main(["train", "--run", str(folder / "demo"), *arguments])
    known = {
        "seconds": time.perf_counter() - start,
        "parts": clock.seconds,
        "calls": clock.calls,
        "rollouts": written.seconds.get("rollouts", 0.0),
        "saves": saves.calls,
        "save_seconds": saves.seconds.get("saves", 0.0),
        "fsync_seconds": disk.seconds.get("fsync", 0.0),
    }
    (folder / "cost.json").write_text(json.dumps(known))
    return code


def _worker_ms() -> float:
    """Milliseconds of a group scored by a function in its worker, beyond those of the same call here."""
    from proximo_lab.faults.gentle_reward import first

    reward = PythonFunction(f"{Path(__file__).with_name('gentle_reward.py')}:first")
    problems = [Problem("p", "1+1=", "2")] * 8
    completions = [Completion((1,), (-0.1,), f"{number}", "stop") for number in range(8)]
    reward(problems, completions)  # the worker starts
    here = _median_ms(lambda: first([each.text for each in completions]))
    return _median_ms(lambda: reward(problems, completions)) - here


def _sandbox_ms() -> float:
    try:
        sandbox = Sandbox(workers=1)
    except NoSandbox as missing:
        print(f"no sandbox here: {missing}", file=sys.stderr)
        return float("nan")
    try:
        sandbox.run(SandboxJob("print(1)"))  # the server starts
        return _median_ms(lambda: sandbox.run(SandboxJob("print(1)")))
    finally:
        sandbox.close()


def _median_ms(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)
