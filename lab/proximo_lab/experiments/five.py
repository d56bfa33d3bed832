"""The five algorithms side by side, and GSPO once more with a band that fits three-token answers.

    python -m proximo_lab.experiments.five [--run runs/five] [--jobs N] [--seeds 3]

The same as `proximo compare five` with one contender more, without the command line's dependencies. The same command
does the runs that are missing. docs/studies/five.md has the results.
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from proximo.algorithms import GSPO
from proximo.api.comparing import Lines, checked_plan, compared
from proximo.api.messages import say
from proximo.insight.compare import JSON, MARKDOWN, PAGE, fair_line, verdict_lines
from proximo.losses import Clip
from proximo.recipes.presets import FIVE

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
    plan = checked_plan(list(configs.items()), options.seeds, None)
    command = f"python -m proximo_lab.experiments.five --seeds {options.seeds}"
    result, failures = compared(plan, options.run, options.jobs, command, Lines(say))
    for name in (JSON, MARKDOWN, PAGE) if options.copy_to else ():
        shutil.copy(options.run / name, options.copy_to)
    print("\n".join([*verdict_lines(result), "", fair_line(result)]))
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
