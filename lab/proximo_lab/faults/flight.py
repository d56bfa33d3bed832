"""Runs that sample ahead while weights change, on two ranks and two engines: any of their processes is killed at random
moments, again and again. Which group is in which step is decided by time, so these runs do not repeat; but every prompt
must be drawn once and end once, every step must have its groups, and none may be older than the bound.
"""

import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from proximo.algorithms import GRPO
from proximo.learner.ranks import Ranks
from proximo.losses import TokenTruncated
from proximo.processes.server import free_port
from proximo.rl.config import AheadOptions, EvaluationOptions
from proximo.runs.checkpoints import CHECKPOINTS, newest_valid
from proximo.runs.options import CheckpointOptions
from proximo.samplers.engines.options import Fleet
from proximo.samplers.sampler import SamplingOptions
from proximo_lab.faults.cases import Findings
from proximo_lab.faults.engine_server import ASKS_FOR_ONE, FORKS, PACE, PLANTED, install, serve_forks
from proximo_lab.faults.processes import TRACEBACK, Child, Ended, descendants
from proximo_lab.faults.runs import RunSet, ledger_faults, small

ROOT = Path(__file__).resolve().parents[3]
KILLS = 8
SEED = 21
STEPS, STALENESS = 8, 2
VICTIMS = ("learner", "rank", "engine", "driver")
STARTING = 0.4
"""Share of the kills that may come before a further step has ended."""
TIMEOUT = 60.0
"""Seconds after which a rank counts as lost."""
PATIENCE = 400.0
"""Seconds until an attempt makes a step, on a busy machine."""
SECONDS_A_TOKEN = 0.25
"""Delay of engines, so that completions are in flight when a checkpoint is written."""


def run(folder: Path, kills: int = KILLS) -> Findings:
    config = small(
        replace(GRPO, correct=TokenTruncated()),
        steps=STEPS,
        sampling=SamplingOptions(temperature=2.5, max_tokens=12),
        evaluation=EvaluationOptions(problems=0),
        checkpoints=CheckpointOptions(every=1, keep=2),
        ranks=Ranks(processes=2, timeout=TIMEOUT),
        sampler=Fleet(engines=2, python=sys.executable, probe=8, deadline=TIMEOUT),
        ahead=AheadOptions(STALENESS, switch="in_flight", window=0.7),
    )
    servers = install(folder / "servers", ASKS_FOR_ONE)
    sys.path.insert(0, str(servers))  # a fleet looks for vLLM in this Python first
    os.environ["PYTHONPATH"] = os.pathsep.join([str(servers), str(ROOT), str(ROOT / "src")])
    os.environ |= {PACE: str(SECONDS_A_TOKEN), PLANTED: str(folder / "planted"), FORKS: str(folder / "forks")}
    (folder / "planted").mkdir()
    for name in ("proximo.distributed.rank0", "proximo.samplers.engines.building", "torch.distributed.checkpoint"):
        import_module(name)  # for all that are forked from here
    forks = Child(lambda: serve_forks(os.environ[FORKS]), folder / "forks.txt")
    findings = Findings()
    hunt, number = Hunt(RunSet(folder / "run", config), random.Random(SEED)), 0
    try:
        while sum(hunt.struck.values()) < kills and number < kills:
            hunt.finish(f"run-{number}", kills, findings)
            number += 1
    finally:
        forks.send(signal.SIGKILL)
    findings.figures = hunt.figures() | {"runs": number}
    findings.controls.append(
        f"{hunt.figures()['kills']} processes were running when they were killed: "
        + ", ".join(f"{count} of the {victim}" for victim, count in sorted(hunt.struck.items()))
    )
    return findings


