"""Engines of a fleet: killed, stopped, half-updated, stale; all of them at once, and the run that started them.

Servers are processes of their own. They have the embedded engine inside, which repeats to the bit, so that a run whose
engine was lost must leave what the undisturbed run leaves: its requests went to another engine with the same draws.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from proximo.algorithms import GRPO
from proximo.rl.config import EvaluationOptions
from proximo.runs.options import CheckpointOptions
from proximo.samplers.engines.options import Fleet
from proximo_lab.faults.cases import Findings
from proximo_lab.faults.engine_server import PLANTED, install
from proximo_lab.faults.processes import Child, Ended, side_by_side
from proximo_lab.faults.runs import RunSet, ledger_faults, small

ROOT = Path(__file__).resolve().parents[3]
STEPS, ENGINES = 4, 2
DEADLINE = 40.0
"""Seconds: a server starts within it on a busy machine, and a run waits so long for one that was stopped."""
LOST, FINISHED = "engine_lost", 0


def run(folder: Path) -> Findings:
    findings = Findings(figures={"runs": 0, "servers_left": 0})
    config = small(
        GRPO,
        steps=STEPS,
        evaluation=EvaluationOptions(problems=4),
        checkpoints=CheckpointOptions(every=1, keep=9),
        sampler=Fleet(engines=ENGINES, python=sys.executable, probe=8, deadline=DEADLINE),
    )
    servers = install(folder / "servers")
    sys.path.insert(0, str(servers))  # a fleet looks for vLLM in this Python first
    os.environ["PYTHONPATH"] = os.pathsep.join([str(servers), str(ROOT), str(ROOT / "src")])
    runs = RunSet(folder / "run", config)
    golden = _start(runs, "golden").wait()
    assert golden.code == FINISHED, f"an undisturbed run failed, {golden.code}: {golden.printed[-500:]}"
    kinds: Mapping[str, Callable[[RunSet, str], str | None]] = {
        "an engine is stopped": lambda runs, name: _engine_lost(runs, name, lambda pid, _: _stop(pid), "timed out"),
        "an engine is killed": lambda runs, name: _engine_lost(runs, name, lambda pid, _: _kill(pid), "failed"),
        "half an update": lambda runs, name: _engine_lost(runs, name, _plant("half an update"), "an update failed"),
        "a stale head": lambda runs, name: _engine_lost(runs, name, _plant("stale head"), "is not the policy"),
        "all engines are killed": _all_lost,
        "the run is killed": _run_killed,
    }
    works = {
        kind.replace(" ", "-"): lambda kind=kind, happens=happens: _tried(runs, kind, happens)
        for kind, happens in kinds.items()
    }
    results = side_by_side(works, folder)
    for kind in kinds:
        wrong, left = results[kind.replace(" ", "-")]
        is_resumed = kind in ("all engines are killed", "the run is killed")
        findings.judge(kind, "after its first step", "R" if is_resumed else "C", wrong)
        findings.figures["runs"] += 1
        findings.figures["servers_left"] += left
    findings.controls.append(
        "each engine was a process that had answered before; each lost engine is in the run's events with its reason"
    )
    return findings


def _tried(runs: RunSet, kind: str, happens: Callable[[RunSet, str], str | None]) -> list[Any]:
    """Problem of a case, and the number of servers that the run has left behind."""
    name = kind.replace(" ", "-")
    try:
        wrong = happens(runs, name)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    left = _left(_servers(runs, name))
    for pid in left:
        _kill(pid)
    return [wrong or (f"{len(left)} servers were left" if left else None), len(left)]


# Runs


def _planted(runs: RunSet, name: str) -> Path:
    return runs.folder / f"{name}-planted"


def _start(runs: RunSet, name: str) -> Child:
    """A run whose servers look for faults in a folder of its own."""
    _planted(runs, name).mkdir(exist_ok=True)
    os.environ[PLANTED] = str(_planted(runs, name))
    return runs.start(name)


def _started(runs: RunSet, name: str) -> Child:
    """A run that has made its first step."""
    child = _start(runs, name)
    if not child.wait_for(lambda: "step 1/" in child.printed):
        raise AssertionError(f"the run made no step: {child.printed[-300:]}")
    return child


def _servers(runs: RunSet, name: str) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in _planted(runs, name).glob("pid-*"))


def _events(runs: RunSet, name: str, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (runs.folder / name / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def _differs(runs: RunSet, name: str, ended: Ended) -> str | None:
    """Problem of a run that should have come to its end."""
    if ended.complaint or ended.code != FINISHED:
        return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
    faults = ledger_faults(runs.folder / name)[1]
    return runs.difference(name) or (faults[0] if faults else None)


def _engine_lost(runs: RunSet, name: str, strike: Callable[[int, Path], None], reason: str) -> str | None:
    """Lose one engine, which is replaced, and the run leaves what the undisturbed one leaves."""
    child = _started(runs, name)
    strike(_servers(runs, name)[0], _planted(runs, name))
    ended = child.wait()
    wrong = _differs(runs, name, ended)
    lost = [row["message"] for row in _events(runs, name, LOST)]
    if wrong is None and (len(lost) != 1 or reason not in lost[0]):
        return f"not one engine was lost for this reason: {lost}"
    if wrong is None and len(_servers(runs, name)) != ENGINES + 1:
        return f"{len(_servers(runs, name))} servers were started, not one more than {ENGINES}"
    return wrong


def _all_lost(runs: RunSet, name: str) -> str | None:
    """The run ends with one message, and resumes."""
    child = _started(runs, name)
    for pid in _servers(runs, name):
        _kill(pid)
    ended = child.wait()
    if ended.complaint or (ended.code != FINISHED and "engine" not in ended.printed.splitlines()[-1]):
        return ended.complaint or f"exit {ended.code} without a reason: {ended.printed[-300:]}"
    return _differs(runs, name, ended if ended.code == FINISHED else _start(runs, name).wait())


def _run_killed(runs: RunSet, name: str) -> str | None:
    """Kill the run: its servers end by themselves, and the run resumes."""
    child = _started(runs, name)
    before = [pid for pid in _servers(runs, name) if _is_running(pid)]
    child.send(signal.SIGKILL)
    if child.wait().code != -signal.SIGKILL or len(before) != ENGINES:
        return f"it was over before it was killed, or had {len(before)} servers"
    return _differs(runs, name, _start(runs, name).wait())


# Processes


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _plant(fault: str) -> Callable[[int, Path], None]:
    return lambda _, folder: (folder / fault).touch()


def _is_running(pid: int) -> bool:
    """Tell whether a server is there, and not dead and only not buried."""
    with suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _left(pids: list[int], patience: float = 10.0) -> list[int]:
    """Servers that are still there after a while: a keeper gives them some seconds to end."""
    until = time.monotonic() + patience
    while (running := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return running
