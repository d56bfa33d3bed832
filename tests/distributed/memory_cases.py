"""A rank of a run whose rank 1 has less memory: a pass over more tokens than it holds fails there, in the middle.

`python -m tests.distributed.memory_cases TOKENS ARGUMENT ...` is `proximo ARGUMENT ...` on such a machine.
"""

import os
import sys
from typing import Any

from proximo.cli import main
from proximo.learner import passes


def starve(most: int) -> None:
    whole = passes.score_rows

    def scored(model: Any, rows: Any, **options: Any) -> Any:
        found = whole(model, rows, **options)  # layers have been gathered, and the others wait for the backward pass
        if int(rows.lengths.sum()) + sum(map(len, rows.prompts)) > most:
            raise MemoryError("out of memory")
        return found

    passes.score_rows = scored


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        starve(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
