"""`proximo eval`: measure the accuracy of one or more models, next to each other."""

import json
from dataclasses import replace
from pathlib import Path

from proximo.api.evaluating import (
    EvalConfig,
    evaluated,
    on_all,
    on_data,
    own_evaluation,
    shipped_evaluation,
    task_name,
)
from proximo.api.evaluation.files import check_file, write_rows
from proximo.api.evaluation.models import Candidate, candidates
from proximo.api.evaluation.results import ModelResult
from proximo.api.evaluation.table import pass_line, table
from proximo.api.rehearsing import evaluation_plan, evaluation_text
from proximo.cli.arguments import asks_for_help, refusing, say, take, take_list, take_models, take_several, take_switch
from proximo.cli.data import is_rewarded, take_environment, take_task
from proximo.cli.flags import changed
from proximo.config import toml
from proximo.rl.progress import measure, share

HELP = """arguments of the command itself:
  MODEL ...            folders, run folders, checkpoints, hub ids or model names. A run brings its own settings; with
                       several models the first run's settings apply to all, so that all are asked the same
  --checkpoints STEPS  evaluate these checkpoints of each run instead of the newest: all, or steps such as 20 40
  --data DATA          ask every row of a file, folder or hub id (see proximo train --help); a run on a file keeps its
                       columns and its reward
  --out FILE           write every completion to FILE, which ends in .jsonl, .json or .parquet
  --dry-run            check the models and data, and print what would be asked, without loading weights
  --json               print the result as JSON on stdout: an object, or a list of them for several models
examples:
  proximo eval tiny-arithmetic
  proximo eval runs/a --problems 200 --samples 8
  proximo eval runs/a runs/b --checkpoints all --out answers.jsonl
  proximo eval runs/a --data test.jsonl --dry-run
"""


def run(arguments: list[str]) -> int:
    as_json, dry_run = take_switch(arguments, "--json"), take_switch(arguments, "--dry-run")
    checkpoints, out = take_list(arguments, "--checkpoints", str.isdigit), take(arguments, "--out")
    names = take_models(arguments, "proximo eval")
    with refusing():
        models = candidates(names, None if checkpoints is None else ",".join(checkpoints))
        config = _config(names, arguments)
        if out is not None:
            check_file(Path(out))
        if dry_run:
            _print_plan(models, config, as_json)
            return 0
        results = _evaluated(models, config, out)
    _print(results, as_json)
    return 0


def _print_plan(models: list[Candidate], config: EvalConfig, as_json: bool) -> None:
    """Print what would be asked; what the evaluation would refuse before it loads weights is refused."""
    labelled, notes = evaluation_plan(models, config)
    if as_json:
        texts = [f"{label}: {text}" for label, text in labelled if text]
        print(json.dumps({"config": toml.plain(config), "notes": [*texts, *notes]}))
        return
    print("\n".join(evaluation_text(labelled, notes)))


def _config(names: list[str], arguments: list[str]) -> EvalConfig:
    """One config for all models: that of the first run among them, with the flags' changes."""
    base = None
    for name in names:
        its, source = own_evaluation(name)
        if source is None:
            continue
        if base is None:
            say(source)
            base = its
        elif its.task != base.task:
            say(f"{name} was trained on another task ({task_name(its.task)}): it is asked the same as the others")
    if base is None:
        base = _without_run(names, arguments)
    return changed(
        _on_given(base, names[0] if names else "", arguments),
        arguments,
        prog="proximo eval",
        usage="MODEL ... [--checkpoints STEPS] [--data DATA] [--out FILE] [--dry-run] [--json]",
        description="Measure the accuracy of one or more models on a task's held-out problems.",
        help_more=HELP,
    )


def _without_run(names: list[str], arguments: list[str]) -> EvalConfig:
    """The config where no run brings its own: the flags name the problems, or the model is one that ships."""
    if asks_for_help(arguments) or any(each.startswith(("--data", "--task.type")) for each in arguments):
        return EvalConfig()
    config, source = shipped_evaluation(names[0])
    say(source)
    return config


def _on_given(base: EvalConfig, model: str, arguments: list[str]) -> EvalConfig:
    """The config on what --data names: read by the run's own task where that reads a file, else recognised."""
    data = take_several(list(arguments), "--data")
    if data is not None and len(data) == 1 and Path(data[0]).is_file() and (on_file := on_data(base, data[0])):
        take_several(arguments, "--data")
        say(f"asked instead: every row of {data[0]}")
        return on_file
    played = replace(base, environment=take_environment(arguments, base.environment, prog="proximo eval"))
    task = take_task(
        arguments,
        model,
        rewarded=is_rewarded(base.rewards, played.environment),
        watched=base.rewards.only_watches,
        held_out=1.0,
    )
    return base if task is None else on_all(played, task)


def _evaluated(models: list[Candidate], config: EvalConfig, out: str | None) -> list[ModelResult]:
    """All results, one model after the other; the file holds what is done so far."""
    results: list[ModelResult] = []
    for model in models:
        result, failures = evaluated(model.name, config, model.label)
        for failure in failures:
            say(f"warning: {failure}")
        results.append(result)
        if len(models) > 1:
            say(f"{model.label}: {measure(result.evaluation)} {share(result.evaluation)}")
        if out is not None:
            write_rows(Path(out), [row for each in results for row in each.rows()])
    return results


def _print(results: list[ModelResult], as_json: bool) -> None:
    first, *others = results
    if as_json:
        rows = [first.to_dict(), *(result.to_dict(first) for result in others)]
        print(json.dumps(rows if others else rows[0]))
    elif others:
        print("\n".join(table(results)))
    else:
        print(f"held-out {measure(first.evaluation)} {share(first.evaluation)}")
        if line := pass_line(first):
            print(line)
