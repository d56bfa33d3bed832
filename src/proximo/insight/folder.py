"""Reads a run folder at any time: half written, growing, finished or copied from elsewhere."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from proximo.algorithms import UnusualChoice
from proximo.config.trust.naming import named_code
from proximo.config.trust.permission import OfRun
from proximo.insight.lens.steps import StoredStep, read_step
from proximo.insight.reading import is_number
from proximo.rl.config import RunConfig, loads_run
from proximo.rl.step_numbers import as_logged
from proximo.runs.files import METRICS, RESULT, ROLLOUTS, TRACKING, VERDICTS, stored_steps
from proximo.runs.health.history import in_order
from proximo.runs.run_json import FORMAT, config_damage
from proximo.system.lines import to_row, whole_lines
from proximo.system.locks import NAME as LOCK
from proximo.system.locks import is_held
from proximo.system.opening import LinkedFile, open_file, read_file, without_links

State = Literal["running", "finished", "stopped"]
DEPTH = 4
"""Depth of the search for runs below a folder; those of a comparison are in a subfolder."""

NOT_LOADED = (
    "not loaded, because a run may come from anyone and its config names this code; if you trust it, give --load-code "
    "to `proximo view` or `proximo report`"
)
"""Reason why a class is not loaded without `load_code`."""

MAX_BYTES, MAX_ROWS = 256 << 20, 1_000_000
"""Maximum bytes of a file that is read at once; the metrics of a hundred thousand steps are smaller."""


class RunFolder:
    """The contents of a run folder, read-only.

    Reading it executes nothing, unless the code that its config names may be loaded: with `load_code` all of it, which
    the user permits, with `own_code` what he has run with this run before. Code in a run folder is never loaded.

    Example: RunFolder(Path("runs/a")).curve("outcome")[-1]
    """

    def __init__(self, path: Path, *, load_code: bool = False, own_code: bool = False) -> None:
        self.path, self.name = without_links(path), path.resolve().name
        self._code = OfRun(self.path, load_code, keep=own_code) if load_code or own_code else None
        self.unavailable: dict[str, str] = {}
        """Classes that the config names and that were not loaded when it was read, with the reason."""
        if not (self.path / "run.json").is_file():
            remedy = "give the folder that `proximo train --run` wrote" if path.is_dir() else "there is no such folder"
            raise ValueError(f"{path} is no run: {remedy}")

    @cached_property
    def config(self) -> RunConfig:
        """Config of a run of `proximo train`; ValueError if it belongs to another command or version."""
        path = self.path / "config.toml"
        if (data := _read(path)) is None:
            raise ValueError(f"{path}: there is no such file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnusualChoice)  # reported at the start of the run, and in its report
            text = data.decode("utf-8-sig", errors="replace")
            config = loads_run(text, str(path), self)
        if damage := config_damage(self.path, self.record):
            raise ValueError(f"{self.path}: {damage}")
        return config

    def config_at(self, step: int) -> RunConfig:
        """The config with the numbers that its schedules had at a step, as the step's row of metrics has them."""
        if not self.config.schedules:
            return self.config
        rows = (row for row in self.rows(METRICS) if row["step"] == step and "reward" in row)
        return as_logged(self.config, next(rows, {}))

    def admit(self, tables: Mapping[str, Any]) -> None:
        """Check that code that a config's tables name may be loaded; ValueError if not. For reading alone the names do
        no harm: but a task is asked for its problems, so that none that would load code then is accepted."""
        try:
            if self._code is not None:
                self._code.admit(tables)
            elif code := [each for each in named_code(tables) if _is_asked(each.field)]:
                self.unavailable[code[0].value] = NOT_LOADED
                raise ValueError(f"{code[0].field} is {code[0].value!r}: {NOT_LOADED}")
        except ValueError as error:
            for each in named_code(tables):
                self.unavailable.setdefault(each.value, str(error))
            raise

    def load_class(self, name: str) -> type:
        """A user's class that the config names; ValueError says why it is not loaded."""
        self.unavailable.pop(name, None)
        try:
            if self._code is None:
                raise ValueError(NOT_LOADED)
            return self._code.load_class(name)
        except ValueError as error:
            self.unavailable[name] = str(error)
            raise

    @cached_property
    def config_text(self) -> str:
        return _text(self.path / "config.toml")

    @property
    def record(self) -> dict[str, Any]:
        """run.json."""
        return self.decoded("run.json") or {}

    @property
    def format(self) -> object:
        """Format of the folder from run.json, which format 1 does not have; this version's if run.json is damaged."""
        record = self.decoded("run.json")
        return FORMAT if record is None else record.get("format", 1)

    @property
    def result(self) -> dict[str, Any] | None:
        """Result of a finished run."""
        return self.decoded(RESULT)

    def decoded(self, name: str) -> dict[str, Any] | None:
        """A .json file of the run; None if missing or damaged."""
        return _json(self.path / name)

    @property
    def state(self) -> State:
        if (self.path / RESULT).is_file():
            return "finished"
        return "running" if is_held(self.path / LOCK) else "stopped"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All complete rows of a .jsonl file of the run; empty if it does not exist yet. Rows of metrics with
        impossible or decreasing steps are skipped; `proximo doctor` counts them."""
        rows = self.rows_from(name, 0)[0]
        return in_order(rows) if name == METRICS else rows

    def rows_from(self, name: str, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The rows after `offset` bytes, and the offset of their end. A file that has become shorter, because the run
        was resumed from an earlier step, is read from its start."""
        rows: list[dict[str, Any]] = []
        try:
            with open_file(self.path / name) as file:
                size = file.seek(0, 2)
                offset = 0 if offset > size else offset
                check_size(self.path / name, size - offset)
                file.seek(offset)
                for line in whole_lines(file):
                    offset = file.tell()
                    if (row := to_row(line)) is not None:
                        rows.append(_with_step(row))
                    if len(rows) > MAX_ROWS:
                        raise ValueError(
                            f"{self.path / name} has more than {MAX_ROWS:,} rows, more than any run writes"
                        )
        except LinkedFile:
            raise
        except OSError:
            return [], 0
        return rows, offset

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Pairs (step, value) in order, without missing values and NaN."""
        return [
            (row["step"], float(row[metric]))
            for row in self.rows(METRICS)
            if is_number(row.get("step")) and is_number(row.get(metric))
        ]

    def steps(self) -> list[int]:
        """Steps with stored rollouts."""
        return stored_steps(self.path)

    def step_file(self, number: int) -> Path:
        return self.path / ROLLOUTS / f"step-{number:06d}.parquet"

    def step(self, number: int) -> StoredStep:
        path = self.step_file(number)
        try:
            status = path.stat()
        except OSError:
            steps = self.steps()
            there = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
            raise ValueError(f"{self.path} has no rollouts of step {number}: there are {there}") from None
        return _cached_step(path, number, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)
def _cached_step(path: Path, number: int, changed: int, size: int) -> StoredStep:
    """The stored step, cached until its file changes, as it may when a run is resumed."""
    return read_step(path, number)


def find_runs(root: Path, *, load_code: bool = False) -> list[RunFolder]:
    """The folder itself if it is a run folder, or the runs below it, newest first."""
    root = without_links(root)
    if (root / "run.json").is_file():
        return [RunFolder(root, load_code=load_code)]
    paths = sorted(_below(root, DEPTH), key=lambda path: (path / "run.json").stat().st_mtime, reverse=True)
    return [RunFolder(path, load_code=load_code) for path in paths]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Run folders, and the stages inside pipelines."""
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in inside:
        if (path / "run.json").is_file():
            yield path
        if depth > 1 and path.name not in (ROLLOUTS, TRACKING, VERDICTS, "checkpoints", "evidence"):
            yield from _below(path, depth - 1)


