"""Saves that are killed at every call, find no room, may not write, or meet a disk that fails."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from proximo.algorithms import DAPO
from proximo.rl.config import EvaluationOptions
from proximo.runs.checkpoints import CHECKPOINTS, newest_valid, saved
from proximo.runs.options import CheckpointOptions
from proximo.system.folders import complaints, tidy, write_folder
from proximo_lab.faults.cases import Findings, NotRun
from proximo_lab.faults.mounting import CANNOT, read_only, small_disk
from proximo_lab.faults.processes import Child, Ended, command
from proximo_lab.faults.runs import RunSet, small

CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir", "scandir", "truncate")
"""Calls that change the disk or wait for it."""
GAP = "EIO: raised by the process's own system calls, which are wrapped for that; no disk failed"
REAL_POINTS = 20
"""Points of a real run's save that are tried; the sweep over a small folder tries all."""


def run(folder: Path, points: int = REAL_POINTS) -> Findings:
    findings = Findings(figures={"saves": 0, "lost": 0}, gaps=[GAP])
    _every_call(folder / "calls", findings)
    # Without evaluations midway: what cannot be saved is not the best checkpoint, and so leaves a trace.
    config = small(DAPO, steps=4, checkpoints=CheckpointOptions(every=1, keep=2), evaluation=EvaluationOptions(4))
    runs = RunSet(folder / "run", config).golden()
    _real_saves(runs, findings, points)
    _no_room(runs, findings)
    _small_disk(runs, findings)
    _read_only(runs, findings)
    _failing_disk(runs, findings)
    findings.figures["saves"] = sum(case.ended != "not run" for case in findings.cases)
    return findings


# Killed


def _every_call(folder: Path, findings: Findings) -> None:
    """The driver of tests/system/test_storage.py: the k-th process dies at its k-th call."""
    from tests.system.test_storage import SAVES, content, expected, fill_with

    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", SAVES, str(folder)], capture_output=True, text=True, timeout=300)
    *killed, _ = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    wanted = {"step-1": expected("old"), "step-2": expected("new")}
    for number, code in killed:
        directory = folder / f"{number:03}"

        def after(directory: Path = directory, code: int = code) -> str | None:
            names = {path.name for path in directory.glob("step-?")}
            whole = {path.name: content(path) for path in directory.glob("step-?") if complaints(path) == []}
            if code != -signal.SIGKILL:
                raise NotRun(f"it ended with {code}")
            if not whole or names != whole.keys() or any(whole[name] != wanted[name] for name in whole):
                findings.figures["lost"] += 1
                return f"left are {sorted(names)}, whole are {sorted(whole)}"
            tidy(directory)
            write_folder(directory / "step-3", fill_with("next"))
            rest = {path.name for path in directory.iterdir()}
            return None if rest == whole.keys() | {"step-3"} else f"left are {sorted(rest)}"

        findings.attempt("SIGKILL at a call of a save", f"call {number}", "R", after)
    findings.controls.append(f"{len(killed)} processes died at the call they were to die at")


def _counting(at: int, happens: Callable[[str], None], names: tuple[str, ...] = CALLS) -> Callable[[], None]:
    """Has something happen at the k-th call that a save makes."""
    seen = [0]

    def wrapped(name: str, real: Callable) -> Callable:
        def call(*arguments, **more):
            if inside[0]:
                seen[0] += 1
                if seen[0] == at:
                    happens(name)
            return real(*arguments, **more)

        return call

    inside = [False]

    def install() -> None:
        from proximo.runs.checkpointer import Checkpointer

        for name in names:
            setattr(os, name, wrapped(name, getattr(os, name)))
        real = Checkpointer._write

        def write(self, state):
            inside[0] = True
            try:
                return real(self, state)
            finally:
                inside[0] = False
                (Path(self._log.folder).parent / "calls.txt").write_text(str(seen[0]))

        Checkpointer._write = write

    return install


def _wrapped(runs: RunSet, name: str, install: Callable[[], None]) -> Child:
    """An attempt in a process that was prepared."""
    work = command(*runs.arguments(name))

    def prepared() -> int:
        install()
        return work()

    return Child(prepared, runs.folder / f"{name}.txt")


def _real_saves(runs: RunSet, findings: Findings, points: int) -> None:
    _wrapped(runs, "counted", _counting(0, lambda _: None)).wait()
    calls = int((runs.folder / "calls.txt").read_text())
    findings.controls.append(f"the saves of a run of {runs.config.steps} steps make {calls} calls")
    if (wrong := runs.difference("counted")) is not None:
        findings.add("SIGKILL in a real save", "counted", "failed", wrong)
    for number in range(points):
        at = 1 + number * (calls - 1) // max(points - 1, 1)

        def killed(at: int = at) -> str | None:
            name = f"killed-{at}"
            ended = _wrapped(runs, name, _counting(at, lambda _: os.kill(os.getpid(), signal.SIGKILL))).wait()
            if ended.code != -signal.SIGKILL:
                raise NotRun(f"it ended with {ended.code}")
            half = [path.name for path in saved(runs.folder / name / CHECKPOINTS) if complaints(path)]
            findings.figures["lost"] += len(half)
            return f"half written: {half}" if half else _resumed(runs, name)

        findings.attempt("SIGKILL in a real save", f"call {at} of {calls}", "R", killed)


def _resumed(runs: RunSet, name: str) -> str | None:
    ended = runs.finish(name)
    return ended.complaint or (f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else runs.difference(name))


# No room


