"""`proximo replay`: what other algorithms would have done with a stored step, token by token."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proximo.algorithms import Algorithm
from proximo.cli.arguments import refuse, refusing, say, take, take_several, take_switch
from proximo.cli.configs import algorithm_file
from proximo.cli.models import on_stdout, open_model
from proximo.insight.folder import RunFolder
from proximo.insight.lens.explanations import why
from proximo.insight.lens.gradients import ParameterGradients, check_tokens, half_gradients, parameter_gradients
from proximo.insight.lens.replay import FIVE, ComparedAlgorithm, chosen, compared, max_flipped, remarks, token_table
from proximo.insight.lens.steps import StoredStep
from proximo.insight.lens.turns import episodes_in_words, place_in_words
from proximo.models.shipped import resolve
from proximo.rl.config import RunConfig
from proximo.system.folders import whole_file
from proximo.system.opening import make_folder, replacing, without_links
from proximo.system.safe_text import quoted, visible

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


SHOWN = 3
"""Flipped tokens that are printed."""
UPDATE = ("", "policy loss", "clipped", "blocked", "flips", "cosine")
UPDATE_LEGEND = """clipped: mean share of the gradient taken from tokens with an advantage
blocked: share of those tokens that get no gradient at all
flips: tokens with a gradient under the run's algorithm only, or under this one only
cosine: with the run's own gradient with respect to the log-probs
"""
GRADIENT = ("", "A>0", "A<0", "short", "middle", "long", "norm", "KL")
GRADIENT_LEGEND = """shares of the policy loss's Σ|dL/dlogprob|, by sign and by thirds of length
norm: relative to the run's own; KL: its share of the total gradient on the log-probs
"""
"""Legend of the second table. Both tables fit into 80 columns."""


@dataclass(frozen=True)
class Replayed:
    """A step under several algorithms, the run's own first."""

    run: RunFolder
    step: StoredStep
    number: int
    """Index of the pass over the data."""
    views: Sequence[ComparedAlgorithm]
    model: str | None
    """Model folder; for a run, its newest checkpoint."""
    gradients: ParameterGradients | None

    @property
    def logged(self) -> float | None:
        """The policy loss that the run logged."""
        return dict(self.run.curve("policy_loss")).get(self.step.number)


def run(arguments: list[str]) -> int:
    """Replay a step and print the comparison; exit status 0."""
    if not arguments:
        print(USAGE, end="")
        return 0
    as_json, out = take_switch(arguments, "--json"), take(arguments, "--out")
    if out is not None and Path(out).exists():
        refuse(f"--out {out}: the file exists; choose another name or remove it")
    with refusing(OSError):
        replayed = _asked(arguments)
        if out is not None:
            _write(replayed, Path(out))
        if as_json:
            print(json.dumps(_data(replayed)))
        else:
            print_tables(replayed, on_stdout(140))
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
    config = run.config_at(step.number)
    views = compared(step, config, _algorithms(config, names or FIVE), number=number)
    model = None if given is None else resolve(given)
    gradients = None if model is None else _through(model, run, step, views, number, with_halves)
    return Replayed(run, step, number, views, model, gradients)


def _algorithms(config: RunConfig, names: Sequence[str]) -> dict[str, Algorithm]:
    """The run's own algorithm first, then those of the names and of the files, in the order given."""
    algorithms = chosen(config, [])
    for name in names:
        if not name.endswith(".toml"):
            algorithms = algorithms | chosen(config, [name])
            continue
        stem, number = Path(name).stem, 1
        while (unique := stem if number == 1 else f"{stem}-{number}") in algorithms:
            number += 1
        algorithms[unique] = algorithm_file(name)
    return algorithms