def _is_asked(field: str) -> bool:
    """True if a field belongs to what gives a task its problems, and is not the class itself, which is never loaded."""
    path = field.split(".")
    return path[0] == "task" and path[-1] != "type" and "reward" not in path


def _with_step(row: dict[str, Any]) -> dict[str, Any]:
    """The row, without its step if that is no whole number: whoever counts by steps need not ask."""
    if type(row.get("step", 0)) is not int:
        del row["step"]
    return row


def decoded(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Rows from lines; lines that are not rows are skipped."""
    return (row for line in lines if (row := to_row(line)) is not None)


def check_size(path: Path, size: int) -> None:
    """Refuse, in one line, a file that is too large for memory."""
    if size > MAX_BYTES:
        limit = f"{MAX_BYTES >> 20} MiB"
        raise ValueError(
            f"{path} has {size >> 20:,} MiB, more than the {limit} that are read at once: no run writes that"
        )


def _json(path: Path) -> dict[str, Any] | None:
    data = _read(path)
    return None if data is None else to_row(data)


def _text(path: Path) -> str:
    return (_read(path) or b"").decode(errors="replace")


def _read(path: Path) -> bytes | None:
    """The file's bytes; None if it does not exist or is no file. A link is refused."""
    try:
        with open_file(path) as file:
            check_size(path, file.seek(0, 2))
        return read_file(path, MAX_BYTES)
    except LinkedFile:
        raise
    except OSError:
        return None
