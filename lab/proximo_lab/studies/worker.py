"""One run of a study in a separate process: trained as a comparison's run is, then reduced to its record.

python -m proximo_lab.studies.worker CONFIG SEED DIR THREADS ONEDNN ACCEPT_LOST TRACKERS ALLOWED PARENT
"""

import sys
from pathlib import Path

from proximo.insight.compare import worker
from proximo.rl.config import RunConfig
from proximo.system.folders import remove_folder
from proximo.system.machine import Machine
from proximo_lab.studies.folder import Laboratory
from proximo_lab.studies.protocols.from_disk import read_course
from proximo_lab.studies.record import Record, recorded, write


def main(arguments: list[str]) -> int:
    course = read_course(Path(arguments[0]))
    records: list[Record] = []

    def work(config: RunConfig, folder: Path, machine: Machine, accept_lost: bool) -> None:
        if course is None:
            worker.train_one(config, folder, machine, accept_lost)
        records.append(recorded(folder) if course is None else course.run(config, folder, machine))

    status = worker.main(arguments, work)
    if status == 0:
        folder = Path(arguments[2])
        write(Laboratory.of(folder).result(folder.name), records[0])
        remove_folder(folder)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
