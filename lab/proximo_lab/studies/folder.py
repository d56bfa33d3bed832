"""The folder of studies: designs stored before the runs, records of finished runs, and the pages.

NAME.json   the design and its hash, then the verdicts    NAME.md, NAME.svg   the page of a study and its figure
results/    a record of each finished run, which studies share
runs/, configs/, logs/   of runs in progress
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from proximo.config import toml
from proximo.insight.compare import ComparisonFolder, RunJob
from proximo.system.folders import write_file
from proximo.system.opening import make_folder, read_json
from proximo_lab.studies.protocols.from_disk import Courses, Stored, course_file
from proximo_lab.studies.record import Record, StudyJob, digest, read
from proximo_lab.studies.study import Study, design, design_hash

FOLDER, RESULTS, KNOWN = Path("runs/studies"), "results", "runs known before"


class OtherDesign(ValueError):
    """A study was stored with another design."""


class Laboratory:
    def __init__(self, folder: Path) -> None:
        self.folder, self.layout = folder, ComparisonFolder(folder)

    @classmethod
    def of(cls, run: Path) -> "Laboratory":
        """Laboratory of a run's folder."""
        return cls(run.parent.parent)

    def result(self, run: str) -> Path:
        return self.folder / RESULTS / f"{run}.json"

    def record(self, job: RunJob) -> Record | None:
        return read(self.result(job.name))

    def stored(self, study: Study) -> dict[str, Any] | None:
        """The stored record of a study; None if it was never started. OtherDesign if its design was another, ValueError
        if it cannot be read."""
        path = self._file(study)
        try:
            record = read_json(path)
            stored = record["hash"]
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ValueError(f"{self.folder} is no folder: give one with --out") from None
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged: move it away, or give another folder with --out") from None
        if stored != design_hash(study):
            raise OtherDesign(
                f"{path} was stored before the runs with the hash {str(stored)[:12]}, and the study's is now "
                f"{design_hash(study)[:12]}: what counts was changed, so give another folder with --out"
            )
        if digest(record.get("design")) != stored:
            raise ValueError(f"{path}: its design is not the one that was hashed: move it away, or give another --out")
        return record

    def settle(self, study: Study, known: int = 0) -> None:
        """Store the design and its hash, before any run, and the number of its runs that other studies have done."""
        if self.stored(study) is None:
            self._store(study, {KNOWN: known} if known else {})

    def conclude(self, study: Study, findings: dict[str, Any]) -> None:
        """Store the findings next to the design."""
        known = self.known(study)
        self._store(study, ({KNOWN: known} if known else {}) | findings)

    def known(self, study: Study) -> int:
        """Number of its runs that were done when its design was stored."""
        return (self.stored(study) or {}).get(KNOWN, 0)

    def _store(self, study: Study, findings: dict[str, Any]) -> None:
        record = {"hash": design_hash(study), **findings, "design": design(study)}
        make_folder(self.folder)
        write_file(self._file(study), (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())

    def prepare(self, jobs: Iterable[StudyJob]) -> None:
        """Write what the processes read, and make the folders that they write into."""
        for job in jobs:
            path = self.layout.config(job.contender)
            for folder in (path.parent, self.layout.run(job).parent, self.layout.log(job).parent):
                make_folder(folder)
            write_file(path, toml.dumps(job.config).encode())
            if job.course is not None:
                write_file(course_file(path), toml.dumps(Stored(cast("Courses", job.course))).encode())

    def _file(self, study: Study) -> Path:
        return self.folder / f"{study.label}.json"
