"""One run of a study in a separate process: trained as a comparison's run is, then reduced to its record.

python -m proximo.studies.worker CONFIG SEED DIR THREADS ONEDNN ACCEPT_LOST PARENT
"""

import sys
from pathlib import Path

from proximo.insight.compare import worker
from proximo.machine import Machine
from proximo.storage.folders import remove_folder
from proximo.studies.courses.stored import read_course
from proximo.studies.folder import Laboratory
from proximo.studies.record import Record, recorded, write
from proximo.training.config import RunConfig


def main(arguments: list[str]) -> int:
    course = read_course(Path(arguments[0]))
    found: list[Record] = []

    def work(config: RunConfig, folder: Path, machine: Machine, accept_lost: bool) -> None:
        if course is None:
            worker.train_one(config, folder, machine, accept_lost)
        found.append(recorded(folder) if course is None else course.run(config, folder, machine))

    status = worker.main(arguments, work)
    if status == 0:
        folder = Path(arguments[2])
        write(Laboratory.of(folder).result(folder.name), found[0])
        remove_folder(folder)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