def _no_room(runs: RunSet, findings: Findings) -> None:
    """A file-size limit that comes and goes while the run goes on."""

    def for_ever() -> str | None:
        child = _limited(runs, "full", 200_000)
        return _stopped(child.wait(), "free disk space") or _resumed(runs, "full")

    def for_a_while(name: str, size: int) -> str | None:
        child = _limited(runs, name, size)
        if not child.wait_for(lambda: "no checkpoint after" in child.printed or "cannot be written" in child.printed):
            return f"the limit was not felt: {child.printed[-300:]}"
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ended = child.wait()
        if "no checkpoint after" in ended.printed and "save_failed" not in _events(runs, name):
            return f"no event says so: {_events(runs, name)[-300:]}"
        return ended.complaint or (
            f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else runs.difference(name)
        )

    findings.attempt("no room for a save, for ever", "limit 200 kB", "S", for_ever)
    findings.attempt("no room for a save, for a while", "limit 200 kB", "C", lambda: for_a_while("while", 200_000))
    findings.attempt("no room for a save, for a while", "limit 20 kB", "C", lambda: for_a_while("small", 20_000))
    findings.attempt("no room for rows of the log", "limit 700 bytes", "C", lambda: for_a_while("rows", 700))
    findings.controls.append("a file-size limit made saves and rows fail with EFBIG")


def _events(runs: RunSet, name: str) -> str:
    file = runs.folder / name / "events.jsonl"
    return file.read_text() if file.exists() else ""


def _limited(runs: RunSet, name: str, size: int) -> Child:
    def install() -> None:
        """Limit it after the first step: a run that cannot even write its config is refused, which is another case."""
        from proximo.rl import train as rl

        real = rl.train_step

        def train_step(run, index, cursor):
            if index == 1:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            return real(run, index, cursor)

        rl.train_step = train_step

    return _wrapped(runs, name, install)


def _stopped(ended: Ended, hint: str, code: int = 1) -> str | None:
    if ended.complaint:
        return ended.complaint
    if ended.code != code:
        return f"exit {ended.code} instead of {code}: {ended.printed[-300:]}"
    return None if hint in ended.printed else f"no word of {hint!r}: {ended.printed[-300:]}"


def _small_disk(runs: RunSet, findings: Findings) -> None:
    """A file system of its own, with a file in the way that is removed before the second attempt."""
    one = sum(file.stat().st_size for file in saved(runs.folder / "golden" / CHECKPOINTS)[0].rglob("*"))
    for name, size, in_the_way in (("nothing fits", one // 2, 0), ("one fits", 2 * one, 0)):

        def full(name: str = name, size: int = size, in_the_way: int = in_the_way) -> str | None:
            ended = Child(small_disk(runs, name, size, in_the_way), runs.folder / f"{name}.txt").wait()
            return _stopped(_mounted(ended), "free disk space")

        findings.attempt("a file system that is full", name, "S", full)

    def made_room() -> str | None:
        ended = _mounted(Child(small_disk(runs, "room", 5 * one, 3 * one), runs.folder / "room.txt").wait())
        if "free disk space" not in ended.printed:
            raise NotRun(f"there was room: {ended.printed[-300:]}")
        wrong = f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else runs.difference("room-left")
        return ended.complaint or wrong

    findings.attempt("a file system that is full", "then room is made", "R", made_room)


def _mounted(ended: Ended) -> Ended:
    if ended.code == CANNOT:
        raise NotRun(f"nothing can be mounted here: {ended.printed[-200:]}")
    return ended


# Not to be written


def _read_only(runs: RunSet, findings: Findings) -> None:
    def from_the_start() -> str | None:
        ended = Child(read_only(runs, "sealed", at_step=None), runs.folder / "sealed.txt").wait()
        return _stopped(_mounted(ended), "nothing can be written there", code=2)

    def on_the_way() -> str | None:
        ended = Child(read_only(runs, "closing", at_step=1), runs.folder / "closing.txt").wait()
        return _stopped(_mounted(ended), "free disk space or make the folder writable") or _resumed(runs, "closing")

    findings.attempt("a read-only folder", "from the start", "S", from_the_start)
    findings.attempt("a read-only folder", "after step 1", "S", on_the_way)


# A disk that fails


def _failing_disk(runs: RunSet, findings: Findings) -> None:
    def fails(name: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("open", "write", "fsync", "mkdir", "rename"):
        for at in (1, 2):

            def once(call: str = call, at: int = at) -> str | None:
                name = f"eio-{call}-{at}"
                ended = _wrapped(runs, name, _counting(at, fails, (call,))).wait()
                if "save_failed" not in _events(runs, name) and "cannot be written" not in ended.printed:
                    raise NotRun(f"no {call} failed: {ended.printed[-200:]}")
                if ended.complaint or ended.code:
                    return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
                return runs.difference(name)

            findings.attempt("an error of the disk in a save (EIO)", f"in {call}, call {at}", "C", once)
    findings.attempt("an error of the disk for ever (EIO)", "in fsync", "S", lambda: _for_ever(runs))


def _for_ever(runs: RunSet) -> str | None:
    def install() -> None:
        def fsync(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        from proximo.rl import train as rl

        real = rl.train_step

        def train_step(run, index, cursor):
            os.fsync = fsync
            return real(run, index, cursor)

        rl.train_step = train_step

    point = newest_valid(runs.folder / "eio" / CHECKPOINTS)[0]
    assert point is None
    return _stopped(_wrapped(runs, "eio", install).wait(), "saves in a row have failed") or _resumed(runs, "eio")
