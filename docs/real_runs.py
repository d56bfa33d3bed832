"""Real runs for the pictures and the gallery: made in a folder that is kept, or in a temporary one.

`--runs DIR` keeps them, and the same command goes on with what is there; the gallery and the pictures share what both
show. With `--finished` nothing is trained: what is finished there is shown.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from code_problems import write_problems

DEMO = ("train --algorithm grpo --steps 60 --evaluation.every 10 --run runs/grpo",)
CODE = (
    "sft examples.jsonl --model tiny-arithmetic --fit.epochs 20 --fit.learning-rate 1e-3 --run runs/coder",
    "train --model runs/coder --task.type Code --task.path problems.jsonl --sampling.max-tokens 32 --steps 40 "
    "--run runs/code",
)
"""Commands that both show."""


@contextmanager
def folder_of_runs(description: str | None) -> Iterator[tuple[Path, bool]]:
    """The folder that the command line names, or a temporary one, with the data that runs need; and whether runs are
    to be made in it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", help="where the runs are made and kept")
    parser.add_argument("--finished", action="store_true", help="train nothing: show what is finished there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(given.runs or temporary).resolve()
        home.mkdir(parents=True, exist_ok=True)
        write_problems(home)
        yield home, not given.finished


def make(home: Path, commands: Sequence[str]) -> None:
    """Run commands of `proximo` one after the other; each that is finished already ends at once."""
    for command in commands:
        print(f"proximo {command}", flush=True)
        subprocess.run([sys.executable, "-m", "proximo.cli", *command.split()], cwd=home, check=True)
