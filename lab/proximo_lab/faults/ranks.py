"""Ranks of a run that die, hang or cannot write: the group starts again from its newest checkpoint, or goes on."""

import json
import os
import resource
import signal
import time
from pathlib import Path

from proximo.algorithms import PPO
from proximo.learner.ranks import Ranks
from proximo.models.values import OwnLayers
from proximo.rl.config import ValueOptions
from proximo_lab.faults.cases import Findings, NotRun
from proximo_lab.faults.processes import Child, Ended, descendants
from proximo_lab.faults.runs import RunSet, ledger_faults, small

TIMEOUT = 20.0
"""Seconds after which a rank counts as lost; on a busy machine ranks may start that far apart."""
STEPS = 4


def run(folder: Path) -> Findings:
    findings = Findings()
    config = small(PPO, value=ValueOptions(OwnLayers(1)), ranks=Ranks(processes=2, timeout=TIMEOUT), steps=STEPS)
    runs = RunSet(folder / "run", config).golden()

    def struck(name: str, number: signal.Signals, seen: str) -> str | None:
        child = runs.start(name)
        _at_step(child, 2)
        os.kill(_rank(child, 1), number)
        return _wrong(runs, name, child.wait(), f"rank 1 {seen}: all are started again")

    def cannot_write() -> str | None:
        child = runs.start("full")
        _at_step(child, 1)
        pid, events = _rank(child, 1), runs.folder / "full" / "events.jsonl"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        if not child.wait_for(lambda: events.exists() and "save_failed" in events.read_text()):
            raise NotRun(f"no save failed: {child.printed[-300:]}")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ended = child.wait()
        kinds = [json.loads(line)["message"] for line in events.read_text().splitlines() if "save_failed" in line]
        if not all("rank 1: " in each and "older ones are unchanged" in each for each in kinds):
            return f"another failure: {kinds}"
        return _wrong(runs, "full", ended, "no checkpoint after step")

    def abandoned() -> str | None:
        child = runs.start("abandoned")
        _at_step(child, 2)
        below = descendants(child.pid)
        child.send(signal.SIGKILL)
        child.wait()
        until = time.monotonic() + 4 * TIMEOUT
        while (left := _running(below)) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            return f"{len(left)} ranks are left"
        return _wrong(runs, "abandoned", runs.finish("abandoned"), "")

    findings.attempt(
        "a rank that dies", "SIGKILL", "R", lambda: struck("killed", signal.SIGKILL, "was ended by SIGKILL")
    )
    findings.attempt("a rank that is stopped", "SIGSTOP", "R", lambda: struck("stopped", signal.SIGSTOP, "hangs"))
    findings.attempt("a rank that cannot write its shard", "then it can", "C", cannot_write)
    findings.attempt("a launcher that is killed", "then the command is repeated", "R", abandoned)
    findings.controls.append(
        "each rank was running when it was struck, and what became of the group was said in a line"
    )
    return findings


def _at_step(child: Child, step: int) -> None:
    if not child.wait_for(lambda: f"step {step}/" in child.printed) or child.poll() is not None:
        raise NotRun(f"the run was over before the fault came: {child.printed[-300:]}")


def _rank(child: Child, rank: int) -> int:
    """Process id of a rank of the run that a child has launched."""
    for pid in descendants(child.pid):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise NotRun(f"there is no rank {rank}: {child.printed[-300:]}")


def _running(pids: list[int]) -> list[int]:
    """Processes that have not ended."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _wrong(runs: RunSet, name: str, ended: Ended, line: str) -> str | None:
    if ended.code or line not in ended.printed:
        return f"exit {ended.code}, and not {line!r}: {ended.printed[-300:]}"
    faults = ledger_faults(runs.folder / name)[1]
    return runs.difference(name) or (faults[0] if faults else None)
