"""The lines at the end of a run, of the command line and of Python: what came of it, and what can be done next."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from proximo.insight.doctor.checkup import summary
from proximo.rl.progress import gain, measure, prompt_text, share
from proximo.rl.result import RunResult
from proximo.runs.banner import BannerLine, banner
from proximo.runs.checkpoints import step_of
from proximo.runs.records import Answered
from proximo.runs.step_profile import profile_lines, read_profile
from proximo.supervised.fitting import Fitted
from proximo.supervised.stage_model import StageOptions
from proximo.system.safe_text import counted, quoted, visible
from proximo.types import Problem

SHOWN = 3
"""Held-out problems whose answers are shown."""
UNWRAPPED = 10_000
"""Columns of lines that are to be copied, which a terminal may wrap itself."""
NEXT = {
    "sft": (
        "proximo eval {run} --data PROMPTS",
        "proximo train --model {run} --data PROMPTS",
        "proximo chat {run}",
        "proximo view {run}    curves in the browser",
    ),
    "reward-model": (
        "proximo train --model {model} --data PROMPTS --reward-model {run} --rewards.task 0",
        "proximo view {run}    curves in the browser",
    ),
    "dpo": (
        "proximo eval {run} --data PROMPTS",
        "proximo chat {run}",
        "proximo export {run}",
        "proximo view {run}    curves in the browser",
    ),
}
"""Commands that go on from a finished stage."""

BEGAN_WITH = "the checkpoint is the model it began with"
AGAIN_WITH = "try another --fit.learning-rate, or more data"
KEPT_START = {
    "sft": f"{BEGAN_WITH}; {AGAIN_WITH}",
    "reward-model": f"{BEGAN_WITH}, and a score head that was new is untrained: do not reward by it; {AGAIN_WITH}",
    "dpo": f"{BEGAN_WITH}; {AGAIN_WITH}",
}
"""Meaning of a result in which no step was better than the start, and a remedy."""
AGAIN = ("proximo doctor {run}", "proximo view {run}    curves in the browser")
"""Commands that go on from a stage that made nothing better."""


def run_ending(path: Path, outcome: RunResult) -> list[str]:
    """Lines on what came of a run of `train`: evaluations, a few answers, its findings, and what can follow."""
    lines = [*_evaluations(outcome), *_answers(outcome), *map(visible, summary(path)), *_profile(path)]
    if outcome.ended:
        lines.append(visible(outcome.ended))
    if outcome.last is not None:
        best = step_of(outcome.checkpoint)
        lines.append(f"the result is the best checkpoint, step {best}; the last is {outcome.last}")
    if outcome.better is not None:
        lines.append(f"better than the last: {outcome.better}")
    return [*lines, "", *banner(_next(path, outcome), UNWRAPPED)]


def _profile(path: Path) -> list[str]:
    """The table of a profile, if steps were measured."""
    with suppress(OSError, ValueError):
        profile = read_profile(path)
        return [] if profile is None else ["", *profile_lines(profile)]
    return []


def _evaluations(outcome: RunResult) -> list[str]:
    """The held-out evaluations before and after training, one below the other."""
    before, after = outcome.before, outcome.after
    if not before.problems:
        return []
    title = f"held-out {measure(before, after):<9}"
    then = f"{'':{len(title)}} after  {share(after, before)}{gain(before, after)}"
    return ["", f"{title} before {share(before, after)}", then, ""]


def _answers(outcome: RunResult) -> list[str]:
    """Held-out problems with the answers before and after training, of those whose task score has changed."""
    shown = [pair for pair in outcome.examples if pair[0].outcome != pair[1].outcome] or outcome.examples
    return [
        line
        for before, after in distinct(shown)[:SHOWN]
        for line in (
            f"  {quoted(prompt_text(before.problem))}{_expected(before.problem)}",
            f"    before {quoted(before.completion.text)}, after {quoted(after.completion.text)}",
        )
    ]


def distinct(pairs: Sequence[tuple[Answered, Answered]]) -> list[tuple[Answered, Answered]]:
    """The pairs of answers, of each prompt the first."""
    first: dict[str, tuple[Answered, Answered]] = {}
    for pair in pairs:
        first.setdefault(prompt_text(pair[0].problem), pair)
    return list(first.values())


def _expected(problem: Problem) -> str:
    """The answer expected to a problem, for a line about it; empty where none is known."""
    return "" if problem.answer is None else f", expected {quoted(problem.answer)}"


def _next(path: Path, outcome: RunResult) -> list[BannerLine]:
    """Labels and texts of what lies where, and of what can be done with it."""
    run, model = shlex.quote(str(path)), shlex.quote(str(outcome.checkpoint))
    steps = step_of(outcome.last or outcome.checkpoint)
    commands = {
        f"proximo view {run}": "curves and every rollout in the browser",
        f"proximo eval {model}": "again, or on other problems with --data",
        f"proximo chat {model}": "ask it yourself",
        f"proximo export {model} --out {run}-model": "for transformers, vLLM or llama.cpp",
    }
    if not outcome.ended:
        commands[f"proximo resume {run} --steps {2 * steps}"] = "train on"
    width = max(map(len, commands))
    shown = "\n".join(f"{command:<{width}}  {what}" for command, what in commands.items())
    return [("run folder", str(path)), ("the model", str(outcome.checkpoint)), ("next", shown)]


def stage_ending(command: str, path: Path, config: StageOptions, fitted: Fitted) -> list[str]:
    """Lines on what came of a stage that trains on a file, and the commands that go on from it."""
    lines = [
        f"held-out {name:<16} before {value:.4f}  best {fitted.best[name]:.4f}" for name, value in fitted.before.items()
    ]
    if fitted.before:
        lines.append(f"best after step {fitted.best_step} of {fitted.steps}{', stopped early' * fitted.stopped_early}")
    if fitted.before and fitted.best_step == 0:
        lines.append(f"held-out {config.fit.metric} never got better: {KEPT_START[command]}")
    if fitted.skipped:
        were = "was" if fitted.skipped == 1 else "were"
        lines.append(f"{counted(fitted.skipped, 'bad row')} {were} left out, see {path / 'events.jsonl'}")
    run, model = shlex.quote(str(path)), shlex.quote(config.model or "MODEL")
    shown = AGAIN if fitted.before and fitted.best_step == 0 else NEXT[command]
    following = [each.format(run=run, model=model) for each in shown]
    lines += [f"run folder  {path}", f"the model   {fitted.checkpoint}"]
    return [*lines, *(f"{'' if number else 'next':<11} {each}" for number, each in enumerate(following))]
