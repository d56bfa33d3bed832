"""Starts the processes of a run on this machine, and starts them again if one of them dies or hangs.

Several machines: start `proximo train run.toml` with torchrun or SLURM on each of them, which set RANK; it then joins.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Protocol

from proximo.processes.server import free_port
from proximo.runs.notifying import tell
from proximo.runs.webhook import VARIABLE, Webhook

RESTARTS = 3
"""Times that a group which failed is started again; each time the run resumes from its newest checkpoint."""
GRACE = 20.0
"""Seconds that the other processes have to end by themselves, once one has ended."""
REFUSED = 2
"""Exit status of a rank that refuses what it was asked for, and would refuse it again."""
REFUSAL_GRACE = 3.0
"""Seconds that the others have then: what they wait for does not come."""
POLL = 0.1
GROUP_FAILED = 75
"""Exit status of a rank that ends because it cannot reach another one."""
OUT_OF_MEMORY = 76
"""Exit status of a rank that ran out of memory, and has left a smaller plan for all of them."""
LAUNCHER = "PROXIMO_LAUNCHER"
"""Environment variable of a rank with the process id of what started it here."""
NOTES = "PROXIMO_NOTES"
"""Environment variable with the folder where ranks leave plans for those that are started after them."""
PLAN = "PROXIMO_PLAN"
"""Environment variable with the plan that passes keep to, since larger ones ran out of memory."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Process(Protocol):
    """Process of a rank, as the launcher sees it; subprocess.Popen is one."""

    @property
    def returncode(self) -> int | Any: ...

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


Processes = list[Process]
Start = Callable[[Sequence[str], int, dict[str, str], int | None], Processes]
"""Starts a command as this many ranks: with more variables in the environment, and with its output there."""


def is_launched() -> bool:
    """True if this process was started as one of a group, by `launch`, torchrun or SLURM with RANK set."""
    return "RANK" in os.environ


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launch(
    command: Sequence[str],
    ranks: int,
    say: Callable[[str], None],
    folder: Path = Path(),
    webhook: Webhook | None = None,
    *,
    restarts: int = RESTARTS,
    quiet: bool = False,
    start: Start | None = None,
) -> int:
    """Run a command as `ranks` processes until rank 0 has ended by itself; returns its exit status. `quiet`: what they
    write is dropped. `start` starts them somewhere else than on this machine. `webhook` is for rank 0,
    and told here where no rank is left to tell it how the run in its folder ended."""
    left, plan = restarts + 1, ""
    while left:
        with TemporaryDirectory(prefix="proximo-ranks-") as notes:
            more = {NOTES: notes, PLAN: plan, VARIABLE: "" if webhook is None else webhook.address}
            output = subprocess.DEVNULL if quiet else None
            group = (start or start_here)(command, ranks, more, output)
            try:
                with _forwarding(group[0]) as asked:
                    failure = _watch(group)
            finally:
                _end(group)
            plans = [json.loads(path.read_text()) for path in Path(notes).iterdir()]
        if failure is None:
            return group[0].returncode
        if asked:  # before rank 0 could listen for it
            return 128 + asked[0]
        if any(each.returncode == REFUSED for each in group):
            return REFUSED
        if plans and (smaller := tightest(plans)) != plan:  # it gets smaller each time, so this ends
            plan = smaller
            say(f"{failure}: all are started again from the newest checkpoint, in passes that take less: {plan}")
            continue
        left -= 1
        then = (
            f"all are started again from the newest checkpoint, {left} times at most" if left else "the run has ended"
        )
        say(f"{failure}: {then}")
        if not left:
            tell(webhook, folder, f"failed: {failure}", say)
    return 1


def tightest(plans: Sequence[dict[str, int]]) -> str:
    """The plan that every rank which ran out of memory asks for, for the environment."""
    return json.dumps(
        {"token_budget": min(each["token_budget"] for each in plans)}
        | {name: max(each[name] for each in plans) for name in ("checkpointed", "offloaded")}
    )


def agreed_plan() -> dict[str, int] | None:
    """The plan that this group was started with; None: none of an earlier group ran out of memory."""
    return json.loads(plan) if (plan := os.environ.get(PLAN)) else None


def can_restart_smaller() -> bool:
    """True if what started this process starts all of them again with a smaller plan."""
    return NOTES in os.environ


def leave_for_smaller(plan: dict[str, int]) -> NoReturn:
    """End this rank, and with it the group: the others are in the middle of a pass that cannot be finished."""
    (Path(os.environ[NOTES]) / str(own_rank())).write_text(json.dumps(plan))
    raise SystemExit(OUT_OF_MEMORY)


def start_here(command: Sequence[str], ranks: int, more: dict[str, str], output: int | None) -> Processes:
    """A group with a meeting place of its own: what is left of an earlier one is not in its way."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
    }
    shared |= {LAUNCHER: str(os.getpid()), **more}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [
        # Groups of their own: Ctrl-C is for rank 0, which saves the run before it ends the others.
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
            stderr=output,
            process_group=0,
        )
        for rank in range(ranks)
    ]


def _watch(group: Processes) -> str | None:
    """Wait until the run is over; why the group failed, or None where rank 0 ended by itself, whatever its status."""
    while all(each.poll() is None for each in group):
        time.sleep(POLL)
    began = time.monotonic()
    while any(each.poll() is None for each in group):
        refused = any(each.returncode == REFUSED for each in group)
        if time.monotonic() > began + (REFUSAL_GRACE if refused else GRACE):
            break
        time.sleep(POLL)
    status = group[0].returncode
    if status is not None and status >= 0 and status not in (GROUP_FAILED, OUT_OF_MEMORY):
        return None
    others = {rank: each.returncode for rank, each in enumerate(group) if each.returncode != GROUP_FAILED}
    for rank, code in others.items():
        if code is not None and code < 0:
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
    if starved := [str(rank) for rank, code in others.items() if code == OUT_OF_MEMORY]:
        return f"rank {', '.join(starved)} ran out of memory"
    for rank, code in others.items():
        if code:
            return f"rank {rank} failed with status {code}"
    hung = [str(rank) for rank, code in others.items() if code is None]
    return f"rank {', '.join(hung)} hangs" if hung else "the ranks lost each other"


def _end(group: Processes) -> None:
    for each in group:
        if each.poll() is None:
            each.kill()
        each.wait()


@contextmanager
def _forwarding(conductor: Process) -> Iterator[list[int]]:
    """Signals that ask a run to stop go to rank 0 alone; yields those that came."""
    asked: list[int] = []

    def forward(number: int, _: Any) -> None:
        asked.append(number)
        if conductor.poll() is None:
            conductor.send_signal(number)

    before = {each: signal.signal(each, forward) for each in FORWARDED if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command that each process runs."""
    return [sys.executable, "-m", "proximo.cli", *arguments]