def _whole(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        refuse(f"{flag} {text}: give a whole number, from 0 on")
    return int(text)


def _through(
    name: str, run: RunFolder, step: StoredStep, views: Sequence[ComparedAlgorithm], number: int, with_halves: bool
) -> ParameterGradients:
    model, tokenizer = open_model(name, dtype=run.config.dtype)
    check_tokens(step, tokenizer)
    gradients = half_gradients if with_halves else parameter_gradients
    return gradients(model, step, run.config_at(step.number), views, number=number)


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


# What is printed


def flipped(replayed: Replayed) -> list[dict[str, Any]]:
    """Print one flipped token per algorithm, with the reasons under both."""
    base, step = replayed.views[0], replayed.step
    rows = []
    for view in replayed.views[1:]:
        for row, token in max_flipped(view, base, 1):
            reasons = {each.name: why(step, each.seen, row, token) for each in (base, view)}
            position = {"row": row, "token": token, "turn": place_in_words(step.turns[row], token) or None}
            rows.append({"algorithm": view.name, **position, "piece": step.pieces[row][token], "why": reasons})
    return rows


def print_tables(replayed: Replayed, console: Console) -> None:
    step, base = replayed.step, replayed.views[0]
    rows, tokens = int(base.rows.sum()), int(step.batch.sampled_lengths[base.rows].sum())
    which = f", pass {replayed.number} (0 to {step.passes - 1})" if step.passes > 1 else ""
    console.print(
        Text(f"step {step.number} of {visible(str(replayed.run.path))}{which}", style="bold"),
        Text(f"{rows} completions, {tokens} tokens in the updates{episodes_in_words(step.turns)}"),
        sep="\n",
    )
    for line in remarks(step):
        console.print(Text(visible(line), style="yellow"), soft_wrap=True)
    if not rows:
        return
    if base.policy_loss is not None and replayed.logged is not None:
        away = abs(base.policy_loss - replayed.logged)
        console.print(Text(f"logged policy loss {_number(replayed.logged)}; replayed, it differs by {away:.1g}"))
    console.print("", _update_table(replayed.views), Text(UPDATE_LEGEND, style="dim"), sep="\n")
    console.print(_gradient_table(replayed.views), Text(GRADIENT_LEGEND, style="dim"), sep="\n")
    _print_cosines(console, "cosines between the gradients with respect to the log-probs", _cosines(replayed.views))
    _print_gradients(console, replayed)
    _print_notes(console, replayed.views)
    _print_flipped(console, replayed)


def _update_table(views: Sequence[ComparedAlgorithm]) -> Table:
    table = _grid(UPDATE)
    for view in views:
        flips = "" if view.is_own else f"{view.closed + view.opened} ({_share(view.flips)})"
        shares = (_share(view.held_back), _share(view.blocked))
        table.add_row(_label(view), _number(view.policy_loss), *shares, flips, _number(view.cosine))
    return table


def _gradient_table(views: Sequence[ComparedAlgorithm]) -> Table:
    table = _grid(GRADIENT)
    for view in views:
        norm = _number(view.norm / views[0].norm if views[0].norm else math.nan)
        kl = "" if view.seen.algorithm.kl is None else _share(view.kl)
        table.add_row(_label(view), *map(_share, (view.positive, view.negative, *view.thirds)), norm, kl)
    return table


def _grid(head: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(head):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _label(view: ComparedAlgorithm) -> Text:
    return Text(f"{view.name} (the run)", "bold") if view.is_own else Text(view.name)


def _cosines(views: Sequence[ComparedAlgorithm]) -> Mapping[str, Mapping[str, float]]:
    return {view.name: view.cosines for view in views}


def _print_cosines(console: Console, title: str, cosines: Mapping[str, Mapping[str, float]]) -> None:
    if len(cosines) < 2:
        return
    table = _grid(("", *cosines))
    for name, row in cosines.items():
        table.add_row(name, *(_number(value) for value in row.values()))
    console.print(Text(title, style="bold"), table, "", sep="\n")


def _print_gradients(console: Console, replayed: Replayed) -> None:
    gradients = replayed.gradients
    if gradients is None:
        return
    start = "the policy that the step began with" if gradients.is_policy else "not the policy that the step began with"
    line = f"its log-probs are {gradients.first_gap:.2g} away from those that the step's first update saw, in the mean,"
    line += f" and {gradients.gap:.2g} over the pass: {start}"
    console.print(Text(f"{visible(str(replayed.model))}: {line}"), soft_wrap=True)
    norms = ", ".join(f"{name} {_number(value)}" for name, value in gradients.norms.items())
    console.print(Text(f"norms: {norms}"), soft_wrap=True)
    if gradients.halves:
        halves = ", ".join(f"{name} {_number(value)}" for name, value in gradients.halves.items())
        console.print(Text(f"cosines between two halves of the groups: {halves}"), soft_wrap=True)
    _print_cosines(console, "cosines between the gradients with respect to its parameters", gradients.cosines)


def _print_notes(console: Console, views: Sequence[ComparedAlgorithm]) -> None:
    """Notes, each with the algorithms it applies to."""
    about: dict[str, list[str]] = {}
    for view in views:
        for note in view.seen.notes:
            about.setdefault(note, []).append(view.name)
    for note, names in about.items():
        console.print(Text(f"{', '.join(names)}: {visible(note)}", style="dim"), soft_wrap=True)


def _print_flipped(console: Console, replayed: Replayed) -> None:
    for each in flipped(replayed)[:SHOWN]:
        row, token = each["row"], each["token"]
        turn = f"{each['turn']}, " if each["turn"] else ""
        piece, around = quoted(each["piece"], 40), _around(replayed.step, row, token)
        title = f"token {token} of completion {row}, {turn}{piece} in {around}"
        console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
        for name, words in each["why"].items():
            console.print(Text(f"  {name}: {visible(words)}"), soft_wrap=True)


def _around(step: StoredStep, row: int, token: int) -> str:
    pieces = step.pieces[row]
    return quoted(step.prompt[row][-30:] + "".join(pieces[max(token - 20, 0) : token + 5]), 80)


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"
