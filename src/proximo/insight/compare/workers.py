"""Runs the jobs in processes, as many in parallel as the cores allow. A failure does not affect the others."""

import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo.insight.compare.comparison_folder import ComparisonFolder
from proximo.insight.compare.plan import RunJob
from proximo.models import pick_device
from proximo.processes import tree
from proximo.processes.forkserver import StartedProcess, Starter, starter
from proximo.rl.config import RunConfig
from proximo.runs.signals import Stop
from proximo.system.machine import THREADS, Machine
from proximo.system.opening import open_file

WORKER = "proximo.insight.compare.worker"
USED_LATER = ("transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe")
"""Modules that a run imports when it loads a model; most of what they load is the same for other architectures."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at the processes."""
GRACE = 30.0
"""Seconds that running jobs get after the time when no more are started."""
TAIL = 4096
"""Bytes at the end of a log that are searched for the last line."""


@dataclass(frozen=True)
class RunFailure:
    job: RunJob
    message: str


def at_once(configs: Iterable[RunConfig], machines: Iterable[Machine]) -> int:
    """Number of parallel runs, each with the threads that it is fastest with; on a GPU one."""
    if not _on_cpu(configs):
        return 1
    return max(1, THREADS // max(machine.threads for machine in machines))


def _on_cpu(configs: Iterable[RunConfig]) -> bool:
    return all(pick_device(config.device) == "cpu" for config in configs)


def run_jobs(
    jobs: Sequence[RunJob],
    layout: ComparisonFolder,
    machines: Mapping[str, Machine],
    max_running: int,
    *,
    started: Callable[[RunJob], None],
    ended: Callable[[RunJob, RunFailure | None], None],
    waiting: Callable[[Sequence[RunJob]], None] = lambda _: None,
    accept_lost: bool = False,
    worker: str = WORKER,
    until: float = math.inf,
) -> list[RunFailure]:
    """Run all jobs to the end. On a stop signal, raises Stopped after every process has saved its run and ended.

    `waiting` is called regularly with the running jobs. `accept_lost`: resume although a log has lost rows. `worker`:
    the module that each process runs. `until`: reading of the monotonic clock after which no job is started; those
    that run GRACE seconds later save and end.
    """
    left, running, failures = deque(jobs), list[tuple[RunJob, StartedProcess]](), list[RunFailure]()
    processes = starter(worker, *USED_LATER, on_cpu=_on_cpu(job.config for job in jobs))
    with Stop() as stop:
        try:
            while left or running:
                stop.check()
                if time.monotonic() >= until:
                    left.clear()
                if time.monotonic() >= until + GRACE:
                    _end(process for _, process in running)
                    break
                while left and len(running) < max_running:
                    job = left.popleft()
                    running.append((job, _start(job, layout, machines[job.contender], accept_lost, processes)))
                    started(job)
                for job, process in [each for each in running if each[1].poll() is not None]:
                    running.remove((job, process))
                    failure = _failure(job, process.returncode, layout.log(job))
                    failures += [] if failure is None else [failure]
                    ended(job, failure)
                waiting([job for job, _ in running])
                time.sleep(LOOK_SECONDS)
        except BaseException:
            _end(process for _, process in running)
            raise
        finally:
            processes.close()
    return failures


def _start(
    job: RunJob, layout: ComparisonFolder, machine: Machine, accept_lost: bool, processes: Starter
) -> StartedProcess:
    """Start a job in a separate session: Ctrl-C goes to the comparison, which passes it on once."""
    arguments = (layout.config(job.contender), job.seed, layout.run(job), machine.threads)
    names = [json.dumps(list(each)) for each in (layout.trackers, layout.allowed)]
    return processes.start([*arguments, int(machine.onednn), int(accept_lost), *names], layout.log(job))


def _end(processes: Iterable[StartedProcess]) -> None:
    """Let the processes save and end; a second Ctrl-C kills them, losing only the steps since the last checkpoint."""
    processes = [process for process in processes if process.poll() is None]
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    except BaseException:
        for process in processes:
            tree.send_group(process.pid, signal.SIGKILL)
        raise


def _failure(job: RunJob, status: int, log: Path) -> RunFailure | None:
    if status == 0:
        return None
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    message = _last_line(log)
    return RunFailure(job, f"{how}{': ' + message if message else ''} (see {log})")


def _last_line(log: Path) -> str:
    """The last line of its output, made safe to print."""
    try:
        with open_file(log) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("error: ") if lines else ""
