"""The five algorithms side by side, and GSPO once more with a band that fits three-token answers.

    python -m experiments.five [--run runs/five] [--jobs N] [--seeds 3]

The same as `proximo compare five` with one contender more, without the command line's dependencies. The same command
goes on with what is there. docs/studies/five.md has the results.
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from proximo.algorithms import GSPO
from proximo.insight.compare import (
    JSON,
    MARKDOWN,
    PAGE,
    Place,
    at_once,
    fair_line,
    gathered,
    is_finished,
    make_plan,
    run_jobs,
    verdict_lines,
    write_reports,
)
from proximo.machine import machine_for
from proximo.maths import Clip
from proximo.models.shipped import resolve
from proximo.presets import FIVE
from proximo.storage.locks import FolderLock

WIDE = "gspo-wide"
BAND = Clip(0.03, 0.04)
"""A hundred times GSPO's: about as wide as its ratio spreads over three tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/five"))
    parser.add_argument("--jobs", type=int, help="runs at a time; as many as the cores allow")
    parser.add_argument("--seeds", type=int, default=FIVE.seeds)
    parser.add_argument("--copy-to", type=Path, help="where the three reports are copied in the end")
    options = parser.parse_args()
    configs = dict(FIVE.configs)
    configs[WIDE] = replace(configs["gspo"], algorithm=replace(GSPO, gate=BAND))
    plan, place = make_plan(list(configs.items()), options.seeds, None), Place(options.run)
    machines = {each.name: machine_for(_parameters(each.config.model)) for each in plan.contenders}
    most = options.jobs or at_once([each.config for each in plan.contenders], machines.values())
    lock = FolderLock(options.run)
    try:
        place.check(plan)
        left = [job for job in plan.jobs() if not is_finished(job, place)]
        command = f"python -m experiments.five --seeds {options.seeds}"
        machines = place.settle(plan, machines, command.split())
        failures = run_jobs(
            left,
            place,
            machines,
            most,
            started=lambda job: print(f"{job}: started", flush=True),
            ended=lambda job, failure: print(f"{job}: {failure.message if failure else 'done'}", flush=True),
        )
        result = gathered(plan, place, failures, command)
        write_reports(options.run, result)
    finally:
        lock.release(remove_empty=True)
    for name in (JSON, MARKDOWN, PAGE) if options.copy_to else ():
        shutil.copy(options.run / name, options.copy_to)
    print("\n".join([*verdict_lines(result), "", fair_line(result)]))
    if failures:
        raise SystemExit(1)


def _parameters(model: str) -> int:
    """Of the shipped model, by the size of its weights in float32."""
    return sum(file.stat().st_size for file in Path(resolve(model)).glob("*.safetensors")) // 4


if __name__ == "__main__":
    main()