class Hunt:
    """Kills processes of runs, and counts what becomes of prompts."""

    def __init__(self, runs: RunSet, chance: random.Random) -> None:
        self._runs, self._chance = runs, chance
        self.struck: Counter[str] = Counter()
        self._prompts = self._wrong = self._resumes = self._begun = self._continued = 0

    def figures(self) -> dict[str, Any]:
        return {
            "kills": sum(self.struck.values()),
            "struck": dict(self.struck),
            "prompts": self._prompts,
            "lost_or_repeated": self._wrong,
            "resumes": self._resumes,
            "groups_begun": self._begun,
            "tokens_continued": self._continued,
        }

    def finish(self, name: str, kills: int, findings: Findings) -> None:
        """Run until the end, disturbed until there were enough kills."""
        victims: list[str] = []
        child, ended, steps = self._start(name), None, 0
        while ended is None or ended.code:
            if ended is not None:
                if ended.code != -signal.SIGKILL and "all are started again" not in ended.printed and not victims:
                    break
                self._count_begun(name)
                child = self._start(name)
            if sum(self.struck.values()) < kills and (victim := self._strike(child, steps)):
                victims.append(victim)
                self.struck[victim] += 1
            steps = num_steps(child)
            ended = self._ended(child, wait=sum(self.struck.values()) >= kills)
        wrong = self._faults(name, ended)
        for number, victim in enumerate(victims):
            findings.judge(
                f"SIGKILL of the {victim} while weights change under requests", f"{name}, {number}", "C", wrong
            )

    def _start(self, name: str) -> Child:
        """The command of a run; its ranks are forked from it, so that they begin at once."""

        def work() -> int:
            from proximo.cli import main
            from proximo.distributed import launching

            launching.start_here = forked_ranks
            return main(self._runs.arguments(name))

        return Child(work, self._runs.folder / f"{name}.txt")

    def _strike(self, child: Child, steps: int) -> str | None:
        """Kill a process of a run at a random moment; None where the run was over first."""
        if self._chance.random() < STARTING:
            time.sleep(self._chance.uniform(0, 10))
        else:
            child.wait_for(lambda: num_steps(child) > steps, PATIENCE)
            time.sleep(self._chance.uniform(0, 2))
        wanted = self._chance.choice(VICTIMS)
        if child.poll() is not None:
            return None
        below = processes(child.pid)
        victim = wanted if wanted in below else "driver"
        pid = self._chance.choice(below[victim])
        if victim != "driver":
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return None
            return victim
        left = [*descendants(child.pid), *below.get("engine", ())]
        if not child.send(signal.SIGKILL):
            return None
        child.wait()
        self._wait_until_gone(left)
        return victim

    def _wait_until_gone(self, pids: list[int]) -> None:
        """Wait: what is left without a driver ends by itself; a run folder belongs to one attempt at a time."""
        until = time.monotonic() + PATIENCE
        while set(pids) & set(descendants(os.getpid())):
            assert time.monotonic() < until, "processes of a killed driver are left"
            time.sleep(0.1)

    def _ended(self, child: Child, *, wait: bool) -> Ended | None:
        """End of a run, if it has ended; a driver needs a moment to see that all ranks have."""
        return child.wait(3 * PATIENCE) if wait else child.poll()

    def _count_begun(self, name: str) -> None:
        """Count the groups in flight of the checkpoint that is resumed."""
        self._resumes += 1
        newest, _ = newest_valid(self._runs.folder / name / CHECKPOINTS)
        file = None if newest is None else newest / "state" / "active.json"
        slots = json.loads(file.read_text()) if file is not None and file.exists() else []
        begun = [[len(each["tokens"]) for each in slot.get("begun", ())] for slot in slots if slot["group"] is None]
        self._begun += sum(any(each) for each in begun)
        self._continued += sum(sum(each) for each in begun)

    def _faults(self, name: str, ended: Ended) -> str | None:
        if ended.complaint or ended.code:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        folder = self._runs.folder / name
        drawn, wrong = ledger_faults(folder)
        self._prompts, self._wrong = self._prompts + drawn, self._wrong + len(wrong)
        return wrong[0] if wrong else self._uneven(folder)

    def _uneven(self, folder: Path) -> str | None:
        """A step without its groups, or with one that is too old."""
        groups = self._runs.config.training.groups
        rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        for step in range(1, STEPS + 1):
            ended = sum(row["step"] == step and row["state"] in ("trained", "abandoned") for row in rows)
            table = parquet.read_table(folder / f"rollouts/step-{step:06}.parquet")
            if ended != groups:
                return f"step {step} has {ended} groups, not {groups}"
            if (oldest := min(table["version"].to_pylist())) < step - 1 - STALENESS:
                return f"step {step} has a completion of version {oldest}"
        return None


class Forked:
    """A rank that was forked, as the launcher sees it."""

    def __init__(self, work: Callable[[], int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            with suppress(BaseException):
                status = work()
            sys.stdout.flush()
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def forked_ranks(command: Sequence[str], ranks: int, more: dict[str, str], output: int | None) -> list[Any]:
    """Start ranks as the launcher does, without a new Python for each."""
    from proximo.cli import main
    from proximo.distributed.launching import LAUNCHER

    port, launcher = free_port("127.0.0.1"), str(os.getpid())

    def run_rank(rank: int) -> int:
        os.setpgid(0, 0)
        variables = {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank), LAUNCHER: launcher, **more}
        os.environ |= variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the launcher's own are not a rank's
            signal.signal(number, signal.SIG_DFL)
        (Path(os.environ[PLANTED]) / f"rank-{min(rank, 1)}-{os.getpid()}").touch()
        try:
            return main(list(command[3:]))  # behind python -m proximo.cli
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
            return TRACEBACK

    return [Forked(lambda rank=rank: run_rank(rank)) for rank in range(ranks)]


def num_steps(child: Child) -> int:
    """Steps that all attempts of a run have made."""
    return len(re.findall(r"^step \d+/", child.printed, re.MULTILINE))


def processes(driver: int) -> Mapping[str, list[int]]:
    """Processes of a run by what they do; those that are not there are left out."""
    running = set(descendants(os.getpid()))
    by_kind: dict[str, list[int]] = {"driver": [driver]}
    for name, pattern in {"learner": "rank-0-*", "rank": "rank-1-*", "engine": "pid-*"}.items():
        pids = [int(path.name.rpartition("-")[2]) for path in Path(os.environ[PLANTED]).glob(pattern)]
        if there := [pid for pid in pids if pid in running]:
            by_kind[name] = there
    return by_kind
