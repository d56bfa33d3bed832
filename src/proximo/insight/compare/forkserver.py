"""A process that has imported what a run needs and forks one for each run: importing takes ten seconds of a processor,
more than a short run.

python -m proximo.insight.compare.forkserver PARENT WORKER [MODULE …]

Each line of its input is a list, each answer a line: ["start", LOG, ARGUMENT, …] is answered with the number of a
process that does what `python -m WORKER ARGUMENT … PARENT` does, ["status", NUMBER] with its exit status, null as long
as it runs.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from proximo.processes.sandbox.kernel import die_with_parent
from proximo.system.opening import appending


def main(arguments: list[str]) -> int:
    parent, *modules = arguments
    die_with_parent()
    if os.getppid() != int(parent):  # the parent has already died
        return 1
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print when they are imported is no answer
    worker, *_ = [import_module(name) for name in modules]
    sys.stdout.flush()
    own = str(os.getpid())
    for line in sys.stdin:
        kind, *rest = json.loads(line)
        if kind == "status":
            answer = _status(*rest)
        elif (answer := os.fork()) == 0:
            answers.close()
            log, *given = rest
            _write_to(log)
            return worker.main([*given, own])
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _status(process: int) -> int | None:
    ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _write_to(log: str) -> None:
    """Become a process of its own session, without input, whose output goes to the log."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, appending(Path(log)) as file:
        for source, descriptor in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source.fileno(), descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
