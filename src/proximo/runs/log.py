"""Writes the files of a run folder, in open formats that everything else reads.

Metrics and ledger contain no times, so two runs with the same seed write the same bytes. Rows of these two that cannot
be written are kept and tried again; for other files one warning is printed and training continues.
"""

import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from traceback import format_exception

import pyarrow as pa
import torch

from proximo.runs.files import (
    EVENTS,
    EVIDENCE,
    LEDGER,
    LOGS,
    METRICS,
    NUMBERS,
    PROFILE,
    ROLLOUTS,
    TIMELINE,
    TIMINGS,
    TRACE,
    TRACEBACK,
    stored_steps,
)
from proximo.runs.ledger import Entry
from proximo.runs.rollouts import write_rollouts
from proximo.system.folders import sync, whole_file, write_file
from proximo.system.lines import JsonLines, PrefixHash, plain, to_line
from proximo.system.machine import Machine
from proximo.system.opening import make_folder, names, remove
from proximo.system.sealing import sealed
from proximo.system.secrets import masked, without_secrets
from proximo.system.version import __version__, source_fingerprint

Row = Mapping[str, object]


class RunLog:
    """Writes a run folder, row by row and without buffering.

    A `step` is the number of steps done: 0 before the first, 1 in everything written during and after the first.
    """

    def __init__(self, folder: Path, attempt: int = 1, identity: str = "") -> None:
        """`identity` identifies the run; all its attempts have the same."""
        self.folder, self.attempt, self.identity = folder, attempt, identity
        self._waiting: list[tuple[str, list[Row]]] = []
        """Rows of metrics and ledger that could not be written yet."""
        self._unsynced: list[Path] = []
        """Rollout files that have not been synced to disk yet."""
        self._failure: str | None = None
        """Error message that has not been written to the events yet."""
        self._has_warned = False
        self._step = 0
        """Step of the last metrics row."""
        self._prefixes = {name: PrefixHash(folder / name) for name in LOGS}
        self.known: Mapping[str, tuple[int, str]] = {}
        """Length of each log when the checkpoint to resume from was saved, and its SHA-256."""

    def start(self, config_toml: str, record: Mapping[str, object] | None = None) -> None:
        """`record` is the content of run.json; None: the facts about this process.

        A folder is a run once it has a run.json, so that is written last; a changed config is recorded there first.
        """
        make_folder(self.folder)
        record, config = process_details() if record is None else record, self.folder / "config.toml"
        if (self.folder / "run.json").exists():
            self.record(record)
            write_file(config, config_toml.encode())
        else:
            write_file(config, config_toml.encode())
            self.record(record)

    def record(self, record: Mapping[str, object]) -> None:
        write_file(self.folder / "run.json", (json.dumps(sealed(record), indent=2) + "\n").encode())

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._keep(METRICS, [{"step": step, **values}])

    def ledger(self, rows: Sequence[Entry]) -> None:
        if rows:
            self._keep(LEDGER, [row.to_dict() for row in rows])

    def timings(self, step: int, seconds: Mapping[str, float]) -> None:
        with self._tolerating_failures():
            self._append(TIMINGS, {"step": step, **seconds})

    def timeline(self, step: int, row: Row) -> None:
        with self._tolerating_failures():
            self._append(TIMELINE, {"step": step, **row})

    def profile(self, table: Mapping[str, object], trace: bytes | None) -> None:
        """Write the seconds of some steps' parts, and the trace of one where there is one."""
        with self._tolerating_failures():
            write_file(self.folder / PROFILE, (json.dumps(table, indent=1) + "\n").encode())
            if trace is not None:
                write_file(self.folder / TRACE, trace)

    def event(self, step: int, kind: str, message: str, **more: str | float) -> None:
        """Write an event. `more` has the other fields of a finding (rule, severity, remedy and show), or an event's
        numbers."""
        row = {"step": step, "attempt": self.attempt, "kind": kind, "message": masked(message), **more}
        with self._tolerating_failures():
            self._tell_failure()
            self._append(EVENTS, row)

    def failed(self, error: BaseException) -> None:
        """Write the traceback of the error that ends the attempt, for whoever looks for its cause."""
        with suppress(OSError):
            write_file(self.folder / TRACEBACK, masked("".join(format_exception(error))).encode(errors="replace"))

    def settle(self) -> dict[str, int]:
        """Sync all rows of metrics and ledger to disk, or raise OSError; returns the sizes of the two files in bytes.

        Rollouts are synced here too, not in each step: those after a checkpoint are written again after a resume.
        """
        self._write_waiting()
        with self._tolerating_failures():
            self._tell_failure()
            while self._unsynced:
                sync(self._unsynced.pop())
            if (self.folder / ROLLOUTS).is_dir():
                sync(self.folder / ROLLOUTS)
        files = [JsonLines(self.folder / name) for name in NUMBERS]
        for file in files:
            file.sync()
        sync(self.folder)
        return {file.path.name: file.size for file in files}

    def standing(self) -> dict[str, object]:
        """Content for the manifest of a checkpoint that is saved now: whose it is, the size and SHA-256 of each log,
        and the first and last of the steps in a row that have rollouts."""
        sizes = {name: JsonLines(self.folder / name).size for name in LOGS}
        logs = {name: {"size": size, "sha256": self._prefixes[name].up_to(size)} for name, size in sizes.items()}
        return {"run": self.identity, "logs": logs, "rollouts": ranges(stored_steps(self.folder))}

    def rewind(self, sizes: Mapping[str, int], step: int) -> None:
        """Cut metrics and ledger back to these sizes, and delete rollouts and evidence of later steps than
        this."""
        self._prefixes = {name: PrefixHash(self.folder / name) for name in LOGS}
        for name in NUMBERS:
            rows, size = JsonLines(self.folder / name), sizes.get(name, 0)
            if rows.size >= size and not is_altered(self.folder / name, self.known.get(name)):
                rows.cut(size)
            else:  # rows are lost or altered, and the user accepted that: keep the rows up to this step
                rows.cut(min(size, rows.size))
                rows.keep(lambda row: isinstance(row.get("step"), int) and row["step"] <= step)
        for name in (EVENTS, TIMINGS, TIMELINE):
            JsonLines(self.folder / name).repair()
        for file in files_of_steps(self.folder):
            if not is_up_to(file, step):
                remove(file)

    def sizes(self) -> dict[str, int]:
        """Sizes of metrics and ledger in bytes, including rows that wait to be written."""
        waiting: dict[str, int] = {METRICS: 0, LEDGER: 0}
        for name, rows in self._waiting:
            waiting[name] += sum(len(to_line(row)) for row in rows)
        return {name: JsonLines(self.folder / name).size + more for name, more in waiting.items()}

    def rollouts(self, step: int, table: pa.Table) -> None:
        """Write a step's `rollout_table`."""
        path = self.folder / ROLLOUTS / f"step-{step:06d}.parquet"
        with self._tolerating_failures():
            make_folder(path.parent)
            with whole_file(path) as partial:
                write_rollouts(table, partial)
            self._unsynced.append(path)

    def _append(self, name: str, *rows: Row) -> None:
        JsonLines(self.folder / name).append(*({key: plain(value) for key, value in row.items()} for row in rows))

    def _keep(self, name: str, rows: Sequence[Row]) -> None:
        """Write rows that must not be lost, after those that already wait."""
        self._waiting.append((name, [{key: plain(value) for key, value in row.items()} for row in rows]))
        with self._tolerating_failures():
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            name, rows = self._waiting[0]
            self._append(name, *rows)
            del self._waiting[0]

    def _tell_failure(self) -> None:
        if self._failure is not None:
            lost = {"step": self._step, "attempt": self.attempt, "kind": "log_failed", "message": self._failure}
            self._append(EVENTS, lost)
            self._failure = None

    @contextmanager
    def _tolerating_failures(self) -> Iterator[None]:
        """Continue if the log cannot be written: warn once on the console, and in the events as soon as
        they can be written."""
        try:
            yield
        except OSError as error:
            self._failure = f"{error}; rows of metrics and ledger are kept and tried again, others are lost"
            if not self._has_warned:
                with suppress(OSError):  # stderr may be closed
                    print(f"warning: the run's log cannot be written: {self._failure}", file=sys.stderr, flush=True)
            self._has_warned = True


