"""`proximo replay`: what other algorithms would have done with a stored step, token by token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers.utils.logging import disable_progress_bar

from proximo.algorithms import Algorithm
from proximo.cli.configs import algorithm_file
from proximo.cli.flags import refuse, say, take, take_several, take_switch
from proximo.cli.models import open_model
from proximo.cli.output.console import on_stdout
from proximo.cli.output.replay_output import Replayed, flipped, print_tables
from proximo.insight.folder import RunFolder
from proximo.insight.lens.gradients import ParameterGradients, check_tokens, half_gradients, parameter_gradients
from proximo.insight.lens.replay import FIVE, Comparison, chosen, compared, remarks, token_table
from proximo.insight.lens.steps import Step
from proximo.models.shipped import resolve
from proximo.system.folders import whole_file
from proximo.system.opening import make_folder, replacing, without_links

USAGE = """usage: proximo replay RUN --step N [--as NAME ...] [--pass N] [--model DIR [--halves]] [--out FILE] [--json]

Recompute a stored step under the run's own algorithm and under others, and compare: policy loss, clipped and gated
tokens, tokens that flip (have a gradient under one of the two only), where the gradient lies, and cosines between
the gradients with respect to the log-probs.
Code of your own that the run's config names is loaded if you have run it with this run before, or with --load-code.

--step N       step to recompute; its rollouts must be in the run folder.
--as NAME      algorithm to replay the step under: its name in `proximo explain --all`, or a .toml file with a run's
               config or an algorithm. Several may follow. Default: ppo, grpo, dapo, gspo and sapo.
--pass N       pass over the step's data, counted from 0 (default: the last).
--model DIR    also compute norms and cosines of the gradients with respect to the parameters of this model: a
               checkpoint of the run, or any model with the same tokens. RUN/checkpoints/step-N is the policy
               after step N, with which step N+1 began.
--halves       with --model: also the cosine between the gradients of two halves of the step's groups, which says how
               much of a gradient is the noise of the draw. Takes three times as long, and as much memory.
--out FILE     write one row per token and algorithm: state, ratio, gate, weight, advantage, gradient.
--json         print the numbers as JSON on stdout.

examples:
  proximo replay runs/a --step 10
  proximo replay runs/a --step 10 --as dapo mine.toml --out tokens.parquet
"""


def run(arguments: list[str]) -> int:
    """Replay a step and print the comparison; exit status 0."""
    if not arguments or set(arguments) & {"-h", "--help"}:
        print(USAGE, end="")
        return 0
    disable_progress_bar()
    as_json, out = take_switch(arguments, "--json"), take(arguments, "--out")
    if out is not None and Path(out).exists():
        refuse(f"--out {out}: the file exists; choose another name or remove it")
    try:
        replayed = _asked(arguments)
        if out is not None:
            _write(replayed, Path(out))
        if as_json:
            print(json.dumps(_data(replayed)))
        else:
            print_tables(replayed, on_stdout(140))
    except BrokenPipeError:  # whoever reads has gone
        raise
    except (ValueError, OSError) as error:
        refuse(str(error))
    if out is not None:
        say(f"written to {out}")
    return 0


def _asked(arguments: list[str]) -> Replayed:
    """Replay what the arguments name."""
    wanted, given, passed = take(arguments, "--step"), take(arguments, "--model"), take(arguments, "--pass")
    with_halves, names = take_switch(arguments, "--halves"), []
    while (more := take_several(arguments, "--as")) is not None:
        names += more
    if not arguments and names and Path(names[-1]).is_dir():  # the run, behind the last name
        arguments = [names.pop()]
    if with_halves and given is None:
        refuse("--halves compares gradients of a model's parameters: give --model DIR too")
    if len(arguments) != 1 or arguments[0].startswith("-"):
        what = "no run" if not arguments else " ".join(arguments)
        refuse(f"proximo replay takes one run's folder, not {what}: proximo replay RUN --step N [--as NAME ...]")
    run = RunFolder(Path(arguments[0]), own_code=True)
    if wanted is None:
        steps = run.steps()
        there = f"there are {steps[0]} to {steps[-1]}" if steps else "no rollouts are there yet"
        refuse(f"replay needs --step N: {there}")
    step = run.step(_whole("--step", wanted))
    number = step.passes - 1 if passed is None else _whole("--pass", passed)
    if passed is not None and number >= step.passes:
        refuse(f"--pass {number}: step {step.number} has {step.passes}, counted from 0")
    if given is None:
        torch.set_num_threads(1)  # more threads are no faster here, and slow a concurrent run down
    views = compared(step, run.config, _algorithms(run, names or FIVE), number=number)
    model = None if given is None else resolve(given)
    found = None if model is None else _through(model, run, step, views, number, with_halves)
    return Replayed(run, step, number, views, model, found)


def _algorithms(run: RunFolder, names: Sequence[str]) -> dict[str, Algorithm]:
    """The run's own algorithm first, then those of the names and of the files, in the order given."""
    found = chosen(run.config, [])
    for name in names:
        if not name.endswith(".toml"):
            found = found | chosen(run.config, [name])
            continue
        stem, number = Path(name).stem, 1
        while (unique := stem if number == 1 else f"{stem}-{number}") in found:
            number += 1
        found[unique] = algorithm_file(name)
    return found


def _whole(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        refuse(f"{flag} {text}: give a whole number, from 0 on")
    return int(text)


def _through(
    name: str, run: RunFolder, step: Step, views: Sequence[Comparison], number: int, with_halves: bool
) -> ParameterGradients:
    model, tokenizer = open_model(name, dtype=run.config.dtype)
    check_tokens(step, tokenizer)
    return (half_gradients if with_halves else parameter_gradients)(model, step, run.config, views, number=number)


def _write(replayed: Replayed, path: Path) -> None:
    path = without_links(path)
    make_folder(path.parent)
    with whole_file(path) as partial, replacing(partial) as file:
        pq.write_table(token_table(replayed.step, replayed.views), file)


def _data(replayed: Replayed) -> dict[str, Any]:
    gradients = replayed.gradients
    return {
        "run": str(replayed.run.path),
        "step": replayed.step.number,
        "pass": replayed.number,
        "passes": replayed.step.passes,
        "logged_policy_loss": replayed.logged,
        "remarks": remarks(replayed.step),
        "algorithms": [view.to_dict() for view in replayed.views],
        "flipped": flipped(replayed),
        "model": None if gradients is None else {"model": replayed.model} | gradients.to_dict(),
    }
