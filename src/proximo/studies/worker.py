"""One run of a study in a separate process: trained as a comparison's run is, then reduced to its record.

python -m proximo.studies.worker CONFIG SEED DIR THREADS ONEDNN ACCEPT_LOST PARENT
"""

import sys
from pathlib import Path

from proximo.insight.compare import worker
from proximo.storage.folders import remove_folder
from proximo.studies.folder import Laboratory
from proximo.studies.record import recorded, write


def main(arguments: list[str]) -> int:
    status = worker.main(arguments)
    if status == 0:
        folder = Path(arguments[2])
        write(Laboratory.of(folder).result(folder.name), recorded(folder))
        remove_folder(folder)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
