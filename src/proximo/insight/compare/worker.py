"""One run of a comparison in a separate process: like `proximo train CONFIG --seed N --run DIR`, with the machine
settings that all runs of the comparison share, so that equal runs give equal bits.

python -m proximo.insight.compare.worker CONFIG SEED DIR THREADS ONEDNN ACCEPT_LOST TRACKERS ALLOWED PARENT
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from proximo.algorithms import explain
from proximo.config import toml
from proximo.processes import tree
from proximo.rl.config import RunConfig, loads_run
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.config_changes import allowed_in
from proximo.runs.session import open_session
from proximo.runs.tracking.processes import tracked
from proximo.system.machine import Machine
from proximo.system.opening import read_text
from proximo.system.safe_text import MAX_SHOWN, visible
from proximo.system.secrets import masked

Work = Callable[[RunConfig, Path, Machine, bool], None]
"""Work of a process, given a config, a folder, the machine's settings, and whether lost rows of a log are accepted."""


def main(arguments: list[str], work: Work | None = None) -> int:
    """`work`: what is done in the place of training by the config."""
    path, seed, folder, threads, onednn, accept_lost, trackers, allowed, parent = arguments
    if not tree.end_with(int(parent)):
        return 1
    disable_progress_bar()
    sys.argv = ["proximo", "train", path, "--seed", seed, "--run", folder]  # the command that the run's record shows
    try:
        config = replace(loads_run(read_text(Path(path)), path), seed=int(seed))
        (work or partial(train_one, trackers=json.loads(trackers), allowed=json.loads(allowed)))(
            config, Path(folder), Machine(int(threads), bool(int(onednn))), bool(int(accept_lost))
        )
    except (OSError, ValueError) as error:
        _log(f"error: {error}")
        return 1
    return 0


def train_one(
    config: RunConfig,
    folder: Path,
    machine: Machine,
    accept_lost: bool = False,
    trackers: Sequence[str] = (),
    allowed: Sequence[str] = (),
) -> None:
    """Start or resume the run; a finished one is left as it is."""
    text = toml.dumps(config)
    named, allowed = explain.named(config.algorithm), allowed_in(folder, text, allowed)
    with open_session(folder, text, allowed=allowed, algorithm=named, accept_lost=accept_lost) as session:
        if session.result is None:
            (session.machine or machine).apply()
            if session.other_code is not None:
                _log(f"warning: {session.other_code}")
            with tracked(folder, trackers, _log):
                train(Run(config, folder, ProgressLines()), session)


def _log(message: str) -> None:
    """Print a line into the run's log, without secrets."""
    print(visible(masked(message), MAX_SHOWN), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
