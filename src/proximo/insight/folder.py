"""One run's folder, read at any moment of its life: half written, growing, finished or copied from elsewhere."""

import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from proximo.algorithms import UnusualChoice
from proximo.health.history import in_order
from proximo.insight.lens.steps import Step, read_step
from proximo.insight.reading import is_number
from proximo.outside import load_class
from proximo.storage.lines import to_row, whole_lines
from proximo.storage.locks import NAME as LOCK
from proximo.storage.locks import is_held
from proximo.storage.opening import LinkedFile, open_file
from proximo.training.config import RunConfig
from proximo.training.old_names import loads_run
from proximo.training.runfolder.log import METRICS, ROLLOUTS
from proximo.training.runfolder.record import FORMAT
from proximo.training.runfolder.resume import RESULT

State = Literal["running", "finished", "stopped"]
DEPTH = 4
"""How far below a folder runs are looked for: those of a comparison lie in a folder of their own."""

MAX_BYTES, MAX_ROWS = 256 << 20, 1_000_000
"""Of a file that is read at once: the metrics of a hundred thousand steps have less."""


class RunFolder:
    """What is in a run folder; nothing is ever written to it.

    Example: RunFolder(Path("runs/a")).curve("outcome")[-1]
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name
        self.unavailable: dict[str, str] = {}
        """Classes that the config names and that were not loaded when it was read, with the reason."""
        if not (path / "run.json").is_file():
            remedy = "give the folder that `proximo train --run` wrote" if path.is_dir() else "there is no such folder"
            raise ValueError(f"{path} is no run: {remedy}")

    @cached_property
    def config(self) -> RunConfig:
        """Of a run of `proximo train`; ValueError where it is another command's, or another version's."""
        path = self.path / "config.toml"
        if (data := _read(path)) is None:
            raise ValueError(f"{path}: there is no such file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnusualChoice)  # said when the run began, and in its report
            text = data.decode("utf-8-sig", errors="replace")
            return loads_run(text, str(path), self.load_class)

    def load_class(self, name: str) -> type:
        """A class of a user's own that the config names. A run folder may come from anyone, so nothing in it is
        executed: the class's file must lie outside of run folders, and be the one that the run recorded. ValueError
        says why it is not loaded."""
        self.unavailable.pop(name, None)
        try:
            return load_class(name, self._check_code)
        except ValueError as error:
            self.unavailable[name] = str(error)
            raise

    def _check_code(self, files: Sequence[Path], content: bytes) -> None:
        for file in files:
            for place in (Path(os.path.abspath(file)), file.resolve()):
                if any((folder / "run.json").exists() for folder in place.parents):
                    raise ValueError("it is not loaded, because it lies in a run folder, whose code is never executed")
        recorded = self.record.get("fingerprints")
        if hashlib.sha256(content).hexdigest() not in (recorded.values() if isinstance(recorded, dict) else ()):
            raise ValueError("it is not loaded, because it has changed since the run: put the file back as it was")

    @cached_property
    def config_text(self) -> str:
        return _text(self.path / "config.toml")

    @property
    def record(self) -> dict[str, Any]:
        """run.json."""
        return self.decoded("run.json") or {}

    @property
    def format(self) -> object:
        """Of the folder, as run.json names it, which format 1 did not; this version's where run.json is damaged."""
        record = self.decoded("run.json")
        return FORMAT if record is None else record.get("format", 1)

    @property
    def result(self) -> dict[str, Any] | None:
        """Of a finished run."""
        return self.decoded(RESULT)

    def decoded(self, name: str) -> dict[str, Any] | None:
        """A .json file of the run's; None where it is not there, or damaged."""
        return _json(self.path / name)

    @property
    def state(self) -> State:
        if (self.path / RESULT).is_file():
            return "finished"
        return "running" if is_held(self.path / LOCK) else "stopped"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All whole rows of a .jsonl file of the run's; none where it is not there yet. Rows of metrics whose steps
        cannot be, or go back, are passed over; `proximo doctor` counts them."""
        found = self.rows_from(name, 0)[0]
        return in_order(found) if name == METRICS else found

    def rows_from(self, name: str, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Those after so many bytes, and how many bytes they end at. A file that has become shorter, since the run
        went on from an earlier step, is read from its beginning."""
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
                        rows.append(row)
                    if len(rows) > MAX_ROWS:
                        raise ValueError(f"{self.path / name} has more than {MAX_ROWS:,} rows: no run writes so many")
        except LinkedFile:
            raise
        except OSError:
            return [], 0
        return rows, offset

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) in order, without what is missing or not a number."""
        return [
            (row["step"], float(row[metric]))
            for row in self.rows(METRICS)
            if is_number(row.get("step")) and is_number(row.get(metric))
        ]

    def steps(self) -> list[int]:
        """Those whose rollouts are there."""
        found = (re.fullmatch(r"step-(\d+)\.parquet", path.name) for path in (self.path / ROLLOUTS).glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def step_file(self, number: int) -> Path:
        return self.path / ROLLOUTS / f"step-{number:06d}.parquet"

    def step(self, number: int) -> Step:
        path = self.step_file(number)
        try:
            status = path.stat()
        except OSError:
            steps = self.steps()
            there = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
            raise ValueError(f"{self.path} has no rollouts of step {number}: there are {there}") from None
        return _cached_step(path, number, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _cached_step(path: Path, number: int, changed: int, size: int) -> Step:
    """A run that is gone on with may write a step anew: then it is read anew."""
    return read_step(path, number)


def find_runs(root: Path) -> list[RunFolder]:
    """The folder itself, where it is a run's, or the runs below it, newest first."""
    if (root / "run.json").is_file():
        return [RunFolder(root)]
    found = sorted(_below(root, DEPTH), key=lambda path: (path / "run.json").stat().st_mtime, reverse=True)
    return [RunFolder(path) for path in found]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Run folders, and the stages inside of those that are chains."""
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in inside:
        if (path / "run.json").is_file():
            yield path
        if depth > 1 and path.name not in (ROLLOUTS, "checkpoints", "evidence"):
            yield from _below(path, depth - 1)


def decoded(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Rows; what is none is passed over."""
    return (row for line in lines if (row := to_row(line)) is not None)


def check_size(path: Path, size: int) -> None:
    """Refuse, in one line, what would fill the memory."""
    if size > MAX_BYTES:
        most = f"{MAX_BYTES >> 20} MiB"
        raise ValueError(
            f"{path} has {size >> 20:,} MiB, more than the {most} that are read at once: no run writes that"
        )


def _json(path: Path) -> dict[str, Any] | None:
    data = _read(path)
    return None if data is None else to_row(data)


def _text(path: Path) -> str:
    return (_read(path) or b"").decode(errors="replace")


def _read(path: Path) -> bytes | None:
    """None where there is no such file. A link is not followed, and said."""
    try:
        with open_file(path) as file:
            check_size(path, file.seek(0, 2))
            file.seek(0)
            return file.read(MAX_BYTES)
    except LinkedFile:
        raise
    except OSError:
        return None