def ranges(steps: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of the numbers in a row.

    Example: ranges([1, 2, 3, 7]) == [(1, 3), (7, 7)]
    """
    starts = [step for before, step in zip([None, *steps], steps, strict=False) if before is None or step > before + 1]
    ends = [step for step, after in zip(steps, [*steps[1:], None], strict=False) if after is None or after > step + 1]
    return list(zip(starts, ends, strict=True))


def is_altered(path: Path, known: tuple[int, str] | None) -> bool:
    """True if a log's first bytes, of which the size and the SHA-256 are known, are others now."""
    return known is not None and JsonLines(path).size >= known[0] and PrefixHash(path).up_to(known[0]) != known[1]


def files_of_steps(folder: Path) -> list[Path]:
    """Rollouts and evidence of a run, one file for each step or update."""
    parents = (folder / ROLLOUTS, folder / EVIDENCE)
    return [parent / name for parent in parents for name in names(parent) if name.startswith("step-")]


def is_up_to(file: Path, step: int) -> bool:
    """True if one of these is of this step or an earlier one; False if its name is none that a run writes."""
    match = re.fullmatch(r"step-([0-9]{1,18})(\.parquet|-update-[0-9]+\.json)", file.name)
    return match is not None and int(match[1]) <= step


def process_details() -> dict[str, object]:
    """Versions, machine and command line of this process, for run.json."""
    return {
        "argv": without_secrets(sys.argv),
        "version": __version__,
        "source": source_fingerprint(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": platform.machine(),
        "machine": Machine.current().to_dict(),
    }
