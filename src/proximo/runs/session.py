"""Starting and resuming a run: the same command does both.

A run folder belongs to one process at a time. Its files decide what happens: the run resumes from the newest intact
checkpoint, starts from the beginning if there is none, or does nothing if it is finished.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from proximo.config.trust.permission import remember_run
from proximo.runs.checkpoints import CHECKPOINTS, STATE, newest_valid, saved, set_aside_newer, step_of
from proximo.runs.config_changes import (
    changed_files,
    differences,
    fingerprints,
    function_fingerprints,
    refuse_changes,
    refuse_other,
)
from proximo.runs.files import EVENTS, LOGS, NUMBERS, RESULT, TRACEBACK, TRACKING, VERDICTS, refuse_foreign_files
from proximo.runs.log import RunLog, process_details
from proximo.runs.run_json import (
    CODE,
    COMPARED,
    FORMAT,
    altered_logs,
    config_damage,
    known_logs,
    lost_rows,
    missing_rollouts,
    other_code,
    read_record,
    refuse_format,
)
from proximo.runs.signals import Stopped
from proximo.runs.state import read_origin
from proximo.system.folders import tidy, write_file
from proximo.system.locks import NAME as LOCK
from proximo.system.locks import FolderLock
from proximo.system.machine import Machine
from proximo.system.opening import UnsafeFile, check_utf8, make_folder, names, read_json, read_text, remove
from proximo.system.version import __version__

WITHOUT_NUMBERS = (LOCK, "config.toml", "run.json", EVENTS, TRACEBACK, TRACKING, VERDICTS)


class RunSession:
    """One process's work on a run; created by `open_session`. Nothing is written before `start`."""

    def __init__(
        self,
        folder: Path,
        config_toml: str,
        points: Path | None,
        allowed: Sequence[str] | None,
        algorithm: str | None = None,
        accept_lost: bool = False,
    ) -> None:
        self._algorithm, self._accept_lost = algorithm, accept_lost
        self.lost: list[str] = []
        """Messages about rows that the log has lost since the checkpoint, if that is accepted."""
        self._accepted_loss: str | None = None
        """The checkpoint to resume from, if rows that are lost since then have been accepted."""
        self.other_code: str | None = None
        """Message if Proximo's own code has changed since the last attempt."""
        self.folder, self._config_toml, self._points = folder, config_toml, points
        self._record = read_record(folder)
        self._fingerprints, self._functions = fingerprints(config_toml), function_fingerprints(config_toml)
        self._changes: dict[str, str] = {}
        self.corrected: list[str] = []
        """Messages about changed reward functions. That is allowed, so that a failing grader can be corrected."""
        self.resume_from: Path | None = None
        """Checkpoint to resume from; None: from the beginning."""
        self.damaged: list[str] = []
        """Messages about newer checkpoints that cannot be used."""
        self.altered: list[str] = []
        """Messages about files that are not as the run left them and that it needs no more."""
        self.unremembered: str | None = None
        """Message if the code that the run uses could not be remembered as the user's own, once it has started."""
        self.result: dict[str, Any] | None = None
        """Result of a finished run."""
        self.number = 1 if self._record is None else len(self._record["attempts"]) + 1
        self.log = RunLog(folder, self.number, self._identity())
        self.started = False
        if self._record is not None:
            self._look(allowed)

    @property
    def machine(self) -> Machine | None:
        """Threads and libraries chosen when the run began; others would change the last digits of its numbers."""
        return None if self._record is None else Machine.from_dict(self._record["machine"])

    def recorded(self, name: str) -> object:
        """Value that an earlier attempt noted under this name in run.json; None where it did not."""
        return None if self._record is None else self._record.get(name)

    @property
    def goes_on(self) -> bool:
        """True if it is resumed from a checkpoint with the config and the files that it began with."""
        return self.resume_from is not None and not self._changes

    @property
    def is_empty(self) -> bool:
        """True if nothing was computed yet; the config of such a run may still change."""
        paths = [self.folder / name for name in names(self.folder) if name not in WITHOUT_NUMBERS]
        return not any(path.lstat().st_size for path in paths)

    @property
    def remark(self) -> str | None:
        """Message printed before a resumed run starts; None for a new run."""
        if self._record is None:
            return None
        return f"{self.folder}: resuming {self._where(self.resume_from)} (attempt {self.number})"

    @property
    def resume_hint(self) -> str:
        """Message printed when a run ends early: how to resume it, and from which step, according to the disk."""
        return f"running it again with `run={self.folder}` resumes {self.resumes}"

    @property
    def resumes(self) -> str:
        """Point from which the run can be resumed, in words, according to the disk."""
        return self._where(None if self._points is None else next(iter(saved(self._points)), None))

    def _where(self, resume_from: Path | None) -> str:
        if self._points is None:
            return "with the first unfinished stage"
        return "from the beginning" if resume_from is None else f"after step {step_of(resume_from)}"

    def refuse_other_config(self, config_toml: str) -> None:
        """Raise ValueError if this config, of the run about to start, is not the one that the folder will record."""
        refuse_other(self.folder, self._config_toml, config_toml)

    def start(self, more: Mapping[str, object] | None = None) -> RunLog:
        """Record that the attempt starts, with `more` about the run in run.json; returns the log, which the caller
        rewinds to the checkpoint that the run resumes from."""
        make_folder(self.folder)
        tidy(self.folder)
        now = process_details()
        record = self._record or {"format": FORMAT, **now, "identity": self._identity(), "attempts": []}
        record = {**record, **({"algorithm": self._algorithm} if self._algorithm else {})}
        record = {**record, "fingerprints": self._fingerprints, "functions": self._functions, **(more or {})}
        record |= {"accepted_loss": self._accepted_loss, "config": self._headed()}
        attempts = list(record["attempts"])
        if attempts:
            attempts[-1].setdefault("ended", "died")
        others = [
            f"{name} {attempts[-1][name]} then, {now[name]} now" for name in COMPARED if _differ(attempts, now, name)
        ]
        attempts.append(
            {
                "number": self.number,
                "started": datetime.now().isoformat(" ", "seconds"),
                "argv": now["argv"],
                **{name: now[name] for name in (*CODE, *COMPARED)},
                "from": None if self.resume_from is None else self.resume_from.name,
                **({"changes": self._changes} if self._changes else {}),
            }
        )
        self._record = {**record, "attempts": attempts}
        for name in (RESULT, TRACEBACK):
            remove(self.folder / name)
        self.log.start(self._headed(), self._record)
        self.started = True
        if self._points is not None:
            tidy(self._points)
            set_aside_newer(self._points, self.resume_from)
        step = 0 if self.resume_from is None else step_of(self.resume_from)
        for message in self.damaged:
            self.log.event(step, "damaged_checkpoint", f"{message}; skipped")
        if self.number > 1:
            self.log.event(step, "resumed", self.remark or "")
        for field, what in self._changes.items():
            self.log.event(step, "changed", f"{field} {what}")
        for message in self.corrected:
            self.log.event(step, "changed", message)
        if self.other_code is not None:
            self.log.event(step, "other_code", self.other_code)
        for message in self.lost:
            self.log.event(step, "lost_rows", message)
        for message in self.altered:
            self.log.event(step, "altered_file", message)
        self.unremembered = remember_run(self.folder, self._identity(), tomllib.loads(self._config_toml))
        if self.unremembered is not None:
            self.log.event(step, "not_remembered", self.unremembered)
        for what in others:
            self.log.event(step, "other_software", f"{what}: numbers may differ in their last digits")
        return self.log

    def _headed(self) -> str:
        """The config with a comment on top that names the version that wrote it."""
        named = "" if self._algorithm is None else f", algorithm: {self._algorithm}"
        return f"# Proximo {__version__}{named}\n{self._config_toml}"

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json; from now on the run is finished."""
        write_file(self.folder / RESULT, (json.dumps(result) + "\n").encode())
        self.result = dict(result)
        self.end("finished")

    def end(self, how: str) -> None:
        """Record in run.json how the attempt ended; an error in writing it is ignored."""
        if self.started and self._record is not None:
            self._record["attempts"][-1].setdefault("ended", how)
            with suppress(OSError):
                self.log.record(self._record)

    def fail(self, error: BaseException) -> None:
        """Record the error that ends the attempt, and its traceback if it is not one that asks to stop."""
        self.end(ending(error))
        if self.started and isinstance(error, Exception):
            self.log.failed(error)

    def _look(self, allowed: Sequence[str] | None) -> None:
        """Read what earlier attempts left in the folder, and refuse what does not fit."""
        assert self._record is not None
        refuse_format(self.folder, self._record)
        if damage := config_damage(self.folder, self._record):
            self.altered.append(f"{self.folder}: {damage.partition(':')[0]}; it is written again")
        recorded = self._record.get("config")  # what the run was, whatever config.toml says now
        before = recorded if isinstance(recorded, str) else read_text(self.folder / "config.toml")
        self._changes = differences(before, self._config_toml)
        for field, what in changed_files(self._record["fingerprints"], self._fingerprints, self._config_toml).items():
            self._changes.setdefault(field, what)
        if not self.is_empty:
            refuse_changes(self.folder, self._changes, allowed, self._config_toml)
        others = changed_files(self._record.get("functions", {}), self._functions, self._config_toml)
        self.corrected = [
            f"{field} is a different function than before: scores from now on cannot be compared with earlier ones"
            for field in others
            if field not in self._changes
        ]
        self.other_code = other_code(self._record["attempts"])
        if self._points is not None:
            self.resume_from, self.damaged = newest_valid(self._points, self._complaint)
            self._look_for_lost_rows()
        if not self._changes:
            self.result = self._finished()
        if self.result is not None and self.lost:  # it does not start, which would record it
            self.log.record(self._record | {"accepted_loss": self._accepted_loss})

    def _identity(self) -> str:
        """Hash of what the run began with, so that the same run has the same identity on every machine."""
        if self._record is not None:
            return self._record["identity"]
        return hashlib.sha256(json.dumps([self._config_toml, self._fingerprints]).encode()).hexdigest()

    def _look_for_lost_rows(self) -> None:
        """Refuse to resume if the log is shorter than when the checkpoint was saved, unless that is accepted now or was
        by an earlier attempt."""
        assert self._record is not None
        if self.resume_from is None:
            return
        self.log.known = known_logs(self.resume_from)
        self.altered += altered_logs(self.folder, self.resume_from, [name for name in LOGS if name not in NUMBERS])
        if missing := missing_rollouts(self.folder, self.resume_from):
            self.altered.append(f"{missing}; training does not need them")
        lost = [f"{self.folder}/{each}" for each in lost_rows(self.folder, self.resume_from)]
        if lost and self._record.get("accepted_loss") != self.resume_from.name:
            if not self._accept_lost:
                raise ValueError(
                    f"{'; '.join(lost)}. Restore the complete file, or resume without those rows: "
                    "`accept_lost_rows=True`"
                )
            self.lost = lost
        self._accepted_loss = self.resume_from.name if lost else None

    def _complaint(self, resume_from: Path) -> str | None:
        """Reason why a checkpoint is not one of this run; None if it is."""
        try:
            run, _ = read_origin(resume_from / STATE)
        except (OSError, ValueError, KeyError):
            return "it has no state to resume from"
        return "it belongs to another run" if run != self._identity() else None

    def _finished(self) -> dict[str, Any] | None:
        try:
            result = read_json(self.folder / RESULT)
        except FileNotFoundError:
            return None
        except UnsafeFile:
            raise
        except ValueError:
            self.damaged.append(f"{self.folder / RESULT} cannot be read")
            return None
        if self._points == self.folder / CHECKPOINTS:
            last, damaged = self.resume_from, self.damaged
        else:  # a stage's checkpoints have no state
            last, damaged = newest_valid(self.folder / CHECKPOINTS)
        if not isinstance(result, dict):
            self.damaged.append(f"{self.folder / RESULT} is not as it was written")
            return None
        newest = result.get("last", result.get("checkpoint"))  # a run that collapsed has an earlier one as its result
        whole = newest is None or (last is not None and last.name == newest and not damaged)
        return result if whole else None


@contextmanager
def open_session(
    folder: Path,
    config_toml: str,
    *,
    points: str | None = CHECKPOINTS,
    allowed: Sequence[str] | None = (),
    algorithm: str | None = None,
    accept_lost: bool = False,
) -> Iterator[RunSession]:
    """Open and lock a run folder; ValueError if another process uses it, or it holds a run with a different config.

    `points` is the subfolder with the resume points; a chain of runs has none, since each of its runs has its own.
    `allowed` are the fields that may have changed; None if the command has no flag for that. `algorithm` is its name,
    for run.json. `accept_lost`: whether to resume although rows of the log are lost.

    Example: with open_session(Path("runs/a"), toml.dumps(config)) as session: ...
    """
    check_utf8(folder)
    refuse_foreign_files(folder)
    existed, session = folder.exists(), None
    lock = FolderLock(folder)
    try:
        session = RunSession(
            folder, config_toml, None if points is None else folder / points, allowed, algorithm, accept_lost
        )
        yield session
    except BaseException as error:
        if session is not None:
            session.fail(error)
        raise
    finally:
        lock.release(remove_empty=not existed and (session is None or not session.started))


def _differ(attempts: Sequence[Mapping[str, Any]], now: Mapping[str, object], name: str) -> bool:
    return bool(attempts) and attempts[-1].get(name) != now[name]


def ending(error: BaseException) -> str:
    match error:
        case Stopped():
            return f"stopped by {error.signal.name}"
        case KeyboardInterrupt():
            return "interrupted"
        case SystemExit():
            return f"ended with the exit status {error.code}"
        case _:
            return f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
