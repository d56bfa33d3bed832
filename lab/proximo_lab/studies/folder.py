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
from proximo.insight.compare import Job, Place
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
        self.folder, self.place = folder, Place(folder)

    @classmethod
    def of(cls, run: Path) -> "Laboratory":
        """That of a run's folder."""
        return cls(run.parent.parent)

    def result(self, run: str) -> Path:
        return self.folder / RESULTS / f"{run}.json"

    def record(self, job: Job) -> Record | None:
        return read(self.result(job.name))

    def facts(self, study: Study) -> dict[str, Any] | None:
        """The stored facts of a study; None if it was never started. OtherDesign if its design was another, ValueError
        if they cannot be read."""
        path = self._facts(study)
        try:
            facts = read_json(path)
            stored = facts["hash"]
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
        if digest(facts.get("design")) != stored:
            raise ValueError(f"{path}: its design is not the one that was hashed: move it away, or give another --out")
        return facts

    def settle(self, study: Study, known: int = 0) -> None:
        """Store the design and its hash, before any run, and how many of its runs other studies have done."""
        if self.facts(study) is None:
            self._store(study, {KNOWN: known} if known else {})

    def conclude(self, study: Study, found: dict[str, Any]) -> None:
        """Store the findings next to the design."""
        known = self.known(study)
        self._store(study, ({KNOWN: known} if known else {}) | found)

    def known(self, study: Study) -> int:
        """How many of its runs were done when its design was stored."""
        return (self.facts(study) or {}).get(KNOWN, 0)

    def _store(self, study: Study, found: dict[str, Any]) -> None:
        facts = {"hash": design_hash(study), **found, "design": design(study)}
        make_folder(self.folder)
        write_file(self._facts(study), (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode())

    def prepare(self, jobs: Iterable[StudyJob]) -> None:
        """What the processes read and write."""
        for job in jobs:
            path = self.place.config(job.contender)
            for folder in (path.parent, self.place.run(job).parent, self.place.log(job).parent):
                make_folder(folder)
            write_file(path, toml.dumps(job.config).encode())
            if job.course is not None:
                write_file(course_file(path), toml.dumps(Stored(cast("Courses", job.course))).encode())

    def _facts(self, study: Study) -> Path:
        return self.folder / f"{study.label}.json"
